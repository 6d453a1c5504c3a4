"""The 1-bit mean: closed forms, error feedback, and what it puts on the wire."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import co2
from co2 import onebit
from co2.comm import AsyncMean
from co2.onebit import OneBitMean, pack_signs, unpack_signs
from tests.methods.driver import assert_same
from tests.reference.onebit import TwoStages, compress
from tests.workers import Pool


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 1000])
@pytest.mark.parametrize("spare", [0, 3])
def test_signs_come_back(numel: int, spare: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    values[0] = -values[0].abs()
    packed = torch.empty(-(-numel // 8) + spare, dtype=torch.uint8)
    pack_signs(values, packed)
    found = torch.empty(numel)
    unpack_signs(packed, found)
    assert torch.equal(found, values.sign())


def test_the_sign_of_zero_is_plus() -> None:
    packed, found = torch.empty(1, dtype=torch.uint8), torch.empty(3)
    pack_signs(torch.tensor([0.0, -0.0, -1.0]), packed)
    unpack_signs(packed, found)
    assert found.tolist() == [1.0, 1.0, -1.0]


def new_mean(numel: int, dtype: torch.dtype = torch.float64) -> OneBitMean:
    mesh = co2.Mesh.world()
    return OneBitMean(numel, mesh, mesh.new_group(), dtype)


def closed_form(rank: int, world: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    mean = new_mean(4, dtype)
    vector = torch.tensor([[1, -1, 3, 1], [1, 1, -1, 1]], dtype=dtype)[rank]
    mean.mean_(vector)
    return vector, mean.worker_error, mean.server_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_closed_form(workers: Pool, dtype: torch.dtype) -> None:
    """Scales sqrt 3 and 1 from the workers, 1 and 1 from the servers."""
    (first, e0, s0), (second, e1, s1) = workers.run(closed_form, 2, dtype)
    assert first.tolist() == second.tolist() == [1, -1, 1, 1]
    for found, expected in (
        (e0, [-0.732051, 0.732051, 1.267949, -0.732051]),
        (e1, [0.0, 0.0, 0.0, 0.0]),
        (s0, [0.366025, 0.633975]),
        (s1, [-0.633975, 0.366025]),
    ):
        assert found.tolist() == pytest.approx(expected, abs=1e-6)


def vectors(numel: int, step: int, world: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randn(world, numel, generator=generator, dtype=torch.float64)
    return list((drawn + 0.3).to(dtype))


def history(
    rank: int, world: int, numel: int, steps: int, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """By step: the mean, this worker's error and its server's error."""
    mean = new_mean(numel, dtype)
    found = []
    for step in range(steps):
        vector = vectors(numel, step, world, dtype)[rank]
        mean.mean_(vector)
        found.append((vector, mean.worker_error.clone(), mean.server_error.clone()))
    return found


@pytest.mark.parametrize("numel", [1, 5, 29, 64, 1001])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_equals_two_stages_in_one_place(workers: Pool, world: int, numel: int) -> None:
    """Sizes that are no multiple of 8 G, and servers that own nothing."""
    runs = workers.run(history, world, numel, 5, torch.float64)
    reference = TwoStages(world, torch.zeros(numel, dtype=torch.float64))
    for step in range(5):
        expected = reference.mean(vectors(numel, step, world, torch.float64))
        for rank, run in enumerate(runs):
            assert_same(run[step][0], runs[0][step][0])
            found = run[step]
            errors = (reference.worker_errors[rank], reference.server_errors[rank])
            torch.testing.assert_close(found, (expected, *errors), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_is_lost(workers: Pool, dtype: torch.dtype) -> None:
    """At every step error = input - compressed, to the bit; and over 200 steps what went in is what
    came out and what the errors hold."""
    world, numel, steps = 3, 29, 200
    runs = workers.run(history, world, numel, steps, dtype)
    went_in = torch.zeros(numel, dtype=torch.float64)
    came_out = torch.zeros(numel, dtype=torch.float64)
    before = [torch.zeros(numel, dtype=dtype)] * world
    for step in range(steps):
        given = vectors(numel, step, world, dtype)
        for rank in range(world):
            corrected = given[rank] + before[rank]
            scale = (corrected.square().sum() / numel).sqrt()
            sent = torch.where(corrected >= 0, scale, -scale)
            assert_same(runs[rank][step][1], corrected - sent)
            torch.testing.assert_close(sent, compress(corrected))
            before[rank] = runs[rank][step][1]
        went_in += torch.stack(given).double().mean(dim=0)
        came_out += runs[0][step][0]
    held = torch.stack(before).double().mean(dim=0)
    held += torch.cat([run[-1][2] for run in runs])
    tolerance = 1e-11 if dtype is torch.float64 else 1e-4
    torch.testing.assert_close(came_out + held, went_in, rtol=0, atol=tolerance)
    assert held.abs().max() < 0.2 * went_in.abs().max()  # else feedback would not feed back


def in_small_pieces(rank: int, world: int) -> None:
    whole = history(rank, world, 101, 3, torch.float64)
    with patch.object(onebit, "_PIECE", 16):
        cut = history(rank, world, 101, 3, torch.float64)
    torch.testing.assert_close(cut, whole, rtol=1e-12, atol=1e-12)


def test_pieces_change_nothing(workers: Pool) -> None:
    workers.run(in_small_pieces, 3)


MILLION = 1_000_000


def on_the_wire(rank: int, world: int) -> tuple[int, int, float, int]:
    """Bytes handed to others by one mean, its counter, its seconds, and those of an all-reduce."""
    sent = 0
    to_all, gather = dist.all_to_all_single, dist.all_gather_into_tensor

    def counted_to_all(output: Tensor, given: Tensor, **kwargs: object) -> object:
        nonlocal sent
        sent += given.nbytes * (world - 1) // world
        return to_all(output, given, **kwargs)

    def counted_gather(output: Tensor, given: Tensor, **kwargs: object) -> object:
        nonlocal sent
        sent += given.nbytes * (world - 1)
        return gather(output, given, **kwargs)

    mean = new_mean(MILLION, torch.float32)
    with (
        patch.object(dist, "all_to_all_single", counted_to_all),
        patch.object(dist, "all_gather_into_tensor", counted_gather),
    ):
        mean.mean_(torch.ones(MILLION))
    clocks = mean.clocks()
    assert clocks["comm_s"] == clocks["exposed_s"] > 0
    exact = AsyncMean(MILLION, co2.Mesh.world()).bytes_per_mean()
    return sent, mean.bytes_sent, clocks["bytes"], exact


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_thirty_second_of_an_all_reduce(workers: Pool, world: int) -> None:
    for sent, counted, told, exact in workers.run(on_the_wire, world):
        assert sent == counted == told
        assert exact / 32 <= counted < 1.05 * exact / 32
