"""PyTorch's PostLocalSGDOptimizer with PeriodicModelAverager. Needs no extra package.

This is local SGD as in co2/methods/local_sgd.py, but it averages parameters instead of
pseudo-gradients: they are copied into one flat vector, which one all-reduce sums and which then
holds the parameters. Post-local SGD has its name from a first stage under DDP; here that stage has
length 0, so there is no DDP.
"""

import warnings
from dataclasses import dataclass

from torch import nn

from co2.limits import Count, Limited
from co2_measure.peers.base import Peer


class TorchPostLocalSGD(Peer):
    package = "torch"
    extra_copies = 1.0  # the flat vector, while the parameters that it replaces exist too

    @dataclass
    class Config(Limited):
        tau: Count = 12
        """Inner steps of a round: PeriodicModelAverager's `period`."""

    def set_up(self) -> nn.Module:
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        model, tau = super().set_up(), self.config.tau
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it recommends DDP for a period of 1
            # It averages as soon as its warm-up ends, which is after τ steps here.
            self.averager = PeriodicModelAverager(tau, tau - 1, self.group)
        self.wrapped = PostLocalSGDOptimizer(self.optimizer, self.averager)
        return model

    def advance(self) -> None:
        self.wrapped.step()

    def bytes_per_round(self) -> float:
        return self.ring_bytes(self._trained())

    def loaded(self) -> None:
        self.averager.step = self.steps
