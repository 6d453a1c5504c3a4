"""Whether code of before fingerprints trains as today's: which commands are alike, how losses are
compared, and the training by a commit's own code."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from recipes.runs import retrace
from recipes.runs.retrace import Alike, Losses, Words
from train import APP

TOY = ("task=toy", "scale=smoke", "method=co2")
NO_COMMIT = "this tree has no commit"
HEAD = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()


def line(command: str, commit: str = HEAD, **own: str) -> dict[str, str]:
    return {"commit": commit, "fingerprint": "", "command": f"python train.py {command}", **own}


def groups(*lines: dict[str, str]) -> list[Alike]:
    return retrace.alike((one, retrace._words(one["command"])) for one in lines)


def test_commands_that_differ_in_numbers_of_their_schedule_seed_or_method_are_alike() -> None:
    own = ("train.seed=1 co2.tau=3", "train.seed=2 co2.tau=3", "train.seed=1 co2.tau=6")
    others = ("train.seed=1", f"{own[0]} launch.workers=4", f"{own[0]} co2.gap_penalty=gap_aware")
    off = [f"{own[0]} co2.outer_momentum={value}" for value in ("0.2", "0.5", "0.0")]
    lines = [line(" ".join((*TOY, words))) for words in (*own, *others, *off)]
    assert [len(group.lines) for group in groups(*lines)] == [3, 1, 1, 1, 2, 1]


def test_what_was_tuned_stands_in_the_place_of_tuned() -> None:
    words = retrace._words("python train.py task=toy tuned=true  # optim.lr=0.2 co2.outer_lr=1")
    assert words == ("task=toy", "optim.lr=0.2", "co2.outer_lr=1")
    assert retrace._words("python -m recipes run digits") == ()
    assert retrace._words("python train.py task=glue init_from=somewhere") == ()


@pytest.mark.skipif(not HEAD, reason=NO_COMMIT)
def test_what_has_a_fingerprint_or_no_commit_is_left_out() -> None:
    words = " ".join(TOY)
    known = line(words, fingerprint="task 1 method 1")
    assert groups(known, line(words, f"{HEAD}-dirty"), line(words, "0" * 40)) == []


def test_a_command_is_cut_to_two_rounds() -> None:
    given = (*TOY, "co2.tau=48", "train.steps=900", "optim.warmup_steps=90", "runs=a", "optim.lr=1")
    assert retrace.shortened(given) == (
        *(*TOY, "co2.tau=48", "optim.lr=1", "train.steps=96", "train.eval_every=96"),
        *("optim.warmup_steps=4", "checkpoint.every=0", "log.wandb=disabled"),
    )
    assert "train.steps=36" in retrace.shortened(TOY)


def test_only_what_comes_out_alike_has_a_fingerprint() -> None:
    """A command that today's code has trained is not trained again."""
    names = ("a", "b", "c", "d")
    lines = {name: line(name) for name in names}
    found = [Alike("abc", (*TOY, f"tag={name}"), [lines[name]]) for name in names]
    then = {"a": 2.0, "b": 2.0, "c": None, "d": 3.0}
    now = {"a": 2.0 + 1e-6, "b": 2.0 + 1e-4, "c": 2.0}
    asked = []

    def train(commit: str | None, commands: Sequence[Words]) -> Losses:
        asked.append((commit, len(commands)))
        known = then if commit else now
        return [known[words[-1].removeprefix("tag=")] for words in commands]

    known: dict[Words, float | None] = {found[3].words: 3.0}
    rows = retrace.compared(found, train, known, "today")
    assert [row[-1] for row in rows] == ["same", "differs", "refused or failed", "same"]
    assert asked == [("abc", 4), (None, 3)]
    assert [own["fingerprint"] for own in lines.values()] == [
        *("task 1 method 1 retraced today", "", "", "task 1 method 1 retraced today")
    ]


@pytest.mark.slow  # starts interpreters
@pytest.mark.skipif(not HEAD, reason=NO_COMMIT)
def test_a_commit_is_trained_by_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = (*TOY, "co2.outer_lr=0.5")
    commands = [retrace.shortened(words) for words in (TOY, other, (*TOY, "co2.nothing=1"))]
    then, now = retrace.train(HEAD, commands), retrace.train(None, commands)
    assert then == [*now[:2], now[0]], "a key that a commit does not know has no value there"
    assert None not in now[:2] and now[0] != now[1] and now[2] is None
    assert list((tmp_path / retrace.RUNS / HEAD).glob("tree")) == []
    assert APP.conf.exists()
