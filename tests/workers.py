"""Gloo workers that stay up between tests: `Pool.run(fn, world, *args)`.

A test that `replicas(2)` decorates runs itself in two of them; `everybody(value)` gives it what the
others have.

Importing torch takes longer than most tests, so the workers are forked from a server that has
imported it (tests/server.py). They live until the session ends. Each case gets a process group of
its own, which is always destroyed afterwards. When a case exceeds its time limit, its workers are
killed and new ones are forked for the next case, so that a deadlock is a failed test and not a
session that hangs.

What the workers print is part of a failure's report, and silent otherwise: PyTorch prints a warning
or a stack for each connection that a test cuts on purpose.
"""

import contextlib
import functools
import gc
import importlib
import inspect
import io
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch
import torch.distributed as dist

from co2.comm.waiting import use
from tests.server import fork_function

GRACE_S = 5.0
"""How long the other ranks may take to notice that one of them has failed, in seconds."""
_SHOWN = 4000
"""How much of what a rank has printed a failure shows, from the end, in bytes."""


class WorkerError(AssertionError):
    """At least one rank raised; the message holds the tracebacks."""


class TimeLimit(AssertionError):
    """At least one rank did not come back in time."""


class _Pickler(pickle.Pickler):
    """Sends a tensor as its bytes. torch would make each one a file of its own in torch.save's
    oldest format, whose reading took a twentieth of all the time of the tests."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.requires_grad or not obj.numel():
            return NotImplemented
        content = obj.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (content, obj.dtype, obj.shape)


def _tensor(content: bytes, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)


def _pickled(case: object) -> bytes:
    out = io.BytesIO()
    _Pickler(out, pickle.HIGHEST_PROTOCOL).dump(case)
    return out.getvalue()


class _Worker:
    """A process that runs one case after the other."""

    def __init__(self) -> None:
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115
        self._before = 0
        self.connection, there = Pipe()
        descriptors = there.fileno(), self._printed.fileno()
        self._process = fork_function("tests.workers:serve", *descriptors)
        there.close()

    def send(self, case: object) -> None:
        """Begin a case."""
        self._before = self._size()
        self.connection.send_bytes(_pickled(case))

    def printed(self) -> str:
        """The end of what the process has printed in this case."""
        size = min(_SHOWN, self._size() - self._before)
        # Not by a seek, which would move the place at which the process writes.
        found = os.pread(self._printed.fileno(), size, self._size() - size)
        return found.decode(errors="replace")

    def _size(self) -> int:
        return os.fstat(self._printed.fileno()).st_size

    def kill(self) -> None:
        self._process.kill()
        self.connection.close()

    def wait(self) -> None:
        """After `kill`."""
        self._process.wait()
        self._printed.close()


class Pool:
    """Up to `size` worker processes, started together, at the first case at the latest."""

    def __init__(self, size: int) -> None:
        self.size = size
        # A FileStore makes everyone who waits look again every 10 ms.
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._cases = 0
        self._workers: list[_Worker] = []

    def start(self) -> None:
        """Start the workers, unless there are any."""
        if not self._workers:
            self._workers = [_Worker() for _ in range(self.size)]

    def run(
        self, fn: Callable[..., Any], world: int, *args: Any, time_limit_s: float = 300.0
    ) -> list[Any]:
        """`fn(rank, world, *args)` on `world` ranks of one process group.

        Args:
            fn: a module-level function; it, its arguments and its results are pickled.
        Returns:
            The results by rank.
        Raises:
            WorkerError: with the traceback of every rank that raised.
            TimeLimit: with the ranks that were still busy.
        """
        assert 1 <= world <= self.size, f"world {world} in a pool of {self.size}"
        self.start()
        self._cases += 1
        used = self._workers[:world]
        for rank, worker in enumerate(used):
            worker.send(
                (fn, rank, world, args, f"case{self._cases}", self._store.port, time_limit_s)
            )
        replies = self._collect([worker.connection for worker in used], time_limit_s)
        failures = {rank: text for rank, (good, text) in replies.items() if not good}
        missing = sorted(set(range(world)) - set(replies))
        said = "".join(
            f"rank {rank}:\n{failures.get(rank, '')}{_quoted(used[rank].printed())}"
            for rank in range(world)
            if rank in missing or rank in failures
        )
        if missing:
            self.close()
        if failures:
            raise WorkerError(said)
        if missing:
            raise TimeLimit(
                f"ranks {missing} of {world} still busy after {time_limit_s:g} s\n{said}"
            )
        return [pickle.loads(replies[rank][1]) for rank in range(world)]

    def close(self) -> None:
        """Kill the workers; the next case starts new ones."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.wait()
        self._workers = []

    def _collect(
        self, connections: list[Connection], time_limit_s: float
    ) -> dict[int, tuple[bool, Any]]:
        """Rank to reply, without the ranks that stayed silent."""
        replies: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + time_limit_s
        while len(replies) < len(connections):
            silent = [c for rank, c in enumerate(connections) if rank not in replies]
            ready = wait(silent, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = connections.index(connection)
                try:
                    replies[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    said = _quoted(self._workers[rank].printed())
                    self.close()
                    raise WorkerError(f"rank {rank} died\n{said}") from None
                if not replies[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return replies


def _quoted(printed: str) -> str:
    return f"printed:\n{printed}\n" if printed else ""


def replicas(world: int | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test that runs in each of `world` workers; None: `world` is one of its parameters. It may
    take `rank` and `world`; what else it takes are parameters and fixtures that can be pickled.

        @replicas(2)
        @pytest.mark.parametrize("name", METHODS)
        def test_the_weights_are_alike(rank: int, name: str) -> None: ...
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        names = inspect.signature(test).parameters
        own = [names[name] for name in names if name not in ("rank", "world")]
        wanted = ["workers"] if world else ["workers", "world"]

        def run(workers: Pool, **taken: Any) -> None:
            count = world or taken.pop("world")
            workers.run(_in_worker, count, test.__module__, test.__name__, taken)

        more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in wanted]
        run.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
        run.in_worker = test  # type: ignore[attr-defined]
        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        run.pytestmark = getattr(test, "pytestmark", [])  # type: ignore[attr-defined]
        return run

    return decorate


def _in_worker(rank: int, world: int, module: str, name: str, taken: dict[str, Any]) -> None:
    test = getattr(importlib.import_module(module), name).in_worker
    places = {"rank": rank, "world": world}
    wanted = inspect.signature(test).parameters
    test(**{key: place for key, place in places.items() if key in wanted}, **taken)


def everybody(value: Any) -> list[Any]:
    """What each worker gives, by rank. Collective."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def serve(descriptor: int, printed: int) -> None:
    """Run one case after the other until the session closes the pipe, in a forked process. What it
    prints goes to the file `printed`."""
    connection = Connection(descriptor)
    for standard in (1, 2):
        os.dup2(printed, standard)
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while True:
            case = connection.recv_bytes()
            connection.send_bytes(_pickled(_run_case(case)))
    os._exit(0)  # without the seconds in which an interpreter takes down all modules


@functools.cache
def _store(port: int) -> dist.Store:
    return dist.TCPStore("localhost", port, is_master=False)


def _run_case(case: bytes) -> tuple[bool, Any]:
    """(True, pickled result) or (False, traceback)."""
    try:
        fn, rank, world, args, name, port, time_limit_s = pickle.loads(case)
        store = dist.PrefixStore(name, _store(port))
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=time_limit_s),
        )
        dist.barrier()  # gloo fails if a rank leaves before the others have connected
        result = _pickled(fn(rank, world, *args))
        # It may have made groups over which nothing was sent.
        store.set(f"done/{rank}", "")
        store.wait([f"done/{other}" for other in range(world)])
        return True, result
    except BaseException:
        return False, traceback.format_exc()
    finally:
        sys.stdout.flush()
        use(None)  # members that have vanished may have left theirs
        gc.collect()  # DDP's reducer is part of a cycle and must not outlive its process group
        gc.freeze()  # what is left are imported modules, which need not be traced again
        if dist.is_initialized():
            dist.destroy_process_group()
