"""`train.py --help`: the groups and their options, then every key with value, type and sentence."""

import dataclasses
import re

import pytest

import train
from co2.app.help import sentences
from co2.app.schema import PLAIN
from co2.config import NODES
from co2_measure.peers import known_methods
from tasks import TASKS

SCHEMAS = {
    **NODES,
    **{name: kind.Config for name, kind in (known_methods() | TASKS).items()},
}


@pytest.mark.parametrize("node", SCHEMAS)
def test_every_key_has_a_sentence(node: str) -> None:
    meanings = sentences(SCHEMAS[node])
    for field in dataclasses.fields(SCHEMAS[node]):
        text = meanings[field.name]
        assert re.fullmatch(r"[^\n]+\.", text) and "  " not in text, field.name


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", "300")  # lines of more than 100 letters are hard to read
    arguments = ["--help", "task=vit", "method=zero_one_adam", "scale=paper", "log.every=7"]
    assert train.APP.main(arguments) == 0
    return capsys.readouterr().out


def test_every_key_is_told(text: str) -> None:
    told = re.findall(r"^  (\S+?)=\S.*  \(", text, re.MULTILINE)
    groups = {"task", "method", "scale"}
    keys = {*PLAIN} - groups
    for node in (*NODES, "vit", "zero_one_adam"):
        keys |= {f"{node}.{field.name}" for field in dataclasses.fields(SCHEMAS[node])}
    assert set(told) == keys and len(told) == len(keys)
    for group in groups:
        assert re.search(rf"^{group}=", text, re.MULTILINE)
    heads = re.findall(r"^(\w+): ", text.partition("\nKEYS, ")[2], re.MULTILINE)
    assert {*heads} == {*NODES, "vit", "zero_one_adam"} and heads[:3] == ["train", "optim", "data"]
    assert 90 < max(map(len, text.splitlines())) <= 100


def test_every_option_is_told(text: str) -> None:
    options = dict(re.findall(r"^  (\w+)  +(\S.*)$", text.partition("\nKEYS, ")[0], re.MULTILINE))
    groups = {*TASKS, *known_methods(), "gpu", "liu", "paper", "smoke", "false", "true"}
    groups |= {path.stem for path in train.APP.conf.glob("experiment/*.yaml")} | {"default"}
    assert {*options} == groups | {"basic", "optuna", "submitit_slurm"}
    assert options["gpt2"] == "GPT-2 from scratch: next-token prediction on text."
    assert options["liu"].startswith("Of task=roberta alone: the recipe of Liu et al.")
    assert all(re.fullmatch(r"[A-Z0-9t].*", told) for told in options.values()), "torchft's"


@pytest.mark.parametrize(("columns", "widest"), [(70, 70), (20, 60)])
def test_lines_fit_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int, widest: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert train.APP.main(["--help"]) == 0
    lines = capsys.readouterr().out.partition("GROUPS, ")[2].splitlines()
    assert widest - 10 < max(map(len, lines)) <= widest


def test_values_are_those_of_this_choice(text: str) -> None:
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
        assert f"\n  {line}" in text
    assert "\nmethod=zero_one_adam: " in text and "\nscale=paper: " in text


def test_a_choice_that_there_is_not_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.APP.main(["--help", "method=slomo"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: method=slomo: no such option; did")
    assert len(printed.err.splitlines()) == 1
