"""`python -m recipes retrace`: whether the code of then trains as today's does.

Runs of before fingerprints do not tell what they trained on and with, but their commits do. Their
commands, cut to a few rounds, are trained by the code of their commit and by today's, one after the
other on this machine. Where both end at the same loss, code, batches and initial weights are the
same, and the fingerprint of these runs has today's versions and the word `retraced` with the commit
that they were compared with.

Commands of one commit that differ in their seed, or in numbers of their schedule, optimizer or
method alone are alike: one of them is trained. But 0 and 1, at which a setting may do nothing, are
like no other number.
"""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from co2.errors import require
from co2.record import provenance
from co2.record.table import Table
from recipes.runs import cells, fingerprints, measured
from recipes.runs.check import wrong_commit
from recipes.tuning import tune
from recipes.tuning.tuning import TUNING

RUNS = Path("results/runs/retrace")
ROUNDS, LEAST = 2, 36
"""A command is cut to so many rounds, and to no fewer steps."""
SAME = 1e-5
"""How much losses may differ, relatively: sums may be taken in another order."""
RETRACED = "retraced"
"""The part of a fingerprint that names the commit."""
HEAD = ("commit", "runs", "command", "then", "today", "result")
_FREE = ("train.steps", "train.eval_every", "train.seed")
_SCHEDULE = "optim."
_CODE = """
import json, sys
try:
    from recipes.runs.cells import TrainCell, run
except ImportError:  # as it was until 2026-11-27
    from recipes.cells import TrainCell, run
def cell(words):
    made = TrainCell(tuple(words))
    try:
        made.check() if hasattr(made, "check") else made.config()
    except Exception as error:
        key, _, why = str(error).partition("=")
        known = [word for word in words if not word.startswith(f"{key}=")]
        if sys.argv[3] and ": unknown key" in why and len(known) < len(words):
            return cell(known)
        print(error)
        return None
    return made
made = [cell(words) for words in json.loads(sys.argv[1])]
run([cell for cell in made if cell is not None])
losses = [cell and (cell.summary() or {"final": {"loss": None}})["final"]["loss"] for cell in made]
open(sys.argv[2], "w").write(json.dumps(losses))
"""
"""What a commit's own code is asked: to train, and to write the losses. Keys that it does not know
are left out, because today's command says in them what had no name then."""
Line = dict[str, str]
Words = tuple[str, ...]
Losses = Sequence[float | None]
Train = Callable[[str | None, Sequence[Words]], Losses]
"""Trains commands by the code of a commit, or by today's: None where one is refused or fails."""


@dataclass
class Alike:
    """Lines of ours.csv or tuning.csv whose commands are alike."""

    commit: str
    words: Words
    """Of the one that is trained."""
    lines: list[Line]


def retrace(out: Path, scale: str, tasks: Sequence[str] = ()) -> int:
    """Compare all runs and trials of these tasks, or of all, that have no fingerprint, and write
    those that come out alike. Prints how each compares.

    Raises:
        ConfigError: the code has changes, or nothing can be compared.
    """
    provenance.require_clean(False)
    today = provenance.git().get("commit", "")[:7]
    require(bool(today), "git", "none", "commits are read from a clone of the repository")
    values, trials = measured.read(out / "ours.csv"), tune.read(out / "tuning.csv")
    own = [(line, _words(line["command"])) for line in values if line["scale"] == scale]
    own += [(line, _trial_words(line)) for line in trials if line["scale"] == scale]
    groups = alike((line, words) for line, words in own if words and _is_wanted(words, tasks))
    require(bool(groups), "retrace", " ".join(tasks), "every run has a fingerprint")
    known: dict[Words, float | None] = {}
    found: list[tuple[object, ...]] = []
    for commit in dict.fromkeys(group.commit for group in groups):
        here = [group for group in groups if group.commit == commit]
        found += compared(here, train, known, today)
        measured.write(out / "ours.csv", values)
        tune.write(trials, out / "tuning.csv")
        for search in {
            tune.search_of(line) for group in here for line in group.lines if "rung" in line
        }:
            tune.write_winner([line for line in trials if tune.search_of(line) == search])
        print(Table(HEAD, found[-len(here) :]).markdown(), flush=True)
    good = [row for row in found if row[-1] == "same"]
    count, of = (sum(int(str(row[1])) for row in rows) for rows in (good, found))
    print(f"{count} of {of} values and trials come from code that trains as today's")
    return 0


def alike(lines: Iterable[tuple[Line, Words]]) -> list[Alike]:
    """The lines without fingerprint, grouped; those of code that no commit has are left out."""
    found: dict[tuple[str, Words], Alike] = {}
    for line, words in lines:
        if line["fingerprint"] or wrong_commit(line["commit"]):
            continue
        method = _of(words, "method")
        key = (line["commit"], tuple(sorted(_kind(word, method) for word in words)))
        found.setdefault(key, Alike(line["commit"], shortened(words), [])).lines.append(line)
    return list(found.values())


def compared(
    groups: Sequence[Alike], train: Train, known: dict[Words, float | None], today: str
) -> list[tuple[object, ...]]:
    """Compare the groups of a commit, and write the fingerprints of those that come out alike.

    Args:
        known: losses of today's code, by command; what is trained is added.
        today: the commit of today's code.

    Returns:
        A line of the table for each, with the columns of `HEAD`.
    """
    then = train(groups[0].commit, [group.words for group in groups])
    missing = [group.words for group in groups if group.words not in known]
    known |= zip(missing, train(None, missing) if missing else (), strict=True)
    rows: list[tuple[object, ...]] = []
    for group, old in zip(groups, then, strict=True):
        new = known[group.words]
        if old is None or new is None:
            result = "refused or failed"
        else:
            result = "same" if math.isclose(old, new, rel_tol=SAME) else "differs"
        if result == "same":
            versions = fingerprints.versions(*(_of(group.words, key) for key in ("task", "method")))
            text = " ".join(f"{key} {value}" for key, value in versions.items())
            for line in group.lines:
                line["fingerprint"] = f"{text} {RETRACED} {today}"
        command = " ".join(group.words)
        rows.append((group.commit, len(group.lines), command, old, new, result))
    return rows


def shortened(words: Words) -> Words:
    """The command of a training of a few rounds."""
    method = _of(words, "method")
    tau = _of(words, f"{method}.tau")
    steps = str(max(LEAST, ROUNDS * int(tau) if tau.isdecimal() else 0))
    own = {"train.steps": steps, "train.eval_every": steps, "optim.warmup_steps": "4"}
    own |= {"checkpoint.every": "0", "log.wandb": "disabled"}
    kept = [word for word in words if word.partition("=")[0] not in (*own, "runs")]
    return (*kept, *(f"{key}={value}" for key, value in own.items()))


def train(commit: str | None, commands: Sequence[Words]) -> Losses:
    """Train these commands by the code of a commit, or by that of this tree."""
    runs = RUNS.absolute() / (commit or "today")
    runs.mkdir(parents=True, exist_ok=True)
    with _tree(commit) as tree, (runs / "log.txt").open("a") as log:
        moved = json.dumps([[*words, f"runs={runs}"] for words in commands])
        answer = runs / "losses.json"
        answer.unlink(missing_ok=True)
        ask = [sys.executable, "-c", _CODE, moved, str(answer), commit or ""]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        subprocess.run(ask, cwd=tree, env=environment, stdout=log, stderr=subprocess.STDOUT)
    losses: Losses = json.loads(answer.read_text()) if answer.exists() else [None] * len(commands)
    return losses


@contextmanager
def _tree(commit: str | None) -> Iterator[Path]:
    """The source tree of a commit, which is removed afterwards; this one for none."""
    here = cells.APP.conf.parent
    if commit is None:
        yield here
        return
    tree = RUNS.absolute() / commit / "tree"
    git = ["git", "-C", str(here), "worktree"]
    shutil.rmtree(tree, ignore_errors=True)
    subprocess.run([*git, "prune"], check=True)
    subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
    try:
        yield tree
    finally:
        subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def _words(command: str) -> Words:
    """Those of a recorded training, with what was tuned in place of `tuned=true`; none of another
    program, or of a training that begins with another's weights."""
    given, _, tuned = command.partition("  # ")
    program, *words = given.split()[1:]
    if program != "train.py" or any(word.startswith(("init_from=", "resume=")) for word in words):
        return ()
    return tuple(word for word in (*words, *tuned.split()) if word != "tuned=true")


def _trial_words(line: Mapping[str, str]) -> Words:
    """The command of a line of tuning.csv."""
    method = line["method"]
    own = {"tau": line["tau"], tune.MOMENTS: line[tune.MOMENTS], tune.GAP: line[tune.GAP]}
    return (
        *(f"{key}={line[key]}" for key in ("task", "scale", "method")),
        *(f"{method}.{key}={value}" for key, value in own.items() if value),
        *line["settings"].split(),
        *TUNING,
        f"train.seed={line['seed']}",
    )


def _is_wanted(words: Words, tasks: Sequence[str]) -> bool:
    return not tasks or _of(words, "task") in tasks


def _of(words: Words, key: str) -> str:
    return next((word.partition("=")[2] for word in words if word.startswith(f"{key}=")), "")


def _kind(word: str, method: str) -> str:
    """A word without its number, where that does not count."""
    key, _, value = word.partition("=")
    own = key.startswith((_SCHEDULE, f"{method}.")) and _number(value) not in (None, 0, 1)
    return f"{key}=#" if own or key in _FREE else word


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
