"""Runs whose replicas have several workers: as exact, and as careful, as all others. What cannot be
is refused: tests/cli/test_bad_input.py."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from co2.task import Task
from tasks import TASKS
from tasks.text.gpt2 import GPT2
from tasks.text.transnormer import TransNormer
from tests.cli.harness import (
    Run,
    assert_same_run,
    cli,
    interrupted,
    kill_session,
    metrics,
    pooled,
    saved_steps,
    small,
    summary,
    weights,
)
from tests.cli.test_checkpoint import part
from tests.grids import grid, nonempty
from tests.workers import Pool

SHORT = ("train.steps=16", "train.eval_every=8", "log.every=1", "checkpoint.every=5")
EVALUATED = ("train.steps=7", "train.eval_every=4", "log.every=1", "train.clip_norm=1")
CO2 = ("method=co2", "co2.tau=3", "co2.clip=0.01")
STOPPED_AT = 14
"""In the middle of a round and with a collective in flight."""


def mesh(strategy: str, size: int = 2) -> tuple[str, str]:
    return f"mesh.replica_size={size}", f"mesh.strategy={strategy}"


def words(strategy: str, *method: str) -> tuple[str, ...]:
    return (*method, *SHORT, *mesh(strategy))


def test_experts_go_on_exactly(workers: Pool, tmp_path: Path, root: Path, text: Path) -> None:
    """tests/cli/test_disturbed.py has the other strategies."""
    arguments = (*small("moe", root, text), *words("ep", *CO2), "train.clip_norm=1")
    arguments = (*arguments, "train.batch_size=2")
    whole = pooled(workers, 4, *arguments, runs=tmp_path / "whole")
    run = pooled(workers, 4, *arguments, runs=tmp_path / "cut", stop_at=STOPPED_AT)
    assert saved_steps(run.folder) == [10, STOPPED_AT]
    assert (run.folder / "checkpoints" / f"step_{STOPPED_AT}" / part(1, 1)).exists()
    again = pooled(workers, 4, *arguments, runs=tmp_path / "cut")
    assert f"resumed at step {STOPPED_AT} of 16" in again.out
    assert_same_run(whole.folder, again.folder)
    told = summary(whole.folder)
    assert told["workers"] == 4 and told["replica_size"] == 2
    assert told["bytes_per_step"] > 0 and told["comm_s"] > 0


def assert_close(run: Run, plain: Run, **others: float) -> None:
    """Evaluations and weights, but for rounding.

    Args:
        others: what an evaluation tells beside the loss, and how far it may be off.
    """
    told = nonempty(metrics(run.folder, "eval"))
    for one, other in zip(told, metrics(plain.folder, "eval"), strict=True):
        for name, share in {"loss": 1e-5, **others}.items():
            assert one[name] == pytest.approx(other[name], rel=share)
    found, expected = weights(run.folder), weights(plain.folder)
    assert all(type(value) is torch.Tensor for value in found.values())
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_trains_as_replicas_of_one_worker(
    workers: Pool, tmp_path: Path, root: Path, text: Path
) -> None:
    """On the same samples: two workers with half a batch each are one with the whole."""
    gpt2 = (*small("gpt2", root, text), *CO2, *EVALUATED)
    plain = pooled(workers, 2, *gpt2, "train.batch_size=4", runs=tmp_path / "plain")
    more = ("train.batch_size=2", "train.checkpoint_activations=true")
    run = pooled(workers, 4, *gpt2, *mesh("zero3"), *more, runs=tmp_path / "zero3")
    assert_close(run, plain)


@contextmanager
def traced(task: type[Task]) -> Iterator[None]:
    """Setup: compilation ends with the graphs, which need no C++ compiler. In the third step they
    are all there."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter, original = CompileCounterWithBackend("aot_eager"), torch.compile
    counts, loss = [], task.loss

    def compiled(function: Any) -> Any:
        return original(function, backend=counter)

    def counted(self: Task, *arguments: Any) -> torch.Tensor:
        counts.append(counter.frame_count)
        return loss(self, *arguments)

    with patch.object(torch, "compile", compiled), patch.object(task, "loss", counted):
        yield
    assert 0 < counts[2] == counts[-1], counts


@pytest.mark.parametrize(
    ("task", "strategy", "again"),
    grid([(TransNormer, "zero2", True), (GPT2, "zero3", False)], lambda one: one[0] is GPT2),
)
def test_compiled_blocks(
    workers: Pool,
    tmp_path: Path,
    root: Path,
    text: Path,
    task: type[TransNormer | GPT2],
    strategy: str,
    again: bool,
) -> None:
    """They train as without a compiler, and are compiled once."""
    arguments = (*small(task.name, root, text), *CO2, *mesh(strategy), "train.clip_norm=1")
    arguments += ("train.batch_size=2", f"train.checkpoint_activations={again}")
    # An evaluation before the end compiles more.
    arguments += ("train.steps=4", "train.eval_every=100", "log.every=1")
    plain = pooled(workers, 2, *arguments, runs=tmp_path / "plain")
    told = {"runs": tmp_path / "compiled", "setup": partial(traced, task)}
    run = pooled(workers, 2, *arguments, "train.compile=true", **told)
    for one, other in zip(nonempty(metrics(run.folder)), metrics(plain.folder), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_experts_shared_by_two_workers(
    workers: Pool, tmp_path: Path, root: Path, text: Path
) -> None:
    """On the same samples they train as one worker with all experts, each with half of them."""
    moe = (*small("moe", root, text), "method=co2", *EVALUATED)
    plain = pooled(workers, 2, *moe, "train.batch_size=4", runs=tmp_path / "plain")
    run = pooled(workers, 4, *moe, "train.batch_size=2", *mesh("ep"), runs=tmp_path / "shared")
    assert_close(run, plain, busiest_expert=0.02)
    tokens = summary(run.folder)["exchange"]
    assert tokens["exposed_s"] > 0 and tokens["comm_s"] > 0
    # There and back, forward and backward: at most all choices of 2 windows of 32 in 2 layers.
    assert 0 < tokens["bytes_per_step"] <= 4 * 2 * 2 * 32 * 2 * 64 * 4
    assert summary(plain.folder)["exchange"] == {}


@pytest.mark.parametrize("task", TASKS)
def test_every_task_in_parts(
    workers: Pool, tmp_path: Path, root: Path, text: Path, task: str
) -> None:
    """Cut over two workers, with activations worked out twice: as where both hold all of it."""
    arguments = (*small(task, root, text), *CO2, "train.steps=4", "train.batch_size=4")
    runs = []
    for strategy, again in (("ddp", "false"), ("zero3", "true")):
        more = (*mesh(strategy), f"train.checkpoint_activations={again}", "log.every=1")
        runs.append(pooled(workers, 2, *arguments, *more, runs=tmp_path / strategy))
    whole, cut = (metrics(run.folder) for run in runs)
    for one, other in zip(whole, cut, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
    assert weights(runs[0].folder).keys() == weights(runs[1].folder).keys()


def test_all_workers_agree_on_tau(workers: Pool, tmp_path: Path) -> None:
    """Two that share a replica and did not would wait for each other for ever."""
    arguments = ("method=co2", "co2.tau=auto", "train.steps=62", *mesh("zero3"))
    run = pooled(workers, 4, *arguments, runs=tmp_path)
    assert "tau 12 → " in run.out


def test_killed(tmp_path: Path) -> None:
    """By train.py itself, with four workers of its own."""
    arguments = (*words("zero3", *CO2), "launch.workers=4", "toy.delay_s=0.05")
    given = {"when": lambda folder: bool(saved_steps(folder)), "act": kill_session, "status": None}
    folder = interrupted(*arguments, runs=tmp_path / "runs", **given).folder
    step = max(saved_steps(folder))
    run = cli(*arguments, runs=tmp_path / "runs")
    assert f"resumed at step {step} of 16" in run.out
    assert [line["step"] for line in metrics(folder, "train")] == list(range(1, 17))
    assert (folder / "model.pt").exists()
