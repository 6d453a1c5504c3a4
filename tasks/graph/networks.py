"""GraphSAGE and GAT on sampled neighbourhoods.

    GraphSAGE   h_v ← W h_v + U mean_{u → v} h_u + b
    GAT         h_v ← concat_k Σ_{u → v, and v itself} a^k_uv W^k h_u + b
                a^k_uv = softmax over u of LeakyReLU(s^k · W^k h_u + t^k · W^k h_v), slope 0.2

Between layers are ReLU (GAT: ELU) and dropout; the heads of GAT's last layer are averaged. The
layers are PyTorch Geometric's. Sources: Hamilton et al. (arXiv 1706.02216), Veličković et al.
(1710.10903).
"""

import warnings
from collections.abc import Sequence
from enum import Enum
from itertools import pairwise

import torch
from torch import Tensor, nn

Edges = tuple[Tensor, Tensor]
"""Of a layer: starts, int64 [targets + 1], and sources, int64 [edges]."""


class Network(Enum):
    """The models."""

    sage = "sage"
    gat = "gat"


class GraphNetwork(nn.Module):
    """Layers of one kind on top of each other. The host does not wait for the device in it.

    Args:
        kind: which.
        widths: of the features, of each hidden layer, and the number of classes.
        heads: of each layer of GAT.
        dropout: rate, of what goes from a layer to the next.
    """

    def __init__(self, kind: Network, widths: Sequence[int], heads: int, dropout: float) -> None:
        super().__init__()
        with warnings.catch_warnings():  # about what PyTorch Geometric uses of PyTorch
            warnings.simplefilter("ignore", FutureWarning)
            # Here, because it takes two seconds, and other tasks do not need it.
            from torch_geometric.nn import GATConv, SAGEConv

        self.kind = kind
        self.between = nn.ReLU() if kind is Network.sage else nn.ELU()
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList()
        for number, (width_in, width_out) in enumerate(pairwise(widths)):
            if kind is Network.sage:
                self.layers.append(SAGEConv(width_in, width_out))
                continue
            joined = number < len(widths) - 2
            width = width_out // heads if joined else width_out
            # It would look for self-loops first, for which the host has to wait.
            options = {"concat": joined, "add_self_loops": False}
            self.layers.append(GATConv(width_in, width, heads, **options))

    def forward(self, x: Tensor, edges: Sequence[Edges]) -> Tensor:
        """Features of the neighbourhood, [nodes, features] → logits, [batch, classes]."""
        for number, (layer, (starts, sources)) in enumerate(zip(self.layers, edges, strict=True)):
            if number:
                # Neighbours are added up in fp32, also under autocast.
                exact = torch.promote_types(x.dtype, torch.float32)
                x = self.dropout(self.between(x.to(exact)))
            own = torch.arange(len(starts) - 1, device=x.device)
            targets = own.repeat_interleave(starts.diff(), output_size=len(sources))
            if self.kind is Network.gat:  # every node is a neighbour of its own
                sources, targets = torch.cat((sources, own)), torch.cat((targets, own))
            ends = torch.stack((sources, targets))
            x = layer((x, x[: len(own)]), ends, size=(len(x), len(own)))
        return x
