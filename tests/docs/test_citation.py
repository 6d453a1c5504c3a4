"""CITATION.cff, CHANGELOG.md and LICENSE say what pyproject.toml says."""

import re
import tomllib

import yaml

from tests.cli.harness import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_citation() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software"
    assert cited.keys() >= {"message", "title", "authors", "version", "license"}
    assert str(cited["version"]) == PROJECT["version"]
    assert cited["license"] == PROJECT["license"]
    assert cited["authors"] == PROJECT["authors"]
    paper = cited["preferred-citation"]
    assert paper.keys() >= {"type", "title", "authors", "year", "conference"}
    assert all(author.keys() == {"family-names", "given-names"} for author in paper["authors"])
    assert paper["url"] in (ROOT / "README.md").read_text()


def test_changelog() -> None:
    newest, *_ = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest in ("Unreleased", PROJECT["version"])


def test_license() -> None:
    (name,) = PROJECT["license-files"]
    holder = PROJECT["authors"][0]["name"]
    text = (ROOT / name).read_text()
    assert text.startswith(f"{PROJECT['license']} License") and holder in text
