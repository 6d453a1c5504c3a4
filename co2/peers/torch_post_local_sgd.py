"""PyTorch's PostLocalSGDOptimizer with PeriodicModelAverager. Needs no extra package.

Local SGD as in co2/methods/local_sgd.py, of parameters instead of pseudo-gradients: they are
copied into one flat vector, which is summed by one all-reduce and then holds the parameters.
The stage for which post-local SGD is named, DDP until local steps begin, has length 0: local
steps from the first on, so there is no DDP.
"""

import warnings
from dataclasses import dataclass
from typing import Any

from torch import nn

from co2.errors import require_count
from co2.peers.base import Peer


class TorchPostLocalSGD(Peer):
    package = "torch"
    extra_copies = 1.0  # the flat vector, beside the parameters that it replaces

    @dataclass
    class Config:
        tau: int = 12
        """Inner steps of a round: PeriodicModelAverager's `period`."""

        def __post_init__(self) -> None:
            require_count("tau", self.tau)

    def set_up(self) -> nn.Module:
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        tau = self.config.tau
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a period of 1, which DDP would serve as well
            # It averages at once when warm-up ends, here for the first time after τ steps.
            self.averager = PeriodicModelAverager(tau, tau - 1, self.group)
        self.wrapped = PostLocalSGDOptimizer(self.optimizer, self.averager)
        return self.model

    def advance(self) -> None:
        self.wrapped.step()

    def bytes_per_round(self) -> float:
        groups = (group["params"] for group in self.optimizer.param_groups)
        trained = [p for params in groups for p in params if p.requires_grad]
        return self.ring_bytes(sum(p.numel() * p.element_size() for p in trained))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.averager.step = self.steps
