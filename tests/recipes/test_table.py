"""The table type: Markdown, LaTeX and CSV of the same values."""

import subprocess
import sys
from pathlib import Path

import pytest

from co2.record.table import Table, read_csv
from recipes.studies.digits import mean_text
from recipes.tables.latex import latex

TABLE = Table(
    head=["task", "a_b", "share"],
    rows=[["vit", 1 / 3, 0.5], ["vit", None, 0.25], ["gpt2", 2e-17, 1]],
    title="Title",
    text="τ = 12 & `code`.",
    source="Source.",
    best=frozenset({(1, 2)}),
    formats={"share": "{:.0%}".format},
)


def test_a_page_shows_values_by_their_formats() -> None:
    assert TABLE.page() == (
        "# Title\n\nτ = 12 & `code`.\n\n"
        "| task | a_b | share |\n|---|---|---|\n"
        "| vit | 0.3333333333333333 | 50% |\n| vit | — | **25%** |\n| gpt2 | 2e-17 | 100% |\n\n"
        "Source.\n"
    )
    assert Table(["a"], [[1]]).page() == "| a |\n|---|\n| 1 |\n", "no empty title"
    assert Table([], [], text="Text.", source="Source.").page() == "Text.\n\nSource.\n"


def test_csv_keeps_every_digit_and_type(tmp_path: Path) -> None:
    path = tmp_path / "new" / "table.csv"
    TABLE.write_csv(path)
    assert path.read_bytes() == (
        b"task,a_b,share\r\nvit,0.3333333333333333,0.5\r\nvit,,0.25\r\ngpt2,2e-17,1\r\n"
    )
    assert read_csv(path)[1] == {"task": "vit", "a_b": "", "share": "0.25"}
    assert read_csv(tmp_path / "none.csv") == []
    words = [{"a": "NA", "b": "x, y"}, {"a": "1.50", "b": 'a "b"'}]
    Table.of_records(words).write_csv(path)
    assert read_csv(path) == words, "text stays text"


def test_records_are_rows_and_the_head_picks_columns(tmp_path: Path) -> None:
    records = [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    assert Table.of_records(records).head == ["a", "b"]
    assert Table.of_records(records, ["b"]).rows == [[2], [4]]
    with pytest.raises(KeyError):
        Table.of_records(records, ["c"])
    Table.of_records([], ["a", "b"]).write_csv(tmp_path / "empty.csv")
    assert (tmp_path / "empty.csv").read_bytes() == b"a,b\r\n"


def test_latex_is_escaped_and_has_a_rule_where_the_first_column_changes() -> None:
    lines = latex(TABLE).splitlines()
    assert r"\caption{Title. $\tau$ = 12 \& code.}" in lines
    start = lines.index(r"\toprule")
    assert lines[start + 1 : start + 7] == [
        r"task & a\_b & share \\",
        r"\midrule",
        r"vit & 0.3333333333333333 & 50\% \\",
        r"vit & --- & \textbf{25\%} \\",
        r"\midrule",
        r"gpt2 & 2e-17 & 100\% \\",
    ]


def test_latex_has_no_rules_where_every_row_has_a_name_of_its_own() -> None:
    table = Table(["method", "a"], [["x", "1 ≈"], ["y", "2"]], title="T.")
    rows = latex(table).splitlines()
    assert rows.count(r"\midrule") == 1, "below the head"
    assert r"x & 1 $\approx$ \\" in rows


def test_mean_and_deviation() -> None:
    assert mean_text([1.0, 2.0, 3.0], ".2f") == "2.00 ± 1.00"
    assert mean_text([0.015], ".1%") == "1.5%"


def test_a_table_needs_no_torch() -> None:
    code = "import sys, co2.record.table; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
