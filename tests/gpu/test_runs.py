"""Whole runs on a GPU: every task in bf16, compiled; resumed; traced; shared out over two workers.

Two workers of NCCL share one GPU here, which NCCL takes for two machines. Where a test also has a
CPU, its body has at least run without a GPU.
"""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import train
from co2.errors import PREEMPTED
from co2.gpus import ON_ONE_MACHINE
from co2.record import timeline
from co2.train.within_replica import CUT
from tasks import TASKS
from tests.cli.harness import (
    LIMIT_S,
    STORY,
    assert_same_run,
    command,
    folders,
    held_port,
    kill_session,
    metrics,
    pooled,
    saved_steps,
    small,
    stopped_after,
    until,
)
from tests.gpu.conftest import CUDA
from tests.server import Forked, environment, fork_program
from tests.workers import Pool

DEVICES = ["cpu", CUDA]
SLOWLY = [pytest.param("cpu", marks=pytest.mark.slow), CUDA]
FEW = ("train.steps=4", "train.eval_every=4", "log.every=1", "checkpoint.every=0")
COMPILED = [task for task in TASKS if task not in ("toy", "graph")]
"""Languages, vision and point clouds."""


def placed(device: str, *, host: bool = False) -> tuple[str, ...]:
    """Overrides that train on the device; `host`: two workers share it, through gloo."""
    shared = ("comm.device=cpu",) if host else ()
    return (
        (*shared, "launch.backend=auto") if device == "cuda" else (*shared, "launch.backend=gloo")
    )


def assert_was_on(device: str, folder: Path) -> None:
    assert json.loads((folder / "summary.json").read_text())["device"].startswith(device)


def assert_learns(device: str, folder: Path) -> None:
    assert_was_on(device, folder)
    losses = [line["loss"] for line in metrics(folder, "train")]
    assert len(losses) == 4 and all(map(torch.isfinite, map(torch.tensor, losses)))


@pytest.mark.parametrize("device", SLOWLY)
@pytest.mark.parametrize("task", COMPILED)
def test_bf16_compiled(
    workers: Pool, tmp_path: Path, root: Path, text: Path, task: str, device: str
) -> None:
    """On a CPU it is not compiled, which would take minutes."""
    words = (*small(task, root, text), *FEW, *placed(device), "train.precision=bf16")
    compiled = f"train.compile={str(device == 'cuda').lower()}"
    run = pooled(workers, 1, *words, compiled, runs=tmp_path)
    assert run.status == 0, run.err
    assert_learns(device, run.folder)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("task", ["gpt2", "resnet50"])
def test_bf16_compiled_with_activations_computed_again(
    workers: Pool, tmp_path: Path, root: Path, text: Path, task: str, device: str
) -> None:
    words = (*small(task, root, text), *FEW, *placed(device), "train.precision=bf16")
    again = ("train.checkpoint_activations=true", f"train.compile={str(device == 'cuda').lower()}")
    run = pooled(workers, 1, *words, *again, runs=tmp_path)
    assert run.status == 0, run.err
    assert_learns(device, run.folder)


@pytest.mark.parametrize("device", DEVICES)
def test_muon(workers: Pool, tmp_path: Path, root: Path, text: Path, device: str) -> None:
    words = (*small("gpt2", root, text), *FEW, *placed(device), "optim.name=muon")
    run = pooled(workers, 1, *words, runs=tmp_path)
    assert run.status == 0, run.err
    assert_learns(device, run.folder)


@pytest.mark.parametrize("device", SLOWLY)
def test_sampling_and_export(
    workers: Pool,
    tmp_path: Path,
    root: Path,
    text: Path,
    device: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (*small("gpt2", root, text), *FEW, *placed(device))
    run = pooled(workers, 1, *words, runs=tmp_path / "runs")
    assert run.status == 0, run.err
    capsys.readouterr()
    words = ["sample", str(run.folder), "the round", "--tokens", "12"]
    said = [train.APP.main(words) == 0 and capsys.readouterr().out for _ in range(2)]
    assert said[0] and said[0] == said[1] and said[0].startswith("the round")
    assert train.APP.main(["export", str(run.folder), str(tmp_path / "exported")]) == 0
    assert (tmp_path / "exported" / "model.safetensors").exists()


@pytest.mark.parametrize("device", DEVICES)
def test_goes_on_exactly_with_a_mean_in_flight(workers: Pool, tmp_path: Path, device: str) -> None:
    """Two workers that share a GPU. They stop amid a round."""
    words = (*STORY, *placed(device, host=True), "toy.hidden=32")
    whole = pooled(workers, 2, *words, runs=tmp_path / "whole")
    assert whole.status == 0, whole.err
    told = {"setup": stopped_after, "setup_arguments": (29,)}
    stopped = pooled(workers, 2, *words, runs=tmp_path / "cut", **told)
    assert stopped.status == PREEMPTED and saved_steps(stopped.folder)[-1] % 3
    again = pooled(workers, 2, *words, runs=tmp_path / "cut")
    assert again.status == 0, again.err
    assert_was_on(device, again.folder)
    assert_same_run(whole.folder, again.folder)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", ["co2", "streaming_diloco"])
def test_a_trace_ends_with_its_collectives(
    workers: Pool, tmp_path: Path, method: str, device: str
) -> None:
    """Which are gloo's, and under way when the profiler stops."""
    words = (f"method={method}", f"{method}.tau=3", "trace=true", "train.steps=40", "log.every=20")
    run = pooled(workers, 2, *words, *placed(device, host=True), runs=tmp_path)
    assert run.status == 0, run.err
    assert_was_on(device, run.folder)
    found = timeline.read(run.folder)
    assert found.steps >= 9 and found.collectives and found.compute


@dataclass
class Pair:
    """Two workers, each as torchrun would start it on a machine of its own."""

    processes: list[Forked]
    log: Path

    def end(self) -> set[int]:
        """Their exit statuses."""
        return {process.wait(LIMIT_S) for process in self.processes}


@contextlib.contextmanager
def pair(runs: Path, device: str, *arguments: str) -> Iterator[Pair]:
    runs.parent.mkdir(parents=True, exist_ok=True)
    log = runs.parent / f"{runs.name}.log"
    words = command(*arguments, *placed(device), runs=runs)[1:]
    with held_port() as port, log.open("a") as file:
        started = []
        for rank in ("0", "1"):
            env = environment(
                **{"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NCCL_HOSTID": f"host{rank}"},
                **ON_ONE_MACHINE,
            )
            started.append(fork_program(words, runs.parent, env, file.fileno(), file.fileno()))
        try:
            yield Pair(started, log)
        finally:
            for process in started:
                kill_session(process)
                process.wait()


def trained(runs: Path, device: str, *arguments: str) -> Path:
    """The folder of a run of a pair."""
    with pair(runs, device, *arguments) as two:
        assert two.end() == {0}, two.log.read_text()
    (folder,) = folders(runs)
    assert_was_on(device, folder)
    return folder


STRATEGIES = ("zero1", *(strategy.value for strategy in CUT))


@pytest.mark.parametrize("device", SLOWLY)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_replica_of_two_in_bf16(
    tmp_path: Path, root: Path, text: Path, strategy: str, device: str
) -> None:
    """Its losses are those of ddp, but for rounding."""
    common = (*small("gpt2", root, text), *FEW, "method=allreduce", "train.precision=bf16")
    losses = []
    for each in ("ddp", strategy):
        shared = ("mesh.replica_size=2", f"mesh.strategy={each}")
        folder = trained(tmp_path / each, device, *common, *shared)
        losses.append([line["loss"] for line in metrics(folder, "train")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


@pytest.mark.parametrize("device", SLOWLY)
def test_experts_shared_by_two(tmp_path: Path, root: Path, text: Path, device: str) -> None:
    common = (*small("moe", root, text), *FEW, "method=allreduce", "mesh.replica_size=2")
    losses = []
    for strategy in ("ddp", "ep"):
        folder = trained(tmp_path / strategy, device, *common, f"mesh.strategy={strategy}")
        losses.append([line["loss"] for line in metrics(folder, "train")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


@pytest.mark.parametrize("device", SLOWLY)
@pytest.mark.parametrize("shard", ["true", "false"])
def test_stopped_amid_a_round_of_nccls(tmp_path: Path, shard: str, device: str) -> None:
    words = (*STORY, f"co2.shard={shard}", "toy.delay_s=0.02")
    whole = trained(tmp_path / "whole", device, *words)
    cut = tmp_path / "cut"
    with pair(cut, device, *words) as two:
        until(lambda: sum(len(metrics(one)) for one in folders(cut)) >= 12, two.processes[0])
        os.kill(two.processes[1].pid, signal.SIGTERM)
        assert two.end() == {PREEMPTED}, two.log.read_text()
    assert_same_run(whole, trained(cut, device, *words))


@pytest.mark.parametrize("device", SLOWLY)
@pytest.mark.parametrize("method", ["co2", "allreduce"])
def test_a_trace_under_nccl(tmp_path: Path, method: str, device: str) -> None:
    tau = ("co2.tau=3",) if method == "co2" else ()
    words = (f"method={method}", *tau, "trace=true", "train.steps=40", "log.every=20")
    found = timeline.read(trained(tmp_path / "runs", device, *words))
    assert found.steps >= 9 and found.collectives and found.compute
