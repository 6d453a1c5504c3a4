"""torchft's DiLoCo (Meta's fault-tolerant training). Blocking.

DiLoCo (arXiv 2311.08105) with one fragment and no delay: the mean of start − end of a round is
the gradient of an outer SGD with Nesterov momentum. Every parameter has an all-reduce of its own,
which is torchft's default, frozen parameters included.

Each worker is a replica group of one: it has a Manager with a store of its own. Once in a round the
Manager asks a lighthouse in worker 0's process who takes part, and then itself whether all ranks of
its group, one here, have succeeded. These few hundred bytes are not counted. A failure ends the
training (max_retries=0), where torchft would drop the round and go on, so that every round that is
measured is complete.
"""

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from co2.limits import Amount, Count, Decay, Limited
from co2_measure.peers.base import Peer

_LIMIT = timedelta(minutes=30)
"""The time limit for everything that torchft waits for, equal to that of torch.distributed."""
_HEARTBEAT = timedelta(seconds=1)
"""torchft's own is 0.1 s, which would slow down a link of 1 Mbit/s."""


class TorchftDiLoCo(Peer):
    package = "torchft"
    extra_copies = 4.0
    """Start, outer momentum; while it synchronizes: pseudo-gradient, the round's end."""

    @dataclass
    class Config(Limited):
        tau: Count = 12
        """Inner steps of a round: `sync_every`. The paper: 500."""
        outer_lr: Amount = 0.7
        """α, the outer learning rate. The paper: 0.7."""
        outer_momentum: Decay = 0.9
        """β, the outer momentum, Nesterov's. The paper: 0.9."""

    def set_up(self) -> nn.Module:
        os.environ.setdefault("RUST_LOG", "error")  # else it prints a dozen lines a round
        from torchft.local_sgd import DiLoCo

        model, self.manager = super().set_up(), self._manager()
        beta = self.config.outer_momentum
        self.outer = torch.optim.SGD(
            self.model.parameters(), lr=self.config.outer_lr, momentum=beta, nesterov=beta > 0
        )
        self.diloco = DiLoCo(
            self.manager, [self.model], self.optimizer, self.outer, sync_every=self.config.tau
        )
        self.diloco.__enter__()  # adds its hooks to the inner optimizer
        self.keep(self, "manager", "outer")
        for name, start in self.diloco._fragments[0].original_parameters.items():
            self.hold(f"start.{name}", start)
        return model

    def waits(self) -> list[tuple[object, str]]:
        """Both votes too. A mean is divided by G within its wait."""
        from torchft.manager import Manager, _ManagedWork

        return [(Manager, "start_quorum"), (Manager, "should_commit"), (_ManagedWork, "wait")]

    def flush(self) -> None:
        self.diloco.__exit__(None, None, None)
        self.manager.shutdown()
        self.collectives.shutdown()
        dist.barrier(group=self.group)  # the lighthouse must outlive the managers
        if self.lighthouse is not None:
            self.lighthouse.shutdown()

    def bytes_per_round(self) -> float:
        return self.ring_bytes(self.model.parameters())

    def loaded(self) -> None:
        self.diloco._local_step = self.steps % self.config.tau

    def _manager(self) -> Any:
        from torchft import Manager, ProcessGroupGloo

        here, replicas = _own_address(), self.mesh.num_replicas
        self.collectives = ProcessGroupGloo(timeout=_LIMIT)
        self.store = dist.TCPStore(here, 0, is_master=True, wait_for_workers=False)
        return Manager(
            pg=self.collectives,
            load_state_dict=None,
            state_dict=None,
            min_replica_size=replicas,
            use_async_quorum=False,  # as its DiLoCo demands
            timeout=_LIMIT,
            quorum_timeout=_LIMIT,
            rank=0,
            world_size=1,
            store_addr=here,
            store_port=self.store.port,
            lighthouse_addr=self._lighthouse_address(here),
            replica_id=f"worker{self.mesh.replica}",
            hostname=here,
            heartbeat_interval=_HEARTBEAT,
            init_sync=False,  # all replicas have the same weights already
            max_retries=0,
        )

    def _lighthouse_address(self, here: str) -> str:
        """Return the address of the lighthouse, which worker 0 starts. Collective."""
        from torchft.coordination import LighthouseServer

        self.lighthouse, box = None, [""]
        if self.mesh.replica == 0:
            self.lighthouse = LighthouseServer("0.0.0.0:0", min_replicas=self.mesh.num_replicas)
            # Its own address has the host's name, which other hosts may not be able to resolve.
            port = self.lighthouse.address().rpartition(":")[2]
            box = [f"http://{here}:{port}"]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]


def _own_address() -> str:
    """Return the address under which worker 0 can reach this worker."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 1))  # sends nothing
        return probe.getsockname()[0]
