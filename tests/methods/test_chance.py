"""What chance draws: NoLoCo's pairs of replicas, and SPARTA's weights. Who and what is drawn, what
travels, what an exchange makes of it, and how large NoLoCo's γ may be."""

from collections import Counter
from itertools import accumulate, pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import co2
from co2.comm.pair_mean import partner_of
from co2.errors import ConfigError
from tests.grids import grid
from tests.methods.driver import SETTINGS, Session, assert_same, trajectory
from tests.methods.test_identities import TAU, drifted, weights_only
from tests.workers import everybody, replicas

# NoLoCo.

STEPS = 12


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7])
def test_all_are_paired_but_one_of_an_odd_number(count: int) -> None:
    for seed in range(50):
        partners = [partner_of(replica, count, seed) for replica in range(count)]
        assert partners.count(None) == count % 2
        for replica, partner in enumerate(partners):
            assert partner is None or (partners[partner] == replica and partner != replica)


def test_every_pair_is_equally_likely() -> None:
    """Of six replicas 1,000 times each, and each alone of five 1,000 times: ± 4 √1000."""
    met = Counter(partner_of(0, 6, seed) for seed in range(5000))
    alone = Counter(r for seed in range(5000) for r in range(5) if partner_of(r, 5, seed) is None)
    assert met.keys() == {1, 2, 3, 4, 5} and alone.keys() == {0, 1, 2, 3, 4}
    assert all(abs(number - 1000) < 127 for number in (*met.values(), *alone.values()))


@replicas()
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_round_has_one_message_to_the_partner(rank: int, world: int) -> None:
    sent, real = [], dist.batch_isend_irecv
    session = Session(rank, "noloco", SETTINGS["noloco"])

    def counting(calls: list[dist.P2POp]) -> Any:
        away, back = calls
        assert (away.op, back.op) == (dist.isend, dist.irecv)
        assert away.group_peer == back.group_peer == partner_of(rank, world, session.steps_done + 1)
        sent.append((session.steps_done + 1, away.tensor.nbytes))
        return real(calls)

    with patch.object(dist, "batch_isend_irecv", counting):
        session.train(STEPS).method.flush()
    own = [p for group in session.optimizer.param_groups for p in group["params"]]
    size = 8 * sum(p.numel() for p in own if p.requires_grad)
    rounds = range(TAU, STEPS + 1, TAU)
    due = [step for step in rounds if partner_of(rank, world, step) is not None]
    assert sent == [(step, size) for step in due]
    assert session.method.stats().bytes_sent == size * len(due)


HEAVY_BALL = {"tau": TAU, "outer_lr": 0.8, "outer_momentum": 0.6}


@replicas()
@pytest.mark.parametrize(
    ("world", "pull"), grid([(1, 0.9), (2, 0.9), (3, 0.9), (4, 0.3)], lambda case: case[0] < 4)
)
def test_the_mean_is_heavy_ball_diloco(rank: int, world: int, pull: float) -> None:
    """Which SlowMo is at a constant inner rate. On up to two replicas γ finds no difference to pull
    at, and each is the mean."""
    pairs = everybody(drifted(rank, world, "noloco", {**HEAVY_BALL, "pull": pull}))
    together = drifted(rank, world, "slowmo", HEAVY_BALL)
    for starts, mean in zip(zip(*pairs, strict=True), together, strict=True):
        torch.testing.assert_close(sum(starts) / world, mean, rtol=1e-12, atol=1e-12)
        assert all(torch.equal(start, starts[0]) for start in starts) == (world < 3)


def matchings(of: list[int]) -> list[list[tuple[int, int]]]:
    if not of:
        return [[]]
    first, *rest = of
    found = []
    for other in rest:
        left = [one for one in rest if one != other]
        found += [[(first, other), *more] for more in matchings(left)]
    return found


def growth(count: int, momentum: float, pull: float) -> float:
    """Factor by which a round changes the mean square of the differences, in the long run: the
    spectral radius of E[A ⊗ A], where A is a round without progress on (φ, m) less their means."""
    eye = torch.eye(count, dtype=torch.float64)
    less_mean = eye - 1 / count
    pairs = matchings(list(range(count)))
    squares = torch.zeros((2 * count) ** 2, (2 * count) ** 2, dtype=torch.float64)
    for matching in pairs:
        swap = torch.zeros_like(eye)
        for a, b in matching:
            swap[a, b] = swap[b, a] = 1
        towards = pull * ((eye + swap) / 2 - eye)
        top = torch.cat([eye + towards, momentum * eye], dim=1)
        bottom = torch.cat([towards, momentum * eye], dim=1)
        project = torch.block_diag(less_mean, less_mean)
        step = project @ torch.cat([top, bottom])
        squares += torch.kron(step, step) / len(pairs)
    return torch.linalg.eigvals(squares).abs().max().item()


@pytest.mark.parametrize("count", [2, 4, 6])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.8])
def test_the_bound_of_the_pull(count: int, momentum: float) -> None:
    bound = 2 * (1 - momentum**2) / (1 - momentum / (count - 1))
    shares = (0.1, 0.5, 0.99, 1.01)
    assert [growth(count, momentum, share * bound) < 1 for share in shares] == [True] * 3 + [False]
    co2.NoLoCo.Config(outer_momentum=momentum, pull=min(0.999 * bound, 1.999 * (1 - momentum**2)))


def test_the_bound_is_the_one_of_many_replicas() -> None:
    bounds = [2 * (1 - 0.25) / (1 - 0.5 / (count - 1)) for count in (2, 4, 8, 1000)]
    assert all(more > fewer > 1.5 for more, fewer in pairwise(bounds))
    with pytest.raises(ConfigError, match=r"^pull=1.5: must be .* which is 1.5$"):
        co2.NoLoCo.Config(outer_momentum=0.5, pull=1.5)


# SPARTA.

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


@replicas(3)
def test_of_all_weights_replicas_are_alike_bit_for_bit(rank: int, world: int) -> None:
    history = weights_only(trajectory(rank, world, "sparta", {"share": 1.0}))
    assert_same(everybody(history), [history] * 3)


@replicas(3)
@pytest.mark.parametrize("delay", [0, 1, 2])
def test_the_mean_of_the_weights_stays(rank: int, world: int, delay: int) -> None:
    """It is that of local SGD, under gradients that do not depend on the weights."""
    shared = everybody(drifted(rank, world, "sparta", {"share": 0.3, "delay": delay}))
    together = drifted(rank, world, "local_sgd", {"tau": TAU})
    for ends, mean in zip(zip(*shared, strict=True), together, strict=True):
        torch.testing.assert_close(sum(ends) / 3, mean, rtol=1e-12, atol=1e-12)
        assert not torch.equal(ends[0], ends[1])


@replicas(2)
def test_what_was_drawn_is_the_mean_and_the_rest_as_it_was(rank: int) -> None:
    """After ten exchanges at rate 0."""
    weight = torch.nn.Parameter(torch.zeros(100))
    method = co2.SPARTA(co2.SPARTA.Config(share=0.1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    method.prepare(torch.nn.ParameterList([weight]), optimizer, co2.Mesh.world())
    weight.grad = torch.zeros_like(weight)
    method.step()
    places = torch.arange(100.0)
    with torch.no_grad():
        weight.copy_(places * (rank + 1))
    untouched = torch.ones(100, dtype=torch.bool)
    for _ in range(10):
        weight.grad = torch.zeros_like(weight)
        method.step()
        untouched[method.places] = False
    method.flush()
    assert 0 < untouched.sum() < 90
    assert_same(weight.detach(), torch.where(untouched, places * (rank + 1), places * 1.5))


@replicas(2)
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
    rank: int, delay: int, expected: tuple[list[float], ...]
) -> None:
    """Of one weight, which each step moves by −1 on replica 0 and by −3 on replica 1."""
    weight = torch.nn.Parameter(torch.zeros(1))
    method = co2.SPARTA(co2.SPARTA.Config(delay=delay))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    method.prepare(torch.nn.ParameterList([weight]), optimizer, co2.Mesh.world())
    history = []
    for _ in range(6):
        weight.grad = torch.full((1,), 1.0 + 2 * rank)
        method.step()
        history.append(weight.item())
    method.flush()
    assert history == expected[rank]
