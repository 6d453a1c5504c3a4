"""What stands on the pages that people read: README.md and its neighbours, and docs/.

An indented block, and a fenced one that names no other language, holds commands. So does `code` in
the text that begins with the name of a program and goes on.
"""

import re
from collections.abc import Collection, Iterator

from tests.cli.harness import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
SHELL = (None, "", "sh", "bash", "console")
_CODE = re.compile(
    r"^```(?P<language>\w*)\n(?P<fenced>.*?)^```$|(?<=\n\n)(?P<indented>(?: {4}[^\n]*\n+)+)",
    re.MULTILINE | re.DOTALL,
)


def commands(text: str, programs: Collection[str]) -> Iterator[str]:
    """The commands of a page, each on one line, without comments and optional arguments.

    Args:
        programs: that `code` in the text may begin with.
    """
    for block in _CODE.finditer(text):
        if block["language"] in SHELL:
            code = (block["indented"] or block["fenced"]).replace("\\\n", " ")
            yield from filter(None, map(_plain, code.splitlines()))
    for span in re.findall(r"`([^`]+)`", prose(text)):
        program, _, arguments = _plain(span).partition(" ")
        if program in programs and arguments:
            yield f"{program} {arguments}"


def snippets(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return [code["fenced"] for code in _CODE.finditer(text) if code["language"] == language]


def prose(text: str) -> str:
    """The page without its blocks of code."""
    return _CODE.sub("\n", text)


def links(text: str) -> list[str]:
    """What the page links to within the repository, pictures too; for GitHub's page of a workflow,
    the workflow's file."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(text))
    run = re.compile(r"^\.\./\.\./actions/(workflows/[\w.]+)(/badge\.svg)?$")
    return [run.sub(r".github/\1", one) for one in targets if not re.match(r"\w+:", one)]


def anchors(text: str) -> set[str]:
    """Names of the page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def _plain(line: str) -> str:
    line = re.sub(r"(^|\s)#\s.*", "", line.strip().removeprefix("$ "))
    return " ".join(re.sub(r" \[[^\]]*\]", "", line).split())
