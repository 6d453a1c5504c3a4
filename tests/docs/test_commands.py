"""Every command of README.md and docs/ is one that its program takes; every link leads somewhere.

The commands are parsed, composed and checked, as tests/docs/commands.py says, and not run.
"""

import ast
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import co2
from co2.errors import ConfigError
from recipes.tables import layout
from tests.cli.harness import ROOT
from tests.docs import pages
from tests.docs.commands import PROGRAMS, NotInstalled, check, dry_run
from tests.docs.pages import PAGES
from tests.grids import nonempty

SHOWN = {line: page.name for page in PAGES for line in pages.commands(page.read_text(), PROGRAMS)}
"""Every command, and a page that has it."""
ACTIVATE = "source .venv/bin/activate"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that lie in the repository have no say. SLURM is there, as where its pages are read."""
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.touch(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


def test_every_command_is_taken() -> None:
    """All in one process, where what one has composed another need not compose again."""
    refused = {}
    for command, page in SHOWN.items():
        try:
            check(command)
        except NotInstalled:
            continue
        except (Exception, SystemExit) as error:
            refused[f"{page}: {command}"] = repr(error)
    assert refused == {}


def test_commands_are_found() -> None:
    page = """# Title

    make train    # what it does
    python train.py task=gpt2 \\
        method=co2

Text with `make bench` and `make`, `co2.tau=3` and `python -m co2.record.timeline RUN [RUN …]`.

```python
import co2
```
"""
    assert list(pages.commands(page, PROGRAMS)) == [
        "make train",
        "python train.py task=gpt2 method=co2",
        "make bench",
        "python -m co2.record.timeline RUN",
    ]
    assert set(SHOWN.values()) > {"README.md", "cluster.md", "data.md", "slurm.md"}


@pytest.mark.parametrize(
    "command",
    [
        "unknown --program",
        "make train ARGS=co2.tua=24",
        "pip install -e '.[nothing]'",
        "co2 trian task=gpt2",
        "python -m co2 export RUN",
        "python examples/own_loop.py co2.tau=3",
        "python train.py task=gpt2 co2.tau=1,3",
        "python -m co2.nothing",
        "python -m co2.lab --mbit 20 co2.tua=3",
        "python -m http.server",
        "python -m recipes run nothing",
        "python -m recipes tune gpt2 nothing",
        "make rehearse ARGS=task=nothing",
        "sbatch --array=0-4 slurm/sweep.sbatch task=gpt2 co2.tau=1,3",
        "torchrun --nproc-per-node 3 train.py mesh.replica_size=2",
    ],
)
def test_a_wrong_command_is_found(command: str) -> None:
    with pytest.raises((AssertionError, ConfigError, ImportError, SystemExit)):
        check(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_is_that_of_the_environment(page: Path) -> None:
    """A plain `python` is, where the page has activated it before; sudo takes another anyway. Who
    has installed the package has an environment of his own."""
    shown = list(pages.commands(page.read_text(), PROGRAMS))
    own = (shown.index(line) for line in (ACTIVATE, "pip install .") if line in shown)
    activated = min(own, default=len(shown))
    for at, line in enumerate(shown):
        program = line.split()[0]
        assert program not in ("python", "torchrun") or at > activated, line
        assert not line.startswith(("sudo python", "sudo co2")), line


def test_what_a_recipe_s_head_runs_as_root() -> None:
    for path in nonempty((ROOT / "recipes").rglob("*.py")):
        assert "sudo python" not in path.read_text(), path


def test_links_lead_somewhere() -> None:
    linked = nonempty((page, link) for page in PAGES for link in pages.links(page.read_text()))
    for page, link in linked:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in pages.anchors(target.read_text()), f"{page.name}: {link}"


def test_named_files_are_there() -> None:
    """`co2/comm/background_mean.py` and the like; a heading may name a file that is to be made."""
    folders = "benchmarks|co2|conf|docs|examples|recipes|slurm|tasks|tests"
    named = [
        (page.name, path)
        for page in PAGES
        for path in re.findall(
            rf"`((?:{folders})/[\w./-]+)`",
            re.sub(r"^#.*", "", pages.prose(page.read_text()), flags=re.MULTILINE),
        )
    ]
    assert [pair for pair in nonempty(named) if not (ROOT / pair[1]).exists()] == []


def test_a_number_s_mark_begins_no_line() -> None:
    """On GitHub it would end the paragraph."""
    lines = [line for page in nonempty(PAGES) for line in page.read_text().splitlines()]
    assert [line for line in nonempty(lines) if line.startswith("<!--=")] == []


def test_a_number_s_mark_does_not_cut_its_cell() -> None:
    """A | that is not escaped ends a table's cell, also within a comment."""
    rows = [row for page in PAGES for row in re.findall(r"^\|.*", page.read_text(), re.MULTILINE)]
    marks = nonempty(mark for row in rows for mark in re.findall("<!--=.+?-->", row))
    assert [mark for mark in marks if re.search(r"(?<!\\)\|", mark)] == []


@pytest.mark.parametrize(("language", "read"), [("python", ast.parse), ("yaml", yaml.safe_load)])
def test_snippets_can_be_read(language: str, read: Callable[[str], object]) -> None:
    texts = [page.read_text() for page in PAGES]
    for code in nonempty(code for text in texts for code in pages.snippets(text, language)):
        read(code)


def test_the_loop_of_the_readme() -> None:
    (code,) = pages.snippets((ROOT / "README.md").read_text(), "python")
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    names = {"co2": co2, "model": model, "optimizer": optimizer, "batches": torch.randn(60, 8, 4)}
    exec(compile(code, "README.md", "exec"), names)
    assert model.weight.norm() < 0.5 * before.norm()


def test_the_experiment_of_the_page(tmp_path: Path) -> None:
    """Its runs are ones that can be made, and its table is drawn."""
    (code,) = pages.snippets((ROOT / "docs" / "add-an-experiment.md").read_text(), "python")
    names: dict[str, Any] = {}
    exec(compile(code, "outer.py", "exec"), names)
    recipe = names["RECIPE"]
    cells = [column.cell("outer", row, "smoke", 0) for row, column in recipe.places("smoke")]
    assert len(cells) == 3
    for cell in cells:
        cell.check()
    (table,) = layout.tables(recipe, [], [], "smoke")
    assert "recipes run outer" in table.page()


def test_a_table_is_collected_and_rendered_unless_its_run_is_dry() -> None:
    run = ".venv/bin/python -m recipes run table2"
    assert dry_run("table2", "ARGS=--seeds 0 --dry-run")[-1] == f"{run} --seeds 0 --dry-run"
    *_, first, last = dry_run("table2", "ARGS=--seeds 0")
    assert first.startswith(f"{run} --seeds 0;")
    assert "recipes collect table2" in last and "recipes render table2" in last
