"""GraphSAGE and GAT on sampled neighbourhoods.

    GraphSAGE   h_v ← W h_v + U mean_{u → v} h_u + b
    GAT         h_v ← concat_k Σ_{u → v, and v itself} a^k_uv W^k h_u + b
                a^k_uv = softmax over u of LeakyReLU(s^k · W^k h_u + t^k · W^k h_v), slope 0.2

Between layers are ReLU (GAT: ELU) and dropout; the heads of GAT's last layer are averaged. Sources:
Hamilton et al. (arXiv 1706.02216), Veličković et al. (1710.10903).
"""

from collections.abc import Sequence
from enum import Enum
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Edges = tuple[Tensor, Tensor]
"""Of a layer: starts, int64 [targets + 1], and sources, int64 [edges]."""


class Network(Enum):
    """The models."""

    sage = "sage"
    gat = "gat"


class SAGELayer(nn.Module):
    """GraphSAGE's layer with the mean of neighbours."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.own = nn.Linear(width_in, width_out)
        self.neighbours = nn.Linear(width_in, width_out, bias=False)

    def forward(self, x: Tensor, edges: Edges) -> Tensor:
        """[nodes, width_in] → [targets, width_out]."""
        starts, sources = edges
        # A bag's mean is that of rows; one without neighbours is 0.
        mean = F.embedding_bag(sources, x, starts, mode="mean", include_last_offset=True)
        out: Tensor = self.own(x[: len(starts) - 1]) + self.neighbours(mean)
        return out


class GATLayer(nn.Module):
    """GAT's layer. `width_out` is that of all heads together, or of their mean."""

    def __init__(self, width_in: int, width_out: int, heads: int, average: bool) -> None:
        super().__init__()
        width = width_out if average else width_out // heads
        self.heads, self.average = heads, average
        self.values = nn.Linear(width_in, heads * width, bias=False)
        self.source = nn.Parameter(torch.empty(heads, width))
        self.target = nn.Parameter(torch.empty(heads, width))
        self.bias = nn.Parameter(torch.zeros(width_out))
        for weight in (self.values.weight, self.source, self.target):
            nn.init.xavier_uniform_(weight)

    def forward(self, x: Tensor, edges: Edges) -> Tensor:
        """[nodes, width_in] → [targets, width_out]."""
        starts, sources = edges
        number = len(starts) - 1
        own = torch.arange(number, device=x.device)
        # Every node is a neighbour of its own.
        into = own.repeat_interleave(starts.diff(), output_size=len(sources))
        targets, sources = torch.cat((into, own)), torch.cat((sources, own))
        values = self.values(x).unflatten(1, (self.heads, -1))  # [nodes, heads, width]
        from_sources = (values * self.source).sum(-1)
        from_targets = (values[:number] * self.target).sum(-1)
        score = F.leaky_relu(from_sources[sources] + from_targets[targets], 0.2).float()
        share = _softmax(score, targets, number).to(values.dtype)  # [edges, heads]
        weighted = values[sources] * share[..., None]
        out = weighted.new_zeros(number, *weighted.shape[1:]).index_add(0, targets, weighted)
        return (out.mean(1) if self.average else out.flatten(1)) + self.bias


def _softmax(score: Tensor, targets: Tensor, number: int) -> Tensor:
    """The softmax among the edges of each target, [edges, heads]."""
    where = targets[:, None].expand_as(score)
    largest = score.new_full((number, score.shape[1]), -torch.inf)
    largest = largest.scatter_reduce(0, where, score.detach(), "amax")
    power = (score - largest[targets]).exp()
    return power / power.new_zeros(number, score.shape[1]).index_add(0, targets, power)[targets]


class GraphNetwork(nn.Module):
    """Layers of one kind on top of each other.

    Args:
        kind: which.
        widths: of the features, of each hidden layer, and the number of classes.
        heads: of each layer of GAT.
        dropout: rate, of what goes from a layer to the next.
    """

    def __init__(self, kind: Network, widths: Sequence[int], heads: int, dropout: float) -> None:
        super().__init__()
        self.between = nn.ReLU() if kind is Network.sage else nn.ELU()
        self.dropout = nn.Dropout(dropout)
        pairs = list(pairwise(widths))
        self.layers = nn.ModuleList(
            SAGELayer(*pair)
            if kind is Network.sage
            else GATLayer(*pair, heads, average=number == len(pairs) - 1)
            for number, pair in enumerate(pairs)
        )

    def forward(self, x: Tensor, edges: Sequence[Edges]) -> Tensor:
        """Features of the neighbourhood, [nodes, features] → logits, [batch, classes]."""
        for number, (layer, own) in enumerate(zip(self.layers, edges, strict=True)):
            if number:
                x = self.dropout(self.between(x))
            x = layer(x, own)
        return x
