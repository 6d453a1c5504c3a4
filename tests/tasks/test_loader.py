"""Batches come in order, the same with and without worker processes; errors stay one line."""

import errno
import multiprocessing
import os
import re
import signal
import subprocess
import threading
import time
from functools import partial
from itertools import count, islice
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from co2.errors import ConfigError, from_outside
from co2.start.processes import STOP_SIGNALS
from recipes.runs.processes import is_running
from tasks.shared import loader
from tasks.shared.loader import load
from tasks.shared.randomness import seeded

CPU = torch.device("cpu")
LIMIT_S = 300.0


def make(index: int) -> tuple[Tensor, Tensor]:
    with seeded(7, index):
        return torch.rand(3), torch.tensor([index, os.getpid()])


@pytest.mark.parametrize("start", [0, 5])
def test_workers_change_nothing(start: int) -> None:
    before = torch.get_rng_state()
    alone = list(islice(load(make, count(start), 0, CPU), 12))
    ahead = list(islice(load(make, count(start), 2, CPU), 12))
    assert torch.equal(torch.get_rng_state(), before)
    assert [int(tag[0]) for _, tag in ahead] == list(range(start, start + 12))
    assert {type(batch) for batch in (*alone, *ahead)} == {tuple}
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(alone, ahead, strict=True))
    assert {int(tag[1]) for _, tag in alone} == {os.getpid()}
    assert len({int(tag[1]) for _, tag in ahead} - {os.getpid()}) == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fault_in_the_data_stays_one_line(workers: int) -> None:
    def faulty(index: int) -> Tensor:
        if index == 2:
            raise ConfigError("data.path", "tree", "a.jpg is cut short")
        return torch.tensor(index)

    batches = load(faulty, range(5), workers, CPU)
    assert [int(next(batches)), int(next(batches))] == [0, 1]
    with pytest.raises(ConfigError) as caught:
        next(batches)
    assert str(caught.value) == "data.path=tree: a.jpg is cut short"


def test_a_loading_process_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(loader.DataLoader, "__iter__", limited)
    with pytest.raises(
        ConfigError, match=r"^data.workers=2: a loading process cannot start \(Reso"
    ):
        next(load(make, count(), 2, CPU))


def test_a_loading_process_is_killed() -> None:
    def killed(index: int) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(index)

    with pytest.raises(RuntimeError) as caught:
        next(load(killed, count(), 1, CPU))
    line = from_outside(caught.value)
    assert line is not None and line.endswith("fewer data.workers; the same command goes on")


def stuck(index: int) -> Tensor:
    """The loader's number; each is stuck after its second batch."""
    if index >= 4:
        time.sleep(2 * LIMIT_S)
    return torch.tensor(os.getpid())


def test_a_stop_signal_leaves_loaders_alive() -> None:
    """One that reaches all processes of a run, which needs them until it has saved."""
    batches = load(lambda _: torch.tensor(os.getpid()), range(20), 2, CPU)
    loaders = [str(int(next(batches))) for _ in range(2)]
    for number in STOP_SIGNALS:
        subprocess.run(["kill", f"-{int(number)}", *loaders], check=True)
    assert [str(int(batch)) for batch in batches] == loaders * 9


def beside_another_thread(found: Connection) -> None:
    """Threads of each loader in which a stop signal is not blocked, where forking starts one."""
    idle = partial(threading.Thread, target=time.sleep, args=(LIMIT_S,), daemon=True)
    os.register_at_fork(after_in_child=lambda: idle().start())
    batches = load(lambda _: torch.tensor(os.getpid()), count(), 2, CPU)
    masks = [
        [
            int(re.findall(r"SigBlk:\s*(\w+)", status.read_text())[0], 16)
            for status in Path(f"/proc/{int(next(batches))}/task").glob("*/status")
        ]
        for _ in range(2)
    ]
    bits = [1 << number - 1 for number in STOP_SIGNALS]
    found.send([sum(not mask & bit for mask in own for bit in bits) for own in masks])


def test_a_stop_signal_finds_no_other_thread() -> None:
    """But the one that waits for SIGTERM, if it waits already."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=beside_another_thread, args=(there,))
    process.start()
    try:
        assert max(here.recv()) <= 1
    finally:
        process.kill()


def uses_stuck_loaders(loaders: Connection, terminates: bool) -> None:
    batches = load(stuck, count(), 2, CPU)
    pids = [int(next(batches)) for _ in range(2)]
    loaders.send(pids)
    if terminates:  # as DataLoader does with those that do not end by themselves
        for process in multiprocessing.active_children():
            process.terminate()
    time.sleep(2 * LIMIT_S)


@pytest.mark.parametrize("terminates", [True, False])
def test_stuck_loaders_end_with_their_worker(terminates: bool) -> None:
    """Also by SIGKILL; or else when it terminates them."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    worker = context.Process(target=uses_stuck_loaders, args=(there, terminates))
    worker.start()
    loaders = here.recv()
    if not terminates:
        os.kill(worker.pid or 0, signal.SIGKILL)
    try:
        deadline = time.monotonic() + LIMIT_S
        while any(map(is_running, loaders)):
            assert time.monotonic() < deadline, "a loader outlives its worker"
            time.sleep(0.02)
    finally:
        worker.kill()
        worker.join()
        for pid in loaders:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
