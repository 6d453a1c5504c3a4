"""What a run tells: metrics and their summary, what a person reads, training time on a device that
works while the host is ahead, and metrics.jsonl on a full disk and in other hands."""

import dataclasses
import json
import math
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import train
from co2.config import Validation
from co2.errors import DIVERGED
from co2.methods.base import MethodStats
from co2.record import console, provenance
from co2.record.console import Console, Outcome, ProgressConsole, closing_table, sweep_table
from co2.record.folder import run_folder
from co2.record.metrics import UNITS, Evaluation, Ledger, Metrics, Notice, Summary, flat, unit_of
from co2.record.provenance import Origin
from co2.record.record import FolderRecord, Record
from co2.train import meters
from co2.train.meters import LossWatch, Meter, Utilization
from co2.train.session import Session
from tests.cli.harness import configured

SUMMARY = Summary(
    title="toy · co2 · tau3 · seed 0",
    task="toy",
    method="co2",
    tag="tau3",
    scale="smoke",
    seed=0,
    final={"loss": 0.5, "accuracy": 0.75},
    baselines={"majority_accuracy": 0.25},
    steps=60,
    workers=2,
    replica_size=1,
    unit="samples",
    throughput=1000.0,
    comm_s=2.0,
    exposed_s=0.5,
    exposed_share=0.1,
    data_share=0.01,
    overlap=0.75,
    bytes_per_step=4096.0,
    train_s=5.0,
    wall_s=6.0,
    peak_memory_bytes=2**20,
    extra_model_copies=3.0,
    memory=Ledger(1, 2, 3, 4, 5, 6, 0),
    device="cpu",
    folder="results/runs/toy",
    own={"gap": 1.5},
)
FIGURES = Metrics(10, 0.5, 0.1, 100.0, 1.0, 0.25, 64.0, 0.2, 0.0)


def test_a_summary_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY.as_json()))
    assert Summary.read(tmp_path) == SUMMARY
    assert Summary.read(tmp_path / "elsewhere") is None
    figures = flat(SUMMARY.as_json())
    names = ("final.loss", "overlap", "memory.gradient_bytes", "gap")
    assert [figures[name] for name in names] == [0.5, 0.75, 3, 1.5]


def test_what_is_not_finite_is_null() -> None:
    """fully_shard keeps no clocks, and a diverged model has no loss."""
    broken = dataclasses.replace(SUMMARY, comm_s=math.nan, final={"loss": math.inf})
    values = json.loads(json.dumps(broken.as_json(), allow_nan=False))
    assert values["comm_s"] is None and values["final"] == {"loss": None}


def test_what_falls_is_no_time_below_zero() -> None:
    """DDP tells averages, and an average times the steps so far may fall from step to step."""
    totals = iter([(1.0, 0.5), (2.0, 0.75), (1.9, 0.7499), (1.9, 0.7499), (math.nan, math.nan)])
    meter = Meter(lambda: MethodStats(*next(totals), 0.0))
    found = [meter.interval(step, 0.0, 0.1) for step in range(4)]
    assert [one.comm_s for one in found[:3]] == [1.0, 0.0, 0.0]
    assert [one.exposed_s for one in found[:3]] == [0.25, 0.0, 0.0]
    assert [math.copysign(1, one.exposed_share) for one in found[:3]] == [1, 1, 1]
    assert math.isnan(found[3].exposed_share), "fully_shard keeps no clocks"


def test_the_first_step_of_a_segment_has_no_share() -> None:
    """It is not timed, but the method's clocks run."""
    clocks = iter((0.0, 5.0))
    meter = Meter(lambda: MethodStats(0.0, next(clocks), 0.0))
    meter.step(8)
    first = meter.interval(1, 0.0, 0.1)
    assert first.exposed_s == 5 and first.exposed_share == first.throughput == 0


def test_lines_have_the_names_of_metrics_jsonl() -> None:
    line = dataclasses.replace(FIGURES, own={"tau": 3.0}).line("tokens")
    assert line["kind"] == "train" and line["step"] == 10
    assert line["tokens_per_s"] == 100.0 and line["tau"] == 3.0 and "throughput" not in line
    evaluation = Evaluation(10, {"loss": math.nan}, 2.0)
    assert evaluation.line() == {"kind": "eval", "step": 10, "loss": None, "train_s": 2.0}


def test_every_figure_has_a_unit() -> None:
    line = FIGURES.line("tokens")
    for name in line.keys() - {"kind", "step"}:
        assert unit_of(f"train/{name}"), name
    for field in dataclasses.fields(Ledger):
        assert unit_of(f"memory.{field.name}") == "bytes"
    assert unit_of("throughput") == "units/s" and unit_of("tag") == ""
    assert all(meaning for _, _, meaning in UNITS)


LONG = dataclasses.replace(SUMMARY, folder="/".join(["results/runs/some/where"] * 8))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its one number is the time."""
    now = [0.0]
    monkeypatch.setattr(console.time, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("steps", "ends", "left"),
    [
        # The first compiles for a minute and a half; each of the others takes a second.
        (100, {step: 90.0 + step for step in range(1, 11)}, "  90 s left"),
        (100, {step: 2.0 * step for step in range(81, 91)}, "  20 s left"),  # a resumed run
        (
            400,  # recent steps count
            {step: 10.0 * step for step in range(1, 201)}
            | {step: 2000.0 + step - 200 for step in range(201, 301)},
            "  100 s left",
        ),
        (1000, {1: 60.0, 2: 100.0, 3: 101.0, 4: 102.0}, ""),  # too few to tell
    ],
)
def test_the_time_left(
    clock: list[float],
    capsys: pytest.CaptureFixture,
    steps: int,
    ends: dict[int, float],
    left: str,
) -> None:
    progress = ProgressConsole("title", steps, "samples", every_s=0.0)
    for step, end in ends.items():
        clock[0] = end
        progress.progress(step, FIGURES if step == max(ends) else None)
    told = capsys.readouterr().out
    assert told.endswith(f"{left}\n") and ("left" in told) == bool(left)


def test_folders_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert f"folder: {LONG.folder}\n" in closing_table(LONG)
    jobs = [Outcome((f"co2.tau={tau}",), 0, LONG, Validation.all) for tau in (1, 2)]
    lines = sweep_table(
        [*jobs, Outcome(("co2.tau=3",), DIVERGED, None, Validation.all)]
    ).splitlines()
    assert f"co2.tau=1: {LONG.folder}" in lines
    assert any(line.startswith("co2.tau=3: the loss is not finite") for line in lines)


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


def test_model_flop_utilization() -> None:
    """GPT-2 small on an A100: 6 N flop a token, 150,000 tokens a second, is 36 % of its peak."""
    used = Utilization(flops_per_unit=6 * 124_439_808, peak_flops=312e12)
    metrics = dataclasses.replace(FIGURES, throughput=8 * 150_000.0)
    seen = used.seen_in(metrics, gpus=8)
    assert seen.per_gpu == 150_000 and seen.mfu == pytest.approx(0.359, abs=1e-3)
    line = seen.line("tokens")
    assert line["mfu"] == seen.mfu and line["tokens_per_s_per_gpu"] == 150_000
    without = metrics.line("tokens")
    assert not [name for name in without if "mfu" in name or "gpu" in name]


class Heard(Console):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def print_line(self, line: str) -> None:
        self.lines.append(line)


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file can grow beyond so many bytes: a longer write ends amid a line, with an error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def record(tmp_path: Path, heard: Heard) -> FolderRecord:
    return begun(tmp_path, heard, 0)


def begun(tmp_path: Path, heard: Heard, step: int, before: Record | None = None) -> FolderRecord:
    config = configured("log.wandb=disabled", runs=tmp_path / "runs")
    record = FolderRecord(config, 2, "samples", {}, Origin("train.py", ()), heard)
    record.begin(step, before)
    return record


def steps(record: FolderRecord) -> list[int]:
    return [json.loads(line)["step"] for line in (record.folder / "metrics.jsonl").open()]


def test_lines_wait_until_there_is_room(record: FolderRecord, heard: Heard) -> None:
    record.log(Notice(1, "one"))
    size = (record.folder / "metrics.jsonl").stat().st_size
    with room_for(size + 20):
        record.log(Notice(2, "two"))
        record.log(Notice(3, "three"))
        assert steps(record) == [1], "nothing torn is left"
        with pytest.raises(OSError, match="File too large"):
            record.finish(None)
        assert not (record.folder / "summary.json").exists(), "without its lines no run finishes"
    record.log(Notice(4, "four"))
    assert steps(record) == [1, 2, 3, 4]
    (line,) = heard.lines
    assert line.startswith("step 2: metrics.jsonl cannot be written (File too large)")


def test_who_was_given_up_adds_no_more_lines(
    record: FolderRecord, heard: Heard, tmp_path: Path
) -> None:
    """It was out of reach for a while, and trains on until it learns that the others went on."""
    record.log(Notice(1, "one"))
    others = Record()
    for step in (1, 2, 3):
        others.log(Notice(step, "of another worker"))
    successor = begun(tmp_path, heard, 3, others)
    record.log(Notice(2, "late"))
    successor.log(Notice(4, "four"))
    assert steps(successor) == [1, 2, 3, 4]


def test_git_is_asked_and_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was killed while git renewed its index left a lock, with which git refuses to
    commit."""
    asked = tmp_path / "provenance.py"
    asked.write_text("")
    author = ("-c", "user.name=A", "-c", "user.email=a@b.org")
    for words in (("init", "-q"), ("add", "."), (*author, "commit", "-qm", "all")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    os.utime(asked, (1, 1))  # what git knows of the file is no longer so
    index = (tmp_path / ".git" / "index").read_bytes()
    monkeypatch.setattr(provenance, "__file__", str(asked))
    assert len(provenance.git()["commit"]) == 40 and not provenance.git()["dirty"]
    assert (tmp_path / ".git" / "index").read_bytes() == index
