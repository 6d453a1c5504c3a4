"""What a round of a method launches on a GPU, and what it holds, at GPT-2 small's size.

Counted on meta tensors, in a process group of replicas that are not there.
"""

import argparse
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import co2
from benchmarks import report
from co2.comm import codec, sparse_mean
from co2.comm.runners import HostRunner
from co2.methods.shared.compressed_adam import Compress
from co2.train.meters import ledger

REPLICAS = (8, 64, 512)


class Launches(TorchDispatchMode):
    """Inside `with`: logs the operators that would be launches on a GPU: all but views and
    allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.collectives = 0
        """Those that are not in the log."""
        self.paused = False
        self.words = 0.0
        """What the method holds, in words for each parameter; see `of_gpt2`."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        views = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        none = views or any(word in func.__name__ for word in ("empty", "record_function"))
        if func.namespace == "c10d":
            self.collectives += 1
        elif not none and not self.paused:
            self.log.append(func.__name__)
        return func(*args, **(kwargs or {}))

    def kernels(self, x: Tensor) -> SimpleNamespace:
        """In place of `compress.kernels`'s: each kernel is one launch, and does nothing."""
        names = ("encode", "decode", "add", "choose", "spread")
        return SimpleNamespace(**{n: lambda *_, n=n: self.log.append(n) for n in names})

    def exchange(self, calls: list[dist.P2POp]) -> list[dist.Work]:
        """In place of `dist.batch_isend_irecv`, which knows no group of the device "meta"."""
        self.collectives += 1
        return []


ONCE = {"tau": 1, "fragments": 1, "delay": 0}
MOMENTS = {"tau": 1, "average_moments": True}
EVERY_STEP = {"tau": 1, "first_moment_every": 1, "second_moment_every": 1}
NOT_COUNTED = ("allreduce", "sparta")
"""DDP is PyTorch's; the other has a few launches for each tensor at every step."""
ROUNDS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {"tau": 1} if hasattr(method.Config, "tau") else {})
    for name, method in co2.METHODS.items()
    if name not in NOT_COUNTED
}
ROUNDS |= {
    "diloco, moments": ("diloco", MOMENTS),
    "streaming_diloco": ("streaming_diloco", ONCE),
    "streaming_diloco, 2 fragments": ("streaming_diloco", {"tau": 2, "delay": 1}),
    "streaming_diloco, int8": ("streaming_diloco", {**ONCE, "exchange": "int8"}),
    "streaming_diloco, int4": ("streaming_diloco", {**ONCE, "exchange": "int4"}),
    "co2, clip": ("co2", {"tau": 1, "clip": 1.0}),
    "co2, elementwise": ("co2", {"tau": 1, "gap_penalty": "gap_aware_elementwise"}),
    "co2, moments": ("co2", MOMENTS),
    "co2_keep, 12 fragments": ("co2_keep", {"tau": 12}),
    "co2_keep, moments": ("co2_keep", MOMENTS),
    "desloc": ("desloc", EVERY_STEP),
    "mt_dao": ("mt_dao", {**EVERY_STEP, "slow_weight": 1.0}),
    "mt_dao, late": ("mt_dao", {**EVERY_STEP, "slow_weight": 1.0, "late_momentum": True}),
    "onebit_adam": ("onebit_adam", {"freeze_step": 2}),
    "onebit_adam, update": ("onebit_adam", {"freeze_step": 2, "compress": Compress.update}),
    "zero_one_adam": ("zero_one_adam", {"freeze_step": 2, "max_interval": 1}),
    "zero_one_adam, a refresh": ("zero_one_adam", {"freeze_step": 9}),
}
"""Without mt_dao's share of the gradient in a step, which has a few launches for each tensor."""


def steps_of_a_round(name: str) -> int:
    """An update of ACCO takes two."""
    return 2 if name == "acco" else ROUNDS[name][1].get("tau", 1)


def gpt2() -> nn.Module:
    """The tensors of GPT-2 small, 148 with 124 million elements, on the device "meta"."""
    with torch.device("meta"):
        model, width = nn.Module(), 768
        model.wte, model.wpe = nn.Embedding(50257, width), nn.Embedding(1024, width)
        model.h = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 3 * width),
                nn.Linear(width, width),
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.Linear(4 * width, width),
            )
            for _ in range(12)
        )
        model.ln_f = nn.LayerNorm(width)
    return model


def of_gpt2(name: str, replicas: int = 8) -> Launches:
    """What a round of a method launches on a GPU, beyond the steps of the inner optimizer, whose
    fused kernels take no tensors of this device; and what the method holds between steps."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    registered, settings = ROUNDS[name]
    model, seen = gpt2(), Launches()
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    by_signs = "optim.name=sgd" in co2.METHODS[registered].needs
    optimizer: torch.optim.Optimizer
    if by_signs:
        optimizer = torch.optim.SGD(groups, lr=1e-3, foreach=True)
    else:
        optimizer = torch.optim.AdamW(groups, foreach=True)
    optimizer.register_step_pre_hook(lambda *_: setattr(seen, "paused", True))
    optimizer.register_step_post_hook(lambda *_: setattr(seen, "paused", False))
    method = co2.METHODS[registered](co2.METHODS[registered].Config(**settings))
    steps = steps_of_a_round(name)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=replicas)
    try:
        with ExitStack() as stack:
            for module in (codec, sparse_mean):
                stack.enter_context(patch.object(module, "kernels", seen.kernels))
            # A dispatch mode sees its own thread only.
            stack.enter_context(patch.object(HostRunner, "run", lambda _, sequence: sequence()))
            stack.enter_context(patch.object(dist, "batch_isend_irecv", seen.exchange))
            mesh = co2.Mesh.world(device="meta")
            method.prepare(model, optimizer, mesh, lambda step: 1e-3, fresh=False)
            for step in range(4 + steps):
                for weight in model.parameters():
                    weight.grad = torch.empty_like(weight)
                if step == 4:
                    seen.log.clear()
                    seen.collectives = 0
                    stack.enter_context(seen)
                method.step()
        held = ledger(model, optimizer, method)
        seen.words = (held.extra_bytes + held.scratch_bytes) / held.parameter_bytes
        method.flush()
    finally:
        dist.destroy_process_group()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    rows = []
    for name in ROUNDS:
        found = [of_gpt2(name, replicas) for replicas in REPLICAS]
        columns = (
            [str(len(one.log)) for one in found],
            [str(one.collectives) for one in found],
            [f"{one.words:.2f}" for one in found],
        )
        rows.append([name, *(cell for column in columns for cell in column)])
        print(*rows[-1], sep="  ", flush=True)
    what = ("launches", "collectives", "words")
    head = ["round", *(f"{one}, {replicas}" for one in what for replicas in REPLICAS)]
    report.write(
        args.out / "launches.md",
        "Launches of a round, and words held",
        "GPT-2 small, 124 million parameters in 148 tensors, fp32, on meta tensors "
        "in a process group of so many replicas that are not there. Launches: operators of a round "
        "with Triton's kernels, beyond the steps of the inner optimizer; views and allocations are "
        "none. Words: what the method holds between steps for each parameter, its messages "
        "included, beyond weights, gradients and the inner optimizer's state. Of DeMo and the "
        "methods that follow Adam, a round is a step.",
        head,
        rows,
    )


if __name__ == "__main__":
    main()
