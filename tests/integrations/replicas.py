"""Functions called in processes as torchrun starts them: `called(fn, place, world, *args)`; and
methods with which they train.

Run as a program: `replicas.py REQUEST RESULT`.
"""

import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import co2
from co2.methods import METHODS
from tests.cli.harness import LIMIT_S, held_port
from tests.methods.driver import SETTINGS
from tests.server import environment, fork_program

BLOCKING = "co2_keep, half blocking"
Weights = dict[str, Tensor]


def method(name: str) -> co2.Method:
    more = {"blocking_share": 0.5} if name == BLOCKING else {}
    name = name.partition(",")[0]
    return METHODS[name](METHODS[name].Config(**SETTINGS[name], **more))


def held(model: nn.Module) -> Weights:
    return {name: value.clone() for name, value in model.state_dict().items()}


def refusal(act: Callable[[], object]) -> str:
    """The one line in which something is refused."""
    with pytest.raises(co2.ConfigError) as error:
        act()
    assert "\n" not in str(error.value)
    return str(error.value)


def called(fn: Callable[..., Any], place: Path, world: int, *args: Any) -> list[Any]:
    """What `fn(folder, *args)`, a function of a module, returns in each of `world` processes.

    Args:
        place: a folder, in which they work; the `folder` that they get is below it.
        world: 1 is a process that nobody has told of others.
    """
    request, processes = place / "request", []
    request.write_bytes(pickle.dumps((fn, (str(place / "out"), *args))))
    with held_port() as port:
        for rank in range(world):
            told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            told |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
            env = environment(**{**told, "MASTER_PORT": port} if world > 1 else {})
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
