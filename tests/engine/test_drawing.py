"""Figures: how methods look in all of them, what a panel holds, and spans and cells read again."""

from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from co2.catalogue import CATALOGUE
from co2.record import drawing
from co2_measure.lab import report
from co2_measure.lab.measurement import read_csv, write_csv
from co2_measure.lab.trial import LIMIT
from co2_measure.simulate.report import Panel, Report
from recipes.paper import figure1
from recipes.recipe import Row
from recipes.tables import figures
from recipes.tables.methods import EVERY_METHOD
from tests.cli.harness import ROOT
from tests.grids import nonempty
from tests.legends import assert_told_apart, legends

PAGES = ("#ffffff", "#0d1117")
"""A white and a black page."""


def luminance(colour: str) -> float:
    """WCAG 2.1, relative."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def apart(one: str, other: str) -> float:
    return sum((a - b) ** 2 for a, b in zip(to_rgb(one), to_rgb(other), strict=True)) ** 0.5


def test_every_method_has_a_look_of_its_own() -> None:
    assert drawing.LOOKS.keys() <= CATALOGUE.keys()  # others are grey
    colours, markers = zip(*drawing.LOOKS.values(), strict=True)
    assert len(set(colours)) == len(set(markers)) == len(drawing.LOOKS) >= 20
    for colour in (*colours, drawing.GREY):
        assert min(contrast(colour, page) for page in PAGES) > 3, colour
    first = [drawing.LOOKS[name][0] for name in ("allreduce", "co2", "co2_keep")]
    assert min(apart(*two) for two in combinations(first, 2)) > 0.4
    allreduce, *others = EVERY_METHOD
    for one, other in combinations(others, 2):
        if figures.kind(one) == figures.kind(other):
            three = [drawing.LOOKS[row.name][0] for row in (allreduce, one, other)]
            assert min(apart(*two) for two in combinations(three, 2)) > 0.26, (one, other)


def test_variants_of_a_method_have_its_colour_and_dashes_of_their_own() -> None:
    rows = [Row(f"CO2 {n}", ("method=co2", f"co2.tau={n}")) for n in range(3)]
    looks = figures.styles([*rows, Row("limit", ("method=none",), limit=True)])
    assert {looks[row.name]["color"] for row in rows} == {drawing.LOOKS["co2"][0]}
    assert len({looks[row.name].get("linestyle", "-") for row in rows}) == 3
    assert looks["limit"]["color"] == drawing.GREY


@pytest.mark.parametrize("count", [1, 6, 7, 20])
def test_a_panel_has_six_curves_at_most(tmp_path: Path, count: int) -> None:
    rows = [Row(f"row {n}", ("method=co2",)) for n in range(count)]
    path = tmp_path / "a.svg"
    with figures.panels(path, "title", rows) as parts:
        shown = [own for _, own in parts]
        for axis, own in parts:
            figures.lines(axis, {row: {1: [1.0, 2.0], 2: [3.0]} for row in own})
    assert all(own[0] is rows[0] and len(own) <= 6 for own in shown)
    assert [row for own in shown for row in own[1:]] == rows[1:]
    assert all(f">{row.name}<" in path.read_text() for row in rows)


def test_many_methods_have_panels_for_each_kind(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    with figures.panels(path, "title", EVERY_METHOD) as parts:
        shown = [([row.name for row in own], axis.get_title()) for axis, own in parts]
    assert all(own[0] == "allreduce" and len(own) <= 6 for own, _ in shown)
    assert sorted(name for own, _ in shown for name in own[1:]) == sorted([*CATALOGUE][1:])
    for own, title in shown:
        assert {figures.kind(row) for row in EVERY_METHOD if row.name in own[1:]} == {
            title.removeprefix("title\n")
        }
    assert shown[0][1].startswith("title\n")


def test_other_figures_split_their_panels_too(tmp_path: Path) -> None:
    simulated = Panel("per second")
    for number, name in enumerate(CATALOGUE):
        simulated.add(name, name, 8, 2.0**number)
    Report("title", "", [], [], [], [simulated]).save("", None, None, str(tmp_path / "a.svg"))
    cells = read_csv(ROOT / "results" / "lab" / "cells.csv")
    others = [replace(one, method=f"{one.method} {n}") for one in cells for n in range(2)]
    limits = [one for one in cells if one.method == LIMIT]
    report.draw([*others, *limits], tmp_path / "b.svg")
    for name, count in (("a", len(CATALOGUE)), ("b", len({one.method for one in others}))):
        found = legends(tmp_path / f"{name}.svg")
        assert all(1 < len(entries) <= 7 for entries in found)
        words = {word for entries in found for word in entries} - {"no communication"}
        assert len(words) == count > 6


def test_a_reader_can_tell_apart_what_committed_figures_show() -> None:
    """Those that render draws are in tests/recipes/test_committed.py."""
    results = ROOT / "results"
    for path in nonempty([*results.glob("*.svg"), *(results / "lab").glob("*.svg")]):
        assert_told_apart(path)


def test_extrapolated_points_are_hollow() -> None:
    axis = Figure().subplots()
    drawing.points(axis, {1: 5.0, 2: 6.0, 3: 7.0}, [1, 1, 1], hollow=[1], **drawing.look("co2"))
    filled, empty = (line for line in axis.get_lines() if line.get_marker() == "o")
    assert (filled.get_markevery(), filled.get_fillstyle()) == ([1, 2], "full")
    assert (empty.get_markevery(), empty.get_fillstyle()) == ([0], "none")
    assert filled.get_color() == empty.get_color()


def test_lines_of_a_group_on_each_other_are_one() -> None:
    panel = Panel("lost")
    for name, group, value in (("a", "x", 1.0), ("b", "x", 1.01), ("c", "x", 2.0), ("d", "y", 1.0)):
        panel.add("co2", name, 8, value, group)
    assert [label for _, label in panel.apart()] == ["x: a, b", "x: c", "y: d"]


def test_what_is_drawn_can_be_read_again(tmp_path: Path) -> None:
    spans, cells = ROOT / "results" / figure1.SPANS, ROOT / "results" / "lab" / "cells.csv"
    found = figure1.read(spans)
    assert [lanes.steps for lanes in found.values()] == [12, 12, 12]
    assert all(begin <= end for lanes in found.values() for begin, end in lanes.compute)
    assert all(a[1] <= b[0] for lanes in found.values() for a, b in pairwise(lanes.still))
    figure1.write(found, tmp_path / "spans.csv")
    assert (tmp_path / "spans.csv").read_bytes() == spans.read_bytes()
    write_csv(read_csv(cells), tmp_path / "cells.csv", with_target=False)
    assert (tmp_path / "cells.csv").read_bytes() == cells.read_bytes()
