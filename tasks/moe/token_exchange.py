"""Tokens that travel to the experts of other workers, and what these make of them back.

Every worker knows how many tokens each worker has for each expert (`counts`), so that all of them
make the same plan. Two ways:

    bulk     one all-to-all of all tokens, each expert's padded to the largest count; wait; compute;
             one all-to-all back; wait
    tiled    only the tokens, in tiles: as soon as a tile is there, its expert computes, and what it
             made leaves while the next one is computed; a worker's own tokens do not wait at all

A third one, between GPUs: tasks/moe/symmetric_exchange.py.

The backward pass goes the same ways with gradients. Tiles: FlashMoE (arXiv 2506.04667), there
inside one kernel.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

# `Any`: what autograd hands to and takes from a function.
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from co2.comm.clocks import CommTotals, ExchangeTotals, Stopwatch, stopwatch
from tasks.moe import mlp
from tasks.moe.mlp import Weights


class Traffic:
    """What a worker's tokens have cost. Times of `launch` are the host's, which for a GPU say
    little; those of `on_stream` are the device's."""

    def __init__(self) -> None:
        self.expert_s = 0.0
        """Seconds that this worker's experts have computed between exchanges."""
        self._bytes_sent = 0
        self._comm_s = self._exposed_s = 0.0
        self._under_way, self._began = 0, 0.0
        self._events: deque[tuple[float, int]] = deque()
        """When an all-to-all was launched, 1, or was over, -1, which the backend's thread adds."""
        self._watch: Stopwatch | None = None

    def launch(
        self, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> Callable[[], Tensor]:
        """Start an all-to-all of rows, and return what waits for it.

        Args:
            rows: first those for the first worker.
            received: how many come from each worker.
            sent: how many go to each.
        """
        self._settle()  # here, so that a long training does not keep all of its events
        came = rows.new_empty(sum(received), *rows.shape[1:])
        row_bytes = rows[0].nbytes if len(rows) else 0
        self._bytes_sent += (sum(sent) - sent[group.rank()]) * row_bytes
        self._events.append((time.perf_counter(), 1))
        going = rows.contiguous()
        work = dist.all_to_all_single(came, going, received, sent, group=group, async_op=True)
        assert work is not None, "this worker is in the group"
        work.get_future().add_done_callback(
            lambda _: self._events.append((time.perf_counter(), -1))
        )

        def wait() -> Tensor:
            began = time.perf_counter()
            work.wait()
            self._exposed_s += time.perf_counter() - began
            return came

        return wait

    def on_stream(
        self, exchange: Callable[[], None], bytes_sent: int, device: torch.device
    ) -> None:
        """Run an exchange for which the device does nothing else."""
        self._settle()
        if self._watch is None:
            self._watch = stopwatch(device)
        self._watch.begin()
        exchange()
        self._watch.end()
        self._bytes_sent += bytes_sent

    def totals(self) -> ExchangeTotals:
        """Seconds in which anything was under way, those in which the worker waited for it, and
        bytes; seconds of experts. Call it when nothing is under way."""
        self._settle()
        comm = CommTotals(self._comm_s, self._exposed_s, float(self._bytes_sent))
        return ExchangeTotals(comm, self.expert_s)

    def _settle(self) -> None:
        """Count what has happened since the last call."""
        for at, change in sorted(self._events.popleft() for _ in range(len(self._events))):
            if self._under_way == 0:
                self._began = at
            self._under_way += change
            if self._under_way == 0:
                self._comm_s += at - self._began
        if self._watch is not None:
            seconds = sum(self._watch.take())
            self._comm_s += seconds
            self._exposed_s += seconds


def bulk(
    sent: Tensor, counts: Tensor, weights: Weights, group: dist.ProcessGroup, traffic: Traffic
) -> Tensor:
    """What the experts make of this worker's rows. Collective.

    Args:
        sent: [A, width], in the order of the experts.
        counts: int64 [N, E], rows of each worker for each expert.
        weights: of this worker's experts.
        group: the N workers.
        traffic: counts and times.
    """
    workers, experts = counts.shape
    most = int(counts.max())
    # The place of each row among all padded ones.
    own = counts[group.rank()]
    first = (torch.arange(experts, device=own.device) * most - own.cumsum(0) + own).to(own.dtype)
    place = torch.arange(len(sent), device=own.device) + first.repeat_interleave(own)
    padded = sent.new_zeros(experts * most, sent.shape[1]).index_copy(0, place, sent)
    numbers = [experts // workers * most] * workers

    def exchanged(rows: Tensor) -> Tensor:
        return traffic.launch(rows, numbers, numbers, group)()

    came = Travelled.apply(padded, exchanged, exchanged)
    inner, inner_bias, outer, outer_bias = weights
    tokens = came.view(workers, experts // workers, most, -1).transpose(0, 1).flatten(1, 2)
    hidden = F.gelu(torch.baddbmm(inner_bias[:, None], tokens, inner), approximate="tanh")
    made = torch.baddbmm(outer_bias[:, None], hidden, outer)
    back = made.view(experts // workers, workers, most, -1).transpose(0, 1).flatten(0, 2)
    return Travelled.apply(back, exchanged, exchanged)[place]


class Travelled(Function):
    """Rows that have travelled one way, and whose gradients travel the other way."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        there: Callable[[Tensor], Tensor],
        back: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.back = back
        return there(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


@dataclass(frozen=True)
class Tile:
    """Rows that are on their way together."""

    expert: int
    """Which of this worker's experts computes those that come here."""
    spans: tuple[slice, ...]
    """Of this worker's rows, those for each worker; empty for itself."""
    received: list[int]
    """Rows that come from each worker."""

    @property
    def sent(self) -> list[int]:
        return [span.stop - span.start for span in self.spans]


def tiles(counts: list[list[int]], me: int, most: int) -> Iterator[Tile]:
    """What travels, in the order in which all workers launch it: the first expert of every worker
    first. In a tile at most `most` rows go from one worker to another."""
    workers, experts = len(counts), len(counts[0]) // len(counts)
    first = [0, *accumulate(counts[me])]
    for expert in range(experts):
        pairs = [
            [0 if a == b else counts[a][b * experts + expert] for b in range(workers)]
            for a in range(workers)
        ]
        for begin in range(0, max(map(max, pairs)), most):
            spans = []
            for there, number in enumerate(pairs[me]):
                at = first[there * experts + expert]
                spans.append(slice(at + min(begin, number), at + min(begin + most, number)))
            received = [min(max(pairs[a][me] - begin, 0), most) for a in range(workers)]
            yield Tile(expert, tuple(spans), received)


def tiled(
    sent: Tensor,
    counts: Tensor,
    weights: Weights,
    group: dist.ProcessGroup,
    traffic: Traffic,
    most: int,
) -> Tensor:
    """What the experts make of this worker's rows. Collective. As `bulk`, and

    Args:
        most: rows from one worker to another in a tile.
    """
    result: Tensor = _Tiled.apply(sent, counts, group, traffic, most, *weights)
    return result


class _Tiled(Function):
    @staticmethod
    def forward(
        ctx: Any,
        sent: Tensor,
        counts: Tensor,
        group: dist.ProcessGroup,
        traffic: Traffic,
        most: int,
        *weights: Tensor,
    ) -> Tensor:
        plan = _Plan(counts.tolist(), group, traffic, most)
        kept: list[Tensor] = []

        def compute(expert: int, rows: Tensor) -> Tensor:
            before, made = mlp.forward(weights, expert, rows)
            kept.extend((rows, before))
            return made

        made = plan.pass_through(sent, compute)
        ctx.plan = plan
        ctx.save_for_backward(*weights, *kept)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weights, saved = ctx.saved_tensors[:4], iter(ctx.saved_tensors[4:])
        sums = [torch.zeros_like(weight) for weight in weights]

        def compute(expert: int, rows: Tensor) -> Tensor:
            tokens, before = next(saved), next(saved)
            return mlp.backward(weights, sums, expert, tokens, before, rows)

        d_sent = ctx.plan.pass_through(gradient.contiguous(), compute)
        return d_sent, None, None, None, None, *sums


class _Plan:
    """The way of the tiles of one forward pass, and of its backward pass."""

    def __init__(
        self, counts: list[list[int]], group: dist.ProcessGroup, traffic: Traffic, most: int
    ) -> None:
        self.group, self.traffic, me = group, traffic, group.rank()
        self.tiles = list(tiles(counts, me, most))
        experts = len(counts[0]) // len(counts)
        first = [0, *accumulate(counts[me])]
        mine = range(me * experts, (me + 1) * experts)
        self.own = [slice(first[e], first[e + 1]) for e in mine]

    def pass_through(self, rows: Tensor, compute: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Send each row to its expert's worker, and bring back what that made of it.

        Args:
            rows: [A, width], in the order of the experts.
            compute: from the number of one of this worker's experts and rows for it.
        """
        group, launch, made = self.group, self.traffic.launch, torch.empty_like(rows)
        coming = []
        for tile in self.tiles:
            going = torch.cat([rows[span] for span in tile.spans])
            coming.append(launch(going, tile.received, tile.sent, group))

        def computed(expert: int, rows: Tensor) -> Tensor:
            began = time.perf_counter()
            result = compute(expert, rows)
            self.traffic.expert_s += time.perf_counter() - began
            return result

        for expert, span in enumerate(self.own):
            made[span] = computed(expert, rows[span])
        returning = []
        for tile, wait in zip(self.tiles, coming, strict=True):
            result = computed(tile.expert, wait())
            returning.append(launch(result, tile.sent, tile.received, group))
        for tile, wait in zip(self.tiles, returning, strict=True):
            for span, part in zip(tile.spans, wait().split(tile.sent), strict=True):
                made[span] = part
        return made
