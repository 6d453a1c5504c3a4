"""Which values may stand in one column: those whose runs trained on and with the same.

The versions of a task's code are equal in a whole column, those of a method's code wherever it has
the method. Batches, initial weights and the first loss depend on the seed, on the number of workers
and on the task's settings: they are equal where these are.
"""

import math
import os
import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from co2.program import python
from co2.record.fingerprint import parts
from co2_measure.peers import known_methods
from tasks import TASKS

Line = Mapping[str, object]
"""A value of ours.csv with its run."""
TUNED = "Fingerprint: "
"""What begins the line of a tuned file that tells what its settings were tuned on."""
_LOSS = 1e-3
"""How much a first loss may differ, relatively: processors round sums differently."""
_ASIDE = ("optim", "comm", "mesh", "log", "checkpoint", "launch")
"""Nodes that say nothing of data and initial weights, and keys."""
_ASIDE_KEYS = ("method", "tuned", "runs", "tag", "resume", "train.steps", "train.eval_every")
_ASIDE_OPTIONS = ("--mbit", "--methods", "--repeats")


@dataclass(frozen=True)
class Stale:
    """Values of one row and column that have to be made again."""

    lines: tuple[Line, ...]
    why: str

    def __str__(self) -> str:
        return f"{where(self.lines)}: {self.why}; again: {again(self.lines)}"


def where(lines: Sequence[Line]) -> str:
    """Recipe, column, row and seeds."""
    first, seeds = lines[0], sorted({int(str(line["seed"])) for line in lines})
    numbers = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    return f"{first['recipe']}: {first['column']}: {first['row']}, {numbers}"


def again(lines: Sequence[Line]) -> str:
    """The command that makes the runs of these lines, of one row and column, once more."""
    words = shlex.split(str(lines[0]["command"]).partition("  # ")[0])
    seeds = ",".join(map(str, sorted({int(str(line["seed"])) for line in lines})))
    if words[1:2] == ["train.py"]:
        words = [f"train.seed={seeds}" if w.startswith("train.seed=") else w for w in words[2:]]
        several = ["-m"] if "," in seeds else []
        return shlex.join([python(), "train.py", *several, *words, "resume=never"])
    folders = dict.fromkeys(str(line["folder"]) for line in lines)
    there = [folder for folder in folders if os.path.exists(folder)]
    delete = f"rm -r {shlex.join(there)}; " if there else ""
    return f"{delete}{python()} -m recipes run {lines[0]['recipe']} --seeds {seeds}"


def mixed(lines: Iterable[Line]) -> list[Stale]:
    """Which of the lines of one column have to be made again, because their runs trained on or
    with something else than those of others. Empty where none or all have no fingerprint."""
    lines = list(lines)
    known = [line for line in lines if _parts(line)]
    if not known:
        return []
    why = "no fingerprint, and others of the column have one"
    found = [(line, why) for line in lines if not _parts(line)]
    for key, alike in (("task", _task), ("method", _method)):
        for group in _groups(known, key, alike):
            newest = max(int(value) for _, value in group)
            found += [
                (line, f"{key} version {value}, others {newest}")
                for line, value in group
                if int(value) < newest
            ]
    for key in ("data", "weights", "loss"):
        for group in _groups(known, key, _trained_on):
            usual = _usual(key, [value for _, value in group])
            found += [
                (line, f"{key} {value}, others {usual}")
                for line, value in group
                if not _equal(key, value, usual)
            ]
    return by_row(found)


def outdated(lines: Iterable[Line], version: int | None = None) -> list[Stale]:
    """Which of these lines were made by code of another version than today's, or do not tell.

    Args:
        version: of a function that has made them.
    """
    found: list[tuple[Line, str]] = []
    for line in lines:
        told = _parts(line)
        now = versions(_task(line), _method(line)) if version is None else {"task": version}
        if not told:
            found.append((line, "no fingerprint"))
        found += [
            (line, f"{key} version {told.get(key)}, today {value}")
            for key, value in now.items()
            if told and told.get(key) != str(value)
        ]
    return by_row(found)


def is_current(fingerprint: str, task: str, method: str) -> bool:
    """Whether a run has a fingerprint, of today's versions of the code."""
    told = parts(fingerprint)
    return all(told.get(key) == str(value) for key, value in versions(task, method).items())


def versions(task: str, method: str) -> dict[str, int]:
    """Those of today's code, by what they are of."""
    now = {"task": TASKS[task].version} if task in TASKS else {}
    known = known_methods()
    return {**now, **({"method": known[method].version} if method in known else {})}


def tuned_line(fingerprint: str) -> str:
    """The line of a tuned file's head that tells what its settings were tuned on."""
    return f"{TUNED}{fingerprint or 'unknown'}"


def by_row(found: Iterable[tuple[Line, str]]) -> list[Stale]:
    """One finding for all lines of a row that have the same reason. Of several reasons that a line
    has, the first counts."""
    rows: dict[tuple[object, str], list[Line]] = {}
    for line, why in {id(line): (line, why) for line, why in reversed(list(found))}.values():
        rows.setdefault((line["row"], why), []).append(line)
    return [Stale(tuple(own), why) for (_, why), own in reversed(rows.items())]


def _parts(line: Line) -> dict[str, str]:
    """A line's fingerprint. Of what a function or the laboratory has measured, such as seconds, the
    versions count alone; before they were recorded none had been raised."""
    told = parts(str(line["fingerprint"]))
    return told if told or _is_training(line) else {"task": "1", "method": "1"}


def _is_training(line: Line) -> bool:
    return "train.py" in str(line["command"])


def _groups(
    lines: Iterable[Line], key: str, alike: Callable[[Line], object]
) -> list[list[tuple[Line, str]]]:
    """What those lines have for a part of the fingerprint that must be equal on them."""
    found: dict[object, list[tuple[Line, str]]] = {}
    for line in lines:
        value = _parts(line).get(key)
        if value is not None:
            found.setdefault(alike(line), []).append((line, value))
    return list(found.values())


def _usual(key: str, values: Sequence[str]) -> str:
    if key == "loss":
        return f"{statistics.median_low(map(float, values)):g}"
    return Counter(values).most_common(1)[0][0]


def _equal(key: str, one: str, other: str) -> bool:
    if key == "loss":
        return math.isclose(float(one), float(other), rel_tol=_LOSS)
    return one == other


def _words(line: Line) -> dict[str, str]:
    """The words of a command by their keys, without what `tuned=true` stands for. What a function
    of a recipe is told follows as a comment, too, and counts."""
    command = str(line["command"])
    if _is_training(line):
        command = command.partition("  # ")[0]
    pairs = (word.partition("=") for word in command.split())
    return {key: value for key, _, value in pairs}


def _task(line: Line) -> str:
    return _words(line).get("task", "")


def _method(line: Line) -> str:
    words = _words(line)
    return words.get("method", words.get("--methods", ""))


def _trained_on(line: Line) -> tuple[tuple[str, str], ...]:
    """What a run's data and initial weights depend on."""
    nodes = {*_ASIDE, *known_methods()}
    return (
        ("workers", str(line["workers"])),
        *(
            (key, value)
            for key, value in sorted(_words(line).items())
            if key.partition(".")[0] not in nodes and key not in (*_ASIDE_KEYS, *_ASIDE_OPTIONS)
        ),
    )
