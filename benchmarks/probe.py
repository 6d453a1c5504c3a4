"""`python -m co2 probe` held against the laboratory: predicted and measured waiting.

    sudo .venv/bin/python -m benchmarks.probe

For each rate the probe runs on links in network namespaces, once, as a user would run it there;
then each method trains on the same links, as in the laboratory. The task is the laboratory's.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks import report
from co2.app.probe import cut
from co2_measure.lab.slow_network import SlowNetwork, check_root
from co2_measure.lab.training import TASK, environment, train
from co2_measure.lab.trial import Conditions, Trial

GOAL = 5.0
"""Points between the two shares."""
TAU = 12
"""Of the forecasts, and conf's in training."""
HEAD = ["Mbit/s", "method", "predicted waiting, %", "measured, %", "points apart"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", default="20,100")
    parser.add_argument("--methods", default="allreduce,local_sgd,co2,co2_keep,acco,sparseloco")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1, help="trainings, whose median counts")
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    check_root()
    rows, apart = [], []
    with tempfile.TemporaryDirectory() as folder:
        for mbit in map(float, args.mbit.split(",")):
            predicted = probed(args.workers, mbit, Path(folder))
            for method in args.methods.split(","):
                share, fragments = predicted[method]
                overrides = cut(method, fragments, TAU)
                trials = [Trial(args.workers, mbit, method, n) for n in range(args.repeats)]
                runs = [train(one, Conditions(), Path(folder), overrides) for one in trials]
                measured = 100 * statistics.median(one["exposed_share"] for one in runs)
                apart.append(abs(share - measured))
                values = (f"{value:.1f}" for value in (share, measured, share - measured))
                rows.append([f"{mbit:g}", " ".join([method, *overrides]), *values])
                print(*rows[-1], sep="  ", flush=True)
    within = sum(one <= GOAL for one in apart)
    report.write(
        args.out / "probe.md",
        "What `co2 probe` predicts, and what training measures",
        f"{args.workers} workers, τ = {TAU}, the laboratory's GPT-2 of 1.3 M parameters; "
        f"{within} of {len(apart)} are at most {GOAL:g} points apart (the goal), "
        f"the largest {max(apart):.1f}.",
        HEAD,
        rows,
    )


Forecasts = dict[str, tuple[float, int]]
"""By method: the percentage of the time that it waits, and its fragments."""


def probed(workers: int, mbit: float, folder: Path) -> Forecasts:
    """What the probe says of each method."""
    trial = Trial(workers, mbit, "probe", 0)
    command = [
        sys.executable,
        "-m",
        "co2",
        "probe",
        f"--tau={TAU}",
        *TASK,
        f"runs={folder / 'probe'}",
    ]
    with SlowNetwork([mbit] * workers, cores=Conditions().cores(trial)) as network:
        processes = [
            network.start(worker, command, environment(worker, workers, network.address(0)))
            for worker in range(workers)
        ]
        texts = [process.communicate()[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), texts
    return shares_in(texts[0])


def shares_in(text: str) -> Forecasts:
    """The probe's table."""
    head, *others = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if line.startswith("| ")
    )
    share, fragments = head.index("waits"), head.index("fragments")
    return {row[0]: (float(row[share].rstrip("%")), int(row[fragments] or 1)) for row in others}


if __name__ == "__main__":
    main()
