"""The wheel, installed into an environment of its own: the library alone, and the command co2."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from co2.__main__ import COMMANDS, main
from tests.cli.harness import LIMIT_S, ROOT, environment

SOURCES = ("co2", "conf", "recipes", "tasks")
FOREIGN = (
    *("datasets", "hydra", "matplotlib", "omegaconf", "pandas", "pydantic", "rich", "sklearn"),
    *("timm", "tokenizers", "torchvision", "transformers", "wandb", "yaml"),
)
"""What the library must do without."""
LOOP = """
import sys
from importlib.util import find_spec

import torch
import co2

assert {*co2.__all__, "methods"} <= set(dir(co2))
assert co2.METHODS is co2.methods.METHODS and co2.METHODS["co2"] is co2.CO2
assert all(getattr(co2, name) is not None for name in co2.__all__) and not hasattr(co2, "CO3")

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sync = co2.METHODS["co2"](co2.CO2.Config(tau=2))
model = sync.prepare(model, optimizer, co2.Mesh.world())
before = model.weight.norm().item()
for batch in torch.randn(40, 8, 4):
    model(batch).square().mean().backward()
    sync.step()
    optimizer.zero_grad()
with sync.consensus():
    assert model.weight.norm() < 0.5 * before
sync.flush()
try:
    co2.CO2.Config(tau=0)
except co2.ConfigError as error:
    print(error)
print([name for name in sys.argv[1:] if find_spec(name)])
print(co2.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what is packaged: setuptools leaves traces where it builds."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
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
    pip("wheel", "--no-deps", *own, "--wheel-dir", str(out), str(source))
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def library(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with the wheel, and with what it requires without an extra."""
    folder = tmp_path_factory.mktemp("library")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in required(wheel):
        for entry in parts(name):
            if not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
    return python


def pip(*arguments: str) -> None:
    words = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def required(wheel: Path) -> set[str]:
    """Distributions that the wheel needs without an extra, and all that those need in turn."""
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        lines = file.read(name).decode().splitlines()
    found: set[str] = set()
    left = list(needs([line[15:] for line in lines if line.startswith("Requires-Dist: ")]))
    assert sorted(left) == ["numpy", "torch"]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += needs(metadata.requires(name) or ())
    return found


def needs(lines: "list[str] | tuple[()]") -> Iterator[str]:
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield canonicalize_name(requirement.name)


def parts(name: str) -> set[Path]:
    """Top-level files and folders of an installed distribution."""
    distribution = metadata.distribution(name)
    inside = (path.parts[0] for path in distribution.files or () if path.parts[0] != "..")
    return {Path(str(distribution.locate_file(first))) for first in inside} - {
        Path(str(distribution.locate_file("__pycache__")))
    }


def ended(*words: str | Path, cwd: Path, extra: bool = False) -> subprocess.CompletedProcess[str]:
    """A command, to its end. `extra`: it finds the packages of this environment, too."""
    env = {key: value for key, value in environment().items() if key != "PYTHONPATH"}
    if extra:
        env["PYTHONPATH"] = sysconfig.get_paths()["purelib"]
    return subprocess.run(
        list(map(str, words)), cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT_S
    )


def test_nothing_is_left_out(wheel: Path) -> None:
    """Every module and every file of the configuration is packaged, and no test."""
    with zipfile.ZipFile(wheel) as file:
        inside = {name for name in file.namelist() if ".dist-info/" not in name}
    files = {
        str(path.relative_to(ROOT))
        for name in SOURCES
        for path in (ROOT / name).rglob("*.yaml" if name == "conf" else "*.py")
    }
    assert inside == files | {"train.py", "results/paper.csv"}


def test_the_library_needs_torch_and_numpy_only(library: Path, tmp_path: Path) -> None:
    run = ended(library, "-c", LOOP, *FOREIGN, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    refused, foreign, path = run.stdout.splitlines()
    assert refused == "tau=0: must be a whole number, 1 or more, or auto"
    assert foreign == "[]" and Path(path).is_relative_to(library.parents[1])


def test_without_the_extra(library: Path, tmp_path: Path) -> None:
    run = ended(library.with_name("co2"), "train", "task=toy", cwd=tmp_path)
    assert run.returncode == 2 and run.stdout == ""
    (line,) = run.stderr.splitlines()
    assert line.startswith("error: co2 train: needs hydra") and "'co2-suite[suite]'" in line


def test_it_trains_from_any_folder(library: Path, tmp_path: Path) -> None:
    """Two workers, so new processes. Files of the same names in the folder are not ours."""
    co2 = library.with_name("co2")
    (tmp_path / "train.py").write_text("raise SystemExit('not ours')")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "__init__.py").write_text("raise SystemExit('not ours')")
    small = ("launch.workers=2", "train.steps=6", "log.wandb=disabled", "launch.backend=gloo")
    words = ("task=toy", "method=co2", "co2.tau=3", *small)
    run = ended(co2, "train", *words, cwd=tmp_path, extra=True)
    assert run.returncode == 0, run.stderr
    assert len(list(tmp_path.glob("results/runs/toy/co2/*/seed0/summary.json"))) == 1
    assert os.listdir(tmp_path / "results") == ["runs"]


def test_every_command_is_listed_and_starts(library: Path, tmp_path: Path) -> None:
    (packages,) = library.parents[1].glob("lib/python*/site-packages")
    listed = ended(library.with_name("co2"), "--help", cwd=tmp_path)
    assert listed.returncode == 0
    for name, (module, _) in COMMANDS.items():
        assert f"\n  {name} " in listed.stdout
        path = packages / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()
    run = ended(library.with_name("co2"), "simulate", "--help", cwd=tmp_path, extra=True)
    assert run.returncode == 0 and "usage" in run.stdout


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2 and main([]) == 2
    assert "error: co2 trian: no such command; did you mean train?" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["co2", "co2.simulate", "co2.config", "co2.__main__"])
def test_what_needs_no_torch_does_not_import_it(module: str) -> None:
    script = f"import sys, {module}; print(sorted({{'torch', 'numpy'}} & sys.modules.keys()))"
    run = ended(sys.executable, "-c", script, cwd=ROOT)
    assert run.stdout == "[]\n", run.stderr
