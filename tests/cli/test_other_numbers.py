"""A run goes on with another number of workers, where its method holds nothing that only the same
ones can go on from."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from co2.catalogue import CATALOGUE
from co2.errors import PREEMPTED, REFUSED, ConfigError
from co2.methods import METHODS
from co2.train import layout, state_file
from co2.train.session import Session
from tasks.moe.experts import EXPERTS
from tasks.toy import Toy
from tests.cli.harness import (
    Run,
    assert_same_run,
    cli,
    configured,
    manifest,
    metrics,
    pooled,
    small,
    stopped_after,
)
from tests.cli.test_checkpoint import part
from tests.grids import grid, nonempty
from tests.methods.driver import overrides
from tests.workers import Pool

Setup = Callable[[], AbstractContextManager]
WORDS = ("tag=other", "train.steps=14", "train.eval_every=7", "log.every=1", "train.batch_size=4")


def stopped(
    workers: Pool,
    world: int,
    words: tuple[str, ...],
    step: int,
    runs: Path,
    also: Setup = nullcontext,
) -> Run:
    """Setup: a run that is told to stop. `also` is entered in every worker."""
    given = {"runs": runs, "setup": partial(both, also, step), "status": PREEMPTED}
    return pooled(workers, world, *words, "checkpoint.every=0", **given)


@contextmanager
def both(also: Setup, step: int) -> Iterator[None]:
    with also(), stopped_after(step):
        yield


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (3, 2, "with 2 replicas in place of 3: all begin from their mean"),
        (2, 4, "with 4 replicas in place of 2: the new ones begin from their mean"),
    ],
)
def test_fewer_or_more(workers: Pool, tmp_path: Path, before: int, now: int, told: str) -> None:
    """Stopped again on the way, it ends as if it had not been."""
    words = (*WORDS, "method=co2", "co2.tau=3", "optim.name=adamw", "optim.lr=0.01")
    ended = []
    for name, again in (("once", None), ("twice", 10)):
        stopped(workers, before, words, 7, tmp_path / name)
        if again is not None:
            stopped(workers, now, words, again, tmp_path / name)
        ended.append(pooled(workers, now, *words, runs=tmp_path / name))
    assert_same_run(*(run.folder for run in ended))
    assert f"resumed at step 7 of 14, {told}" in ended[0].out
    assert re.search(rf", on {4 * now} samples a step, before {4 * before}", ended[0].out)
    assert [line["step"] for line in metrics(ended[0].folder, "eval")] == [7, 14]
    *_, start = manifest(ended[0].folder)["resumed"]
    assert told == f"with {start['replicas']}" and start["world_size"] == now


def here(state: dict[str, Any]) -> dict[str, Any]:
    """What of a state is of the weights, one way or the other."""
    method = state["method"]
    vectors = {"tensors": method["tensors"], "flying": [one["buffer"] for one in method["means"]]}
    buffers = len(numbers(state["model"]))  # their averages are the last
    average = state["average"][: len(state["average"]) - buffers]
    return {"replica": state["replica"], "average": average, "vectors": vectors}


def numbers(state: Any, name: str = "") -> dict[str, Tensor]:
    """The tensors of real numbers of a state, by their names in it."""
    entries = state.items() if isinstance(state, dict) else enumerate(state)
    found = {}
    for key, value in entries:
        value = getattr(value, "_local_tensor", value)
        if isinstance(value, dict | list):
            found |= numbers(value, f"{name}.{key}")
        elif isinstance(value, Tensor) and value.is_floating_point():
            found[f"{name}.{key}"] = value
    return found


@contextmanager
def noted(folder: Path, also: Setup = nullcontext) -> Iterator[None]:
    """Setup: every worker writes down what it loads, and what it holds then. A step later all are
    told to stop."""
    original = Session.load

    def load(self: Session, state: dict[str, Any]) -> None:
        worker = self.run.mesh.worker
        torch.save(numbers(state), folder / f"loaded_{worker}")
        original(self, state)
        torch.save(numbers(here(self.state(whole=True))), folder / f"held_{worker}")
        names = {param: name for name, param in self.module.named_parameters()}
        held = (p for group in self.optimizer.param_groups for p in group["params"])
        trained = [p for p in held if p.requires_grad]
        whole = {names[p]: self.replica.experts.seen_whole(names[p], p.detach()) for p in trained}
        torch.save({name: one.shape for name, one in whole.items()}, folder / "shapes")

    with also(), patch.object(Session, "load", load), stopped_after(8):
        yield


def files_of(folder: Path, replica: int, worker: int) -> list[Path]:
    return [folder / part(replica, worker), *folder.glob(f"equal/*_worker_{worker}.safetensors")]


@pytest.mark.parametrize(("before", "now", "size"), [(3, 2, 1), (2, 4, 1), (4, 2, 2)])
@pytest.mark.parametrize("name", ["co2", "co2_keep", "allreduce"])
def test_what_they_begin_from(
    workers: Pool, tmp_path: Path, name: str, before: int, now: int, size: int
) -> None:
    """The mean of what the saved ones hold, each number of it; those that go on, from their own."""
    parts = (f"mesh.replica_size={size}", f"mesh.strategy={'zero3' if size > 1 else 'ddp'}")
    adam = ("optim.name=adamw", "optim.lr=0.01", "train.ema_decay=0.9")
    words = (*WORDS, *parts, f"method={name}", *overrides(name), *adam)
    run = stopped(workers, before, words, 7, tmp_path)
    saved = []
    for rank in range(before):
        replica, worker = divmod(rank, size)
        held = [files_of(run.folder / "checkpoints/step_7", replica, n) for n in range(size)]
        saved.append(numbers(state_file.read(held.pop(worker), held)))
    begin = {"setup": partial(noted, tmp_path), "status": PREEMPTED}
    pooled(workers, now, *words, runs=tmp_path, **begin)
    for rank in range(now):
        begins = torch.load(tmp_path / f"loaded_{rank}", weights_only=True)
        fellows = saved[rank % size :: size]
        assert begins.keys() >= fellows[0].keys()
        for key, first in nonempty(fellows[0].items()):
            mean = sum(one[key].double() for one in fellows) / len(fellows)
            goes_on = now > before and rank < before
            expected = saved[rank][key] if goes_on else mean.to(first.dtype)
            assert torch.equal(begins[key], expected), key
    differ = any(not torch.equal(saved[0][key], saved[size][key]) for key in saved[0])
    assert differ, "else the mean is what each of them holds"


def test_the_batch_of_the_whole_run_stays(workers: Pool, tmp_path: Path) -> None:
    words = (*WORDS, "method=local_sgd", "local_sgd.tau=3", "train.global_batch=16")
    stopped(workers, 4, words, 5, tmp_path)
    run = pooled(workers, 2, *words, runs=tmp_path)
    assert "on 16 samples a step, before 16" in run.out


def mesh(size: int, strategy: str) -> tuple[str, str]:
    return f"mesh.replica_size={size}", f"mesh.strategy={strategy}"


def put_together(
    held: list[dict[str, Tensor]], shapes: dict[str, torch.Size], strategy: str
) -> dict[str, Tensor]:
    """What the workers of a replica hold. PyTorch and `ep` cut as `torch.chunk` does."""

    def cut(name: str) -> bool:
        all_of = strategy in ("zero2", "zero3")
        return all_of or (strategy == "ep" and name.rpartition(".")[2] in EXPERTS)

    found = {}
    for key in {key: None for one in held for key in one}:
        parts = [one[key] for one in held if key in one]
        if key.startswith(".vectors"):
            pieces: dict[int, list[Tensor]] = {}  # a mean may be of two vectors
            for worker, vector in enumerate(parts):
                sizes = []
                for name, shape in shapes.items():
                    rows = torch.empty(shape, device="meta")
                    shards = (*rows.chunk(len(held)), *[rows[:0]] * len(held))
                    sizes.append((shards[worker] if cut(name) else rows).numel())
                times = len(vector) // max(1, sum(sizes))
                for number, piece in enumerate(vector.split(sizes * times)):
                    pieces.setdefault(number, []).append(piece)
            names = [*shapes] * len(pieces)
            own = [of_one if cut(names[n]) else of_one[:1] for n, of_one in pieces.items()]
            found[key] = torch.cat([piece for of_one in own for piece in of_one])
        else:
            named = next((name for name in shapes if name in key), key)
            whole = parts[0].dim() == 0 or not cut(named)
            found[key] = parts[0] if whole else torch.cat(parts)
    return found


def begun(saved: list[Tensor], replica: int, after: int) -> Tensor:
    """What one of so many replicas begins from: its own, or the mean of what all have saved."""
    if replica < len(saved) <= after:
        return saved[replica]
    return (sum(one.double() for one in saved) / len(saved)).to(saved[0].dtype)


def goes_on_with(
    workers: Pool,
    runs: Path,
    words: tuple[str, ...],
    before: tuple[Any, ...],
    now: tuple[Any, ...],
    also: Setup = nullcontext,
) -> set[str]:
    """The workers of a replica hold together what it begins from, whoever held which part, and each
    has the buffers of the one in its place, or of the first one. Returns the names of what they
    hold together.

    Args:
        before, now: workers, those of a replica, and mesh.strategy.
        also: entered in every worker.
    """
    run = stopped(workers, before[0], (*words, *mesh(*before[1:])), 7, runs, also)
    folder = run.folder / "checkpoints/step_7"
    begin = {"setup": partial(noted, runs, also), "status": PREEMPTED}
    pooled(workers, now[0], *words, *mesh(*now[1:]), runs=runs, **begin)
    shapes = torch.load(runs / "shapes", weights_only=True)
    replicas, buffers = [], []
    for replica in range(before[0] // before[1]):
        states = []
        for worker in range(before[1]):
            files = [files_of(folder, replica, n) for n in range(before[1])]
            states.append(state_file.read(files.pop(worker), files))
        replicas.append(put_together([numbers(here(one)) for one in states], shapes, before[2]))
        buffers.append([numbers(one["model"], ".model") for one in states])
    after, seen = now[0] // now[1], set()
    for replica in range(after):
        ranks = range(replica * now[1], (replica + 1) * now[1])
        held = [torch.load(runs / f"held_{rank}", weights_only=True) for rank in ranks]
        found = put_together(held, shapes, now[2])
        seen |= found.keys()
        for key, value in nonempty(found.items()):
            assert torch.equal(value, begun([one[key] for one in replicas], replica, after)), key
        for place, rank in enumerate(ranks):
            loaded = torch.load(runs / f"loaded_{rank}", weights_only=True)
            own = [one[place if place < before[1] else 0] for one in buffers]
            for key in own[0]:
                expected = begun([one[key] for one in own], replica, after)
                assert torch.equal(loaded[key], expected), key
    assert seen == replicas[0].keys() and any("exp_avg_sq" in key for key in seen)
    return seen


@pytest.mark.parametrize(
    ("name", "before", "now"),
    grid(
        [
            (name, before, now)
            for name in ("co2", "allreduce", "desloc")
            for before, now in (
                ((4, 2, "ddp"), (4, 1, "ddp")),
                ((4, 1, "ddp"), (4, 2, "zero1")),
                ((4, 2, "zero1"), (4, 4, "zero1")),
                ((2, 2, "zero1"), (4, 2, "zero1")),
                ((2, 2, "zero1"), (3, 1, "ddp")),
                ((4, 2, "zero3"), (3, 3, "zero2")),
                ((3, 3, "zero2"), (4, 2, "zero3")),
                ((4, 2, "zero3"), (2, 1, "ddp")),
                ((2, 1, "ddp"), (4, 2, "zero2")),
            )
            if name != "desloc" or "zero1" not in (before[2], now[2])
        ],
        lambda case: case[0] == "co2" or "zero2" in (case[1][2], case[2][2]),
    ),
)
def test_another_size_of_replicas(
    workers: Pool, tmp_path: Path, name: str, before: tuple[Any, ...], now: tuple[Any, ...]
) -> None:
    adam = ("optim.name=adamw", "optim.lr=0.01", "train.ema_decay=0.9")
    words = (*WORDS, f"method={name}", *overrides(name), *adam)
    seen = goes_on_with(workers, tmp_path, words, before, now)
    held = {"co2": (".vectors.tensors.momentum", ".vectors.flying"), "desloc": (".vectors",)}
    for part_of in held.get(name, ()):
        assert any(key.startswith(part_of) for key in seen), part_of


@contextmanager
def partly_trained() -> Iterator[None]:
    """Setup: of the first layer the optimizer holds the weight, which is frozen, and not the
    bias."""
    model, optimizer = Toy.model, Toy.optimizer

    def frozen(self: Toy) -> nn.Module:
        made = model(self)
        made[0].weight.requires_grad_(False)
        return made

    def without(self: Toy, made: nn.Module) -> Optimizer:
        found = optimizer(self, made)
        for group in found.param_groups:
            group["params"] = [one for one in group["params"] if one is not made[0].bias]
        found.param_groups[0]["params"].insert(0, made[0].weight)
        return found

    with patch.object(Toy, "model", frozen), patch.object(Toy, "optimizer", without):
        yield


@pytest.mark.parametrize(
    ("own", "also", "before", "now"),
    [
        # The last worker of three has no row of anything.
        (("toy.hidden=4",), nullcontext, (3, 3, "zero3"), (2, 1, "ddp")),
        (("toy.hidden=4",), nullcontext, (2, 1, "ddp"), (3, 3, "zero3")),
        ((), partly_trained, (4, 2, "zero3"), (3, 3, "zero2")),
        # A mean in flight of two vectors, one behind the other.
        (
            ("co2.average_moments=true", "comm.dtype=bf16"),
            nullcontext,
            (4, 2, "zero2"),
            (2, 1, "ddp"),
        ),
    ],
)
def test_what_few_runs_have(
    workers: Pool,
    tmp_path: Path,
    own: tuple[str, ...],
    also: Setup,
    before: tuple[Any, ...],
    now: tuple[Any, ...],
) -> None:
    adam = ("optim.name=adamw", "optim.lr=0.01", "train.ema_decay=0.9")
    words = (*WORDS, "method=co2", *overrides("co2"), *adam, *own)
    seen = goes_on_with(workers, tmp_path, words, before, now, also)
    if any("moments" in word for word in own):
        assert {".vectors.flying.0", ".vectors.flying.1"} <= seen


@contextmanager
def drawing(folder: Path, step: int) -> Iterator[None]:
    """Setup: every worker writes down the state of a random generator, when it has begun or gone
    on. All are told to stop after the step."""
    original = Session.resume

    def resume(self: Session) -> None:
        original(self)
        torch.save(torch.get_rng_state(), folder / f"drawn_{self.run.mesh.worker}")

    with patch.object(Session, "resume", resume), stopped_after(step):
        yield


@pytest.mark.parametrize(
    ("before", "now"), [((4, 2, "zero3"), (4, 1, "ddp")), ((4, 1, "ddp"), (4, 2, "zero3"))]
)
def test_no_two_go_on_with_the_random_numbers_of_one(
    workers: Pool, tmp_path: Path, before: tuple[Any, ...], now: tuple[Any, ...]
) -> None:
    words = (*WORDS, "method=local_sgd", "local_sgd.tau=3")
    for world, *place in (before, now):
        step = 5 if place == list(before[1:]) else 6
        given = {"setup": partial(drawing, tmp_path, step), "status": PREEMPTED}
        run = pooled(workers, world, *words, *mesh(*place), runs=tmp_path, **given)
        drawn = [torch.load(tmp_path / f"drawn_{rank}", weights_only=True) for rank in range(world)]
        assert len({tuple(one.tolist()) for one in drawn}) == world
    assert ", on 16 samples a step, before 16" in run.out


@pytest.mark.parametrize(
    ("before", "now"), [((4, 2, "ep"), (2, 1, "ddp")), ((2, 1, "ddp"), (4, 2, "ep"))]
)
def test_experts_go_to_others(
    workers: Pool,
    tmp_path: Path,
    root: Path,
    text: Path,
    before: tuple[Any, ...],
    now: tuple[Any, ...],
) -> None:
    words = (*small("moe", root, text), *WORDS, "method=co2", "co2.tau=3", "train.batch_size=2")
    goes_on_with(workers, tmp_path, words, before, now)


@pytest.mark.parametrize(
    ("before", "now"), [((2, "zero3"), (1, "ddp")), ((1, "ddp"), (2, "zero3"))]
)
def test_fragments_of_parts_stay_with_their_workers(
    workers: Pool, tmp_path: Path, before: tuple[int, str], now: tuple[int, str]
) -> None:
    words = (*WORDS, "method=co2_keep", "co2_keep.tau=3", "co2_keep.fragments=2")
    stopped(workers, 4, (*words, *mesh(*before)), 5, tmp_path)
    says = (
        rf"^mesh\.replica_size={now[0]}: .*mesh\.replica_size={before[0]}, and workers that hold "
        "parts of weights cut these into fragments of their own; "
    )
    with pytest.raises(ConfigError, match=says):
        configured(*words, *mesh(*now), "launch.workers=4", runs=tmp_path)


def test_fragments_of_whole_weights_go_to_others(workers: Pool, tmp_path: Path) -> None:
    words = (*WORDS, "method=co2_keep", "co2_keep.tau=3", "co2_keep.fragments=2")
    run = stopped(workers, 4, (*words, *mesh(2, "ddp")), 7, tmp_path)
    begin = {"setup": partial(noted, tmp_path), "status": PREEMPTED}
    pooled(workers, 2, *words, runs=tmp_path, **begin)
    for rank in range(2):
        files = [files_of(run.folder / "checkpoints/step_7", rank, worker) for worker in range(2)]
        saved = here(state_file.read(files[0], files[1:]))["vectors"]
        held = torch.load(tmp_path / f"held_{rank}", weights_only=True)
        for key, value in nonempty(numbers(saved, ".vectors").items()):
            assert torch.equal(held[key], value), key


@contextmanager
def noting_no_rows() -> Iterator[None]:
    """Setup: what older versions saved."""
    state = Session.state

    def without(self: Session, *given: Any, **more: Any) -> dict[str, Any]:
        found = state(self, *given, **more)
        del found[state_file.LAYOUT]
        return found

    with patch.object(Session, "state", without):
        yield


@contextmanager
def noting_other_rows() -> Iterator[None]:
    """Setup: a checkpoint that says of every worker that it has the rows of the second one."""
    rows = layout._rows
    with patch.object(
        layout, "_rows", lambda whole: replace(rows(whole), first=rows(whole).number)
    ):
        yield


@pytest.mark.parametrize(
    ("setup", "says"),
    [
        (
            noting_no_rows,
            r"mesh\.replica_size=1: \S+/step_5/replica_0/worker_0\.safetensors is of an older "
            r"version of the suite, which does not tell what .* held; use 2\n",
        ),
        (
            noting_other_rows,
            r"resume=auto: \S+ holds no checkpoint that can be used \(step_5 is damaged "
            r"\(replica_0/worker_0\.safetensors cannot be read \(ValueError: rows of \S+ are ",
        ),
    ],
)
def test_rows_that_nobody_knows(workers: Pool, tmp_path: Path, setup: Setup, says: str) -> None:
    words = (*WORDS, "method=co2", "co2.tau=3")
    run = stopped(workers, 4, (*words, *mesh(2, "zero3")), 5, tmp_path, setup)
    refused = pooled(workers, 2, *words, runs=tmp_path, status=REFUSED)
    assert re.match(f"error: {says}", refused.err), refused.err
    assert (run.folder / "checkpoints/step_5").exists()


@pytest.mark.parametrize(
    ("name", "own", "good"),
    grid(
        [
            *((name, (), CATALOGUE[name].any_number) for name in METHODS),
            ("co2", ("co2.shard=true",), False),
            ("streaming_diloco", ("streaming_diloco.exchange=int4",), False),
        ],
        lambda case: case[1] or case[0] in ("allreduce", "co2_keep", "streaming_diloco", "desloc"),
    ),
)
def test_which_methods_do(
    workers: Pool, tmp_path: Path, name: str, own: tuple[str, ...], good: bool
) -> None:
    words = (*WORDS, f"method={name}", *overrides(name), *own)
    stopped(workers, 3, words, 5, tmp_path)
    if good:
        text = "" if name == "allreduce" else ": all begin from their mean"
        run = pooled(workers, 2, *words, runs=tmp_path)
        assert f"with 2 replicas in place of 3{text}, on " in run.out
    else:
        with pytest.raises(ConfigError, match=r"^launch\.workers=2: .*holds a run with .*=3"):
            configured(*words, "launch.workers=2", runs=tmp_path)


def test_a_sweep_asks_each_method_too(tmp_path: Path) -> None:
    own = ("method=co2", "co2.shard=true", "tag=one", "train.steps=4")
    cli(*own, "launch.workers=2", runs=tmp_path / "runs")
    run = cli("-m", *own, "launch.workers=1", runs=tmp_path / "runs", status=REFUSED)
    assert "error: launch.workers=1: " in run.err
