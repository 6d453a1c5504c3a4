"""Elastic runs on a virtual clock, in one process: members and their threads take turns.

What co2/elastic reads the time from, sleeps by, talks to and connects with is a `World`'s here, so
that a thousand threads, a slow link or a silence of minutes take no time, and a test is the same
each time. What decides is the code of co2/elastic.
"""

import contextlib
import heapq
import itertools
import queue
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from co2.elastic import heartbeat, members
from co2.elastic.heartbeat import Heartbeat, announce_gone
from co2.elastic.members import Members

LIMIT_S = 300.0
"""A test whose members need longer, by their own clock, hangs."""
_LOOK_S = 0.01
"""Between two looks of a member that connects with others."""


class Closed(BaseException):
    """The world has ended, or this process was killed."""


class Task:
    """A thread of a process of the world."""

    def __init__(self, process: int, act: Callable[[], Any], name: str) -> None:
        self.process, self.name = process, name
        self.go = threading.Semaphore(0)
        self.turns = 0
        """What is due for an earlier turn is void."""
        self.done = False
        self.result: Any = None
        self.error: Exception | None = None
        self._act = act

    def run(self) -> None:
        """In the thread."""
        try:
            self.result = self._act()
        except Closed:
            pass
        except Exception as error:
            self.error = error
        self.done = True


class World:
    """Processes, a store, and the time.

    Args:
        round_trip_s: seconds until the store's answer is there.
        seed: moves every answer by up to a tenth, so that members meet in another order.
    """

    def __init__(self, round_trip_s: float = 0.001, seed: int = 0) -> None:
        self.now = 0.0
        self.round_trip_s = round_trip_s
        self.kept: dict[str, bytes] = {}
        """What the store has."""
        self.store_lost = False
        self.refused: dict[int, int] = defaultdict(int)
        """By process: how many of its next attempts to connect with the others fail."""
        self.broken_threads: set[tuple[int, str]] = set()
        """Processes and names of their threads, to which the store gives nonsense."""
        self.opening: VirtualSockets | None = None
        self._random = random.Random(seed)
        self._due: list[tuple[float, int, int, Task]] = []
        self._numbers = itertools.count()
        self._waiting: dict[object, list[Task]] = defaultdict(list)
        self._dead: set[int] = set()
        self._hanging: dict[int, float] = {}
        self._given: dict[tuple[str, int], dict[int, object]] = defaultdict(dict)
        self._calls: dict[tuple[str, int], int] = defaultdict(int)
        self._main, self._current = threading.Semaphore(0), Task(-1, lambda: None, "main")
        self._asked: list[Task] = []
        self._over, self._stuck = False, ""
        self._tasks: list[Task] = []

    # What a test does.

    def run(self, *acts: Callable[[int], Any], first: int = 0) -> list[Any]:
        """One process for each act, which gets its number. Returns what they return, once all that
        are not killed have ended; raises what one has raised."""
        asked = [
            self.start(number, partial(act, number), "trains")
            for number, act in enumerate(acts, first)
        ]
        self._asked = asked
        self._switch(None)
        assert not self._stuck, self._stuck
        for task in asked:
            if task.error is not None:
                raise task.error
        return [task.result for task in asked]

    def member(self, process: int, silent_s: float = 30.0, replica_size: int = 1) -> Members:
        """This process as a member of the run."""
        return Members(("virtual", 0), process, silent_s, replica_size=replica_size)

    def kill(self, process: int, told: bool = True) -> None:
        """End a process amid what it does. What started it says so, unless that is gone, too."""
        self._dead.add(process)
        if told:
            announced = VirtualStore(self, silent=True)
            announce_gone(announced, process)
        if self._current.process == process:
            self._switch(self._current)

    def hang(self, process: int, seconds: float) -> None:
        """Let a process do nothing for so long."""
        self._hanging[process] = self.now + seconds
        if self._current.process == process:
            self.pause(0.0)

    def close(self) -> None:
        """End all threads."""
        self._over = True
        for task in self._tasks:
            task.go.release()

    # What the code under test does.

    def start(self, process: int, act: Callable[[], Any], name: str) -> Task:
        """Have another thread of a process run from now on."""
        task = Task(process, act, name)

        def live() -> None:
            task.go.acquire()
            if not self._over:
                task.turns += 1
                task.run()
                if not self._over:
                    self.notify(task)
                    self._switch(task)

        threading.Thread(target=live, name=name, daemon=True).start()
        self._tasks.append(task)
        self._push(task, 0.0)
        return task

    def current(self) -> Task:
        return self._current

    def pause(self, seconds: float) -> None:
        """Let others have their turns for so long."""
        self._push(self._current, seconds)
        self._switch(self._current)

    def wait(self, channel: object, seconds: float | None = None) -> None:
        """Wait for a `notify`, at most for so long."""
        self._waiting[channel].append(self._current)
        if seconds is not None:
            self._push(self._current, seconds)
        self._switch(self._current)

    def notify(self, channel: object) -> None:
        """Let all who wait there go on."""
        for task in self._waiting.pop(channel, ()):
            self._push(task, 0.0)

    def answer_s(self) -> float:
        """Seconds until the next answer of the store."""
        return self.round_trip_s * self._random.uniform(1.0, 1.1)

    def exchange(
        self, place: str, me: int, size: int, value: object, cut: Callable[[], bool]
    ) -> list[Any]:
        """What `size` processes give at the same place. Raises `RuntimeError` once it was cut."""
        number = self._calls[place, me]
        self._calls[place, me] += 1
        given = self._given[f"{place}/{number}", size]
        given[me] = value
        while len(given) < size:
            if cut():
                raise RuntimeError("Connection closed by peer")
            self.pause(_LOOK_S)
        return [given[one] for one in sorted(given)]

    def _push(self, task: Task, seconds: float) -> None:
        due = (self.now + seconds, next(self._numbers), task.turns, task)
        heapq.heappush(self._due, due)

    def _switch(self, task: Task | None) -> None:
        """Give the turn to whose is next. Returns in `task`'s next one."""
        if self._over:
            raise Closed
        chosen = self._next()
        if chosen is None:
            self._main.release()
        else:
            self._current = chosen
            if chosen is not task:
                chosen.go.release()
        if task is None:
            self._main.acquire()
        elif not task.done:
            if chosen is not task:
                task.go.acquire()
            if self._over:
                raise Closed
            task.turns += 1

    def _next(self) -> Task | None:
        """Whose turn it is; nobody's, where all that the test waits for has ended."""
        while any(not task.done and task.process not in self._dead for task in self._asked):
            if not self._due:
                self._stuck = "all wait for each other"
                break
            at, _, turns, task = heapq.heappop(self._due)
            if turns != task.turns or task.done or task.process in self._dead:
                continue
            until = self._hanging.get(task.process, 0.0)
            if until > at:
                self._push(task, until - self.now)
                continue
            self.now = max(self.now, at)
            if self.now < LIMIT_S:
                return task
            self._stuck = f"waits for hours: {task.name} of {task.process}"
            break
        return None


class VirtualStore:
    """A connection to the store of the world.

    Args:
        silent: answer at once, as if no process had asked.
    """

    def __init__(self, world: World, silent: bool = False) -> None:
        self.world, self.sockets = world, world.opening
        self.calls = 0
        self._silent = silent

    def set(self, name: str, value: str) -> None:
        self._answer(lambda: self._write(name, value.encode()))

    def get(self, name: str) -> bytes:
        return self.multi_get([name])[0]

    def multi_get(self, names: Sequence[str]) -> list[bytes]:
        self._present(names)
        return self._answer(lambda: [self.world.kept[name] for name in names])

    def add(self, name: str, number: int) -> int:
        def added() -> int:
            total = int(self.world.kept.get(name, b"0")) + number
            self._write(name, str(total).encode())
            return total

        return self._answer(added)

    def append(self, name: str, text: str) -> None:
        self._answer(lambda: self._write(name, self.world.kept.get(name, b"") + text.encode()))

    def compare_set(self, name: str, expected: str, value: str) -> bytes:
        def compared() -> bytes:
            if self.world.kept.get(name, b"") == expected.encode():
                self._write(name, value.encode())
            return self.world.kept[name]

        return self._answer(compared)

    def check(self, names: Sequence[str]) -> bool:
        return self._answer(lambda: all(name in self.world.kept for name in names))

    def wait(self, names: Sequence[str], timeout: timedelta) -> None:
        deadline = self.world.now + timeout.total_seconds()
        self._answer(lambda: None)
        self._present(names, deadline)
        if self.world.now > deadline:
            raise dist.DistStoreError("wait timeout")

    def delete_key(self, name: str) -> bool:
        return self._answer(lambda: self.world.kept.pop(name, None) is not None)

    def num_keys(self) -> int:
        return self._answer(lambda: len(self.world.kept))

    def _answer(self, act: Callable[[], Any]) -> Any:
        """The question travels, and then the answer."""
        self.calls += 1
        task = self.world.current()
        if (task.process, task.name) in self.world.broken_threads:
            raise KeyError("unexpected")
        for step in (lambda: None, act):
            if self.world.store_lost:
                raise dist.DistNetworkError("Connection reset by peer")
            found = step()
            if not self._silent:
                self.world.pause(self.world.answer_s() / 2)
        return found

    def _present(self, names: Sequence[str], deadline: float = LIMIT_S) -> None:
        for name in names:
            while name not in self.world.kept:
                if self.world.now >= deadline:
                    raise dist.DistStoreError("wait timeout")
                if self.world.store_lost:
                    raise dist.DistNetworkError("Connection reset by peer")
                self.world.wait(name, deadline - self.world.now)

    def _write(self, name: str, value: bytes) -> None:
        self.world.kept[name] = value
        self.world.notify(name)


class VirtualSockets:
    """What carries a generation's collectives, or its meeting."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.were_cut = False

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        self._world.opening = self
        yield
        self._world.opening = None

    def cut(self) -> None:
        self.were_cut = True

    def listening(self) -> list[int]:
        return []

    def keep(self, ports: object) -> None:
        pass

    def give_up_after(self, seconds: float) -> None:
        pass


class VirtualGroup:
    """A process group, which its members have made together."""

    def __init__(self, name: str, rank: int, size: int, sockets: VirtualSockets) -> None:
        self.name, self.rank, self.size, self.sockets = name, rank, size, sockets

    def _get_backend(self, device: object) -> "VirtualGroup":
        return self

    def _set_default_timeout(self, timeout: object) -> None:
        pass


@contextlib.contextmanager
def virtual(round_trip_s: float = 0.001, seed: int = 0) -> Iterator[World]:
    """A world, in which the code of co2/elastic runs."""
    world = World(round_trip_s, seed)

    class Thread:
        def __init__(self, target: Callable[[], None], name: str, daemon: bool) -> None:
            self._target, self._name = target, name
            self._task: Task | None = None

        def start(self) -> None:
            self._task = world.start(world.current().process, self._target, self._name)

        def is_alive(self) -> bool:
            return self._task is not None and not self._task.done

        def join(self) -> None:
            while self.is_alive():
                world.wait(self._task)

    class Event:
        def __init__(self) -> None:
            self._is_set = False

        def set(self) -> None:
            self._is_set = True
            world.notify(self)

        def wait(self, seconds: float) -> bool:
            if not self._is_set:
                world.wait(self, seconds)
            return self._is_set

    class PriorityQueue(queue.PriorityQueue):
        def put(self, item: Any) -> None:
            super().put(item)
            world.notify(self)

        def get(self) -> Any:
            while self.empty():
                world.wait(self)
            return super().get()

    def replica_of(process: int) -> tuple[str, int]:
        size = sizes.get(process, 1)
        return f"replica {process // size} of {size}", size

    sizes: dict[int, int] = {}

    def init_process_group(backend: str, store: object, rank: int, world_size: int) -> None:
        sizes[world.current().process] = world_size

    def in_replica(value: object) -> list[Any]:
        process = world.current().process
        place, size = replica_of(process)
        return world.exchange(place, process, size, value, cut=lambda: False)

    def all_reduce(tensor: torch.Tensor, op: object) -> None:
        assert op == dist.ReduceOp.MAX
        tensor.fill_(max(in_replica(tensor.item())))

    def gather(found: list[Any], own: object, group: VirtualGroup) -> None:
        cut = partial(getattr, group.sockets, "were_cut")
        found[:] = world.exchange(f"gather {group.name}", group.rank, group.size, own, cut)

    def make_group(
        name: str, store: VirtualStore, rank: int, size: int, backend: str, timeout: timedelta
    ) -> VirtualGroup:
        process, meeting = world.current().process, store.sockets
        carries = world.opening
        world.opening = None
        assert meeting is not None and carries is not None
        if world.refused[process] > 0:
            world.refused[process] -= 1
            raise RuntimeError("no connection")
        deadline = world.now + timeout.total_seconds()
        world.exchange(name, rank, size, None, lambda: meeting.were_cut or world.now > deadline)
        return VirtualGroup(name, rank, size, carries)

    clock = SimpleNamespace(sleep=world.pause, monotonic=lambda: world.now)
    threads = SimpleNamespace(
        Thread=Thread, Event=Event, Lock=threading.Lock, current_thread=threading.current_thread
    )
    collectives = SimpleNamespace(
        DistStoreError=dist.DistStoreError,
        DistNetworkError=dist.DistNetworkError,
        ReduceOp=dist.ReduceOp,
        TCPStore=lambda *_, is_master: VirtualStore(world),
        PrefixStore=lambda _, store: store,
        init_process_group=init_process_group,
        destroy_process_group=lambda group=None: None,
        all_reduce=all_reduce,
        all_gather_object=gather,
    )
    replaced = {
        "dist": collectives,
        "time": clock,
        "threading": threads,
        "queue": SimpleNamespace(PriorityQueue=PriorityQueue),
        "gc": SimpleNamespace(freeze=lambda: None, collect=lambda: None),
        "Sockets": partial(VirtualSockets, world),
        "Heartbeat": partial(Heartbeat, clock=clock.monotonic),
        "make_group": make_group,
        "use": lambda *_: None,
        "until_cut": lambda act: act(),
        "well_on_all": lambda well: all(in_replica(well)),
        "abort": lambda _: None,
        "nccl_backends": lambda _: [],
    }
    with contextlib.ExitStack() as patches:
        for name, value in replaced.items():
            patches.enter_context(patch.object(members, name, value))
        patches.enter_context(patch.object(heartbeat, "threading", threads))
        patches.callback(world.close)
        yield world
