"""Functions called in processes as torchrun starts them: `called(fn, place, world, *args)`.

Run as a program: `replicas.py REQUEST RESULT`.
"""

import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cli.harness import LIMIT_S, held_port
from tests.server import environment, fork_program


def called(fn: Callable[..., Any], place: Path, world: int, *args: Any) -> list[Any]:
    """What `fn(*args)`, a function of a module, returns in each of `world` processes.

    Args:
        place: a folder, in which they work.
        world: 1 is a process that nobody has told of others.
    """
    with held_port() as port:
        return _called(fn, place, world, args, port)


def _called(
    fn: Callable[..., Any], place: Path, world: int, args: tuple[Any, ...], port: str
) -> list[Any]:
    request, processes = place / "request", []
    request.write_bytes(pickle.dumps((fn, args)))
    for rank in range(world):
        told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        told |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = environment(**told if world > 1 else {})
        words = [__file__, str(request), str(place / f"result{rank}")]
        with (place / f"log{rank}").open("w") as log:
            out = log.fileno()
            processes.append(fork_program(words, place, env, out, out))
    deadline = time.monotonic() + LIMIT_S
    while any(process.poll() is None for process in processes):
        lost = any(process.poll() for process in processes) or time.monotonic() > deadline
        for process in processes if lost else ():  # the others would wait for it
            process.kill()
        time.sleep(0.02)
    statuses = [process.wait() for process in processes]
    logs = "\n".join((place / f"log{rank}").read_text() for rank in range(world))
    assert statuses == [0] * world, logs
    return [pickle.loads((place / f"result{rank}").read_bytes()) for rank in range(world)]


def _main(request: str, result: str) -> None:
    fn, args = pickle.loads(Path(request).read_bytes())
    made = Path(f"{result}.part")
    made.write_bytes(pickle.dumps(fn(*args)))
    os.replace(made, result)


if __name__ == "__main__":
    _main(*sys.argv[1:])
