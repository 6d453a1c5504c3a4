"""GPT-2 with mixtures of experts: every second block has one in place of its MLP.

What an expert is, how tokens choose it, and the losses of the gate: tasks/moe/experts.py.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from co2.comm.clocks import ExchangeTotals
from co2.config import Precision, Strategy
from co2.errors import require
from co2.limits import Amount, Count, Decay, Positive
from co2.task import Batch
from tasks.moe.experts import NOT_DIVIDED, Exchange, Experts, Kernel
from tasks.shared.optimizer import make_optimizer
from tasks.shared.randomness import initial_std, seeded
from tasks.text.causal import CausalText
from tasks.text.gpt2 import transformer

# A name with a hyphen cannot be a class attribute.
Size = Enum(
    "Size",
    {
        "smoke": "smoke",
        "small-8e": "small-8e",
        "small-64e": "small-64e",
        "medium-128e": "medium-128e",
    },
)

SHAPES = {
    Size["smoke"]: ((4, 4, 64), 8),  # 0.70 M parameters with a context of 64 and 512 tokens
    Size["small-8e"]: ((12, 12, 768), 8),  # 323 M; this and below with GPT-2's vocabulary
    Size["small-64e"]: ((12, 12, 768), 64),  # 1.9 G
    Size["medium-128e"]: ((24, 16, 1024), 128),  # 13 G
}
"""Layers, heads and width; experts."""


OLDEST = 8
"""Major compute capability of the oldest GPUs whose tensor cores know bf16."""


class MoE(CausalText):
    """The task `moe`."""

    @dataclass
    class Config(CausalText.Config):
        size: Size = Size["smoke"]
        """Size of GPT-2 and number of experts; smoke is a small one for a laptop."""
        active: Count = 2
        """Experts of a token."""
        capacity: Positive | None = None
        """An expert takes at most this many times its even share of a batch, and tokens beyond that
        pass it by; null: all of them."""
        shared: bool = False
        """Whether one more expert sees every token."""
        balance_weight: Amount = 0.01
        """Weight of the loss that balances the experts, in every layer."""
        z_weight: Amount = 0.001
        """Weight of the loss that keeps the gate's logits small."""
        exchange: Exchange = Exchange.tiled
        """How tokens travel to experts of other workers (mesh.strategy=ep)."""
        tile: Count = 256
        """Rows from one worker to another in a tile."""
        kernel: Kernel = Kernel.loop
        """How a worker that has all experts computes them (docs/cluster.md)."""
        dropout: Decay = 0.0
        """Rate of dropout in embeddings, attention and residuals."""

        @property
        def num_experts(self) -> int:
            """Of a layer."""
            return SHAPES[self.size][1]

        def __post_init__(self) -> None:
            super().__post_init__()
            experts = self.num_experts
            hint = "must be 2 or more, or null: every second block has experts"
            require(self.layers is None or self.layers >= 2, "layers", self.layers, hint)
            hint = f"must not be above the {experts} experts of size={self.size.value}"
            require(self.active <= experts, "active", self.active, hint)

    name = "moe"

    def model(self) -> nn.Module:
        """See `Task.model`. On the device "meta" it takes no memory, to count parameters."""
        config = self.config
        whole, experts = SHAPES[config.size]
        layers, _, width = shape = config.cut(whole)
        std = initial_std(width)
        stds = std, std / (2 * layers) ** 0.5  # as GPT-2 has them
        mixture = (config.active, config.capacity, config.shared, stds, config.dropout)
        ways = (config.exchange, config.tile, config.kernel)
        with seeded(self.train.seed):
            model = transformer(self.padded_vocab_size, config.context, shape, config.dropout)
            # `Any`: transformers types the module's parts as tensors or modules.
            blocks: Any = model.get_submodule("transformer.h")
            for block in blocks[1::2]:
                block.mlp = Experts(width, 4 * width, experts, *mixture, *ways)
        return model

    def check_place(self, device: torch.device, strategy: Strategy) -> None:
        """See `Placed`: `kernel` and `exchange` are what does not run everywhere."""
        kernel, exchange = self.config.kernel, self.config.exchange
        if exchange is Exchange.symmetric and strategy is Strategy.ep:
            key, value = f"{self.name}.exchange", exchange.value
            hint = "needs CUDA devices, and these workers train on a CPU; use tiled"
            require(device.type == "cuda", key, value, hint)
            hint = "needs a PyTorch with NVSHMEM, and a machine that can use it; use tiled"
            require(nvshmem_available(), key, value, hint)
        if kernel is Kernel.loop:
            return
        key, value = f"{self.name}.kernel", kernel.value
        require(strategy is not Strategy.ep, key, value, NOT_DIVIDED)
        train = self.train
        if kernel is Kernel.grouped and train.compile and train.precision is Precision.fp32:
            hint = "this PyTorch compiles moe.kernel=grouped in bf16 alone; train.precision=bf16"
            require(compiles_fp32(), "train.compile", "true", hint)
        if kernel is Kernel.fused:
            installed = find_spec("triton") is not None
            require(installed, key, value, "needs Triton, which is not installed; use loop")
            if interpreted():
                return
            hint = "needs a CUDA device, and these workers train on a CPU; use loop"
            require(device.type == "cuda", key, value, hint)
            if not torch.cuda.is_initialized():  # not in a worker
                return
            hint = f"needs a GPU of compute capability {OLDEST}.0 or newer; use loop"
            require(torch.cuda.get_device_capability(device) >= (OLDEST, 0), key, value, hint)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """See `Task.optimizer`. The experts' biases have no weight decay, though a matrix has all
        of them. With Muon, AdamW updates the experts, which are no matrices, and the gate."""
        names = [name for name, _ in model.named_parameters()]
        biases = {name for name in names if name.endswith(("inner_bias", "outer_bias"))}
        gates = {name for name in names if name.endswith("gate.weight")}
        return make_optimizer(model, self.optim, spared=biases, ends=gates)

    def padded_logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        return model(input_ids=tokens).logits

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean next-token cross-entropy in nats, with the gates' two losses."""
        loss = super().loss(model, batch)
        for layer in mixtures(model):
            assert layer.losses is not None, "the model has just seen the batch"
            balance, z = layer.losses
            loss = loss + self.config.balance_weight * balance + self.config.z_weight * z
        return loss

    def counts(self, model: nn.Module) -> Tensor:
        """Assignments of each expert of each layer, wanted and made, [2, layers, E] in one row."""
        wanted, made = [], []
        for layer in mixtures(model):
            assert layer.routing is not None, "the model has just seen the batch"
            wanted.append(layer.routing.wanted.sum(0))
            made.append(layer.routing.counts.sum(0))
        return torch.cat([*wanted, *made])

    def traffic(self, model: nn.Module) -> ExchangeTotals:
        """See `Exchanging`: of all layers."""
        return sum((layer.traffic.totals() for layer in mixtures(model)), ExchangeTotals())

    def scores(self, counted: Sequence[float]) -> dict[str, float]:
        """
        Returns:
            "busiest_expert": tokens that want the most wanted expert of a layer, over the mean of
            all its experts; mean over the layers. 1 where all are wanted alike.
            "dropped": share of the assignments that were over an expert's capacity.
        """
        wanted, made = torch.tensor(counted, dtype=torch.float64).view(2, -1)
        layers = wanted.view(-1, self.config.num_experts)
        busiest = (layers.amax(1) / layers.mean(1)).mean().item()
        return {"busiest_expert": busiest, "dropped": 1 - (made.sum() / wanted.sum()).item()}


def compiles_fp32() -> bool:
    """Whether torch.compile, which looks at shapes and types first, knows grouped GEMMs in fp32.
    That of PyTorch 2.11 does not, though it computes them."""
    rows, experts = torch.empty(8, 8, device="meta"), torch.empty(2, 8, 8, device="meta")
    try:
        F.grouped_mm(rows, experts, offs=torch.empty(2, dtype=torch.int32, device="meta"))
    except RuntimeError:
        return False
    return True


def nvshmem_available() -> bool:
    """Whether PyTorch's kernels for symmetric memory can run here."""
    from torch.distributed._symmetric_memory import is_nvshmem_available

    return is_nvshmem_available()


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on any device."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def mixtures(model: nn.Module) -> Iterator[Experts]:
    """The layers of experts of a model, which may be wrapped."""
    return (module for module in model.modules() if isinstance(module, Experts))
