"""The documentation as a site: every link and picture on it leads somewhere, without a network."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import co2
from tests.cli.harness import ROOT
from tests.docs.pages import PAGES
from tests.grids import nonempty

pytestmark = pytest.mark.slow
ENVIRONMENT = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}


class Links(HTMLParser):
    """What a page links to or loads, and the names within it that can be linked to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.names: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.targets |= {unquote(given[key] or "") for key in ("href", "src") if key in given}
        self.names |= {given[key] or "" for key in ("id", "name") if key in given}


def build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "-f", config, "-d", folder]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(folder)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        assert f": {page.relative_to(ROOT)}\n" in menu
        name = page.relative_to(ROOT).with_suffix(".html")
        assert (site / ("index.html" if page.name == "README.md" else name)).is_file(), name
    assert ">The report</a>" in (site / "index.html").read_text(), "beside the results"


def test_every_link_leads_somewhere(site: Path) -> None:
    pages = {page: Links(page) for page in site.rglob("*.html") if page.name != "404.html"}
    lost = set()
    for page, links in pages.items():
        for target in links.targets:
            if re.match(r"\w+:", target):
                continue
            path, _, name = target.partition("#")
            file = Path(os.path.normpath(page.parent / path)) if path else page
            file = file / "index.html" if file.is_dir() else file
            if not file.is_file() or (name and file in pages and name not in pages[file].names):
                lost.add(f"{page.relative_to(site)}: {target}")
    assert pages and not lost


def test_a_rendered_number_ends_no_paragraph(site: Path) -> None:
    for page in nonempty(site.rglob("*.html")):
        assert "<!--=" not in page.read_text(), page


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loaded = r"<(?:script|img|iframe)[^>]* src=.?https?:|<link[^>]* rel=.?stylesheet[^>]*https?:"
    for page in nonempty(site.rglob("*.html")):
        assert not re.search(loaded, page.read_text()), page


def test_the_api_is_there(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "reference.html").read_text())
    for method in co2.METHODS.values():
        assert f"co2.{method.__name__}" in text
        assert (method.Config.__module__ + "." + method.Config.__qualname__) in text
    for name in ("SyncTrainer", "SyncStrategy", "Mesh", "rank_in_replica", "Package"):
        assert name in text


def test_every_key_is_there(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "keys.html").read_text())
    for key in ("train.steps", "co2.tau", "gpt2.size", "launch.workers", "comm.dtype", "tag"):
        assert f"\n{key}\n" in text, key
