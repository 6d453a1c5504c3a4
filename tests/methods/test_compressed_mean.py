"""The compressed mean: closed forms, error feedback, and what it puts on the wire."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import co2
from co2.comm import codec
from co2.comm.background_mean import BackgroundMean
from co2.comm.codec import BITS, Codec, Scales
from co2.comm.compressed_mean import CompressedMean
from tests.grids import grid
from tests.methods.driver import assert_same
from tests.reference.two_stages import TwoStages
from tests.workers import Pool, replicas

KINDS = tuple(BITS)
BITS = {"sign": 1, "int4": 4, "int8": 8}


@pytest.mark.parametrize(
    ("kind", "x", "packed"),
    [
        ("sign", [1.0, -1, 1, 1, -1, -1, -1, 1, -1, 1], [0b10001101, 0b10]),
        ("int4", [7.0, -7, 1], [0x0E, 0x08]),
        ("int8", [127.0, -127, 1], [254, 0, 128]),
    ],
)
def test_layout_of_a_message(kind: str, x: list[float], packed: list[int]) -> None:
    assert encoded(torch.tensor(x), kind)[0].tolist() == packed


def encoded(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The codes of x, and C(x)."""
    bits = BITS[kind]
    codec = Codec(bits, [len(x)], len(x), x)
    scales = Scales(bits, [len(x)], x).of(x)
    packed = torch.empty(1, codec.row_bytes, dtype=torch.uint8)
    error, found = torch.empty_like(x), torch.empty_like(x)
    codec.encode(x, scales, None, packed, error)
    codec.decode(packed, scales, None, found)
    assert_same(error, x - found)
    return packed[0], found


def compressed(x: Tensor, kind: str) -> Tensor:
    return encoded(x, kind)[1]


@pytest.mark.parametrize(
    ("kind", "x", "expected"),
    [
        ("sign", [0.0, -0.0, -2.0, 4.0, 4.0], [2.683282, 2.683282, -2.683282, 2.683282, 2.683282]),
        ("sign", [0.0, 0.0], [0.0, 0.0]),
        ("int4", [7.0, -3.4, 3.4, -7.0, 0.4], [7, -3, 3, -7, 0]),
        ("int4", [-1.75, 0.2, 0.0], [-1.75, 0.25, 0]),
        ("int8", [-127.0, 63.7, 0.3], [-127, 64, 0]),
        ("int8", [0.0, 0.0], [0.0, 0.0]),
        ("int8", [1e-45, -1e-45], [0.0, 0.0]),  # a scale of 0 divides nothing
        ("int4", [1e-44, -1e-44], [1e-44, -1e-44]),  # 7 times the least of all numbers
    ],
)
def test_known_values(kind: str, x: list[float], expected: list[float]) -> None:
    assert compressed(torch.tensor(x), kind).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_rounding_leaves_half_a_step(kind: str) -> None:
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    step = x.abs().max() / (2 ** (BITS[kind] - 1) - 1)
    found = compressed(x, kind)
    assert (x - found).abs().max() <= step / 2 * (1 + 1e-12)
    assert len(found.unique()) > 2 ** (BITS[kind] - 1)  # it uses its levels


def new_mean(
    sizes: list[int], kind: str, dtype: torch.dtype = torch.float64, masked: bool = False
) -> CompressedMean:
    mesh = co2.Mesh.world()
    mean = BackgroundMean(sum(sizes), mesh, dtype=dtype)
    return CompressedMean(sizes, mesh, mean, BITS[kind], masked)


def closed_form(rank: int, world: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    mean = new_mean([4], "sign", dtype)
    vector = torch.tensor([[1, -1, 3, 1], [1, 1, -1, 1]], dtype=dtype)[rank]
    mean.mean_(vector)
    return vector, mean.worker_error, mean.server_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_closed_form(workers: Pool, dtype: torch.dtype) -> None:
    """Scales sqrt 3 and 1 from the workers, 1 and 1 from the servers."""
    (first, e0, s0), (second, e1, s1) = workers.run(closed_form, 2, dtype)
    assert_same(first, second)
    for found, expected in (
        (first, [1, -1, 1, 1]),
        (e0, [-0.732051, 0.732051, 1.267949, -0.732051]),
        (e1, [0.0, 0.0, 0.0, 0.0]),
        (s0, [0.366025, 0.633975]),
        (s1, [-0.633975, 0.366025]),
    ):
        assert found.tolist() == pytest.approx(expected, abs=1e-6)


def two_tensors(rank: int, world: int) -> tuple[Tensor, Tensor, Tensor]:
    """Three elements and one, in chunks of two; the last element's mask is 0."""
    mean = new_mean([3, 1, 2], "sign", masked=True)
    vector = torch.tensor([2.0, -2.0, 2.0, 100.0, 0.001, 5.0], dtype=torch.float64)
    mean.set_mask(torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64))
    mean.mean_(vector)
    return vector, mean.worker_error, mean.server_error


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_tensor_has_its_own_scale(workers: Pool, world: int) -> None:
    """Each is of one size, so that nothing is lost, and what has no mask is not counted."""
    for vector, worker_error, server_error in workers.run(two_tensors, world):
        expected = [2, -2, 2, 100, 0.001, 0]
        assert vector.tolist() == pytest.approx(expected, rel=1e-12)
        assert worker_error.abs().max() < 1e-12 and worker_error[5] == 0
        assert (server_error.abs() < 1e-12).all()


def vectors(numel: int, step: int, world: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randn(world, numel, generator=generator, dtype=torch.float64)
    return list((drawn + 0.3).to(dtype))


def support_at(step: int, numel: int) -> Tensor:
    """Grows, as v does."""
    return (torch.arange(numel) % 3 < 1 + step).double()


def history(
    rank: int, world: int, sizes: list[int], kind: str, steps: int, dtype: torch.dtype, some: bool
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """By step: the mean, this worker's error and its server's error."""
    mean, numel, found = new_mean(sizes, kind, dtype, some), sum(sizes), []
    for step in range(steps):
        vector = vectors(numel, step, world, dtype)[rank]
        if some:
            mean.set_mask(support_at(step, numel))
        mean.mean_(vector)
        found.append((vector, mean.worker_error.clone(), mean.server_error.clone()))
    return found


SIZES = ([1], [2, 3], [29], [64, 0, 1], [64, 8, 3, 24, 40, 16], [7, 500, 1, 493])
"""Also none that is a multiple of 8 G, servers that own nothing, tensors without elements, and some
that are packed with others."""


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", grid([1, 2, 3, 4], (1, 3).__contains__))
def test_equals_two_stages_in_one_place(
    workers: Pool, world: int, kind: str, sizes: list[int]
) -> None:
    numel = sum(sizes)
    some = kind == "sign" and numel > 4
    runs = workers.run(history, world, sizes, kind, 5, torch.float64, some)
    reference = TwoStages(world, torch.zeros(numel, dtype=torch.float64), sizes, kind)
    for step in range(5):
        alive = support_at(step, numel) != 0 if some else None
        expected = reference.mean(vectors(numel, step, world, torch.float64), alive)
        for rank, run in enumerate(runs):
            assert_same(run[step][0], runs[0][step][0])
            found = run[step]
            errors = (reference.worker_errors[rank], reference.server_errors[rank])
            torch.testing.assert_close(found, (expected, *errors), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "dtype", grid([torch.float32, torch.float64], lambda one: one == torch.float32)
)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost(workers: Pool, kind: str, dtype: torch.dtype) -> None:
    """At every step error = input - compressed, to the bit, and compressed has no more values than
    there are codes; over 100 steps what went in is what came out and what the errors hold."""
    world, sizes, steps = 3, [20, 9], 100
    numel = sum(sizes)
    runs = workers.run(history, world, sizes, kind, steps, dtype, False)
    went_in = torch.zeros(numel, dtype=torch.float64)
    came_out = torch.zeros(numel, dtype=torch.float64)
    before = [torch.zeros(numel, dtype=dtype)] * world
    for step in range(steps):
        given = vectors(numel, step, world, dtype)
        for rank in range(world):
            corrected, error = given[rank] + before[rank], runs[rank][step][1]
            for part, left in zip(corrected.split(sizes), error.split(sizes), strict=True):
                assert_same(left, part - compressed(part, kind))
            before[rank] = error
        went_in += torch.stack(given).double().mean(dim=0)
        came_out += runs[0][step][0]
    held = torch.stack(before).double().mean(dim=0)
    held += torch.cat([run[-1][2] for run in runs])
    tolerance = 1e-11 if dtype is torch.float64 else 1e-4
    torch.testing.assert_close(came_out + held, went_in, rtol=0, atol=tolerance)
    assert held.abs().max() < 0.2 * went_in.abs().max()  # else feedback would not feed back


@replicas(3)
def test_pieces_change_nothing(rank: int, world: int) -> None:
    for kind in KINDS:
        arguments = (rank, world, [70, 31], kind, 3, torch.float64, kind == "sign")
        whole = history(*arguments)
        with patch.object(codec, "_PIECE", 16):
            cut = history(*arguments)
        torch.testing.assert_close(cut, whole, rtol=1e-12, atol=1e-12)


def on_the_wire(rank: int, world: int, sizes: list[int], kind: str) -> tuple[int, float, int]:
    """Bytes handed to others by one mean, its counter, and those of an all-reduce."""
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

    mesh, numel = co2.Mesh.world(), sum(sizes)
    mean = BackgroundMean(numel, mesh)
    packed = CompressedMean(sizes, mesh, mean, BITS[kind])
    with (
        patch.object(dist, "all_to_all_single", counted_to_all),
        patch.object(dist, "all_gather_into_tensor", counted_gather),
    ):
        packed.start(mean.buffer.fill_(1))
        mean.wait()
    totals = mean.totals()
    assert totals.comm_s > 0 and totals.exposed_s > 0
    exact = mean.bytes_per_mean()
    mean.close()
    return sent, totals.bytes_sent, exact


MANY = [900, 30] * 50 + [100_000, 7] + [900, 30] * 50
"""Of 202 tensors, all with a scale; one is in every chunk."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", grid([2, 3, 4], (3).__eq__))
def test_bytes_are_codes_and_scales(workers: Pool, world: int, kind: str) -> None:
    share = BITS[kind] / 32
    for sent, counted, exact in workers.run(on_the_wire, world, [1_000_000], kind):
        assert sent == counted
        assert exact * share <= counted < 1.05 * exact * share
    for sent, counted, exact in workers.run(on_the_wire, world, MANY, kind):
        assert sent == counted
        assert exact * share <= counted
        scales = 2 * (world - 1) * 4 * 102  # in the row of a chunk with half of them
        rounding = 2 * (world - 1) * 4  # to whole scales
        assert counted <= 1.05 * exact * share + scales + rounding
