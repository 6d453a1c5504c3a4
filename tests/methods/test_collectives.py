"""The collectives: when they run, on networks as slow as may be, and in rounds of any length; what
travels as one vector; and that each has a process group of its own."""

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import co2
from co2.comm import collectives
from co2.comm.background_mean import BackgroundMean
from co2.comm.flat import FlatParams
from co2.errors import ConfigError
from co2.methods import METHODS
from co2.methods.base import ELASTIC, QUORUM
from co2.methods.diloco import DiLoCo
from co2.methods.shared.auto_tau import AUTO, START
from co2.methods.shared.rounds import round_ends
from tests.cli.harness import pooled
from tests.grids import OF_A_KIND, grid
from tests.methods import problem
from tests.methods.driver import (
    DENSE,
    MOMENTS,
    OVERLAPPED,
    SETTINGS,
    Case,
    Session,
    Snapshot,
    assert_same,
    inner,
    inner_of,
    overrides,
    reference_of,
    replicas_of,
    trajectory,
)
from tests.methods.network import Recorder, SlowNetwork
from tests.methods.problem import OPTIMIZERS
from tests.workers import Pool, replicas

TAU = 3
ROUNDS = 5
STEPS = ROUNDS * TAU


# Rounds whose length follows the learning rate (`tau_power`).

POWER = 2.0
LONG = 24


def cosine(step: int) -> float:
    return 0.55 + 0.45 * math.cos(math.pi * step / 600)


def lengths(rate: Any, steps: int, tau: int, power: float) -> list[int]:
    ends = [0, *round_ends(rate, steps, tau, power)]
    return [late - early for early, late in itertools.pairwise(ends)]


@pytest.mark.parametrize("steps", [600, 601, 611])
def test_power_0_and_a_constant_rate_make_equal_rounds(steps: int) -> None:
    assert lengths(cosine, steps, 12, 0.0) == [12] * 50
    assert lengths(lambda step: 0.3, steps, 12, 2.0) == [12] * 50
    assert lengths(lambda step: 0.0, steps, 12, 2.0) == [12] * 50


def test_length_times_rate_to_the_power_is_constant() -> None:
    found = lengths(cosine, 600, 12, 1.0)
    assert len(found) == 50
    assert sum(found) == 600
    begins = [sum(found[:number]) for number in range(50)]
    mean_rate = sum(map(cosine, range(600))) / 600
    for begin, length in zip(begins, found, strict=True):
        rate = cosine(begin + length // 2)
        assert abs(length - 12 * mean_rate / rate) < 1.5, "rounded to whole steps"
    assert found == sorted(found) or max(a - b for a, b in itertools.pairwise(found)) == 1


def test_a_warm_up_counts_as_the_rate_that_it_leads_to() -> None:
    warmed = lengths(lambda step: cosine(step) * min(1.0, (step + 1) / 60), 600, 12, 1.0)
    assert max(warmed[:4]) - min(warmed[:4]) <= 1, "rounded to whole steps"


def test_no_more_than_a_mean_in_a_step() -> None:
    assert lengths(lambda step: 0.5**step, 12, 2, 3.0)[:4] == [1, 1, 1, 1]


@pytest.mark.parametrize("name", ["local_sgd", "slowmo", "diloco"])
def test_unequal_rounds_equal_the_reference(workers: Pool, name: str) -> None:
    """The references train rounds of any length, one after the other."""
    settings = {**SETTINGS[name], "tau_power": POWER}
    measured = workers.run(trajectory, 2, name, settings, None, torch.float64, LONG)
    simulated = replicas_of("sgd", 2)

    def rate(step: int) -> float:
        return max(problem.rates(simulated[0].optimizer, step))

    ends = round_ends(rate, LONG, TAU, POWER)
    assert len(set(lengths(rate, LONG, TAU, POWER))) > 1
    train = type(simulated[0]).train
    upcoming: list[int] = []
    for replica in simulated:
        replica.train = lambda tau, one=replica: train(one, upcoming[0])  # type: ignore[method-assign]
    rounds = reference_of((name, SETTINGS[name]), simulated)
    done = 0
    for end in ends:
        upcoming[:] = [end - done]
        next(rounds)
        done = end
        for history, replica in zip(measured, simulated, strict=True):
            torch.testing.assert_close(
                history[end], problem.snapshot(replica.model), rtol=1e-12, atol=1e-12
            )


def test_unequal_rounds_are_refused() -> None:
    with pytest.raises(ConfigError, match="tau_power=1: must be 0 with tau=auto"):
        DiLoCo.Config(tau="auto", tau_power=1)
    refused = DiLoCo(DiLoCo.Config(tau_power=1)).refusals()
    assert {ELASTIC, QUORUM} <= refused.keys()
    with pytest.raises(ConfigError, match=r"local_sgd.tau_power=1\.0: needs the learning rate"):
        Session(0, "local_sgd", {"tau_power": 1.0})


@replicas(2)
def test_consensus_at_the_end_of_the_first_round_of_tau_auto(rank: int) -> None:
    """It lasts `START` steps, each of which moves replica i by −(i + 1)."""
    model, optimizer = problem.build_drift([5, 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    method = co2.CO2(co2.CO2.Config(tau=AUTO))
    method.prepare(model, optimizer, co2.Mesh.world())
    starts = [weight.detach().clone() for weight in model.parameters()]
    for _ in range(START):
        for weight in model.parameters():
            weight.grad = torch.full_like(weight, rank + 1)
        method.step()
    assert_same([weight.detach() for weight in model.parameters()], starts)
    with method.consensus():
        for weight, start in zip(model.parameters(), starts, strict=True):
            torch.testing.assert_close(weight.detach(), start - 1.5 * START)
    method.flush()


# Networks as slow as they may be.


Figures = tuple[Snapshot, dict[str, float]]


def on_slow_network(
    rank: int, case: Case, delay: Callable[[int], int] | None
) -> tuple[list[Figures], list[bool]]:
    """Weights and the method's own figures after each step, and of each collective whether it was
    waited for before its time. None: on the real network."""
    session, history = Session(rank, *case, inner_of(case)), []
    network = SlowNetwork(delay or (lambda n: 0))
    with network if delay else nullcontext():
        for _ in range(STEPS):
            session.step()
            network.tick()
            history.append((session.snapshot(), session.method.stats().own))
        forced = [work.forced for work in network.works]
        session.method.flush()
    return history, forced


IN_PARTS: Case = (
    "co2",
    {**SETTINGS["co2"], "shard": True, "gap_penalty": "gap_aware_elementwise"}
    | {"clip": 0.2, "clip_mode": "norm"},
)
LATE: list[tuple[Case, int]] = [
    *(((name, SETTINGS[name]), 2) for name in OVERLAPPED),
    (("co2", SETTINGS["co2"]), 3),
    *((IN_PARTS, world) for world in (2, 3)),
    (("streaming_diloco", {**SETTINGS["streaming_diloco"], "exchange": "int8"}), 3),
    *(((name, MOMENTS[name]), 2) for name in ("co2", "co2_keep")),
]


def is_telling(one: tuple[Case, int]) -> bool:
    case, world = one
    of_a_kind = case[0] in OF_A_KIND and case[0] != "co2"
    return world == 3 or of_a_kind or case in (IN_PARTS, *MOMENTS.items())


@replicas()
@pytest.mark.parametrize(("case", "world"), grid(LATE, is_telling), ids=str)
def test_the_network_may_take_a_whole_round(rank: int, world: int, case: Case) -> None:
    """A collective may take TAU steps, when it runs only because somebody waits for it.

    A round of Streaming DiLoCo has one collective per fragment, under way for `delay` steps only. A
    step of ACCO has one, under way until the next. Moments have one of their own in each round.
    """
    name, settings = case
    late = 1 if name == "acco" else settings.get("delay", TAU)
    together = 2 if "average_moments" in settings else 1
    parts = settings.get("fragments", 1)
    number = STEPS if name == "acco" else ROUNDS * parts * together
    left = together if parts == 1 else 0  # of fragments none starts at the last step
    expected, _ = on_slow_network(rank, case, None)
    for delay in range(late + 1):
        history, forced = on_slow_network(rank, case, lambda n, delay=delay: delay)
        assert_same(history, expected)
        assert len(forced) == number
        if delay == late:
            assert forced == [True] * (number - left) + [False] * left, "waited for when it is due"
        else:
            assert not any(forced), "nobody waits before it is due"
    # SlowNetwork runs a collective on the spot: two at once in different order would hang there.
    apart = 2 if parts == together == 1 else 0
    uneven, _ = on_slow_network(rank, case, lambda n: (n + apart * rank) % (late + 1))
    assert_same(uneven, expected)


# Which collectives there are.


def recorded(rank: int, name: str) -> list[tuple[int, str, int, str, bool]]:
    with Recorder() as recorder:
        session = Session(rank, name, SETTINGS[name])
        for _ in range(STEPS):
            recorder.step += 1
            session.step()
            if recorder.step % 5 == 0:
                session.shown()
        session.method.flush()
        session.method.state_dict()
    return recorder.log


@replicas(2)
@pytest.mark.parametrize("name", ["allreduce", *DENSE])
def test_a_round_has_one_collective(rank: int, name: str) -> None:
    log = recorded(rank, name)
    means = ("all_reduce", "allreduce_")  # as our code launches it, and as DDP does
    launched = [step for step, call, *_, background in log if call in means and background]
    due = {
        "allreduce": list(range(1, STEPS + 1)),
        "streaming_diloco": [1, 2, 4, 5, 7, 8, 10, 11, 13, 14],
    }
    if name == "allreduce":
        launched = sorted(set(launched))  # a step has a collective for each of DDP's buckets
    assert launched == due.get(name, [TAU * (t + 1) for t in range(ROUNDS)])
    blocking = {step for step, *_, background in log if step and not background}
    assert blocking == {5, 10, 15}, "between rounds nothing is sent but for a consensus"


# One vector.


@replicas(2)
@pytest.mark.parametrize(("name", "vectors"), [("allreduce", 12), ("local_sgd", 1), ("diloco", 2)])
def test_a_consensus_amid_a_round_is_one_all_reduce(rank: int, name: str, vectors: int) -> None:
    """Of weights and of buffers that differ. Before it call, number of steps and layout are
    gathered, and checksums of what must be equal, and of what may be."""
    session = Session(rank, name, SETTINGS[name]).train(4)
    with Recorder() as recorder:
        session.shown()
    net = session.net
    weights = sum(p.numel() for p in net.parameters() if p.requires_grad)
    buffers = sum(b.numel() for b in net.buffers() if b.is_floating_point())
    frozen, floats = 2, 3
    gathered = [
        ("all_gather_into_tensor", 2 * numbers, "torch.int64")
        for numbers in (3, vectors, frozen + floats)
    ]
    mean = ("all_reduce", weights + buffers, "torch.float64")
    assert [tuple(call[1:4]) for call in recorder.log] == [*gathered, mean]


def awkward(rank: int) -> list[Tensor]:
    """Tensors of several types and layouts, which differ by rank."""
    generator = torch.Generator().manual_seed(rank)

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return [
        drawn(3, 2),
        drawn(5, dtype=torch.float64),
        drawn(),
        drawn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        drawn(0),
        drawn(7, dtype=torch.bfloat16),
        drawn(4, 6).t(),
        drawn(1000),
        drawn(0, dtype=torch.float16),
        drawn(3, dtype=torch.float64),
    ]


@replicas(2)
@pytest.mark.parametrize(("most", "calls"), [(1 << 20, 3), (100, 6), (1, 8)])
def test_what_travels_together_is_what_would_alone(rank: int, most: int, calls: int) -> None:
    alone = [tensor.contiguous() for tensor in awkward(rank)]
    for tensor in alone:
        if tensor.numel():
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    group = co2.Mesh.world().new_group_across_replicas()
    tensors = awkward(rank)
    with patch.object(collectives, "_FLAT_BYTES", most), Recorder() as recorder:
        with collectives.averaged(tensors, group):
            assert_same([tensor.contiguous() for tensor in tensors], alone)
    assert_same(tensors, awkward(rank))
    assert [one.stride() for one in tensors] == [one.stride() for one in awkward(rank)]
    assert len(recorder.log) == calls


@replicas(3)
def test_all_start_with_the_first_ones_tensors(rank: int) -> None:
    group = co2.Mesh.world().new_group_across_replicas()
    model = nn.Module()
    for number, tensor in enumerate(awkward(rank)):
        model.register_buffer(f"float{number}", tensor)
    model.register_buffer("count", torch.tensor(10 + rank))
    model.register_buffer("flags", torch.tensor([rank == 0, rank == 1]))
    model.register_buffer("short", torch.tensor([10 + rank], dtype=torch.int16))
    model.register_buffer("eighth", torch.tensor([1.0 + rank]).to(torch.float8_e4m3fn))
    model.weight = nn.Parameter(torch.full((3,), float(rank)))
    with Recorder() as recorder:
        collectives.replicate(model, group)
    assert len(recorder.log) == 7  # one for each type
    short, eighth = torch.tensor([10], dtype=torch.int16), torch.ones(1).to(torch.float8_e4m3fn)
    flags = torch.tensor([True, False])
    first = [*awkward(0), torch.tensor(10), flags, short, eighth, torch.zeros(3)]
    assert_same([tensor.detach() for tensor in (*model.buffers(), *model.parameters())], first)


def held(dtype: torch.dtype) -> tuple[FlatParams, list[nn.Parameter]]:
    shapes = [(3, 2), (), (2, 3, 4, 5), (0,), (7,)]
    params = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    params[2].data = params[2].data.contiguous(memory_format=torch.channels_last)
    return FlatParams(torch.optim.SGD(params, lr=0.1)), params


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("without", [(), (1, 4), (0, 1, 2, 3, 4)])
def test_gradients(dtype: torch.dtype, without: tuple[int, ...]) -> None:
    flat, params = held(dtype)
    grads: list[Any] = []
    for number, param in enumerate(params):
        param.grad = None if number in without else torch.randn_like(param)
        grads.append(torch.zeros_like(param) if param.grad is None else param.grad.clone())
    expected = torch.cat([grad.reshape(-1).float() for grad in grads])
    out = torch.full((flat.numel,), 9.0)
    flat.gradients(out)
    assert torch.equal(out, expected)
    flat.gradients(out, add=True)
    assert torch.equal(out, expected + expected)
    rounded = torch.empty(flat.numel, dtype=torch.bfloat16)
    flat.gradients(rounded)
    assert torch.equal(rounded, expected.bfloat16())
    flat.set_gradients(out)
    for param, grad in zip(params, grads, strict=True):
        assert param.grad is not None and param.grad.dtype == dtype
        assert torch.equal(param.grad, (grad.float() * 2).to(dtype))


# Groups.

ROLES = {
    "runners": "training",
    "background_mean": "training",
    "pair_mean": "training",
    "collectives": "consensus",
}
"""What the collectives of a file of co2/comm are for. Those of co2/train are for control."""
WATCHED = (
    "all_reduce",
    "all_gather_into_tensor",
    "broadcast",
    "barrier",
    "all_gather_object",
    "broadcast_object_list",
)


@contextmanager
def watched(log: Path) -> Iterator[None]:
    """Setup of a run: every collective leaves its role and its group in a file."""

    def logged(original: Any) -> Any:
        def call(*arguments: Any, group: Any = None, **others: Any) -> Any:
            frame = sys._getframe(1)
            while frame.f_code.co_qualname.startswith(("gathered", "as_one", "until_cut")):
                assert frame.f_back is not None
                frame = frame.f_back  # whoever gathers
            code = frame.f_code
            file = Path(code.co_filename)
            room = file.parent.name
            evaluates = code.co_qualname.startswith("add_up")  # when nothing else is under way
            if room in ("comm", "train") and not evaluates:
                role = ROLES[file.stem] if room == "comm" else "control"
                name = "default" if group in (None, dist.group.WORLD) else group.group_name
                with (log / f"rank{dist.get_rank()}").open("a") as lines:
                    lines.write(f"{role} {name}\n")
            return original(*arguments, group=group, **others)

        return call

    with patch.multiple(dist, **{name: logged(getattr(dist, name)) for name in WATCHED}):
        yield


@pytest.mark.parametrize("name", grid(SETTINGS, OF_A_KIND.__contains__))
def test_no_group_has_two_roles(workers: Pool, tmp_path: Path, name: str) -> None:
    run = pooled(
        workers,
        2,
        f"method={name}",
        *overrides(name),
        "train.steps=12",
        "train.eval_every=4",
        "checkpoint.every=4",
        runs=tmp_path / "runs",
        setup=watched,
        setup_arguments=(tmp_path,),
    )
    assert run.status == 0, run.err
    for rank in range(2):
        lines = {
            tuple(line.split()) for line in (tmp_path / f"rank{rank}").read_text().splitlines()
        }
        roles = [role for role, _ in lines]
        groups = [group for _, group in lines]
        # DDP does not ask torch.distributed; it has the default group while gradients are computed.
        means = 0 if name == "allreduce" else SETTINGS[name].get("fragments", 1)
        assert sorted(roles) == ["consensus", "control"] + ["training"] * means
        assert len(set(groups)) == len(groups)
        # Control has PyTorch's own, between two steps: who trains waits for it.
        assert [role for role, group in lines if group == "default"] == ["control"]


@replicas(2)
def test_means_under_way_together_do_not_mix(rank: int) -> None:
    """Two means and a consensus, begun in another order on each worker."""
    mesh = co2.Mesh.world()
    means = [BackgroundMean(1000, mesh), BackgroundMean(1000, mesh)]
    group = mesh.new_group_across_replicas()
    for index in (0, 1) if rank == 0 else (1, 0):
        means[index].start(torch.full((1000,), 10.0 * index + rank))
    consensus = torch.full((1000,), 100.0 + rank)
    with collectives.averaged([consensus], group):
        assert consensus.mean() == 100.5
    assert [mean.wait().mean() for mean in means] == [0.5, 10.5]  # type: ignore[union-attr]
    for mean in means:
        mean.close()


@replicas(2)
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "allreduce"])
def test_each_mean_has_a_group_of_its_own(name: str) -> None:
    """Of two methods side by side, too, as a user may have for two models."""
    names = []
    for _ in range(2):
        model = nn.ParameterList([nn.Parameter(torch.zeros(3)) for _ in range(2)])
        method = METHODS[name]()
        method.prepare(model, OPTIMIZERS[inner(name)](model.parameters()), co2.Mesh.world())
        groups = [mean.group.group_name for mean in method.means]
        names += {*groups} if name == "co2_keep" else groups  # its fragments take turns
        names.append(method.group.group_name)
        method.flush()
    assert len(names) >= 4 and len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("config", "gpus", "kind"),
    [
        ("cpu:gloo,cuda:nccl", True, "cuda"),  # named so, or made without a name
        ("cuda:nccl", True, "cuda"),
        ("cpu:gloo,cuda:nccl", False, "cpu"),
        ("cpu:gloo", True, "cpu"),
        ("cpu:gloo,cuda:gloo", True, "cpu"),  # "gloo"
        ("cpu:nccl,cuda:gloo", True, "cpu"),
        ("cpu:gloo,cuda:ucc", True, "cuda"),
    ],
)
def test_the_mesh_is_where_the_process_group_reaches(config: str, gpus: bool, kind: str) -> None:
    with (
        patch.multiple(
            dist,
            is_initialized=lambda: True,
            get_backend_config=lambda: config,
            get_rank=lambda: 0,
            get_world_size=lambda: 2,
        ),
        patch.multiple(torch.cuda, is_available=lambda: gpus, current_device=lambda: 0),
    ):
        assert co2.Mesh.world().device.type == kind
