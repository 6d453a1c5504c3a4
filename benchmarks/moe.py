"""Kernels of a layer of experts (`moe.kernel`): launches, latency, and share of the GPU's peak.

The forward pass and both passes of one layer, in the sizes of the task, for four ways to compute
the experts:

    loop      one expert after another
    grouped   PyTorch's grouped GEMM
    padded    one batched GEMM: each expert's tokens are padded to the largest number of them, a
              stand-in for layouts of blocks, such as MegaBlocks' (arXiv 2211.15841), in plain torch
    fused     one Triton kernel; its backward pass is the loop's

The table is written where there is a GPU. On a CPU a small layer is tried without `fused`, which
says nothing about GPUs.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks import report
from benchmarks.gpu import peak_flops
from tasks.moe.experts import Experts, Kernel
from tasks.moe.moe import SHAPES, Size

SIZES = ("small-8e", "small-64e", "medium-128e")
HEAD = [
    *("layer", "k", "kernel"),
    *("launches, forward", "ms", "share of peak"),
    *("launches, both passes", "ms", "share of peak"),
]


class Padded(Experts):
    """Experts whose tokens are padded to the largest number of them."""

    def _mlps(self, tokens: Tensor, counts: list[int]) -> Tensor:
        most, device = max(counts), tokens.device
        places = torch.cat(
            [torch.arange(n, device=device) + e * most for e, n in enumerate(counts)]
        )
        padded = tokens.new_zeros(len(counts) * most, tokens.shape[1])
        padded = padded.index_copy(0, places, tokens).view(len(counts), most, -1)
        hidden = torch.baddbmm(self.inner_bias[:, None], padded, self.inner)
        hidden = F.gelu(hidden, approximate="tanh")
        made = torch.baddbmm(self.outer_bias[:, None], hidden, self.outer)
        return made.flatten(0, 1)[places]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192, help="in a batch")
    parser.add_argument("--repeats", type=int, default=20, help="of all kernels, in turn")
    parser.add_argument("--capacity", type=float, default=None, help="moe.capacity")
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    rows = []
    if torch.cuda.is_available():
        for name in SIZES:
            (_, _, width), experts = SHAPES[Size[name]]
            for active in (1, 2):
                rows += measured(name, width, experts, active, args)
        report.write(
            args.out / "moe_kernel.md",
            "Kernels of a layer of experts",
            f"{args.tokens:,} tokens with random numbers for weights and tokens, bf16 autocast, "
            f"capacity {args.capacity or 'unlimited'}; medians over {args.repeats} repeats, in "
            "which the kernels take turns. Launches are those of kernels, copies and fills that "
            "the profiler has seen. The share is that of the operations that tokens need, without "
            "padding, in the vendor's figure for dense bf16; both passes count three times the "
            "forward pass.",
            HEAD,
            rows,
        )
        return
    args.tokens = min(args.tokens, 512)
    measured("smoke", 64, 8, 2, args)
    print("no CUDA device: a small layer on a CPU, which says nothing about GPUs; not written")


def measured(
    name: str, width: int, experts: int, active: int, args: argparse.Namespace
) -> list[list[str]]:
    """A row for each kernel."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = made(width, experts, active, args.capacity, device)
    x = torch.randn(args.tokens, width, device=device, requires_grad=True)
    passes: dict[str, dict[str, Callable[[], None]]] = {
        kernel: {"forward": forward(layer, x), "both": both(layer, x)}
        for kernel, layer in layers.items()
    }
    seconds: dict[str, dict[str, list[float]]] = {
        kernel: {what: [] for what in each} for kernel, each in passes.items()
    }
    for repeat in range(3 + args.repeats):
        for kernel, each in passes.items():
            for what, act in each.items():
                took = timed(act, device)
                if repeat >= 3:  # the first ones compile, and allocate
                    seconds[kernel][what].append(took)
    flops = 2 * args.tokens * width * experts
    routing = layers["loop"].routing
    assert routing is not None, "it has routed in every repeat"
    kept = int(routing.counts.sum())
    flops += 2 * 2 * kept * width * 4 * width
    rows = []
    for kernel, each in passes.items():
        cells = []
        for what, times in (("forward", 1), ("both", 3)):
            took = statistics.median(seconds[kernel][what])
            peak = peak_flops()
            share = f"{times * flops / took / peak:.1%}" if peak else "not known"
            launches = str(num_launches(each[what])) if device == "cuda" else "not counted"
            cells += [launches, f"{1e3 * took:.3f}", share]
        rows.append([f"{name}: width {width}, {experts} experts", str(active), kernel, *cells])
        print(*rows[-1], sep="  ", flush=True)
    return rows


def made(
    width: int, experts: int, active: int, capacity: float | None, device: str
) -> dict[str, Experts]:
    """The layers, which have the same weights."""
    kinds = {
        "loop": (Experts, Kernel.loop),
        "grouped": (Experts, Kernel.grouped),
        "padded": (Padded, Kernel.loop),
        "fused": (Experts, Kernel.fused),
    }
    if device != "cuda":
        del kinds["fused"]
    layers: dict[str, Experts] = {}
    for name, (kind, kernel) in kinds.items():
        with torch.device(device):
            stds = (0.02, 0.02)
            layer = kind(
                width, 4 * width, experts, active, capacity, False, stds, 0.0, kernel=kernel
            )
        if layers:  # one set of weights for all, so that the largest size fits
            first = layers["loop"]
            layer.gate = first.gate
            for part in ("inner", "inner_bias", "outer", "outer_bias"):
                setattr(layer, part, getattr(first, part))
        layers[name] = layer
    return layers


def forward(layer: Experts, x: Tensor) -> Callable[[], None]:
    def act() -> None:
        with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16):
            layer(x)

    return act


def both(layer: Experts, x: Tensor) -> Callable[[], None]:
    inputs = [x, *layer.parameters()]

    def act() -> None:
        with torch.autocast(x.device.type, torch.bfloat16):
            out = layer(x)
        assert layer.losses is not None, "it has just routed"
        balance, z = layer.losses
        loss = out.float().sum() + balance + z
        torch.autograd.grad(loss, inputs)

    return act


def timed(act: Callable[[], None], device: str) -> float:
    """Seconds, until the GPU has nothing left to do."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    act()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def num_launches(act: Callable[[], None]) -> int:
    """Kernels, copies and fills on the GPU."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        act()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events())


if __name__ == "__main__":
    main()
