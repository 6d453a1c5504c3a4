"""What a command line composes: as Hydra does, with the defaults of the dataclasses; what
experiments choose; what `--help` says; and a search in place of a grid, hydra/sweeper=optuna."""

import dataclasses
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import train
from co2.app.application import App, objective
from co2.app.compose import composed, plain, preflight, scored_apart
from co2.app.help import sentences
from co2.app.schema import PLAIN
from co2.config import NODES, Optimizer, Validation
from co2.errors import DIVERGED, ConfigError
from co2.randomness import deterministic
from co2.record.console import Outcome, sweep_table
from co2.record.folder import plain_values, run_folder
from co2.record.metrics import Summary, flat
from co2_measure.peers import known_methods
from tasks import TASKS
from tests.cli.harness import ROOT, SMALL, TOY, cli, configured, folders, metrics, pooled, summary
from tests.workers import Pool

CONF = train.APP.conf


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["task=toy"],
        ["task=toy", "method=slowmo", "slowmo.tau=24", "train.seed=3"],
        ["train.seed=3", "task=toy", "co2.gap_penalty=none", "co2.clip=null"],
        ["method=co2", "co2.tau=4", "co2={tau:3}"],
        ["method=co2", "co2={tau:3}", "co2.tau=4"],
        ["optim.betas=[0.8,0.99]", "tag='a, b'", "data.path=null", "runs=elsewhere"],
        ["tag=${task}_${optim.lr}", "optim.lr=2e-3"],
        ["+train.other=1", "++train.another.one=2", "task=toy"],
        ["hydra.job.name=other", "train.steps=7"],
        ["experiment=gpt2_slow_link", "debug=default", "method=slowmo", "train.steps=7"],
    ],
    ids=" ".join,
)
def test_it_is_what_hydra_composes(overrides: list[str]) -> None:
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        expected = plain(compose("config", overrides))
    for _ in range(2):
        found = composed(CONF, overrides)
        assert found == expected
        assert list(found) == list(expected)
        found["train"]["steps"] = -1  # whoever changes it changes no other's


@pytest.mark.parametrize(
    "words", [*([f"task={task}"] for task in TASKS), ["task=resnet50", "scale=paper"]], ids=" ".join
)
def test_a_method_chooses_the_optimizer_that_it_needs(words: list[str]) -> None:
    """Unless somebody has set another: tests/cli/test_bad_input.py."""
    optim = train.APP.planned([*words, "method=demo", "launch.workers=8"]).optim
    assert (optim.name, optim.momentum, optim.nesterov) == (Optimizer.sgd, 0, False)


@pytest.mark.parametrize("method", known_methods())
def test_defaults_are_those_of_the_dataclasses(method: str) -> None:
    found = composed(CONF, ["task=toy", f"method={method}"])
    schemas = {**NODES, "toy": TASKS["toy"].Config, method: known_methods()[method].Config}
    recipe = yaml.safe_load((CONF / "task" / "scale" / "toy_smoke.yaml").read_text())
    recipe["optim"] |= OmegaConf.from_dotlist(list(known_methods()[method].needs)).get("optim", {})
    recipe["data"] = yaml.safe_load((CONF / "scale" / "smoke.yaml").read_text())["data"]
    # What follows from other settings is not there yet: they may be given.
    derived: dict[str, Any] = {"co2_keep": {"fragments": None}}
    for node, kind in schemas.items():
        own = {**plain_values(kind()), **derived.get(node, {}), **recipe.get(node, {})}
        assert found[node] == own, node
    assert found["resume"] == "auto" and found["tag"] is None


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every key that is a path: shells expand none amid a word."""
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["data.root='~/a'", "data.path='~/b'", "init_from='~/c'", "ade20k.weights='~/d'"]
    config = train.APP.config(["task=ade20k", *words, "runs='~/e'"])
    found = config.data.root, config.data.path, config.init_from, config.task_config.weights
    assert [*found, config.runs] == [str(tmp_path / name) for name in "abcde"]


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


TUNED_GPT2 = ("task=gpt2", "tuned=true", "co2.tau=12")
WON = flat(yaml.safe_load((ROOT / "conf/tuned/gpt2/co2.yaml").read_text()))


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
        (TUNED_GPT2, ("gpt2", "co2", WON["optim.lr"], 77, 4, 4, 12, WON["co2.outer_lr"])),
        ((*TUNED_GPT2, "optim.lr=1"), ("gpt2", "co2", 1.0, 77, 4, 4, 12, WON["co2.outer_lr"])),
    ],
)
def test_what_wins(app: App, words: Sequence[str], expected: tuple[object, ...]) -> None:
    assert found(app, *words) == expected


def test_a_wrong_key_of_a_file_is_named(app: App) -> None:
    path = app.conf / "experiment" / "mine.yaml"
    path.write_text(MINE.replace("outer_lr", "outr_lr"))
    with pytest.raises(ConfigError, match=r"^co2\.outr_lr=0\.9: .*did you mean co2\.outer_lr\?"):
        found(app)


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


SCHEMAS = NODES | {name: kind.Config for name, kind in (known_methods() | TASKS).items()}


@pytest.mark.parametrize("node", SCHEMAS)
def test_every_key_has_a_sentence(node: str) -> None:
    meanings = sentences(SCHEMAS[node])
    for field in dataclasses.fields(SCHEMAS[node]):
        text = meanings[field.name]
        assert re.fullmatch(r"[^\n]+\.", text) and "  " not in text, field.name


@pytest.fixture
def helped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", "300")  # lines of more than 100 letters are hard to read
    arguments = ["--help", "task=vit", "method=zero_one_adam", "scale=paper", "log.every=7"]
    assert train.APP.main(arguments) == 0
    return capsys.readouterr().out


def test_every_key_is_told(helped: str) -> None:
    told = re.findall(r"^  (\S+?)=\S.*  \(", helped, re.MULTILINE)
    groups = {"task", "method", "scale"}
    keys = {*PLAIN} - groups
    for node in (*NODES, "vit", "zero_one_adam"):
        keys |= {f"{node}.{field.name}" for field in dataclasses.fields(SCHEMAS[node])}
    assert set(told) == keys and len(told) == len(keys)
    for group in groups:
        assert re.search(rf"^{group}=", helped, re.MULTILINE)
    heads = re.findall(r"^(\w+): ", helped.partition("\nKEYS, ")[2], re.MULTILINE)
    assert {*heads} == {*NODES, "vit", "zero_one_adam"} and heads[:3] == ["train", "optim", "data"]
    assert 90 < max(map(len, helped.splitlines())) <= 100


def test_values_are_those_of_this_choice(helped: str) -> None:
    for line in (
        "launch.backend=auto  (one of auto, gloo, nccl)",
        "vit.size=base  (one of smoke, small, base)",
        "log.every=7  (a whole number, 1 or more)\n      Steps between lines of metrics.jsonl.\n",
        "zero_one_adam.double_every=null  (a whole number, 1 or more, or null)",
        "zero_one_adam.mask_below=0.01  (a finite number, 0 or more)",
        "optim.betas=[0.9, 0.999]  (a list of two numbers, 0 or more and below 1)",
        "train.compile=true  (true or false)",
        "data.path=null  (a text, or null)",
    ):
        assert f"\n  {line}" in helped
    assert "\nmethod=zero_one_adam: " in helped and "\nscale=paper: " in helped


SWEEPER = "hydra/sweeper=optuna"
installed = pytest.mark.skipif(find_spec("optuna") is None, reason="needs the extra: .[optuna]")


@installed
def test_search(tmp_path: Path) -> None:
    """Trials, the best of them, and the table; the same command makes the same trials."""
    runs = tmp_path / "runs"
    words = ["-m", SWEEPER, "launch.workers=1", "train.steps=12", "method=co2", "co2.tau=3"]
    words += ["hydra.sweeper.n_jobs=1"]
    words += ["co2.outer_lr=interval(0.3,1.5)", "co2.outer_momentum=0.1,0.5", "train.seed=0"]
    ended = cli(*words, "hydra.sweeper.n_trials=2", runs=runs)
    assert len(folders(runs)) == 2

    ended = cli(*words, "hydra.sweeper.n_trials=3", runs=runs)
    assert ended.out.count("finished already") == 2
    assert len(folders(runs)) == 3
    table = ended.out[ended.out.index("sweep: ") :]
    finals = {}
    for folder in folders(runs):
        values = yaml.safe_load((folder / "config.yaml").read_text())
        assert values["data"]["validation"] == "tuning", "what is reported chooses nothing"
        config = values["co2"]
        assert 0.3 <= config["outer_lr"] <= 1.5 and config["outer_momentum"] in (0.1, 0.5)
        assert config["tau"] == 3 and summary(folder)["steps"] == 12
        finals[summary(folder)["final"]["loss"]] = config
    best = min(finals)
    assert table.count("│ co2.outer_lr=") == 3
    lowest = f"lowest validation loss: {best:.4f} with co2.outer_lr={finals[best]['outer_lr']} "
    assert lowest in table
    assert table.endswith(", scored on data.validation=tuning\n")
    found = yaml.safe_load((runs / ".multirun" / "optimization_results.yaml").read_text())
    assert found["best_value"] == best
    assert found["best_params"]["co2.outer_lr"] == finals[best]["outer_lr"]


def test_a_search_takes_other_data_where_they_are_named() -> None:
    tuning = "data.validation=tuning"
    assert scored_apart([SWEEPER, "-m"]) == [tuning, SWEEPER, "-m"]
    for words in (["-m", SWEEPER, "data.validation=all"], ["-m", "co2.tau=1,3"]):
        assert scored_apart(words) == words


def test_what_a_search_makes_small() -> None:
    assert objective(0, finished("toy", {"loss": 0.5, "accuracy": 1.0})) == 0.5
    assert objective(0, finished("toy", {"loss": None})) == math.inf
    assert objective(DIVERGED, None) == math.inf, "a bad place, and worth knowing"
    assert objective(1, None) is None


@installed
@pytest.mark.parametrize(
    "value", ["interval(0.1,1.5)", "choice(0.5,1.0)", "tag(log,interval(1,2))"]
)
def test_the_ends_are_checked_before_anything_starts(value: str) -> None:
    words = ["-m", *TOY, "method=co2", SWEEPER, f"co2.outer_momentum={value}"]
    with pytest.raises(ConfigError, match=r"co2\.outer_momentum=(1|1\.0|1\.5): "):
        preflight(train.APP.conf, words, train.APP.validate)


@pytest.mark.parametrize(
    ("plugin", "own"), [("sweeper=optuna", "optuna"), ("launcher=submitit_slurm", "slurm")]
)
def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, plugin: str, own: str) -> None:
    monkeypatch.setattr("co2.app.compose.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"{plugin}: .*\.\[{own}\]"):
        preflight(train.APP.conf, ["-m", *TOY, f"hydra/{plugin}"], lambda *job: None)


def test_without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("co2.app.compose.find_spec", lambda name: True)
    monkeypatch.setattr("co2.app.compose.shutil.which", lambda name: None)
    with pytest.raises(ConfigError, match="launcher=submitit_slurm: there is no sbatch here"):
        preflight(train.APP.conf, ["-m", *TOY, "hydra/launcher=submitit_slurm"], lambda *job: None)


class FailedJobError(RuntimeError):
    """As submitit's."""


def test_a_job_that_slurm_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refuse(**_: object) -> Any:
        raise FailedJobError("sbatch: error: invalid partition specified: gpu")

    monkeypatch.setattr("co2.app.application.hydra.main", refuse)
    words = ["-m", *TOY, "method=allreduce", f"runs={tmp_path}", "hydra.verbose=false"]
    assert train.APP.main(words) == 2
    said = capsys.readouterr().err
    assert "error: hydra/launcher=submitit_slurm: sbatch: error: invalid partition" in said


def finished(task: str, final: dict[str, float | None]) -> Summary:
    """A summary of which only the final metrics matter here."""
    figures: dict[str, Any] = {
        field.name: "" if field.type is str else None for field in dataclasses.fields(Summary)
    }
    return Summary(**{**figures, "task": task, "final": final, "throughput": 1.0, "own": {}})


def outcome(
    task: str, *overrides: str, loss: float, validation: Validation = Validation.report
) -> Outcome:
    words = (f"task={task}", *overrides)
    return Outcome(words, 0, finished(task, {"loss": loss}), validation)


def test_the_best_of_a_sweep() -> None:
    worse, best = (outcome("toy", f"co2.tau={loss}", loss=loss) for loss in (0.5, 0.25))
    failed = Outcome(("task=toy", "co2.tau=9"), 1, None, Validation.all)
    told = "lowest validation loss: 0.2500 with co2.tau=0.25, scored on data.validation=report"
    assert told in sweep_table([worse, failed, best])
    other = outcome("toy", loss=0.1, validation=Validation.tuning)
    for others in ([best], [worse, outcome("gpt2", loss=0.1)], [failed, best], [worse, other]):
        assert "lowest" not in sweep_table(others), "nothing to compare with"
