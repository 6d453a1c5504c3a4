"""A mixture of experts, in place of the MLP of a transformer's block.

A gate sends each token to k of E MLPs, the experts:

    p_t = softmax(W x_t)                    over the E experts
    y_t = Σ_{e among the k largest} g_te MLP_e(x_t)
    g_te = p_te for k = 1 (Switch), and p_te divided by the sum of the k chosen for k > 1 (GShard)

Two losses keep the gate usable; T is the number of tokens, f_e the share of their T·k choices that
fell on expert e:

    balance = E Σ_e f_e mean_t p_te         1 where all experts are chosen alike; at most E
    z       = mean_t (log Σ_e exp (W x_t)_e)²        keeps the gate's logits small

Sources: Lepikhin et al., "GShard" (arXiv 2006.16668); Fedus et al., "Switch Transformers"
(2101.03961); Zoph et al., "ST-MoE" (2202.08906) for z; Dai et al., "DeepSeekMoE" (2401.06066) for
the shared expert.
"""

from enum import Enum

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from co2.errors import require
from tasks.moe import mlp
from tasks.moe.looped import looped
from tasks.moe.mlp import Weights
from tasks.moe.routing import Routing, route
from tasks.moe.token_exchange import Traffic, bulk, tiled


def balance_loss(shares: Tensor, wanted: Tensor) -> Tensor:
    """`balance` of the head of this file, from this worker's p, [T, E], and the choices of each
    expert, [E], by all workers that share the experts. Their mean is that of all their tokens."""
    return shares.shape[1] * (wanted / wanted.sum() * shares.mean(0)).sum()


def z_loss(logits: Tensor) -> Tensor:
    """`z` of the head of this file, from the gate's logits, [T, E]."""
    return logits.logsumexp(-1).square().mean()


EXPERTS = ("inner", "inner_bias", "outer", "outer_bias")
"""The weights of the experts, of which each has one along the first dimension."""


class Exchange(Enum):
    """How tokens travel to the experts of other workers: tasks/moe/token_exchange.py."""

    bulk = "bulk"
    tiled = "tiled"
    symmetric = "symmetric"
    """Between GPUs, through symmetric memory: tasks/moe/symmetric_exchange.py."""


class Kernel(Enum):
    """How a worker that has all experts computes them."""

    loop = "loop"
    """One expert after another."""
    grouped = "grouped"
    """All experts' first products in one grouped GEMM of PyTorch, then all second ones."""
    fused = "fused"
    """The whole layer in one Triton kernel: tasks/moe/fused_experts.py."""


NOT_DIVIDED = "needs all experts on each worker; with mesh.strategy=ep use loop"
"""Why experts that workers share are not computed by other kernels."""


class Experts(nn.Module):
    """The layer.

    Args:
        width: of a token.
        hidden: of each MLP.
        experts: E.
        active: k.
        capacity: an expert takes at most this many times the k T / E assignments that it would have
            if all were chosen alike; None: all.
        shared: whether one more MLP sees every token.
        stds: standard deviations of the initial weights of the first and of the second matrix.
        dropout: rate, of the sum.
        exchange: how tokens travel once the experts are divided.
        tile: rows from one worker to another in a tile.
        kernel: how they are computed while they are not divided.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        active: int,
        capacity: float | None,
        shared: bool,
        stds: tuple[float, float],
        dropout: float,
        exchange: Exchange = Exchange.tiled,
        tile: int = 256,
        kernel: Kernel = Kernel.loop,
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.exchange, self.tile, self.traffic = exchange, tile, Traffic()
        self.active, self.capacity, self.num_experts = active, capacity, experts
        self.group: dist.ProcessGroup | None = None
        """The workers that share the experts; None: this one has all."""
        self.gate = nn.Linear(width, experts, bias=False)
        self.inner = nn.Parameter(torch.empty(experts, width, hidden))
        self.inner_bias = nn.Parameter(torch.zeros(experts, hidden))
        self.outer = nn.Parameter(torch.empty(experts, hidden, width))
        self.outer_bias = nn.Parameter(torch.zeros(experts, width))
        self.shared: nn.Module | None = None
        first, second = stds
        nn.init.normal_(self.gate.weight, std=first)
        nn.init.normal_(self.inner, std=first)
        nn.init.normal_(self.outer, std=second)
        if shared:
            ends = nn.Linear(width, hidden), nn.Linear(hidden, width)
            self.shared = nn.Sequential(ends[0], nn.GELU("tanh"), ends[1])
            for end, std in zip(ends, stds, strict=True):
                nn.init.normal_(end.weight, std=std)
                nn.init.zeros_(end.bias)
        self.dropout = nn.Dropout(dropout)
        self.losses: tuple[Tensor, Tensor] | None = None
        """`balance` and `z` of the newest forward pass, which have gradients."""
        self.routing: Routing | None = None
        """Of the newest forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] in and out."""
        tokens = x.flatten(0, -2)
        if self.kernel is Kernel.fused and not isinstance(tokens, FakeTensor):
            from tasks.moe.fused_experts import fused  # imports Triton, which not every machine has

            gate = self.gate.weight
            out, logits, routing = fused(tokens, gate, self._weights, self.active, self.capacity)
            self._keep(logits, logits.softmax(-1), routing)
        else:
            with torch.autocast(x.device.type, enabled=False):  # small differences decide
                exact = torch.promote_types(x.dtype, torch.float32)
                logits = F.linear(tokens.to(exact), self.gate.weight.to(exact))
                shares = logits.softmax(-1)
                fixed = torch.compiler.is_compiling() and self.kernel is Kernel.loop
                routing = route(shares, self.active, self.capacity, self.group, fixed)
                self._keep(logits, shares, routing)
            out = self._combined(self._computed(tokens, routing), routing, len(tokens))
        if self.shared is not None:
            out = out + self.shared(tokens)
        return self.dropout(out.to(x.dtype)).view_as(x)

    def divide(self, group: dist.ProcessGroup) -> tuple[str, ...]:
        """See `Divisible`. Raises `ConfigError`."""
        require(self.kernel is Kernel.loop, "moe.kernel", self.kernel.value, NOT_DIVIDED)
        workers = group.size()
        hint = f"must divide the {self.num_experts} experts"
        require(self.num_experts % workers == 0, "mesh.replica_size", workers, hint)
        if self.exchange is Exchange.symmetric:
            from tasks.moe.symmetric_exchange import check_numbers

            check_numbers(workers, self.num_experts)
        for name in EXPERTS:
            part = getattr(self, name).detach().chunk(workers)[group.rank()]
            setattr(self, name, nn.Parameter(part.clone()))
        self.group = group
        return EXPERTS

    @property
    def _weights(self) -> Weights:
        return self.inner, self.inner_bias, self.outer, self.outer_bias

    def _keep(self, logits: Tensor, shares: Tensor, routing: Routing) -> None:
        self.losses = balance_loss(shares, routing.wanted.sum(0)), z_loss(logits)
        self.routing = routing

    def _computed(self, tokens: Tensor, routing: Routing) -> Tensor:
        """What the experts make of the tokens, [A, width], in the order of the assignments."""
        sent = tokens[routing.choice % len(tokens)]
        compiling = torch.compiler.is_compiling()
        alone = self.group is None and self.kernel is not Kernel.grouped
        if alone and not compiling:
            return self._mlps(sent, self._counts(sent, routing))
        weights, device = self._weights, sent.device.type
        if torch.is_autocast_enabled(device):  # so that tokens travel as they are computed
            dtype = torch.get_autocast_dtype(device)
            inner, inner_bias, outer, outer_bias = (weight.to(dtype) for weight in weights)
            sent, weights = sent.to(dtype), (inner, inner_bias, outer, outer_bias)
        with torch.autocast(device, enabled=False):
            if alone:
                return looped(sent, routing.counts[0], *weights)[1]
            if self.group is None:
                return grouped(sent, routing.counts[0], weights)
            traffic = self.traffic if self.training else Traffic()
            if self.exchange is Exchange.bulk:
                return bulk(sent, routing.counts, weights, self.group, traffic)
            if self.exchange is Exchange.symmetric:
                from tasks.moe.symmetric_exchange import symmetric  # not in every build of PyTorch

                def compute(rows: Tensor, counts: Tensor) -> Tensor:
                    return grouped(rows, counts, weights)

                return symmetric(sent, routing.counts, compute, self.group, traffic)
            return tiled(sent, routing.counts, weights, self.group, traffic, self.tile)

    def _counts(self, sent: Tensor, routing: Routing) -> list[int]:
        """Rows of each expert; equally many where tensors have shapes alone
        (co2/train/estimate.py), because there is nothing to count."""
        if not isinstance(sent, FakeTensor):
            counts: list[int] = routing.counts[0].tolist()
            return counts
        most, longer = divmod(len(sent), self.num_experts)
        return [most + (expert < longer) for expert in range(self.num_experts)]

    def _mlps(self, tokens: Tensor, counts: list[int]) -> Tensor:
        """Each of this worker's experts on its tokens, which stand one expert after another."""
        parts = enumerate(tokens.split(counts))
        return torch.cat([mlp.forward(self._weights, expert, part)[1] for expert, part in parts])

    def _combined(self, made: Tensor, routing: Routing, num_tokens: int) -> Tensor:
        """The weighted sums, [T, width]. Each assignment has a row of its own before they are
        added, so that the sum has one order on a GPU, too."""
        weighted = made * routing.weight[:, None]
        rows = weighted.new_zeros(self.active * num_tokens, made.shape[1])
        rows = rows.index_copy(0, routing.choice, weighted)
        return rows.view(self.active, num_tokens, -1).sum(0)


def grouped(sent: Tensor, counts: Tensor, weights: Weights) -> Tensor:
    """What the experts make of rows, by PyTorch's grouped GEMM. The host need not know how many
    rows an expert has.

    Args:
        sent: [A, width], in the order of the experts; fp32, bf16 or fp16. A row of it, and one of
            the hidden layer, has a multiple of 16 bytes.
        counts: int64 [E], rows of each expert.
        weights: of all experts, of the same type.
    """
    inner, inner_bias, outer, outer_bias = weights
    ends = counts.cumsum(0, dtype=torch.int32)
    experts = torch.arange(len(counts), device=sent.device)
    own = experts.repeat_interleave(counts, output_size=len(sent))
    # A product, because indexing adds a bias's gradient up row by row.
    chosen = (own[:, None] == experts).to(sent.dtype)
    hidden = F.grouped_mm(sent, inner, offs=ends) + chosen @ inner_bias
    hidden = F.gelu(hidden, approximate="tanh")
    return F.grouped_mm(hidden, outer, offs=ends) + chosen @ outer_bias
