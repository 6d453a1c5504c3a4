"""The sparse mean and SparseLoCo: what is kept, how it is packed, and what it puts on the wire."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

import co2
from co2.comm import sparse_mean
from co2.comm.background_mean import BackgroundMean
from co2.comm.sparse_mean import SparseMean, largest
from tests.grids import grid
from tests.methods.driver import SETTINGS, Session, assert_same
from tests.reference import REFERENCES
from tests.reference import sparseloco as reference
from tests.reference.replica import Replica
from tests.workers import Pool, replicas


@pytest.mark.parametrize("kept", [1, 2, 3, 82, 4096])
def test_a_message_brings_every_index_and_sign(kept: int) -> None:
    """Of one magnitude, so that rounding loses nothing."""
    generator = torch.Generator().manual_seed(kept)
    where = torch.randperm(4096, generator=generator)[:kept]
    vector = torch.zeros(4096)
    vector[where] = torch.randint(2, (kept,), generator=generator) * 4.0 - 2
    mean, found = new_mean([4096], kept / 4096, 0.0, torch.float32), vector.clone()
    mean.mean_(found)
    assert_same(found, vector)
    assert not mean.error.any()
    assert len(mean.messages()["sent"]) == 4 + kept + -(-kept // 4) * 3 + (kept + -(-kept // 4)) % 2


@pytest.mark.parametrize("kept", [1, 5, 29, 30])
def test_the_largest_are_those_of_a_stable_sort(kept: int) -> None:
    """With many ties."""
    sizes = torch.randint(6, (50, 30), generator=torch.Generator().manual_seed(kept)).double()
    order = sizes.sort(dim=1, descending=True, stable=True).indices[:, :kept]
    expected = torch.zeros(50, 30, dtype=torch.bool).scatter_(1, order, True)
    for most in (kept, 30):
        taken, found = largest(sizes.clone(), torch.full((50, 1), kept), most)
        assert_same(taken, expected)
        assert_same(found, sizes.sort(dim=1, descending=True).values[:, :most])


def test_what_is_no_number_is_among_the_largest() -> None:
    sizes = torch.tensor([[1.0, torch.nan, 3.0], [torch.inf, 2.0, torch.nan], [torch.nan] * 3])
    taken, _ = largest(sizes, torch.full((3, 1), 2), 2)
    assert [row.nonzero().flatten().tolist() for row in taken] == [[1, 2], [0, 2], [0, 1]]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([8.0, -6.0, 1.0, -3.0], [7, -7, 2, -2]),
        ([5.0], [5]),
        ([-3.0, 3.0, 3.0], [-3, 3, 3]),
        ([0.0, 0.0, -0.0], [0, 0, 0]),
        ([0.0, 4.0, 0.0, -4.0], [0, 4, 0, -4]),  # what has not moved is not moved
        ([1.001953125], [1.0]),  # bf16 has no number between 1 and 1.0078125
        ([1e-30, -3e-30], [1e-30, -3e-30]),
    ],
)
def test_two_magnitudes(values: list[float], expected: list[float]) -> None:
    found = torch.tensor([*values, *(2 * value for value in values)])
    new_mean([len(values)] * 2, 1.0, 0.0, torch.float32).mean_(found)
    first, second = found.split(len(values))
    torch.testing.assert_close(first, torch.tensor(expected).float(), rtol=0.004, atol=0)
    torch.testing.assert_close(second, 2 * first, rtol=0.004, atol=0)


def new_mean(sizes: Sequence[int], density: float, decay: float, dtype: torch.dtype) -> SparseMean:
    mesh = co2.Mesh.world()
    mean = BackgroundMean(sum(sizes), mesh, dtype=dtype)
    return SparseMean(sizes, mesh, mean, density, decay)


def vectors(numel: int, step: int, world: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randn(world, numel, generator=generator, dtype=torch.float64)
    return list((drawn + 0.3).to(dtype))


def history(
    rank: int, world: int, sizes: list[int], density: float, dtype: torch.dtype, steps: int
) -> list[tuple[Tensor, Tensor]]:
    """By step: the mean, and this replica's error."""
    mean, found = new_mean(sizes, density, 0.5, dtype), []
    for step in range(steps):
        vector = vectors(sum(sizes), step, world, dtype)[rank]
        mean.mean_(vector)
        found.append((vector, mean.error.clone()))
    return found


SIZES = ([1], [7, 500, 0, 1], [4096], [4095, 4097], [3 * 4096 + 5, 2, 9000])
"""Also tensors without elements, and last chunks of one element."""


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("density", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("world", grid([1, 3], (3).__eq__))
def test_equals_what_is_written_in_one_place(
    workers: Pool, world: int, density: float, sizes: list[int]
) -> None:
    runs = workers.run(history, world, sizes, density, torch.float64, 4)
    errors = [torch.zeros(sum(sizes), dtype=torch.float64)] * world
    for step in range(4):
        sent = []
        for rank, vector in enumerate(vectors(sum(sizes), step, world, torch.float64)):
            corrected = 0.5 * errors[rank] + vector
            sent.append(reference.few(corrected, sizes, density))
            errors[rank] = corrected - sent[rank]
            torch.testing.assert_close(runs[rank][step][1], errors[rank], rtol=1e-12, atol=1e-12)
        for run in runs:
            assert_same(run[step][0], runs[0][step][0])
        expected = torch.stack(sent).mean(dim=0)
        torch.testing.assert_close(runs[0][step][0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_is_lost(workers: Pool, dtype: torch.dtype) -> None:
    """Without decay, what went in is what came out and what the errors hold."""
    sizes, steps, world = [5000, 9], 100, 2
    went_in, came_out, held = (torch.zeros(2, 5009, dtype=torch.float64) for _ in range(3))
    runs = workers.run(undecayed, world, sizes, dtype, steps)
    for rank, (total, error) in enumerate(runs):
        came_out[rank], held[rank] = total, error.double()
    for step in range(steps):
        went_in += torch.stack(vectors(5009, step, world, dtype)).double()
    tolerance = 1e-10 if dtype is torch.float64 else 1e-3
    total = came_out[0] + held.mean(dim=0)
    torch.testing.assert_close(total, went_in.mean(dim=0), rtol=0, atol=tolerance)
    assert_same(came_out[0], came_out[1])
    assert held.norm() < 0.6 * went_in.norm()  # else feedback would not feed back


def undecayed(
    rank: int, world: int, sizes: list[int], dtype: torch.dtype, steps: int
) -> tuple[Tensor, Tensor]:
    mean, total = new_mean(sizes, 0.05, 1.0, dtype), torch.zeros(sum(sizes), dtype=torch.float64)
    for step in range(steps):
        vector = vectors(sum(sizes), step, world, dtype)[rank]
        mean.mean_(vector)
        total += vector
    return total, mean.error


@replicas(2)
def test_pieces_change_nothing(rank: int, world: int) -> None:
    arguments = (rank, world, [5 * 4096 + 3, 8192], 0.1, torch.float64, 3)
    whole = history(*arguments)
    with patch.object(sparse_mean, "_PIECE", 8192):
        assert_same(history(*arguments), whole)


def test_what_is_no_number_shows() -> None:
    mean = new_mean([100], 0.02, 0.9, torch.float32)
    vector = torch.zeros(100)
    vector[40] = torch.nan
    mean.mean_(vector)
    assert not vector[40].isfinite()


def on_the_wire(rank: int, world: int, sizes: list[int], density: float) -> tuple[int, float]:
    """Bytes handed to others by one mean, and its counter."""
    sent, gather = 0, dist.all_gather_into_tensor

    def counted(output: Tensor, given: Tensor, **kwargs: object) -> object:
        nonlocal sent
        sent += given.nbytes * (world - 1)
        return gather(output, given, **kwargs)

    mesh = co2.Mesh.world()
    mean = BackgroundMean(sum(sizes), mesh)
    packed = SparseMean(sizes, mesh, mean, density, 0.95)
    with patch.object(dist, "all_gather_into_tensor", counted):
        packed.start(mean.buffer.normal_())
        mean.wait()
    totals = mean.totals()
    assert totals.comm_s > 0 and totals.exposed_s > 0
    mean.close()
    return sent, totals.bytes_sent


@pytest.mark.parametrize("density", grid([0.01, 0.02, 0.03], (0.02).__eq__))
@pytest.mark.parametrize("sizes", [[1_000_000], [64 * 192, 192, 64 * 64, 64] * 20], ids=["1", "80"])
@pytest.mark.parametrize("world", [2, 3])
def test_bytes_are_14_bits_a_value_and_32_a_chunk(
    workers: Pool, world: int, sizes: list[int], density: float
) -> None:
    """But for what rounding to whole bytes adds, which shows in small tensors."""
    bits = 0
    for size in sizes:
        for begin in range(0, size, 4096):
            bits += 14 * max(1, round(density * min(4096, size - begin))) + 32
    for sent, counted in workers.run(on_the_wire, world, sizes, density):
        assert sent == counted
        assert (world - 1) * bits / 8 <= counted <= 1.05 * (world - 1) * bits / 8


ROUNDS = 6
CLOSED: dict[float, list[list[float]]] = {
    # The errors of the second element: 1, 2, 3, 4, 5. At 4 there is a tie, and the first goes.
    1.0: [[-4, 0], [-8, 0], [-12, 0], [-16, 0], [-16, -5], [-24, -5]],
    # 1, 1.5, 1.75, …: it never comes to 4.
    0.5: [[-4, 0], [-8, 0], [-12, 0], [-16, 0], [-20, 0], [-24, 0]],
    0.0: [[-4, 0], [-8, 0], [-12, 0], [-16, 0], [-20, 0], [-24, 0]],
}
"""β → the two elements of a weight after each round, of which one is sent. They move by 4 and 1."""


def one_weight() -> tuple[nn.Module, SGD]:
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    return nn.ParameterList([weight]), SGD([weight], lr=1.0)


def pull(model: nn.Module, step: int = 0) -> None:
    for weight in model.parameters():
        weight.grad = torch.tensor([2.0, 0.5], dtype=weight.dtype)


def settings_of(decay: float) -> dict[str, Any]:
    return {"tau": 2, "density": 0.5, "outer_lr": 1.0, "error_decay": decay}


@pytest.mark.parametrize("decay", CLOSED)
def test_an_element_moves_once_its_error_has_grown(decay: float) -> None:
    model, optimizer = one_weight()
    method = co2.SparseLoCo(co2.SparseLoCo.Config(**settings_of(decay)))
    method.prepare(model, optimizer, co2.Mesh.world())
    for expected in CLOSED[decay]:
        for _ in range(2):
            pull(model)
            method.step()
        assert next(model.parameters()).tolist() == expected


@pytest.mark.parametrize("decay", CLOSED)
def test_it_does_so_in_the_reference(decay: float) -> None:
    replica = Replica(*one_weight(), pull, lambda optimizer, step: None)
    rounds = REFERENCES["sparseloco"]([replica], **settings_of(decay))
    for expected in CLOSED[decay]:
        next(rounds)
        assert replica.weights().tolist() == expected


def dense(rank: int, world: int, name: str, settings: dict[str, Any]) -> list[Tensor]:
    """The weights after each round, whose displacements have two magnitudes, 1 and 4."""
    weight = nn.Parameter(torch.zeros(50))
    method = co2.METHODS[name](co2.METHODS[name].Config(tau=2, **settings))
    method.prepare(nn.ParameterList([weight]), SGD([weight], lr=1.0), co2.Mesh.world())
    generator, found = torch.Generator().manual_seed(rank), []
    sizes = 4.0 ** (torch.arange(50) % 2)
    for _ in range(ROUNDS):
        signs = torch.randint(2, (50,), generator=generator) - 0.5
        for _ in range(2):
            weight.grad = signs * sizes
            method.step()
        found.append(weight.detach().clone())
    method.flush()
    return found


def test_when_all_is_sent_it_is_local_sgd(workers: Pool) -> None:
    settings = {"density": 1.0, "outer_lr": 1.0, "error_decay": 0.0}
    found = workers.run(dense, 2, "sparseloco", settings)
    assert_same(found, workers.run(dense, 2, "local_sgd", {}))
    assert len(found[0][-1].unique()) > 4


def starts(rank: int, world: int) -> list[list[Tensor]]:
    """The anchor, and what is trained, after each round."""
    session = Session(rank, "sparseloco", SETTINGS["sparseloco"], dtype=torch.float32)
    found = []
    for _ in range(ROUNDS):
        for _ in range(3):
            session.step()
        method: Any = session.method
        found.append([method.anchor.clone(), *(param.clone() for param in method.flat.params)])
    session.method.flush()
    return found


def test_replicas_are_bit_for_bit_alike_after_a_round(workers: Pool) -> None:
    first, *others = workers.run(starts, 4)
    for other in others:
        assert_same(other, first)
    assert not torch.equal(first[0][0], first[-1][0])
