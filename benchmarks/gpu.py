"""GPT-2 small on one GPU, bf16 and compiled: our loop against a plain one, and two replicas.

First a plain PyTorch loop and our loop with one worker take turns in this process, with the same
model, batches, optimizer, schedule and clipping. Then two replicas share the GPU: under CO2 with
`comm.device=cpu`, in turn with the same training in a round that never ends, without communication.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import report
from benchmarks.throughput import BRIEF, alone, composed, spread, together
from co2.comm.mesh import Mesh
from co2.start import placement
from train import APP

GOAL = 0.99
SMALL = [
    "gpt2.size=small",
    "gpt2.context=1024",
    "gpt2.vocab_size=50257",
    "train.batch_size=16",
    "train.precision=bf16",
    "train.compile=true",
]
PEAKS = {
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
}
"""TFLOP/s of dense bf16 from data sheets, by a part of the GPU's name; the first match counts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5, help="of both comparisons, in turn")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--tiny", action="store_true", help="smoke shape in fp32, on any machine")
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    if not (torch.cuda.is_available() or args.tiny):
        sys.exit("no CUDA device here; --tiny tries the same with a small model")
    common = [*BRIEF, *([] if args.tiny else SMALL), f"train.steps={args.steps}"]
    sharing = [*common, "launch.workers=2", "comm.device=cpu"]
    with tempfile.TemporaryDirectory() as runs:
        flops = flops_per_token([*common, f"runs={runs}"])
        plain, ours = alone(args.pairs, ["method=co2", *common, f"runs={runs}"])
        shared = together(
            args.pairs,
            {
                NONE: ["method=local_sgd", "local_sgd.tau=1000000000", *sharing, f"runs={runs}"],
                CO2: ["method=co2", *sharing, f"runs={runs}"],
            },
        )
    rows = [
        row("plain loop", 1, plain, plain, flops),
        row("train.py, co2", 1, ours, plain, flops),
        row(NONE, 2, shared[NONE], shared[NONE], flops),
        row(CO2, 2, shared[CO2], shared[NONE], flops),
    ]
    report.write(
        args.out / ("gpu_tiny.md" if args.tiny else "gpu.md"),
        f"GPT-2 {'smoke' if args.tiny else 'small'}, one GPU, tokens per second",
        f"Medians over {args.pairs} pairs of {args.steps} steps, the first step left out; each "
        "ratio is taken within a pair, of the line to the one above it. Goal for train.py against "
        f"the plain loop: {GOAL}. Forward and backward take {flops / 1e9:.3f} GFLOP a token by "
        "torch's counter, which counts the whole square of attention; MFU is their share of "
        "the vendor's figure for dense bf16. Two replicas take turns on the GPU, so their tokens "
        "are no more than one's.",
        ["loop", "workers", "tokens/s, all workers", "MFU", "ratio, median (min to max)"],
        rows,
    )


NONE = "train.py, no communication, comm.device=cpu"
CO2 = "train.py, co2, comm.device=cpu"


def row(
    name: str, workers: int, rates: list[float], against: list[float], flops: float
) -> list[str]:
    rate, peak = statistics.median(rates), peak_flops()
    ratios = [rate / base for rate, base in zip(rates, against, strict=True)]
    mfu = f"{rate * flops / peak:.1%}" if peak else "not known"
    return [name, str(workers), f"{rate:,.0f}", mfu, "1" if rates is against else spread(ratios)]


def flops_per_token(overrides: list[str]) -> float:
    """Operations of forward and backward for one token, a multiplication and an addition each."""
    config = composed(["method=co2", *overrides, "train.batch_size=2"])
    task = APP.make_task(config)
    task.setup(1)
    device, _ = placement.place_of(config, 0, 1)
    model = task.model().to(device)
    batch = next(task.batches(Mesh(0, 1, device), 0))
    assert isinstance(batch, torch.Tensor), "of a language task"
    batch = batch.to(device)
    with FlopCounterMode(display=False) as counter:
        task.loss(model, batch).backward()
    return counter.get_total_flops() / (len(batch) * task.units_per_sample)


def peak_flops() -> float | None:
    """Operations per second of this GPU; None if its data sheet is not listed above."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((1e12 * peak for part, peak in PEAKS.items() if part in name), None)


if __name__ == "__main__":
    main()
