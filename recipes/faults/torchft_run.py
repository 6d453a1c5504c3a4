"""A training with torchft's DiLoCo, with its manager and lighthouse, as its own examples start it.

    python -m recipes.faults.torchft_run FOLDER RESTARTS WORD…  the words of train.py, method=diloco

Every replica is a process; one that is lost is started again, RESTARTS times in all. FOLDER gets a
file for each process, with a line for each step that it has made: how far the training is then, in
steps, where those of a round that was thrown away do not count.
"""

import json
import math
import multiprocessing
import os
import sys
import time
import uuid
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from co2.comm.mesh import Mesh
from recipes.runs.cells import APP, composed_config

JOIN_MS = 10_000
"""How long a quorum waits for a replica that is alive and not there yet, as in torchft's README.
With the default of 100 ms, one that is a tenth of a second late sits out the round, which makes it
late for the next: half of all rounds were lost so."""


def main(arguments: list[str]) -> int:
    """Start the replicas. Returns 0 when all that were not lost have ended well."""
    os.environ.setdefault("RUST_LOG", "error")  # else dozens of lines a round, here and in replicas
    from torchft.coordination import LighthouseServer

    folder, restarts, *words = arguments
    Path(folder).mkdir(parents=True, exist_ok=True)
    config, left = composed_config(tuple(words)), int(restarts)
    silent_ms = round(config.launch.silent_s * 1000)
    lighthouse = LighthouseServer(
        "0.0.0.0:0", min_replicas=1, join_timeout_ms=JOIN_MS, heartbeat_timeout_ms=silent_ms
    )
    port = lighthouse.address().rpartition(":")[2]
    context = multiprocessing.get_context("spawn")

    def start(number: int) -> BaseProcess:
        process = context.Process(target=replica, args=(number, port, folder, tuple(words)))
        process.start()
        return process

    running = {number: start(number) for number in range(config.launch.workers)}
    statuses: list[int] = []
    deadline = math.inf
    while running:
        wait([process.sentinel for process in running.values()], timeout=1.0)
        for number, process in list(running.items()):
            status = process.exitcode
            if status is None and time.monotonic() > deadline:
                process.kill()
            elif status is not None:
                del running[number]
                statuses += [status] if status >= 0 else []
                if status < 0 and left > 0 and not statuses:
                    left -= 1
                    running[number] = start(number)
        if statuses and deadline == math.inf:  # who stands still would never end
            deadline = time.monotonic() + config.launch.silent_s
    lighthouse.shutdown()
    return max(statuses, default=1)


def replica(number: int, lighthouse: str, folder: str, words: tuple[str, ...]) -> None:
    """One replica, until the training has as many rounds as its steps make."""
    torch.set_num_threads(1)
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    config = composed_config(words)
    method = config.method_config
    task = APP.make_task(config)
    task.setup(config.launch.workers)
    mesh = Mesh(number, config.launch.workers, torch.device("cpu"))
    model = task.model()
    inner = task.optimizer(model)
    beta = method.outer_momentum
    outer = torch.optim.SGD(
        model.parameters(), lr=method.outer_lr, momentum=beta, nesterov=beta > 0
    )

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    limit = timedelta(seconds=config.launch.silent_s)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=limit,
        quorum_timeout=timedelta(seconds=60),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://127.0.0.1:{lighthouse}",
        hostname="127.0.0.1",
        replica_id=f"replica{number}-{uuid.uuid4()}",
    )
    batches = task.batches(mesh, 0)
    rounds = config.train.steps // method.tau
    place = Path(folder) / f"{number}-{os.getpid()}.jsonl"
    diloco = DiLoCo(manager, [model], inner, outer, sync_every=method.tau)
    with diloco, place.open("w") as file:
        while manager.current_step() < rounds:
            task.loss(model, next(batches)).backward()
            inner.step()
            inner.zero_grad()
            step = manager.current_step() * method.tau + diloco._local_step
            file.write(json.dumps({"step": step}) + "\n")
            file.flush()
    manager.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
