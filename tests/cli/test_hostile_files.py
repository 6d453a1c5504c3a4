"""Folders of runs, weights and configurations that are damaged or hostile.

Nothing in them is run, nothing is written, and what is said of them is one line.
"""

import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import train
from co2.record.folder import plain, run_folder
from co2.start import launch
from tests.cli.harness import TOY, configured
from tests.cli.refused import MARK, Payload, files, pickled, refused, tagged
from tests.grids import first_of_each

Spoil = Callable[[Path], object]
DEEP = "[" * 100_000
"""JSON that exhausts the reader's stack."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, in which no worker is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "run", lambda *_: pytest.fail("workers were started"))
    return tmp_path


def test_the_payloads_work(tmp_path: Path) -> None:
    """Or the tests below would prove nothing: who loads them without care runs them."""
    pickle.loads(pickled(tmp_path))
    assert (tmp_path / MARK).exists()
    (tmp_path / MARK).rmdir()
    yaml.load(tagged(tmp_path), yaml.UnsafeLoader)
    assert (tmp_path / MARK).exists()


@pytest.fixture
def run(here: Path) -> Path:
    """The folder of a run that has begun, as far as a start looks at it."""
    config = configured("method=co2", runs=here / "runs")
    folder = run_folder(config)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(plain(config, 2)))
    (folder / "manifest.json").write_text('{"data": {}}')
    return folder


def text(name: str, make: Callable[[Path], str] | str) -> Spoil:
    """Another text in a file of the run's folder."""

    def spoil(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(make if isinstance(make, str) else make(Path.cwd()))

    return spoil


def a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("no folder")


SAVED = "checkpoints/step_2/manifest.json"
RUNS: dict[str, tuple[Spoil, str]] = {
    "config with code": (text("config.yaml", tagged), "config.yaml is damaged"),
    "config with code in a value": (
        text("config.yaml", lambda here: f"train:\n  steps: {tagged(here)}"),
        "config.yaml is damaged",
    ),
    "config that is a list": (text("config.yaml", "[1, 2]"), "config.yaml is damaged"),
    "config that is empty": (text("config.yaml", ""), "config.yaml is damaged"),
    "config that is torn": (text("config.yaml", "train: {steps:"), "config.yaml is damaged"),
    "config that is deep": (text("config.yaml", DEEP), "config.yaml is damaged"),
    "config of another run": (text("config.yaml", "co2: {tau: 99}"), "holds a run with"),
    "config that is no text": (
        lambda folder: (folder / "config.yaml").write_bytes(b"\xff\0"),
        "config.yaml is damaged",
    ),
    "summary that is torn": (text("summary.json", '{"title": '), "summary.json is damaged"),
    "summary that is a list": (text("summary.json", "[]"), "summary.json is damaged"),
    "summary without figures": (text("summary.json", "{}"), "summary.json is damaged"),
    "summary that is deep": (text("summary.json", DEEP), "summary.json is damaged"),
    "format of the past": (text(SAVED, '{"format": 1}'), "another version"),
    "format of the future": (text(SAVED, '{"format": 99}'), "another version"),
    "no format": (text(SAVED, "{}"), "another version"),
}


@pytest.mark.parametrize("kind", first_of_each(RUNS, lambda kind: RUNS[kind][1]))
def test_run_folder(run: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    spoil, says = RUNS[kind]
    spoil(run)
    here = Path.cwd()
    before = files(here)
    words = [*TOY, "method=co2", f"runs={here / 'runs'}"]
    assert says in refused(train.APP.main, words, capsys)
    assert files(here) == before and MARK not in before


@pytest.fixture
def start(here: Path) -> Path:
    """A finished run of the toy, as far as `init_from` looks at it."""
    folder = here / "start"
    folder.mkdir()
    config = configured("method=co2", runs=here / "runs")
    torch.save(train.APP.make_task(config).model().state_dict(), folder / "model.pt")
    (folder / "config.yaml").write_text(yaml.safe_dump(plain(config, 2)))
    (folder / "manifest.json").write_text('{"data": {}}')
    (folder / "summary.json").write_text("{}")
    return folder


def model(change: Callable[[dict[str, Any], Path], object]) -> Spoil:
    """Other weights."""

    def spoil(folder: Path) -> None:
        weights = torch.load(folder / "model.pt", weights_only=True)
        torch.save(change(weights, folder.parent) or weights, folder / "model.pt")

    return spoil


def first(weights: dict[str, Any], value: float | None = None) -> str:
    """The name of the first weight, which gets a value in one place."""
    name = next(iter(weights))
    if value is not None:
        weights[name].view(-1)[-1] = value
    return name


def gone(folder: Path) -> None:
    shutil.rmtree(folder)


STARTS: dict[str, tuple[Spoil, str]] = {
    "no folder": (gone, "no such folder"),
    "a file": (a_file, "no such folder"),
    "no finished run": (lambda f: (f / "summary.json").unlink(), "no summary.json"),
    "no weights": (lambda f: (f / "model.pt").unlink(), "no model.pt"),
    "a payload": (model(lambda w, here: Payload(here)), "model.pt cannot be read"),
    "a payload amid the weights": (
        model(lambda w, here: w.update(more=Payload(here))),
        "model.pt cannot be read",
    ),
    "a bare pickle": (
        lambda f: (f / "model.pt").write_bytes(pickled(f.parent)),
        "model.pt cannot be read",
    ),
    "cut": (
        lambda f: (f / "model.pt").write_bytes((f / "model.pt").read_bytes()[:-99]),
        "model.pt cannot be read",
    ),
    "empty": (lambda f: (f / "model.pt").write_bytes(b""), "model.pt cannot be read"),
    "a list": (model(lambda w, _: list(w.values())), "holds no weights by name"),
    "a number among them": (model(lambda w, _: w.update(more=3)), "holds no weights by name"),
    "NaN": (model(lambda w, _: first(w, float("nan")) and None), "is not finite"),
    "infinity": (model(lambda w, _: first(w, float("-inf")) and None), "is not finite"),
    "another shape": (
        model(lambda w, _: w.update({first(w): torch.zeros(3, 3, 3)})),
        "has the shape (3, 3, 3) there",
    ),
    "one is missing": (model(lambda w, _: w.pop(first(w)) is None or w), "the shape none there"),
    "one too many": (model(lambda w, _: w.update(more=torch.zeros(2))), "and none here"),
    "config with code": (text("config.yaml", tagged), "missing or damaged"),
    "config of another task": (text("config.yaml", "task: gpt2"), "is a run of task=gpt2"),
    "config that is a number": (text("config.yaml", "7"), "missing or damaged"),
    "manifest that is torn": (text("manifest.json", '{"data"'), "missing or damaged"),
    "manifest that is deep": (text("manifest.json", DEEP), "missing or damaged"),
    "manifest without data": (text("manifest.json", "{}"), "missing or damaged"),
}


@pytest.mark.parametrize("kind", first_of_each(STARTS, lambda kind: STARTS[kind][1]))
def test_init_from(start: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    spoil, says = STARTS[kind]
    spoil(start)
    before = files(start.parent)
    words = [*TOY, "method=co2", f"runs={start.parent / 'runs'}", f"init_from={start}"]
    line = refused(train.APP.main, words, capsys)
    assert line.startswith(f"init_from={start}: ") and says in line
    assert files(start.parent) == before and MARK not in before


def test_init_from_a_sound_run(start: Path) -> None:
    config = configured("method=co2", f"init_from={start}", runs=start.parent / "runs")
    train.APP.prepare_data(config)


CONFIGURATIONS: dict[str, tuple[str, Callable[[Path], str], str]] = {
    "code in a task": (
        "task/scale/toy_smoke.yaml",
        lambda here: f"toy: {tagged(here)}",
        "smoke.yaml, line",
    ),
    "code in the root": ("config.yaml", tagged, "config.yaml, line"),
    "code in tuned settings": ("tuned/toy/co2.yaml", tagged, "co2.yaml, line 1"),
    "torn tuned settings": ("tuned/toy/co2.yaml", lambda _: "co2: {tau:", "tuned=true"),
    "an unknown tuned key": ("tuned/toy/co2.yaml", lambda _: "co2: {tua: 3}", "co2.tua=3"),
    "a wrong tuned value": ("tuned/toy/co2.yaml", lambda _: "co2: {outer_lr: x}", "co2.outer_lr"),
    "interpolation in tuned settings": (
        "tuned/toy/co2.yaml",
        lambda _: "co2: {outer_lr: '${oc.env:HOME}'}",
        "co2.outer_lr=${oc.env:HOME}: must be a finite number",
    ),
    "a target in tuned settings": (
        "tuned/toy/co2.yaml",
        lambda here: f"co2: {{_target_: os.mkdir, _args_: ['{here / MARK}']}}",
        "co2._target_=os.mkdir",
    ),
    "a target in a task": (
        "task/scale/toy_smoke.yaml",
        lambda _: "# @package _global_\ntoy: {_target_: os.mkdir}",
        "toy._target_=os.mkdir",
    ),
}


@pytest.mark.parametrize(
    "kind", first_of_each(CONFIGURATIONS, lambda kind: CONFIGURATIONS[kind][0])
)
def test_configuration(here: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    name, make, says = CONFIGURATIONS[kind]
    conf = shutil.copytree(train.APP.conf, here / "conf")
    (conf / name).parent.mkdir(exist_ok=True)
    (conf / name).write_text(make(here))
    before = files(here)
    app = replace(train.APP, conf=conf)
    words = ["task=toy", "method=co2", *(["tuned=true"] if name.startswith("tuned") else [])]
    assert says in refused(app.main, words, capsys)
    assert files(here) == before and MARK not in before
