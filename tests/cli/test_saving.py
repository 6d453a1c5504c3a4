"""A checkpoint that is written while training goes on, of the step it was asked for; and its files:
everything comes back, and PyTorch's own tools read the weights."""

import contextlib
import json
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from co2.comm.background_mean import Arriving, BackgroundMean
from co2.comm.mesh import Mesh
from co2.train import state_file
from co2.train.checkpoint import Checkpoints, Written
from co2.train.state_file import ELSEWHERE, REPLICA, HostCopy, Split, split
from tests.cli.harness import Run, metrics, pooled, weights
from tests.cli.test_checkpoint import ALONE, assert_state, checkpoints, part, state
from tests.workers import Pool, replicas

LIMIT_S = 300.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def disk_that_waits() -> Iterator[threading.Event]:
    """Nothing is written before the event."""
    goes, original = threading.Event(), state_file.write

    def write(*arguments: Any) -> None:
        assert goes.wait(LIMIT_S)
        original(*arguments)

    with patch.object(state_file, "write", write):
        yield goes


def test_it_is_of_the_step_that_was_asked_for(tmp_path: Path) -> None:
    """Whatever training changes before it is written."""
    saver, trained = checkpoints(tmp_path), state(1)
    with disk_that_waits() as goes:
        saver.start(1, trained)
        for name in ("weight", "half", "count"):
            trained[name].zero_()
        trained["nested"]["lr"].append("later")
        trained["nested"]["more"] = 1
        assert saver.steps() == []
        goes.set()
        assert saver.finish() == 1
    assert_state(checkpoints(tmp_path).load(), 1)


def test_the_next_one_waits_for_the_one_before(tmp_path: Path) -> None:
    """So that there is one copy of the state at most, and none is overwritten."""
    saver, begun = checkpoints(tmp_path), []

    def train() -> None:
        for step in (1, 2):
            saver.start(step, state(step))
            begun.append(step)

    with disk_that_waits() as goes:
        thread = threading.Thread(target=train)
        thread.start()
        until(lambda: begun == [1])
        time.sleep(0.2)
        assert begun == [1]
        goes.set()
        thread.join()
        assert saver.finish() == 2
    assert saver.steps() == [2, 1]
    for step in (2, 1):
        assert_state(saver.load(), step)
        (tmp_path / f"step_{step}").rename(tmp_path / f"old_{step}")


def test_without_finish_it_is_published_too(tmp_path: Path) -> None:
    saver = checkpoints(tmp_path)
    saver.start(1, state(1))
    until(lambda: saver.steps() == [1])
    saver.close()
    assert_state(checkpoints(tmp_path).load(), 1)


def test_whoever_ends_by_itself_waits_for_it(tmp_path: Path) -> None:
    """A loss that is not finite: the message names the checkpoint that is just being written."""
    saver = checkpoints(tmp_path)
    with disk_that_waits() as goes:
        saver.start(1, state(1))
        threading.Timer(0.2, goes.set).start()
        saver.settle()
    assert saver.steps() == [1]


def tensors(step: int) -> dict[str, Tensor]:
    return {name: value for name, value in state(step).items() if isinstance(value, Tensor)}


class TestHostCopy:
    def test_the_memory_is_used_again(self) -> None:
        copy, first, second = HostCopy(), tensors(1), tensors(2)
        one = copy.take(first)
        places = {name: one[name].data_ptr() for name in first}
        other = copy.take(second)
        assert {name: other[name].data_ptr() for name in places} == places
        assert all(torch.equal(other[name], second[name]) for name in places)
        assert not any(other[name].data_ptr() == second[name].data_ptr() for name in places)

    def test_another_shape_gets_other_memory(self) -> None:
        copy = HostCopy()
        for value in (torch.ones(3), torch.ones(5), torch.ones(5).double(), torch.ones(2, 3).t()):
            taken = copy.take({"value": value})["value"]
            assert torch.equal(taken, value) and taken.dtype == value.dtype
            assert taken.stride() == value.stride()


@replicas(2)
def test_a_mean_under_way_is_not_waited_for(rank: int) -> None:
    """It is copied when it is there, before training can overwrite its buffer."""
    mean, copy = BackgroundMean(4, Mesh.world(device="cpu")), HostCopy()
    gate = Mesh.world(device="cpu").new_group_across_replicas("gloo")
    for number in range(5):
        if rank == 1:  # the other one cannot have the mean before this
            torch.distributed.barrier(group=gate)
        mean.start(torch.full((4,), float(rank + 10 * number)))
        taken = mean.state_dict(arriving=True)
        assert isinstance(taken["buffer"], Arriving)
        copied = copy.take({"buffer": taken["buffer"]})["buffer"]
        if rank == 0:
            torch.distributed.barrier(group=gate)
        arrived = mean.wait()
        assert arrived is not None
        arrived.fill_(-1.0)
        copy.wait()
        assert copied.tolist() == [0.5 + 10 * number] * 4
        assert mean.buffer[0] == -1.0
    mean.close()


@replicas(2)
def test_a_mean_that_fails_is_not_saved(rank: int, tmp_path: Path) -> None:
    """The other one is gone before it has sent its part of a mean."""
    lines: list[str] = []
    mean = BackgroundMean(4, Mesh.world(device="cpu"))
    if rank == 1:
        torch.distributed.destroy_process_group()
        return
    mean.start(torch.ones(4))
    taken = mean.state_dict(arriving=True)
    saver = Checkpoints(tmp_path, ALONE, None, 2, lines.append)
    saver.start(1, taken)
    assert saver.finish() is None
    with contextlib.suppress(RuntimeError):
        mean.wait()
    mean._runner.give_up()  # as an elastic run does, which goes on without the lost one
    (line,) = lines
    assert saver.steps() == [] and "step 1 could not be saved (worker 0: " in line


def two(rank: int, world: int, folder: str, lines: list[str], keep: int = 3) -> Checkpoints:
    mesh = Mesh.world(device="cpu")
    return Checkpoints(
        Path(folder), mesh, mesh.new_group_across_replicas("gloo"), keep, lines.append
    )


@replicas(2)
def test_nobody_waits_for_another(rank: int, world: int, tmp_path: Path) -> None:
    """Worker 0 begins three checkpoints before worker 1 begins its first."""
    saver = two(rank, world, str(tmp_path), [])
    if rank == 1:
        torch.distributed.barrier()
    for step in (1, 2, 3):
        saver.start(step, {**state(step), "rank": rank})
    if rank == 0:
        torch.distributed.barrier()
    assert saver.finish() == 3
    found = saver.load()
    assert_state(found, 3)
    assert found is not None and found[1]["rank"] == rank
    assert saver.steps() == [3, 2, 1]


def lose(rank: int, world: int, folder: str, victim: int, written: bool) -> tuple[list[int], str]:
    """A worker is lost while step 2 is under way; the other one goes on alone."""
    lines: list[str] = []
    saver = two(rank, world, folder, lines)
    assert saver.save(1, state(1))
    if rank != victim or written:
        saver.start(2, state(2))
    if rank == victim:
        if written:
            assert saver._last is not None
            saver._last.part.result()
        torch.distributed.barrier()
        saver._publisher.shutdown(wait=False, cancel_futures=True)  # as far as it has come
        return [], ""
    torch.distributed.barrier()
    saver.regroup(ALONE, None)
    steps = saver.steps()
    assert saver.save(3, state(3)), "saving goes on"
    assert_state(saver.load(), 3)
    saver.close()
    return steps, "\n".join(lines)


@pytest.mark.parametrize(
    ("written", "steps", "line"),
    [
        (False, [1], "step 2 could not be saved (worker 1 is gone); the one before is kept"),
        (True, [2, 1], ""),
    ],
)
def test_a_worker_is_lost(
    workers: Pool, tmp_path: Path, written: bool, steps: list[int], line: str
) -> None:
    """What it had not written is given up; what is whole is published."""
    found, _ = workers.run(lose, 2, str(tmp_path), 1, written)
    assert found == (steps, line)
    assert not list(tmp_path.glob(".*"))


def test_the_worker_that_publishes_is_lost(workers: Pool, tmp_path: Path) -> None:
    _, (steps, line) = workers.run(lose, 2, str(tmp_path), 0, False)
    assert steps == [1]
    assert line == "step 2 could not be saved (worker 0 is gone); the one before is kept"
    assert not list(tmp_path.glob(".*"))


def cannot_tell(rank: int, world: int, folder: str) -> tuple[list[bool], list[str]]:
    """At step 1 worker 1 can neither write nor say so."""
    lines: list[str] = []
    saver = two(rank, world, folder, lines)

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with contextlib.ExitStack() as stack:
        if rank == 1:
            stack.enter_context(patch.object(state_file, "write", full))
            stack.enter_context(patch.object(Written, "notify", full))
        saver.start(1, state(1))
        assert saver._last is not None
        saver._last.part.result()
    saver.start(2, state(2))
    if rank == 0:
        until(lambda: saver.steps() == [2])
    return [saver.finish() == 2, saver.save(3, state(3))], lines


def test_a_worker_that_cannot_even_say_so_is_told_of_later(workers: Pool, tmp_path: Path) -> None:
    """It does not hold up the checkpoints that follow."""
    (first, lines), (other, _) = workers.run(cannot_tell, 2, str(tmp_path))
    assert first == other == [True, True]
    assert len(lines) == 1 and "step 1 could not be saved (worker 1: " in lines[0]


@replicas(2)
def test_one_that_ends_early_gives_up_what_others_have_not_written(
    rank: int, world: int, tmp_path: Path
) -> None:
    """After step 1 is saved, worker 0 begins step 2 alone, and ends."""
    lines: list[str] = []
    saver = two(rank, world, str(tmp_path), lines)
    assert saver.save(1, state(1))
    if rank == 0:
        saver.start(2, state(2))
    saver.close()
    if rank == 0:
        assert saver.steps() == [1] and not list(tmp_path.glob(".*"))
        gone = "step 2 could not be saved (worker 1 is gone); the one before is kept"
        assert lines == [gone]


@contextlib.contextmanager
def slow_disk(seconds: float) -> Iterator[None]:
    """Setup: every fsync takes so long."""
    original = os.fsync

    def fsync(file: int) -> None:
        time.sleep(seconds)
        original(file)

    with patch.object(os, "fsync", fsync):
        yield


def test_training_goes_on_while_the_disk_is_slow(workers: Pool, tmp_path: Path) -> None:
    """Every fsync takes two seconds, and still the steps after the first checkpoint are told before
    it is published. The summary says how long training has stood still."""
    arguments = ("method=co2", "co2.tau=3", "train.steps=12", "log.every=1", "checkpoint.every=6")
    runs = {}
    for name, setup in (("slow", slow_disk), ("quick", contextlib.nullcontext)):
        own = (2.0,) if name == "slow" else ()
        more = {"runs": tmp_path / name, "setup": setup, "setup_arguments": own}
        runs[name] = pooled(workers, 2, *arguments, **more)  # type: ignore[arg-type]
        assert runs[name].status == 0, runs[name].err
    told = metrics(runs["slow"].folder, "train")
    assert [line["step"] for line in told] == list(range(1, 13))
    assert (runs["slow"].folder / "checkpoints" / "step_12").exists()
    assert saving_s(runs["slow"]) > 2.0, "the last one is waited for"
    assert saving_s(runs["quick"]) > 0


def saving_s(run: Run) -> float:
    from co2.record.metrics import Summary

    summary = Summary.read(run.folder)
    assert summary is not None and summary.saving_s is not None
    return summary.saving_s


def test_arriving_in_a_state_by_itself() -> None:
    """With nothing under way the copy is there at once."""
    mean = BackgroundMean(3, ALONE)
    mean.start(torch.arange(3.0))
    taken = mean.state_dict(arriving=True)
    assert isinstance(taken["buffer"], Arriving) and not isinstance(taken["buffer"], Tensor)
    copied = HostCopy().take({"buffer": taken["buffer"]})["buffer"]
    mean.buffer.zero_()
    assert copied.tolist() == [0.0, 1.0, 2.0]
    assert isinstance(mean.state_dict()["buffer"], Tensor), "others get tensors"


@replicas(2)
def test_a_disk_that_is_full_for_all_is_told_of_at_once(
    rank: int, world: int, tmp_path: Path
) -> None:
    """No worker can write its part, nor say so, before worker 0 has told of its own."""
    lines: list[str] = []
    saver = two(rank, world, str(tmp_path), lines)
    full = OSError(28, "No space left on device")
    with (
        patch.object(state_file, "write", side_effect=full),
        patch.object(Written, "notify", side_effect=full),
    ):
        saver.start(1, state(1))
        if rank == 0:
            until(lambda: len(lines) > 0)
        assert saver.finish() is None
    assert len(lines) == (rank == 0)
    if lines:
        assert "step 1 could not be saved (worker 0: " in lines[0]
        assert "No space left" in lines[0]


def written(path: Path, state: dict[str, Any], worker: int = 0) -> Path:
    own = split(state, worker)
    state_file.write(path, own, HostCopy().take(own.tensors))
    return path


def names(path: Path) -> set[str]:
    return set(load_file(path))


def loaded(folder: Path, state: dict[str, Any], **options: Any) -> None:
    """Into these tensors, by torch.distributed.checkpoint alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no group
        reader = dcp.HuggingFaceStorageReader(str(folder))
        dcp.load(state, storage_reader=reader, no_dist=True, **options)


PLAIN = {
    "numbers": [0, -(2**70), 0.1, 1e-308, math.inf, -math.inf],
    "texts": ["", 'a"\n', "ü"],
    "nothing": [None, True, False, {}, []],
    "by number": {0: {"step": 1}, 7: {}},
    "by name": {"0": 1, "a.b": 2},
}


def test_plain_values_come_back(tmp_path: Path) -> None:
    found = state_file.read(written(tmp_path / "file", {**PLAIN, "nan": math.nan}))
    assert math.isnan(found.pop("nan"))
    assert found == PLAIN
    assert state_file.read(written(tmp_path / "file", {"pair": (1, (2,))})) == {"pair": [1, [2]]}


TENSORS = {
    "scalar": torch.tensor(3, dtype=torch.int64),
    "flags": torch.tensor([True, False]),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "half": torch.linspace(0, 1, 7, dtype=torch.bfloat16),
    "double": torch.full((2, 3), math.pi, dtype=torch.float64),
    "empty": torch.empty(0, 4),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "every other": torch.arange(8.0)[::2],
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
}


def test_tensors_come_back(tmp_path: Path) -> None:
    state = {"nested": [{"of": TENSORS}, [TENSORS["half"].clone()]], REPLICA: {"model": {"w": -1}}}
    found = state_file.read(written(tmp_path / "file", state))
    ((of, (half,)), saved) = found["nested"], TENSORS["half"]
    for name, value in TENSORS.items():
        assert of["of"][name].dtype == value.dtype and torch.equal(of["of"][name], value), name
    assert torch.equal(half, saved)


def test_names(tmp_path: Path) -> None:
    """Those of the replica are the same on all workers, and everybody has names for the rest."""
    one = torch.ones(2)
    for worker, own in ((0, "model.mean"), (3, "worker_3.model.mean")):
        state = {REPLICA: {"model": {"w": one.clone()}}, "model": {"mean": one.clone()}}
        assert names(written(tmp_path / "file", state, worker)) == {"model.w", own}


def test_tied_weights_are_there_once(tmp_path: Path) -> None:
    weight = torch.randn(4, 3, requires_grad=True)
    path = written(tmp_path / "file", {"in": weight, "out": weight.detach(), "more": weight[:2]})
    assert names(path) == {"in", "more"}
    found = state_file.read(path)
    assert found["in"] is found["out"] and torch.equal(found["in"], weight)
    assert torch.equal(found["more"], weight[:2])


def test_two_tensors_of_one_name() -> None:
    state = {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}
    with pytest.raises(AssertionError, match=r"called a\.b"):
        split(state, 0)


def test_what_is_neither_plain_nor_a_tensor(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="set"):
        written(tmp_path / "file", {"a": {1, 2}})


def test_what_another_worker_saves(tmp_path: Path) -> None:
    """And of what both have, the own."""
    here, there = ({"w": torch.full((2,), float(n)), "bias": torch.ones(1)} for n in range(2))
    first = written(tmp_path / "0", {REPLICA: {"model": here}})
    state = {REPLICA: {"model": {**there, "bias": ELSEWHERE}}}
    second = written(tmp_path / "1", state, 1)
    assert names(second) == {"model.w"}
    model = state_file.read(second, [first])[REPLICA]["model"]
    assert model["w"].tolist() == [1.0, 1.0] and model["bias"].tolist() == [1.0]
    with pytest.raises(KeyError, match="bias"):
        state_file.read(second)


def shards(folder: Path) -> Tensor:
    """A weight of [5, 2] in parts of three, two and no rows."""
    whole = torch.arange(10.0).reshape(5, 2)
    for worker, (begin, end) in enumerate(((0, 3), (3, 5), (5, 5))):
        own = Split({}, {"model.w": whole[begin:end]}, {"model.w": [begin, 0]})
        state_file.write(folder / f"{worker}.safetensors", own, own.tensors)
    return whole


def test_shards_are_put_together(tmp_path: Path) -> None:
    """By PyTorch's own reader, and its tool that makes one file of many."""
    from torch.distributed.checkpoint import _consolidate_hf_safetensors as tool

    whole = shards(tmp_path)
    state = {"model": {"w": torch.zeros(5, 2)}}
    loaded(tmp_path, state)
    assert torch.equal(state["model"]["w"], whole)
    (tmp_path / "one").mkdir()
    tool.consolidate_safetensors_files(
        str(tmp_path), str(tmp_path / "one"), fqn_to_index_mapping={"model.w": 1}
    )
    (made,) = (tmp_path / "one").glob("*.safetensors")
    assert torch.equal(load_file(made)["model.w"], whole)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(6, 4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def test_a_model_with_buffers_and_tied_weights(tmp_path: Path) -> None:
    """Under their first name; who needs both lets PyTorch leave out the other."""
    model, other = Tied(), Tied()
    written(tmp_path / "own.safetensors", {REPLICA: {"model": model.state_dict()}})
    loaded(
        tmp_path, {"model": other.state_dict()}, planner=DefaultLoadPlanner(allow_partial_load=True)
    )
    for (name, one), same in zip(
        model.state_dict().items(), other.state_dict().values(), strict=True
    ):
        assert torch.equal(one, same), name


@pytest.fixture(scope="module")
def trained(workers: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two replicas that are averaged at the very end, and its last checkpoint."""
    arguments = ("method=local_sgd", "local_sgd.tau=5", "train.steps=8", "optim.name=adamw")
    arguments = (*arguments, "checkpoint.every=8")
    run = pooled(workers, 2, *arguments, runs=tmp_path_factory.mktemp("trained"))
    assert run.status == 0, run.err
    return run.folder


def test_the_weights_of_a_run(trained: Path) -> None:
    """The mean of what torch.distributed.checkpoint loads from its replicas is its consensus."""
    step, consensus = trained / "checkpoints" / "step_8", weights(trained)
    replicas = []
    for replica in range(2):
        state = {"model": {name: torch.zeros_like(value) for name, value in consensus.items()}}
        loaded(step / f"replica_{replica}", state)
        replicas.append(state["model"])
    first, second = replicas
    assert any(not torch.equal(first[name], second[name]) for name in first)
    for name, value in consensus.items():
        mean = torch.stack([first[name].double(), second[name].double()]).mean(0)
        torch.testing.assert_close(mean.to(value.dtype), value, msg=name)


def test_everything_of_a_run_as_one_file(trained: Path, tmp_path: Path) -> None:
    """As `dcp_to_torch_save` does it, which knows no other reader than that of `.distcp`."""
    folder, found = trained / "checkpoints" / "step_8" / "replica_0", {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no group
        _load_state_dict(
            found,
            storage_reader=dcp.HuggingFaceStorageReader(str(folder)),
            planner=_EmptyStateDictLoadPlanner(),
            no_dist=True,
        )
    torch.save(found, tmp_path / "all.pt")
    found, saved = torch.load(tmp_path / "all.pt"), load_file(folder / "worker_0.safetensors")
    assert found.keys() == saved.keys()
    for name, value in saved.items():
        assert torch.equal(found[name], value), name
    assert {"model", "optimizer", "method", "random"} == {name.partition(".")[0] for name in found}
    moments = {name for name in found if name.startswith("optimizer.state.")}
    assert {name.rpartition(".")[2] for name in moments} == {"step", "exp_avg", "exp_avg_sq"}


def test_a_person_can_read_what_is_no_tensor(trained: Path) -> None:
    with safe_open(trained / "checkpoints" / "step_8" / part(), "pt") as file:
        values = json.loads(file.metadata()["co2"])
    assert values["step"] == 8 and values["method"]["method"] == "local_sgd"
