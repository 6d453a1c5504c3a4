"""What the legends of an SVG file by matplotlib tell apart."""

import re
from pathlib import Path
from xml.etree import ElementTree

from co2.record import drawing
from tests.grids import nonempty

SVG = "{http://www.w3.org/2000/svg}"
LINK = "{http://www.w3.org/1999/xlink}href"
Look = tuple[str, ...]
"""Styles and markers of an entry; a marker's name is that of its shape."""


def legends(path: Path) -> list[dict[str, Look]]:
    """Of each legend: its entries, by their words, and how each is drawn."""
    groups = ElementTree.parse(path).iter(f"{SVG}g")
    return [_entries(group) for group in groups if group.get("id", "").startswith("legend_")]


def _entries(legend: ElementTree.Element) -> dict[str, Look]:
    found: dict[str, Look] = {}
    seen: list[str] = []
    for part in legend:
        words = "".join(text.text or "" for text in part.iter(f"{SVG}text"))
        if words:
            assert words not in found, f"{words} has two entries"
            found[words], seen = tuple(seen), []
        for drawn in part.iter():
            seen += [drawn.get(key, "") for key in ("style", LINK)]
    return found


def assert_told_apart(path: Path) -> None:
    """A reader can tell apart what each panel of a figure shows."""
    for entries in nonempty(legends(path)):
        assert len(coloured(entries)) <= drawing.CURVES, path
        assert len(set(entries.values())) == len(entries), path


def coloured(legend: dict[str, Look]) -> list[str]:
    """The entries whose colour is not that of references."""
    return [
        words
        for words, look in legend.items()
        if set(re.findall("#[0-9a-f]{6}", " ".join(look))) & COLOURS
    ]


COLOURS = {colour for colour, _ in drawing.LOOKS.values()}
