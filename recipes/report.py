"""results/report.html: every table and figure in one static page, without a network."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from recipes.table import HEAD, Entry, lines

_STYLE = """
:root { color-scheme: light dark; --line: #8885; --shade: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem; }
nav a { margin-right: 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line); }
td { white-space: nowrap; }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 2px solid; }
tr:hover td { background: var(--shade); }
.none { opacity: .55; }
figure { margin: 1rem 0; overflow-x: auto; }
figure svg { max-width: 100%; height: auto; }
small { opacity: .75; }
"""
_SCRIPT = """
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), body = head.closest("table").tBodies[0];
    const at = head.cellIndex, down = head.getAttribute("aria-sort") === "ascending";
    const key = (row) => {
      const text = row.cells[at].textContent.replaceAll(",", "");
      const number = parseFloat(text);
      return Number.isNaN(number) ? text : number;
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
    text: str
    entries: Sequence[Entry]
    figures: Sequence[Path]
    """SVG files, which the page takes in."""
    source: str


def write(path: Path, sections: Sequence[Section]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    links = "".join(f'<a href="#{s.name}">{escape(s.title)}</a>' for s in sections)
    path.write_text(
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # No request for an icon either.
        '<link rel="icon" href="data:,">\n'
        f"<title>Ways of synchronizing replicas, compared</title>\n<style>{_STYLE}</style></head>\n"
        "<body><h1>Ways of synchronizing replicas, compared</h1>\n"
        "<p>Measured with the code of this repository. A click on a head sorts by it.</p>\n"
        f"<nav>{links}</nav>\n{''.join(_section(s) for s in sections)}"
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def _section(section: Section) -> str:
    heads = "".join(f'<th scope="col"><button>{escape(name)}</button></th>' for name in HEAD)
    rows = "".join(
        _row(e, cells) for e, cells in zip(section.entries, lines(section.entries), strict=True)
    )
    drawn = "".join(f"<figure>{_inline(path)}</figure>\n" for path in section.figures)
    return (
        f'<section id="{section.name}"><h2>{escape(section.title)}</h2>\n'
        f"<p>{escape(section.text)}</p>\n"
        f'<div class="wide"><table><thead><tr>{heads}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>\n"
        f"{drawn}<p><small>{escape(section.source)}</small></p></section>\n"
    )


def _row(entry: Entry, cells: Sequence[str]) -> str:
    own = [f"<td>{escape(cell)}</td>" for cell in cells]
    if entry.best:
        own[2] = f"<td><strong>{escape(cells[2])}</strong></td>"
    elif not entry.values:
        own[2] = f'<td class="none">{escape(cells[2])}</td>'
    return f"<tr>{''.join(own)}</tr>\n"


def _inline(path: Path) -> str:
    """An SVG file without what comes before its first element."""
    text = path.read_text()
    return text[text.index("<svg") :]
