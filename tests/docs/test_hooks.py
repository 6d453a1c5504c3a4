"""The hooks of pre-commit run what `make check` runs, and GitHub's workflow calls .ci/run on every
Python that the package names."""

import os
import re
import subprocess
import tomllib

import yaml

from tests.cli.harness import ROOT


def planned(*arguments: str) -> list[str]:
    """The lines that `make` would run."""
    words = ["make", "--dry-run", "--no-print-directory", *arguments]
    env = {key: value for key, value in os.environ.items() if not re.search("MAKE|^ARGS$", key)}
    ended = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return ended.stdout.splitlines()


def checks() -> set[str]:
    """What `make check` runs, without the arguments that say where and how."""
    found = (line.removesuffix(" .").removesuffix(" --check") for line in planned("check"))
    return {line for line in found if line.startswith(".venv/bin/") and "python" not in line}


def test_a_table_is_collected_and_rendered_unless_its_run_is_dry() -> None:
    run = ".venv/bin/python -m recipes run table2"
    assert planned("table2", "ARGS=--seeds 0 --dry-run")[-1] == f"{run} --seeds 0 --dry-run"
    *_, first, last = planned("table2", "ARGS=--seeds 0")
    assert first.startswith(f"{run} --seeds 0;")
    assert "recipes collect table2" in last and "recipes render table2" in last


def test_hooks_are_make_check() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local" and checks()
    found = {hook["entry"].removesuffix(" --force-exclude") for hook in repo["hooks"]}
    assert found == checks()


def test_the_workflow_has_every_python() -> None:
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["ci"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [
        word.rpartition(" ")[2] for word in project["classifiers"] if ":: Python :: 3." in word
    ]
    assert job["strategy"]["matrix"]["python"] == named
    assert project["requires-python"] == f">={named[0]}"
    (step,) = [step for step in job["steps"] if step.get("run") == ".ci/run"]
    assert step["env"]["PYTHON"] == "python${{ matrix.python }}"
    lines = subprocess.run(
        ["make", "--dry-run", "--always-make", ".venv/.ready"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHON": "python3.13"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "\npython3.13 -m venv .venv\n" in lines.stdout
