"""results/report.html: the answer, then every table and figure, on a page that fetches nothing.

The experiments are a list: each opens with a click, or by a link to it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from co2.record.table import NOT_AVAILABLE, NOT_RUN, NOTHING, Table
from recipes.tables.figures import slug

_LONG = 24
"""Longer texts in a cell may be broken into lines."""
_STYLE = """
:root { color-scheme: light dark; --line: #8885; --shade: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 80rem; margin: 0 auto; padding: 1rem; }
p, li { max-width: 60rem; }
nav a { display: inline-block; margin-right: 1rem; }
details { border-bottom: 1px solid var(--line); }
summary { padding: 0.5rem 0; cursor: pointer; font-weight: 600; }
.wide { overflow-x: auto; background:
  linear-gradient(to left, Canvas 40%, transparent) right / 3rem 100% no-repeat local,
  linear-gradient(to left, #8888, transparent) right / 1rem 100% no-repeat scroll; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 0.5rem;
  border-bottom: 1px solid var(--line); }
td { white-space: nowrap; }
td.parts { white-space: normal; }
td.parts span { display: block; white-space: nowrap; }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 2px solid; }
tr:hover td { background: var(--shade); }
th:first-child, td:first-child { position: sticky; left: 0; background: Canvas; }
td:first-child { white-space: normal; min-width: 5rem; }
.none { opacity: .55; }
.figures { display: grid; gap: 1rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
figure { margin: 0; }
figure svg { display: block; width: 100%; max-width: 30rem; height: auto; margin: auto; }
figure text { fill: currentColor !important; }
small { opacity: .75; }
@media (max-width: 40rem) {
  table { font-size: 0.8rem; }
  th, td { padding: 0.2rem 0.3rem; }
  h1 { font-size: 1.5rem; }
}
"""
_SCRIPT = """
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), body = head.closest("table").tBodies[0];
    const at = head.cellIndex, down = head.getAttribute("aria-sort") === "ascending";
    const key = (row) => {
      const text = row.cells[at].textContent.replaceAll(",", "");
      const number = /^([+-]?[\\d.]+)†?(?: [%±[(].*)?$/.exec(text);
      return number ? parseFloat(number[1]) : text;
    };
    const order = (a, b) => {
      const x = key(a), y = key(b);
      if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
      return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
    };
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    body.append(...[...body.rows].sort(order));
  });
}
const show = () => {
  const place = document.getElementById(location.hash.slice(1));
  const closed = place?.closest("details:not([open])");
  if (closed) closed.open = true, place.scrollIntoView();
};
addEventListener("hashchange", show);
show();
"""


@dataclass(frozen=True)
class Section:
    """One recipe's part of the page."""

    name: str
    title: str
    tables: Sequence[Table]
    figures: Sequence[Path]
    """SVG files, whose text becomes part of the page."""


@dataclass(frozen=True)
class Opening:
    """What the page begins with."""

    text: str
    """What to know before the points are read."""
    points: Sequence[str]
    """The answer, a sentence or two each."""
    below: str
    """What to know of all points."""
    tables: Sequence[Table]
    figures: Sequence[Path] = ()


def write(path: Path, opening: Opening, sections: Sequence[Section]) -> None:
    """Write the page. Makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    places = {"answer": "The answer", **{slug(t.title): t.title for t in opening.tables}}
    places["experiments"] = f"All {len(sections)} experiments"
    links = "".join(f'<a href="#{name}">{escape(title)}</a> ' for name, title in places.items())
    body = (
        f"<nav>{links}</nav>\n{_opening(opening)}"
        '<h2 id="experiments">Experiments</h2>\n'
        "<p>A click on an experiment opens it; a click on a head of a table sorts by it. Curves "
        "are means over the seeds, in bands of one standard deviation to either side.</p>\n"
        f"{''.join(map(_section, sections))}"
    )
    looks: dict[str, str] = {}
    body = re.sub(
        r"<figure>.*?</figure>", lambda figure: _classed(figure[0], looks), body, flags=re.DOTALL
    )
    rules = "".join(f".{name}{{{look}}}" for look, name in looks.items())
    path.write_text(
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Or a browser would request an icon.
        '<link rel="icon" href="data:,">\n'
        f"<title>Ways of synchronizing replicas, compared</title>\n"
        f"<style>{_STYLE}{rules}</style></head>\n"
        "<body><h1>Ways of synchronizing replicas, compared</h1>\n"
        f"{body}<script>{_SCRIPT}</script></body></html>\n"
    )


def _opening(opening: Opening) -> str:
    points = "".join(f"<li>{_words(point)}</li>\n" for point in opening.points)
    told = _paragraph(opening.text) + (f"<ul>{points}</ul>\n" if points else "")
    told += _paragraph(opening.below)
    tables = "".join(
        f'<section id="{slug(table.title)}">{_table(table, "h2")}</section>'
        for table in opening.tables
    )
    return f'<h2 id="answer">The answer</h2>\n{told}{tables}{_figures(opening.figures)}'


def _section(section: Section) -> str:
    """A part that opens with a click. The link's target is within it, so that browsers open it."""
    tables = "".join(_table(table, "h3") for table in section.tables)
    return (
        f'<details><summary>{escape(section.title)}</summary><section id="{section.name}">\n'
        f"{tables}{_figures(section.figures)}</section></details>\n"
    )


def _figures(paths: Sequence[Path]) -> str:
    return f'<div class="figures">{"".join(map(_figure, paths))}</div>\n' if paths else ""


def _table(table: Table, head: str) -> str:
    """Title, text, table and source; of a table without rows its words.

    Args:
        head: the element of the title.
    """
    words = f"<{head}>{escape(table.title)}</{head}>\n{_paragraph(table.text)}"
    source = f"<p><small>{_words(table.source)}</small></p>\n" if table.source else ""
    if not table.rows:
        return words + source
    heads = "".join(f'<th scope="col"><button>{escape(name)}</button></th>' for name in table.head)
    rows = ""
    for number, row in enumerate(table.texts()):
        cells = (_cell(cell, (number, at) in table.best) for at, cell in enumerate(row))
        rows += f"<tr>{''.join(cells)}</tr>\n"
    return (
        f'{words}<div class="wide"><table><thead><tr>{heads}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>\n{source}"
    )


def _paragraph(text: str) -> str:
    return f"<p>{_words(text)}</p>\n" if text else ""


def _words(text: str) -> str:
    """Sentences of Markdown as HTML: code, bold words, and links without where they lead."""
    text = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", escape(text))
    text = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)


def _cell(text: str, best: bool) -> str:
    """A cell. An interval stands below its mean, and a long text may be broken."""
    mean, between, interval = text.partition(" [")
    shown = escape(text)
    if between:
        shown = f"<span>{escape(mean)}</span> <span>[{escape(interval)}</span>"
    kind = "parts" if between or len(text) > _LONG else ""
    kind = "none" if text in (NOT_RUN, NOT_AVAILABLE, NOTHING) else kind
    opened = f'<td class="{kind}">' if kind else "<td>"
    return f"{opened}<strong>{shown}</strong></td>" if best else f"{opened}{shown}</td>"


def _figure(path: Path) -> str:
    """An SVG file without what a page does not need: its head, its metadata, its line breaks, the
    names of its groups, and all but two decimals of its numbers."""
    text = path.read_text()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r">\s+<", "><", text)
    text = re.sub(r"\s*\n\s*", " ", text)
    text = re.sub(r'<g id="[^"]+"', "<g", text)
    text = re.sub(r"<[^>]*>", lambda tag: _rounded(tag[0]), text)  # not what stands between tags
    return f"<figure>{text}</figure>\n"


def _classed(figure: str, looks: dict[str, str]) -> str:
    """The figure with a short name for each of its styles, which many tags share; `looks` has them,
    by style."""
    return re.sub(
        r'style="([^"]*)"',
        lambda own: f'class="{looks.setdefault(own[1], f"s{len(looks)}")}"',
        figure,
    )


def _rounded(tag: str) -> str:
    """A tag whose numbers have two decimals, which is a hundredth of a point."""
    return re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", tag)
