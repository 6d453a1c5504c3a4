"""Runs whose replicas have several workers: as exact, and as careful, as all others."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from co2.errors import PREEMPTED, ConfigError
from co2.task import Task
from tasks import TASKS
from tasks.text.gpt2 import GPT2
from tasks.text.transnormer import TransNormer
from tests.cli.harness import (
    assert_same_run,
    cli,
    configured,
    folder_of,
    kill_session,
    metrics,
    pooled,
    saved_steps,
    small,
    started,
    stopped_after,
    until,
    weights,
)
from tests.cli.test_checkpoint import part
from tests.grids import nonempty
from tests.workers import Pool

SHORT = ("train.steps=16", "train.eval_every=8", "log.every=1", "checkpoint.every=5")
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
    assert whole.status == 0, whole.err
    told = {"setup": stopped_after, "setup_arguments": (STOPPED_AT,)}
    run = pooled(workers, 4, *arguments, runs=tmp_path / "cut", **told)
    assert run.status == PREEMPTED, run.err
    assert saved_steps(run.folder) == [10, STOPPED_AT]
    assert (run.folder / "checkpoints" / f"step_{STOPPED_AT}" / part(1, 1)).exists()
    again = pooled(workers, 4, *arguments, runs=tmp_path / "cut")
    assert again.status == 0 and f"resumed at step {STOPPED_AT} of 16" in again.out
    assert_same_run(whole.folder, again.folder)
    summary = json.loads((whole.folder / "summary.json").read_text())
    assert summary["workers"] == 4 and summary["replica_size"] == 2
    assert summary["bytes_per_step"] > 0 and summary["comm_s"] > 0


def test_trains_as_replicas_of_one_worker(
    workers: Pool, tmp_path: Path, root: Path, text: Path
) -> None:
    """On the same samples: two workers with half a batch each are one with the whole."""
    gpt2 = (
        *small("gpt2", root, text),
        *(*CO2, "train.steps=7", "train.eval_every=4", "log.every=1", "train.clip_norm=1"),
    )
    plain = pooled(workers, 2, *gpt2, "train.batch_size=4", runs=tmp_path / "plain")
    assert plain.status == 0, plain.err
    expected = weights(plain.folder)
    more = ("train.batch_size=2", "train.checkpoint_activations=true")
    run = pooled(workers, 4, *gpt2, *mesh("zero3"), *more, runs=tmp_path / "zero3")
    assert run.status == 0, run.err
    told = nonempty(metrics(run.folder, "eval"))
    for one, other in zip(told, metrics(plain.folder, "eval"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    found = weights(run.folder)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert type(value) is torch.Tensor
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-5, msg=name)


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
    [(TransNormer, "zero2", True), (GPT2, "zero3", False)],
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
    arguments = (
        *(*small(task.name, root, text), *CO2, *mesh(strategy)),
        *("train.steps=7", "train.batch_size=2", "log.every=1", "train.clip_norm=1"),
        f"train.checkpoint_activations={again}",
    )
    plain = pooled(workers, 4, *arguments, runs=tmp_path / "plain")
    told: dict[str, Any] = {"setup": traced, "setup_arguments": (task,)}
    compiled = "train.compile=true"
    run = pooled(workers, 4, *arguments, compiled, runs=tmp_path / "compiled", **told)
    assert plain.status == run.status == 0, run.err
    for one, other in zip(nonempty(metrics(run.folder)), metrics(plain.folder), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_experts_shared_by_two_workers(
    workers: Pool, tmp_path: Path, root: Path, text: Path
) -> None:
    """On the same samples they train as one worker with all experts, each with half of them."""
    moe = (
        *(*small("moe", root, text), "method=co2", "train.steps=7", "train.eval_every=4"),
        *("log.every=1", "train.clip_norm=1"),
    )
    plain = pooled(workers, 2, *moe, "train.batch_size=4", runs=tmp_path / "plain")
    assert plain.status == 0, plain.err
    arguments = (*moe, "train.batch_size=2", *mesh("ep"))
    run = pooled(workers, 4, *arguments, runs=tmp_path / "shared")
    assert run.status == 0, run.err
    told = nonempty(metrics(run.folder, "eval"))
    for one, other in zip(told, metrics(plain.folder, "eval"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["busiest_expert"] == pytest.approx(other["busiest_expert"], rel=0.02)
    tokens = json.loads((run.folder / "summary.json").read_text())["exchange"]
    assert tokens["exposed_s"] > 0 and tokens["comm_s"] > 0
    # There and back, forward and backward: at most all choices of 2 windows of 32 in 2 layers.
    assert 0 < tokens["bytes_per_step"] <= 4 * 2 * 2 * 32 * 2 * 64 * 4
    assert json.loads((plain.folder / "summary.json").read_text())["exchange"] == {}
    expected = weights(plain.folder)
    found = weights(run.folder)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("task", TASKS)
def test_every_task_in_parts(
    workers: Pool, tmp_path: Path, root: Path, text: Path, task: str
) -> None:
    """Cut over two workers, with activations worked out twice: as where both hold all of it."""
    arguments = (
        *small(task, root, text),
        *(*CO2, "train.steps=4", "train.batch_size=4", "log.every=1"),
    )
    runs = []
    for strategy, again in (("ddp", "false"), ("zero3", "true")):
        more = (*mesh(strategy), f"train.checkpoint_activations={again}")
        runs.append(pooled(workers, 2, *arguments, *more, runs=tmp_path / strategy))
        assert runs[-1].status == 0, runs[-1].err
    whole, cut = (metrics(run.folder) for run in runs)
    for one, other in zip(whole, cut, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
    assert weights(runs[0].folder).keys() == weights(runs[1].folder).keys()


def test_all_workers_agree_on_tau(workers: Pool, tmp_path: Path) -> None:
    """Two that share a replica and did not would wait for each other for ever."""
    arguments = ("method=co2", "co2.tau=auto", "train.steps=62", *mesh("zero3"))
    run = pooled(workers, 4, *arguments, runs=tmp_path)
    assert run.status == 0, run.err
    assert "tau 12 → " in run.out


def test_killed(tmp_path: Path) -> None:
    """By train.py itself, with four workers of its own."""
    arguments = (*words("zero3", *CO2), "launch.workers=4", "toy.delay_s=0.05")
    runs, log = tmp_path / "runs", tmp_path / "log"
    folder = folder_of(*arguments, runs=runs)
    with started(*arguments, runs=runs, log=log) as process:
        until(lambda: bool(saved_steps(folder)), process)
        kill_session(process)
        process.wait()
    step = max(saved_steps(folder))
    run = cli(*arguments, runs=runs)
    assert run.status == 0, run.err
    assert f"resumed at step {step} of 16" in run.out
    assert [line["step"] for line in metrics(folder, "train")] == list(range(1, 17))
    assert (folder / "model.pt").exists()


REFUSED = [
    (("launch.workers=3", *mesh("ddp")), "mesh.replica_size=2: must divide the 3 workers"),
    (("mesh.strategy=zero3",), "mesh.strategy=zero3: .*set mesh.replica_size to 2 or more"),
    (("comm.device=cpu", *mesh("ddp")), "comm.device=cpu: "),
    (("method=allreduce", "comm.dtype=bf16", *mesh("zero2")), "comm.dtype=bf16: "),
    (("method=torch_post_local_sgd", *mesh("ddp")), "mesh.replica_size=2: "),
    *(
        ((f"method={name}", "optim.name=adamw", *mesh(strategy)), f"mesh.strategy={strategy}: ")
        for name in ("onebit_adam", "zero_one_adam")
        for strategy in ("zero1", "zero2", "zero3")
    ),
    *(
        (("method=demo", *mesh(strategy)), f"mesh.strategy={strategy}: ")
        for strategy in ("zero1", "zero2", "zero3")
    ),
    *(
        (("optim.name=muon", *mesh(strategy)), f"mesh.strategy={strategy}: .* whole matrices")
        for strategy in ("zero2", "zero3")
    ),
    *(
        ((f"method={name}", "optim.name=adamw", *own, *mesh("zero1")), "mesh.strategy=zero1: ")
        for name, own in (
            ("acco", ()),
            ("desloc", ()),
            ("mt_dao", ()),
            ("diloco", ("diloco.average_moments=true",)),
        )
    ),
    (("mesh.sync_batch_norm=true",), "mesh.sync_batch_norm=true: .*set mesh.replica_size to 2"),
    (("mesh.sync_batch_norm=true", *mesh("ddp")), "mesh.sync_batch_norm=true: .* on GPUs only"),
    (mesh("ep"), "mesh.strategy=ep: divides experts, and task=toy has none"),
    (("task=moe", *mesh("ep", 3), "launch.workers=3"), "mesh.replica_size=3: must divide the 8 "),
    (("task=moe", "moe.kernel=grouped", *mesh("ep")), "moe.kernel=grouped: needs all experts "),
    (("task=moe", "moe.kernel=fused", "launch.backend=gloo"), "moe.kernel=fused: needs a CUDA "),
    (("task=moe", "method=co2", "co2.shard=true", *mesh("ep")), "mesh.strategy=ep: method=co2: "),
    (("task=moe", "method=sparseloco", *mesh("ep")), "mesh.strategy=ep: method=sparseloco: its "),
    (
        ("method=streaming_diloco", "streaming_diloco.exchange=int8", *mesh("zero2")),
        "mesh.strategy=zero2: method=streaming_diloco: exchange=int8 ",
    ),
]


@pytest.mark.parametrize(("arguments", "line"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused(tmp_path: Path, arguments: tuple[str, ...], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}"):
        configured("launch.workers=2", *arguments, runs=tmp_path)
