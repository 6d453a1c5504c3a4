"""τ chosen by measurement: the rule, the agreement, and what a training makes of it."""

import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import co2
from co2.comm.clocks import CommTotals
from co2.errors import ConfigError
from co2.methods.shared import auto_tau as tau
from co2.methods.shared import local_method
from co2.methods.shared.auto_tau import CHOICES, PATIENCE, START, WINDOW, AutoTau, choose
from tests.cli.harness import metrics, pooled
from tests.grids import OF_A_KIND, grid
from tests.methods.driver import ROUNDS_OF, SETTINGS, Session, assert_same
from tests.workers import Pool, everybody, replicas

Figures = tuple[float, float, float]


@pytest.mark.parametrize(
    ("step_s", "comm_s", "chosen"),
    [
        (1.0, 0.0, 1),
        (1.0, 0.9, 1),
        (1.0, 0.92, 3),  # 1.1 × 0.92 is more than one step
        (1.0, 5.45, 6),
        (1.0, 5.46, 12),
        (0.1, 17.4, 192),
        (0.1, 1000.0, 192),
    ],
)
def test_the_smallest_that_hides_it(step_s: float, comm_s: float, chosen: int) -> None:
    assert choose(step_s, comm_s) == chosen


@pytest.mark.parametrize(
    ("comm_s", "share", "chosen"),
    [(0.0, 0.1, 1), (0.3, 0.1, 3), (0.34, 0.1, 6), (1.0, 0.5, 1), (1.0, 0.01, 192)],
)
def test_the_smallest_within_a_share(comm_s: float, share: float, chosen: int) -> None:
    """comm ≤ share · (comm + τ · 1 s): with a tenth, τ ≥ 9 comm."""
    assert choose(1.0, comm_s, share) == chosen


class Scripted(AutoTau):
    """Finds what a script says, one entry a measurement; the last one for ever."""

    script: tuple[Figures, ...] = ()
    position = 0

    def measured(self, now: tuple[float, float]) -> Figures:
        found = self.script[min(self.position, len(self.script) - 1)]
        self.position += 1
        return found

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.position = state["position"]


def played(
    script: tuple[Figures, ...], measurements: int, share: float | None = None
) -> tuple[list[int], list[str]]:
    """τ of each round, one replica alone, and what was said."""
    auto = Scripted(co2.Mesh.world(device="cpu"), share)
    auto.script = script
    rounds = [auto.tau]
    while auto.position < measurements:
        rounds.append(auto.round_ends(CommTotals()))
    rounds.append(auto.round_ends(CommTotals()))
    return rounds, auto.take_notices()


GOOD, LATE, LATER = (1.0, 10.0, 0.0), (1.0, 40.0, 0.2), (1.0, 80.0, 0.4)
ALLOWED, SLOWER = (1.0, 1.0, 0.14), (1.0, 4.0, 0.25)


@pytest.mark.parametrize(
    ("script", "share", "found", "why"),
    [
        (((1.0, 20.0, 0.3),), None, [START, 24], "24 steps hide it"),
        (((0.001, 20.0, 0.9),), None, [START, 192], "192 steps cannot hide it"),
        # It rises when the network stays slow, more than once.
        ((GOOD, GOOD, *(LATE,) * PATIENCE), None, [12, 48], "48 steps hide it"),
        ((GOOD, LATE, LATE, LATER, LATER), None, [12, 48, 96], "96 steps hide it"),
        # It stays.
        ((GOOD, LATE, GOOD, LATE, GOOD), None, [12], ""),  # never twice in a row
        ((GOOD, (1.0, 40.0, 0.04), (1.0, 40.0, 0.04)), None, [12], ""),  # little is exposed
        ((GOOD, (1.0, 2.0, 0.2), (1.0, 2.0, 0.2)), None, [12], ""),  # no longer round would help
        ((LATE, GOOD, GOOD, GOOD), None, [START, 48], "48 steps hide it"),  # it does not fall
        # A blocking method allows its share.
        ((ALLOWED,) * 4, 0.1, [12], ""),
        ((ALLOWED, SLOWER, SLOWER), 0.1, [12, 48], ""),
    ],
)
def test_what_it_chooses(
    script: tuple[Figures, ...], share: float | None, found: list[int], why: str
) -> None:
    rounds, notices = played(script, len(script), share)
    assert list(dict.fromkeys(rounds)) == found
    # Round 0 is no measure, three are measured, and one more brings the agreement.
    assert set(rounds[: WINDOW + 2]) == {START} and (found == [12] or rounds[-1] == found[-1])
    assert why in notices[-1]


def test_the_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 2 s, one of them interrupted by an evaluation; each mean takes 6 s, 1 s exposed."""
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    auto, found = AutoTau(co2.Mesh.world(device="cpu")), []
    start = auto._start_agreement
    auto._start_agreement = lambda *figures: (found.append(figures), start(*figures))
    for number in range(1, WINDOW + 2):
        for step in range(START):
            auto.stopwatch.begin()
            now += 102.0 if step == 5 else 2.0
            auto.stopwatch.end()
            now += 0.5
        auto.round_ends(CommTotals(6.0 * number, 1.0 * number))
    share = WINDOW / (WINDOW + 2.0 * START * WINDOW)
    assert found == [pytest.approx((2.0, 6.0, share))]


@replicas(3)
def test_all_replicas_choose_alike(rank: int) -> None:
    """Rank r has steps of 1 + r s and means of 30 − 10 r s. By the slowest step, 3 s, and the last
    to join, 10 s: 6. Each for itself: 48, 12, 6."""
    auto = Scripted(co2.Mesh.world(device="cpu"))
    auto.script = ((1.0 + rank, 30.0 - 10.0 * rank, 0.0),)
    for _ in range(WINDOW + 2):
        auto.round_ends(CommTotals())
    auto.close()
    assert auto.tau == 6


SCRIPT = ((1.0, 2.0, 0.0), (1.0, 5.0, 0.1), (1.0, 5.0, 0.1))
"""With a start of 2: τ 3 from round 5 on, then 6."""
STEPS = 50


class Plan(Session):
    """A session under `tau=auto` by script, with short rounds."""

    def __init__(self, rank: int, name: str, own: dict[str, Any], seed: int | None = None) -> None:
        with patch.object(tau, "START", 2), patch.object(local_method, "AutoTau", Scripted):
            super().__init__(rank, name, {**SETTINGS[name], **own, "tau": "auto"}, seed=seed)
        self.method.auto.script = SCRIPT


FIXED = "streaming_diloco"
LOCAL: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in ROUNDS_OF if name != FIXED]
LOCAL += [("co2", {"shard": True}), ("co2_keep", {"fragments": 2})]


def test_auto_does_not_go_on_from_a_state_of_one_tau() -> None:
    saved = Session(0, "co2", SETTINGS["co2"]).train(4).method.state_dict()
    with pytest.raises(ConfigError, match=r"^co2\.tau=auto: the state was saved with 3[^\n]*$"):
        Plan(0, "co2", {}).method.load_state_dict(saved)


@replicas(2)
@pytest.mark.parametrize(
    ("name", "own"), grid(LOCAL, lambda case: case[0] in (*OF_A_KIND, "sparseloco"))
)
def test_auto_is_the_method_with_that_tau(rank: int, name: str, own: dict[str, Any]) -> None:
    auto, lengths, expected = Plan(rank, name, own), [], []
    for _ in range(STEPS):
        lengths.append(auto.method.tau)
        auto.step()
        expected.append(auto.snapshot())
    auto.method.flush()
    first, second = everybody(lengths)
    assert first == second and lengths[0] == 2 and set(lengths) > {2}
    fixed = Session(rank, name, {**SETTINGS[name], **own})
    fixed.method._settled = fixed.method.config  # which may change then
    for step, (length, after) in enumerate(zip(lengths, [*lengths[1:], lengths[-1]], strict=True)):
        fixed.method.config.tau = length
        if fixed.method.steps + 1 - fixed.method.round_began == length:
            # A step that ends a round prepares the next, whose length it must know.
            fixed.method.round_began += length - after
            fixed.method.config.tau = after
        fixed.step()
        assert_same(expected[step], fixed.snapshot())
    fixed.method.flush()


@replicas(2)
@pytest.mark.parametrize("own", [{}, {"shard": True}])
def test_resume_is_exact(rank: int, own: dict[str, Any]) -> None:
    whole, saves = Plan(rank, "co2", own), []
    for _ in range(STEPS):
        whole.step()
        saves.append(whole.save())
    for done in range(3, STEPS, 4):
        again = Plan(rank, "co2", own, seed=rank + 50)
        again.load(saves[done - 1], done)
        assert_same(again.train(STEPS - done).snapshot(), whole.snapshot())
        again.method.flush()
    whole.method.flush()


def test_in_a_run(workers: Pool, tmp_path: Path) -> None:
    """The decision stands in the metrics with its reason, and the console tells it."""
    arguments = ("method=co2", "co2.tau=auto", "train.steps=70", "toy.delay_s=0.002")
    run = pooled(workers, 2, *arguments, "log.every=5", runs=tmp_path)
    assert run.status == 0, run.err
    notices = metrics(run.folder, "notice")
    # On a busy machine steps and means may later take so long that it chooses again.
    changes = [line for line in notices if " → " in line["text"]]
    assert notices == changes, "nothing is warned of"
    assert changes[0]["step"] == START * (WINDOW + 2)
    assert all(change["text"] in run.out for change in changes)
    chosen = int(changes[-1]["text"].partition("→ ")[2].partition(":")[0])
    assert chosen in CHOICES
    last = metrics(run.folder, "train")[-1]
    assert last["tau"] == chosen
