"""Goodput where nodes fail: closed forms against drawn failures, and those against plain loops."""

import csv
import itertools
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from co2.catalogue import CATALOGUE
from co2_measure.simulate.__main__ import main
from co2_measure.simulate.drawn import _restarted, _Rounds, drawn_goodput
from co2_measure.simulate.failures import (
    DISCARD,
    ELASTIC,
    LLAMA_MTBF_HOURS,
    RESTART,
    WAYS,
    Faults,
    Round,
    daly_s,
    goodput,
    restart_goodput,
    rounds_goodput,
)
from co2_measure.simulate.goodput import ways
from co2_measure.simulate.methods import BLOCKING, OVERLAPPED
from tests.grids import grid

ROUND = Round(10.0, mean_s=0.5, state_s=2.0)
FAULTS = Faults(3e4, repair_s=20, restart_s=5, detect_s=3, regroup_s=1, checkpoint_s=2)
RARE_S = 1e14
by_way = pytest.mark.parametrize("way", WAYS)


@by_way
@pytest.mark.parametrize("nodes", [2, 16, 16_384])
def test_without_failures_nothing_is_lost(way: str, nodes: int) -> None:
    never = replace(FAULTS, mtbf_s=RARE_S * nodes)
    assert goodput(way, never, nodes, ROUND) == pytest.approx(1, abs=1e-6)
    assert drawn_goodput(way, never, nodes, ROUND, 10) == pytest.approx(1, abs=1e-6)


@by_way
@pytest.mark.parametrize("nodes", [4, 64, 1024])
@pytest.mark.parametrize("rounds", grid([3, 10, 100, 10_000], (3, 100).__contains__))
@pytest.mark.parametrize("repair_s", [0.0, 25.0, 400.0])
def test_closed_forms_against_drawn_failures(
    way: str, nodes: int, rounds: int, repair_s: float
) -> None:
    """One failure in 10,000 rounds, up to one in three."""
    mtbf_s = nodes * rounds * ROUND.seconds
    faults = replace(FAULTS, mtbf_s=mtbf_s, repair_s=repair_s, restart_s=0.0)
    drawn = drawn_goodput(way, faults, nodes, ROUND, 10_000, seed=1)
    closed = goodput(way, faults, nodes, ROUND)
    assert closed == pytest.approx(drawn, abs=0.02)
    lost = max(1 - drawn, 1e-6)
    if lost < 0.1:
        assert 1 - closed == pytest.approx(lost, rel=0.06)


def plain(way: str, faults: Faults, nodes: int, round_: Round, rounds: int) -> float:
    """Round after round, with a lifetime drawn for every node, and nothing passed over."""
    draw = random.Random(3)
    fails = [draw.expovariate(1 / faults.mtbf_s) for _ in range(nodes)]
    returns: list[float | None] = [None] * nodes
    now = useful = 0.0
    for _ in range(rounds):
        end = now + round_.seconds
        training = [i for i in range(nodes) if returns[i] is None]
        pause, lost = 0.0, list[int]()
        for i in sorted(training, key=lambda i: fails[i]):
            if fails[i] < end + pause:
                lost.append(i)
                returns[i] = fails[i] + faults.detect_s + faults.repair_s + faults.restart_s
                pause = max(pause, fails[i] + faults.detect_s - end)
        come = [i for i, at in enumerate(returns) if at is not None and at <= end + pause]
        for i in come:
            returns[i] = None
            fails[i] = end + pause + draw.expovariate(1 / faults.mtbf_s)
        pause += faults.regroup_s if lost or come else 0
        pause += round_.state_s if come else 0
        pause += round_.mean_s if lost and way == ELASTIC else 0
        useful += len(training) - len(lost) if way == ELASTIC or not lost else 0
        now = end + pause
    return useful * round_.seconds / (nodes * now)


@pytest.mark.parametrize("way", [DISCARD, ELASTIC])
@pytest.mark.parametrize(
    ("nodes", "mtbf_s"),
    grid([(2, 300.0), (5, 2_000.0), (20, 500.0)], lambda case: case[0] == 20),
)
def test_drawn_failures_against_plain_loops(way: str, nodes: int, mtbf_s: float) -> None:
    faults = replace(FAULTS, mtbf_s=mtbf_s, detect_s=12.0)  # longer than a round
    drawn = drawn_goodput(way, faults, nodes, ROUND, 10_000)
    rounds = int(10_000 * mtbf_s / nodes / ROUND.seconds)
    assert drawn == pytest.approx(plain(way, faults, nodes, ROUND, rounds), abs=0.02)


class Given(np.random.Generator):
    """Gives what it is told, for what would be drawn."""

    def __init__(self, *seconds: float) -> None:
        super().__init__(np.random.PCG64())
        self.seconds = list(seconds)

    def exponential(self, *_: object) -> float:  # type: ignore[override]
        return self.seconds.pop(0)


@pytest.mark.parametrize(("way", "counted"), [(DISCARD, 0), (ELASTIC, 3)])
def test_a_failure_by_hand(way: str, counted: int) -> None:
    """Of 4 nodes one fails at 28 s, in the third round of 10 s. It is noticed at 31 s, a second
    after the round's end, and is back 25 s later: after the fifth round."""
    again_s = 0.5 if way == ELASTIC else 0.0
    run = _Rounds(way, FAULTS, 4, ROUND, Given(28, 1e9, 1e9))
    assert (run._undisturbed(), run.now) == (8, 20)
    assert run._disturbed() == (counted, 1)
    assert run.now == pytest.approx(30 + 1 + 1 + again_s)
    assert run.back == [56]
    assert (run._undisturbed(), run.active) == (2 * 3, 3)
    assert run._disturbed() == (3, 0)
    assert run.now == pytest.approx(32 + again_s + 30 + 1 + 2) and run.active == 4


def test_what_is_counted_is_settled() -> None:
    """A thousand nodes fail once in 1,000 s and are away for as long: half of them are there, even
    if few failures are drawn."""
    faults = Faults(1e3, repair_s=1e3)
    assert drawn_goodput(ELASTIC, faults, 1000, Round(1.0), 100) == pytest.approx(0.5, abs=0.05)


def test_restart_by_hand() -> None:
    """Failures 45, 8 and 100 s apart, 10 s until all train again: checkpoints of 2 s every 10 s."""
    faults = Faults(1e3, repair_s=4, restart_s=5, detect_s=1, checkpoint_s=2, checkpoint_every_s=10)
    gaps = np.array([45.0, 8.0, 100.0])
    random = Given()
    random.exponential = lambda *_: gaps  # type: ignore[method-assign]
    assert _restarted(faults, 1, 3, random) == pytest.approx((20 + 0 + 70) / 153)


@pytest.mark.parametrize("ratio", [1e-3, 1e-4, 1e-6])
def test_restart_at_the_optimum_is_the_known_approximation(ratio: float) -> None:
    """1 − √(2δ/M), for small δ/M and without a downtime; terms of the order δ/M are left out."""
    faults = Faults(1e6, checkpoint_s=1e6 * ratio)
    assert restart_goodput(faults, 1) == pytest.approx(1 - math.sqrt(2 * ratio), abs=2 * ratio)
    assert daly_s(1e6 * ratio, 1e6) == pytest.approx(1e6 * math.sqrt(2 * ratio), rel=ratio**0.5)


@pytest.mark.parametrize("checkpoint_s", [0.1, 10.0, 300.0])
@pytest.mark.parametrize("nodes", [1, 100])
def test_no_interval_is_much_better_than_dalys(checkpoint_s: float, nodes: int) -> None:
    faults = replace(FAULTS, checkpoint_s=checkpoint_s)
    optimum_s = faults.interval_s(nodes)
    chosen = restart_goodput(faults, nodes)
    for factor in np.geomspace(0.1, 10, 41):
        other = replace(faults, checkpoint_every_s=float(optimum_s * factor))
        assert restart_goodput(other, nodes) <= chosen * (1 + 2e-3)
    for factor in (0.5, 2):
        other = replace(faults, checkpoint_every_s=optimum_s * factor)
        assert restart_goodput(other, nodes) < chosen
    assert daly_s(5.0, 2.0) == 2.0, "no time for more"


def test_the_default_is_llama_3s() -> None:
    """419 failures in 54 days, of 2,048 nodes."""
    days = LLAMA_MTBF_HOURS / 24
    assert days / 2048 * 419 == pytest.approx(54)
    assert days == pytest.approx(263.9, abs=0.1)


def cases(count: int) -> list[tuple[Faults, int, Round]]:
    """Drawn over some orders of magnitude. To detect a failure takes less than a third of the time
    between two."""
    draw = random.Random(5)

    def between(low: float, high: float) -> float:
        return math.exp(draw.uniform(math.log(low), math.log(high)))

    found = []
    for _ in range(count):
        faults = Faults(
            mtbf_s=between(1e3, 1e9),
            repair_s=between(1, 1e4),
            restart_s=between(1, 1e3),
            detect_s=between(0.1, 1e3),
            regroup_s=between(0.01, 1e2),
            checkpoint_s=between(0.1, 1e3),
        )
        round_ = Round(between(0.1, 1e3), between(0.01, 10), between(0.1, 1e2))
        nodes = 2 ** draw.randint(1, 14)
        if 3 * faults.detect_s < faults.mtbf_s / nodes:
            found.append((faults, nodes, round_))
    return found


def test_keeping_a_round_beats_throwing_it_away() -> None:
    """Whenever to take the mean again takes less time than is left of the round without one."""
    for faults, nodes, round_ in cases(2000):
        if round_.mean_s < round_.seconds * (1 - 1 / nodes) / 2:
            kept = rounds_goodput(ELASTIC, faults, nodes, round_)
            assert kept >= rounds_goodput(DISCARD, faults, nodes, round_) * (1 - 1e-5)


def test_elastic_beats_restart_where_its_pauses_are_shorter() -> None:
    """Whenever to regroup twice, to take the mean again and to send the state take no longer than
    to restart, and a round no longer than the time between two checkpoints."""
    compared = 0
    for faults, nodes, round_ in cases(4000):
        pauses_s = 2 * faults.regroup_s + round_.mean_s + round_.state_s
        if pauses_s <= faults.restart_s and round_.seconds <= faults.interval_s(nodes):
            compared += 1
            elastic = rounds_goodput(ELASTIC, faults, nodes, round_)
            assert elastic >= restart_goodput(faults, nodes), (faults, nodes, round_)
    assert compared > 300


def test_what_is_thrown_away_grows_with_the_round() -> None:
    rounds = [Round(seconds) for seconds in (1.0, 10.0, 100.0, 1000.0)]
    thrown = [rounds_goodput(DISCARD, FAULTS, 64, one) for one in rounds]
    assert thrown == sorted(thrown, reverse=True) and thrown[-1] < 0.15
    kept = [rounds_goodput(ELASTIC, FAULTS, 64, one) for one in rounds]
    assert min(kept) > 0.95


@by_way
def test_more_failures_leave_less(way: str) -> None:
    found = [
        goodput(way, replace(FAULTS, mtbf_s=mtbf_s), 64, ROUND) for mtbf_s in (1e3, 1e4, 1e5, 1e6)
    ]
    assert found == sorted(found)
    by_nodes = [goodput(way, FAULTS, nodes, ROUND) for nodes in (2, 16, 256, 4096)]
    assert by_nodes == sorted(by_nodes, reverse=True)


def test_which_methods_can_be_elastic() -> None:
    for method in (*BLOCKING, *OVERLAPPED):
        assert (ELASTIC in ways(method, 2)) == CATALOGUE[method].elastic
        assert ways(method, 1) == (RESTART,)
    assert ways("allreduce", 2) == ways("acco", 2) == (RESTART, DISCARD)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, page = tmp_path / "a.csv", tmp_path / "a.md"
    words = "--goodput --gpus 8,1024,131072 --method allreduce,sparseloco,co2 --tau 4,48"
    command = [*words.split(), "--failures=100", f"--csv={table}", f"--markdown={page}"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "simulated" in shown and "Simulated, not measured" in shown
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == 3 * (1 + 2 + 2)
    for row in rows:
        alone = row["gpus"] == "8"
        assert (row["discard"] == "") == alone
        assert (row["elastic"] == "") == (alone or row["method"] != "co2")
        for way in WAYS:
            assert (row[way] == "") == (row[f"{way}_drawn"] == "")
            if row[way]:
                assert 0 < float(row[way]) < 1
                assert float(row[way]) == pytest.approx(float(row[f"{way}_drawn"]), abs=0.05)
    for before, after in itertools.pairwise(rows[:3]):
        assert float(before["restart"]) > float(after["restart"])
    assert "python -m co2.simulate --goodput" in page.read_text()


def test_a_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = ["--goodput", "--gpus", "8..64", "--failures", "10"]
    assert main([*words, "--figure", str(tmp_path / "a.svg")]) == 0
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("words", "start"),
    [
        ("--goodput --method=none", "--method=none: has no means"),
        ("--goodput --paper", "--goodput=true: is not simulated with --paper"),
        ("--mtbf-hours=0", "--mtbf-hours=0.0: must be"),
        ("--mtbf-hours=inf", "--mtbf-hours=inf: must be"),
        ("--repair-s=-1", "--repair-s=-1.0: must be"),
        ("--restart-s=soon", "--restart-s=soon: must be"),
        ("--detect-s=nan", "--detect-s=nan: must be"),
        ("--regroup-s=-1", "--regroup-s=-1.0: must be"),
        ("--checkpoint-s=0", "--checkpoint-s=0.0: must be"),
        ("--checkpoint-every-s=0", "--checkpoint-every-s=0.0: must be"),
        ("--failures=0", "--failures=0: must be"),
    ],
)
def test_a_bad_value_is_one_line(
    words: str, start: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {start}") and shown.err.count("\n") == 1
    assert shown.out == ""
