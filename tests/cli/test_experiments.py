"""`experiment=NAME` and `debug=default`: what they choose, what wins over what; they train."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml

import train
from co2.app.application import App
from co2.config import Config
from co2.errors import ConfigError
from co2.randomness import deterministic
from co2.record.folder import run_folder
from tests.cli.harness import ROOT, SMALL, configured, metrics, pooled, tasks_at
from tests.docs.commands import NotInstalled, check
from tests.workers import Pool

FOLDER = ROOT / "conf" / "experiment"
EXPERIMENTS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
MINE = """\
# @package _global_
defaults:
  - override /task: toy
  - override /method: co2
optim: {lr: 0.5}
train: {steps: 77, batch_size: 4}
launch: {workers: 4}
co2: {tau: 7, outer_lr: 0.9}
"""


def head(path: Path) -> str:
    """The comment that a file begins with, without its first line, which is Hydra's."""
    first, *lines = path.read_text().splitlines()
    assert first == "# @package _global_"
    return "\n".join(line for line in lines if line.startswith("#"))


def test_there_are_four() -> None:
    assert len(EXPERIMENTS) == 4


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_its_head_says_how_and_what(name: str) -> None:
    text = head(FOLDER / f"{name}.yaml")
    assert text.startswith(f"# python train.py experiment={name}\n")
    assert "\n# Cost: " in text and "\n# Look at " in text
    joined = re.sub(r"\\\n# +", "", text)
    for command in re.findall(r"^# +((?:python|sudo|torchrun) .*)$", joined, re.MULTILINE):
        try:
            check(command)
        except NotInstalled:
            continue


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_it_chooses(name: str, tmp_path: Path) -> None:
    """All that the file says, and a folder that is named by it."""
    values = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    chosen: dict[str, str] = {}
    for entry in values.pop("defaults"):
        chosen |= {key.removeprefix("override /"): value for key, value in entry.items()}
    config = configured(f"experiment={name}", "task=" + chosen["task"], runs=tmp_path)
    assert (config.task, config.method) == (chosen["task"], chosen["method"])
    for node, keys in values.items():
        found = config.method_config if node == config.method else getattr(config, node)
        assert {key: getattr(found, key) for key in keys} == keys
    assert name in run_folder(config).parent.name
    assert ("tuned" in config.tag) == (chosen.get("tuned") == "true")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_it_trains(workers: Pool, tmp_path: Path, root: Path, text: Path, name: str) -> None:
    """Three steps, at a τ of 1, for which nothing is tuned."""
    chosen = configured(f"experiment={name}", "task=" + name.partition("_")[0], runs=tmp_path)
    short = (f"{chosen.method}.tau=1", "tuned=false", "train.steps=3", "log.every=1")
    own = (f"task={chosen.task}", f"data.root={root}", *SMALL.get(chosen.task, ()))
    on_text = () if chosen.task == "resnet50" else (f"data.path={text}",)
    words = (f"experiment={name}", *own, *on_text, *short)
    run = pooled(workers, 2, *words, runs=tmp_path / "runs")
    assert run.status == 0, run.err
    lines = metrics(run.folder, "train")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert sum(line["bytes"] for line in lines) > 0


@pytest.fixture
def app(tmp_path: Path) -> App:
    """With an experiment `mine`."""
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(MINE)
    return replace(train.APP, conf=tmp_path / "conf")


def found(app: App, *words: str) -> tuple[object, ...]:
    config = app.config(["launch.backend=gloo", "experiment=mine", *words])
    own = config.method_config
    train, lr, workers = config.train, config.optim.lr, config.launch.workers
    tau, outer_lr = (getattr(own, name, None) for name in ("tau", "outer_lr"))
    return (config.task, config.method, lr, train.steps, train.batch_size, workers, tau, outer_lr)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ("toy", "co2", 0.5, 77, 4, 4, 7, 0.9)),
        # The command line wins over the experiment, wherever it stands.
        (("train.steps=5", "co2.tau=2"), ("toy", "co2", 0.5, 5, 4, 4, 2, 0.9)),
        (("launch={workers:1}",), ("toy", "co2", 0.5, 77, 4, 1, 7, 0.9)),
        # What it sets of a method or task that is not chosen then is gone.
        (("method=slowmo",), ("toy", "slowmo", 0.5, 77, 4, 4, 12, 1.0)),
        (("method=allreduce",), ("toy", "allreduce", 0.5, 77, 4, 4, None, None)),
        # It wins over the scale, whose recipe has other steps and rates.
        (("task=gpt2",), ("gpt2", "co2", 0.5, 77, 4, 4, 7, 0.9)),
        (("task=gpt2", "scale=gpu"), ("gpt2", "co2", 0.5, 77, 4, 4, 7, 0.9)),
        # Debugging wins over it, and loses to the command line.
        (("debug=default",), ("toy", "co2", 0.5, 2, 4, 1, 7, 0.9)),
        (("debug=default", "launch.workers=2"), ("toy", "co2", 0.5, 2, 4, 2, 7, 0.9)),
        # Settings that were tuned win over it, as over every recipe.
        (("task=gpt2", "tuned=true", "co2.tau=12"), ("gpt2", "co2", 0.01131, 77, 4, 4, 12, 0.7)),
        (
            ("task=gpt2", "tuned=true", "co2.tau=12", "optim.lr=1"),
            ("gpt2", "co2", 1.0, 77, 4, 4, 12, 0.7),
        ),
    ],
)
def test_what_wins(app: App, words: Sequence[str], expected: tuple[object, ...]) -> None:
    assert found(app, *words) == expected


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("experiment=gpt2_slow_lnk",), "experiment=gpt2_slow_lnk: no such option; did you mean "),
        (("experiment=gpt2/slow",), "experiment=gpt2/slow: did you mean gpt2_slow_link?"),
        (("debug=deflt",), "debug=deflt: no such option; did you mean default?"),
        (
            ("experiment=gpt2_slow_link", "method=slowmo", "co2.tau=3"),
            "co2.tau=3: there is no co2 here; did you mean slowmo.tau?",
        ),
        (("experiment=resnet50_sgd", "slowmo.tau=5"), "tuned=true: task=resnet50 method=slowmo "),
    ],
)
def test_refused(words: Sequence[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    for sweep in ((), ("-m",)):
        assert train.APP.main([*sweep, *words]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith(f"error: {line}") and printed.count("\n") == 1


def test_a_wrong_key_of_a_file_is_named(app: App) -> None:
    path = app.conf / "experiment" / "mine.yaml"
    path.write_text(MINE.replace("outer_lr", "outr_lr"))
    with pytest.raises(ConfigError, match=r"^co2\.outr_lr=0\.9: .*did you mean co2\.outer_lr\?"):
        found(app)


def test_what_to_try_next(app: App) -> None:
    words = ["launch.backend=gloo", "experiment=mine", "co2.tau=3", "train.steps=5"]
    line = train.APP.next_command(app.config(words), ["experiment=gpt2_slow_link", *words[2:]])
    assert line is not None
    assert line.endswith(" experiment=gpt2_slow_link train.steps=5 method=allreduce")


def test_debugging(tmp_path: Path) -> None:
    """Two steps, of which nothing large is left."""
    words = ("+debug=default", "co2.tau=1")
    config = configured(*words, runs=tmp_path)
    assert config == configured("debug=default", "co2.tau=1", runs=tmp_path)
    train.APP.work(config)
    folder = run_folder(config)
    assert folder == tmp_path / "toy" / "co2" / "tau1" / "seed0"
    assert [line["step"] for line in metrics(folder, "train")] == [1, 2]
    left = {path.name for path in folder.iterdir()} - {".lock"}
    assert left == {"config.yaml", "manifest.json", "metrics.jsonl", "summary.json"}


def test_its_folder_is_no_table_s() -> None:
    config = train.APP.config(["task=toy", "debug=default", "launch.backend=gloo"])
    assert run_folder(config).parts[-5:] == ("debug", "toy", "co2", "default", "seed0")


@pytest.mark.parametrize(
    ("task", "scale"),
    [(task, scale) for scale in ("smoke", "gpu", "paper") for task in tasks_at(scale)],
)
def test_every_recipe_can_be_debugged(task: str, scale: str, tmp_path: Path) -> None:
    words = (f"task={task}", f"scale={scale}", "debug=default", "train.precision=fp32")
    config: Config = configured(*words, runs=tmp_path)
    made = config.train.steps, config.train.accumulate, config.launch.workers
    assert made == (2, 1, 1) and not config.train.compile


def test_deterministic_algorithms_are_for_the_run_alone(tmp_path: Path) -> None:
    words = ("debug=default", "log.wandb=disabled")
    seen = []
    with patch("torch.use_deterministic_algorithms", lambda on, **_: seen.append(on)):
        train.APP.work(configured(*words, runs=tmp_path / "on"))
        train.APP.work(configured(*words, "train.deterministic=false", runs=tmp_path / "off"))
    assert seen == [True, False]
    with deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
