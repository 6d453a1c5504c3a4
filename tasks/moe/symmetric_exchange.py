"""Tokens that travel between GPUs through symmetric memory: `moe.exchange=symmetric`.

One kernel of NVSHMEM brings every row to its expert's worker, where a grouped GEMM computes all of
them; another one brings back what that made of them. Nothing is padded, and no worker's host takes
part in sending. In the backward pass the gradients go the same ways.

What an exchange reads from other workers' memory lies in one of two buffers, used in turn. Every
exchange begins with a barrier between the GPUs, so that when one is over, all workers have read
what they needed of the one before it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symm_mem

from co2.errors import require
from tasks.moe.token_exchange import Traffic, Travelled

BACKEND: Final = "NVSHMEM"
"""Of symmetric memory: the one that has these kernels."""

MOST = 16
"""Workers that PyTorch's kernels can serve, and experts of each."""


def check_numbers(workers: int, experts: int) -> None:
    """Raise `ConfigError` unless the kernels can serve so many workers and experts of a layer."""
    hint = f"moe.exchange=symmetric serves at most {MOST} workers; use tiled"
    require(workers <= MOST, "mesh.replica_size", workers, hint)
    own = experts // workers
    hint = f"a worker would have {own} experts, at most {MOST} can be served; use tiled"
    require(own <= MOST, "moe.exchange", "symmetric", hint)


def symmetric(
    sent: Tensor,
    counts: Tensor,
    compute: Callable[[Tensor, Tensor], Tensor],
    group: dist.ProcessGroup,
    traffic: Traffic,
) -> Tensor:
    """What the experts make of this worker's rows. Collective.

    Args:
        sent: [A, width], in the order of the experts.
        counts: int64 [N, E], rows of each worker for each expert.
        compute: from rows, [B, width], in the order of this worker's experts, and the number of
            each one's, int64 [E/N].
        group: the N workers.
        traffic: counts and times. The GPU stands still for all of it.
    """
    way = _Way(counts, group, traffic)
    came: Tensor = Travelled.apply(sent, way.to_experts, way.from_experts)
    made: Tensor = Travelled.apply(compute(came, way.own), way.from_experts, way.to_experts)
    return made


class _Way:
    """The way of one layer's rows and of their gradients."""

    def __init__(self, counts: Tensor, group: dist.ProcessGroup, traffic: Traffic) -> None:
        me, workers = group.rank(), group.size()
        self.group, self.traffic, self.sent = group, traffic, counts[me]
        between = counts.view(workers, workers, -1)  # from, to, expert
        self.own = between[:, me].sum(0)
        """Rows of each of this worker's experts, [E/N]."""
        self.came = between[:, me].T.flatten()
        """The same of each worker, [E/N * N]."""
        travel = between.sum(2).tolist()
        self.num_sent, self.num_came = sum(travel[me]), sum(row[me] for row in travel)
        self.num_at_home = travel[me][me]
        self.most = max(max(map(sum, travel)), max(map(sum, zip(*travel, strict=True))))
        """The largest number of rows that a worker sends or gets, alike on all of them."""

    def to_experts(self, rows: Tensor) -> Tensor:
        """[A, width] in the order of all experts to [B, width] in the order of this worker's."""
        memory = _memory(self.group, self.most, rows, len(self.sent))
        turn = memory.next()
        turn.rows[: len(rows)] = rows
        turn.numbers.copy_(self.sent)
        self._exchange(
            lambda: torch.ops.symm_mem.all_to_all_vdev_2d(
                turn.rows, memory.arrived, turn.numbers, turn.places, self.group.group_name
            ),
            rows,
        )
        # Between experts there may be padding: one without rows gets one.
        first = turn.places[1, :: self.group.size()]
        shift = (first - self.own.cumsum(0) + self.own).repeat_interleave(
            self.own, output_size=self.num_came
        )
        return memory.arrived[torch.arange(self.num_came, device=rows.device) + shift]

    def from_experts(self, rows: Tensor) -> Tensor:
        """The reverse."""
        memory = _memory(self.group, self.most, rows, len(self.sent))
        turn = memory.next()
        turn.rows[: len(rows)] = rows
        torch.stack((self.came, self.came.cumsum(0) - self.came), out=turn.sources)
        self._exchange(
            lambda: torch.ops.symm_mem.all_to_all_vdev_2d_offset(
                turn.rows, memory.arrived, turn.sources, turn.places, self.group.group_name
            ),
            rows,
        )
        return memory.arrived[: self.num_sent].clone()

    def _exchange(self, launch: Callable[[], None], rows: Tensor) -> None:
        away = len(rows) - self.num_at_home
        self.traffic.on_stream(launch, away * rows.shape[1] * rows.element_size(), rows.device)


@dataclass(frozen=True)
class _Turn:
    """What other workers read, and write, in one exchange."""

    rows: Tensor
    """[rows, width]"""
    numbers: Tensor
    """int64 [E]: rows for each expert."""
    sources: Tensor
    """int64 [2, E]: numbers and first rows of parts that go back."""
    places: Tensor
    """int64 [2, E]: numbers and first rows of parts that have arrived."""


class _Memory:
    """Symmetric memory of one worker, which all workers of a group make at the same time."""

    def __init__(self, group: dist.ProcessGroup, num_rows: int, like: Tensor, experts: int) -> None:
        def made(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            tensor = symm_mem.empty(*shape, dtype=dtype, device=like.device)
            symm_mem.rendezvous(tensor, group)
            return tensor

        def rows() -> Tensor:
            # An expert without rows takes one of padding.
            return made(num_rows + experts // group.size(), like.shape[1], dtype=like.dtype)

        self.num_rows, self.kind = num_rows, (like.shape[1], like.dtype, experts)
        self.arrived = rows()
        self._turns = [
            _Turn(rows(), made(experts), made(2, experts), made(2, experts)) for _ in range(2)
        ]

    def next(self) -> _Turn:
        """The turn of the next exchange."""
        self._turns.reverse()
        return self._turns[0]


_MEMORIES: WeakKeyDictionary[dist.ProcessGroup, _Memory] = WeakKeyDictionary()
"""One for all layers of a model. A group ends with its training."""


def _memory(group: dist.ProcessGroup, num_rows: int, like: Tensor, experts: int) -> _Memory:
    """The group's memory, made anew, and larger than needed, where it is too small."""
    memory, kind = _MEMORIES.get(group), (like.shape[1], like.dtype, experts)
    if memory is not None:
        if memory.num_rows >= num_rows and memory.kind == kind:
            return memory
        dist.barrier(group)  # others may still read the old one
    elif symm_mem.get_backend(like.device) != BACKEND:
        symm_mem.set_backend(BACKEND)
    memory = _MEMORIES[group] = _Memory(group, num_rows + num_rows // 4, like, experts)
    return memory
