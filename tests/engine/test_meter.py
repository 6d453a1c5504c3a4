"""Training time on a device that works while the host is ahead; and model FLOP utilization."""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import train
from co2.record.console import ProgressConsole, closing_table
from co2.record.folder import run_folder
from co2.record.metrics import Metrics
from co2.streams import BatchCopies
from co2.train import meters, samples
from co2.train.meters import LossWatch, Utilization
from co2.train.session import Session
from tests.cli.harness import configured
from tests.engine.test_metrics import SUMMARY

STEP_S = 1.0


class Behind:
    """A clock that only waiting for the device moves, by a second for each step that it owes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.owed = 0.0, 0
        check, evaluate, save = LossWatch.check, Session.evaluate, Session.save

        def add(watch: LossWatch, step: int, loss: Any) -> None:
            watch._new.append((step, loss))
            self.owed += 1

        def waiting(inner: Any) -> Any:
            def waits(*args: Any, **more: Any) -> Any:
                self.wait()
                return inner(*args, **more)

            return waits

        patch.setattr(LossWatch, "add", add)
        patch.setattr(LossWatch, "check", waiting(check))
        # These read from the device inside the meter's pause.
        patch.setattr(Session, "_scores", waiting(Session._scores))
        patch.setattr(Session, "state", waiting(Session.state))
        patch.setattr(meters.time, "perf_counter", lambda: self.now)
        assert (evaluate, save) == (Session.evaluate, Session.save)

    def wait(self) -> None:
        self.now += STEP_S * self.owed
        self.owed = 0


def test_no_waiting_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints, evaluations and the end fall between two lines of metrics.jsonl."""
    config = configured(
        *("launch.workers=1", "log.wandb=disabled", "train.steps=15", "method=co2", "co2.tau=2"),
        *("log.every=4", "checkpoint.every=6", "train.eval_every=5"),
        runs=tmp_path / "runs",
    )
    clock = Behind(monkeypatch)
    assert train.APP.run(config) == 0
    assert clock.owed == 0
    folder = run_folder(config)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = {line["step"]: line["samples_per_s"] for line in lines if line["kind"] == "train"}
    samples = config.train.batch_size / STEP_S
    # The first step of a process is not timed, and shares its second with the first wait.
    assert rates.keys() == {4, 8, 12, 15}
    assert [rates[step] for step in (8, 12, 15)] == [pytest.approx(samples)] * 3
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["train_s"] == pytest.approx(15 * STEP_S)


def test_a_step_that_ends_late_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    meter = meters.Meter(lambda: meters.MethodStats())
    for _ in range(3):
        meter.step(8)
    clock[0] = 2.0
    meter.settle()
    assert meter.totals.train_s == 2.0 and meter.throughput() == 8.0


def test_model_flop_utilization() -> None:
    """GPT-2 small on an A100: 6 N flop a token, 150,000 tokens a second, is 36 % of its peak."""
    used = Utilization(flops_per_unit=6 * 124_439_808, peak_flops=312e12)
    metrics = Metrics(10, 0.5, 0.1, 8 * 150_000.0, 1.0, 0.25, 64.0, 0.2, 0.0)
    seen = used.seen_in(metrics, gpus=8)
    assert seen.per_gpu == 150_000 and seen.mfu == pytest.approx(0.359, abs=1e-3)
    line = seen.line("tokens")
    assert line["mfu"] == seen.mfu and line["tokens_per_s_per_gpu"] == 150_000
    without = metrics.line("tokens")
    assert not [name for name in without if "mfu" in name or "gpu" in name]


def test_a_person_reads_it(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = Metrics(10, 0.5, 0.1, 8000.0, 1.0, 0.25, 64.0, 0.2, 0.0, per_gpu=1000.0, mfu=0.4125)
    console = ProgressConsole("toy", 10, "tokens", every_s=0.0)
    console.progress(10, metrics)
    assert "1,000 per GPU  MFU 41.2%" in " ".join(capsys.readouterr().out.split("\n"))
    assert "41.2%" in closing_table(dataclasses.replace(SUMMARY, mfu=0.4125))
    assert "FLOP" not in closing_table(SUMMARY) and "mfu" not in SUMMARY.as_json()


@pytest.mark.parametrize(("hidden", "seconds"), [(True, 0.0), (False, 2.0)])
def test_what_a_gpu_waits_for_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: bool, seconds: float
) -> None:
    """A batch that is made ahead takes a second; the GPU has work for as long, or not."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(meters.time, "perf_counter", lambda: clock.now)

    class Slow(BatchCopies):
        overlap = True

        def still_busy(self) -> Callable[[], bool]:
            return lambda: hidden

        def begin(self, batch: Any) -> Callable[[], Any]:
            clock.now += 1.0
            return lambda: batch

    monkeypatch.setattr(samples, "BatchCopies", Slow)
    config = configured(
        *("launch.workers=1", "log.wandb=disabled", "train.steps=4", "checkpoint.every=0"),
        runs=tmp_path / "runs",
    )
    assert train.APP.run(config) == 0
    found = json.loads((run_folder(config) / "summary.json").read_text())
    assert found["train_s"] == 2.0  # the first step is not timed, the last makes nothing ahead
    assert found["data_share"] * found["train_s"] == seconds
