"""FlatParams: the trained parameters that one worker holds, as one flat vector."""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.profiler import record_function

from co2.comm.collectives import local, num_parts
from co2.comm.cuts import pack
from co2.comm.mesh import Mesh
from co2.comm.phases import SNAPSHOT
from co2.comm.transfer import Chunk, Direct, Staged, views
from co2.config import CommDevice
from co2.streams import side_stream

# Elements that one pass of arithmetic touches before it goes on, so that several operations on
# the same elements meet them in cache. On a GPU every operation is a launch: a chunk holds all of
# GPT-2 small, whose round so takes under 60, and its scratch of 512 MiB is 0.6 % of an 80 GB card.
_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 27}


def chunk_numel(device: torch.device) -> int:
    """Return the largest number of elements of a chunk."""
    return _CHUNK.get(device.type, _CHUNK["cuda"])


class FlatParams:
    """The parameters that an optimizer trains, seen as one vector. Of parameters that `fully_shard`
    has sharded it holds this worker's shards, which may be empty.

    Vectors of this shape are copies: a collective on one cannot touch a live parameter. The order
    is that of the parameter groups, and within a group that of its list; a tied parameter counts
    once, and parameters without a gradient are left out. The element type is fp32, or fp64 where a
    parameter is. After the model has been moved, this object is out of date.

    Args:
        optimizer: holds the parameters.
        keep: where vectors lie: beside the parameters, or in the host's memory.
        only: the parameters to take; None for all.
        part: (number, P), to take this one of P parts of near equal length into which the vector
            is cut, between rows, the slices along a tensor's first axis; a row belongs to the part
            where it begins. Workers that share a replica cut their shards of a parameter at the
            same share of it. What concerns whole parameters is then of no use: gradients,
            `total_numel`, `chunks_of` others. None: all of it.
        mesh: the workers; needed by `total` if they hold parts of parameters.
    Raises:
        ValueError: no parameter requires a gradient.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        keep: CommDevice = CommDevice.auto,
        only: Iterable[Tensor] | None = None,
        mesh: Mesh | None = None,
        part: tuple[int, int] | None = None,
    ) -> None:
        wanted = None if only is None else set(map(id, only))
        taken: dict[int, tuple[Tensor, int]] = {}
        for index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if param.requires_grad and (wanted is None or id(param) in wanted):
                    taken.setdefault(id(param), (param, index))
        if not taken:
            raise ValueError("the optimizer holds no parameter that requires a gradient")
        self.owners = [owner for owner, _ in taken.values()]
        """The parameters themselves, in the vector's order; `params` holds their local parts."""
        self.group_of = [index for _, index in taken.values()]
        wholes = [owner.detach() for owner in self.owners]
        self.params = [local(whole) for whole in wholes]
        parts = list(map(num_parts, self.owners))
        sizes = [w.numel() * of for w, of in zip(wholes, parts, strict=True)]
        self.total_numel = sum(sizes)
        """Elements of the whole replica; `numel` counts those on this worker."""
        cuts = [of * _cuts(whole) for whole, of in zip(wholes, parts, strict=True)]
        self._shares = [of / max(cuts) for of in cuts]
        shards = zip(self.params, wholes, strict=True)
        sharded = max(parts) > 1 or any(part is not whole for part, whole in shards)
        # A process group of its own, because totals may be taken in the background.
        self._group = mesh.new_group_within_replica() if mesh is not None and sharded else None
        if part is not None:
            self._keep(*part, sizes)
        self.numel = sum(param.numel() for param in self.params)
        self.dtype = torch.float32
        for param in self.params:
            self.dtype = torch.promote_types(self.dtype, param.dtype)
        device = self.params[0].device
        self._side = side_stream(device) if keep is CommDevice.cpu else None
        self.device = device if self._side is None else torch.device("cpu")
        """Where vectors lie."""
        self.chunks = self.chunks_of(self.params)
        self.transfer = self.chunks[0].transfer
        self.round = self.transfer.round

    def _keep(self, number: int, parts: int, sizes: Sequence[int]) -> None:
        """Keep what begins in this one of so many parts of near equal length, of parameters that
        have these sizes in the whole replica."""
        first, last = (sum(sizes) * n // parts for n in (number, number + 1))
        kept = []
        begin = 0
        for index, (param, size) in enumerate(zip(self.params, sizes, strict=True)):
            rows = param if param.ndim else param.view(1)
            if rows.numel():
                low, high = (max(0, -((begin - end) * len(rows) // size)) for end in (first, last))
                if low < min(high, len(rows)):
                    kept.append((rows[low:high], index))
            begin += size
        kept = kept or [(self.params[0].flatten()[:0], 0)]
        self.params = [piece for piece, _ in kept]
        self.owners = [self.owners[index] for _, index in kept]
        self.group_of = [self.group_of[index] for _, index in kept]
        self._shares = [self._shares[index] for _, index in kept]

    def chunks_of(self, tensors: Sequence[Tensor]) -> list[Chunk]:
        """Return the vector's chunks for other live tensors: one for each parameter, of its shape
        and layout, in the same order. They read and write those, by a transfer of their own."""
        size = chunk_numel(self.device)
        pieces = [
            ((group, share), piece)
            for tensor, group, share in zip(tensors, self.group_of, self._shares, strict=True)
            # One that is not contiguous has no view as a vector.
            for piece in (tensor.view(-1).split(size) if tensor.is_contiguous() else (tensor,))
        ]
        sizes = [piece.numel() for _, piece in pieces]
        packed = list(pack(sizes, size, [kind for kind, _ in pieces]))
        live = [tuple(piece for _, piece in pieces[some]) for some in packed]
        transfer = (
            Direct(live, self.dtype, self.device)
            if self._side is None
            else Staged(live, self.dtype, self._side)
        )
        ends = list(accumulate(sum(sizes[some]) for some in packed))
        spans = map(slice, [0, *ends], ends)
        kinds = [pieces[some.start][0] for some in packed]
        return [
            Chunk(index=index, span=span, group=group, transfer=transfer, share=share)
            for index, (span, (group, share)) in enumerate(zip(spans, kinds, strict=True))
        ]

    def zeros(self) -> Tensor:
        """Return a new vector (numel,) of zeros."""
        return self.transfer.empty(self.numel).zero_()

    def copy(self) -> Tensor:
        """Return a new vector (numel,) with a copy of the live parameters."""
        vector = self.transfer.empty(self.numel)
        self.copy_to(vector)
        return vector

    def copy_to(self, vector: Tensor) -> None:
        """Copy the live parameters into a vector, which may be longer."""
        with self.round():
            for chunk in self.chunks:
                chunk.of(vector).copy_(chunk.read())

    def displacement(self, start: Tensor, out: Tensor) -> None:
        """Write the pseudo-gradient of the steps since `start`, which is `start` minus the live
        parameters, to `out`, rounded to its type."""
        with record_function(SNAPSHOT):
            for chunk in self.chunks:
                torch.sub(chunk.of(start), chunk.read(), out=chunk.of(out))

    def swap(self, vector: Tensor) -> None:
        """Exchange the live parameters and a vector, which may be longer."""
        with record_function(SNAPSHOT):
            for chunk in self.chunks:
                values = chunk.read()
                chunk.write(chunk.of(vector))
                chunk.of(vector).copy_(values)

    def total(self, *sums: Tensor) -> tuple[Tensor, ...]:
        """Return sums over all elements of the replica, given the sums over those that this worker
        holds. Blocking if the parameters are sharded."""
        if self._group is None:
            return sums
        together = torch.stack(sums)
        dist.all_reduce(together, group=self._group)
        return together.unbind()

    def gradients(self, out: Tensor, add: bool = False) -> None:
        """Write the gradients to `out`, which lies where the parameters do, or add them to it; a
        parameter without one has zeros."""
        parts = zip(self.owners, views(out, self.params), strict=True)
        found = [(part, local(owner.grad)) for owner, part in parts if owner.grad is not None]
        if len(found) < len(self.owners) and not add:
            out.zero_()
        if found:
            targets, grads = zip(*found, strict=True)
            (torch._foreach_add_ if add else torch._foreach_copy_)(targets, grads)

    def set_gradients(self, vector: Tensor) -> None:
        """Set the gradients to `vector`, which lies where the parameters do; a parameter without
        one gets one."""
        for owner in self.owners:
            if owner.grad is None:
                owner.grad = torch.zeros_like(owner)
        grads = [local(owner.grad) for owner in self.owners if owner.grad is not None]
        torch._foreach_copy_(grads, views(vector, self.params))

    def write(self, vector: Tensor) -> None:
        """Set the live parameters to a vector."""
        for chunk in self.chunks:
            chunk.write(chunk.of(vector))


def _cuts(tensor: Tensor) -> int:
    """Return how many workers hold different parts of a tensor: of a DTensor, whose mesh may have
    other axes along which workers hold the same; 1 of any other tensor."""
    mesh = getattr(tensor, "device_mesh", None)  # to import DTensor costs half a second
    if mesh is None:
        return 1
    axes = enumerate(tensor.placements)  # type: ignore[attr-defined]
    return math.prod(mesh.size(axis) for axis, place in axes if not place.is_replicate())
