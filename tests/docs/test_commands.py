"""Every command of README.md and docs/ is one that its program takes; every link leads somewhere.

The commands are parsed, composed and checked, as tests/docs/commands.py says, and not run.
"""

import ast
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

import co2
import train
from co2.errors import ConfigError
from co2.record import timeline
from co2.record.folder import read_summary
from tests.cli.harness import ROOT, configured, pooled
from tests.docs import pages
from tests.docs.commands import PROGRAMS, NotInstalled, check
from tests.docs.pages import PAGES
from tests.grids import nonempty
from tests.workers import Pool

SHOWN = {line: page.name for page in PAGES for line in pages.commands(page.read_text(), PROGRAMS)}
"""Every command, and a page that has it."""
ACTIVATE = "source .venv/bin/activate"
TINY = ("train.steps=30", "train.batch_size=1", "gpt2.eval_samples=2", "gpt2.vocab_size=300")
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that lie in the repository have no say."""
    monkeypatch.chdir(tmp_path)


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

Text with `make bench` and `make`, `co2.tau=3` and `python -m co2.record.timeline RUN [RUN …]`,
    no code.

- `scancel
  JOB`

```python
import co2
```

```
unknown --program
```
"""
    assert list(pages.commands(page, PROGRAMS)) == [
        "make train",
        "python train.py task=gpt2 method=co2",
        "unknown --program",
        "make bench",
        "python -m co2.record.timeline RUN",
        "scancel JOB",
    ]
    assert set(SHOWN.values()) > {"README.md", "slurm.md", "data.md"}


@pytest.mark.parametrize(
    "command",
    [
        "unknown --program",
        "make nothing",
        "make train ARGS=co2.tua=24",
        "pip install -e '.[nothing]'",
        "pip install co2-suite",
        "co2 trian task=gpt2",
        "co2 train task=gpt2 co2.tua=3",
        "co2 sample --token 3",
        "python -m co2 exprot RUN FOLDER",
        "python -m co2 export RUN",
        "python nothing.py",
        "python examples/own_loop.py co2.tau=3",
        "python train.py task=gpt2 co2.tua=3",
        "python train.py task=gpt2 co2.tau=1,3",
        "python -m co2.nothing",
        "python -m co2.lab --mbit fast",
        "python -m co2.lab --mbit 20 co2.tua=3",
        "python -m co2.simulate --model nothing",
        "python -m co2.record.timeline",
        "python -m benchmarks.memory --nothing",
        "python -m http.server",
        "python -m recipes run nothing",
        "python -m recipes tune gpt2 nothing",
        "python -m tasks.prepare nothing",
        "sbatch slurm/train.sbatch task=nothing",
        "sbatch --array=0-4 slurm/sweep.sbatch task=gpt2 co2.tau=1,3",
        "torchrun --nproc-per-node 3 train.py mesh.replica_size=2",
    ],
)
def test_a_wrong_command_is_found(command: str) -> None:
    with pytest.raises((AssertionError, ConfigError, ImportError, SystemExit)):
        check(command)


@by_page
def test_python_is_that_of_the_environment(page: Path) -> None:
    """A plain `python` is, where the page has activated it before; sudo takes another anyway."""
    if page.name == "CHANGELOG.md":  # what earlier versions had
        return
    shown = list(pages.commands(page.read_text(), PROGRAMS))
    activated = shown.index(ACTIVATE) if ACTIVATE in shown else len(shown)
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


@pytest.fixture
def my_texts(tmp_path: Path) -> Path:
    """A folder of texts to train on: these pages."""
    (tmp_path / "my_texts").mkdir()
    for page in PAGES:
        shutil.copy(page, tmp_path / "my_texts" / f"{page.stem}.txt")
    return tmp_path / "my_texts"


@pytest.mark.usefixtures("my_texts")
def test_ones_own_text(root: Path, tmp_path: Path) -> None:
    (command,) = (line for line in SHOWN if "data.path=my_texts/" in line)
    tiny = (*TINY, "launch.workers=1", f"data.root={root}")
    config = configured(*overrides(command), *tiny, runs=tmp_path / "runs")
    train.APP.work(config)
    assert read_summary(config)


def test_a_timeline_of_two_runs(workers: Pool, root: Path, my_texts: Path, tmp_path: Path) -> None:
    """The pages' own command draws what their own commands have traced."""
    data = (f"data.root={root}", f"data.path={my_texts}")
    for command in (line for line in SHOWN if "train.py" in line and "trace=true" in line):
        words = (*overrides(command), *TINY, *data, "tag=default")
        assert pooled(workers, 2, *words, runs=tmp_path / "results" / "runs").status == 0
    (command,) = (line for line in SHOWN if "co2.record.timeline results/" in line)
    assert timeline.main(shlex.split(command)[3:]) == 0
    (picture,) = Path("results/runs").rglob("timeline.png")  # where git does not see it
    assert picture.stat().st_size > 10_000


def overrides(command: str) -> list[str]:
    """Of a command line of train.py."""
    words = shlex.split(command)
    return words[words.index("train.py") + 1 :]
