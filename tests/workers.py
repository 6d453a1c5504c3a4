"""Gloo workers that stay up between tests: `Pool.run(fn, world, *args)`.

A test that `replicas(2)` decorates runs itself in two of them; `everybody(value)` gives it what the
others have.

Importing torch takes longer than most tests, so the workers are forked from a server that has
imported it (tests/server.py). They live until the session ends. Each case gets a process group of
its own, which is always destroyed afterwards. When a case exceeds its time limit, its workers are
killed and new ones are forked for the next case, so that a deadlock is a failed test and not a
session that hangs.
"""

import contextlib
import functools
import gc
import importlib
import inspect
import io
import os
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch
import torch.distributed as dist

from co2.comm.waiting import use
from tests.server import Forked, fork_function

GRACE_S = 5.0
"""How long the other ranks may take to notice that one of them has failed, in seconds."""


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


class Pool:
    """Up to `size` worker processes, started together at the first case that needs any."""

    def __init__(self, size: int) -> None:
        self.size = size
        # A FileStore makes everyone who waits look again every 10 ms.
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._cases = 0
        self._workers: list[tuple[Forked, Connection]] = []

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
        if not self._workers:
            self._start()
        self._cases += 1
        connections = [connection for _, connection in self._workers[:world]]
        for rank, connection in enumerate(connections):
            case = (fn, rank, world, args, f"case{self._cases}", self._store.port, time_limit_s)
            connection.send_bytes(_pickled(case))
        replies = self._collect(connections, time_limit_s)
        failures = [f"rank {rank}:\n{text}" for rank, (good, text) in replies.items() if not good]
        missing = sorted(set(range(world)) - set(replies))
        if missing:
            self.close()
        if failures:
            raise WorkerError("\n".join(failures))
        if missing:
            raise TimeLimit(f"ranks {missing} of {world} still busy after {time_limit_s:g} s")
        return [pickle.loads(replies[rank][1]) for rank in range(world)]

    def close(self) -> None:
        """Kill the workers; the next case starts new ones."""
        for process, connection in self._workers:
            process.kill()
            connection.close()
        for process, _ in self._workers:
            process.wait()
        self._workers = []

    def _start(self) -> None:
        for _ in range(self.size):
            here, there = Pipe()
            process = fork_function("tests.workers:serve", there.fileno())
            there.close()
            self._workers.append((process, here))

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
                    self.close()
                    raise WorkerError(f"rank {rank} died") from None
                if not replies[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return replies


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


def serve(descriptor: int) -> None:
    """Run one case after the other until the session closes the pipe, in a forked process."""
    connection = Connection(descriptor)
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
        use(None)  # members that have vanished may have left theirs
        gc.collect()  # DDP's reducer is part of a cycle and must not outlive its process group
        gc.freeze()  # what is left are imported modules, which need not be traced again
        if dist.is_initialized():
            dist.destroy_process_group()
