"""The wheel, installed into an environment of its own: the library alone, and the command co2."""

import os
import sys
import zipfile
from pathlib import Path

import pytest

from co2.__main__ import COMMANDS, main
from tests.cli.harness import ROOT
from tests.installed import SOURCES, build_wheel, ended, install

FOREIGN = (
    *("datasets", "hydra", "matplotlib", "omegaconf", "pandas", "pydantic", "rich", "sklearn"),
    *("timm", "tokenizers", "torch_geometric", "torchvision", "transformers", "wandb", "yaml"),
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
assert len(co2.run(repr, replicas=2)) == 2
try:
    co2.run(lambda mesh: 0)
except co2.ConfigError as error:
    print(error)
print([name for name in sys.argv[1:] if find_spec(name)])
print(co2.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def library(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with the wheel, and with what it requires without an extra."""
    return install(wheel, tmp_path_factory.mktemp("library"))


def test_nothing_is_left_out(wheel: Path) -> None:
    """Every module and every file of the configuration is packaged, and no test."""
    with zipfile.ZipFile(wheel) as file:
        inside = {name for name in file.namelist() if ".dist-info/" not in name}
    files = {
        str(path.relative_to(ROOT))
        for name in SOURCES
        for path in (ROOT / name).rglob("*.yaml" if name == "conf" else "*.py")
    }
    typed = {"co2/py.typed", "tasks/py.typed"}
    assert inside == files | typed | {"train.py", "results/paper.csv"}


def test_the_library_needs_torch_and_numpy_only(library: Path, tmp_path: Path) -> None:
    run = ended(library, "-c", LOOP, *FOREIGN, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    refused, unsent, foreign, path = run.stdout.splitlines()
    assert refused == "tau=0: must be a whole number, 1 or more, or auto"
    assert unsent.startswith("cloudpickle=missing: ")
    assert foreign == "[]" and Path(path).is_relative_to(library.parents[1])


def test_without_the_extra(library: Path, tmp_path: Path) -> None:
    run = ended(library.with_name("co2"), "train", "task=toy", cwd=tmp_path)
    assert run.returncode == 2 and run.stdout == ""
    (line,) = run.stderr.splitlines()
    assert line.startswith("error: hydra is missing in ") and "'co2-suite[suite]'" in line


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
    for name, (words, _) in COMMANDS.items():
        assert f"\n  {name} " in listed.stdout
        path = packages / words.split()[0].replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()
    run = ended(library.with_name("co2"), "simulate", "--help", cwd=tmp_path, extra=True)
    assert run.returncode == 0 and "usage" in run.stdout


def test_help_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda path, words: ran.append(words))
    main(["help", "plan"])
    assert ran[0][2:] == ["train", "plan", "--help"]
    assert main(["help", "nosuch"]) == 2


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2 and main([]) == 2
    assert "error: co2 trian: no such command; did you mean train?" in capsys.readouterr().err


MODULES = ("co2", "co2_measure.simulate", "co2.config", "co2.__main__")


@pytest.mark.parametrize("module", MODULES)
def test_what_needs_no_torch_does_not_import_it(module: str) -> None:
    script = f"import sys, {module}; print(sorted({{'torch', 'numpy'}} & sys.modules.keys()))"
    run = ended(sys.executable, "-c", script, cwd=ROOT)
    assert run.stdout == "[]\n", run.stderr
