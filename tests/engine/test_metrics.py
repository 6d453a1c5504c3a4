"""Metrics and Summary: one source of names and units, and what JSON can hold."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from co2.methods.base import MethodStats
from co2.record.metrics import UNITS, Evaluation, Ledger, Metrics, Summary, flat, unit_of
from co2.train.meters import Meter

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


def test_a_summary_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY.as_json()))
    assert Summary.read(tmp_path) == SUMMARY
    assert Summary.read(tmp_path / "elsewhere") is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("final.loss", 0.5), ("overlap", 0.75), ("memory.gradient_bytes", 3), ("gap", 1.5)],
)
def test_a_figure_is_found_by_its_name(name: str, value: float) -> None:
    assert flat(SUMMARY.as_json())[name] == value


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
    metrics = Metrics(10, 0.5, 0.1, 100.0, 1.0, 0.25, 64.0, 0.2, 0.0, {"tau": 3.0})
    line = metrics.line("tokens")
    assert line["kind"] == "train" and line["step"] == 10
    assert line["tokens_per_s"] == 100.0 and line["tau"] == 3.0 and "throughput" not in line
    evaluation = Evaluation(10, {"loss": math.nan}, 2.0)
    assert evaluation.line() == {"kind": "eval", "step": 10, "loss": None, "train_s": 2.0}


def test_every_figure_has_a_unit() -> None:
    line = Metrics(10, 0.5, 0.1, 100.0, 1.0, 0.25, 64.0, 0.2, 0.0).line("tokens")
    for name in line.keys() - {"kind", "step"}:
        assert unit_of(f"train/{name}"), name
    for field in dataclasses.fields(Ledger):
        assert unit_of(f"memory.{field.name}") == "bytes"
    assert unit_of("throughput") == "units/s" and unit_of("tag") == ""
    assert all(meaning for _, _, meaning in UNITS)
