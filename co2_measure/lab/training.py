"""Runs one trial: a process of train.py for each worker, each in a network namespace of its own.

train.py is started as a user would start it, with the rank of each worker in its environment, so a
trial measures what users run: real collectives over real TCP connections.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from co2_measure.lab.slow_network import SlowNetwork
from co2_measure.lab.trial import LIMIT, Conditions, Trial, trial_folder
from co2_measure.peers import known_methods

TRAIN = Path(__file__).parents[2] / "train.py"
DEFAULTS = (
    "train.steps=60",
    "train.eval_every=1000000",
    "checkpoint.every=0",
    "log.wandb=disabled",
)
"""Overrides of every trial; those of the command line come later and win."""
TASK = (
    "task=gpt2",
    "gpt2.size=smoke",
    "gpt2.context=128",
    "gpt2.vocab_size=4096",
    "gpt2.eval_samples=8",
    "train.batch_size=8",
    "optim.lr=2e-3",
    "optim.warmup_steps=60",
    "data.validation=all",
)
"""The task where the overrides name no other: GPT-2 with 1.3 M parameters, whose exchange takes a
slow link long enough to be measured. That of conf at smoke scale is a seventh of it."""

_POLL_S = 0.05
_LAST_OUTPUT_S = 1.0
"""Worker 0 prints the error for all, and may not have done so yet when another one has ended."""

SummaryJSON = dict[str, Any]
"""The object in a run's summary.json, and "folder", the run's folder. `Any`, because it is JSON: a
value is a number, a string, or a dict such as the task's own scores."""


class TrialFailed(RuntimeError):
    """A worker ended with an error, which the message gives after the trial."""


def train(
    trial: Trial, conditions: Conditions, runs: Path, overrides: Sequence[str] = ()
) -> SummaryJSON:
    """Run a trial, unless `runs` has it already, and return its summary.

    Raises:
        TrialFailed: a worker ended with an error, or no summary was written.
        ConfigError: the network cannot be built on this machine.
    """
    summary = finished(trial, conditions, runs)
    if summary is None:
        _run_workers(trial, conditions, runs, overrides)
        summary = finished(trial, conditions, runs)
    if summary is None:
        raise TrialFailed(f"{trial}: ended without a summary.json")
    return summary


def finished(trial: Trial, conditions: Conditions, runs: Path) -> SummaryJSON | None:
    """The summary of a trial that has ended, with its folder, or None if it has not."""
    folder = trial_folder(trial, conditions, runs)
    found = sorted(folder.glob(f"*/*/{trial.method}/seed*/summary.json"))
    if not found:
        return None
    return {**json.loads(found[-1].read_text()), "folder": str(found[-1].parent)}


def trial_overrides(method: str, overrides: Sequence[str] = ()) -> list[str]:
    """The overrides with which a trial of this method starts train.py, except for its folder."""
    if method == LIMIT:
        chosen = ["method=local_sgd", "local_sgd.tau=1000000000"]
    else:
        chosen = [f"method={method}"]
    # `co2.tau=24` is meant for co2, and only its trials have that key.
    others = known_methods().keys() - {method}
    own = [word for word in overrides if word.lstrip("+~").partition(".")[0] not in others]
    has_task = any(word.startswith(("task=", "experiment=")) for word in overrides)
    return [*(() if has_task else TASK), *DEFAULTS, *chosen, *own]


def _run_workers(
    trial: Trial, conditions: Conditions, runs: Path, overrides: Sequence[str]
) -> None:
    """Start all workers, change the links when it is time, and wait until every worker has ended.
    Raises as `train` does."""
    folder = trial_folder(trial, conditions, runs)
    command = [sys.executable, str(TRAIN), *trial_overrides(trial.method, overrides)]
    command += [f"runs={folder}", f"tag={trial.method}"]
    rates, cores = conditions.rates(trial), conditions.cores(trial)
    changes, began = conditions.changes(trial), None
    with SlowNetwork(rates, dict(conditions.slow_cpus), cores) as network:
        processes = []
        for worker in range(trial.workers):
            env = environment(worker, trial.workers, network.address(0))
            processes.append(network.start(worker, command, env))
        while not any(statuses := [process.poll() for process in processes]) and None in statuses:
            if changes and began is None and _has_begun(folder, trial):
                began = time.monotonic()
            if changes and began is not None and time.monotonic() - began >= changes[0].seconds:
                change = changes.pop(0)
                for worker in range(trial.workers):
                    network.shape(worker, change.mbit)
            time.sleep(_POLL_S)
        failed = [number for number, status in enumerate(statuses) if status]
        if failed:
            raise TrialFailed(f"{trial}: {_reason(processes, failed[0])}")


def environment(worker: int, workers: int, address: str) -> dict[str, str]:
    """What a launcher would set for a worker in a network namespace, with worker 0 at `address`."""
    return {
        **os.environ,
        "RANK": str(worker),
        "WORLD_SIZE": str(workers),
        "LOCAL_RANK": str(worker),
        "LOCAL_WORLD_SIZE": str(workers),  # they share this machine's cores
        "MASTER_ADDR": address,
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
    }


def _has_begun(folder: Path, trial: Trial) -> bool:
    """Whether the first figures have been written, which follow the first step."""
    files = folder.glob(f"*/*/{trial.method}/seed*/metrics.jsonl")
    return any(path.stat().st_size > 0 for path in files)


def _reason(processes: Sequence[subprocess.Popen[str]], failed: int) -> str:
    """The first error that any worker printed; if none did, the failed worker's last line."""
    time.sleep(_LAST_OUTPUT_S)
    last = f"worker {failed}: status {processes[failed].returncode}"
    for number, process in enumerate(processes):
        process.kill()
        lines = [line for line in process.communicate()[0].splitlines() if line.strip()]
        for line in lines:
            if line.startswith("error: "):
                return line.removeprefix("error: ")
        if number == failed and lines:
            last = f"worker {number}: {lines[-1]}"
    return last
