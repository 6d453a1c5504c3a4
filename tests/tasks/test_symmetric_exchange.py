"""Tokens in symmetric memory. PyTorch's two kernels need GPUs; here functions over gloo do what its
documentation says of them, and fill with NaN what they leave unsaid."""

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
from tasks.moe.token_exchange import Traffic, tiled
from tests.workers import Pool

WIDTH, HIDDEN = 3, 5


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


def counts_of(world: int, experts: int, seed: int, most: int = 7) -> Tensor:
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


def both(rank: int, world: int, experts: int) -> list[tuple]:
    """For several batches: what `symmetric` and `tiled` make, gradients, bytes."""
    found = []
    with kernels():
        group = dist.group.WORLD
        assert group is not None
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
            totals = traffic.totals().comm
            assert totals.comm_s == totals.exposed_s > 0
            found.append((*results, totals.bytes_sent, other.totals().comm.bytes_sent))
    return found


@pytest.mark.parametrize(("world", "experts"), [(1, 3), (2, 2), (2, 6), (3, 6), (4, 4)])
def test_equals_tiles(workers: Pool, world: int, experts: int) -> None:
    """Results, gradients and bytes."""
    for batches in workers.run(both, world, experts):
        assert len(batches) == 4
        for mine, theirs, mine_sent, theirs_sent in batches:
            for one, other in zip(mine, theirs, strict=True):
                assert one.isfinite().all()
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
            assert mine_sent == theirs_sent


def layers(rank: int, world: int) -> tuple[list[Tensor], list[Tensor], int]:
    """Two layers of a model, in tiles and in symmetric memory, and how many times that was made."""
    found = []
    with kernels() as made:
        for exchange in (Exchange.tiled, Exchange.symmetric):
            torch.manual_seed(0)
            shape = (8, 16, 4, 2, None, False, (0.5, 0.5), 0.0)
            both = [Experts(*shape, exchange=exchange) for _ in range(2)]
            for one in both:
                one.divide(dist.group.WORLD)
            numbers = torch.Generator().manual_seed(rank)
            for _ in range(3):
                x = torch.randn(12, 8, generator=numbers).requires_grad_()
                out = both[1](both[0](x))
            weights = [weight for one in both for weight in one.parameters()]
            grads = torch.autograd.grad((out * (1 + out.detach())).sum(), [x, *weights])
            found.append([out.detach(), *grads])
    return found[0], found[1], len(made)


def test_layers_share_the_memory(workers: Pool) -> None:
    for tiles, symmetric_ones, made in workers.run(layers, 2):
        for one, other in zip(tiles, symmetric_ones, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert made % 9 == 0 and made <= 18, "all of it at once, and at most once more"


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
