"""slurm/train.sbatch and slurm/sweep.sbatch, submitted to a real controller."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from wandb.proto.wandb_internal_pb2 import Record

from tests.cli.harness import (
    STORY,
    TOY,
    Run,
    assert_same_run,
    folder_of,
    folders,
    metrics,
    saved_steps,
    weights,
)
from tests.slurm.controller import Job, Slurm

SLOW = ("toy.delay_s=0.1", "checkpoint.every=0")
"""Six seconds of training, and no other checkpoints than those of being told to stop."""


@pytest.fixture
def train(slurm: Slurm, tmp_path: Path) -> Callable[..., tuple[Job, Path]]:
    """Submit `STORY` with more of sbatch's options (`--…`) and overrides: the job, its folder."""

    def submit(*words: str) -> tuple[Job, Path]:
        options = [word for word in words if word.startswith("--")]
        overrides = [*STORY, *(word for word in words if not word.startswith("--"))]
        runs = tmp_path / "runs"
        command = (*options, "slurm/train.sbatch", *TOY, f"runs={runs}", *overrides)
        return slurm.sbatch(*command, log=tmp_path / "log"), folder_of(*overrides, runs=runs)

    return submit


def trains(folder: Path, steps: int = 5) -> Callable[[], bool]:
    """Whether a run has come so far."""
    return lambda: bool(metrics(folder)) and metrics(folder)[-1]["step"] >= steps


def is_back(job: Job) -> bool:
    """Whether a job waits in the queue for its second start. It is counted a moment later."""
    shown = job.shown
    return shown["JobState"] == "PENDING" and shown["Restarts"] == "1"


def assert_goes_on(job: Job, folder: Path, spawned: Run) -> None:
    """A job that was told to stop waits in the queue with its run saved; started again, it ends
    as one that nothing happened to."""
    job.until(lambda: is_back(job))
    assert not (folder / "summary.json").exists()
    (step,) = saved_steps(folder)
    assert step < 60 and metrics(folder)[-1]["step"] == step
    job.start_now()
    assert job.end() == "COMPLETED"
    assert re.findall(r"^resumed at step (\d+)", job.said, re.MULTILINE) == [str(step)]
    assert job.said.count("put back into the queue") == 1
    assert_same_run(folder, spawned.folder)


def test_two_tasks(train: Callable, spawned: Run) -> None:
    """Two workers, as two that train.py starts itself."""
    job, folder = train()
    assert job.end() == "COMPLETED"
    assert job.said.count("┌") == 1, "only worker 0 speaks"
    assert_same_run(folder, spawned.folder)


@pytest.mark.parametrize("tasks", [1, 2])
def test_told_to_stop(train: Callable, spawned: Run, tasks: int) -> None:
    """With one task, train.py starts the two workers."""
    job, folder = train(*SLOW, f"--ntasks-per-node={tasks}")
    job.until(trains(folder))
    job.slurm.call("scancel", "--signal=USR1", job.number)
    assert_goes_on(job, folder, spawned)


def test_preempted(train: Callable, spawned: Run) -> None:
    """By a job of a partition that comes first. Both segments are one W&B run."""
    job, folder = train(*SLOW, "log.wandb=offline")
    job.until(trains(folder))
    sleep = ("--partition=high", "--exclusive", "--wrap=sleep 1")
    other = job.slurm.sbatch(*sleep, log=job.log.with_name("other"))
    assert other.end() == "COMPLETED"
    assert_goes_on(job, folder, spawned)
    (step,) = saved_steps(folder)
    segments = wandb_segments(folder)
    assert len({run for run, _ in segments}) == 1
    assert segments[-1][1] == list(range(step + 1, 61))
    assert set().union(*(steps for _, steps in segments)) == set(range(1, 61))


def test_time_limit(train: Callable) -> None:
    """A minute is the shortest limit there is; half of it is left when the signal comes."""
    job, folder = train("toy.delay_s=1", "checkpoint.every=0", "--time=1", "--signal=USR1@30")
    job.until(lambda: is_back(job))
    assert len(saved_steps(folder)) == 1
    job.cancel()


def test_told_in_its_first_moments(train: Callable, spawned: Run) -> None:
    """No training is there to be told yet, and still the signal is not lost."""
    job, folder = train(*SLOW)
    job.until(lambda: len(job.tasks()) == 2)
    job.slurm.call("scancel", "--signal=USR1", job.number)
    assert_goes_on(job, folder, spawned)


def test_a_killed_task(train: Callable, spawned: Run) -> None:
    """The job has failed, and the same submission goes on."""
    words = ("toy.delay_s=0.1", "checkpoint.every=4")
    job, folder = train(*words)
    job.until(lambda: saved_steps(folder) != [])
    os.kill(job.tasks()["1"], signal.SIGKILL)
    assert job.end() == "FAILED"
    assert job.shown["ExitCode"] == "137:0" and job.shown["Restarts"] == "0"
    assert not (folder / "summary.json").exists()
    job, _ = train(*words)
    assert job.end() == "COMPLETED"
    assert "resumed at step" in job.said
    assert_same_run(folder, spawned.folder)


def test_a_dead_node(train: Callable, spawned: Run) -> None:
    """The controller itself puts the job back. Here it is submitted again in its place."""
    words = ("toy.delay_s=0.1", "checkpoint.every=4")
    job, folder = train(*words)
    job.until(lambda: saved_steps(folder) != [])
    update = ("scontrol", "update", "nodename=localhost")
    job.slurm.call(*update, "state=down", "reason=test")
    job.until(lambda: is_back(job))
    assert not (folder / "summary.json").exists()
    job.until(lambda: not job.processes())
    job.cancel()
    job.slurm.call(*update, "state=resume")
    job, _ = train(*words)
    assert job.end() == "COMPLETED"
    assert "resumed at step" in job.said
    assert_same_run(folder, spawned.folder)


def test_cancelled(train: Callable) -> None:
    """Saved, and not put back. W&B's own process, which the SIGTERM ends, is no reason to fail."""
    job, folder = train(*SLOW, "log.wandb=offline")
    job.until(trains(folder))
    job.cancel()
    assert job.end() == "CANCELLED"
    assert job.shown["Restarts"] == "0" and "put back" not in job.said
    (step,) = saved_steps(folder)
    assert not (folder / "summary.json").exists()
    (last,) = dict(wandb_segments(folder)).values()
    assert last == list(range(1, step + 1)), "what was lost with the process is told again"


def test_refused(slurm: Slurm, tmp_path: Path) -> None:
    words = (*TOY, f"runs={tmp_path}/runs", "co2.tua=3")
    job = slurm.sbatch("slurm/train.sbatch", *words, log=tmp_path / "log")
    assert job.end() == "FAILED"
    assert job.shown["ExitCode"] == "2:0"
    (line,) = [line for line in job.said.splitlines() if not line.startswith("srun: ")]
    assert line.startswith("error: co2.tua=3: ")
    assert not (tmp_path / "runs").exists()


def test_submitted_from_elsewhere(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.sbatch(f"--chdir={tmp_path}", "slurm/train.sbatch", log=tmp_path / "log")
    assert job.end() == "FAILED"
    assert job.said == "error: submit from the repository's root, where train.py is\n"


def test_sweep(slurm: Slurm, tmp_path: Path, spawned: Run) -> None:
    """Each task of an array is one combination, and only the one that is told to stops. Its last
    task goes by the array's own number."""
    runs, log = tmp_path / "runs", tmp_path / "log-%a"
    words = (*TOY, f"runs={runs}", *STORY, *SLOW, "co2.tau=1,3")
    array = slurm.sbatch("--array=0-2", "slurm/sweep.sbatch", *words, log=log)
    jobs = [Job(slurm, f"{array.number}_{index}", tmp_path / f"log-{index}") for index in range(3)]
    places = [folder_of(*STORY, *SLOW, f"co2.tau={tau}", runs=runs) for tau in (1, 3)]
    jobs[1].until(trains(places[1]))
    slurm.call("scancel", "--signal=USR1", jobs[1].number)
    assert jobs[2].end() == "FAILED" and jobs[2].shown["ExitCode"] == "2:0"
    assert jobs[2].said.startswith("error: SLURM_ARRAY_TASK_ID=2: the sweep has the jobs 0 to 1:")
    assert_goes_on(jobs[1], places[1], spawned)
    assert jobs[0].end() == "COMPLETED"
    assert [job.shown["Restarts"] for job in jobs] == ["0", "1", "0"]
    assert set(folders(runs)) == set(places)
    one, three = (weights(place) for place in places)
    assert any(not one[name].equal(three[name]) for name in one)


def wandb_segments(folder: Path) -> list[tuple[str, list[int]]]:
    """Of each offline W&B run in a run's folder, oldest first: its id, and the steps logged."""
    found = []
    for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        # Of a process that was ended there may be no record, only the file.
        run, steps = path.stem.removeprefix("run-"), []
        for record in wandb_records(path.read_bytes()):
            if record.HasField("run"):
                assert record.run.run_id == run
            for item in record.history.item:
                if (item.key or "".join(item.nested_key)) == "step":
                    steps.append(int(item.value_json))
        found.append((run, sorted(set(steps))))
    return found


def wandb_records(data: bytes) -> list[Record]:
    """W&B's file is a log as LevelDB's: after 7 bytes, chunks with a head of 7 bytes (checksum,
    length, kind), none of which crosses a block of 32 KiB; kinds 1 and 4 end a record."""
    records, whole, at = [], b"", 7
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            records.append(Record.FromString(whole))
            whole = b""
    return records
