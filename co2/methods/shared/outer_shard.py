"""OuterShard: one replica's part of the outer state, which is sharded over the G replicas."""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from co2.comm.background_mean import BackgroundMean
from co2.comm.cuts import Part
from co2.comm.flat import FlatParams, chunk_numel
from co2.comm.mesh import Mesh
from co2.config import CommConfig


class OuterShard:
    """The communication buffer in G shards, of which this replica works on one.

    The buffer is cut into rows of G pieces of equal size, and replica r has piece r of every row.
    One collective carries one row, and no replica needs a second vector to sort pieces:

        row 0:  | piece 0 | piece 1 | … | piece G−1 |
        row 1:  | piece 0 | piece 1 | … | piece G−1 | …

    For that the buffer is longer than the vector, by less than G elements for each row. The padding
    stays 0 in every vector, so it adds nothing to a norm, and no clip changes it.

    For the outer step a shard offers the same as `FlatParams`: chunks, zeros, copy, `total` and
    `total_numel`. Vectors of a shard have shape (rows, piece).

    Args:
        flat: the whole vector.
        mesh: the replicas.
        comm: a row is at most one of its buckets, and at most one chunk of the vector.
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
        """Holds the buffer, and carries the outer step in the background."""
        self.chunks = [Part(span=row) for row in range(rows)]
        self._rows = self.mean.buffer.view(rows, self.num_replicas * piece)
        self.own = self._rows.view(rows, self.num_replicas, piece)[:, mesh.replica]
        """This replica's shard of the buffer, (rows, piece), as a view."""
        self.scratch = torch.empty_like(self.own[0])
        """One chunk, for whoever works on the shard."""
        self._exchanges = self.num_replicas > 1 and padded > 0
        sorts = self.device.type == "cpu" and self._exchanges
        self._received = self._rows[0].clone() if sorts else self._rows.new_empty(0)

    def zeros(self) -> Tensor:
        """Return a new vector (rows, piece) of zeros."""
        return torch.zeros(self.own.shape, dtype=self.dtype, device=self.device)

    def copy(self) -> Tensor:
        """Return a new vector (rows, piece) with a copy of this replica's shard of the buffer."""
        return self.zeros().copy_(self.own)

    def reduce_scatter(self) -> None:
        """Set `own` to its mean over the replicas' buffers. Blocking."""
        if not self._exchanges:
            return
        for row, own in zip(self._rows, self.own, strict=True):
            if self.device.type != "cpu":
                dist.reduce_scatter_tensor(own, row, op=dist.ReduceOp.AVG, group=self.mean.group)
            else:
                # gloo's reduce-scatter is an all-reduce of a copy: twice the bytes.
                dist.all_to_all_single(self._received, row, group=self.mean.group)
                torch.mean(self._received.view(self.num_replicas, -1), dim=0, out=own)

    def all_gather(self, chunk: Part) -> None:
        """Set the chunk's row of the buffer to the `own` of all replicas. Blocking."""
        if self._exchanges:
            row, own = chunk.of(self._rows), chunk.of(self.own)
            dist.all_gather_into_tensor(row, own, group=self.mean.group)

    def gathered(self, group: dist.ProcessGroup | None) -> Tensor:
        """Return a new vector, as long as the buffer, of the `own` of all replicas: a group of
        their own, because `mean.group` may be in use or closed. Blocking."""
        whole = self.mean.buffer.clone()
        if self._exchanges:
            for row, own in zip(whole.view_as(self._rows), self.own, strict=True):
                dist.all_gather_into_tensor(row, own, group=group)
        return whole

    def total(self, *sums: Tensor) -> tuple[Tensor, ...]:
        """Return sums over the whole vector, given the sums over this replica's shard. Blocking."""
        if self.num_replicas > 1:
            together = torch.stack(sums)
            dist.all_reduce(together, group=self.mean.group)
            sums = together.unbind()
        return self.flat.total(*sums)

    def scratch_tensors(self) -> list[Tensor]:
        """A chunk, and at most one row."""
        return [self.scratch, self._received]
