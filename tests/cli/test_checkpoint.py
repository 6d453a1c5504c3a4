"""Checkpoints: what saving is made of, piece by piece; one is written while training goes on, of
the step it was asked for; PyTorch's own tools read its files."""

import contextlib
import itertools
import math
import os
import resource
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._pytree import tree_leaves

import train
from co2.comm.background_mean import Arriving, BackgroundMean
from co2.comm.collectives import gathered, local
from co2.comm.mesh import Mesh
from co2.config import Strategy
from co2.errors import ConfigError
from co2.methods import METHODS
from co2.train import checkpoint, state_file
from co2.train.checkpoint import MANIFEST, Checkpoints, Written
from co2.train.estimate import holdings
from co2.train.session import Session
from co2.train.state_file import ELSEWHERE, REPLICA, Equal, HostCopy, Split, split
from tasks.toy import CLASSES
from tests.cli.harness import (
    configured,
    metrics,
    pooled,
    saved_steps,
    summary,
    weights,
    with_losses,
)
from tests.grids import OF_A_KIND, grid, nonempty
from tests.methods.driver import overrides
from tests.workers import Pool, replicas

ALONE = Mesh(0, 1, torch.device("cpu"))
DAMAGES = ("truncated", "flipped", "missing", "no manifest", "torn manifest", "only the folder")


def state(step: int) -> dict[str, Any]:
    """A state that tells its step, with the kinds of values that real ones hold."""
    return {
        "weight": torch.full((3, 2), float(step)),
        "half": torch.full((5,), step, dtype=torch.bfloat16),
        "count": torch.tensor(step),
        "nested": {"lr": [0.1 * step, None], "in_flight": True, 0: [step, "text"]},
    }


def assert_state(found: tuple[int, dict[str, Any]] | None, step: int) -> None:
    assert found is not None and found[0] == step
    expected = state(step)
    for name in ("weight", "half", "count"):
        assert found[1][name].dtype == expected[name].dtype
        assert torch.equal(found[1][name], expected[name])
    assert found[1]["nested"] == expected["nested"]


def checkpoints(folder: Path, keep: int = 2, lines: list[str] | None = None) -> Checkpoints:
    return Checkpoints(folder, ALONE, None, keep, (lines if lines is not None else []).append)


def part(replica: int = 0, worker: int = 0) -> str:
    """The file of a worker in a checkpoint."""
    return f"replica_{replica}/worker_{worker}.safetensors"


def held(folder: Path, replica: int = 0) -> list[Path]:
    """What a replica of one worker reads of a checkpoint."""
    return [folder / part(replica), *(folder / "equal").glob("*.safetensors")]


def damage(folder: Path, kind: str, name: str = part()) -> None:
    """Spoil a checkpoint as a disk or a person may."""
    file, manifest = folder / name, folder / MANIFEST
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif kind == "flipped":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif kind == "missing":
        file.unlink()
    elif kind == "no manifest":
        manifest.unlink()
    elif kind == "torn manifest":
        manifest.write_bytes(manifest.read_bytes()[:-9])
    else:
        shutil.rmtree(folder)
        folder.mkdir()


def put_back(folder: Path, step: int) -> None:
    """A checkpoint that was found damaged and set aside."""
    (folder / f"damaged_step_{step}").rename(folder / f"step_{step}")


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    saver = checkpoints(tmp_path, keep)
    for step in (8, 9, 10, 11):  # as text, 9 would be newer than 11
        assert saver.save(step, state(step))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted(f"step_{step}" for step in (11, 10, 9)[:keep])
    assert saver.steps() == [11, 10, 9][:keep]
    assert_state(saver.load(), 11)


def test_what_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    saver = checkpoints(tmp_path, keep=1)
    names = ("step_9.old", "step_x", "step_²", "step_-1", "step_", "notes")
    for name in (".step_9", *names):
        (tmp_path / name).mkdir()
    assert saver.steps() == [] and saver.load() is None
    for step in (1, 2):
        assert saver.save(step, state(step))
    assert saver.steps() == [2]
    assert {path.name for path in tmp_path.iterdir()} == {*names, "step_2"}
    assert_state(saver.load(), 2)


def test_any_length_of_a_torn_file_is_noticed(tmp_path: Path) -> None:
    saver = checkpoints(tmp_path)
    assert saver.save(1, state(1))
    file = tmp_path / "step_1" / part()
    whole = file.read_bytes()
    for length in {0, 1, len(whole) - 1, *range(0, len(whole), 97)}:
        file.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match="holds no checkpoint that can be used"):
            saver.load()


def test_any_flipped_bit_of_the_manifest_is_survived(tmp_path: Path) -> None:
    saver = checkpoints(tmp_path)
    assert saver.save(1, state(1)) and saver.save(2, state(2))
    file = tmp_path / "step_2" / MANIFEST
    whole = file.read_bytes()
    passed_over = 0
    for position in range(len(whole)):
        data = bytearray(whole)
        data[position] ^= 1 << position % 8
        file.write_bytes(data)
        found = saver.load()
        assert found is not None
        assert_state(found, found[0])
        if found[0] == 1:
            passed_over += 1
            put_back(tmp_path, 2)
    assert passed_over > 64, "at least the digits of the checksum count"


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Before each fsync and each rename of saving step 2; 1 or 2 is whole each time."""
    found = []
    for moment in range(1, 99):
        folder = tmp_path / str(moment)
        saver = checkpoints(folder)
        assert saver.save(1, state(1))
        killed = dies_at(moment, lambda saver=saver: saver.save(2, state(2)))
        after = checkpoints(folder).load()
        assert after is not None
        assert_state(after, after[0])
        assert not list(folder.glob(".*")), "of the dead nothing is left"
        found.append(after[0])
        saver = checkpoints(folder)
        assert_state(saver.load(), after[0])
        assert saver.save(2, state(2)), "what the dead left behind is no obstacle"
        assert_state(saver.load(), 2)
        assert sorted(path.name for path in folder.iterdir()) == ["step_1", "step_2"]
        if not killed:
            break
    assert len(found) >= 6, "files, manifest, folder: synced and renamed"
    assert found == sorted(found) and set(found) == {1, 2}


class Killed(BaseException):
    """What no handler of the program catches."""


def dies_at(moment: int, act: Callable[[], object]) -> bool:
    """Act, and die before the call of fsync or rename with this number; False: it came through."""
    calls = []

    def mortal(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls.append(original)
            if len(calls) == moment:
                raise Killed
            return original(*arguments)

        return call

    renamed = mortal(Path.rename)
    with (
        patch.object(os, "fsync", mortal(os.fsync)),
        patch.object(Path, "rename", lambda path, target: renamed(path, target)),
    ):
        try:
            act()
        except Killed:
            return True
    return False


def of_all(folder: Path, lines: list[str], keep: int = 2) -> Checkpoints:
    """The checkpoints of all workers. Collective."""
    mesh = Mesh.world(device="cpu")
    group = mesh.new_group_across_replicas("gloo")
    return Checkpoints(folder, mesh, group, keep, lines.append)


@contextmanager
def full_disk() -> Iterator[None]:
    """States find no room: the system's own limit on files is met."""
    original, limits = state_file.write, resource.getrlimit(resource.RLIMIT_FSIZE)

    def write(*arguments: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        try:
            original(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with patch.object(state_file, "write", write):
        yield


@replicas()
@pytest.mark.parametrize("world", [1, 2])
def test_a_full_disk(rank: int, world: int, tmp_path: Path) -> None:
    """The last worker's, at step 2 of three."""
    lines: list[str] = []
    saver = of_all(tmp_path, lines)
    assert saver.save(1, state(1))
    with full_disk() if rank == world - 1 else nullcontext():
        assert not saver.save(2, state(2))
    assert saver.save(3, state(3))
    assert saver.steps() == [3, 1] and len(lines) <= 1
    for line in lines:
        assert "step 2 could not be saved" in line and "\n" not in line
        assert f"worker {world - 1}" in line and "File too large" in line


@replicas(2)
def test_a_worker_that_diverged_counts_for_all(rank: int, tmp_path: Path) -> None:
    """Worker 1 diverges at step 2, which is saved with and without the check for it."""
    lines: list[str] = []
    saver, fault = of_all(tmp_path, lines), "method.anchor.0 is not finite"
    sound = {**state(1), "model": {"mask": torch.tensor(-math.inf)}, "method": {"anchor": [None]}}
    bad = {**sound, "method": {"anchor": [torch.tensor([0.0, math.nan if rank == 1 else 1.0])]}}
    assert saver.save(1, sound) and not saver.save(2, bad)
    with patch.object(state_file, "not_finite", lambda _: ""):
        assert saver.save(2, bad), "as earlier versions did"
    found = saver.load()
    assert found is not None and found[0] == 1
    assert saver.diverged == f"worker 1: {fault} at step 2"
    told = [
        f"step 2 could not be saved (worker 1: {fault}); the one before is kept",
        f"checkpoint step_2 is of a training that diverged ({fault}); trying the one before",
    ]
    assert lines == (told if rank == 0 else [])


def test_write_durably_replaces_whole_files_only(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    checkpoint.write_durably(path, "old")
    for moment in (1, 2):
        assert dies_at(moment, lambda: checkpoint.write_durably(path, "new" * 999))
        assert path.read_text() == "old"
    assert dies_at(3, lambda: checkpoint.write_durably(path, "new")), "its name is synced as well"
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.json"]


LIMIT_S = 300.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def disk_that_waits(slow_s: float = 0.0) -> Iterator[threading.Event]:
    """Nothing is written before the event, and each file takes so long afterwards."""
    goes, original = threading.Event(), state_file.write

    def write(*arguments: Any) -> None:
        assert goes.wait(LIMIT_S)
        time.sleep(slow_s)
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


def test_the_memory_is_used_again() -> None:
    copy, first, second = HostCopy(), tensors(1), tensors(2)
    one = copy.take(first)
    places = {name: one[name].data_ptr() for name in first}
    other = copy.take(second)
    assert {name: other[name].data_ptr() for name in places} == places
    assert all(torch.equal(other[name], second[name]) for name in places)
    assert not any(other[name].data_ptr() == second[name].data_ptr() for name in places)


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


@replicas(2)
def test_nobody_waits_for_another(rank: int, tmp_path: Path) -> None:
    """Worker 0 begins three checkpoints before worker 1 begins its first."""
    saver = of_all(tmp_path, [], keep=3)
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


@replicas(2)
@pytest.mark.parametrize(
    ("victim", "written", "steps"), [(1, False, [1]), (1, True, [2, 1]), (0, False, [1])]
)
def test_a_worker_is_lost(
    rank: int, tmp_path: Path, victim: int, written: bool, steps: list[int]
) -> None:
    """While step 2 is under way, also the one that publishes; the other one goes on alone. What was
    not written is given up; what is whole is published."""
    lines: list[str] = []
    saver = of_all(tmp_path, lines, keep=3)
    assert saver.save(1, state(1))
    if rank != victim or written:
        saver.start(2, state(2))
    if rank == victim:
        if written:
            assert saver._last is not None
            saver._last.part.result()
        torch.distributed.barrier()
        saver._publisher.shutdown(wait=False, cancel_futures=True)  # as far as it has come
        return
    torch.distributed.barrier()
    saver.regroup(ALONE, None)
    assert saver.steps() == steps
    assert saver.save(3, state(3)), "saving goes on"
    assert_state(saver.load(), 3)
    saver.close()
    gone = f"step 2 could not be saved (worker {victim} is gone); the one before is kept"
    assert lines == ([] if written else [gone])
    assert not list(tmp_path.glob(".*"))


@replicas(2)
def test_a_worker_that_cannot_even_say_so_is_told_of_later(rank: int, tmp_path: Path) -> None:
    """At step 1 worker 1 can neither write nor say so, which holds up no later checkpoint."""
    lines: list[str] = []
    saver = of_all(tmp_path, lines, keep=3)
    full = OSError(28, "No space left on device")
    with contextlib.ExitStack() as stack:
        if rank == 1:
            for owner, name in ((state_file, "write"), (Written, "notify")):
                stack.enter_context(patch.object(owner, name, side_effect=full))
        saver.start(1, state(1))
        assert saver._last is not None
        saver._last.part.result()
    saver.start(2, state(2))
    if rank == 0:
        until(lambda: saver.steps() == [2])
    assert saver.finish() == 2 and saver.save(3, state(3))
    if rank == 0:
        (line,) = lines
        assert "step 1 could not be saved (worker 1: " in line


@replicas(2)
def test_one_that_ends_early_gives_up_what_others_have_not_written(
    rank: int, tmp_path: Path
) -> None:
    """After step 1 is saved, worker 0 begins step 2 alone, and ends."""
    lines: list[str] = []
    saver = of_all(tmp_path, lines)
    assert saver.save(1, state(1))
    if rank == 0:
        saver.start(2, state(2))
    saver.close()
    if rank == 0:
        assert saver.steps() == [1] and not list(tmp_path.glob(".*"))
        gone = "step 2 could not be saved (worker 1 is gone); the one before is kept"
        assert lines == [gone]


@contextlib.contextmanager
def slow_disk(step: int) -> Iterator[None]:
    """Setup: nothing is written before training has come to this step."""
    with disk_that_waits(slow_s=0.1) as goes:

        def told(value: Tensor, call: int) -> Tensor:
            if call == step:
                goes.set()
            return value

        with with_losses(told):
            yield


def test_training_goes_on_while_the_disk_is_slow(workers: Pool, tmp_path: Path) -> None:
    """Step 6 is written from step 9 on. The summary says how long training has stood still."""
    arguments = ("method=co2", "co2.tau=3", "train.steps=12", "log.every=1", "checkpoint.every=6")
    run = pooled(workers, 2, *arguments, runs=tmp_path, setup=partial(slow_disk, 9))
    assert [line["step"] for line in metrics(run.folder, "train")] == list(range(1, 13))
    assert saved_steps(run.folder) == [6, 12]
    assert summary(run.folder)["saving_s"] > 0.1, "the last one is waited for"


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
    found = state_file.read([written(tmp_path / "file", {**PLAIN, "nan": math.nan})])
    assert math.isnan(found.pop("nan"))
    assert found == PLAIN
    assert state_file.read([written(tmp_path / "file", {"pair": (1, (2,))})]) == {"pair": [1, [2]]}


TENSORS = {
    "scalar": torch.tensor(3, dtype=torch.int64),
    "flags": torch.tensor([True, False]),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "half": torch.linspace(0, 1, 7, dtype=torch.bfloat16),
    "double": torch.full((2, 3), math.pi, dtype=torch.float64),
    "no rows": torch.empty(0, 4),
    "no columns": torch.empty(3, 0),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "every other": torch.arange(8.0)[::2],
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
}


def test_tensors_come_back(tmp_path: Path) -> None:
    state = {"nested": [{"of": TENSORS}, [TENSORS["half"].clone()]], REPLICA: {"model": {"w": -1}}}
    found = state_file.read([written(tmp_path / "file", state)])
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
    found = state_file.read([path])
    assert found["in"] is found["out"] and torch.equal(found["in"], weight)
    assert torch.equal(found["more"], weight[:2])


def test_what_another_worker_saves(tmp_path: Path) -> None:
    """And of what both have, the own."""
    here, there = ({"w": torch.full((2,), float(n)), "bias": torch.ones(1)} for n in range(2))
    first = written(tmp_path / "0", {REPLICA: {"model": here}})
    state = {REPLICA: {"model": {**there, "bias": ELSEWHERE}}}
    second = written(tmp_path / "1", state, 1)
    assert names(second) == {"model.w"}
    model = state_file.read([second], [[first]])[REPLICA]["model"]
    assert model["w"].tolist() == [1.0, 1.0] and model["bias"].tolist() == [1.0]
    with pytest.raises(KeyError, match="bias"):
        state_file.read([second])


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 7, 40])
def test_what_is_equal_is_there_once(tmp_path: Path, num_replicas: int) -> None:
    """Each replica writes as many bytes of it, to a row, and reads all; so does PyTorch's tool."""
    vectors = {"anchor": torch.randn(101), "momentum": torch.randn(101)}
    model = {"w": torch.randn(5, 2, requires_grad=True), "b": torch.randn(3).double()}
    equal = nonempty([*TENSORS.values(), *vectors.values(), *model.values()])
    row = max(one.nbytes // max(1, one.size(0) if one.dim() else 1) for one in equal)
    files, numbers = [], []
    for replica in range(num_replicas):
        state = {
            REPLICA: {"model": {name: Equal(one) for name, one in model.items()}},
            "method": [{name: Equal(one) for name, one in (TENSORS | vectors).items()}],
            "own": torch.full((2,), float(replica)),
        }
        own = split(state, 0, replica, num_replicas)
        copies = HostCopy().take(own.tensors)
        (tmp_path / f"equal_{replica}").mkdir()
        files.append([tmp_path / f"own_{replica}", tmp_path / f"equal_{replica}/file.safetensors"])
        state_file.write(files[-1][0], own, copies)
        state_file.write_equal(files[-1][1], own, copies)
        assert names(files[-1][0]) == {"own"}
        numbers.append(sum(one.nbytes for one in load_file(files[-1][1]).values()))
    assert sum(numbers) == sum(one.nbytes for one in equal)
    assert all(abs(number - sum(numbers) / num_replicas) <= row for number in numbers)
    parts = [path for _, path in files]
    for replica in (0, num_replicas - 1):
        found = state_file.read([files[replica][0], *reversed(parts)])
        assert found["own"].tolist() == [replica, replica]
        for name, value in (TENSORS | vectors).items():
            there = found["method"][0][name]
            assert there.dtype == value.dtype and torch.equal(there, value), name
        assert all(torch.equal(found[REPLICA]["model"][name], model[name]) for name in model)
    (tmp_path / "all").mkdir()
    for replica, path in enumerate(parts):
        path.rename(tmp_path / "all" / f"{replica}.safetensors")
    whole = {"model": {"w": torch.zeros(5, 2), "b": torch.zeros(3, dtype=torch.float64)}}
    loaded(tmp_path / "all", whole)
    assert all(torch.equal(whole["model"][name], model[name]) for name in model)
    parts = list((tmp_path / "all").iterdir())
    for lost in nonempty(path for path in parts if names(path)):
        left = [path for path in parts if path != lost]
        with pytest.raises((ValueError, KeyError), match=r"are missing|^'"):
            state_file.read([files[0][0], *left])


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


@pytest.fixture(scope="module")
def trained(workers: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two replicas that are averaged at the very end, and its last checkpoint."""
    arguments = ("method=local_sgd", "local_sgd.tau=5", "train.steps=8", "optim.name=adamw")
    arguments = (*arguments, "checkpoint.every=8")
    run = pooled(workers, 2, *arguments, runs=tmp_path_factory.mktemp("trained"))
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


def test_a_damaged_part_of_what_is_equal(workers: Pool, tmp_path: Path) -> None:
    """No replica can do without it: all go on from the checkpoint before."""
    words = ("method=co2", "co2.tau=3", "train.steps=9", "log.every=1", "checkpoint.every=4")
    stopped = pooled(workers, 3, *words, runs=tmp_path, stop_at=8)
    damage(stopped.folder / "checkpoints/step_8", "flipped", "equal/replica_2_worker_0.safetensors")
    run = pooled(workers, 3, *words, runs=tmp_path)
    assert "resumed at step 4 of 9" in run.out
    assert "step_8 is damaged (equal/replica_2_worker_0.safetensors" in run.out


@contextmanager
def comparing(some: bool) -> Iterator[None]:
    """Setup: instead of saving, all workers compare what they hold to be equal, if anything."""
    compared = []

    def save(session: Session) -> None:
        leaves = tree_leaves(session.state())
        own = [local(one.tensor).clone() for one in leaves if isinstance(one, Equal)]
        compared.append(len(own))
        mesh = session.run.mesh
        counterparts = slice(mesh.rank_in_replica, None, mesh.replica_size)
        for other in nonempty(gathered(own, session.run.control)[counterparts]):
            assert all(map(torch.equal, own, other)) and len(own) == len(other)

    with patch.object(Session, "save", save):
        yield
    assert (max(compared) > 0) == some


@pytest.mark.parametrize("name", grid(METHODS, OF_A_KIND.__contains__))
def test_what_a_method_calls_equal_is(workers: Pool, tmp_path: Path, name: str) -> None:
    """After every step, whatever is in flight. tests/methods/test_contract.py has every method."""
    words = (f"method={name}", *overrides(name), "train.steps=9", "checkpoint.every=1")
    setup = partial(comparing, name not in ("noloco", "zero_one_adam"))
    pooled(workers, 3, *words, "train.ema_decay=0.9", runs=tmp_path, setup=setup)


@pytest.mark.parametrize(
    ("name", "strategy"),
    grid(
        itertools.product(
            ("allreduce", "co2_keep"), [one for one in Strategy if one.value != "ep"]
        ),
        lambda case: case == ("allreduce", Strategy.zero3),
    ),
)
def test_what_workers_of_a_replica_call_equal_is(
    workers: Pool, tmp_path: Path, name: str, strategy: Strategy
) -> None:
    """Each worker's own part is that of its counterparts."""
    mesh = ("mesh.replica_size=2", f"mesh.strategy={strategy.value}", "optim.name=adamw")
    words = (f"method={name}", *overrides(name), *mesh, "train.steps=6", "checkpoint.every=1")
    setup = partial(comparing, True)
    pooled(workers, 4, *words, "train.ema_decay=0.9", runs=tmp_path, setup=setup)


def tensor_bytes(folder: Path) -> int:
    tensors = (one for path in folder.glob("*.safetensors") for one in load_file(path).values())
    return sum(one.nbytes for one in tensors)


@pytest.mark.parametrize(
    ("method", "own", "equal"),
    [
        (("method=allreduce",), 0, 3),
        (("method=co2", "co2.tau=3"), 3, 3),
        (("method=co2_keep", "co2_keep.tau=3"), 4, 2 + 1 / 3),  # one of three fragments in flight
        (("method=co2_keep", "co2_keep.tau=3", "co2_keep.fragments=1"), 4, 3),
        (("method=diloco", "diloco.tau=3"), 3, 2),
    ],
)
def test_how_large_one_is(
    workers: Pool, tmp_path: Path, method: tuple[str, ...], own: int, equal: float
) -> None:
    """In model copies, with a mean in flight: what each replica has for itself, and what is there
    once. The rest is buffers and random states."""
    words = (*method, "train.steps=9", "optim.name=adamw", "checkpoint.every=0", "toy.hidden=1024")
    run = pooled(workers, 4, *words, runs=tmp_path, stop_at=7)
    folder = run.folder / "checkpoints/step_7"
    once, rest = tensor_bytes(folder / "equal"), 25_000
    copy = 4 * (16 * 1024 + 3 * 1024 + 1024 * CLASSES + CLASSES)
    assert once == pytest.approx(equal * copy, abs=1000)
    for replica in range(4):
        assert tensor_bytes(folder / f"replica_{replica}") == pytest.approx(own * copy, abs=rest)
    config = configured(*words, runs=tmp_path)
    planned = holdings(train.APP.make_task(config), config, 4)
    tensors = planned.saved_bytes - 4 * planned.memory.buffer_bytes
    assert tensors == pytest.approx((4 * own + equal) * copy, rel=0.001)
