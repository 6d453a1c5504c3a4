"""OuterShard: one replica's part of the flat vector, where the outer state is cut into G parts."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from co2.comm.background import BackgroundMean
from co2.comm.flat import FlatParams, chunk_numel
from co2.comm.mesh import Mesh
from co2.config import CommConfig


@dataclass(frozen=True)
class ShardChunk:
    """A chunk of a shard: its piece of one row."""

    index: int

    def of(self, vector: Tensor) -> Tensor:
        """This chunk of a vector of the shard, as a view."""
        return vector[self.index]


class OuterShard:
    """The communication buffer in G parts, and the one of them that this replica works on.

    The buffer is cut into rows of G pieces, all alike, and piece r of every row is replica r's. So
    a row is what one collective carries, and no replica needs a second vector to sort pieces:

        row 0:  | piece 0 | piece 1 | … | piece G−1 |
        row 1:  | piece 0 | piece 1 | … | piece G−1 | …

    To come out even the buffer is longer than the vector, by less than G elements a row. What is
    beyond stays 0 in every vector, so it adds nothing to a norm and no clip touches it.

    Offers what `FlatParams` does for the outer step: chunks, zeros, `total` and `total_numel`.
    Vectors of a shard have shape (rows, piece).

    Args:
        flat: the whole vector.
        mesh: the replicas.
        comm: bounds a row; a chunk of the vector does, too.
    """

    def __init__(self, flat: FlatParams, mesh: Mesh, comm: CommConfig) -> None:
        self.flat, self.total_numel = flat, flat.total_numel
        self.dtype, self.device = flat.dtype, flat.device
        self.num_replicas = mesh.num_replicas
        bucket = min(int(comm.bucket_mb * 2**20) // self.dtype.itemsize, chunk_numel(self.device))
        rows = max(1, math.ceil(flat.numel / max(self.num_replicas, bucket)))
        piece = math.ceil(flat.numel / (rows * self.num_replicas))
        padded = rows * self.num_replicas * piece
        self.mean = BackgroundMean(padded, mesh, comm, self.dtype, self.device)
        """Its buffer is what is cut; it carries the sequence."""
        self.chunks = [ShardChunk(index) for index in range(rows)]
        self._rows = self.mean.buffer.view(rows, self.num_replicas * piece)
        self.own = self._rows.view(rows, self.num_replicas, piece)[:, mesh.replica]
        """This replica's part of the buffer, (rows, piece)."""
        self._exchanges = self.num_replicas > 1 and padded > 0
        sorts = self.device.type == "cpu" and self._exchanges
        self._received = self._rows[0].clone() if sorts else self._rows.new_empty(0)

    def zeros(self) -> Tensor:
        """A new vector of zeros."""
        return torch.zeros(self.own.shape, dtype=self.dtype, device=self.device)

    def copy(self) -> Tensor:
        """A new vector that holds this replica's part of the buffer."""
        return self.zeros().copy_(self.own)

    def reduce_scatter(self) -> None:
        """own ← its mean over the replicas' buffers. Blocking."""
        if not self._exchanges:
            return
        for row, own in zip(self._rows, self.own, strict=True):
            if self.device.type != "cpu":
                dist.reduce_scatter_tensor(own, row, op=dist.ReduceOp.AVG, group=self.mean.group)
            else:
                # gloo's reduce-scatter is an all-reduce of a copy: twice the bytes.
                dist.all_to_all_single(self._received, row, group=self.mean.group)
                torch.mean(self._received.view(self.num_replicas, -1), dim=0, out=own)

    def all_gather(self) -> None:
        """The buffer ← every replica's own. Blocking."""
        if not self._exchanges:
            return
        for row, own in zip(self._rows, self.own, strict=True):
            dist.all_gather_into_tensor(row, own, group=self.mean.group)

    def total(self, *sums: Tensor) -> tuple[Tensor, ...]:
        """Sums over the whole vector, from sums over this replica's part. Blocking."""
        if self.num_replicas > 1:
            together = torch.stack(sums)
            dist.all_reduce(together, group=self.mean.group)
            sums = together.unbind()
        return self.flat.total(*sums)

    def scratch_tensors(self) -> list[Tensor]:
        """One row at most."""
        return [self._received]
