"""The store of a run on several machines says with whom it begins, and when it has ended; and by
the store who has ended without a word is not waited for."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from co2.config import LaunchConfig
from co2.elastic import store as module
from co2.elastic.heartbeat import add_to
from co2.elastic.store import INSIDE, WAITING, OwnStore, SharedStore, keep
from co2.errors import PREEMPTED, WorkerLost
from co2.start.elastic import _Starter
from co2.start.processes import Workers
from co2.train.stop import StopVote

SILENT_S = 4.0
LIMIT_S = 300.0


@pytest.fixture
def held() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadPoolExecutor]:
    monkeypatch.setattr(module, "SILENT_S", SILENT_S)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with ThreadPoolExecutor() as found:
        yield found


@pytest.fixture
def come(held: dist.TCPStore) -> Callable[[], SharedStore]:
    return lambda: SharedStore(LaunchConfig(elastic=True, store=f"127.0.0.1:{held.port}"))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[int, module._Node]:
    """What the process that holds the store knows of the nodes."""
    found: dict[int, module._Node] = {}
    listen = module._listen

    def listened(store: dist.Store, nodes: dict[int, module._Node]) -> None:
        listen(store, nodes)
        found.update(nodes)

    monkeypatch.setattr(module, "_listen", listened)
    return found


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited for {LIMIT_S:g} s"
        time.sleep(0.05)


def ended(future: Future) -> object:
    return future.result(timeout=LIMIT_S)


def test_a_run_begins_goes_on_and_ends(
    held: dist.TCPStore,
    pool: ThreadPoolExecutor,
    come: Callable[[], SharedStore],
    seen: dict[int, module._Node],
) -> None:
    """A node that died while it waited is not counted; one that comes later joins; one that is lost
    ends nothing."""
    never = threading.Event()
    status = pool.submit(keep, held, 2, never)
    dead = come()
    dead._say(WAITING, 5)
    until(lambda: 1 in seen and seen[1].silent)
    first = come()
    begins = pool.submit(first.begin, 2, never.wait)
    until(lambda: 2 in seen)
    heard = seen[2].sign.value
    until(lambda: seen[2].sign.value != heard)
    assert not begins.done(), "one of two is there"
    second = come()
    assert second.begin(1, never.wait) == (range(2, 3), (0, 1, 2))
    assert ended(begins) == (range(2), (0, 1, 2))
    late = come()
    assert late.begin(2, never.wait) == (range(3, 5), ())
    assert not late.is_over(inside=False)
    first._say(INSIDE)  # and nothing any more: it is lost

    def goes_on() -> bool:
        return not second.is_over(inside=True) and not late.is_over(inside=False)

    until(lambda: not goes_on() or (seen[2].state == INSIDE and seen[2].silent))
    heard = seen[3].sign.value
    until(lambda: not goes_on() or seen[3].sign.value != heard)
    assert goes_on()
    assert second.leave(0) == 0
    until(lambda: late.is_over(inside=False))
    assert late.leave(137) == 0, "its workers were ended because the run had"
    assert ended(status) == 0


def test_those_who_are_lost_before_a_sign_of_life_are_told_of(
    held: dist.TCPStore, pool: ThreadPoolExecutor, come: Callable[[], SharedStore]
) -> None:
    """The other workers would wait for them as long as a start may take; and a run of which nobody
    is left has failed."""
    status = pool.submit(keep, held, 1, threading.Event())
    node = come()
    node.begin(2, threading.Event().wait)
    add_to(held, "born", 1)
    assert ended(status) == 1
    assert held.get("gone").split() == [b"0"]
    assert node.leave(137) == 1


def test_a_node_is_told_to_stop_before_the_run_begins(
    held: dist.TCPStore, pool: ThreadPoolExecutor, come: Callable[[], SharedStore]
) -> None:
    closing, told = threading.Event(), threading.Event()
    status = pool.submit(keep, held, 2, closing)
    node = come()
    begins = pool.submit(node.begin, 1, told.wait)
    told.set()
    assert ended(begins) is None
    assert node.leave(PREEMPTED) == PREEMPTED
    closing.set()
    assert ended(status) == PREEMPTED


def test_a_node_reports_once_its_workers_need_not_import_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a slow disk that takes longer than a node may be silent."""
    done: list[str] = []
    monkeypatch.setattr(Workers, "import_all", lambda _: done.append("imported"))
    place = OwnStore()
    monkeypatch.setattr(place, "begin", lambda *_: done.append("reported"))
    config = LaunchConfig(elastic=True)
    assert _Starter(lambda number: 0, config, 1, place, Workers()).run() == PREEMPTED
    assert done == ["imported", "reported"]


def test_a_vote_on_stopping_waits_for_nobody_who_has_ended(held: dist.TCPStore) -> None:
    """Each leaves in the store where it runs."""
    child = os.fork()
    if child == 0:
        own = dist.TCPStore("127.0.0.1", held.port, is_master=False)
        with StopVote(own, 1, lambda: range(2), ()):
            os._exit(0)
    os.waitpid(child, 0)
    with StopVote(held, 0, lambda: range(2), (signal.SIGUSR1,), grace_s=1e6) as vote:
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(WorkerLost, match="it has ended"):
            until(lambda: vote(1))


@pytest.mark.slow  # new interpreters, and a network of its own
def test_a_silent_name_server_holds_nobody_up_for_long(tmp_path: Path) -> None:
    """It takes ten seconds by default, in each process, in which a store may serve nobody."""
    names = tmp_path / "resolv.conf"
    names.write_text("nameserver 127.0.0.1\n")
    alone = ["unshare", "--map-root-user", "--net", "--mount", "sh", "-c"]
    prepare = f"ip link set lo up && mount --bind {names} /etc/resolv.conf"
    if not shutil.which("unshare") or subprocess.run([*alone, prepare]).returncode:
        pytest.skip("needs namespaces of its own")
    lines = (
        "import socket, time",
        "from co2.elastic.store import OwnStore",
        "server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
        "server.bind(('127.0.0.1', 53))",
        "began = time.monotonic()",
        "OwnStore()",
        "print(time.monotonic() - began)",
    )
    command = f'{prepare} && exec {sys.executable} -c "{"; ".join(lines)}"'
    kept = {name: value for name, value in os.environ.items() if name != "RES_OPTIONS"}
    took = [
        float(subprocess.check_output([*alone, command], text=True, env={**kept, **given}))
        for given in ({}, {"RES_OPTIONS": "timeout:5"})
    ]
    assert took[0] < took[1] or took[1] < 5, "the default's five seconds"
