"""Tables as a paper prints them: rows are methods; columns are tasks, links or figures of a run.

What was measured, the differences in it, and what papers report are three kinds of tables, so that
none can be taken for another.
"""

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from co2.record.table import NOT_AVAILABLE, NOT_RUN, NOTHING, Table
from recipes.recipe import Column, Recipe, Rows
from recipes.tables.entries import Difference, Entry, entries, local_sgd
from recipes.tables.figures import slug

EMPTY = (NOT_RUN, NOT_AVAILABLE, NOTHING)
"""Texts of cells without a value."""
DIFFERENCES = (
    "Over the seeds that both have, two or more, with 95 % t intervals; of losses and perplexity "
    "in percent, between geometric means. The spread is pooled over all methods of a column unless "
    "Bartlett's test finds at 5 % that they scatter unequally: then it is that of the paired "
    "differences. A star: significant at 5 % after Holm's correction for all tests, to either row, "
    "of the columns of the same table. Without a star a method is not shown to differ, nor shown "
    "to be equal."
)

Place = tuple[str, str]
"""Names of a row and of a column."""


def tables(recipe: Recipe, ours: Rows, paper: Rows, scale: str) -> list[Table]:
    """All tables of a recipe, from its rows of results/ours.csv at this scale and of paper.csv.

    For each part of the recipe what was measured and, right below, the differences; at the end what
    papers report.
    """
    name = recipe.name if scale == "smoke" else f"{recipe.name}_{scale}"
    places = {(row.name, column.name) for row, column in recipe.places(scale)}
    ours = [line for line in ours if (line["row"], line["column"]) in places]
    found = entries(recipe, ours, scale)
    made: list[Table] = []
    not_run = []
    explained = DIFFERENCES
    for part in dict.fromkeys(column.part for column in recipe.columns):
        own = [entry for entry in found if entry.column.part == part]
        if any(entry.values for entry in own) and recipe.listed:
            title = f"{recipe.title}: {part}" if part else recipe.title
            stem = f"{name}_{slug(part)}" if part else name
            made.append(_measured(recipe, own, ours, stem, f"{title} (scale={scale})"))
            repeated = all(_repeats_loss(recipe, entry.column) for entry in own)
            compared = (
                () if repeated or not recipe.compared else _differences(recipe, own, stem, title)
            )
            for table in compared:
                made.append(replace(table, text=f"{explained} {table.text}".strip()))
                explained = ""
        elif own and recipe.listed:  # at this scale
            not_run.append(part)
    if not made:
        machines = f"Measured here ({_machines(ours)})." if ours else ""
        made = [Table((), (), name, f"{recipe.title} (scale={scale})", text=machines)]
        not_run = []
    first = made[0]
    parts = f"Nothing has run of: {'; '.join(not_run)}." if not_run else ""
    notes = (first.source, parts, origin(recipe, ours, scale))
    text = " ".join(filter(None, (recipe.text, first.text)))
    made[0] = replace(first, text=text, source=" ".join(filter(None, notes)))
    return [*made, *_reported(recipe, paper, name)]


def grid(
    cells: Mapping[Place, str],
    rows: Sequence[str],
    columns: Sequence[str],
    best: Collection[Place] = (),
) -> Table:
    """A table with those rows and columns in which any cell has a value.

    Args:
        cells: texts; a dash stands where there is none.
        best: places of the values in bold.
    """
    full = [place for place, text in cells.items() if text not in EMPTY]
    rows = [name for name in rows if any(name == row for row, _ in full)]
    columns = [name for name in columns if any(name == column for _, column in full)]
    return Table(
        head=["method", *columns],
        rows=[[row, *(cells.get((row, column), NOTHING) for column in columns)] for row in rows],
        best=frozenset((rows.index(row), 1 + columns.index(column)) for row, column in best),
    )


def values(found: Sequence[Entry]) -> tuple[list[str], str]:
    """Mean ± standard deviation of each entry, and words for what that is.

    The words tell how many seeds most columns have, and which columns have another number; within a
    column, entries with another number than most tell it. At least one must have a value.
    """
    counts = [len(entry.values) for entry in found if entry.values]
    usual = statistics.mode(counts)
    columns: dict[str, list[int]] = {entry.column.name: [] for entry in found}
    for entry in found:
        columns[entry.column.name] += [len(entry.values)] if entry.values else []
    # The usual number of all wins where two are as frequent in a column.
    of_column = {name: statistics.mode([*own, usual]) for name, own in columns.items()}
    texts = [
        entry.measured
        if len(entry.values) in (0, of_column[entry.column.name])
        else f"{entry.measured} (n = {len(entry.values)})"
        for entry in found
    ]
    heads: dict[int, list[str]] = {}
    for column in dict.fromkeys(entry.column for entry in found):
        heads.setdefault(of_column[column.name], []).append(column.head)
    notes = [f"{number} for {listed(of)}" for number, of in heads.items() if number != usual]
    mixed = any(len(set(own)) > 1 for own in columns.values())
    notes += ["n where it is another number"] if mixed else []
    words = f"{usual} seeds" if usual > 1 else "one seed"
    words += f" ({'; '.join(notes)})" if notes else ""
    if max(counts) == 1:
        return texts, f"{words}."
    return texts, (
        f"mean ± standard deviation over {words}; bold where the best interval overlaps no other."
    )


def listed(words: Sequence[str]) -> str:
    """Words as a sentence lists them: a, b and c."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def _measured(recipe: Recipe, own: Sequence[Entry], ours: Rows, name: str, title: str) -> Table:
    """Mean ± standard deviation of every row and column of which anything has run."""
    texts, seeds = values(own)
    cells = dict(zip(map(_place, own), texts, strict=True))
    here = {entry.column.name for entry in own}
    machines = _machines([line for line in ours if line["column"] in here])
    of_part = {entry.row.name for entry in own}
    rows, columns = [row.name for row in recipe.rows if row.name in of_part], _heads(own)
    best = [_place(entry) for entry in own if entry.best]
    table = grid(cells, rows, columns, best)
    kept = {*table.head, *(row[0] for row in table.rows)}
    gone = [word for word in (*rows, *columns) if word not in kept]
    notes = [f"Not run, and left out: {'; '.join(gone)}."] if gone else []
    if any(NOTHING in row for row in table.rows):
        notes.append(f"{NOTHING}: not planned, or not possible.")
    return replace(
        table,
        name=name,
        title=title,
        text=f"Measured here ({machines}): {seeds}",
        source=" ".join(notes),
    )


def _differences(recipe: Recipe, own: Sequence[Entry], name: str, title: str) -> Iterator[Table]:
    """A table of the differences to the first row, and one of those to local SGD."""
    local = local_sgd(recipe)
    pairs: list[tuple[str, list[Difference | None]]] = [
        (recipe.rows[0].name, [entry.to_first for entry in own]),
        ("" if local is None else local.name, [entry.to_local for entry in own]),
    ]
    for other, found in pairs:
        cells = {
            _place(entry): to.text(entry.column.digits)
            for entry, to in zip(own, found, strict=True)
            if to is not None
        }
        if not cells:
            continue
        table = grid(cells, [row.name for row in recipe.rows], _heads(own))
        alone = [head for head, whole in _pooled(own, found).items() if not whole]
        yield replace(
            table,
            name=f"{name}_to_{slug(other)}",
            title=f"{title}, differences to {other}",
            text=f"Paired: {listed(alone)}." if alone else "",
        )


def _pooled(own: Sequence[Entry], found: Sequence[Difference | None]) -> dict[str, bool]:
    """By column with an interval, whether any of its differences has the spread of all methods."""
    heads: dict[str, bool] = {}
    for entry, to in zip(own, found, strict=True):
        if to is not None and to.ends is not None:
            heads[entry.column.head] = heads.get(entry.column.head, False) or to.pooled
    return heads


def _repeats_loss(recipe: Recipe, column: Column) -> bool:
    """Whether it is the perplexity of a loss that the recipe has too: the same comparison twice."""
    losses = {other.overrides for other in recipe.columns if other.metric == "final.loss"}
    return column.metric == "final.perplexity" and column.overrides in losses


def _reported(recipe: Recipe, paper: Rows, name: str) -> Iterator[Table]:
    """What results/paper.csv has for this recipe, whether or not it was measured here."""
    cells = {}
    for line in paper:
        value = f"{int(line['value']):,}" if line["value"].isdecimal() else line["value"]
        spread = f" ± {line['spread']}" if line["spread"] else ""
        cells[line["row"], line["column"]] = f"{value}{spread}"
    if not cells:
        return
    rows = dict.fromkeys([*(row.name for row in recipe.rows), *(row for row, _ in cells)])
    columns = list(dict.fromkeys(column for _, column in cells))
    every = {
        (row, column): cells.get((row, column), NOT_AVAILABLE) for row in rows for column in columns
    }
    yield replace(
        grid(every, list(rows), columns),
        name=f"{name}_reported",
        title=f"{recipe.title}: what papers report",
        text="Not measured here. Models, data and networks are the papers' own, thousands of times "
        "as large: compare how a method stands to AllReduce, not the values.",
        source="results/paper.csv has the source of each value.",
    )


def origin(recipe: Recipe, ours: Rows, scale: str) -> str:
    """Number and commits of the runs behind a table, and the command that repeats them."""
    again = f"`python -m recipes run {recipe.name} --scale {scale}`"
    if not ours:
        return f"Nothing has run: {again}."
    commits = sorted({line["commit"] for line in ours})
    mixed = ", a mixture" if len(commits) > 1 else ""
    runs = len({(line["folder"], line["command"]) for line in ours})
    return (
        f"{runs} runs: results/runs.csv has folder and command of each. Commit "
        f"{', '.join(commits)}{mixed}. Again: {again}."
    )


def _machines(ours: Rows) -> str:
    return "; ".join(sorted({line["hardware"] for line in ours}))


def _place(entry: Entry) -> Place:
    return entry.row.name, entry.column.head


def _heads(own: Sequence[Entry]) -> list[str]:
    return list(dict.fromkeys(entry.column.head for entry in own))
