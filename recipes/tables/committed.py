"""Cells of the Markdown tables that stand under results/, such as a benchmark's."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from co2.errors import ConfigError

_TABLE = re.compile(r"^\|(.*)\|\n\|[-|]+\|\n((?:\|.*\|\n?)*)", re.MULTILINE)


def cell(results: Path, file: str, row: Sequence[str], column: str) -> str:
    """What stands in a column of the one row that has all these cells, without bold.

    Raises `ConfigError` where there is no such file, row or column, or more than one.
    """

    def missing(hint: str) -> ConfigError:
        return ConfigError("<!--=table", "|".join((file, *row, column)), hint)

    try:
        text = (results / file).read_text(encoding="utf-8")
    except OSError:
        raise missing(f"results has no file {file}") from None
    lines = [line for line in _lines(text) if set(row) <= set(line.values())]
    if not lines:
        raise missing(f"results/{file} has no row with {' and '.join(row)}")
    found = [line[column] for line in lines if column in line]
    if not found:
        raise missing(f"this row of results/{file} has no column {column}")
    if len(found) > 1:
        raise missing(f"results/{file} has {len(found)} such rows; name more cells of one")
    return found[0]


def _lines(text: str) -> Iterator[dict[str, str]]:
    """The rows of all tables of a page, by column."""
    for head, body in _TABLE.findall(text):
        for line in body.splitlines():
            yield dict(zip(_cells(head), _cells(line[1:-1]), strict=True))


def _cells(line: str) -> list[str]:
    return [text.strip().removeprefix("**").removesuffix("**") for text in line.split("|")]
