"""The winner of each search and the other finalists."""

from pathlib import Path

from co2.record.table import Table, read_csv
from recipes.tables import finalists, render
from recipes.tuning import tune
from tests.recipes.test_tables import TOY, results

__all__ = ["results"]  # a fixture


def search(
    method: str,
    short: int,
    *whole: str,
    tau: str = "12",
    moments: str = "",
    scale: str = "smoke",
    gap: str = "",
) -> list[dict[str, str]]:
    """Lines of tuning.csv: short trials, whose losses are below all others, and finalists."""
    key = dict(zip(tune.KEY, ("gpt2", method, tau, moments, gap, scale), strict=True))
    rungs = [("25", "0.1")] * short + [("100", loss) for loss in whole]
    return [
        {
            **dict.fromkeys(tune.FIELDS, ""),
            **key,
            "trial": str(n % short),
            "rung": rung,
            "loss": loss,
        }
        for n, (rung, loss) in enumerate(rungs)
    ]


LINES = [
    *search("allreduce", 12, "2.02", "2.0", "2.1", tau=""),
    *search("co2_keep", 8, "2.0", "inf", "2.01", moments="true"),
    *search("co2", 4, "2.5", gap="gap_aware"),
    *search("slowmo", 5),
    *search("slowmo", 5, "1.0", scale="gpu"),
]


def test_finalists_are_held_against_the_winner() -> None:
    (table,) = finalists.tables(LINES, "smoke")
    assert table.rows == [
        ("gpt2", "allreduce", "—", "12", "3", "2.0000", "1.00 to 5.00"),
        ("gpt2", "co2_keep, moments averaged", "12", "8", "3", "2.0000", "0.50"),
        ("gpt2", "co2, gap_aware", "12", "4", "1", "2.5000", "—"),
        ("gpt2", "slowmo", "12", "5", "0", "—", "—"),
    ]
    assert "Of 2 searches with several finalists the best short trial won 1;" in table.text
    assert list(finalists.tables(LINES, "paper")) == list(finalists.tables([], "smoke")) == []


def test_searches_have_a_page_of_each_scale_and_a_part_of_the_report(results: Path) -> None:
    Table.of_records(LINES, tune.FIELDS).write_csv(results / "tuning.csv")
    for scale in ("smoke", "gpu"):
        render.render([TOY], results, scale)
    own = {name: read_csv(results / "tables" / f"{name}.csv") for name in ("tuning", "tuning_gpu")}
    assert [len(lines) for lines in own.values()] == [4, 1]
    assert '<section id="tuning">' in (results / "report.html").read_text()
    assert "slowmo | 12 | 5 | 1 | 1.0000 | — |" in (results / "tables/tuning_gpu.md").read_text()
