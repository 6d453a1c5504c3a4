"""How much a collective in the background slows the computation beside it.

Two workers multiply matrices, one thread each, for as long as a round. During every other round a
BackgroundMean runs over the loopback device, and gloo's threads and the kernel's copies share the
cores with the computation. The time lost is the difference between neighbouring rounds; it is given
for the whole collective and for each MB that a worker sends.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import co2
from benchmarks import report
from co2.comm.background_mean import BackgroundMean
from co2.config import CommConfig, Precision

WORKERS = 2
HEAD = ["elements", "wire", "bucket, MiB", "round, ms", "lost, ms", "lost", "ms per MB sent"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15, help="pairs of rounds")
    parser.add_argument("--round", type=float, default=1.0, help="seconds of computation")
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    rows = []
    for numel in (1_334_016, 13_340_160):
        for wire in Precision:
            for bucket_mb in (25.0, 4.0, 1.0):
                comm = CommConfig(bucket_mb=bucket_mb, dtype=wire)
                with tempfile.TemporaryDirectory() as folder:
                    arguments = (Path(folder), numel, comm, args.repeats, args.round)
                    mp.spawn(measure, arguments, nprocs=WORKERS)
                    found = torch.load(Path(folder) / "measured.pt", weights_only=True)
                lost_s = statistics.median(found["lost_s"])
                rows.append(
                    [
                        f"{numel:,}",
                        wire.name,
                        f"{bucket_mb:g}",
                        f"{found['round_s'] * 1e3:.0f}",
                        f"{lost_s * 1e3:.1f}",
                        f"{lost_s / found['round_s']:.1%}",
                        f"{lost_s * 1e3 / (found['sent'] / 1e6):.2f}",
                    ]
                )
                print(*rows[-1], sep="  ", flush=True)
    report.write(
        args.out / "interference_cpu.md",
        "Computation beside a collective",
        f"{WORKERS} workers of one thread, gloo over loopback, medians over {args.repeats} pairs "
        "of rounds, one with a mean under way and one without. A slow link spreads the same work "
        "over more time.",
        HEAD,
        rows,
    )


def measure(
    rank: int, folder: Path, numel: int, comm: CommConfig, repeats: int, round_s: float
) -> None:
    """Compute and send as one worker; worker 0 writes what it found."""
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORKERS)
    mean = BackgroundMean(numel, co2.Mesh.world(), comm)
    a = torch.randn(256, 256)
    began = time.perf_counter()
    for _ in range(200):
        a @ a
    products = max(1, int(200 * round_s / (time.perf_counter() - began)))
    plain: list[float] = []
    beside: list[float] = []
    for _ in range(repeats):
        for with_mean, seconds in ((False, plain), (True, beside)):
            dist.barrier()
            began = time.perf_counter()
            if with_mean:
                mean.start()
            for _ in range(products):
                a @ a
            seconds.append(time.perf_counter() - began)
            mean.wait()
    sent = mean.bytes_per_mean()
    mean.close()
    if rank == 0:
        lost = [two - one for one, two in zip(plain, beside, strict=True)]
        found = {"round_s": statistics.median(plain), "lost_s": lost, "sent": sent}
        torch.save(found, folder / "measured.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
