"""Whole runs on a GPU: every task in bf16, compiled; resumed; traced; with lost members; shared out
over several workers, of which NCCL takes those of one GPU for as many machines."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import train
from co2.errors import PREEMPTED
from co2.gpus import ON_ONE_MACHINE, gpu_of
from co2.record import timeline
from co2.train.within_replica import CUT
from tasks import TASKS
from tests.cli import conftest
from tests.cli.harness import (
    LIMIT_S,
    STORY,
    assert_same_run,
    command,
    execute,
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
from tests.cli.test_elastic import STEPS, assert_no_step_is_missing, changes, disturbed, words
from tests.gpu import SLOWLY, gpu_only
from tests.grids import nonempty
from tests.server import Forked, environment, fork_program
from tests.workers import Pool

nobody_started_us, text = conftest.nobody_started_us, conftest.text
FEW = ("train.steps=4", "train.eval_every=4", "log.every=1", "checkpoint.every=0")
TRACED = ("trace=true", "train.steps=40", "log.every=20")
AGAIN = "train.checkpoint_activations=true"
LEARNS = [
    *((task, ()) for task in TASKS if task not in ("toy", "graph")),
    *((task, (AGAIN,)) for task in ("gpt2", "resnet50")),
    ("gpt2", ("optim.name=muon",)),
]
"""Languages, vision and point clouds."""


def placed(device: str, *, host: bool = False) -> tuple[str, ...]:
    """Overrides that train on the device; `host`: two workers share it, through gloo."""
    if device == "cpu":
        return ("launch.backend=gloo",)
    return (*(("comm.device=cpu",) if host else ()), "launch.backend=auto")


def assert_was_on(device: str, folder: Path) -> None:
    assert json.loads((folder / "summary.json").read_text())["device"].startswith(device)


@pytest.mark.parametrize("device", SLOWLY)
@pytest.mark.parametrize(("task", "more"), LEARNS)
def test_learns_in_bf16(
    workers: Pool,
    tmp_path: Path,
    root: Path,
    text: Path,
    task: str,
    more: tuple[str, ...],
    device: str,
) -> None:
    """Compiled; not on a CPU, where that would take minutes."""
    given = (*small(task, root, text), *FEW, *placed(device), "train.precision=bf16", *more)
    compiled = f"train.compile={str(device == 'cuda').lower()}"
    run = pooled(workers, 1, *given, compiled, runs=tmp_path)
    assert run.status == 0, run.err
    assert_was_on(device, run.folder)
    losses = [line["loss"] for line in metrics(run.folder, "train")]
    assert len(losses) == 4 and all(map(torch.isfinite, map(torch.tensor, losses)))


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


@pytest.mark.parametrize("device", SLOWLY)
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


@pytest.mark.parametrize("device", SLOWLY)
@pytest.mark.parametrize("method", ["co2", "streaming_diloco"])
def test_a_trace_ends_with_its_collectives(
    workers: Pool, tmp_path: Path, method: str, device: str
) -> None:
    """Which are gloo's, and under way when the profiler stops."""
    words = (f"method={method}", f"{method}.tau=3", *TRACED)
    run = pooled(workers, 2, *words, *placed(device, host=True), runs=tmp_path)
    assert run.status == 0, run.err
    assert_was_on(device, run.folder)
    found = timeline.read(run.folder)
    assert found.steps >= 9 and found.collectives and found.compute


@contextlib.contextmanager
def pair(runs: Path, device: str, *arguments: str) -> Iterator[list[Forked]]:
    """Two workers, each as torchrun would start it on a machine of its own. They must end alike, or
    as the caller waits for."""
    runs.parent.mkdir(parents=True, exist_ok=True)
    given = command(*arguments, *placed(device), runs=runs)[1:]
    with held_port() as port, (runs.parent / f"{runs.name}.log").open("a") as file:
        started = []
        for rank in ("0", "1"):
            env = environment(
                **{"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NCCL_HOSTID": f"host{rank}"},
                **ON_ONE_MACHINE,
            )
            started.append(fork_program(given, runs.parent, env, file.fileno(), file.fileno()))
        try:
            yield started
        finally:
            for process in started:
                kill_session(process)
                process.wait()


def ended(processes: list[Forked], runs: Path, status: int = 0) -> None:
    said = {process.wait(LIMIT_S) for process in processes}
    assert said == {status}, (runs.parent / f"{runs.name}.log").read_text()


def trained(runs: Path, device: str, *arguments: str) -> Path:
    """The folder of a run of a pair."""
    with pair(runs, device, *arguments) as two:
        ended(two, runs)
    (folder,) = folders(runs)
    assert_was_on(device, folder)
    return folder


@pytest.mark.parametrize("device", SLOWLY)
@pytest.mark.parametrize(
    ("task", "strategy"),
    [*(("gpt2", each) for each in ("zero1", *(one.value for one in CUT))), ("moe", "ep")],
)
def test_a_replica_of_two(
    tmp_path: Path, root: Path, text: Path, task: str, strategy: str, device: str
) -> None:
    """Its losses are those of ddp, but for rounding; in bf16, but for experts."""
    precision = "bf16" if task == "gpt2" else "fp32"
    common = (*small(task, root, text), *FEW, "method=allreduce", f"train.precision={precision}")
    losses = []
    for each in ("ddp", strategy):
        shared = ("mesh.replica_size=2", f"mesh.strategy={each}")
        folder = trained(tmp_path / each, device, *common, *shared)
        losses.append([line["loss"] for line in metrics(folder, "train")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


@pytest.mark.parametrize("device", SLOWLY)
@pytest.mark.parametrize("shard", ["true", "false"])
def test_stopped_amid_a_round_of_nccls(tmp_path: Path, shard: str, device: str) -> None:
    given = (*STORY, f"co2.shard={shard}", "toy.delay_s=0.02")
    whole, cut = trained(tmp_path / "whole", device, *given), tmp_path / "cut"
    with pair(cut, device, *given) as two:
        until(lambda: sum(len(metrics(one)) for one in folders(cut)) >= 12, two[0])
        os.kill(two[1].pid, signal.SIGTERM)
        ended(two, cut, PREEMPTED)
    assert_same_run(whole, trained(cut, device, *given))


@pytest.mark.parametrize("device", SLOWLY)
@pytest.mark.parametrize("method", ["co2", "allreduce"])
def test_a_trace_under_nccl(tmp_path: Path, method: str, device: str) -> None:
    tau = ("co2.tau=3",) if method == "co2" else ()
    folder = trained(tmp_path / "runs", device, f"method={method}", *tau, *TRACED)
    found = timeline.read(folder)
    assert found.steps >= 9 and found.collectives and found.compute


def ran(tmp_path: Path, *given: str, devices: str | None = None) -> tuple[Path, str]:
    """The folder of a run on a GPU that ended well, and what it has said."""
    runs = tmp_path / "runs"
    env = environment(**({} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}))
    run = execute(command(*given, "launch.backend=auto", runs=runs), runs, env)
    assert run.status == 0, run.err
    assert_was_on("cuda", run.folder)
    return run.folder, run.out + run.err


@gpu_only
def test_two_workers_share_a_gpu_through_the_host(tmp_path: Path) -> None:
    given = ("method=co2", "co2.tau=3", "train.steps=30", "comm.device=cpu", "launch.workers=2")
    folder, said = ran(tmp_path, *given)
    memory = json.loads((folder / "summary.json").read_text())["memory"]
    assert memory["extra_bytes"] == 0 < memory["host_bytes"]
    assert "in the host's memory" in said


@gpu_only
@pytest.mark.parametrize("method", ["allreduce", "co2"])
def test_four_workers_share_a_gpu_through_nccl(tmp_path: Path, method: str) -> None:
    given = ("train.steps=24", "launch.workers=4", f"method={method}")
    _, said = ran(tmp_path, *given, devices="0")
    assert "launch.workers=4: sharing one GPU, through NCCL's sockets" in said


@gpu_only
def test_how_well_a_gpu_is_used(tmp_path: Path) -> None:
    """MFU beside throughput where the peak is known, and what the memory held beside the trace."""
    folder, _ = ran(tmp_path, "train.steps=40", "launch.workers=1", "log.every=10", "trace=true")
    known = gpu_of(torch.cuda.get_device_name()) is not None
    lines = nonempty(metrics(folder, "train"))
    assert all(("mfu" in line) == known for line in lines)
    assert all(0 < line["mfu"] < 1 for line in lines if known and line["samples_per_s"])
    assert (folder / "trace" / "rank_0_memory.pickle").stat().st_size > 0


@gpu_only
@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize(
    "more",
    [
        pytest.param(("comm.device=cpu",), id="host"),
        pytest.param(
            (),
            id="nccl",
            marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs"),
        ),
    ],
)
def test_those_that_are_left_go_on(tmp_path: Path, more: tuple[str, ...], restarts: int) -> None:
    given = (
        *(f"train.steps={STEPS}", "train.eval_every=30", "log.every=1", "checkpoint.every=0"),
        *("launch.elastic=true", "launch.silent_s=20", "launch.backend=auto", "toy.delay_s=0.02"),
        *(*words("co2"), "launch.workers=2", f"launch.restarts={restarts}", *more),
    )
    folder = disturbed(tmp_path, *given, at=32, victims=(1,), number=signal.SIGKILL).folder
    assert_no_step_is_missing(folder)
    assert len(changes(folder)[-1]["members"]) == 1 + restarts
    assert_was_on("cuda", folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["final"]["accuracy"] > 0.6
