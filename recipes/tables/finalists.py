"""How clearly the settings of each search won: what the other finalists have, beside the winner."""

import math
from collections.abc import Iterable, Iterator

from co2.record.table import NOTHING, Table
from recipes.recipe import Rows
from recipes.tuning import tune


def tables(trials: Rows, scale: str) -> Iterator[Table]:
    """A line for each search of this scale.

    Args:
        trials: rows of results/tuning.csv.
    """
    searches: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for line in trials:
        if line["scale"] == scale:
            searches.setdefault(tune.search_of(line), []).append(line)
    rows = [_row(own) for own in searches.values()]
    agreed, ended = agreement(searches.values())
    if rows:
        yield Table(
            name="tuning",
            title="Settings: the winner of each search, and the other finalists",
            text="Every method has as many short trials. The best of them are trained in full, in "
            "newer searches also one a step beyond a best at the end of what was tried; the best "
            f"of these wins. Of {ended} searches with several finalists the best short "
            f"trial won {agreed}; by chance it wins one in so many as there are finalists. Loss is "
            "that on the tuning part of the data, with one seed that no table uses. Others: by how "
            "many percent the other finalists that ended are above the winner, from the nearest to "
            "the farthest. One seed decides, so winners that lie close to others are chance. Of a "
            "method that was searched several times the file keeps the last search only, so the "
            "number of searches stands in its history (`git log results/tuning.csv`), not here.",
            head=("task", "method", "τ", "trials", "in full", "winner's loss", "others above, %"),
            rows=rows,
            source="results/tuning.csv has every trial with its settings and commit.",
        )


def agreement(searches: Iterable[Rows]) -> tuple[int, int]:
    """In how many searches the best short trial also won in full, and of how many with several
    finalists that ended."""
    ranked = [
        (short, [one for one in whole if math.isfinite(float(one["loss"]))])
        for short, whole in map(tune.rungs, searches)
    ]
    several = [(short[0], whole[0]) for short, whole in ranked if len(whole) > 1]
    return sum(first["trial"] == won["trial"] for first, won in several), len(several)


def _row(search: Rows) -> tuple[str, ...]:
    """Of the trials of one search."""
    first = search[0]
    moments = "moments averaged" if first["average_moments"] else ""
    short, whole = tune.rungs(search)
    losses = [loss for line in whole if math.isfinite(loss := float(line["loss"]))]
    above = [f"{100 * (loss / losses[0] - 1):.2f}" for loss in losses[1:]]
    return (
        first["task"],
        ", ".join(filter(None, (first["method"], moments, first.get("gap_penalty")))),
        first["tau"] or NOTHING,
        str(len(short)),
        str(len(whole)),
        f"{losses[0]:.4f}" if losses else NOTHING,
        " to ".join(dict.fromkeys(above[:1] + above[-1:])) or NOTHING,
    )
