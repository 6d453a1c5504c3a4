"""The store in which the workers of an elastic run agree, and where the run begins and ends.

    python -m co2.elastic.store --nodes 2 --port 29400

Of a run on one machine train.py holds it itself (`OwnStore`). On several machines it is a process
of its own (`keep`), which trains nothing and may lie on a machine that does not. Each machine is a
*node*: one call of train.py, which starts its own workers (`SharedStore` is what it sees). What
only one can decide without a race is decided by the process that holds the store: with which nodes
the run begins, so that all others join it, and when it has ended. Its exit status is the run's.

A node gets a place, which no other has, or had. It writes what it does into `node/<place>` several
times a second, with a count that shows that it lives.
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from co2.arguments import Parser
from co2.config import LaunchConfig
from co2.elastic.heartbeat import Sign, announce_gone, has_lived
from co2.elastic.members import STORE_ANSWERS_S, connected
from co2.errors import DIVERGED, PREEMPTED, REFUSED, STOPPED, ConfigError, require
from co2.program import python

FINAL = (REFUSED, DIVERGED, *STOPPED)
"""Exit statuses of workers that another attempt would have, too."""
SILENT_S = 30.0
"""A node without a sign of life for so long is gone. Its workers are noticed sooner, by theirs."""
WAITING, INSIDE, OUTSIDE, LEFT = "waiting", "inside", "outside", "left"
"""What a node does: it waits for the run's beginning, has workers who train, has none that trains
yet, has ended."""
_HOST = "127.0.0.1"
_LOOK_S = 0.2
_CLOSING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that may reach all processes of a run, which needs its store until it has saved."""
_SIOCGIFADDR = 0x8915


class OwnStore:
    """The store of a run on this machine alone, held by this process."""

    alone = True
    """Whether there are no other machines."""

    def __init__(self) -> None:
        _wait_little_for_names()
        self.store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        self.address = _HOST, self.store.port

    def begin(
        self, workers: int, told: Callable[[float], bool]
    ) -> tuple[range, tuple[int, ...]] | None:
        """Wait until the run begins, or is found to go on.

        Args:
            workers: how many this machine starts with.
            told: waits so many seconds. Returns whether this machine has been told to stop.
        Returns:
            Numbers of its own workers, and of all those who begin together: nobody, where these
            workers join a run that goes on. None if it was told to stop.
        """
        return range(self.new_numbers(workers), workers), tuple(range(workers))

    def new_numbers(self, count: int) -> int:
        """The first of so many numbers that no worker of the run has, or had."""
        return self.store.add("numbers", count) - count

    def is_over(self, inside: bool) -> bool:
        """Whether the run is over for workers who wait to be let in.

        Args:
            inside: whether this machine has any who train.
        """
        return not inside  # nobody is left who could let them in

    def leave(self, status: int) -> int:
        """This machine's part has ended with a status. Returns the run's, as far as it is known."""
        return status


class SharedStore(OwnStore):
    """The store of a run on several machines, held by another process.

    Raises:
        ConfigError: its host is unknown, or nobody answers there within `launch.wait_s`.
    """

    alone = False

    def __init__(self, config: LaunchConfig) -> None:
        assert config.store is not None
        self.address = config.store_address
        own = _reach(config.store, self.address, config.wait_s)
        _wait_little_for_names()
        found: list[dist.TCPStore] = []

        def connect() -> None:
            with contextlib.suppress(dist.DistError):
                found.append(connected(self.address))

        # PyTorch waits for ever for a server that says nothing.
        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        thread.join(config.wait_s)
        hint = "what answers there is no store; python -m co2.elastic.store holds one"
        require(bool(found), "launch.store", config.store, hint)
        self.store = found[0]
        name = _interface(own)
        if name is not None:  # gloo would take the one that this host's name stands for
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        self._place, self._beats = self.store.add("nodes", 1), 0

    def begin(
        self, workers: int, told: Callable[[float], bool]
    ) -> tuple[range, tuple[int, ...]] | None:
        while not self.store.check(["begun"]):
            self._say(WAITING, workers)
            if told(_LOOK_S) or self._has_ended():
                return None
        nodes = {int(place): numbers for place, numbers in json.loads(self.store.get("begun"))}
        if self._place in nodes:
            self._say(INSIDE)
            return range(*nodes[self._place]), tuple(range(max(end for _, end in nodes.values())))
        self._say(OUTSIDE)
        first = self.new_numbers(workers)
        return range(first, first + workers), ()

    def is_over(self, inside: bool) -> bool:
        self._say(INSIDE if inside else OUTSIDE)
        return not inside and self._has_ended()

    def leave(self, status: int) -> int:
        if self._has_ended():
            status = int(self.store.get("ended"))
        self._say(LEFT, status)
        return status

    def _has_ended(self) -> bool:
        return bool(self.store.check(["ended"]))

    def _say(self, state: str, number: int = 0) -> None:
        self._beats += 1
        self.store.set(f"node/{self._place}", json.dumps([self._beats, state, number]))


@dataclass
class _Node:
    """What a node has said last."""

    sign: Sign
    """Its words, which have a count that shows that it lives."""
    state: str
    number: int
    """Workers of one that waits, exit status of one that has left."""

    @property
    def silent(self) -> bool:
        return self.sign.silence(time.monotonic()) > SILENT_S


def keep(store: dist.TCPStore, wanted: int, closing: threading.Event) -> int:
    """Hold the store until the run has ended.

    Args:
        wanted: nodes with which the run begins. Others may join later.
        closing: set when no other node is expected: where the run has not begun, it will not.
    Returns:
        The run's exit status: 0 if any node has ended well; 0 too where no node has ever come.
    """
    nodes: dict[int, _Node] = {}
    begun: dict[int, range] = {}
    status: int | None = None
    while True:
        time.sleep(_LOOK_S)
        _listen(store, nodes)
        here = {
            place: node for place, node in nodes.items() if node.state != LEFT and not node.silent
        }
        if status is not None or (closing.is_set() and not nodes):
            if not here:
                return status or 0
            continue
        if not begun:
            if len(here) >= wanted:
                begun = _begin(store, here)
            elif closing.is_set():
                status = PREEMPTED
        else:
            for place, numbers in begun.items():
                if nodes[place].silent:
                    _mark_node_dead(store, numbers)
            inside = [
                place
                for place, node in here.items()
                if node.state == INSIDE or (node.state == WAITING and place in begun)
            ]
            if not inside:
                status = _status([node.number for node in nodes.values() if node.state == LEFT])
        if status is not None:
            _print(f"the run has ended with status {status}")
            store.set("ended", str(status))


def _listen(store: dist.Store, nodes: dict[int, _Node]) -> None:
    """Read what all nodes say."""
    now = time.monotonic()
    for place in range(1, store.add("nodes", 0) + 1):
        key = f"node/{place}"
        if not store.check([key]):
            continue
        words = store.get(key)
        _, state, number = json.loads(words)
        if place not in nodes:
            _print(f"node {place} has come")
            nodes[place] = _Node(Sign(SILENT_S, now), state, number)
        node = nodes[place]
        node.sign.seen(words, now)
        if node.state != state and state == LEFT:
            _print(f"node {place} has ended with status {number}")
        node.state, node.number = state, number


def _begin(store: dist.Store, here: dict[int, _Node]) -> dict[int, range]:
    """Number the workers of the nodes with which the run begins."""
    begun, end = {}, 0
    for place, node in sorted(here.items()):
        begun[place] = range(end, end + node.number)
        end += node.number
    store.add("numbers", end)
    store.set("begun", json.dumps([[place, [r.start, r.stop]] for place, r in begun.items()]))
    _print(f"the run begins: {len(begun)} nodes, {end} workers")
    return begun


def _mark_node_dead(store: dist.Store, numbers: range) -> None:
    """Tell the others of workers of a node that was lost before they gave a sign of life."""
    for number in numbers:
        if not has_lived(store, number):
            announce_gone(store, number)


def _status(statuses: Sequence[int]) -> int:
    """The run's exit status from those of its nodes."""
    if 0 in statuses:
        return 0
    final = [status for status in statuses if status in FINAL]
    return max(final or statuses, default=1)


def _reach(store: str, address: tuple[str, int], wait_s: float) -> str:
    """Wait until the store answers. Returns the address by which it sees this machine."""
    deadline = time.monotonic() + wait_s
    start = f"{python()} -m co2.elastic.store"
    hint = f"nobody answers there; start the store with {start}, and name its host"
    told = False
    while True:
        try:
            with socket.create_connection(address, timeout=STORE_ANSWERS_S) as connection:
                own: str = connection.getsockname()[0]
                return own
        except socket.gaierror:
            hint = "no such host; the address of the store is that of its host, such as node1:29400"
            raise ConfigError("launch.store", store, hint) from None
        except OSError:
            if time.monotonic() > deadline:
                raise ConfigError("launch.store", store, hint) from None
        if not told:
            _print(f"waiting for the store at {store}")
            told = True
        time.sleep(_LOOK_S)


def _wait_little_for_names() -> None:
    """Have this process, and its workers, wait a second for a name server and not five, twice each.
    PyTorch's stores ask for the name of whoever connects, to have it in their warnings, and what
    holds one serves nobody meanwhile."""
    os.environ.setdefault("RES_OPTIONS", "timeout:1")


def _interface(address: str) -> str | None:
    """The network interface that has an IPv4 address; None where none is found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def _print(text: str) -> None:
    print(text, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of the process that holds the store of a run on several machines. It ends
    with the run, and has its exit status. Anybody who reaches the port can write into the store.

    On SIGTERM, SIGUSR1 or SIGHUP it ends where the run has not begun.
    """
    parser = Parser(prog="python -m co2.elastic.store", description=main.__doc__)
    parser.add_argument("--nodes", type=int, required=True, help="with how many the run begins")
    parser.add_argument("--port", type=int, default=0, help="by default any that is free")
    options = parser.parse_args(argv)
    if options.nodes < 1:
        parser.error(f"--nodes={options.nodes}: must be 1 or more")
    if not 0 <= options.port < 2**16:
        parser.error(f"--port={options.port}: must be a port, from 1 to 65535")
    _wait_little_for_names()
    closing = threading.Event()
    for number in _CLOSING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has SIGHUP
            signal.signal(number, lambda *_: closing.set())
    try:
        store = dist.TCPStore(_HOST, options.port, is_master=True, wait_for_workers=False)
    except dist.DistNetworkError:
        parser.error(f"--port={options.port}: is in use; take another")
    _print(f"the store is at {socket.gethostname()}:{store.port}")
    try:
        return keep(store, options.nodes, closing)
    except KeyboardInterrupt:
        return STOPPED[-1]


if __name__ == "__main__":
    ended = main()
    # An interpreter that ends takes its handlers away: a signal would then kill it, and with it the
    # run's exit status.
    for number in _CLOSING:
        signal.signal(number, signal.SIG_IGN)
    sys.exit(ended)
