"""docs/add-a-method.md and docs/add-a-task.md, followed to the letter in a copy: it stays green.

What stands in the pages' blocks becomes files, and is registered as they say. Then come `make
check`, the tests of the new method and task, and those that compare a table with all there are.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.harness import ROOT, metrics
from tests.docs.pages import snippets
from tests.server import environment

pytestmark = pytest.mark.slow  # copies the repository, and starts interpreters

METHOD_PAGE, TASK_PAGE = (
    (ROOT / "docs" / f"add-a-{what}.md").read_text() for what in ("method", "task")
)
TESTED = ("tests/cli", "tests/engine", "tests/methods", "tests/recipes")
CHOSEN = (
    "easgd or (sine and not cosine) or has_one or has_settings or has_a_space "
    "or has_the_default or left_out or elastic_runs_refuse or pictures"
)
"""Names of tests: of the new method and task, or of a comparison with all there are."""


def call(copy: Path, *words: str) -> str:
    """What a command prints, run in the copy. It must end well."""
    own = ("TESTS_SERVER", "PYTEST_")  # of the tests that run here
    env = {key: value for key, value in environment().items() if not key.startswith(own)}
    run = subprocess.run(
        words, cwd=copy, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert run.returncode == 0, run.stdout[-9000:]
    return run.stdout


def add(path: Path, line: str, before: str) -> None:
    """Add a line to a file, before the first one that begins like this."""
    lines = path.read_text().splitlines()
    at = next(number for number, other in enumerate(lines) if other.startswith(before))
    path.write_text("\n".join([*lines[:at], line, *lines[at:], ""]))


def add_the_method(copy: Path) -> None:
    method, reference = snippets(METHOD_PAGE, "python")
    (card,) = snippets(METHOD_PAGE, "markdown")
    (settings,) = re.findall(r'`(\{"tau": .*?\})`', METHOD_PAGE)
    (copy / "co2" / "methods" / "easgd.py").write_text(method)
    (line,) = snippets(METHOD_PAGE, "text")
    add(copy / "co2" / "catalogue.py", line.rstrip(), "}  # fmt: skip")
    (copy / "tests" / "reference" / "easgd.py").write_text(reference)
    references = copy / "tests" / "reference" / "__init__.py"
    add(references, "    easgd,", "    gradients,")
    add(references, '    "easgd": easgd.rounds,', "}")
    add(copy / "tests" / "methods" / "driver.py", f'    "easgd": {settings},', "}")
    add(copy / "docs" / "methods.md", card, "## `allreduce`")


def add_the_task(copy: Path) -> None:
    (task,), (recipe,) = snippets(TASK_PAGE, "python"), snippets(TASK_PAGE, "yaml")
    (copy / "tasks" / "sine.py").write_text(task)
    registry = copy / "tasks" / "__init__.py"
    add(registry, "    from tasks.sine import Sine", "    from tasks.text.gpt2")
    add(registry, '    "sine": Sine,', "}")
    (copy / "conf" / "task" / "scale" / "sine_smoke.yaml").write_text(recipe)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository with the pages' method and task."""
    folder = tmp_path_factory.mktemp("pages") / "copy"
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    if (ROOT / ".mypy_cache").exists():  # from nothing it takes a minute
        shutil.copytree(ROOT / ".mypy_cache", folder / ".mypy_cache")
    add_the_method(folder)
    add_the_task(folder)
    call(folder, sys.executable, "-m", "benchmarks.method_pictures")
    call(folder, sys.executable, "-m", "recipes", "render")
    golden = ("-m", "pytest", "-n", "0", "tests/recipes/test_golden.py", "-k", "easgd or sine")
    call(folder, "env", "GOLDEN=write", sys.executable, *golden)
    return folder


def test_make_check(copy: Path) -> None:
    programs = Path(sys.executable).parent
    call(copy, "make", "check", "--assume-old=.venv/.ready", f"BIN={programs}")


def test_their_tests(copy: Path) -> None:
    words = ("-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", f"--basetemp={copy}.tests")
    said = call(copy, sys.executable, *words, "-k", CHOSEN, *TESTED)
    assert int(re.findall(r"(\d+) passed", said)[-1]) > 80


def test_their_commands(copy: Path) -> None:
    """The task's command under the method; the method's own would train for minutes."""
    program = (sys.executable, "train.py")
    _, command = re.findall(r"^ {4}python train\.py (.*)$", METHOD_PAGE, re.MULTILINE)
    assert "easgd:\n  tau: 6\n" in call(copy, *program, "--cfg", "job", *command.split())
    (command,) = re.findall(r"^# python train\.py (.*)$", TASK_PAGE, re.MULTILINE)
    call(copy, *program, *command.split(), "method=easgd", "log.wandb=disabled")
    (folder,) = (copy / "results" / "runs").glob("sine/easgd/*/seed0")
    last = metrics(folder, "eval")[-1]
    assert last["step"] == 600 and last["loss"] < 0.05
