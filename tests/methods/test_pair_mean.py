"""Random pairs of replicas, and NoLoCo: who is paired, what travels, and how large γ may be."""

from collections import Counter
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import co2
from co2.comm.pair_mean import partner_of
from co2.errors import ConfigError
from tests.grids import grid
from tests.methods import problem
from tests.methods.driver import SETTINGS, Session
from tests.methods.test_identities import TAU, drifted
from tests.workers import Pool

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


def messages(rank: int, world: int) -> tuple[list[tuple[int, int]], float]:
    """(Step, bytes) of each message that this replica sent, and its own count of bytes."""
    sent, real = [], dist.batch_isend_irecv
    session = Session(rank, "noloco", SETTINGS["noloco"])

    def counting(calls: list[dist.P2POp]) -> Any:
        away, back = calls
        assert (away.op, back.op) == (dist.isend, dist.irecv)
        assert away.group_peer == back.group_peer == partner_of(rank, world, session.steps_done + 1)
        sent.append((session.steps_done + 1, away.tensor.nbytes))
        return real(calls)

    with patch.object(dist, "batch_isend_irecv", counting):
        for _ in range(STEPS):
            session.step()
        session.method.flush()
    return sent, session.method.stats().bytes_sent


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_round_has_one_message_to_the_partner(workers: Pool, world: int) -> None:
    _, optimizer = problem.build(0, "sgd")
    own = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    size = 8 * sum(p.numel() for p in own)
    for rank, (sent, counted) in enumerate(workers.run(messages, world)):
        rounds = range(TAU, STEPS + 1, TAU)
        due = [step for step in rounds if partner_of(rank, world, step) is not None]
        assert sent == [(step, size) for step in due]
        assert counted == size * len(due)


HEAVY_BALL = {"tau": TAU, "outer_lr": 0.8, "outer_momentum": 0.6}


@pytest.mark.parametrize("world", [1, 2])
def test_up_to_two_replicas_are_heavy_ball_diloco(workers: Pool, world: int) -> None:
    """Which SlowMo is at a constant inner rate. γ finds no difference to pull at."""
    pairs = workers.run(drifted, world, "noloco", {**HEAVY_BALL, "pull": 0.9})
    for run, other in zip(pairs, workers.run(drifted, world, "slowmo", HEAVY_BALL), strict=True):
        torch.testing.assert_close(run, other, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(a, b) for run in pairs for a, b in zip(run, pairs[0], strict=True))


@pytest.mark.parametrize(("world", "pull"), grid([(3, 0.9), (4, 0.3)], lambda case: case[0] == 3))
def test_the_mean_is_heavy_ball_diloco_on_any_number(
    workers: Pool, world: int, pull: float
) -> None:
    pairs = workers.run(drifted, world, "noloco", {**HEAVY_BALL, "pull": pull})
    together = workers.run(drifted, world, "slowmo", HEAVY_BALL)[0]
    for starts, mean in zip(zip(*pairs, strict=True), together, strict=True):
        torch.testing.assert_close(sum(starts) / world, mean, rtol=1e-12, atol=1e-12)
        assert any(not torch.equal(start, starts[0]) for start in starts)


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
