"""What a method computes does not depend on when its collectives run, and ranks agree on them."""

from collections.abc import Callable

import pytest

from tests.grids import OF_A_KIND, grid
from tests.methods.collectives import Recorder, SlowNetwork
from tests.methods.driver import (
    DENSE,
    MOMENTS,
    OVERLAPPED,
    SETTINGS,
    SPARSE,
    Session,
    Snapshot,
    assert_same,
    trajectory,
)
from tests.workers import Pool, replicas

TAU = 3
ROUNDS = 5
STEPS = ROUNDS * TAU
LATE = TAU
"""The delay, in local steps, at which a collective runs only because somebody waits for it."""


def delayed(rank: int, world: int, name: str) -> None:
    """Compares trajectories on slow networks with the one on the real network.

    A round of Streaming DiLoCo has one collective per fragment, under way for `delay` steps only. A
    step of ACCO has one, under way until the next.
    """
    late = 1 if name == "acco" else SETTINGS[name].get("delay", LATE)
    number = STEPS if name == "acco" else ROUNDS * SETTINGS[name].get("fragments", 1)
    left = int(name == "acco" or number == ROUNDS)  # of fragments none starts at the last step
    expected = trajectory(rank, world, name, SETTINGS[name])
    for delay in range(late + 1):
        history, forced = _on_slow_network(rank, name, lambda n, delay=delay: delay)
        assert_same(history, expected)
        assert len(forced) == number
        if delay == late:
            assert forced == [True] * (number - left) + [False] * left, "waited for when it is due"
        else:
            assert not any(forced), "nobody waits before it is due"
    # SlowNetwork runs a collective on the spot: two at once in different order would hang there.
    apart = 0 if "fragments" in SETTINGS[name] else 2
    uneven, _ = _on_slow_network(rank, name, lambda n: (n + apart * rank) % (late + 1))
    assert_same(uneven, expected)


def _on_slow_network(
    rank: int, name: str, delay: Callable[[int], int]
) -> tuple[list[Snapshot], list[bool]]:
    """A trajectory, and of each collective whether it was waited for before its time."""
    session = Session(rank, name, SETTINGS[name])
    history = [session.snapshot()]
    with SlowNetwork(delay) as network:
        for _ in range(STEPS):
            session.step()
            network.tick()
            history.append(session.snapshot())
        forced = [work.forced for work in network.works]
        session.method.flush()
    return history, forced


@pytest.mark.parametrize(
    ("name", "world"),
    grid(
        [*((name, 2) for name in OVERLAPPED), ("co2", 3)],
        lambda case: case == ("co2", 3) or (case[0] in OF_A_KIND and case[0] != "co2"),
    ),
)
def test_the_network_may_take_a_whole_round(workers: Pool, name: str, world: int) -> None:
    workers.run(delayed, world, name)


@replicas(2)
@pytest.mark.parametrize("name", ["co2", "co2_keep"])
def test_means_of_moments_may_take_a_whole_round(rank: int, world: int, name: str) -> None:
    """The same for the means of moments, which have a collective of their own."""
    expected = trajectory(rank, world, name, MOMENTS[name], "adamw")
    for delay in range(TAU + 1):
        session = Session(rank, name, MOMENTS[name], "adamw")
        history = [session.snapshot()]
        with SlowNetwork(lambda n, delay=delay: delay) as network:
            for _ in range(STEPS):
                session.step()
                network.tick()
                history.append(session.snapshot())
            assert len(network.works) == 2 * ROUNDS
            assert any(work.forced for work in network.works) == (delay == TAU)
            session.method.flush()
        assert_same(history, expected)


def recorded(rank: int, world: int, name: str) -> list[tuple[int, str, int, str, bool]]:
    with Recorder() as recorder:
        session = Session(rank, name, SETTINGS[name])
        for _ in range(STEPS):
            recorder.step += 1
            session.step()
            if recorder.step % 5 == 0:
                with session.method.consensus():
                    pass
        session.method.flush()
        session.method.state_dict()
    return recorder.log


@pytest.mark.parametrize("name", grid(SETTINGS, OF_A_KIND.__contains__))
def test_ranks_issue_the_same_collectives(workers: Pool, name: str) -> None:
    first, *others = workers.run(recorded, 3, name)
    for other in others:
        assert other == first


@pytest.mark.parametrize("name", ["allreduce", *DENSE])
def test_a_round_has_one_collective(workers: Pool, name: str) -> None:
    [first, _] = workers.run(recorded, 2, name)
    means = ("all_reduce", "allreduce_")  # as our code launches it, and as DDP does
    launched = [step for step, call, *_, background in first if call in means and background]
    due = {
        "allreduce": list(range(1, STEPS + 1)),
        "streaming_diloco": [1, 2, 4, 5, 7, 8, 10, 11, 13, 14],
    }
    if name == "allreduce":
        launched = sorted(set(launched))  # a step has a collective for each of DDP's buckets
    assert launched == due.get(name, [TAU * (t + 1) for t in range(ROUNDS)])
    blocking = {step for step, *_, background in first if step and not background}
    assert blocking == {5, 10, 15}, "between rounds nothing is sent but for a consensus"


@pytest.mark.parametrize("name", SPARSE)
def test_a_round_has_one_gathering(workers: Pool, name: str) -> None:
    [first, _] = workers.run(recorded, 2, name)
    packed = ("all_gather_into_tensor", "torch.uint8")
    gathered = [step for step, call, _, dtype, _ in first if (call, dtype) == packed]
    assert gathered == [TAU * (t + 1) for t in range(ROUNDS)]
    others = {step for step, call, _, dtype, _ in first if step and (call, dtype) != packed}
    assert others == {5, 10, 15}, "of consensuses"
