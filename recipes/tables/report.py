"""results/report.html: the answer, then every table and figure, on a page that fetches nothing."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from co2.record.table import NOT_AVAILABLE, NOT_RUN, NOTHING, Table

_BROAD_POINTS = 400
_STYLE = """
:root { color-scheme: light dark; --line: #8885; --shade: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 0 auto; padding: 1rem; }
nav a { margin-right: 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line); }
td { white-space: nowrap; }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 2px solid; }
tr:hover td { background: var(--shade); }
th:first-child, td:first-child { position: sticky; left: 0; background: Canvas; }
.none { opacity: .55; }
.figures { display: grid; gap: 1rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
figure { margin: 0; overflow-x: auto; }
figure svg { display: block; width: 100%; max-width: 30rem; height: auto; margin: auto; }
figure.broad { grid-column: 1 / -1; }
figure.broad svg { min-width: 40rem; max-width: none; }
figure text { fill: currentColor !important; }
small { opacity: .75; }
@media (max-width: 40rem) {
  table { font-size: .8rem; }
  th, td { padding: .2rem .3rem; }
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
"""


@dataclass(frozen=True)
class Section:
    """One recipe's part of the page."""

    name: str
    title: str
    tables: Sequence[Table]
    figures: Sequence[Path]
    """SVG files, whose text becomes part of the page."""


def write(path: Path, sections: Sequence[Section]) -> None:
    """Write the page. The first section stands before the list of the others. Makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    first, *others = sections
    links = "".join(f'<a href="#{s.name}">{escape(s.title)}</a> ' for s in others)
    path.write_text(
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Or a browser would request an icon.
        '<link rel="icon" href="data:,">\n'
        f"<title>Ways of synchronizing replicas, compared</title>\n<style>{_STYLE}</style></head>\n"
        "<body><h1>Ways of synchronizing replicas, compared</h1>\n"
        "<p>Measured with the code of this repository. A click on a head sorts by it.</p>\n"
        f"{_section(first)}<nav>{links}</nav>\n{''.join(map(_section, others))}"
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def _section(section: Section) -> str:
    tables = "".join(_table(table) for table in section.tables)
    drawn = "".join(_figure(path) for path in section.figures)
    return f'<section id="{section.name}">\n{tables}<div class="figures">{drawn}</div></section>\n'


def _table(table: Table) -> str:
    """Title, text, table and source; of a table without rows its words."""
    words = f"<h2>{escape(table.title)}</h2>\n"
    words += f"<p>{_words(table.text)}</p>\n" if table.text else ""
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


def _words(text: str) -> str:
    """Sentences as HTML. Text between backticks becomes code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _cell(text: str, best: bool) -> str:
    shown = f"<strong>{escape(text)}</strong>" if best else escape(text)
    empty = text in (NOT_RUN, NOT_AVAILABLE, NOTHING)
    return f'<td class="none">{shown}</td>' if empty else f"<td>{shown}</td>"


def _figure(path: Path) -> str:
    """An SVG file without what a page does not need: its head, its metadata, its line breaks, the
    names of its groups, and all but two decimals of its numbers. A broad one may be scrolled."""
    text = path.read_text()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r">\s+<", "><", text)
    text = re.sub(r"\s*\n\s*", " ", text)
    text = re.sub(r'<g id="[^"]+"', "<g", text)
    text = re.sub(r"<[^>]*>", lambda tag: _rounded(tag[0]), text)  # not what stands between tags
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    assert found is not None, path
    broad = float(found[1]) > _BROAD_POINTS
    return f'<figure class="broad">{text}</figure>\n' if broad else f"<figure>{text}</figure>\n"


def _rounded(tag: str) -> str:
    """A tag whose numbers have two decimals, which is a hundredth of a point."""
    return re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", tag)
