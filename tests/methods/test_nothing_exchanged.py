"""Were synchronization replaced by nothing, the comparison with the reference would fail.

So that comparison sees whether replicas are synchronized, for every method.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from co2.methods import METHODS
from tests.grids import OF_A_KIND, grid
from tests.methods.collectives import nothing_exchanged
from tests.methods.driver import ROUNDS_OF, SETTINGS, Session, Snapshot, inner
from tests.methods.test_equals_reference import SHARDED, STEPS, assert_follows
from tests.workers import Pool


def test_every_method_has_settings() -> None:
    assert SETTINGS.keys() == METHODS.keys()


def unsynchronized(
    rank: int, world: int, name: str, settings: dict[str, Any]
) -> list[list[Snapshot]]:
    """The replica after 0, 1, … steps: first without any exchange, then as the method does it."""
    histories = []
    for way in (nothing_exchanged, nullcontext):
        session = Session(rank, name, settings, inner(name))
        history = [session.snapshot()]  # equal weights, which `prepare` has brought
        with way(session.model):
            for _ in range(STEPS):
                session.step()
                history.append(session.snapshot())
            session.method.flush()
        histories.append(history)
    return histories


CASES = [*SETTINGS.items(), SHARDED[0]]


@pytest.mark.parametrize("case", grid(CASES, lambda case: case[0] in OF_A_KIND, one=True), ids=str)
def test_the_reference_tells_a_method_from_no_exchange(
    workers: Pool, case: tuple[str, dict[str, Any]]
) -> None:
    dropped, exchanged = zip(*workers.run(unsynchronized, 2, *case), strict=True)
    arguments = (case, inner(case[0]), torch.float64, 1e-12)
    assert_follows(list(exchanged), *arguments)
    with pytest.raises(AssertionError, match=r"^after round [1-9]"):
        assert_follows(list(dropped), *arguments)


def first_that_tells(rank: int, world: int, name: str, settings: dict[str, Any]) -> tuple[int, int]:
    """The first step after which a replica is another than without any exchange, and the one that
    the method names."""
    dropped, exchanged = unsynchronized(rank, world, name, settings)
    pairs = enumerate(zip(dropped, exchanged, strict=True))
    differs = (
        step for step, (one, other) in pairs if any(not torch.equal(one[k], other[k]) for k in one)
    )
    return next(differs), min(Session(rank, name, settings).method.first_means().values())


LATE = {"co2_keep": {"tau": 3, "delay": 1}, "streaming_diloco": {"tau": 6, "delay": 4}}
SHARES = [("sparta", {"share": 0.4, "delay": delay}) for delay in (0, 1, 3)]
ROUNDS = [*((name, SETTINGS[name]) for name in ROUNDS_OF), *LATE.items(), *SHARES]


@pytest.mark.parametrize("case", ROUNDS, ids=str)
def test_the_first_mean_arrives_when_the_method_says(
    workers: Pool, case: tuple[str, dict[str, Any]]
) -> None:
    for found, told in workers.run(first_that_tells, 2, *case):
        assert found == told
