"""How long a checkpoint holds training up: written in the background, and waited for.

Two workers train GPT-2 under CO2 as train.py does, with a checkpoint at the end of a round. Three
rounds take turns: after one nothing is saved, after one a checkpoint is begun and the next round is
trained while it is written, and after one it is waited for, as if there were no threads. The shares
are of the round without a checkpoint in the same turn. A checkpoint holds training up while its
state is copied to the host's memory; what its threads then take from the computation is a figure of
its own.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import report
from co2.config import Config
from co2.randomness import seed_everything
from co2.record.provenance import UNKNOWN
from co2.start.launch import mesh
from co2.train.build import build
from co2.train.run import Run
from co2.train.session import Session
from co2_measure.lab.training import TASK
from train import APP

WORKERS, GOAL = 2, 0.01
SIZES = {"1.3 M": TASK, "0.19 M": ("task=gpt2",)}
"""Parameters of the model, and what train.py calls it."""
HEAD = [
    "parameters",
    "τ",
    "checkpoint of a worker, MB",
    "round, ms",
    "held up, ms (min to max)",
    "of a round",
    "waited for, ms",
    "of a round",
    "next round longer by, ms",
    "of a round",
    f"under {GOAL:.0%}",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--tau", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    rows = []
    for name, words in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            config = APP.config(
                [
                    *words,
                    *("method=co2", f"co2.tau={args.tau}", "train.steps=100000"),
                    *("checkpoint.every=0", "log.wandb=disabled", f"launch.workers={WORKERS}"),
                    *("launch.backend=gloo", f"runs={folder}"),
                ]
            )
            arguments = (Path(folder), config, args.tau, args.turns)
            mp.start_processes(measure, arguments, nprocs=WORKERS, start_method="fork")
            found = torch.load(Path(folder) / "measured.pt", weights_only=True)
        rows.append(row(name, args.tau, found))
        print(*rows[-1], sep="  ", flush=True)
    report.write(
        args.out / "saving_cpu.md",
        "How long a checkpoint holds training up",
        f"{WORKERS} workers of one thread on as many cores, CO2, AdamW, fp32, checkpoint.every=τ; "
        f"medians over {args.turns} turns, and of shares within a turn. Goal for what training is "
        f"held up: under {GOAL:.0%} of a round. No core is left for the threads that write, so the "
        "round beside them is longer by what they compute.",
        HEAD,
        rows,
    )


def row(name: str, tau: int, found: dict[str, list[float]]) -> list[str]:
    plain = found["round_s"]

    def share(seconds: list[float]) -> float:
        return statistics.median(s / whole for s, whole in zip(seconds, plain, strict=True))

    def ms(seconds: list[float]) -> str:
        return f"{statistics.median(seconds) * 1e3:.1f}"

    held, waited = found["held_s"], found["waited_s"]
    longer = [s - whole for s, whole in zip(found["beside_s"], plain, strict=True)]
    spread = f"({min(held) * 1e3:.1f} to {max(held) * 1e3:.1f})"
    return [
        *(name, str(tau), f"{found['bytes'][0] / 1e6:.1f}", ms(plain)),
        *(f"{ms(held)} {spread}", f"{share(held):.2%}"),
        *(ms(waited), f"{share(waited):.1%}"),
        *(ms(longer), f"{share(longer):+.1%}"),
        "yes" if share(held) < GOAL else "missed",
    ]


def measure(rank: int, folder: Path, config: Config, tau: int, turns: int) -> None:
    """Train as one worker and measure; worker 0 writes what it found."""
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(WORKERS))
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORKERS)
    task = APP.make_task(config)
    task.setup(WORKERS)
    seed_everything(config.train.seed, rank)
    run = Run.open(config, task, APP.make_method(config), mesh(config), UNKNOWN)
    names = ("round_s", "held_s", "beside_s", "waited_s")
    found: dict[str, list[float]] = {name: [] for name in names}
    with run, closing(build(run)) as session:
        for turn in range(-1, turns):  # the first allocates, and is not counted
            seconds = [timed(lambda: one_round(session, tau))]
            seconds.append(timed(session.save))
            seconds.append(timed(lambda: one_round(session, tau)))
            session.finish_saving()
            seconds.append(timed(session.save_now))
            if turn >= 0:
                for name, value in zip(names, seconds, strict=True):
                    found[name].append(value)
        (newest, *_) = session.checkpoints.steps()
        path = session.checkpoints.folder / f"step_{newest}"
        files = (f"replica_{rank}/worker_0", f"equal/replica_{rank}_worker_0")
        found["bytes"] = [sum(float((path / f"{n}.safetensors").stat().st_size) for n in files)]
        run.method.flush()
    if rank == 0:
        torch.save(found, folder / "measured.pt")
    dist.barrier()
    dist.destroy_process_group()


def one_round(session: Session, tau: int) -> None:
    """What train.py does in a round."""
    task = session.run.task
    for _ in range(tau):
        with session.autocast():
            loss = task.loss(session.model, session.samples.next())
        loss.backward()
        session.checkpoints.hold()
        session.synchronize()
        session.optimizer.zero_grad(set_to_none=True)
        session.step += 1


def timed(act: Callable[[], object]) -> float:
    """Seconds that it takes; both workers begin together."""
    dist.barrier()
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
