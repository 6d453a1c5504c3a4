"""Where the figures of a run go: W&B, TensorBoard and the console hold what metrics.jsonl holds, of
one run that is stopped and goes on, or fails and trains steps again; and none of them ends it."""

import contextlib
import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import wandb
from torch import Tensor
from wandb.proto.wandb_internal_pb2 import Record

import train
from co2.config import Wandb
from co2.errors import PREEMPTED, ConfigError
from co2.record import wandb_sync
from co2.record.metrics import UNITS, figures, unit_of
from co2.record.wandb import SEGMENTS, mode
from co2.start import launch
from tasks.toy import Toy
from tests.cli.harness import configured, folder_of, metrics, refused, summary, with_losses
from tests.cli.test_elastic import ELASTIC, SLOW, assert_no_step_is_missing, disturbed, words

STEPS = 20
WORDS = ("method=co2", "co2.tau=3", "launch.workers=1", f"train.steps={STEPS}", "log.every=1")
WORDS += ("train.eval_every=4", "checkpoint.every=5")
SINKS = {
    "W&B": ("log.wandb=offline",),
    "TensorBoard": ("log.wandb=disabled", "log.tensorboard=true"),
    "console": ("log.wandb=disabled",),
}
"""What turns each on, and no other."""
ALL = ("log.wandb=offline", *(SINKS["TensorBoard"][1:] if find_spec("tensorboard") else ()))

Scalars = dict[str, list[tuple[int, Any]]]
"""Steps and values, by their names."""


@dataclass
class Segment:
    """One of W&B's files, and the folder of what belongs to it."""

    files: Path
    run: Any = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Of the history."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """As they are defined, by their names or the patterns of names."""
    summary: dict[str, Any] = field(default_factory=dict)
    ended: bool = False

    @property
    def steps(self) -> list[int]:
        return [row["step"] for row in self.rows if "step" in row]

    def metric(self, name: str) -> Any:
        return self.metrics.get(name) or self.metrics[f"{name.partition('/')[0]}/*"]

    def file(self, value: dict[str, Any]) -> Path:
        """That a row's table or picture is kept in."""
        return self.files / value["path"]

    def table(self, name: str) -> list[list[Any]]:
        (value,) = [row[name] for row in self.rows if name in row]
        assert value["_type"] == "table-file"
        return json.loads(self.file(value).read_text())["data"]


def segments(folder: Path) -> list[Segment]:
    """Of a run's folder, oldest first."""
    found = [_read(path) for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))]
    assert all(segment.ended for segment in found), found
    return found


def _read(path: Path) -> Segment:
    found = Segment(path.parent / "files")
    for record in _records(path.read_bytes()):
        if record.HasField("run"):
            found.run = record.run
        elif record.HasField("metric"):
            found.metrics[record.metric.name or record.metric.glob_name] = record.metric
        elif record.HasField("history"):
            found.rows.append(_items(record.history.item))
        elif record.HasField("summary"):
            found.summary.update(_items(record.summary.update))
        elif record.HasField("exit"):
            found.ended = True
    return found


def _records(data: bytes) -> list[Record]:
    """W&B's file is a log as LevelDB's: after 7 bytes, chunks with a head of 7 bytes (checksum,
    length, kind), none of which crosses a block of 32 KiB; kinds 1 and 4 end a record."""
    records, whole, at = [], b"", 7
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if at + 7 + length > len(data):  # not written yet
            break
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            records.append(Record.FromString(whole))
            whole = b""
    return records


def _items(items: Any) -> dict[str, Any]:
    """A value that is a group of values is kept as several items."""
    found: dict[str, Any] = {}
    for item in items:
        *groups, name = item.nested_key or [item.key]
        place = found
        for group in groups:
            place = place.setdefault(group, {})
        place[name] = json.loads(item.value_json)
    return found


def of_wandb(folder: Path) -> Scalars:
    found: Scalars = {}
    for row in (row for segment in segments(folder) for row in segment.rows if "step" in row):
        for name, value in row.items():
            if name.startswith(("train/", "eval/")) and isinstance(value, int | float):
                found.setdefault(name, []).append((row["step"], value))
    return found


def of_tensorboard(folder: Path) -> Scalars:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    guidance = {"scalars": 0}  # all of them
    found = accumulators.EventAccumulator(str(folder / "tensorboard"), guidance).Reload()
    names = found.Tags()["scalars"]
    return {name: [(own.step, own.value) for own in found.Scalars(name)] for name in names}


def of_console(folder: Path) -> Scalars:
    """Its lines of evaluations, which `trained` has kept."""
    found: Scalars = {}
    for step, text in re.findall(r"step (\d+)/\d+  validation (.*)", told_by(folder)):
        for name, value in re.findall(r"(\S+) (\S+)", text):
            found.setdefault(f"eval/{name}", []).append((int(step), float(value)))
    return found


READERS = {"W&B": of_wandb, "TensorBoard": of_tensorboard, "console": of_console}


def written(folder: Path) -> Scalars:
    """The same of metrics.jsonl."""
    found: Scalars = {}
    for line in metrics(folder):
        for name, value in figures(line).items():
            if value is not None:
                found.setdefault(name, []).append((line["step"], value))
    return found


def assert_holds(sink: str, folder: Path, steps: int) -> None:
    """Everything that is written, each step once; the console has evaluations, of four places."""
    found, expected, exact = READERS[sink](folder), written(folder), sink != "console"
    if not exact:
        expected = {name: expected[name] for name in ("eval/loss", "eval/accuracy")}
    assert found.keys() == expected.keys()
    for name, line in expected.items():
        values = [(step, pytest.approx(value, abs=None if exact else 6e-5)) for step, value in line]
        assert found[name] == values, name
    assert [step for step, _ in found["eval/loss"]] == list(range(4, steps + 1, 4))
    if exact:
        assert [step for step, _ in found["train/loss"]] == list(range(1, steps + 1))


def at_step(step: int, do: Callable[[], object]) -> AbstractContextManager[None]:
    """`do` in the training loss of the step, counted from this start."""

    def change(value: Tensor, call: int) -> Tensor:
        if call == step:
            do()
        return value

    return with_losses(change)


def trained(runs: Path, *words: str) -> int:
    """A run in this process; its exit status."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            return launch.run(train.APP.work, configured(*WORDS, *words, runs=runs))
    finally:
        with (runs / "said").open("a") as file:
            file.write(said.getvalue())


def told_by(folder: Path) -> str:
    """What the console has said in all starts of a run."""
    return (folder.parents[3] / "said").read_text()


def told_of(runs: Path, sink: str) -> list[str]:
    return [line for line in (runs / "said").read_text().splitlines() if sink in line]


def fail() -> None:
    raise ArithmeticError("of the test")


def stop() -> None:
    signal.raise_signal(signal.SIGTERM)


def end_wandb() -> None:
    """W&B's own process, as a SIGTERM to all of a job does."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            stat = (path.parent / "stat").read_text().rpartition(")")[2].split()
            if int(stat[1]) == os.getpid() and b"wandb-core" in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGTERM)
                return
    raise AssertionError("no process of W&B's")


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    wandb.teardown()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was told to stop, and went on to its end."""
    runs = tmp_path_factory.mktemp("stopped") / "runs"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("WANDB_RUN_GROUP", "task=toy co2.tau=3,6")
        patched.setenv("WANDB_TAGS", "table2,tau_sweep")
        with at_step(7, stop):
            assert trained(runs, "trace=true", *ALL) == PREEMPTED
        assert trained(runs, "trace=true", *ALL) == 0
    return folder_of(*WORDS, runs=runs)


@pytest.mark.parametrize("sink", SINKS)
def test_a_run_that_stops_and_goes_on(stopped: Path, sink: str) -> None:
    assert_holds(sink, stopped, STEPS)


@pytest.mark.parametrize("sink", ["W&B", "TensorBoard"])
def test_steps_that_are_trained_again(tmp_path: Path, sink: str) -> None:
    """A run that fails at step 8 goes on from its checkpoint of step 5, and its segment of W&B is
    replaced. What is put aside stays a run of its own. Without a sweep, method and task are the
    group."""
    if sink == "TensorBoard":
        pytest.importorskip("tensorboard")
    runs, found = tmp_path / "runs", []
    folder = folder_of(*WORDS, runs=runs)
    with at_step(8, fail), pytest.raises(ArithmeticError):
        trained(runs, *SINKS[sink])
    for more, steps in (("", 7), ("resume=auto", STEPS), ("resume=never", STEPS)):
        if more:
            assert trained(runs, *SINKS[sink], more) == 0
        assert_holds(sink, folder, steps)
        found += [segment.run for segment in segments(folder)]
    if sink == "W&B":
        first, whole, afresh = found
        assert first.run_id == whole.run_id != afresh.run_id and whole.run_group == "toy-co2"


@pytest.mark.parametrize(
    ("sink", "call"),
    [
        ("W&B", "wandb.init"),
        ("W&B", "wandb.Run.log"),
        ("W&B", "wandb.Run.finish"),
        ("TensorBoard", "torch.utils.tensorboard.SummaryWriter.add_scalar"),
    ],
)
def test_its_failure_is_said_and_ends_nothing(tmp_path: Path, sink: str, call: str) -> None:
    if sink == "TensorBoard":
        pytest.importorskip("tensorboard")
    with patch(call, side_effect=OSError("no room\nis left")):
        assert trained(tmp_path, *SINKS[sink]) == 0
    assert told_of(tmp_path, sink) == [f"{sink}: OSError: no room; the run goes on without it"]
    folder = folder_of(*WORDS, runs=tmp_path)
    assert len(metrics(folder, "train")) == STEPS and (folder / "summary.json").exists()
    if wandb.run is not None:
        wandb.run.finish()


@pytest.fixture(scope="module")
def told(stopped: Path) -> list[Segment]:
    return segments(stopped)


def test_wandb_has_one_run_in_two_segments(stopped: Path, told: list[Segment]) -> None:
    """Each has its own steps, and `resume`, which lets `wandb sync` join them."""
    assert len(told) == 2 and told[0].run.run_id == told[1].run.run_id
    assert all(segment.run.resume for segment in told)
    first, second = (segment.steps for segment in told)
    assert len(first) >= 2 and len(second) >= 10
    assert first + second == list(range(1, STEPS + 1))
    state = json.loads((stopped / "wandb" / SEGMENTS).read_text())["segments"]
    ends = [(segment["begun"], segment["ended"]) for segment in state]
    assert ends == [(0, first[-1]), (first[-1], STEPS)]


def test_wandb_has_names_and_units(told: list[Segment]) -> None:
    """Every metric has the axis `step` and a unit; the best loss is kept."""
    logged = {name for row in told[1].rows for name in row}
    names = {name for name in logged if name.startswith(("train/", "eval/"))}
    assert {"train/exposed_s", "train/bytes", "eval/loss"} <= names
    for name in names:
        assert told[1].metric(name).step_metric == "step", name
        assert unit_of(name), name
    best = {name: told[1].summary[name] for name in ("eval/loss", "eval/accuracy")}
    assert best["eval/loss"].keys() == {"min", "last"}
    assert best["eval/accuracy"].keys() == {"max", "last"}
    assert isinstance(told[1].summary["eval/train_s"], float), "it only grows"
    rows = told[0].table("units")
    assert rows == [list(row) for row in UNITS]
    assert unit_of("train/exposed_s") == "s" and unit_of("memory.gradient_bytes") == "bytes"


def test_wandb_has_a_group_and_tags(told: list[Segment]) -> None:
    for segment in told:
        assert segment.run.run_group == "task=toy co2.tau=3,6"
        assert set(segment.run.tags) == {"toy", "co2", "smoke", "table2", "tau_sweep"}


def test_wandb_has_tables(stopped: Path, told: list[Segment]) -> None:
    final = summary(stopped)
    scores = told[1].table("tables/evaluations")
    assert [row[0] for row in scores] == [4, 8, 12, 16, 20]
    assert scores[-1][1] == pytest.approx(final["final"]["loss"])
    ledger = {name: value for name, value, _ in told[1].table("tables/ledger")}
    assert ledger["memory.extra_bytes"] == final["memory"]["extra_bytes"] > 0
    assert ledger["extra_model_copies"] == 3 and "bytes_per_step" in ledger
    others = {name: (value, unit) for name, value, unit in told[1].table("tables/summary")}
    assert others["exposed_s"] == (pytest.approx(final["exposed_s"]), "s")
    assert told[1].summary["final"]["loss"] == pytest.approx(final["final"]["loss"])


@pytest.mark.parametrize(
    "victim", [pytest.param(0, id="writes"), pytest.param(1, id="does not", marks=pytest.mark.slow)]
)
def test_a_worker_is_lost(tmp_path: Path, victim: int) -> None:
    """W&B is told who is gone, and has a table of it. Where the worker that writes is gone, the
    next one begins a segment of the same W&B run in place of the one that was cut off."""
    arguments = (*ELASTIC, SLOW, *words("co2"), "log.wandb=offline")
    lost = {"at": 32, "victims": (victim,), "number": signal.SIGKILL}
    folder = disturbed(tmp_path, *arguments, **lost).folder
    assert_no_step_is_missing(folder)
    (whole,) = segments(folder)
    assert sorted(set(whole.steps)) == list(range(1, len(metrics(folder, "train")) + 1))
    (change,) = metrics(folder, "members")
    ((step, members, seconds, told),) = whole.table("tables/members")
    assert (step, members, seconds) == (change["step"], 2, pytest.approx(change["seconds"]))
    assert told == f"worker {victim} is lost (gone); 2 train on"
    rows = [row for row in whole.rows if "members/members" in row]
    left = [worker for worker in range(3) if worker != victim]
    assert [(row["step"], row["members/members"]) for row in rows] == [(step, left)]
    assert rows[0]["members/lost"] == {str(victim): "gone"}


@pytest.mark.parametrize(
    ("chosen", "variable", "made"),
    [
        *(("online", variable, variable) for variable in ("disabled", "offline", "online")),
        ("offline", "online", "offline"),
    ],
)
def test_its_own_variable_can_only_make_it_record_less(
    monkeypatch: pytest.MonkeyPatch, chosen: str, variable: str, made: str
) -> None:
    monkeypatch.setenv("WANDB_MODE", variable)
    assert mode(Wandb(chosen)) is Wandb(made)


def test_its_process_ends(tmp_path: Path) -> None:
    with at_step(9, end_wandb):
        assert trained(tmp_path / "runs", *SINKS["W&B"]) == 0
    (whole,) = segments(folder_of(*WORDS, runs=tmp_path / "runs"))
    assert whole.steps == list(range(1, STEPS + 1))


def test_its_process_ends_with_an_error(tmp_path: Path) -> None:
    """W&B would then end ours too; this must not end a training."""
    with patch("wandb.teardown", lambda: sys.exit(2)):
        assert trained(tmp_path, *SINKS["W&B"]) == 0
    text = "W&B: ConnectionError: W&B's own process ended with 2; the run goes on without it"
    assert told_of(tmp_path, "W&B") == [text]


def test_without_the_package_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("co2.record.tensorboard.find_spec", lambda name: None)
    monkeypatch.setattr(Toy, "loss", lambda *_: pytest.fail("it trains"))
    words = ["task=toy", *WORDS, *SINKS["console"], f"runs={tmp_path}"]
    assert refused(train.APP.main, [*words, "log.tensorboard=true"]) == (
        "log.tensorboard=true: needs an extra: pip install -e '.[tensorboard]', or "
        "'co2-suite[tensorboard]' outside a clone"
    )
    assert not list(tmp_path.iterdir())
    assert configured(*WORDS, runs=tmp_path).log.tensorboard is False
    with pytest.raises(ConfigError, match="needs an extra"):
        configured(*WORDS, "log.tensorboard=true", runs=tmp_path)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Four segments: one that is synced, one that is empty, one to sync, one under way."""
    for name, content in (("synced", b"." * 9), ("empty", b"." * 7), ("new", b"." * 9)):
        place = tmp_path / f"toy/co2/tau3/seed0/wandb/offline-run-{name}"
        place.mkdir(parents=True)
        (place / "run-a.wandb").write_bytes(content)
    (tmp_path / "toy/co2/tau3/seed0/wandb/offline-run-synced/run-a.wandb.synced").touch()
    under_way = tmp_path / "toy/co2/tau6/seed0/wandb"
    (under_way / "offline-run-b").mkdir(parents=True)
    (under_way / "offline-run-b/run-b.wandb").write_bytes(b"." * 9)
    state = {"segments": [{"folder": "offline-run-b", "begun": 0, "ended": None}]}
    (under_way / SEGMENTS).write_text(json.dumps(state))
    return tmp_path


def test_what_is_handed_over_to_wandb(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    handed: list[str] = []

    def run(words: list[str], **more: Any) -> Any:
        handed[:] = [Path(word).parent.name for word in words if word.endswith(".wandb")]
        Path(words[-1]).with_suffix(".wandb.synced").touch()
        return type("Ended", (), {"returncode": 0})

    monkeypatch.setattr("co2.record.wandb_sync.subprocess.run", run)
    assert wandb_sync.main([str(runs)]) == 0
    assert handed == ["offline-run-new"]
    said = capsys.readouterr().out
    assert "1 runs are being trained or were cut off" in said and "1 of 1" in said
    assert wandb_sync.main([str(runs)]) == 0
    assert "nothing to sync" in capsys.readouterr().out
    assert wandb_sync.main([str(runs), "--all"]) == 0
    assert handed == ["offline-run-b"]


def test_not_logged_in_to_wandb(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """W&B's own command finds the run's files, and asks for nothing."""
    for name in ("HOME", "NETRC"):
        monkeypatch.setenv(name, str(tmp_path / name))
    assert wandb_sync.main([str(stopped.parent)]) == 1
    ended = capfd.readouterr()
    assert "wandb login" in ended.out + ended.err
    assert "0 of 2 segments are synced" in ended.out


def test_units_name_each_thing_once() -> None:
    assert len({pattern for pattern, *_ in UNITS}) == len(UNITS)
    for index, (pattern, *_) in enumerate(UNITS):
        hidden = [p for p, *_ in UNITS[:index] if fnmatch(pattern.replace("*", "x"), p)]
        assert not hidden, f"{pattern} can never be reached past {hidden}"
