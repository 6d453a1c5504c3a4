"""SPARTA: which weights are drawn, what an exchange makes of them, and when it arrives."""

from itertools import accumulate

import pytest
import torch
from torch import Tensor

import co2
from tests.methods import problem
from tests.methods.driver import Session, assert_same, trajectory
from tests.methods.test_identities import TAU, assert_alike, drifted, weights_only
from tests.workers import Pool

SIZES = (1000, 0, 3, 77)


def drawn(share: float, steps: int) -> list[Tensor]:
    """The places that each step draws, in the vector of all weights."""
    params = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
    method = co2.SPARTA(co2.SPARTA.Config(share=share))
    optimizer = torch.optim.SGD(params, lr=1.0)
    method.prepare(torch.nn.ParameterList(params), optimizer, co2.Mesh.world())
    begins = accumulate(SIZES[:-1], initial=0)
    starts = {id(part): begin for part, begin in zip(method.flat.params, begins, strict=True)}
    found = []
    for _ in range(steps):
        for param in params:
            param.grad = torch.zeros_like(param)
        method.step()
        own = [starts[id(part)] + method.places[span] for part, span in method.spans]
        found.append(torch.cat(own))
    return found


@pytest.mark.parametrize(("share", "count"), [(0.005, 6), (0.3, 324), (1.0, 1080)])
def test_one_of_each_run_is_drawn(share: float, count: int) -> None:
    ends = [(run + 1) * 1080 // count for run in range(count)]
    for places in drawn(share, 5):
        assert len(places) == count
        begin = 0
        for place, end in zip(places.tolist(), ends, strict=True):
            assert begin <= place < end
            begin = end


def test_all_are_drawn_alike() -> None:
    """216 of 1,080 in each of 500 steps: each 100 times, ± 5 √(500 · 0.2 · 0.8)."""
    steps = drawn(0.2, 500)
    counts = torch.bincount(torch.cat(steps), minlength=1080)
    assert len(counts) == 1080 and (counts - 100).abs().max() < 45
    assert not torch.equal(steps[0], steps[1])


def test_steps_forget_each_other() -> None:
    """After t steps (1 − 1/5)^t of the weights were never drawn: of 1,080, ± 5 deviations."""
    untouched = torch.ones(1080, dtype=torch.bool)
    for step, places in enumerate(drawn(0.2, 12), start=1):
        untouched[places] = False
        chance = 0.8**step
        spread = 5 * (1080 * chance * (1 - chance)) ** 0.5
        assert abs(untouched.sum().item() - 1080 * chance) < spread


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_of_all_weights_it_is_local_sgd_of_one_step(workers: Pool, optimizer: str) -> None:
    shared = workers.run(trajectory, 3, "sparta", {"share": 1.0}, optimizer)
    local = workers.run(trajectory, 3, "local_sgd", {"tau": 1}, optimizer)
    assert_alike(shared, local)
    for run in shared:  # bit for bit alike
        assert_same(weights_only(run), weights_only(shared[0]))


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_the_mean_of_the_weights_stays(workers: Pool, delay: int) -> None:
    """It is that of local SGD, under gradients that do not depend on the weights."""
    shared = workers.run(drifted, 3, "sparta", {"share": 0.3, "delay": delay})
    local = workers.run(drifted, 1, "local_sgd", {"tau": TAU})
    together = workers.run(drifted, 3, "local_sgd", {"tau": TAU})[0]
    assert not torch.equal(local[0][-1], together[-1])
    for ends, mean in zip(zip(*shared, strict=True), together, strict=True):
        torch.testing.assert_close(sum(ends) / 3, mean, rtol=1e-12, atol=1e-12)
        assert not torch.equal(ends[0], ends[1])


def test_alone_it_is_plain_training() -> None:
    session = Session(0, "sparta", {"share": 0.5, "delay": 2})
    net, optimizer = problem.build(0, "sgd")
    for step in range(12):
        session.step()
        problem.set_lr(optimizer, step)
        problem.backward(net, step, 0)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(session.snapshot(), problem.snapshot(net))


def standing(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Weights after ten exchanges at rate 0, and which of them none has drawn."""
    weight = torch.nn.Parameter(torch.zeros(100))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    method = co2.SPARTA(co2.SPARTA.Config(share=0.1))
    method.prepare(torch.nn.ParameterList([weight]), optimizer, co2.Mesh.world())
    weight.grad = torch.zeros_like(weight)
    method.step()
    with torch.no_grad():
        weight.copy_(torch.arange(100) * (rank + 1))
    untouched = torch.ones(100, dtype=torch.bool)
    for _ in range(10):
        weight.grad = torch.zeros_like(weight)
        method.step()
        untouched[method.places] = False
    method.flush()
    return weight.detach(), untouched


def test_what_was_drawn_is_the_mean_and_the_rest_as_it_was(workers: Pool) -> None:
    places = torch.arange(100.0)
    for rank, (weights, untouched) in enumerate(workers.run(standing, 2)):
        assert 0 < untouched.sum() < 90
        assert torch.equal(weights, torch.where(untouched, places * (rank + 1), places * 1.5))


def moving(rank: int, world: int, delay: int) -> list[float]:
    """One weight, which each step moves by −1 on replica 0 and by −3 on replica 1."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    method = co2.SPARTA(co2.SPARTA.Config(delay=delay))
    method.prepare(torch.nn.ParameterList([weight]), optimizer, co2.Mesh.world())
    history = []
    for _ in range(6):
        weight.grad = torch.full((1,), 1.0 + 2 * rank)
        method.step()
        history.append(weight.item())
    method.flush()
    return history


@pytest.mark.parametrize(
    ("delay", "expected"),
    [
        (0, ([-2, -4, -6, -8, -10, -12], [-2, -4, -6, -8, -10, -12])),
        # At -2 and -6 comes the mean of -1 and -3, which takes 1 away and adds 1.
        (1, ([-1, -3, -5, -7, -9, -11], [-3, -5, -7, -9, -11, -13])),
        # At -4 and -12 comes the mean of -2 and -6; at -8 and -16 that of -6 and -10.
        (2, ([-1, -2, -3, -6, -7, -10], [-3, -6, -9, -10, -13, -14])),
    ],
)
def test_a_mean_comes_when_it_should(
    workers: Pool, delay: int, expected: tuple[list[float], ...]
) -> None:
    assert workers.run(moving, 2, delay) == list(expected)
