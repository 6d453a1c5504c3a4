"""What travels between workers that share experts: the plan of tiles, and the bytes. That both ways
compute the same is in test_experts.py."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tasks.moe.token_exchange import Traffic, bulk, tiled, tiles
from tests.workers import Pool

WIDTH = 3


def counts_of(world: int, experts: int, most: int = 7) -> Tensor:
    numbers = torch.Generator().manual_seed(world * experts)
    return torch.randint(0, most + 1, (world, experts), generator=numbers)


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
