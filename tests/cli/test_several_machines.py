"""Elastic runs on several machines: every machine is one call of train.py here."""

import contextlib
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from co2.errors import PREEMPTED, REFUSED
from tests.cli.harness import (
    LIMIT_S,
    ROOT,
    Process,
    cli,
    folder_of,
    kill_session,
    last_step,
    pooled,
    saved_steps,
    started,
    summary,
    until,
    weights,
    workers,
)
from tests.cli.test_elastic import STEPS, TAU, assert_no_step_is_missing, changes, words
from tests.server import environment, fork_program
from tests.workers import Pool

SHARED = (
    *("launch.elastic=true", f"train.steps={STEPS}", "train.eval_every=30", "log.every=1"),
    *("launch.silent_s=20", "tag=run"),
)


class Machines:
    """A store, and the machines of a run in a folder."""

    def __init__(self, place: Path, nodes: int, *arguments: str) -> None:
        self.runs, self.place = place / "runs", place
        self._nodes, self._arguments = nodes, (*SHARED, *arguments)
        self.folder = folder_of(*self._arguments, runs=self.runs)
        self._held = contextlib.ExitStack()

    def __enter__(self) -> "Machines":
        self._held.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def hold(self) -> Process:
        """Start the process that holds the store."""
        self.store_log = self._new_log("store")
        with self.store_log.open("w") as log:
            script = str(ROOT / "co2" / "elastic" / "store.py")
            line = [script, "--nodes", str(self._nodes)]
            store = fork_program(line, self.place, environment(), log.fileno(), log.fileno())
        self._held.callback(kill_session, store)
        until(lambda: "the store is at" in self.store_log.read_text(), store)
        found = re.search(r":(\d+)", self.store_log.read_text())
        assert found is not None
        self.address = f"127.0.0.1:{found.group(1)}"
        return store

    def start(self) -> tuple[Process, Path]:
        """Start a machine, and wait until the store has seen it; the process, and its output."""
        log, before = self._new_log("machine"), self.seen()
        arguments = (*self._arguments, f"launch.store={self.address}")
        process = self._held.enter_context(started(*arguments, runs=self.runs, log=log))
        until(lambda: self.seen() > before, process)
        return process, log

    def end(self, started: list[tuple[Process, Path]], status: int = 0) -> list[str]:
        """Wait for machines that must end with this status. Returns what they have said."""
        for process, log in started:
            assert process.wait(LIMIT_S) == status, log.read_text()
        return [log.read_text() for _, log in started]

    def seen(self) -> int:
        """How many machines have come to this store."""
        return self.store_log.read_text().count("has come")

    def trained(self, step: int) -> bool:
        return last_step(self.folder) >= step

    def _new_log(self, name: str) -> Path:
        return self.place / f"{name}{len(list(self.place.glob(name + '*')))}"


@pytest.fixture
def machines(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Machines]:
    with Machines(tmp_path, *request.param) as found:
        yield found


def on(nodes: int, *arguments: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("machines", [(nodes, *arguments)], indirect=True)


LOST = (
    *("launch.workers=2", "launch.silent_s=10", "checkpoint.every=0", "toy.delay_s=0.1"),
    *words("co2"),
)


@pytest.mark.parametrize(
    "machines",
    [(2, *LOST), (2, *LOST, "mesh.replica_size=2", "mesh.strategy=zero2")],
    ids=["workers", "replica"],
    indirect=True,
)
def test_a_machine_is_lost_and_comes_back(machines: Machines) -> None:
    """The one whose worker writes for the run, with all its processes. Started again, its workers
    join those who train; also where they share a replica."""
    store = machines.hold()
    lost, _ = machines.start()
    left = machines.start()
    until(lambda: machines.trained(20), left[0])
    kill_session(lost)
    until(lambda: changes(machines.folder) != [], left[0])
    machines.end([left, machines.start()])
    assert store.wait(LIMIT_S) == 0
    assert_no_step_is_missing(machines.folder)
    gone, *_ = changes(machines.folder)
    assert set(gone["lost"]) == {"0", "1"} and gone["members"] == [2, 3]
    assert all("silent for" in why for why in gone["lost"].values())
    joined = [one for change in changes(machines.folder) for one in change["joined"]]
    assert joined == [4, 5], "numbers are never used again"
    assert all(change["step"] % TAU == 0 for change in changes(machines.folder)[1:])
    assert summary(machines.folder)["members"][-1]["members"] == [2, 3, 4, 5]


@on(2, *words("local_sgd"), "launch.workers=1", "launch.restarts=1", "toy.delay_s=0.02")
def test_a_machine_starts_its_only_worker_again(machines: Machines) -> None:
    """It is told of, so nobody waits for its silence."""
    store = machines.hold()
    both = [machines.start() for _ in range(2)]
    (one, _), _ = both
    until(lambda: machines.trained(20), one)
    (pid,) = workers(one)
    os.kill(pid, signal.SIGKILL)
    machines.end(both)
    assert store.wait(LIMIT_S) == 0
    assert_no_step_is_missing(machines.folder)
    gone, joined = changes(machines.folder)
    assert gone["lost"] == {"0": "gone"} and joined["joined"] == [2]


@on(2, *words("co2"), "launch.workers=1", "train.steps=36")
def test_a_run_that_loses_nobody_is_that_of_one_machine(workers: Pool, machines: Machines) -> None:
    store = machines.hold()
    said = machines.end([machines.start() for _ in range(2)])
    assert all("validation accuracy" in text for text in said), "each machine shows the result"
    assert store.wait(LIMIT_S) == 0
    assert changes(machines.folder) == []
    arguments = (*words("co2"), "train.steps=36")
    alone = pooled(workers, 2, *arguments, runs=machines.place / "alone")
    # Alone on its machine a worker takes every core, and so may round otherwise.
    torch.testing.assert_close(weights(machines.folder), weights(alone.folder))
    store = f"launch.store={machines.address}"
    again = cli(*SHARED, *arguments, store, runs=machines.runs)
    assert "finished already" in again.out


@on(2, *words("co2"), "launch.workers=1", "checkpoint.every=10", "toy.delay_s=0.05")
def test_the_store_is_killed(machines: Machines) -> None:
    """All end, and the same commands go on from the last checkpoint."""
    store = machines.hold()
    both = [machines.start() for _ in range(2)]
    until(lambda: 20 in saved_steps(machines.folder), store)
    kill_session(store)
    said = machines.end(both, PREEMPTED)
    for text in said:
        assert "error: what holds the store is gone; the same command goes on" in text
        assert "Traceback" not in text
    store = machines.hold()
    said = machines.end([machines.start() for _ in range(2)])
    assert store.wait(LIMIT_S) == 0 and "resumed at step" in "".join(said)
    assert_no_step_is_missing(machines.folder)


@on(2, *words("co2"), "launch.workers=1", "checkpoint.every=0", "toy.delay_s=0.05")
def test_told_to_stop_on_one_machine_all_stop(machines: Machines) -> None:
    """As it waits for the others; as it trains."""
    store = machines.hold()
    alone = machines.start()
    os.kill(alone[0].pid, signal.SIGTERM)
    machines.end([alone], PREEMPTED)
    both = [machines.start() for _ in range(2)]
    until(lambda: machines.trained(10), store)
    os.kill(both[1][0].pid, signal.SIGTERM)
    machines.end(both, PREEMPTED)
    assert store.wait(LIMIT_S) == PREEMPTED
    (step,) = saved_steps(machines.folder)
    assert step < STEPS


def test_a_store_that_nobody_needs_is_told_so(tmp_path: Path) -> None:
    with Machines(tmp_path, 2, *words("co2")) as machines:
        store = machines.hold()
        os.kill(store.pid, signal.SIGTERM)
        assert store.wait(LIMIT_S) == 0
        store = machines.hold()
        waiting = machines.start()
        os.kill(store.pid, signal.SIGHUP)
        machines.end([waiting], PREEMPTED)
        assert store.wait(LIMIT_S) == PREEMPTED


@pytest.mark.parametrize(
    ("store", "message"),
    [("host.invalid:29400", "no such host"), ("127.0.0.1:1", "nobody answers there")],
)
def test_a_store_that_is_not_there(tmp_path: Path, store: str, message: str) -> None:
    arguments = (*SHARED, *words("co2"), f"launch.store={store}", "launch.wait_s=1")
    ended = cli(*arguments, runs=tmp_path / "runs", status=REFUSED)
    (line,) = ended.err.splitlines()
    assert line.startswith(f"error: launch.store={store}: {message}")


def test_something_else_is_where_the_store_should_be(tmp_path: Path) -> None:
    """It takes the connection, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        store = f"launch.store=127.0.0.1:{other.getsockname()[1]}"
        arguments = (*SHARED, *words("co2"), store, "launch.wait_s=1")
        ended = cli(*arguments, runs=tmp_path / "runs", status=REFUSED)
    line = ended.err.splitlines()[-1]
    assert line.startswith(f"error: {store}: what answers there is no store; python -m co2.elastic")
