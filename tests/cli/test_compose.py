"""What is composed from options of groups that were composed before is what Hydra composes."""

import shutil
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import train
from co2.app.compose import composed, plain
from co2.errors import ConfigError

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
        ["+train.other=1", "~log.every", "task=toy"],
        ["hydra.job.name=other", "train.steps=7"],
    ],
    ids=" ".join,
)
def test_it_is_what_hydra_composes(overrides: list[str]) -> None:
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        expected = plain(compose("config", overrides))
    for _ in range(2):
        found = composed(CONF, "config", overrides)
        assert found == expected
        assert list(found) == list(expected)
        found["train"]["steps"] = -1  # whoever changes it changes no other's


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    conf = tmp_path / "conf"
    shutil.copytree(CONF, conf)
    assert composed(conf, "config", ["task=toy"])["launch"]["workers"] == 2
    file = conf / "config.yaml"
    file.write_text(file.read_text().replace("workers: 2 #", "workers: 3 #"))
    assert composed(conf, "config", ["task=toy"])["launch"]["workers"] == 3


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("co2.tua=3", r"^co2\.tua=3: unknown key; did you mean co2\.tau"),
        ("co2.tau=1,2", "Ambiguous value"),
        ("method=none", r"^method=none: "),
        ("co2.tau=[", "[Mm]ismatched|no viable|expecting"),
    ],
)
def test_what_is_wrong_is_said_both_times(word: str, line: str) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match=line):
            composed(CONF, "config", ["task=toy", word])


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every key that is a path: shells expand none amid a word."""
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["data.root='~/a'", "data.path='~/b'", "init_from='~/c'", "ade20k.weights='~/d'"]
    config = train.APP.config(["task=ade20k", *words, "runs='~/e'"])
    found = config.data.root, config.data.path, config.init_from, config.task_config.weights
    assert [*found, config.runs] == [str(tmp_path / name) for name in "abcde"]
