"""The wheel, and environments that have it and what it requires, and nothing else."""

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.cli.harness import LIMIT_S, ROOT
from tests.server import environment

SOURCES = ("co2", "co2_measure", "conf", "recipes", "tasks")
Wanted = tuple[str, frozenset[str]]
"""A distribution and the extras that are wanted of it."""


def build_wheel(place: Path) -> Path:
    """Built from a copy of what is packaged: setuptools leaves traces where it builds."""
    source, out = place / "source", place / "wheel"
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "train.py", "results/paper.csv"):
        (source / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    # setuptools is part of the extra dev; where it is too old or missing, pip brings its own.
    try:
        here = int(metadata.version("setuptools").partition(".")[0]) >= 77
    except metadata.PackageNotFoundError:
        here = False
    own = ["--no-build-isolation"] if here else []
    _pip("wheel", "--no-deps", *own, "--wheel-dir", str(out), str(source))
    (path,) = out.glob("*.whl")
    return path


def install(wheel: Path, folder: Path, extra: str = "") -> Path:
    """Python of a new environment with the wheel and what it requires, which is linked to this
    environment's."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    _pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in required(wheel, extra):
        for entry in _parts(name):
            if not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
        for point in metadata.distribution(name).entry_points.select(group="console_scripts"):
            script = folder / "bin" / point.name
            script.write_text(
                f"#!{python}\nimport sys\nfrom {point.module} import {point.attr}\n"
                f"sys.exit({point.attr}())\n"
            )
            script.chmod(0o755)
    return python


def required(wheel: Path, extra: str = "") -> set[str]:
    """Distributions that the wheel needs, with an extra or without, and all that those need."""
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        lines = file.read(name).decode().splitlines()
    found: set[Wanted] = set()
    ours = [line[15:] for line in lines if line.startswith("Requires-Dist: ")]
    left = list(_needs(ours, frozenset({extra})))
    assert extra or sorted(name for name, _ in left) == ["numpy", "torch"]
    while left:
        wanted = left.pop()
        if wanted not in found:
            found.add(wanted)
            left += _needs(metadata.requires(wanted[0]) or (), wanted[1])
    return {name for name, _ in found}


def ended(*words: str | Path, cwd: Path, extra: bool = False) -> subprocess.CompletedProcess[str]:
    """A command, to its end. `extra`: it finds the packages of this environment, too."""
    env = {key: value for key, value in environment().items() if key != "PYTHONPATH"}
    if extra:
        env["PYTHONPATH"] = sysconfig.get_paths()["purelib"]
    return subprocess.run(
        list(map(str, words)), cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT_S
    )


def _pip(*arguments: str) -> None:
    words = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def _needs(lines: Iterable[str], extras: frozenset[str]) -> Iterator[Wanted]:
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": e}) for e in extras | {""}):
            yield canonicalize_name(requirement.name), frozenset(requirement.extras)


def _parts(name: str) -> set[Path]:
    """Top-level files and folders of an installed distribution."""
    distribution = metadata.distribution(name)
    inside = (path.parts[0] for path in distribution.files or () if path.parts[0] != "..")
    return {Path(str(distribution.locate_file(first))) for first in inside} - {
        Path(str(distribution.locate_file("__pycache__")))
    }
