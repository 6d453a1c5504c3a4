"""What a person reads: the time left, and folders that can be copied."""

import dataclasses

import pytest

from co2.config import Validation
from co2.errors import DIVERGED
from co2.record import console
from co2.record.console import Outcome, ProgressConsole, closing_table, sweep_table
from co2.record.metrics import Metrics
from tests.engine.test_metrics import SUMMARY

FIGURES = Metrics(10, 0.5, 0.1, 100.0, 1.0, 0.25, 64.0, 0.2, 0.0)
LONG = dataclasses.replace(SUMMARY, folder="/".join(["results/runs/some/where"] * 8))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its one number is the time."""
    now = [0.0]
    monkeypatch.setattr(console.time, "perf_counter", lambda: now[0])
    return now


def told(clock: list[float], steps: int, ends: dict[int, float]) -> None:
    """Trains until the last of these steps, which end then."""
    progress = ProgressConsole("title", steps, "samples", every_s=0.0)
    for step, end in ends.items():
        clock[0] = end
        progress.progress(step, FIGURES if step == max(ends) else None)


def test_the_first_step_is_not_what_the_others_take(
    clock: list[float], capsys: pytest.CaptureFixture
) -> None:
    """It compiles for a minute and a half; each of the others takes a second."""
    told(clock, 100, {step: 90.0 + step for step in range(1, 11)})
    assert capsys.readouterr().out.endswith("  90 s left\n")


def test_a_run_that_goes_on(clock: list[float], capsys: pytest.CaptureFixture) -> None:
    told(clock, 100, {step: 2.0 * step for step in range(81, 91)})
    assert capsys.readouterr().out.endswith("  20 s left\n")


def test_recent_steps_count(clock: list[float], capsys: pytest.CaptureFixture) -> None:
    slow = {step: 10.0 * step for step in range(1, 201)}
    told(clock, 400, slow | {step: 2000.0 + step - 200 for step in range(201, 301)})
    assert capsys.readouterr().out.endswith("  100 s left\n")


def test_nothing_is_told_of_too_few_steps(
    clock: list[float], capsys: pytest.CaptureFixture
) -> None:
    told(clock, 1000, {1: 60.0, 2: 100.0, 3: 101.0, 4: 102.0})
    assert "left" not in capsys.readouterr().out


def test_folders_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert f"folder: {LONG.folder}\n" in closing_table(LONG)
    jobs = [Outcome((f"co2.tau={tau}",), 0, LONG, Validation.all) for tau in (1, 2)]
    lines = sweep_table(
        [*jobs, Outcome(("co2.tau=3",), DIVERGED, None, Validation.all)]
    ).splitlines()
    assert f"co2.tau=1: {LONG.folder}" in lines
    assert any(line.startswith("co2.tau=3: the loss is not finite") for line in lines)
