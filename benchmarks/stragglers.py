"""What one replica at half speed costs the others, with and without launch.quorum.

Three workers, whose steps wait for a fixed time in place of computing, so that the machine's cores
do not decide the result; the last one waits twice as long. The trainings of a repeat follow one
another in the same processes, and ratios are taken within a repeat. The first rounds, until the
pace is known, count too.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from benchmarks import report
from co2.elastic.members import Members
from co2.elastic.quorum import Quorum
from co2.elastic.replicas import Replicas
from co2.methods import METHODS
from co2.methods.base import QUORUM

SETTINGS: dict[str, dict[str, int]] = {"local_sgd": {}, "co2": {}, "co2_keep": {"fragments": 1}}
"""By method; in fragments it refuses a quorum."""
WORKERS, TAU, STEP_S = 3, 12, 0.1
HOST, SILENT_S = "127.0.0.1", 60.0
HEAD = [
    "method",
    "all as fast, steps/s",
    "one slow, steps/s",
    "one slow, quorum=2, steps/s",
    "gain by the quorum",
    "of all as fast",
    "steps that the slow one made",
]


@dataclass(frozen=True)
class Training:
    """One training of all workers."""

    name: str
    """The method's."""
    slow: bool
    """Whether the last worker needs twice as long for a step."""
    quorum: int | None
    steps: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="of the three trainings of a method")
    parser.add_argument("--steps", type=int, default=96, help="of a training")
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    cells = [(False, None), (True, None), (True, 2)]
    trainings = [
        Training(name, *cell, args.steps)
        for name in SETTINGS
        for _ in range(args.repeats)
        for cell in cells
    ]
    stores = [dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False) for _ in trainings]
    with tempfile.TemporaryDirectory() as folder:
        ports = [store.port for store in stores]
        mp.spawn(work, (Path(folder), trainings, ports), nprocs=WORKERS)
        fast, *_, last = (
            json.loads(Path(folder, str(rank)).read_text()) for rank in range(WORKERS)
        )
    rates = [steps_per_s for steps_per_s, _ in fast]
    made = [number / args.steps for _, number in last]
    rows = []
    for place, name in enumerate(SETTINGS):
        own = range(place * args.repeats * len(cells), (place + 1) * args.repeats * len(cells))
        equal, waiting, quorum = (
            [rates[index] for index in own[cell :: len(cells)]] for cell in range(len(cells))
        )
        gains = [one / other for one, other in zip(quorum, waiting, strict=True)]
        kept = [one / other for one, other in zip(quorum, equal, strict=True)]
        rows.append(
            [
                name,
                *(f"{statistics.median(one):.2f}" for one in (equal, waiting, quorum)),
                f"{statistics.median(gains):.2f} ×",
                f"{statistics.median(kept):.0%}",
                f"{statistics.median(made[index] for index in own[2 :: len(cells)]):.0%}",
            ]
        )
    report.write(
        args.out / "stragglers_cpu.md",
        "One of three replicas at half speed",
        f"τ = {TAU}, {args.steps} steps of {STEP_S * 1e3:.0f} ms, of {2 * STEP_S * 1e3:.0f} ms on "
        f"the slow one; medians over {args.repeats} repeats. Steps/s are worker 0's, which is not "
        "slow; under an overlapped method it is up to a round ahead when it ends, so that waiting "
        "looks less. co2_keep sends the model whole, as a quorum asks.",
        HEAD,
        rows,
    )


def work(rank: int, folder: Path, trainings: list[Training], ports: list[int]) -> None:
    """Take part in all trainings, and leave worker `rank`'s steps/s and own steps of each."""
    torch.set_num_threads(1)
    found = [train(rank, one, port) for one, port in zip(trainings, ports, strict=True)]
    Path(folder, str(rank)).write_text(json.dumps(found))


def train(rank: int, training: Training, port: int) -> tuple[float, int]:
    """Returns steps per second, and the steps that this worker has made."""
    members = Members((HOST, port), rank, SILENT_S)
    members.first(range(WORKERS))
    mesh = Replicas(members, torch.device("cpu")).mesh
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    kind = METHODS[training.name]
    method = kind(kind.Config(tau=TAU, **SETTINGS[training.name]))
    method.prepare(model, optimizer, mesh)
    members.formed()
    weighted = QUORUM not in method.refusals()
    quorum = Quorum(training.quorum, TAU, members, mesh.device, weighted)
    seconds = STEP_S * (2 if training.slow and rank == WORKERS - 1 else 1)
    made = 0
    members.agree()
    began = time.perf_counter()
    for step in range(training.steps):
        if quorum.makes(step):
            with quorum.timed():
                time.sleep(seconds)
                model(torch.ones(8, 64)).square().mean().backward()
            made += 1
        quorum.report_pace(step)
        method.step()
        quorum.share_out(step)
        optimizer.zero_grad()
    rate = training.steps / (time.perf_counter() - began)
    members.agree()
    method.flush()
    members.leave()
    if rank == 0:
        print(training, f"{rate:.2f} steps/s", flush=True)
    return rate, made


if __name__ == "__main__":
    main()
