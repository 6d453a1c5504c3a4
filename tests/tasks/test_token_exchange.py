"""What travels between workers that share experts: the plan of tiles, the bytes, and tokens in
symmetric memory. That all ways compute the same as one worker is in test_moe.py.

PyTorch's two kernels of symmetric memory need GPUs; here functions over gloo do what its
documentation says of them, and fill with NaN what they leave unsaid.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import _symmetric_memory as symm_mem

from co2.errors import ConfigError
from tasks.moe.experts import Exchange, Experts
from tasks.moe.symmetric_exchange import check_numbers, symmetric
from tasks.moe.token_exchange import Traffic, bulk, tiled, tiles
from tests.workers import Pool, replicas

WIDTH = 3


@pytest.mark.parametrize(("world", "experts"), [(1, 3), (2, 2), (2, 6), (3, 6), (4, 4)])
@pytest.mark.parametrize("most", [1, 3, 100])
def test_every_row_travels_once(world: int, experts: int, most: int) -> None:
    """All workers plan the same tiles, and what one sends is what the other expects."""
    counts = counts_of(world, experts)
    plans = [list(tiles(counts.tolist(), me, most)) for me in range(world)]
    assert len({len(plan) for plan in plans}) == 1
    for together in zip(*plans, strict=True):
        assert len({tile.expert for tile in together}) == 1
        for a in range(world):
            for b in range(world):
                assert together[a].sent[b] == together[b].received[a] <= most
    own = experts // world
    for me, plan in enumerate(plans):
        seen = [row for tile in plan for span in tile.spans for row in range(span.start, span.stop)]
        first = [0, *counts[me].cumsum(0).tolist()]
        at_home = range(first[me * own], first[(me + 1) * own])
        assert sorted([*seen, *at_home]) == list(range(first[-1]))
        for tile in plan:
            for there, span in enumerate(tile.spans):
                expert = there * own + tile.expert
                assert span.start == span.stop or (
                    first[expert] <= span.start < span.stop <= first[expert + 1]
                )


def test_nobody_sends_where_all_is_at_home() -> None:
    counts = torch.tensor([[4, 2, 0, 0], [0, 0, 0, 3]])
    assert list(tiles(counts.tolist(), 0, 8)) == []


def travelled(rank: int, world: int, way: str) -> tuple[float, float, float, Tensor]:
    """Bytes and seconds there and back, forward and backward, and the rows' own gradient."""
    counts, traffic = counts_of(world, 4), Traffic()
    torch.manual_seed(0)
    every = [torch.randn(4, WIDTH, 5), torch.randn(4, 5), torch.randn(4, 5, WIDTH)]
    every.append(torch.randn(4, WIDTH))
    weights = tuple(weight.chunk(world)[rank].requires_grad_() for weight in every)
    rows = torch.randn(int(counts[rank].sum()), WIDTH, requires_grad=True)
    group = dist.group.WORLD
    if way == "bulk":
        made = bulk(rows, counts, weights, group, traffic)
    else:
        made = tiled(rows, counts, weights, group, traffic, 2)
    made.square().sum().backward()
    totals = traffic.totals()
    again = traffic.totals()
    assert again == totals, "what has been counted stays counted"
    assert (totals.behind_s > 0) == (way == "tiled")
    return totals.comm.bytes_sent, totals.comm.comm_s, totals.comm.exposed_s, rows.grad


@pytest.mark.parametrize("world", [2, 4])
def test_tiles_carry_tokens_only(workers: Pool, world: int) -> None:
    """`tiled` sends the rows for others' experts and what was made of others' rows, with gradients
    as many times again; `bulk` pads all to the largest count."""
    counts = counts_of(world, 4)
    to = counts.view(world, world, -1).sum(2)
    found = workers.run(travelled, world, "tiled")
    for rank, (sent, comm_s, exposed_s, _) in enumerate(found):
        away = to[rank].sum() - to[rank, rank] + to[:, rank].sum() - to[rank, rank]
        assert sent == 2 * away * WIDTH * 4
        assert exposed_s > 0 and comm_s > 0
    padded = 4 * (4 - 4 // world) * int(counts.max()) * WIDTH * 4
    for (sent, *_, gradient), (*_, other) in zip(
        workers.run(travelled, world, "bulk"), found, strict=True
    ):
        assert sent == padded
        torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-6)


def test_seconds_under_way_are_counted_once() -> None:
    traffic = Traffic()
    traffic._events.extend([(1.0, 1), (1.5, 1), (2.0, -1), (4.0, -1), (7.0, 1), (7.5, -1)])
    assert traffic.totals().comm.comm_s == 3.5


HIDDEN = 5


def parts(rows: Tensor, numbers: Tensor, first: Tensor) -> list[Tensor]:
    return [rows[a : a + n].clone() for n, a in zip(numbers.tolist(), first.tolist(), strict=True)]


def everywhere(mine: list[Tensor]) -> list[list[Tensor]]:
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def put(out: Tensor, places: Tensor, groups: list[list[Tensor]], align: int | None) -> None:
    """Write the parts one behind the other, each group from a multiple of `align`; a group is at
    least that long."""
    out.fill_(torch.nan)
    at, lengths, first = 0, [], []
    for group in groups:
        begin = at
        for part in group:
            out[at : at + len(part)] = part
            lengths.append(len(part))
            first.append(at)
            at += len(part)
        if align is not None:
            at = begin + max(-(-(at - begin) // align), 1) * align
    places.copy_(torch.tensor([lengths, first]))


def dispatch(
    rows: Tensor,
    out: Tensor,
    numbers: Tensor,
    places: Tensor,
    group_name: str,
    major_align: int | None = None,
) -> None:
    """From the order of workers to that of experts."""
    world, me = dist.get_world_size(), dist.get_rank()
    own = len(numbers) // world
    first = torch.tensor([0, *accumulate(numbers.tolist())][:-1])
    sent = everywhere(parts(rows, numbers, first))
    groups = [[sent[a][me * own + e] for a in range(world)] for e in range(own)]
    put(out, places, groups, 1 if major_align is None else major_align)


def combine(rows: Tensor, out: Tensor, sources: Tensor, places: Tensor, group_name: str) -> None:
    """From the order of experts to that of workers."""
    world, me = dist.get_world_size(), dist.get_rank()
    own = sources.shape[1] // world
    sent = everywhere(parts(rows, *sources))
    put(out, places, [[sent[a][e * world + me] for e in range(own)] for a in range(world)], None)


@contextmanager
def kernels() -> Iterator[list[tuple[int, ...]]]:
    """With the two kernels, and memory that is as symmetric. Yields the shapes of what is made."""
    made: list[tuple[int, ...]] = []

    def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        made.append(shape)
        new = torch.empty(*shape, dtype=dtype, device=device)
        return new.fill_(torch.nan) if dtype.is_floating_point else new.fill_(-(10**9))

    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("all_to_all_vdev_2d", dispatch, "CPU")
    library.impl("all_to_all_vdev_2d_offset", combine, "CPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symm_mem, "empty", empty)
        patch.setattr(symm_mem, "rendezvous", lambda tensor, group: None)
        patch.setattr(symm_mem, "get_backend", lambda device: None)
        patch.setattr(symm_mem, "set_backend", lambda name: made.clear())
        try:
            yield made
        finally:
            library._destroy()


def counts_of(world: int, experts: int, seed: int = 0, most: int = 7) -> Tensor:
    numbers = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, most + 1, (world, experts), generator=numbers)
    counts[:, seed % experts] = 0  # an expert that nobody wants
    return counts


def weights_of(experts: int) -> list[Tensor]:
    torch.manual_seed(experts)
    shapes = ((WIDTH, HIDDEN), (HIDDEN,), (HIDDEN, WIDTH), (WIDTH,))
    return [torch.randn(experts, *shape, dtype=torch.float64) for shape in shapes]


def computed(weights: list[Tensor], rows: Tensor, counts: Tensor) -> Tensor:
    """One expert after another."""
    made = []
    for part, *expert in zip(rows.split(counts.tolist()), *weights, strict=True):
        inner, inner_bias, outer, outer_bias = expert
        hidden = F.gelu(torch.addmm(inner_bias, part, inner), approximate="tanh")
        made.append(torch.addmm(outer_bias, hidden, outer))
    return torch.cat(made)


def both(rank: int, world: int, experts: int) -> None:
    """For several batches: `symmetric` and `tiled` make the same, with the same gradients and
    bytes."""
    group = dist.group.WORLD
    assert group is not None
    with kernels():
        for seed, most in enumerate((7, 2, 30, 0)):  # the third needs more memory
            counts, traffic, other = counts_of(world, experts, seed, most), Traffic(), Traffic()
            weights = [w.chunk(world)[rank].requires_grad_() for w in weights_of(experts)]
            numbers = torch.Generator().manual_seed(rank)
            shape = int(counts[rank].sum()), WIDTH
            rows = torch.randn(shape, dtype=torch.float64, generator=numbers).requires_grad_()

            ways = (
                symmetric(rows, counts, partial(computed, weights), group, traffic),
                tiled(rows, counts, tuple(weights), group, other, 4),
            )
            results = []
            for out in ways:
                loss = (out * (1 + out.detach())).sum()
                results.append((out.detach(), *torch.autograd.grad(loss, [rows, *weights])))
            for mine, theirs in zip(*results, strict=True):
                assert mine.isfinite().all()
                torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
            totals = traffic.totals().comm
            assert totals.comm_s == totals.exposed_s > 0
            assert totals.bytes_sent == other.totals().comm.bytes_sent


@pytest.mark.parametrize(("world", "experts"), [(1, 3), (2, 2), (2, 6), (3, 6), (4, 4)])
def test_equals_tiles(workers: Pool, world: int, experts: int) -> None:
    workers.run(both, world, experts)


@replicas(2)
def test_layers_share_the_memory(rank: int) -> None:
    """Two layers of a model compute as in tiles, in memory that is made once for both."""
    found = []
    with kernels() as made:
        for exchange in (Exchange.tiled, Exchange.symmetric):
            torch.manual_seed(0)
            shape = (8, 16, 4, 2, None, False, (0.5, 0.5), 0.0)
            layers = [Experts(*shape, exchange=exchange) for _ in range(2)]
            for one in layers:
                one.divide(dist.group.WORLD)
            numbers = torch.Generator().manual_seed(rank)
            for _ in range(3):
                x = torch.randn(12, 8, generator=numbers).requires_grad_()
                out = layers[1](layers[0](x))
            weights = [weight for one in layers for weight in one.parameters()]
            grads = torch.autograd.grad((out * (1 + out.detach())).sum(), [x, *weights])
            found.append([out.detach(), *grads])
    for tiled_one, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, tiled_one, rtol=1e-4, atol=1e-5)
    assert len(made) % 9 == 0 and len(made) <= 18, "all of it at once, and at most once more"


def test_what_the_kernels_cannot_serve() -> None:
    check_numbers(16, 256)
    for numbers, line in {
        (
            32,
            64,
        ): "mesh.replica_size=32: moe.exchange=symmetric serves at most 16 workers; use tiled",
        (
            2,
            64,
        ): "moe.exchange=symmetric: a worker would have 32 experts, at most 16 can be served; "
        "use tiled",
    }.items():
        with pytest.raises(ConfigError) as error:
            check_numbers(*numbers)
        assert str(error.value) == line
