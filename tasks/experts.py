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

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Routing:
    """Which expert computes which token: A assignments in the order of the experts, for each of
    them first choices before second ones, and earlier tokens before later ones."""

    choice: Tensor
    """int64 [A]: number c T + t of choice c of token t."""
    weight: Tensor
    """[A]: g."""
    counts: Tensor
    """int64 [E]: assignments of each expert, those over its capacity left out."""
    wanted: Tensor
    """int64 [E]: with those."""


def route(shares: Tensor, active: int, capacity: int | None) -> Routing:
    """Choose experts.

    Args:
        shares: p, [T, E].
        active: k.
        capacity: most assignments of an expert. Those beyond it, in the order above, are left out:
            such a token has nothing of that expert. None: no limit.
    """
    weight, expert = shares.topk(active)
    if active > 1:
        weight = weight / weight.sum(-1, keepdim=True)
    chosen = expert.T.flatten()  # first choices of all tokens first
    wanted = chosen.bincount(minlength=shares.shape[1])
    choice = chosen.argsort(stable=True)
    counts = wanted
    if capacity is not None:
        first = wanted.cumsum(0) - wanted
        place = torch.arange(len(choice), device=choice.device) - first[chosen[choice]]
        choice, counts = choice[place < capacity], wanted.clamp(max=capacity)
    return Routing(choice, weight.T.flatten()[choice], counts, wanted)


def balance_loss(shares: Tensor, wanted: Tensor) -> Tensor:
    """`balance` of the head of this file, from p, [T, E], and the choices of each expert, [E]."""
    return shares.shape[1] * (wanted / wanted.sum() * shares.mean(0)).sum()


def z_loss(logits: Tensor) -> Tensor:
    """`z` of the head of this file, from the gate's logits, [T, E]."""
    return logits.logsumexp(-1).square().mean()


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
    ) -> None:
        super().__init__()
        self.active, self.capacity = active, capacity
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
        with torch.autocast(x.device.type, enabled=False):  # small differences decide
            exact = torch.promote_types(x.dtype, torch.float32)
            logits = F.linear(tokens.to(exact), self.gate.weight.to(exact))
            shares = logits.softmax(-1)
            routing = route(shares, self.active, self._most(len(tokens)))
            self.losses = balance_loss(shares, routing.wanted), z_loss(logits)
            self.routing = routing
        out = self._combined(self._computed(tokens, routing), routing, len(tokens))
        if self.shared is not None:
            out = out + self.shared(tokens)
        return self.dropout(out.to(x.dtype)).view_as(x)

    def _most(self, num_tokens: int) -> int | None:
        if self.capacity is None:
            return None
        return math.ceil(self.capacity * self.active * num_tokens / len(self.inner))

    def _computed(self, tokens: Tensor, routing: Routing) -> Tensor:
        """What the experts make of the tokens, [A, width], in the order of the assignments."""
        sent = tokens[routing.choice % len(tokens)]
        parts = []
        for expert, part in enumerate(sent.split(routing.counts.tolist())):
            hidden = torch.addmm(self.inner_bias[expert], part, self.inner[expert])
            hidden = F.gelu(hidden, approximate="tanh")
            parts.append(torch.addmm(self.outer_bias[expert], hidden, self.outer[expert]))
        return torch.cat(parts)

    def _combined(self, made: Tensor, routing: Routing, num_tokens: int) -> Tensor:
        """The weighted sums, [T, width]. Each assignment has a row of its own before they are
        added, so that the sum has one order on a GPU, too."""
        weighted = made * routing.weight[:, None]
        rows = weighted.new_zeros(self.active * num_tokens, made.shape[1])
        rows = rows.index_copy(0, routing.choice, weighted)
        return rows.view(self.active, num_tokens, -1).sum(0)
