"""co2.run: methods train as in other processes, and nobody is left behind; and the example
that people copy."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import co2
from co2.errors import ConfigError, WorkerLost
from co2.start import notebook
from tests.grids import OF_A_KIND, grid
from tests.methods.driver import SETTINGS, Snapshot, assert_same, trajectory
from tests.server import environment, fork_program
from tests.workers import Pool


def trajectories(rank: int, world: int) -> dict[str, list[Snapshot]]:
    """Of a method of each kind, one after the other in the same processes."""
    torch.set_num_threads(1)  # as the pool's workers have
    # After seven steps the means of two rounds have arrived.
    return {name: trajectory(rank, world, name, SETTINGS[name], steps=7) for name in OF_A_KIND}


@pytest.mark.parametrize("world", grid([1, 2, 4], (1, 2).__contains__))
def test_methods_train_as_in_other_processes(workers: Pool, world: int) -> None:
    found = co2.run(lambda mesh: trajectories(mesh.replica, world), replicas=world)
    assert_same(found, workers.run(trajectories, world))


def test_it_is_a_mesh_of_replicas() -> None:
    def place(mesh: co2.Mesh, factor: int, word: str) -> tuple[int, int, str]:
        return factor * mesh.replica, mesh.num_replicas, word

    found = co2.run(place, 10, "a", replicas=3, device="cpu")
    assert found == [(0, 3, "a"), (10, 3, "a"), (20, 3, "a")]


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def test_random_generators_are_the_replicas_own() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()

    def seeded(mesh: co2.Mesh) -> Tensor:
        torch.manual_seed(mesh.replica)
        dist.barrier()  # all have set theirs
        return torch.nn.functional.dropout(torch.ones(64))

    for replica, drawn in enumerate(co2.run(seeded, replicas=2)):
        torch.manual_seed(replica)
        assert torch.equal(drawn, torch.nn.functional.dropout(torch.ones(64)))
    torch.set_rng_state(before)
    first = co2.run(lambda mesh: draws(), replicas=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert len({value for replica in first for value in replica}) == 6
    assert co2.run(lambda mesh: draws(), replicas=2) == first


class Awkward(Exception):
    """Which pickle cannot make again."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


@pytest.mark.parametrize(
    ("raised", "kind", "says"),
    [
        (lambda: ConfigError("tau", 0, "use 1"), ConfigError, "tau=0: use 1"),
        (lambda: Awkward(1, 2), RuntimeError, "Awkward: 1 and 2"),
        (lambda: SystemExit(3), RuntimeError, "SystemExit: 3"),
    ],
)
def test_one_fails(raised: Callable[[], BaseException], kind: type, says: str) -> None:
    """The others wait for it in a collective, and are ended."""

    def train(mesh: co2.Mesh) -> None:
        if mesh.replica == 1:
            raise raised()
        dist.barrier()

    with pytest.raises(kind) as failed:
        co2.run(train, replicas=3)
    assert str(failed.value) == says
    told = str(failed.value.__cause__)
    assert told.startswith("replica 1:\nTraceback") and "in train\n" in told
    assert "co2/start/notebook.py" not in told


CLOSED = "Connection closed by peer [127.0.0.1]:22416"
"""What gloo says in a replica that waits for one that has gone."""


@pytest.mark.parametrize("another_tells", [False, True])
def test_one_is_killed(another_tells: bool) -> None:
    """Its sockets are closed before its pipe is, so another may tell of the loss first."""

    def train(mesh: co2.Mesh) -> None:
        if mesh.replica == 1 and another_tells:
            raise RuntimeError(CLOSED)
        if mesh.replica == 2:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)

    with pytest.raises(WorkerLost, match=r"^replica 2 was killed.*-9$"):
        co2.run(train, replicas=3)


def test_a_loss_without_a_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(mesh: co2.Mesh) -> None:
        if mesh.replica == 1:
            raise RuntimeError(CLOSED)
        time.sleep(3600)

    monkeypatch.setattr(notebook, "_CAUSE_S", 0.1)
    with pytest.raises(RuntimeError, match=re.escape(CLOSED)):
        co2.run(train, replicas=2)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def told(folder: Path, count: int) -> list[int]:
    """The processes that have written their numbers, once there are so many."""
    while len(list(folder.glob("*.pid"))) < count:
        time.sleep(0.01)
    return [int(path.stem) for path in folder.glob("*.pid")]


@pytest.mark.parametrize("to", ["process", "group"])
def test_ctrl_c(tmp_path: Path, to: str) -> None:
    """A notebook's stop reaches its own process, or the whole group as a terminal's Ctrl-C does.
    Some replicas compute, some wait for another in a collective."""

    def train(mesh: co2.Mesh, folder: Path) -> None:
        (folder / f"{os.getpid()}.pid").touch()
        if mesh.replica:
            dist.barrier()
        while True:
            torch.rand(9).sum()

    def press(main: int = os.getpid()) -> None:
        pids = told(tmp_path, 3)
        for pid in (*(pids if to == "group" else []), main):
            os.kill(pid, signal.SIGINT)

    pressing = threading.Thread(target=press)
    # What a shell starts in the background ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    pressing.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            co2.run(train, tmp_path, replicas=3)
    finally:
        signal.signal(signal.SIGINT, before)
    pressing.join()
    assert not any(map(is_alive, told(tmp_path, 3)))


SCRIPT = """
import os
from pathlib import Path

import co2

print("main")
FACTOR = 3


class Found:
    def __init__(self, value):
        self.value = value


def train(mesh):
    print("replica", flush=True)
    Path(f"{os.getpid()}.pid").touch()
    while os.environ["FOR_EVER"]:
        pass
    return Found(FACTOR * mesh.replica)


os.environ["FOR_EVER"] = ARGUMENT
found = co2.run(train, replicas=2)
print([one.value for one in found], all(type(one) is Found for one in found))
"""


def start(folder: Path, script: Path) -> Any:
    with (folder / "log").open("w") as log:
        return fork_program([str(script)], folder, environment(), log.fileno(), log.fileno())


def script(folder: Path, argument: str) -> Path:
    """It has no `if __name__ == "__main__"`."""
    path = folder / "script.py"
    path.write_text(SCRIPT.replace("ARGUMENT", repr(argument)))
    return path


def test_a_script_runs_once(tmp_path: Path) -> None:
    assert start(tmp_path, script(tmp_path, "")).wait(300) == 0, (tmp_path / "log").read_text()
    lines = (tmp_path / "log").read_text().splitlines()
    assert sorted(lines) == ["[0, 3] True", "main", "replica", "replica"]


def test_who_has_started_them_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path, script(tmp_path, "yes"))
    pids = told(tmp_path, 2)
    process.kill()
    process.wait(300)
    while any(map(is_alive, pids)):
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("values", "says"),
    [({"replicas": 2.5}, "replicas=2.5: "), ({"device": "gpu"}, "device=gpu: use cpu")],
)
def test_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{says}"):
        co2.run(print, **values)


class Local:
    """As if a script had defined it."""


Local.__module__ = "__main__"


def reached(mesh: co2.Mesh, given: object) -> tuple[int, object]:
    return mesh.num_replicas, given


def test_what_can_be_imported_needs_no_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    assert co2.run(reached, "given", replicas=2) == [(2, "given")] * 2


@pytest.mark.parametrize("given", [lambda mesh: None, Local()], ids=["function", ""])
def test_what_cannot_does(monkeypatch: pytest.MonkeyPatch, given: object) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ConfigError, match=r"^cloudpickle=missing: .* pip install cloudpickle, or"):
        co2.run(reached, given)


EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


def last_loss(text: str) -> float:
    return float(text.split("last loss ")[1])


def test_it_learns_alone(tmp_path: Path):
    assert start(tmp_path, EXAMPLE).wait(300) == 0
    text = (tmp_path / "log").read_text()
    assert "replicas: 1\nwarning: there is nothing to synchronize; " in text
    assert last_loss(text) < 1.0  # 8 at the start


@pytest.mark.slow  # new interpreters
def test_it_learns_with_two_workers():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = [*launcher, "--nproc-per-node", "2", str(EXAMPLE)]
    run = subprocess.run(words, capture_output=True, text=True, env=environment(), check=True)
    assert "replicas: 2\n" in run.stdout and "warning" not in run.stdout
    assert last_loss(run.stdout) < 1.0
