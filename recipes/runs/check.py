"""`python -m recipes check`: whether the values of the tables can be compared, and made again."""

import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from co2.app.tuned import GAP, MOMENTS
from co2.program import python
from co2.record.fingerprint import parts
from co2.record.metrics import flat
from co2.record.table import read_csv
from recipes.recipe import Column, Recipe
from recipes.runs import cells, fingerprints, measured
from recipes.runs.fingerprints import Line
from recipes.runs.functions import FunctionColumn
from recipes.runs.known import Known
from recipes.tuning import tune

WRITTEN = "Written by: python -m recipes tune "
"""What begins the line of a tuned file that tells which search wrote it."""
Lines = Sequence[dict[str, str]]


@dataclass(frozen=True)
class Finding:
    """Something that has to be mended, in a line that says how."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def check(recipes: Iterable[Recipe], out: Path, scale: str, tuned: bool = True) -> list[Finding]:
    """What is wrong with the values of these recipes and, if `tuned`, with all searches and winners
    at a scale: no fingerprint or another one than the column's, a commit that is not here or had
    changes, settings that are no longer given; winners that no search wrote, or at a border;
    searches of unequal size."""
    told: dict[tuple[str, str, str], Finding] = {}
    recipes, known = list(recipes), Known(out / "ours.csv")
    lines = [line for line in known.lines if line["scale"] == scale]
    for recipe in recipes:
        for column in recipe.columns:
            place = (recipe.name, column.name)
            own = [line for line in lines if (line["recipe"], line["column"]) == place]
            old = fingerprints.outdated(own, _version(column))
            seen = {id(line) for stale in old for line in stale.lines}
            stale = [*old, *fingerprints.mixed(line for line in own if id(line) not in seen)]
            wrong = [(line, why) for line in own if (why := wrong_commit(line["commit"]))]
            for kind, several in (
                ("fingerprint", stale),
                ("commit", fingerprints.by_row(wrong)),
            ):
                for one in several:
                    # Columns and recipes share runs: what mends them is told once.
                    mends = kind, one.why, fingerprints.again(one.lines)
                    told.setdefault(mends, Finding(kind, str(one)))
    found = [*told.values(), *(one for recipe in recipes for one in _left(recipe, known, scale))]
    if tuned:
        trials = [line for line in read_csv(out / "tuning.csv") if line["scale"] == scale]
        found += [*_searches(trials), *_winners(trials, scale)]
    return found


def stands(line: Line, column: Column) -> bool:
    """Whether today's code leads to this value, as far as it tells, and its run can be repeated."""
    old = fingerprints.outdated([line], _version(column))
    return not (old or wrong_commit(str(line["commit"])))


def _version(column: Column) -> int | None:
    """That of the function that makes a column's values; None where train.py or the laboratory
    does."""
    return column.version if isinstance(column, FunctionColumn) else None


def _left(recipe: Recipe, known: Known, scale: str) -> Iterator[Finding]:
    """Values that `collect` would leave out."""
    found = {
        (recipe.name, row.name, column.name, scale, str(seed))
        for row, column, seed, cell in recipe.cells(scale)
        if known.find(recipe.name, row, column, scale, seed, cell)
    }
    left = known.left(recipe.name, scale, found)
    for row, count in Counter(line["row"] for line in left).items():
        text = f"{recipe.name}: {row}: {count} values of settings that recipe and conf no longer "
        again = f"{python()} -m recipes run {recipe.name}"
        yield Finding("settings", f"{text}give; again: {again}")


def hardware(recipes: Iterable[Recipe], out: Path, scale: str) -> Iterator[str]:
    """A line for each column whose runs were made on several processors, which alone may move a
    loss as much as a seed does."""
    columns: dict[tuple[str, str], Counter[str]] = {}
    names = {recipe.name for recipe in recipes}
    for line in measured.read(out / "ours.csv"):
        if line["scale"] == scale and line["recipe"] in names:
            place = line["recipe"], line["column"]
            columns.setdefault(place, Counter())[line["hardware"]] += 1
    for (recipe, column), machines in columns.items():
        if len(machines) > 1:
            told = ", ".join(f"{count} of {machine}" for machine, count in machines.items())
            yield f"note: {recipe}: {column}: values of several processors: {told}"


def summary(found: Sequence[Finding]) -> str:
    """How many findings there are of each kind."""
    kinds = Counter(finding.kind for finding in found)
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return f"{len(found)} findings{f': {told}' if told else ''}"


def wrong_commit(commit: str) -> str:
    """Why nobody can make a run of this commit again; empty where one can."""
    if commit.endswith("-dirty"):
        return f"from a tree with changes ({commit})"
    return "" if _exists(commit) else f"commit {commit} is not in this repository"


@cache
def _exists(commit: str) -> bool:
    """Whether this repository has a commit. Where there is none, as in an installed package,
    nothing can be told."""
    ask = ["git", "-C", str(Path(__file__).parent)]
    here = subprocess.run([*ask, "rev-parse", "HEAD"], capture_output=True)
    wanted = subprocess.run([*ask, "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True)
    return here.returncode != 0 or wanted.returncode == 0


def _searches(trials: Lines) -> Iterator[Finding]:
    """What is wrong with the trials of every search."""
    searches: dict[tuple[str, ...], Lines] = {}
    for line in trials:
        key = tune.search_of(line)
        searches[key] = [*searches.get(key, ()), line]
    sizes = {key: len(tune.rungs(own)[0]) for key, own in searches.items()}
    usual = Counter(sizes.values()).most_common(1)[0][0] if sizes else 0
    tasks: dict[str, list[Line]] = {}
    for key, own in searches.items():
        again = f"again: {_again(key, usual)}"
        if sizes[key] != usual:
            text = f"{_named(key)}: {sizes[key]} short trials, other searches {usual}; {again}"
            yield Finding("trials", text)
        whys = Counter(why for line in own if (why := wrong_commit(line["commit"])))
        for why, count in whys.items():
            yield Finding("commit", f"{_named(key)}: {count} trials {why}; {again}")
        told = [parts(line.get("fingerprint", "")) for line in own]
        now = fingerprints.versions(key[0], key[1])
        if unknown := sum(not one for one in told):
            text = f"{_named(key)}: {unknown} trials without fingerprint; {again}"
            yield Finding("fingerprint", text)
        elif any(one.get(name) != str(number) for one in told for name, number in now.items()):
            text = f"{_named(key)}: trials of other versions than today's; {again}"
            yield Finding("fingerprint", text)
        # As in a column: the trials of all methods of a task have one seed.
        tasks.setdefault(key[0], []).extend(
            {**line, "column": "tuning", "row": _named(key), "recipe": key[0], "workers": ""}
            | {"command": f"python train.py task={key[0]} method={key[1]}"}
            for line in own
            if line.get("fingerprint")
        )
    for own_lines in tasks.values():
        for stale in fingerprints.mixed(own_lines):
            first = stale.lines[0]
            key = tuple(str(first.get(name, "")) for name in tune.KEY)
            text = f"{first['row']}: {stale.why}; again: {_again(key, usual)}"
            yield Finding("fingerprint", text)


def _named(key: Sequence[str]) -> str:
    task, method, tau, moments, gap, _ = key
    words = ["tuning", task, method, tau and f"τ={tau}", moments and MOMENTS, gap]
    return " ".join(word for word in words if word)


def _again(key: Sequence[str], trials: int) -> str:
    task, method, tau, moments, gap, scale = key
    node = {**({"tau": tau} if tau else {}), MOMENTS: moments or "false"}
    node |= {GAP: gap} if gap else {}
    return f"{python()} {cells.tuned(task, method, scale, node).command(trials)}"


def _winners(trials: Lines, scale: str) -> Iterator[Finding]:
    """What is wrong with the files of conf/tuned."""
    folder = cells.APP.conf / "tuned"
    for path in sorted(folder.glob("*/*.yaml")):
        name, text = f"conf/tuned/{path.relative_to(folder)}", path.read_text()
        heads = [line[2:] for line in text.splitlines() if line.startswith("# ")]
        written = next((line for line in heads if line.startswith(WRITTEN)), None)
        if written is None:
            again = f"{python()} -m recipes {_command_of(path, scale)}"
            yield Finding("winner", f"{name}: written by hand; again: {again}")
            continue
        words = shlex.split(written.removeprefix(WRITTEN))
        again = f"again: {python()} -m recipes tune {shlex.join(words)}"
        key = _key(words)
        if key[-1] != scale:
            continue
        best = tune.winner([line for line in trials if list(tune.search_of(line)) == key])
        if best is None:
            yield Finding("winner", f"{name}: results/tuning.csv has no trials of it; {again}")
        elif tune.settings(best) != flat(yaml.safe_load(text)):
            told = best["settings"]
            yield Finding("winner", f"{name}: not the winner of its search, {told}; {again}")
        border = next((line for line in heads if line.startswith(tune.UNTRIED)), None)
        if border is not None:
            keys = border.removeprefix(tune.UNTRIED).rstrip(".")
            text = f"{name}: {keys} at the border of a space that was not widened; {again}"
            yield Finding("border", text)
        told = next((line for line in heads if line.startswith(fingerprints.TUNED)), "")
        known = parts(told.removeprefix(fingerprints.TUNED).replace("unknown", ""))
        now = fingerprints.versions(key[0], key[1])
        if any(known.get(part) != str(number) for part, number in now.items()):
            why = "tuned on other versions than today's" if known else "no fingerprint"
            yield Finding("fingerprint", f"{name}: {why}; {again}")


def _command_of(path: Path, scale: str) -> str:
    """The search that would write this file."""
    method = max((name for name in cells.APP.methods if path.stem.startswith(name)), key=len)
    tau = re.search(r"_tau(\d+)", path.stem)
    node = {**({"tau": tau[1]} if tau else {}), MOMENTS: str(MOMENTS in path.stem)}
    command = cells.tuned(path.parent.name, method, scale, node).command()
    return command.removeprefix("-m recipes ")


def _key(words: Sequence[str]) -> list[str]:
    """What tells the lines of results/tuning.csv of the search with this command."""
    task, method = words[:2]
    given = dict(zip(words[2:], [*words[3:], ""], strict=True))
    scale = given.get("--scale", "smoke")
    config = cells.composed_config((f"task={task}", f"method={method}", f"scale={scale}"))
    tau = given.get("--tau", str(getattr(config.method_config, "tau", "")))
    moments = "true" if "--average-moments" in given else ""
    return [task, method, tau, moments, given.get("--gap-penalty", ""), scale]
