"""CO2's outer step against this machine's copy bandwidth.

One outer step computes gap, momentum and clip, the next pseudo-gradient and the anchor, and writes
the weights back. For one element these words must cross the memory bus, each vector once per pass:

    momentum step               d read; m read, written                               3
    pseudo-gradient and move    live, m read; anchor read, written; buffer, live      6
                                written

Copy bandwidth is measured by copying one vector into another, two words an element. Both are timed
in turn, and the share is computed for each pair.

The benchmark also times an inner step of GPT-2 small on one sequence of 1,024 tokens. No inner step
is shorter, so the outer step is the largest part of a round with this one.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import co2
from benchmarks import report

WORDS = 9
GOAL = 0.8
TAU = 12
INNER_STEPS = 3


def gpt2_shapes(width: int = 768, layers: int = 12, vocab: int = 50257) -> list[tuple[int, ...]]:
    """Shapes of GPT-2's parameters; the defaults are GPT-2 small."""
    layer = [(width,)] * 4 + [(width, 3 * width), (3 * width,), (width, width), (width,)]
    layer += [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(vocab, width), (1024, width), *layer * layers, (width,), (width,)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    params = [torch.nn.Parameter(torch.randn(s, device=device)) for s in gpt2_shapes()]
    numel = sum(p.numel() for p in params)
    inner = inner_step(device)
    inner()  # allocates
    inner_s = statistics.median(timed(inner, device) for _ in range(INNER_STEPS))
    del inner
    source, target = torch.randn(numel, device=device), torch.empty(numel, device=device)

    rows = []
    for options in (
        {"gap_penalty": "none"},
        {"gap_penalty": "gap_aware"},
        {"gap_penalty": "gap_aware_elementwise"},
        {"gap_penalty": "gap_aware", "clip": 1.0},
        {"gap_penalty": "gap_aware", "clip": 1.0, "clip_mode": "norm"},
    ):
        step = outer_step(params, options)
        copies, steps, shares = [], [], []
        for _ in range(args.repeats):
            copies.append(timed(lambda: target.copy_(source), device))
            steps.append(timed(step, device))
            shares.append((WORDS / steps[-1]) / (2 / copies[-1]))
        bandwidth = 2 * 4 * numel / statistics.median(copies) / 1e9
        share = statistics.median(shares)
        outer_s = statistics.median(steps)
        name = ", ".join(f"{key}={value}" for key, value in options.items())
        rows.append(
            [
                name,
                f"{outer_s * 1e3:.1f}",
                f"{WORDS * 4 * numel / outer_s / 1e9:.1f}",
                f"{bandwidth:.1f}",
                f"{share:.0%} ({min(shares):.0%} to {max(shares):.0%})",
                f"{outer_s / (outer_s + TAU * inner_s):.2%}",
            ]
        )
        print(*rows[-1], sep="  ", flush=True)
    report.write(
        args.out / f"outer_step_{device}.md",
        "Outer step of CO2, GPT-2 small",
        f"{numel:,} parameters in fp32, {torch.get_num_threads()} threads, one replica, medians "
        f"over {args.repeats} pairs. Goal: {GOAL:.0%} of copy bandwidth. Clipping by value adds a "
        "comparison, clipping by norm a second pass over the momentum, which is not counted.\n\n"
        f"A round is the outer step and {TAU} inner steps of {inner_s:.3g} s, each on one sequence "
        "of 1,024 tokens; goal: under 0.5 %.",
        [
            "options",
            "ms",
            "GB/s",
            "copy GB/s",
            "share of copy bandwidth (min to max)",
            "of a round",
        ],
        rows,
    )


def inner_step(device: str) -> Callable[[], None]:
    """Forward, backward and AdamW of GPT-2 small; in bf16 on a GPU."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model: torch.nn.Module = GPT2LMHeadModel(GPT2Config())
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(50257, (1, 1024), device=device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def outer_step(params: list[torch.nn.Parameter], options: dict[str, Any]) -> Callable[[], None]:
    """The end of a round of CO2 on these parameters, after its pseudo-gradient has arrived."""
    method = co2.CO2(co2.CO2.Config(tau=1, **options))
    model = torch.nn.ParameterList(params)
    method.prepare(model, torch.optim.SGD(params, lr=1e-6), co2.Mesh.world())
    with torch.no_grad():
        method.end_round()
        method.end_round()
    return torch.no_grad()(method.end_round)


def timed(action: Callable[[], object], device: str) -> float:
    """Seconds that `action` takes; on a GPU, until its kernels have ended."""
    began = time.perf_counter()
    action()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
