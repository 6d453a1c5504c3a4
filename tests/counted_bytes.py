"""What a method's training sends, by the loopback device of a network where nothing else speaks.

Run as a program: `counted_bytes.py WORLD NAME STORE OUT [FIELDS of CommConfig and of the method]`.
It goes into a network namespace of its own, which takes root, and forks the other replicas.
"""

import ctypes
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import co2
from co2.config import CommConfig, Precision
from co2.methods import METHODS
from co2_measure.peers import PEERS
from tests.server import environment, fork_program

CLONE_NEWNET = 0x40000000
needs_root = pytest.mark.skipif(
    os.geteuid() != 0
    or subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode != 0,
    reason="needs root, and a system that lets it make a network namespace",
)


def measured_and_counted(
    folder: Path, world: int, name: str, wire: str = "fp32", **fields: Any
) -> tuple[int, float]:
    """Bytes that all replicas have sent in twelve steps: by the device's counter, by the method's.

    Args:
        folder: for the process group's store and the result.
        name: of one of our methods, or of a peer.
        wire: `comm.dtype`.
        fields: of the method's configuration.
    """
    words = [__file__, str(world), name, str(folder / "store"), str(folder / "counted.json"), wire]
    log = folder / "counted.log"
    with log.open("w") as file:
        env = environment(GLOO_SOCKET_IFNAME="lo")
        out = file.fileno()
        process = fork_program([*words, json.dumps(fields)], folder, env, out, out)
        assert process.wait(300) == 0, log.read_text()
    measured, counted = json.loads((folder / "counted.json").read_text())
    return measured, counted


def _sent() -> int:
    """Bytes that the loopback device has sent, without what TCP has sent twice.

    On a busy machine a late acknowledgement makes TCP repeat segments of up to 64 KB.
    """
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    sent = int(next(line for line in lines if "lo:" in line).split(":")[1].split()[8])
    sockets = subprocess.run(["ss", "-tinH"], check=True, capture_output=True, text=True).stdout
    return sent - sum(int(repeated) for repeated in re.findall(r"bytes_retrans:(\d+)", sockets))


def _train(rank: int, world: int, name: str, store: str, wire: str, fields: dict) -> list[float]:
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{store}")
    net = torch.nn.Linear(1000, 1333)
    known: dict[str, Any] = {**METHODS, **PEERS}
    method = known[name](known[name].Config(**fields), CommConfig(dtype=Precision[wire]))
    adam = name == "onebit_adam"
    optimizer = (torch.optim.AdamW if adam else torch.optim.SGD)(net.parameters(), lr=0.1)
    model = method.prepare(net, optimizer, co2.Mesh.world())
    batch = torch.ones(2, 1000)
    dist.barrier()
    before = _sent()
    dist.barrier()
    for _ in range(12):
        model(batch).mean().backward()
        method.step()
        optimizer.zero_grad()
    if name in METHODS:  # a peer's flush sends what training does not
        method.flush()
    dist.barrier()
    found = [_sent() - before, world * method.stats().bytes_sent]
    dist.barrier()
    if name in PEERS:
        method.flush()
    dist.destroy_process_group()
    return found


def _main(world: str, name: str, store: str, out: str, wire: str, fields: str) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    children = []
    for rank in range(1, int(world)):
        child = os.fork()
        if child == 0:
            _train(rank, int(world), name, store, wire, json.loads(fields))
            os._exit(0)
        children.append(child)
    found = _train(0, int(world), name, store, wire, json.loads(fields))
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    Path(out).write_text(json.dumps(found))
    os._exit(0)  # an interpreter takes a second to end


if __name__ == "__main__":
    _main(*sys.argv[1:])
