"""Method: what every way of keeping the replicas in step offers."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from co2.comm.mesh import Mesh
from co2.config import CommConfig


class Method(Protocol):
    """One published algorithm. Order of calls: prepare, (load_state_dict,) step …, flush."""

    @property
    def Config(self) -> Any:
        """A nested dataclass; its fields are documented, and refused with `ConfigError`."""

    config: Any
    """An instance of it."""

    lr_at: Callable[[int], float] | None
    """The largest inner learning rate in the step with an index, from 0: a loop whose schedule is
    a function of the step sets it, for methods that prepare an outer step while its round is still
    being trained (CO2 with `shard`). None: they take the rate of the round before."""

    averages_gradients: bool
    """Whether all replicas step with the same gradients, averaged by PyTorch's own wrappers: then
    the replicas' axis is theirs too (replica.py)."""

    @property
    def refused_strategies(self) -> Mapping[str, str]:
        """`mesh.strategy` → why this method cannot be combined with it."""
        ...

    def __init__(self, config: Any = None, comm: CommConfig | None = None) -> None: ...

    def prepare(self, model: nn.Module, optimizer: Optimizer, mesh: Mesh) -> nn.Module:
        """Give every replica the weights of replica 0; return the module to train.

        The parameters may be sharded over the workers of a replica (fully_shard) when they get
        here: a method works on local shards, and exchanges them with its counterparts.
        """
        ...

    def step(self) -> None:
        """Gradients are ready: the inner optimizer's step, and the synchronization due now."""
        ...

    def consensus(self) -> AbstractContextManager[None]:
        """Inside, the model holds the replicas' mean (trained weights and float buffers).

        Restored bit for bit after. All replicas enter together. A collective in flight is
        neither waited for nor changed, so evaluating more often does not change training.
        """
        ...

    def flush(self) -> None:
        """Drain what is in flight. At the end of training only: what arrives is dropped."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything to go on exactly, the collective in flight included; of this worker."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After `prepare`, with the model and the optimizer loaded already."""
        ...

    def stats(self) -> dict[str, float]:
        """Totals `comm_s`, `exposed_s`, `bytes` (sent by this worker) and the method's own."""
        ...

    def notices(self) -> list[str]:
        """Lines for a person since the last call: what the method has decided, and why."""
        ...

    @property
    def copies(self) -> float:
        """Model copies held beyond parameters, gradients and the inner optimizer's state."""
        ...

    @property
    def scratch_bytes(self) -> int:
        """Held beside the copies: a chunk or two of the vector, however large the model."""
        ...

    @property
    def state_device(self) -> torch.device:
        """Where the copies and the scratch lie."""
        ...

    @property
    def lag(self) -> int:
        """Steps by which one replica may run ahead of another at most."""
        ...
