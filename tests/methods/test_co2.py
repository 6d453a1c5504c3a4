"""CO2's own: where its outer step settles, and its sharded outer state, which is the same training,
wherever the state lies and whenever it moves."""

import re
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import co2
import train
from co2.comm import clocks, flat
from co2.comm.background_mean import BackgroundMean
from co2.comm.flat import FlatParams
from co2.methods.shared.outer_step import GapPenalty
from co2.train.schedule import learning_rate
from tests.grids import grid, nonempty
from tests.methods import problem
from tests.methods.driver import SETTINGS, Session, assert_same, drifted
from tests.methods.test_wire import comm
from tests.server import environment, fork_program
from tests.workers import replicas

# The outer step settles where β + α/Λ < 1, and warns where it does not (docs/choosing.md).

MANY = 60


def settled(settings: dict[str, object], rates: tuple[float, float]) -> tuple[list[float], list]:
    """The starts of all rounds on ½ x² from x = 1, and what the method had to say.

    Plain gradient steps at rate 1 solve it at once, so a round removes all of the distance, K = 1.
    The rates are those of the first and of the last round.
    """
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    model = nn.ParameterList([weight])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    method = co2.CO2(co2.CO2.Config(tau=2, **settings))  # type: ignore[arg-type]
    method.prepare(model, optimizer, co2.Mesh.world())
    starts, notices = [], []
    for number in range(MANY):
        share = number / (MANY - 1)
        for group in optimizer.param_groups:
            group["lr"] = rates[0] ** (1 - share) * rates[1] ** share
        for _ in range(2):
            weight.grad = weight.detach().clone()
            method.step()
        notices += method.notices()
        starts.append(weight.item())
    method.flush()
    return starts, notices


@pytest.mark.parametrize(
    ("gap", "beta", "alpha"),
    [(2.0, 0.2, 1.0), (3.0, 0.4, 1.0), ("none", 0.2, 0.7), ("gap_aware_steady", 0.2, 1.0)],
)
def test_below_one_it_settles(gap: str | float, beta: float, alpha: float) -> None:
    settings = {"gap_penalty": gap, "outer_momentum": beta, "outer_lr": alpha}
    starts, notices = settled(settings, (1.0, 1.0))
    assert abs(starts[-1]) < 0.05 and notices == []


@pytest.mark.parametrize(("gap", "beta", "alpha"), [("none", 0.2, 1.0), (2.0, 0.6, 1.0)])
def test_above_one_it_does_not_and_says_so_once(
    gap: str | float, beta: float, alpha: float
) -> None:
    settings = {"gap_penalty": gap, "outer_momentum": beta, "outer_lr": alpha}
    starts, notices = settled(settings, (1.0, 1.0))
    assert max(map(abs, starts[-6:])) > max(map(abs, starts[6:12])) > 1
    (notice,) = notices
    assert f"{beta:g} + {alpha:g}/" in notice and "not below 1" in notice


def test_the_gap_fades_with_the_rate_and_the_steady_one_does_not() -> None:
    """At 0.9 and 0.5 a round of two steps still removes 99 and 75 % of the distance."""
    settings = {"outer_momentum": 0.2, "outer_lr": 1.0}
    _, faded = settled({"gap_penalty": "gap_aware", **settings}, (1.0, 0.1))
    _, steady = settled({"gap_penalty": "gap_aware_steady", **settings}, (1.0, 0.1))
    assert len(faded) == 1 and "gap_aware_steady" in faded[0]
    assert steady == []


SHIPPED = [
    f"task={task} scale={scale}{' launch.workers=8 train.batch_size=1' if scale == 'paper' else ''}"
    for path in nonempty(sorted(Path("conf/task/scale").glob("*.yaml")))
    for task, scale in [path.stem.split("_")]
]


@pytest.mark.parametrize("words", SHIPPED)
def test_what_is_shipped_settles(words: str) -> None:
    """At the last step, too, where the rate is lowest."""
    config = train.APP.config(["resume=never", "method=co2", *words.split()])
    own: Any = config.method_config
    weight = nn.Parameter(torch.ones(1))
    gap = GapPenalty(own.gap_penalty, FlatParams(torch.optim.SGD([weight])))
    gap.observe_lr(1.0)
    last = gap.usual(learning_rate(config.train.steps - 1, config.optim, config.train.steps))
    assert own.outer_momentum + own.outer_lr / last < 1


# The sharded outer state.

TAU = 3
ROUNDS = 5
STEPS = ROUNDS * TAU
PLAIN = SETTINGS["co2"]
SHARDED = {**PLAIN, "shard": True}
ELEMENTWISE = {**SHARDED, "gap_penalty": "gap_aware_elementwise", "clip": 0.2, "clip_mode": "norm"}
BARE = {**SHARDED, "gap_penalty": "none", "clip": None}

# Sizes of the parameters, elements of a bucket, and the rows and the piece that they make on 1, 2,
# 3 and 4 replicas.
LAYOUTS: list[tuple[list[int], int, list[tuple[int, int]]]] = [
    ([6, 6, 6], 10, [(2, 9), (2, 5), (2, 3), (2, 3)]),
    ([20], 10, [(2, 10), (2, 5), (2, 4), (2, 3)]),
    ([7, 3, 7, 3], 8, [(3, 7), (3, 4), (3, 3), (3, 2)]),
    ([5], 1, [(5, 1), (3, 1), (2, 1), (2, 1)]),
    ([1], 100, [(1, 1)] * 4),
    ([3, 4], 100, [(1, 7), (1, 4), (1, 3), (1, 2)]),
    ([50, 7], 16, [(4, 15), (4, 8), (4, 5), (4, 4)]),
]


@replicas()
@pytest.mark.parametrize("world", grid([1, 2, 3, 4], (3).__eq__))
def test_every_layout(rank: int, world: int) -> None:
    """Every one trains as the plain path does, and its padding stays zero."""
    for sizes, bucket, shapes in LAYOUTS:
        for fields in (BARE, ELEMENTWISE):
            plain, _ = drifted(rank, ("co2", {**fields, "shard": False}), sizes, 3 * TAU)
            history, method = drifted(rank, ("co2", fields), sizes, 3 * TAU, comm(bucket))
            torch.testing.assert_close(history, plain, rtol=1e-12, atol=1e-12)
            assert tuple(method.anchor.shape) == shapes[world - 1]
            buffer, numel = method.mean.buffer, sum(sizes)
            assert numel <= buffer.numel() < numel + world * len(method.shard.chunks)
            assert not buffer[numel:].any()
            assert method.shard.total_numel == numel
            if world == 1 and fields is BARE:
                assert_same(history, plain)
    plain, _ = drifted(rank, ("co2", PLAIN), [50, 7])
    with patch.dict(flat._CHUNK, cpu=8):
        history, method = drifted(rank, ("co2", SHARDED), [50, 7])
    assert len(method.anchor) == 8, "a row is no longer than a chunk"
    torch.testing.assert_close(history, plain, rtol=1e-12, atol=1e-12)


@replicas(3)
@pytest.mark.parametrize("fields", [SHARDED, ELEMENTWISE], ids=["value", "norm"])
def test_figures_are_those_of_the_plain_path(rank: int, fields: dict[str, Any]) -> None:
    sharded, plain = (Session(rank, "co2", {**fields, "shard": shard}) for shard in (True, False))
    seen = []
    for _ in range(STEPS):
        figures = [session.train(1).method.stats().own for session in (sharded, plain)]
        assert figures[0] == pytest.approx(figures[1], rel=1e-9)
        seen.append(figures[1])
    assert len({own["clipped"] for own in seen}) > 1 and len({own["gap"] for own in seen}) > 2


@replicas(2)
def test_without_a_schedule(rank: int) -> None:
    """Without a schedule: exact for constant rates, and the newest known rate for others."""
    for constant, same in ((True, True), (False, False)):
        histories = []
        for fields in (PLAIN, SHARDED):
            session = Session(rank, "co2", fields, scheduled=False)
            history = []
            for step in range(STEPS):
                problem.set_lr(session.optimizer, 4 if constant else step)
                problem.backward(session.model, step, rank)
                session.method.step()
                session.optimizer.zero_grad()
                history.append(session.snapshot()["leave.bias"])
            session.method.flush()
            histories.append(history)
        close = [torch.allclose(a, b, rtol=1e-11) for a, b in zip(*histories, strict=True)]
        assert all(close) == same


class Clock:
    """Stands in for the module `time`: its hand moves when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.readings = 0
        self._read = threading.Condition()

    def perf_counter(self) -> float:
        with self._read:
            self.readings += 1
            self._read.notify_all()
            return self.now

    def until_readings(self, count: int) -> None:
        with self._read:
            assert self._read.wait_for(lambda: self.readings >= count, 60)


@replicas(2)
def test_clocks_and_bytes(world: int) -> None:
    """Launch to completion, and the part of it for which somebody stood still.

    The clock is read four times: at the launch, at the completion, and where a wait begins and
    ends.
    """
    mean = BackgroundMean(12, co2.Mesh.world())
    for works, exposed in ((False, 3.0), (True, 0.0)):  # computes until it is done, or not
        clock, before = Clock(), mean.totals()

        def sequence(clock: Clock = clock, works: bool = works) -> None:
            clock.until_readings(1 if works else 2)  # the launch; the begin of the wait
            clock.now = 3.0

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clocks, "time", clock)
            mean.run(sequence)
            if works:
                clock.until_readings(2)
                clock.now = 5.0
            assert mean.wait() is mean.buffer
        after = mean.totals()
        assert clock.readings == 4
        assert after.comm_s - before.comm_s == 3.0
        assert after.exposed_s - before.exposed_s == exposed
        assert after.bytes_sent - before.bytes_sent == 2 * (world - 1) * 48 // world
    mean.close()


@replicas(2)
def test_an_error_in_the_background_surfaces(rank: int) -> None:
    """An error in the background is raised where its result is waited for, and flush ends."""
    session = Session(rank, "co2", SHARDED)
    with patch.object(dist, "all_to_all_single", side_effect=ZeroDivisionError):
        for _ in range(2 * TAU - 1):
            session.step()
        with pytest.raises(ZeroDivisionError):
            session.step()
        session.method.flush()


PROGRAM = """
import sys, time, torch, torch.distributed as dist, co2
rank, store, end = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", rank=rank, world_size=2, init_method="file://" + store)
net = torch.nn.Linear(300, 300)
method = co2.CO2(co2.CO2.Config(tau=1, shard=True))
model = method.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01), co2.Mesh.world())
for step in range(5):
    if end == "desert" and rank == 1 and step == 3:
        sys.exit(0)
    if rank == 0 and step == 4:
        time.sleep(2)  # the other is long at its end, and its background waits for this one's
    model(torch.randn(4, 300)).square().mean().backward()
    method.step()
if end == "raise":
    raise RuntimeError("on purpose")
if end == "flush":
    method.flush()
    dist.destroy_process_group()
print("LAST LINE")
"""


@pytest.mark.parametrize("end", ["flush", "leave", "raise"])
def test_the_thread_does_not_outlive_the_interpreter(tmp_path: Path, end: str) -> None:
    """With a background in flight a process ends as it would have without."""
    for status, out in ended(tmp_path, end):
        assert status == (1 if end == "raise" else 0), out
        assert ("on purpose" if end == "raise" else "LAST LINE") in out
        assert "terminate called" not in out


def test_a_peer_that_is_gone_ends_the_others(tmp_path: Path) -> None:
    """Its error comes out of the thread, and is the one that the launcher knows."""
    (status, out), (left, _) = ended(tmp_path, "desert")
    assert left == 0 and status == 1
    assert re.search(r"RuntimeError: .*(?i:closed by peer|reset by peer|connection refused)", out)
    assert "self.mean.wait()" in out


def ended(tmp_path: Path, end: str) -> list[tuple[int, str]]:
    """Exit status and output of two processes that run the program."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    logs = [tmp_path / f"log_{rank}" for rank in range(2)]
    processes = []
    for rank, log in enumerate(logs):
        words = [str(script), str(rank), str(tmp_path / "store"), end]
        with log.open("w") as file:
            out = file.fileno()
            processes.append(fork_program(words, tmp_path, environment(), out, out))
    return [
        (process.wait(300), log.read_text()) for process, log in zip(processes, logs, strict=True)
    ]
