"""bf16 on the wire: what travels is rounded, the outer state is not."""

import pytest
import torch
from torch import Tensor

import co2
from co2.comm.background_mean import BackgroundMean
from co2.config import CommConfig, Precision
from tests.grids import OF_A_KIND, grid
from tests.methods import problem
from tests.methods.driver import ADAM, FP32_ONLY, NEEDS_SGD, SETTINGS, Snapshot, inner, trajectory
from tests.workers import Pool

BF16 = CommConfig(dtype=Precision.bf16)
STEPS = 15


def mean_of(rank: int, world: int) -> tuple[Tensor, Tensor]:
    vector = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    mean = BackgroundMean(1000, co2.Mesh.world(), BF16)
    mean.start(vector)
    found = mean.wait()
    assert found is not None
    mean.close()
    return vector, found.clone()


def test_the_mean_of_two_is_rounded_twice(workers: Pool) -> None:
    """Each vector once, their sum once; halving is exact."""
    (a, mean), (b, same) = workers.run(mean_of, 2)
    assert mean.dtype == torch.bfloat16 and torch.equal(mean, same)
    exact = (a.bfloat16().float() + b.bfloat16().float()).bfloat16().float() / 2
    assert torch.equal(mean.float(), exact)


def ends(workers: Pool, world: int, name: str, comm: CommConfig | None) -> list[Snapshot]:
    arguments = (name, SETTINGS[name], inner(name), torch.float32, STEPS, comm)
    return [history[-1] for history in workers.run(trajectory, world, *arguments)]


def moved(one: Snapshot, other: Snapshot) -> float:
    """Distance between two states of the trained weights."""
    names = ("enter.weight", "middle.weight", "leave.weight", "leave.bias")
    return sum((one[name] - other[name]).square().sum().item() for name in names) ** 0.5


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    "name",
    grid(
        [one for one in SETTINGS if one not in (*ADAM, *FP32_ONLY, *NEEDS_SGD)],
        OF_A_KIND.__contains__,
    ),
)
def test_the_trajectory_stays_close(workers: Pool, name: str, world: int) -> None:
    """Every displacement is off by at most 2^-8 of itself for each of the G roundings, and what it
    moves passes that on: together less than 3 % of the way made."""
    start = problem.snapshot(problem.build(0, inner(name), torch.float32)[0])
    for plain, rounded in zip(
        ends(workers, world, name, None), ends(workers, world, name, BF16), strict=True
    ):
        way = moved(plain, start)
        assert moved(plain, rounded) < 0.03 * way
        same = world == 1 and name == "allreduce"  # alone, DDP sends nothing
        assert (moved(plain, rounded) == 0) == same


@pytest.mark.parametrize("name", ["local_sgd", "slowmo", "diloco"])
def test_replicas_stay_equal(workers: Pool, name: str) -> None:
    first, *others = ends(workers, 3, name, BF16)
    for other in others:
        assert moved(first, other) == 0


def drifted(rank: int, world: int, rounds: int) -> Tensor:
    """Weights after many rounds of CoCoD-SGD on gradients that do not depend on the weights."""
    model, optimizer = problem.build_drift([50, 7])
    method = co2.METHODS["cocod_sgd"](co2.METHODS["cocod_sgd"].Config(tau=1), BF16)
    method.prepare(model, optimizer, co2.Mesh.world())
    for step in range(rounds):
        problem.backward_drift(model, step, rank)
        method.step()
    method.flush()
    return torch.cat([weight.detach().clone() for weight in model.parameters()])


def test_kept_progress_does_not_drift_apart(workers: Pool) -> None:
    """Were the exact progress subtracted and its rounding sent, the errors would add up: over
    1,000 rounds to many times what two replicas may differ by after one."""
    spread = {}
    for rounds in (20, 1000):
        a, b = workers.run(drifted, 2, rounds)
        spread[rounds] = (a - b).norm().item()
    assert spread[1000] < 3 * spread[20]


def steady(rank: int, world: int, name: str, rounds: int) -> Tensor:
    """Weights after many rounds in which every replica moves as in the last, by numbers that bf16
    cannot hold."""
    model, optimizer = problem.build_drift([3])
    (weight,) = model.parameters()
    method = co2.METHODS[name](co2.METHODS[name].Config(tau=1), BF16)
    method.prepare(model, optimizer, co2.Mesh.world())
    for _ in range(rounds):
        weight.grad = torch.full_like(weight, 1 / 3 + rank / 7)
        method.step()
    method.flush()
    return weight.detach().clone()


@pytest.mark.parametrize(
    "name", grid(("cocod_sgd", "eager_diloco", "co2_keep"), ("co2_keep",).__contains__)
)
def test_own_part_is_taken_back_as_it_was_added(workers: Pool, name: str) -> None:
    """A rounding that stayed would add up: replicas that move steadily would part steadily."""
    apart = []
    for rounds in (200, 1000):
        a, b = workers.run(steady, 2, name, rounds)
        apart.append(a - b)
    assert apart[0].abs().min() > 0.05
    torch.testing.assert_close(apart[1], apart[0], rtol=1e-6, atol=0)
