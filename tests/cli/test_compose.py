"""What is composed is what Hydra composes, and the defaults in it are those of the dataclasses."""

from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import train
from co2.app.compose import composed, plain
from co2.config import NODES, Optimizer
from co2.errors import ConfigError
from co2.record.folder import plain_values
from co2_measure.peers import known_methods
from tasks import TASKS

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
    for node, kind in schemas.items():
        assert found[node] == {**plain_values(kind()), **recipe.get(node, {})}, node
    assert found["resume"] == "auto" and found["tag"] is None


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("co2.tau=1,2", r"^co2\.tau=1,2: several values; add -m"),
        ("~co2.tau", r"^co2\.tau=: is needed"),
        ("method=none", r"^method=none: no such option; "),
        ("method=[co2]", r"^method=\[co2\]: did you mean co2\?"),
        ("method@x=co2", "Could not override 'method@x'"),
        ("hydra.launcher.nope=3", "Could not override 'hydra.launcher.nope'"),
        ("co2.tau=[", "co2\\.tau=\\[: "),
    ],
)
def test_what_is_wrong_is_said_both_times(word: str, line: str) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match=line):
            composed(CONF, ["task=toy", word])


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every key that is a path: shells expand none amid a word."""
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["data.root='~/a'", "data.path='~/b'", "init_from='~/c'", "ade20k.weights='~/d'"]
    config = train.APP.config(["task=ade20k", *words, "runs='~/e'"])
    found = config.data.root, config.data.path, config.init_from, config.task_config.weights
    assert [*found, config.runs] == [str(tmp_path / name) for name in "abcde"]
