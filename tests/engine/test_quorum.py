"""Who makes how many steps of a round, from how long each replica needs for one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast
from unittest.mock import patch

import pytest
import torch

from co2.config import OptimConfig, Optimizer, TrainConfig
from co2.elastic.members import Members
from co2.elastic.quorum import Quorum, steps_of
from tasks.shared.optimizer import make_optimizer
from tests.cli.harness import metrics, pooled
from tests.workers import Pool

TAU = 6


@pytest.mark.parametrize(
    ("paces", "quorum", "expected"),
    [
        ((2.0, 1.0, 1.0), 2, [3, 6, 6]),
        ((1.0, 1.0, 1.2), 2, [6, 6, 6]),  # within the tolerance
        ((1.0, 1.0, 1.25), 2, [6, 6, 4]),
        ((1.0, 1.0, 100.0), 2, [6, 6, 1]),  # never none
        ((1.0, 2.0, 4.0), 2, [6, 6, 3]),  # the second sets the pace, and the first waits for it
        ((1.0, 2.0, 4.0), 1, [6, 3, 1]),
        ((1.0, 2.0, 4.0), 3, [6, 6, 6]),
        ((1.0, 2.0), 3, [6, 6]),  # fewer are left than the quorum
    ],
)
def test_how_many_steps_a_replica_makes(
    paces: tuple[float, ...], quorum: int, expected: list[int]
) -> None:
    assert steps_of(paces, quorum, TAU) == expected


class Agreed:
    """What a `Quorum` needs of `Members`."""

    def __init__(self, me: int, ids: tuple[int, ...]) -> None:
        self.me, self.ids = me, ids
        self.joined: tuple[int, ...] = ()
        self.paces: tuple[float, ...] = ()
        self.steps: Mapping[int, int] = {}
        self.told: list[float] = []

    def share_out(self, steps: Mapping[int, int]) -> None:
        self.steps = steps

    def measured(self, seconds: float) -> None:
        self.told.append(seconds)


def quorum(agreed: Agreed, size: int | None = 2, weighted: bool = True) -> Quorum:
    return Quorum(size, TAU, cast(Members, agreed), torch.device("cpu"), weighted)


def test_a_slow_replica_makes_the_first_steps_of_a_round() -> None:
    agreed = Agreed(5, (0, 3, 5))
    one = quorum(agreed)
    assert one.share_out(TAU - 1) is None and all(map(one.makes, range(TAU))), "nothing is known"
    agreed.paces = (1.0, 1.0, 2.0)
    assert one.share_out(TAU - 2) is None and agreed.steps == {}, "not amid a round"
    found = one.share_out(2 * TAU - 1)
    assert found is not None and found.steps == {0: 6, 3: 6, 5: 3} and found.step == 2 * TAU
    assert found.text() == "worker 5 makes 3 of 6 steps in a round"
    steps = range(2 * TAU, 3 * TAU)
    assert [one.makes(step) for step in steps] == [True] * 3 + [False] * 3
    assert [one.making(step, 3) for step in steps] == [3, 3, 3, 2, 2, 2]
    agreed.paces = (1.0, 1.0, 3.0)
    found = one.share_out(3 * TAU - 1)
    assert found is not None and found.steps[5] == 2 and found.text() == ""
    agreed.paces = (1.0, 1.0, 1.1)
    found = one.share_out(4 * TAU - 1)
    assert found is not None and found.text() == "worker 5 makes all steps again"
    assert agreed.steps == {}, "bit for bit as if nobody had been slow"
    assert one.share_out(5 * TAU - 1) is None, "nothing has changed"


@pytest.mark.parametrize("size", [None, 2])
def test_newcomers_make_no_step_in_the_round_in_which_they_come(size: int | None) -> None:
    agreed = Agreed(0, (0, 1))
    one = quorum(agreed, size)
    agreed.share_out({0: 6, 1: 2})
    agreed.ids, agreed.joined = (0, 1, 2), (2,)
    one.regroup()
    assert agreed.steps == {0: 6, 1: 2, 2: 0}
    assert [one.making(step, 3) for step in range(TAU)] == [2, 2, 1, 1, 1, 1]
    assert one.share_out(TAU - 2) is None and agreed.steps[2] == 0, "not amid a round"
    agreed.joined = ()
    one.regroup()
    assert agreed.steps[2] == 0, "another change of members in the same round"
    assert one.share_out(TAU - 1) is None and agreed.steps == {0: 6, 1: 2, 2: 6}


def test_newcomers_alone_share_the_mean() -> None:
    """Those who came before them are lost in the same round."""
    agreed = Agreed(2, (0, 2))
    one = quorum(agreed, None)
    agreed.joined = (2,)
    one.regroup()
    assert agreed.steps == {0: 6, 2: 0}
    agreed.ids, agreed.joined = (2,), ()
    one.regroup()
    assert agreed.steps == {}


def test_where_means_have_no_weights_newcomers_make_all_steps() -> None:
    agreed = Agreed(0, (0, 1))
    one = quorum(agreed, None, weighted=False)
    agreed.ids, agreed.joined = (0, 1, 2), (2,)
    one.regroup()
    assert agreed.steps == {} and one.making(0, 3) == 3


def test_a_resumed_run_goes_on_with_the_same_steps() -> None:
    before, after = Agreed(0, (0, 4)), Agreed(0, (0, 1, 2))
    before.share_out({0: 3, 4: 6})
    quorum(after).load_state_dict(quorum(before).state_dict())
    assert after.steps == {0: 3, 1: 6, 2: 3}, "one more goes on from the first's state"
    fixed = Quorum(None, TAU, None, torch.device("cpu"), weighted=True)
    quorum(after).load_state_dict(fixed.state_dict())
    assert after.steps == {0: 3, 1: 6, 2: 3}, "saved by a run that is not elastic: nothing to load"


def test_one_that_stalls_once_is_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of a round's steps is told, of those that the replica has made."""
    now = [0.0]
    monkeypatch.setattr("co2.comm.clocks.time.perf_counter", lambda: now[0])
    agreed = Agreed(0, (0, 1))
    one = quorum(agreed)
    for step in range(TAU):
        with one.timed():
            now[0] += 60.0 if step == 2 else 0.5
        one.report_pace(step)
    one.report_pace(2 * TAU - 1)
    assert agreed.told == [0.5], "a round without a step of its own tells nothing"


@pytest.mark.parametrize("name", Optimizer)
def test_without_gradients_an_optimizer_does_nothing(name: Optimizer) -> None:
    """So a step that is passed over moves neither weights nor moments, and nothing decays."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3))
    config = OptimConfig(name=name, lr=0.1, weight_decay=0.1)
    optimizer = make_optimizer(model, config, ends={"1.weight"})
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [value.detach().clone() for value in (*model.parameters(), *inner(optimizer))]
    assert len(before) > 4, "weights, and something that could decay"
    optimizer.step()
    for then, now in zip(before, (*model.parameters(), *inner(optimizer)), strict=True):
        assert torch.equal(then, now)


@contextmanager
def made_until(last: int) -> Iterator[None]:
    """Setup: the replica passes over all steps from this one on."""
    with patch.object(Quorum, "makes", lambda _, step: step < last):
        yield


def test_steps_that_are_passed_over_move_nothing(workers: Pool, tmp_path: Path) -> None:
    words = ("method=allreduce", "train.steps=8", "train.eval_every=1")
    run = pooled(workers, 1, *words, runs=tmp_path, setup=made_until, setup_arguments=(5,))
    losses = [line["loss"] for line in metrics(run.folder, "eval")]
    assert len(set(losses[:5])) == 5 and set(losses[5:]) == {losses[4]}


def inner(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = optimizer.state.values()
    return [value for one in states for value in one.values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize(
    ("whole", "workers", "expected"), [(48, 3, 2), (48, 2, 3), (32, 3, 1), (16, 8, 1), (None, 8, 5)]
)
def test_a_global_batch_is_kept_as_whole_micro_batches_allow(
    whole: int | None, workers: int, expected: int
) -> None:
    settings = TrainConfig(batch_size=8, accumulate=5, global_batch=whole)
    assert settings.micro_batches(workers) == expected
