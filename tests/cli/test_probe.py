"""`co2 probe`: what workers measure, and what follows from it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train
from benchmarks.probe import shares_in
from co2.app import probe
from co2.app.probe import Curve, Measured, best_forecast, forecast, report
from co2.catalogue import CATALOGUE
from co2.methods.shared.auto_tau import CHOICES
from co2_measure.simulate.methods import ENTRIES, LIMIT
from tests.cli.harness import configured, refused
from tests.workers import Pool

NUMEL = 1_000_000
SLOW = Curve([4, 4 * NUMEL], [0.0, 6.0])
"""A mean of the model takes six steps."""
FOUND = Measured(4, 1.0, 1.0, 4 * NUMEL, SLOW, SLOW)


@pytest.mark.parametrize(
    ("num_bytes", "seconds"), [(1, 1.0), (10, 1.0), (15, 2.0), (20, 3.0), (30, 4.0), (70, 8.0)]
)
def test_a_curve_is_straight_between_sizes_and_beyond(num_bytes: int, seconds: float) -> None:
    assert Curve([10, 20, 40], [1.0, 3.0, 5.0]).at(num_bytes) == pytest.approx(seconds)


def test_more_bytes_take_no_less_time() -> None:
    """What was measured may say otherwise."""
    assert Curve([10, 20], [3.0, 1.0]).at(1000) == 3.0


@pytest.mark.parametrize(
    ("method", "tau", "share", "hides"),
    [
        ("local_sgd", 12, 6 / 18, 96),  # 6 s of 66, 9.1 %, are less than a tenth
        ("local_sgd", 3, 6 / 9, 96),
        ("co2", 12, 0.0, 12),  # 6 · 1.1 ≤ 12
        ("co2", 3, 3 / 6, 12),
        ("co2_keep", 6, 0.0, 12),
        ("acco", 12, 5 / 6, None),
        ("desloc", 12, 9 / 21, 96),  # 9 s a round: moments are sent in each third and sixth
    ],
)
def test_waiting_by_hand(method: str, tau: int, share: float, hides: int | None) -> None:
    found = forecast(FOUND, method, tau, 4 * NUMEL)
    assert found.share == pytest.approx(share)
    assert found.hides == hides and found.tau == (tau if CATALOGUE[method].rounds else None)


def test_a_mean_that_slows_the_computation() -> None:
    """A step takes twice as long while a mean is under way, six seconds, or three such steps, of
    the round of τ = 3."""
    found = Measured(4, 1.0, 2.0, 4 * NUMEL, SLOW, SLOW)
    assert forecast(found, "co2", 3, 4 * NUMEL).share == 0
    assert forecast(found, "local_sgd", 3, 4 * NUMEL).share == pytest.approx(6 / 9)


def test_steps_that_slow_the_mean() -> None:
    """Beside steps a mean takes twelve seconds; who waits for it has none beside it."""
    found = Measured(4, 1.0, 1.0, 4 * NUMEL, SLOW, SLOW, slowed=2.0)
    assert forecast(found, "co2", 6, 4 * NUMEL).share == pytest.approx(6 / 12)
    assert forecast(found, "co2", 12, 4 * NUMEL).hides == 24
    assert forecast(found, "local_sgd", 3, 4 * NUMEL).share == pytest.approx(6 / 9)


def test_who_waits_for_all_waits_for_the_slowest() -> None:
    """Of a round of τ = 3, three seconds on the slowest worker, the others wait a fifth on average.
    An overlapped mean has time for it."""
    found = replace(FOUND, uneven=0.2)
    assert forecast(found, "local_sgd", 3, 4 * NUMEL).share == pytest.approx((6 + 0.6) / 9)
    assert forecast(found, "co2", 12, 4 * NUMEL).share == 0


def test_where_no_round_is_long_enough() -> None:
    endless = Curve([4, 4 * NUMEL], [0.0, 1000.0])
    found = Measured(4, 1.0, 1.0, 4 * NUMEL, endless, endless)
    assert forecast(found, "co2", 12, 4 * NUMEL).hides is None
    assert f"| above {CHOICES[-1]} |" in report(found, 12, 4 * NUMEL, [])


def test_buckets_are_sent_one_after_another() -> None:
    late = Curve([4, 4 * NUMEL], [1.0, 1.0])  # a second each, whatever their size
    found = Measured(4, 1.0, 1.0, 4 * NUMEL, late, late)
    shares = [forecast(found, "local_sgd", 4, 4 * NUMEL // parts).share for parts in (1, 4)]
    assert shares == pytest.approx([1 / 5, 4 / 8])


def test_fragments_are_taken_where_their_latency_is_hidden() -> None:
    """A mean of a twelfth or a quarter has a twelfth or a quarter of 12 s."""
    for latency_s, fragments in ((0.4, 12), (1.5, 4), (3.0, 1)):
        late = Curve([4, 4 * NUMEL], [latency_s, latency_s + 6.0])
        found = Measured(4, 1.0, 1.0, 4 * NUMEL, late, late)
        best = best_forecast(found, "co2_keep", 12, 4 * NUMEL)
        assert best.fragments == fragments and best.share <= 0.01
        text = report(found, 12, 4 * NUMEL, [])
        words = f"co2_keep.fragments={fragments} co2_keep.delay=3"
        assert (words in text) == (fragments > 1)
        assert shares_in(text)["co2_keep"] == (pytest.approx(100 * best.share, abs=0.1), fragments)
        assert best_forecast(found, "co2", 12, 4 * NUMEL).fragments == 1


def test_parts_of_a_vector_share_the_link() -> None:
    """A link that lets a tenth pass at once is no quicker for ten tenths."""
    bursting = Curve([4 * NUMEL // 10, 4 * NUMEL], [0.0, 6.0])
    found = Measured(4, 1.0, 1.0, 4 * NUMEL, bursting, bursting)
    whole, cut = (forecast(found, "co2_keep", 4, 4 * NUMEL, parts).share for parts in (1, 4))
    assert whole == pytest.approx(2 / 6) and cut == pytest.approx(whole)


def test_every_method_is_told_with_the_command_that_starts_it() -> None:
    lines = report(FOUND, 12, 4 * NUMEL, ["task=gpt2", "launch.workers=4"]).splitlines()
    assert lines[0] == "a step: 1 s, and 0% more beside a mean, which takes 0% more beside steps"
    waits = "on average 0.0% of the time of its steps"
    assert lines[1] == f"at the end of a round a worker waits for the slowest one, {waits}"
    assert lines[2].startswith("a mean of 4 MB over 4 replicas: 6 s, 6 steps; ")
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if line[:2] == "| "][1:]
    assert {row[1] for row in rows} == ENTRIES.keys() - {LIMIT}
    waits = [float(row[4].rstrip("%")) for row in rows]
    assert waits == sorted(waits)
    shares = {method: share for method, (share, _) in shares_in("\n".join(lines)).items()}
    assert shares == {row[1]: float(row[4].rstrip("%")) for row in rows}
    given = report(FOUND, 12, 4 * NUMEL, ["task=gpt2", "launch.workers=4"], True).splitlines()
    assert "as given" in given[0] and "0%" not in given[0] and given[1:] == lines[2:]
    (words,) = [row[8].split() for row in rows if row[1] == "co2"]
    assert words == ["train.py", "task=gpt2", "launch.workers=4", "method=co2", "co2.tau=12"]


@pytest.mark.parametrize("mean_s", [0.1, 6.0, 100.0])
def test_every_command_is_one(tmp_path: Path, mean_s: float) -> None:
    curve = Curve([4, 4 * NUMEL], [0.0, mean_s])
    found = replace(FOUND, mean=curve, gather=curve)
    for line in report(found, 12, 4 * NUMEL, ["task=gpt2"]).splitlines():
        _, command, words = line.rpartition("train.py ")
        if command:
            configured(*words.rstrip(" |").split(), runs=tmp_path)


def _measured(rank: int, world: int, runs: str, size: int) -> Measured:
    found: list[Measured] = []
    original = probe.report
    try:
        probe.report = lambda one, *_: found.append(one) or ""  # type: ignore[func-returns-value]
        words = ("train.batch_size=4", "train.accumulate=2", f"mesh.replica_size={size}")
        config = configured(*words, f"launch.workers={world}", runs=Path(runs))
        probe._work(train.APP.make_task, 2.0, None, 12, (), config)
    finally:
        probe.report = original
    return found[0] if rank == 0 else None


@pytest.mark.parametrize("size", [1, 2])
def test_what_workers_measure(workers: Pool, tmp_path: Path, size: int) -> None:
    """Nothing is left behind. The workers of a replica make as many steps as each other."""
    found, *_ = workers.run(_measured, 2 * size, str(tmp_path), size)
    assert found.replicas == 2 and 0 < found.step_s <= found.beside_s and found.slowed >= 1
    assert 0 <= found.uneven < 1
    with torch.device("meta"):
        model = train.APP.make_task(configured(runs=tmp_path)).model()
    assert found.vector_bytes == sum(param.nbytes for param in model.parameters())
    for curve in (found.mean, found.gather):
        assert list(curve.sizes) == sorted(set(curve.sizes)) and min(curve.seconds) > 0
    assert list(tmp_path.iterdir()) == []


def test_alone_nobody_waits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["probe", "task=toy", "launch.workers=1", "--seconds", "1", f"runs={tmp_path}"]
    assert train.APP.main(words) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) > 10 and all(" 0.0% " in row for row in rows[1:])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--seconds 0.1", "--seconds=0.1: "),
        ("--tau x", "--tau=x: "),
        ("launch.elastic=true", "launch.elastic=true: is not probed; use false"),
        ("-m", "flag=-m: is of train.py"),
        ("task=nosuch", "task=nosuch: "),
    ],
)
def test_refused(words: str, line: str) -> None:
    assert refused(train.APP.main, ["probe", *words.split()]).startswith(line)
