"""The rehearsal of published recipes, and their golden losses."""

import json
from pathlib import Path

import pytest

from recipes.rehearse import __main__ as rehearsal
from recipes.rehearse import golden
from recipes.rehearse.__main__ import METHODS, REHEARSALS, Implausible, command, main
from recipes.runs.cells import composed_config
from tasks import TASKS
from tests.cli.harness import tasks_at


def test_no_recipe_is_forgotten() -> None:
    assert REHEARSALS.keys() == {*tasks_at("paper")}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("task", REHEARSALS)
def test_every_command_is_the_published_recipe(task: str, method: str, tmp_path: Path) -> None:
    words = tuple(command(task, method, tmp_path, []))
    config = composed_config(words)
    assert (config.scale, config.train.steps, config.method) == ("paper", 3, method)
    assert config.train.accumulate == 1
    golden_words = tuple(command(task, method, tmp_path, golden.SETTINGS))
    assert composed_config(golden_words).train.steps == golden.STEPS


def test_a_small_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["task=graph", "method=co2"]) == 0
    out = capsys.readouterr().out
    assert "resumed same" in out and out.endswith("1 of 1 went well\n")


@pytest.mark.parametrize(
    ("first", "third", "again", "line"),
    [
        (5.2, 5.1, 5.1, ""),
        (7.2, 5.1, 5.1, "the first loss is 7.20, that of guessing is 5.15"),
        (5.2, float("nan"), 5.1, "the third loss is nan"),
        (5.2, 5.1, 5.0999999, "the third step has loss 5.1, resumed 5.0999999"),
    ],
)
def test_what_is_not_plausible(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: float,
    third: float,
    again: float,
    line: str,
) -> None:
    curves = iter([[first, 5.15, third], [again]])

    def trained(words: list[str], folder: Path) -> Path:
        run = tmp_path / "runs" / "run"
        (run / "checkpoints" / "step_3").mkdir(parents=True, exist_ok=True)
        told = {
            "final": {"loss": 5.0},
            "memory": {"parameter_bytes": 4e6},
            "workers": 2,
            "peak_memory_bytes": 2**30,
        }
        (run / "summary.json").write_text(json.dumps(told))
        return run

    monkeypatch.setattr(rehearsal, "trained", trained)
    monkeypatch.setattr(rehearsal, "losses", lambda run: next(curves))
    if not line:
        assert rehearsal.rehearse("graph", "co2", tmp_path, [])["resumed"] == "same"
        return
    with pytest.raises(Implausible) as wrong:
        rehearsal.rehearse("graph", "co2", tmp_path, [])
    assert str(wrong.value) == line


def test_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["task=grpah"]) == 2
    assert "task=grpah: choose of resnet50" in capsys.readouterr().err
    assert main(["graph"]) == 2


def test_what_differs() -> None:
    assert golden.differs([6.9, 6.8], [6.9001, 6.8], golden.SAME) == ""
    line = golden.differs([6.9, 6.8], [6.9, 6.9], golden.SAME)
    assert line == "loss 2 is 6.900000, 6.800000 before"
    assert golden.differs([6.9], [float("nan")], golden.OTHER)


def test_what_was_never_written_cannot_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(golden, "FILE", tmp_path / "golden.json")
    assert golden.main(["task=vit"]) == 2
    said = f"golden.json has no losses of vit, version {TASKS['vit'].version}; write them: "
    assert said in capsys.readouterr().err
