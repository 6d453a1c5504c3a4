"""docs/add-a-method.md is complete: its file and a line in the registry make a method.

It trains, resumes, agrees with its reference, is counted by the memory ledger and simulated.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from co2 import methods
from co2.app.application import App
from co2.methods import METHODS
from co2.simulate.methods import declarations
from tasks import TASKS
from tests.cli.harness import ROOT, configured, metrics, run_folder
from tests.methods import problem
from tests.methods.driver import Session, Snapshot, trajectory
from tests.methods.test_equals_reference import ROUNDS, simulate
from tests.methods.test_resume import stop_everywhere
from tests.reference import REFERENCES
from tests.workers import Pool

PAGE = (ROOT / "docs" / "add-a-method.md").read_text()
METHOD, REFERENCE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SETTINGS = {"tau": problem.TAU, "elasticity": 0.6}


def run(code: str, name: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": name}
    exec(compile(code, f"{name}.py", "exec"), namespace)
    return namespace


@contextmanager
def registered() -> Iterator[None]:
    METHODS["easgd"] = run(METHOD, "easgd")["EASGD"]
    try:
        yield
    finally:
        del METHODS["easgd"]


def registered_trajectory(rank: int, world: int, optimizer: str) -> list[Snapshot]:
    with registered():
        return trajectory(rank, world, "easgd", SETTINGS, optimizer)


def registered_stops(rank: int, world: int) -> None:
    with registered():
        stop_everywhere(rank, world, "easgd", SETTINGS)


def test_its_memory_is_counted() -> None:
    with registered():
        session = Session(0, "easgd", SETTINGS)
    assert session.method.extra_copies == 2, "the communication buffer and the center"
    assert session.method.state_dict()["tensors"].keys() == {"center"}
    session.method.flush()


def test_the_simulator_finds_it(tmp_path: Path) -> None:
    folder = tmp_path / "methods"
    shutil.copytree(Path(methods.__file__).parent, folder)
    (folder / "easgd.py").write_text(METHOD)
    registry = folder / "__init__.py"
    line = '    "easgd": EASGD,\n}'
    registry.write_text(re.sub(r"^}", line, registry.read_text(), count=1, flags=re.M))
    assert declarations(folder) == {**declarations(), "easgd": "always"}


@pytest.mark.parametrize(("optimizer", "world"), [("sgd", 1), ("sgd", 3), ("adamw", 2)])
def test_it_follows_its_reference(
    workers: Pool, monkeypatch: pytest.MonkeyPatch, optimizer: str, world: int
) -> None:
    monkeypatch.setitem(REFERENCES, "easgd", run(REFERENCE, "reference")["rounds"])
    expected = simulate("easgd", SETTINGS, optimizer, world, torch.float64)
    measured = workers.run(registered_trajectory, world, optimizer)
    for history, simulated in zip(measured, expected, strict=True):
        assert len(history) == ROUNDS * problem.TAU + 1
        for now, then in zip(history[:: problem.TAU], simulated, strict=True):
            torch.testing.assert_close(now, then, rtol=1e-12, atol=1e-12)


@pytest.mark.slow  # as tests/methods/test_resume.py of every other method
def test_it_resumes_exactly(workers: Pool) -> None:
    workers.run(registered_stops, 2)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with registered():
        monkeypatch.setattr(train, "APP", App(ROOT / "conf", TASKS))
        yield


@pytest.mark.usefixtures("known")
def test_it_trains(tmp_path: Path) -> None:
    config = configured("task=toy", "method=easgd", "launch.workers=1", runs=tmp_path / "runs")
    train.APP.work(config)
    first, *_, last = metrics(run_folder(config), "eval")
    assert last["loss"] < first["loss"]


@pytest.mark.usefixtures("known")
def test_its_command_composes(tmp_path: Path) -> None:
    _, command = re.findall(r"^ {4}python train\.py (.*)$", PAGE, re.MULTILINE)
    config = configured(*command.split(), runs=tmp_path)
    assert (config.task, config.method, config.method_config.tau) == ("gpt2", "easgd", 6)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(("key", "value"), [("tau", 0), ("elasticity", 1.5), ("comm_share", 1)])
def test_a_wrong_value_is_one_line(tmp_path: Path, key: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^easgd\.{key}={value}\S*: must be"):
        configured("task=toy", "method=easgd", f"easgd.{key}={value}", runs=tmp_path)
