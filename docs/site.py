"""Which files the site shows, for mkdocs: README.md, the pages of docs/, and what they link to.

The site has the layout of the repository, so that a link is the same in both. A linked file that
is neither a page nor a picture becomes a page with its text, and a linked folder one that lists it.
The page of the API is made of what `co2` offers, that of the keys of what configurations declare,
and the report of the committed values.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import co2
from co2.app.help import sentences
from co2.app.schema import PLAIN, schema
from co2.config import NODES, Config
from co2.limits import limits, words
from co2.methods import METHODS
from recipes.registry import RECIPES
from recipes.tables.render import render
from tasks import TASKS

ROOT = Path(__file__).resolve().parent.parent
AS_THEY_ARE = (".css", ".md", ".png", ".svg")
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".toml": "toml"}
SEARCH = "---\nsearch:\n  {}\n---\n"
"""Heads a page that a search is to leave out, or to show later than others."""
REPORT = "[The report](results/report.html) has every table and figure on one page."
_MARK = re.compile(r"<!--(=.*?|/)-->")
"""Around a rendered number. At the beginning of a line it would end the paragraph."""
_BADGE = re.compile(r" \[!\[CI\]\([^)]*\)\]\([^)]*\)")
"""What GitHub alone knows."""
_LINK = re.compile(r"(?<=\]\()(?![\w+]+:|#)(?P<target>[^)\s#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces what lies in docs/ by the repository's pages; the theme's own files stay."""
    shown = Files([file for file in files if file.src_dir != config.docs_dir])
    for path in sorted(_shown() | {ROOT / "docs/site.css"}):
        shown.append(_file(path, config))
    shown.append(File.generated(config, "reference.md", content=_reference()))
    shown.append(File.generated(config, "keys.md", content=_keys()))
    shown.append(File.generated(config, "results/report.html", content=_report()))
    return shown


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Links to what is a page on the site only, by the name that it has there. The start page has
    one to the report."""
    here = Path(page.file.src_uri).parent

    def renamed(link: re.Match[str]) -> str:
        target = ROOT / os.path.normpath(here / link["target"])
        return link["target"] + _suffix(target) if target.exists() else link["target"]

    markdown = _LINK.sub(renamed, _MARK.sub("", markdown))
    if page.file.src_uri == "README.md":
        markdown = _BADGE.sub("", markdown)
        markdown = markdown.replace("\n## Results\n", f"\n## Results\n\n{REPORT}\n", 1)
    return markdown


def _shown() -> set[Path]:
    """Pages, and whatever they link to, directly or through another page."""
    found: set[Path] = set()
    ahead = {*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")}
    while ahead:
        path = ahead.pop()
        found.add(path)
        if path.suffix == ".md":
            ahead |= set(_linked(path)) - found
    return found


def _linked(page: Path) -> Iterator[Path]:
    for target in _LINK.findall(page.read_text()):
        path = Path(os.path.normpath(page.parent / target))
        if path.exists():  # mkdocs names the others
            yield path


def _file(path: Path, config: MkDocsConfig) -> File:
    name = path.relative_to(ROOT).as_posix()
    if not _suffix(path):
        return File.generated(config, name, abs_src_path=str(path))
    if path.is_dir():
        names = sorted(part.name for part in path.iterdir() if not part.name.startswith(("_", ".")))
        text = "\n".join(f"- `{part}`" for part in names)
    else:
        text = f"```{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}```"
    content = f"{SEARCH.format('exclude: true')}# {name}\n\n{text}\n"
    return File.generated(config, name + _suffix(path), content=content)


def _suffix(path: Path) -> str:
    """What a file's name gets on the site, where it is a page with the file's text."""
    return "" if path.suffix in AS_THEY_ARE else ".md"


def _reference() -> str:
    """The page of the API. A method's module opens with its equations."""
    parts = {
        "In a loop of your own": [
            "co2.Method",
            "co2.Mesh",
            "co2.run",
            "co2.CommConfig",
            "co2.ConfigError",
        ],
        "In other trainers": [
            "co2.integrations.transformers.SyncTrainer",
            "co2.integrations.lightning.SyncStrategy",
        ],
        "Tasks": ["co2.task"],
    }
    text = SEARCH.format("boost: 0.05") + "# API\n\n## Methods\n"
    for method in co2.METHODS.values():
        text += f"\n### co2.{method.__name__}\n\n{_shown_as(method.__module__, 'equations')}"
        text += f"\n{_shown_as(f'{method.__module__}.{method.__qualname__}.Config', 'settings')}"
    for title, names in parts.items():
        text += f"\n## {title}\n" + "".join(f"\n::: {name}\n" for name in names)
    return text


def _keys() -> str:
    """The page of all keys of a configuration, which their dataclasses declare."""
    kinds = dict(NODES)
    kinds |= {name: schema(kind) for own in (TASKS, METHODS) for name, kind in own.items()}
    text = SEARCH.format("boost: 0.5") + (
        "# Configuration keys\n\n`python train.py KEY=VALUE`. The values of a recipe are those of "
        "its files in `conf`; `--help` shows them, and what stands here without one.\n"
    )
    for node, kind in {"": Config, **kinds}.items():
        hints = PLAIN if not node else limits(kind)
        if hints:
            text += f"\n## {node or 'the run'}\n\n| key | default | type | |\n|---|---|---|---|\n"
        defaults, meanings = {f.name: f for f in fields(kind)}, sentences(kind)
        for name, hint in hints.items():
            field = defaults[name]
            made = None if field.default_factory is MISSING else field.default_factory()
            value = made if field.default is MISSING else field.default
            told = value.value if isinstance(value, Enum) else value
            key, meaning = f"{node}.{name}".strip("."), meanings.get(name, "")
            cells = key, json.dumps(told), words(hint), meaning
            text += "| `{}` | `{}` | {} | {} |\n".format(*(c.replace("|", "\\|") for c in cells))
    return text


def _report() -> str:
    """results/report.html as `make report` would write it, and a way back to the site.

    Nothing changes in the repository.
    """
    with TemporaryDirectory() as folder:
        for name in ("docs", "results"):
            copy = Path(folder, name)
            shutil.copytree(ROOT / name, copy, ignore=shutil.ignore_patterns("runs"))
        render(list(RECIPES.values()), copy, "smoke")
        text = (copy / "report.html").read_text()
    return text.replace("<nav>", '<nav><a href="../index.html">CO2 suite</a> ', 1)


_OPTIONS: dict[str, dict[str, object]] = {
    "equations": {"members": False, "show_root_heading": False, "show_root_toc_entry": False},
    "settings": {"heading_level": 4, "show_source": False},
}


def _shown_as(name: str, part: str) -> str:
    options = "".join(
        f"      {key}: {str(value).lower()}\n" for key, value in _OPTIONS[part].items()
    )
    return f"::: {name}\n    options:\n{options}"
