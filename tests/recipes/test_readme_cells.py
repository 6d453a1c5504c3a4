"""The generated cells of docs/results.md and README, computed again from the CSV files by other
code: nothing of recipes/ is imported, and the fit of the curve, the pooled spread and Holm's
correction are written here a second time."""

import csv
import math
import re
from statistics import fmean, stdev

import numpy as np
import pytest
from scipy.interpolate import PchipInterpolator
from scipy.stats import bartlett, norm, t

from tests.cli.harness import ROOT

Values = dict[int, float]
PAGES = {"headline": "docs/results.md", "first": "README.md"}
"""By the name of a table, the page where it is."""
LIMIT = "no communication"


def _read() -> dict[tuple[str, str, str], Values]:
    with (ROOT / "results" / "ours.csv").open() as file:
        found: dict[tuple[str, str, str], Values] = {}
        for line in csv.DictReader(file):
            if line["scale"] == "smoke":
                place = line["recipe"], line["row"], line["column"]
                if place[1] == "CO2" and place[0].startswith("table"):
                    continue  # what won when the gap was tuned too: no row of today's
                found.setdefault(place, {})[int(line["seed"])] = float(line["value"])
        return found


OURS = _read()


def _commands() -> dict[tuple[str, str, str], set[str]]:
    with (ROOT / "results" / "runs.csv").open() as file:
        runs = {line["run"]: line["command"] for line in csv.DictReader(file)}
    found: dict[tuple[str, str, str], set[str]] = {}
    with (ROOT / "results" / "ours.csv").open() as file:
        for line in csv.DictReader(file):
            place = line["recipe"], line["row"], line["column"]
            found.setdefault(place, set()).add(runs[line["run"]])
    return found


COMMANDS = _commands()


def _table(name: str) -> dict[str, dict[str, str]]:
    text = (ROOT / PAGES[name]).read_text()
    block = text.partition(f"begin {name} ")[2].partition("<!-- results: end")[0]
    lines = [line.strip("| ").split(" | ") for line in block.splitlines() if line.startswith("|")]
    head, _, *rows = lines
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


PAGE = _table("headline")


def _interval(mean: float, half: float | None, mark: str = "") -> str:
    text = f"{math.exp(mean):.2f}{mark}"
    if half is None:
        return text
    return f"{text} [{math.exp(mean - half):.2f}, {math.exp(mean + half):.2f}]"


def _inverse(loss: float, points: list[tuple[float, float]]) -> tuple[float, bool]:
    x, y = zip(*points, strict=True)
    if not y[-1] <= loss <= y[0]:
        (a, b), (c, d) = points[:2] if loss > y[0] else points[-2:]
        return a + (c - a) * (b - loss) / (b - d), True
    spline = PchipInterpolator(x, np.array(y) - loss)
    return float(spline.roots(extrapolate=False)[0]), False


def _falling(curve: dict[int, float]) -> list[tuple[float, float]]:
    groups: list[list[tuple[float, float]]] = []

    def centre(group: list[tuple[float, float]]) -> tuple[float, float]:
        return fmean(x for x, _ in group), fmean(y for _, y in group)

    for rounds in sorted(curve):
        groups.append([(math.log(rounds), curve[rounds])])
        while len(groups) > 1 and centre(groups[-1])[1] >= centre(groups[-2])[1]:
            last = groups.pop()
            groups[-1] += last
    return [centre(group) for group in groups]


def _fit_error(loss: float, points: list[tuple[float, float]]) -> float:
    missed = []
    for i in range(1, len(points) - 1):
        inside = points[i + 1][1] <= loss <= points[i - 1][1]
        above = i == 1 and loss > points[0][1]
        below = i == len(points) - 2 and loss < points[-1][1]
        if inside or above or below:
            rest = points[:i] + points[i + 1 :]
            missed.append(_inverse(points[i][1], rest)[0] - points[i][0])
    return math.sqrt(fmean(one**2 for one in missed)) / 4 if missed else 0.0


def _steps(method: str, rounds: int) -> tuple[float, float | None, str] | None:
    """Mean and half width of the factor's logarithm, and its mark."""
    if method == "AllReduce":
        return 0.0, None, ""
    curves: dict[int, dict[int, float]] = {}
    for (recipe, row, column), seeds in OURS.items():
        if (recipe, row) == ("rounds", "AllReduce"):
            for seed, loss in seeds.items():
                curves.setdefault(seed, {})[int(column.split()[0].replace(",", ""))] = loss
    logs, errors, beyond = [], [], False
    for seed, loss in OURS.get(("rounds", method, f"{rounds:,} rounds"), {}).items():
        points = _falling(curves.get(seed, {}))
        if len(points) > 1:
            found, outside = _inverse(loss, points)
            logs.append(math.log(rounds) - found)
            errors.append(_fit_error(loss, points))
            beyond |= outside
    if not logs:
        return None
    half = None
    if len(logs) > 1:
        spread = stdev(logs) / math.sqrt(len(logs)) * t.ppf(0.975, len(logs) - 1)
        fit = math.sqrt(fmean(error**2 for error in errors)) * norm.ppf(0.975)
        half = math.hypot(spread, fit)
    return fmean(logs), half, "†" if beyond else ""


def _share(method: str, link: str, recipe: str = "table3") -> list[float]:
    """Percent of the throughput without communication, by repeat. The gap sends nothing."""
    method = method.replace("paper's", "steady")
    own = OURS.get((recipe, method, f"2 workers, {link}"), {})
    whole = OURS.get((recipe, LIMIT, f"2 workers, {link}"), {})
    return [100 * own[n] / whole[n] for n in sorted(own.keys() & whole.keys())]


def _net_time(method: str, link: str) -> str:
    shares, steps = _share(method, link, "fragments"), _steps(method, 300)
    if not shares or steps is None:
        return "not run"
    halves = [steps[1]] if steps[1] is not None else []
    if len(shares) > 1:
        error = stdev(shares) / math.sqrt(len(shares))
        halves.append(error * t.ppf(0.975, len(shares) - 1) / fmean(shares))
    return _interval(
        steps[0] - math.log(fmean(shares) / 100), math.hypot(*halves) if halves else None
    )


def _tests(
    recipe: str, columns: list[str], log: bool
) -> dict[tuple[str, str, str], tuple[float, float, int]]:
    """Mean difference, its standard error and degrees of freedom, of every method to AllReduce and
    to Local SGD in some columns: by (other, method, column)."""
    tests: dict[tuple[str, str, str], tuple[float, float, int]] = {}
    for column in columns:
        of = {
            row: {seed: math.log(one) if log else one for seed, one in values.items()}
            for (r, row, c), values in OURS.items()
            if (r, c) == (recipe, column)
        }
        seeds = set().union(*of.values()) if of else set()
        whole = {row: v for row, v in of.items() if v.keys() == seeds}
        table = np.array([[v[s] for s in sorted(seeds)] for v in whole.values()])
        m, n = table.shape
        rest = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
        alike = bartlett(*rest).pvalue >= 0.05
        for other in ("AllReduce", "Local SGD"):
            for row in of:
                both = sorted(of[row].keys() & of.get(other, {}).keys())
                if row in ("AllReduce", other) or len(both) < 2:
                    continue
                gaps = [of[row][seed] - of[other][seed] for seed in both]
                error, freedom = stdev(gaps) / math.sqrt(len(gaps)), len(gaps) - 1
                if alike and set(both) == seeds:
                    freedom = (m - 1) * (n - 1)
                    error = math.sqrt(2 * float((rest**2).sum()) / freedom / n)
                tests[other, row, column] = fmean(gaps), error, freedom
    return tests


def _stars(recipe: str, columns: list[str], log: bool = False) -> set[tuple[str, str]]:
    """Of all these tests: (method, column) of those to AllReduce that are significant."""
    found, worst = set(), 0.0
    tests = _tests(recipe, columns, log).items()
    values = [(place, 2 * t.sf(abs(gap) / error, free)) for place, (gap, error, free) in tests]
    for done, (place, p) in enumerate(sorted(values, key=lambda one: one[1])):
        worst = max(worst, min(1.0, (len(values) - done) * p))
        if worst < 0.05 and place[0] == "AllReduce":
            found.add(place[1:])
    return found


LOSSES = {
    "table1": ["ViT, loss", "ADE20K, loss", "ShapeNet, loss"],
    "table2": ["GPT-2, loss", "TransNormer-LLM, loss", "RoBERTa, loss"],
}


def _above(recipe: str, method: str, column: str) -> str:
    """Percent above AllReduce's loss, between geometric means."""
    gap, error, freedom = _tests(recipe, LOSSES[recipe], log=True)["AllReduce", method, column]
    half = error * t.ppf(0.975, freedom)
    low, high = (100 * math.expm1(gap + sign * half) for sign in (-1, 1))
    star = " *" if (method, column) in _stars(recipe, LOSSES[recipe], log=True) else ""
    return f"{100 * math.expm1(gap):+z.1f} % [{low:z.1f}, {high:z.1f}]{star}"


SCORES = {
    "table1": ["ViT", "ADE20K", "ShapeNet"],
    "fashion": ["top-1, %, 2 replicas"],
}


def _row_in(method: str, recipe: str, column: str) -> str:
    """The headline has a row for kept progress in 12 fragments; recipes have other names for it."""
    kept = "CO2, kept progress"
    runs = COMMANDS.get((recipe, kept, column), set())
    in_twelve = any("co2_keep.fragments=12" in command for command in runs)
    if method == kept and in_twelve:
        return "nothing"
    if method == f"{kept}, 12 fragments":
        return kept if in_twelve else f"{kept}, defaults"
    return method


def _between(recipes: str, part: str, method: str) -> str:
    """Of all tasks' losses: the smallest and the largest difference, and the number of stars."""
    assert part == "loss"
    told = {
        column.removesuffix(", loss"): _above(recipe, method, column)
        for recipe in recipes.split("+")
        for column in LOSSES[recipe]
        if (recipe, method, column) in OURS
    }
    tasks = sorted(told, key=lambda task: float(told[task].split(" ")[0]))
    ends = " to ".join(f"{told[task].split(' ')[0]} % ({task})" for task in (tasks[0], tasks[-1]))
    stars = sum(text.endswith("*") for text in told.values())
    return f"{ends}, with a star on {stars} of {len(told)} tasks"


def _points(method: str, recipe: str, column: str) -> str:
    method = _row_in(method, recipe, column)
    own, base = (OURS.get((recipe, row, column), {}) for row in (method, "AllReduce"))
    if not own:
        return "not run"
    if method == "AllReduce":
        return f"{fmean(own.values()):.1f}"
    star = " *" if (method, column) in _stars(recipe, SCORES[recipe]) else ""
    return f"{fmean(own[s] - base[s] for s in own.keys() & base.keys()):+z.1f}{star}"


def _mean(*place: str) -> str:
    return f"{fmean(OURS[place].values()):.1f}" if place in OURS else "not run"


@pytest.mark.parametrize("method", PAGE)
def test_the_headline_table(method: str) -> None:
    row = PAGE[method]
    waiting = "2 workers, waiting for communication %, 40 Mbit/s"
    assert row["waits, %, 40 Mbit/s, fp32"] == _mean("fragments", method, waiting)
    best = row["waits, %, best wire and τ"].partition(" (")[0]
    racer = _row_in(method, "time_to_loss", "exposed, % of training")
    assert best == _mean("time_to_loss", racer, "exposed, % of training")
    for rounds in (100, 300, 1000):
        steps = _steps(method, rounds)
        told = "not run" if steps is None else "1" if method == "AllReduce" else _interval(*steps)
        assert row[f"steps, {rounds:,} rounds"] == told
    for link in ("40 Mbit/s", "100 Mbit/s"):
        assert row[f"net time, {link}"] == _net_time(method, link)
    race = list(OURS.get(("time_to_loss", racer, "ratio to AllReduce's seconds"), {}).values())
    half = t.ppf(0.975, len(race) - 1) * stdev(race) / math.sqrt(len(race)) if race else 0.0
    ends = f"[{fmean(race) - half:.2f}, {fmean(race) + half:.2f}]" if race else ""
    told = f"{fmean(race):.2f} {ends}" if race else "not run"
    assert row["time to the loss, 20 Mbit/s, best wire and τ"] == told
    assert row["Fashion-MNIST, points"] == _points(method, "fashion", SCORES["fashion"][0])
    assert row["ViT, points"] == _points(method, "table1", "ViT")
    assert row["mIoU, points"] == _points(method, "table1", "ADE20K")
    assert row["Point-MAE, points"] == _points(method, "table1", "ShapeNet")


def test_readme_has_rows_of_it() -> None:
    first = _table("first")
    assert len(first) == 7
    for method, row in first.items():
        assert len(row) == 9 and row.items() <= PAGE[method].items()


def test_the_numbers_amid_sentences() -> None:
    marked = re.findall(r"<!--=(.+?)-->(.*?)<!--/-->", (ROOT / "README.md").read_text())
    assert marked
    for key, shown in marked:
        kind, *place = key.split("|")
        if kind == "share":
            shares = _share(*place)
            half = t.ppf(0.975, len(shares) - 1) * stdev(shares) / math.sqrt(len(shares))
            ends = f"[{fmean(shares) - half:.1f}, {fmean(shares) + half:.1f}]"
            assert shown == f"{fmean(shares):.1f} % {ends}", key
            continue
        if kind == "steps":
            method, rounds = place
            assert shown == _interval(*_steps(method, int(rounds))), key
            continue
        if kind == "above":
            assert shown == _above(*place), key
            continue
        if kind == "between":
            assert shown == _between(*place), key
            continue
        values = list(OURS[tuple(place)].values())
        assert kind == "measured" and place[0] == "figure1"
        assert shown == f"{fmean(values):.1f} ± {stdev(values):.1f}", key
