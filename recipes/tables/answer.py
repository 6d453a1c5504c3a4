"""What the whole comparison comes to: its main tables, and sentences made from their values.

README.md and docs/results.md have some of them, results/report.html opens with all of it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from co2.record.table import NOT_RUN, Table
from recipes.recipe import Rows
from recipes.registry import RECIPES
from recipes.tables import shares
from recipes.tables.entries import Difference, Entry, entries
from recipes.tables.layout import Place, grid, listed, values
from recipes.tables.methods import ALL_ROWS, PAPERS_GAP, STEADY_GAP, WITH_MOMENTS
from recipes.tables.report import Opening
from recipes.tuning import tune

Chosen = Sequence[tuple[str, str, str]]
"""A recipe, its column, and the name of that column in a main table."""
LOSSES: Chosen = [
    (recipe, column.name, column.head)
    for recipe in ("table2", "table1")
    for column in RECIPES[recipe].columns
    if column.part == "loss"
]
FURTHER: Chosen = [
    ("table2", "GPT-2", "GPT-2, perplexity ↓"),
    ("table2", "RoBERTa", "RoBERTa, perplexity ↓"),
    ("table1", "ResNet-50", "ResNet-50, top-1 %"),
    ("table1", "ViT", "ViT, top-1 %"),
]
LINKS = {
    "100 Mbit/s": "throughput, % of the limit, 100 Mbit/s",
    "20 Mbit/s": "throughput, % of the limit, 20 Mbit/s",
}
"""Columns of table3, and their names in the second main table."""
SLOWEST = "20 Mbit/s"
DATA = {
    "GPT-2": "GPT-2, source text of sympy",
    "TransNormer-LLM": "TransNormer-LLM, source text of sympy",
    "RoBERTa": "RoBERTa, source text of sympy",
    "ViT": "ViT, MNIST, 5,000 digits",
    "ADE20K": "UperNet, generated scenes",
    "ShapeNet": "Point-MAE, generated solids",
}
"""Columns by their names, with the model and the data that they are of at scale=smoke."""
TOLD = (
    *("Local SGD", PAPERS_GAP.name, STEADY_GAP.name),
    *("CO2, kept progress", WITH_MOMENTS.name),
)
"""Rows that the sentences tell of, beside AllReduce."""


def opening(
    ours: Rows, tuning: Rows, scale: str, said: tuple[str, Sequence[str]] | None = None
) -> Opening:
    """What the report begins with: the answer, then the main tables.

    Args:
        ours: rows of results/ours.csv, of all recipes.
        tuning: rows of results/tuning.csv.
        said: the answer as the documentation has it, words and points; by default it is made from
            the values.
    """
    own = [line for line in ours if line["scale"] == scale]
    text, points = said or ("", [*quality(own, scale), speed(own)])
    below = f"Loss is validation loss: lower is better.{tasks() if scale == 'smoke' else ''}"
    tables = [gaps(own, scale), losses(own, tuning, scale), further(own, tuning, scale)]
    full = [by_data(table) if scale == "smoke" else table for table in tables if table.rows]
    return Opening(text, points, below, full)


def tasks() -> str:
    """A sentence that names the models with the data of scale=smoke."""
    models: dict[str, list[str]] = {}
    for model, _, data in (name.partition(", ") for name in DATA.values()):
        models.setdefault(data, []).append(model)
    named = (f"{listed(names)} on {data}" for data, names in models.items())
    return f" The tasks: {'; '.join(named)}."


def by_data(table: Table) -> Table:
    """The table with the data of scale=smoke in its head."""
    names = [head.partition(", ") for head in table.head]
    return replace(table, head=[DATA.get(name, name) + mark + rest for name, mark, rest in names])


def gaps(ours: Rows, scale: str) -> Table:
    """How far the validation loss of every method lies from AllReduce's, in percent of that."""
    picked = _picked(ours, LOSSES, scale)
    told = {entry.row.name for _, entry in picked if entry.to_first is not None}
    cells = {
        (entry.row.name, head): NOT_RUN if entry.to_first is None else entry.to_first.text(1)
        for head, entry in picked
        if entry.row.name in told
    }
    table = grid(cells, [row.name for row in ALL_ROWS], [head for *_, head in LOSSES])
    text = (
        "In percent of AllReduce's, with 95 % intervals; a star where it is significant at 5 % "
        f"after correction for all tests of losses in its recipe (table1 or table2).{_parts(ours)}"
    )
    return replace(table, title="Validation loss above AllReduce's", text=text)


def _parts(ours: Rows) -> str:
    """A sentence that says for which tasks the search of kept progress chose fragments."""
    heads = {(recipe, column): head.removesuffix(", loss") for recipe, column, head in LOSSES}
    tasks = {
        heads[line["recipe"], line["column"]]: number
        for line in _lines(ours, LOSSES)
        if (number := fragments_of(line["command"])) not in (None, "1")
    }
    models = {task: DATA.get(task, task).partition(", ")[0] for task in tasks}
    told = {n: [models[t] for t, own in tasks.items() if own == n] for n in tasks.values()}
    parts = [f"in {number} fragments on {listed(names)}" for number, names in sorted(told.items())]
    return f" Kept progress is sent {', '.join(parts)}, elsewhere whole." if parts else ""


def fragments_of(command: str) -> str | None:
    """In how many fragments a run's command sends kept progress; None where it does not say."""
    found = re.search(r"co2_keep\.fragments=(\d+)", command)
    return found[1] if found else None


def losses(ours: Rows, tuning: Rows, scale: str) -> Table:
    """The validation loss of every method on every task; without rows where nothing has run."""
    return _main(
        "Validation loss",
        "Cross-entropy; of ShapeNet the Chamfer distance.",
        ours,
        tuning,
        LOSSES,
        {},
        scale,
    )


def further(ours: Rows, tuning: Rows, scale: str) -> Table:
    """Perplexity, accuracy and throughput of every method, likewise."""
    speeds = {
        (row, LINKS[head]): share.text()
        for (row, head), share in _shares(ours).items()
        if head in LINKS
    }
    return _main(
        "Perplexity, accuracy and throughput",
        "Throughput is that of GPT-2 with two workers (table3), with its 95 % interval; the limit "
        "is the same training without communication, and ≈ is equivalent to it.",
        ours,
        tuning,
        FURTHER,
        speeds,
        scale,
    )


def _main(
    title: str,
    text: str,
    ours: Rows,
    tuning: Rows,
    chosen: Chosen,
    more: Mapping[Place, str],
    scale: str,
) -> Table:
    """A table of the chosen columns, and of cells that are texts already."""
    picked = _picked(ours, chosen, scale)
    cells: dict[Place, str] = dict(more)
    best = [(entry.row.name, head) for head, entry in picked if entry.best]
    words = [text]
    if any(entry.values for _, entry in picked):
        texts, seeds = values([entry for _, entry in picked])
        cells |= {(e.row.name, head): cell for (head, e), cell in zip(picked, texts, strict=True)}
        words += [f"{seeds[0].upper()}{seeds[1:]}", settings(_lines(ours, chosen), tuning)]
    columns = [*(head for *_, head in chosen), *(LINKS.values() if more else ())]
    table = grid(cells, [row.name for row in ALL_ROWS], columns, best)
    return replace(table, title=title, text=" ".join(words))


def settings(lines: Rows, tuning: Rows) -> str:
    """Whether the runs behind these lines of ours.csv were tuned, and in how many trials."""
    commands = {line["command"] for line in lines}
    given = [command.partition("#")[0].split() for command in commands]
    tuned = [words for words in given if "tuned=true" in words]
    if not tuned:
        return "Not tuned: all methods have the settings of conf, which favours AllReduce."
    searched = {_search(words) for words in tuned}
    trials: dict[tuple[str, ...], set[str]] = {}
    for line in tuning:
        if (line["task"], line["method"], line["average_moments"]) in searched:
            trials.setdefault(tune.search_of(line), set()).add(line["trial"])
    counts = sorted(map(len, trials.values())) or [0]
    number = f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
    untuned = len(commands) - len(tuned)
    rest = f"; {untuned} of {len(commands)} runs are not tuned" if untuned else ""
    return f"Tuned: each method has what won in {number} trials of its own on the task{rest}."


def quality(ours: Rows, scale: str) -> list[str]:
    """How far the losses of the rows that are told of lie from AllReduce's, a sentence for each."""
    sentences = []
    picked = _picked(ours, LOSSES, scale)
    for name in TOLD:
        gaps = {
            head: entry.to_first
            for head, entry in picked
            if entry.row.name == name and entry.to_first is not None
        }
        if gaps:
            sentences.append(f"{name} ends with a validation loss {_range(gaps)}.")
    nothing = "No run of table1 or table2 has a validation loss to compare yet."
    return sentences or [nothing]


def _range(gaps: Mapping[str, Difference]) -> str:
    """From the smallest to the largest difference to AllReduce, with their tasks."""
    tasks = sorted(gaps, key=lambda task: gaps[task].mean)
    ends = [f"{gaps[task].mean:+.1f} % ({task})" for task in (tasks[0], tasks[-1])]
    clear = sum(gap.significant for gap in gaps.values())
    words = ends[0] if len(tasks) == 1 else f"{ends[0]} to {ends[1]}"
    return f"{words} from AllReduce's, a significant difference on {clear} of {len(tasks)} tasks"


def speed(ours: Rows) -> str:
    """The throughput that the rows keep on the slowest links."""
    found = _shares(ours)
    told = [
        f"{name} {found[name, SLOWEST].mean:.0f} %"
        for name in ("AllReduce", *TOLD)
        if (name, SLOWEST) in found
    ]
    if not told:
        return "Nothing has been measured on slow links yet."
    return (
        f"On links of {SLOWEST} (GPT-2, two workers) the share of the throughput without "
        f"communication is {'; '.join(told)}."
    )


def _picked(ours: Rows, chosen: Chosen, scale: str) -> list[tuple[str, Entry]]:
    """The entries of the chosen columns, with the columns' names in the table."""
    picked = []
    for recipe in dict.fromkeys(recipe for recipe, *_ in chosen):
        heads = {column: head for of, column, head in chosen if of == recipe}
        own = [line for line in ours if line["recipe"] == recipe]
        for entry in entries(RECIPES[recipe], own, scale):
            if entry.column.name in heads:
                picked.append((heads[entry.column.name], entry))
    return picked


def _lines(ours: Rows, chosen: Chosen) -> Rows:
    places = {(recipe, column) for recipe, column, _ in chosen}
    return [line for line in ours if (line["recipe"], line["column"]) in places]


def _shares(ours: Rows) -> dict[Place, shares.Share]:
    """The shares of two workers, by names of row and link."""
    own = [line for line in ours if line["recipe"] == "table3"]
    return shares.shares(RECIPES["table3"], own, "2 workers")


def _search(words: Sequence[str]) -> tuple[str, str, str]:
    """Task, method, and whether moments are averaged, as results/tuning.csv has them."""
    task, method = _value(words, "task"), _value(words, "method")
    return task, method, "true" if f"{method}.average_moments=true" in words else ""


def _value(words: Sequence[str], key: str) -> str:
    """The value of a `key=value` word; every command of a run has these."""
    return next(word.partition("=")[2] for word in words if word.startswith(f"{key}="))
