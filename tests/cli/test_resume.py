"""A run that was killed, stopped, or met a bad disk ends as one that nothing happened to."""

import contextlib
import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

import train
from co2.errors import DIVERGED, REFUSED, ConfigError
from co2.record.folder import check_folder, read_summary
from co2.record.provenance import of_all_starts
from co2.train import checkpoint
from tests.cli.disturbed import Disturbance
from tests.cli.harness import (
    STORY,
    Run,
    assert_same_weights,
    cli,
    configured,
    contents,
    manifest,
    metrics,
    pooled,
    saved_steps,
    story,
    summary,
    with_losses,
)
from tests.cli.test_checkpoint import damage, part
from tests.cli.test_disturbed import by_itself, resumed_at
from tests.grids import nonempty
from tests.workers import Pool

# In the pool's workers: two of them, for the collective in flight.
STOPPED_AT = 33
POOLED = (*STORY, "checkpoint.every=10")


@pytest.fixture(scope="module")
def whole(workers: Pool, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Undisturbed."""
    return pooled(workers, 2, *POOLED, runs=tmp_path_factory.mktemp("whole") / "runs")


@pytest.fixture(scope="module")
def stopped(workers: Pool, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Stopped at step 33, with the checkpoints of 33 and 30."""
    runs = tmp_path_factory.mktemp("stopped") / "runs"
    run = pooled(workers, 2, *POOLED, runs=runs, stop_at=STOPPED_AT)
    assert saved_steps(run.folder) == [30, STOPPED_AT]
    return run


@pytest.fixture
def again(stopped: Run, tmp_path: Path) -> Path:
    """The folder of a copy of the run that was stopped; its runs are in `tmp_path / "runs"`."""
    shutil.copytree(stopped.runs, tmp_path / "runs", symlinks=True)
    return tmp_path / "runs" / stopped.folder.relative_to(stopped.runs)


def refused_again(
    workers: Pool,
    again: Path,
    *spoil: Callable[[Path], None],
    setup: Callable[..., contextlib.AbstractContextManager[None]] = nullcontext,
) -> tuple[str, str]:
    """The same command on a copy whose newest checkpoints are spoiled: it is refused in one line,
    and nothing is lost. Returns what is printed."""
    for step, act in zip((STOPPED_AT, 30), spoil, strict=False):
        act(again / "checkpoints" / f"step_{step}")
    before = contents(again)
    run = pooled(workers, 2, *POOLED, runs=again.parents[3], setup=setup, status=REFUSED)
    assert contents(again) == before
    line, *others = run.err.splitlines()
    assert others in ([], [line]), "each worker tells it here"
    return run.out, line


def test_no_good_checkpoint(workers: Pool, again: Path) -> None:
    """The run does not begin again by itself: somebody may still save what is there."""
    spoil = partial(damage, kind="truncated"), partial(damage, kind="flipped")
    _, err = refused_again(workers, again, *spoil)
    says = "/checkpoints holds no checkpoint that can be used .step_30 is damaged .*checksum"
    assert re.search(says, err) and "train afresh with resume=never" in err


@contextmanager
def unreadable(error: Exception, rank: int) -> Iterator[None]:
    """Setup: the files of a worker's checkpoints cannot be read."""

    def read(path: Path) -> str:
        raise error

    with patch.object(checkpoint, "_sha256", read) if dist.get_rank() == rank else nullcontext():
        yield


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (PermissionError(13, "Permission denied"), "Permission denied"),
        (MemoryError(), "MemoryError"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_cannot_be_read_is_not_damaged(
    workers: Pool, again: Path, error: Exception, why: str, rank: int
) -> None:
    """Another user's files, a server that does not answer, too little memory."""
    out, err = refused_again(workers, again, setup=partial(unreadable, error, rank))
    assert "damaged" not in out
    assert f"/step_{STOPPED_AT}/{part(rank)} cannot be read on worker {rank} ({why}); " in err


@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl"])
def test_what_else_cannot_be_read(again: Path, tmp_path: Path, name: str) -> None:
    (again / name).rename(again / "elsewhere")
    (again / name).symlink_to(name)
    before = contents(again)
    run = cli(*POOLED, "launch.workers=2", runs=tmp_path / "runs", status=REFUSED)
    assert contents(again) == before
    (line,) = run.err.splitlines()
    assert f"/{name} cannot be read (Too many levels of symbolic links); it is kept" in line


NO_LINES = f"the steps 1 to {STOPPED_AT} are missing"
LOST = {
    "deleted": (Path.unlink, NO_LINES),
    "a line": (lambda path: altered(path, 7, b"[7]\n"), "1 of its lines cannot be read"),
    "its end": (lambda path: cut(path, 30), "the steps 31 to 33 are missing"),
}


def altered(path: Path, line: int, content: bytes) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:line], content, *lines[line + 1 :]]))


def cut(path: Path, last: int) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if json.loads(line)["step"] <= last))


@pytest.mark.parametrize("how", LOST)
def test_lost_metrics_are_told(workers: Pool, again: Path, how: str) -> None:
    """The run goes on, but not as if nothing had been there."""
    lose, says = LOST[how]
    lose(again / "metrics.jsonl")
    run = pooled(workers, 2, *POOLED, runs=again.parents[3])
    (line,) = [line for line in run.out.splitlines() if "metrics.jsonl" in line]
    assert says in line
    assert [line["step"] for line in metrics(run.folder, "train")][-27:] == list(range(34, 61))


@pytest.mark.parametrize("name", ["config.yaml", "manifest.json"])
@pytest.mark.parametrize("how", ["missing", "- {torn", '{"data": {}, "resumed": 5}'])
def test_what_a_run_was_is_needed(again: Path, name: str, how: str) -> None:
    """Without its configuration another one would go on with its checkpoints."""
    (again / name).unlink()
    if how != "missing":
        (again / name).write_text(how if name == "manifest.json" else how[:7])
        how = "damaged"
    words, runs = (*POOLED, "launch.workers=2"), again.parents[3]
    with pytest.raises(ConfigError, match=rf"/{name} is {how}; train afresh with resume=never"):
        train.APP.prepare_data(configured(*words, runs=runs))
    train.APP.prepare_data(configured(*words, "resume=never", runs=runs))


def test_the_first_manifest_stays(workers: Pool, stopped: Run, again: Path) -> None:
    """It is of the start; a later one adds what was another then, and only that."""
    first = manifest(stopped.folder)
    assert manifest(pooled(workers, 2, *POOLED, runs=again.parents[3]).folder) == first
    now = {**first, "command": "train.py again", "world_size": 3, "data": {"sha256": "other"}}
    once = of_all_starts(first, now)
    change = {"command": "train.py again", "world_size": 3}
    assert once == {**first, "resumed": [change]}
    assert of_all_starts(once, now) == once
    back = {"command": first["command"], "world_size": 2}
    assert of_all_starts(once, first) == {**first, "resumed": [change, back]}


CONSTANT = ("optim.schedule=constant", "optim.warmup_steps=4", "optim.min_lr_ratio=0.0")
LONGER = (*CONSTANT, "log.every=1", "train.eval_every=8", "tag=longer")


def test_a_run_that_got_more_steps_has_not_finished(workers: Pool, tmp_path: Path) -> None:
    """Also where it is stopped before the new end: nothing takes the old figures for its own."""
    runs, arguments = tmp_path / "runs", (*LONGER, "method=co2", "co2.tau=2")
    pooled(workers, 2, *arguments, "train.steps=4", runs=runs)
    with pytest.raises(ConfigError, match=r"train.steps=2: .* holds a run with train.steps=4; "):
        configured(*arguments, "train.steps=2", "launch.workers=2", runs=runs)
    more = (*arguments, "train.steps=40")
    config = configured(*more, "launch.workers=2", runs=runs)
    assert read_summary(config) is None
    with pytest.raises(ConfigError, match=r"train.steps=40: .* holds a run with train.steps=4; "):
        check_folder(config, 2, as_it_is=True)
    run = pooled(workers, 2, *more, runs=runs, stop_at=10)
    assert not (run.folder / "summary.json").exists()
    pooled(workers, 2, *more, runs=runs)
    assert read_summary(config) is not None


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("optim.schedule=cosine",), "only optim.schedule=constant goes on with more"),
        (("optim.warmup_steps=5",), "only optim.schedule=constant goes on with more"),
        (("checkpoint.every=0",), "the last was not saved"),
    ],
)
def test_no_more_steps(workers: Pool, tmp_path: Path, words: tuple[str, ...], reason: str) -> None:
    """Where the rate depends on their number, and where the last step was not saved."""
    arguments = (*LONGER, *words)
    pooled(workers, 1, *arguments, "train.steps=4", runs=tmp_path)
    longer = (*arguments, "train.steps=8", "launch.workers=1")
    with pytest.raises(ConfigError, match=rf"^train.steps=8: .* train.steps=4, .*{reason}.*tag="):
        configured(*longer, runs=tmp_path)


def test_lines_at_another_interval(workers: Pool, whole: Run, again: Path) -> None:
    run = pooled(workers, 2, *POOLED, "log.every=7", runs=again.parents[3])
    assert resumed_at(run.out) == [STOPPED_AT]
    assert_same_weights(run.folder, whole.folder)
    assert [line["step"] for line in metrics(run.folder, "eval")] == [10, 20, 30, 40, 50, 60]


def test_a_moving_average(workers: Pool, tmp_path: Path) -> None:
    """It is evaluated and exported beside the weights."""
    arguments = ("method=co2", "co2.tau=3", "train.steps=24", "train.ema_decay=0.9")
    run = pooled(workers, 2, *arguments, runs=tmp_path)
    mean, last = (torch.load(run.folder / name) for name in ("model_ema.pt", "model.pt"))
    assert not all(torch.equal(weight, last[name]) for name, weight in mean.items())
    final = summary(run.folder)["final"]
    assert final["ema_loss"] != final["loss"]
    for words, expected in (([], last), (["--ema"], mean)):
        made = tmp_path / f"made{len(words)}"
        assert train.APP.main(["export", str(run.folder), str(made), *words]) == 0
        there = load_file(made / "model.safetensors")
        assert there.keys() == expected.keys()
        assert all(torch.equal(weight, expected[name]) for name, weight in there.items())


def noted(path: str, value: Tensor, _: int) -> Tensor:
    """At every loss each worker writes down a draw of every global generator."""
    drawn = [random.gauss(0, 1), float(np.random.randn()), torch.randn(()).item()]
    with Path(f"{path}.{dist.get_rank()}").open("a") as file:
        file.writelines(f"{number}\n" for number in drawn)
    return value


def test_replicas_draw_differently(workers: Pool, tmp_path: Path) -> None:
    setup = partial(with_losses, partial(noted, str(tmp_path / "drawn")))
    pooled(workers, 2, "train.steps=5", runs=tmp_path / "runs", setup=setup)
    drawn = [(tmp_path / f"drawn.{rank}").read_text().splitlines() for rank in (0, 1)]
    assert len({*drawn[0], *drawn[1]}) == 2 * 3 * 5


DIVERGE = ("optim.lr=1e30", "optim.schedule=constant", "optim.warmup_steps=0")


def assert_line(err: str, step: int | None, replica: int, last: str) -> None:
    """One line names step, worker and the last good checkpoint."""
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, err
    match = re.match(r"error: the loss is (nan|inf|-inf) at step (\d+) on worker (\d+); ", lines[0])
    assert match, lines[0]
    assert step is None or int(match.group(2)) == step
    assert int(match.group(3)) == replica
    assert f"last good checkpoint: {last}" in lines[0]
    assert "optim.lr" in lines[0]


@pytest.mark.parametrize("every", [0, 1])
def test_a_loss_that_is_not_finite(workers: Pool, tmp_path: Path, every: int) -> None:
    """Before there is any checkpoint, and after one."""
    words = (*DIVERGE, "log.every=1", f"checkpoint.every={every}")
    run = pooled(workers, 1, *words, runs=tmp_path / "runs", status=DIVERGED)
    assert DIVERGED == 65 and not (run.folder / "summary.json").exists()
    step, last = None, "none"
    if every:
        newest = saved_steps(run.folder)[-1]
        step, last = newest + 1, os.path.relpath(run.folder / f"checkpoints/step_{newest}")
    assert_line(run.err, step, 0, last)
    logged = nonempty(line["loss"] for line in story(run.folder))
    assert None not in logged, "logged as a good one"


def test_a_loss_that_is_not_finite_on_another_replica(tmp_path: Path) -> None:
    """Whoever of the workers ends first: the status is that of the one with the reason."""
    words = (*STORY, "checkpoint.every=3")
    bad = Disturbance("nan", "loss", 7, worker=1)
    ended = by_itself(words, bad, tmp_path / "runs", 2, DIVERGED)
    assert_line(ended.err, 7, 1, "runs/toy/co2/")
    assert "checkpoints/step_6;" in ended.err
    assert len(ended.err.splitlines()) == 1, "the other workers end in silence"


BAD = 20


def bad_gradient(value: Tensor, step: int) -> Tensor:
    """The gradient of a step is not a number on worker 0, though its loss is finite."""
    if step == BAD and dist.get_rank() == 0:
        value.register_hook(lambda gradient: gradient * math.nan)
    return value


NOT_FINITE = ("train.steps=40", "train.eval_every=100", "checkpoint.every=5", "tag=bad")
MEETS_IT: dict[str, Any] = {"setup": partial(with_losses, bad_gradient), "status": DIVERGED}


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (2, ("method=allreduce",)),
        (2, ("method=local_sgd", "local_sgd.tau=4")),
        (1, ("method=co2", "co2.tau=10")),  # its weights are finite: the mean is under way
    ],
    ids=str,
)
def test_what_is_not_finite_is_no_checkpoint(
    workers: Pool, tmp_path: Path, world: int, words: tuple[str, ...]
) -> None:
    """Else every restart would go on from it, and end again."""
    run = pooled(workers, world, *NOT_FINITE, *words, runs=tmp_path / "runs", **MEETS_IT)
    assert "/checkpoints/step_15; try a lower optim.lr" in run.err
    assert saved_steps(run.folder) == [10, 15]
    healthy = pooled(workers, world, *NOT_FINITE, *words, runs=tmp_path / "runs")
    assert resumed_at(healthy.out) == [15]


@pytest.mark.parametrize("world", [1, 2])
def test_a_bad_last_step(workers: Pool, tmp_path: Path, world: int) -> None:
    """No forward pass follows, but an evaluation."""
    words = (*NOT_FINITE, "train.steps=20")
    run = pooled(workers, world, *words, runs=tmp_path / "runs", **MEETS_IT)
    assert not (run.folder / "summary.json").exists()
    assert "error: the validation loss is nan at step 20; last good checkpoint: " in run.err
    assert "/checkpoints/step_15; " in run.err and not (run.folder / "model.pt").exists()


@pytest.mark.parametrize("elastic", ["false", "true"])
def test_a_loss_that_is_not_finite_on_all_replicas(tmp_path: Path, elastic: str) -> None:
    """It is told by one of them."""
    words = (*DIVERGE, "method=local_sgd", f"launch.elastic={elastic}")
    ended = cli(*words, runs=tmp_path / "runs", status=DIVERGED)
    assert len(re.findall("the loss is", ended.err)) == 1, ended.err
