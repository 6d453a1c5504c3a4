"""The exponential moving average of the weights (train.ema_decay), evaluated beside them.

After every step each worker moves its own average towards its own live weights and floating-point
buffers, and an evaluation takes the mean of these averages over the replicas, as it takes the mean
of the weights. Both means are linear. So this is the average of the replicas' mean weights after
every step, whichever method keeps the replicas in step, and no step communicates for it.

    m_0 = x_0        m_{t+1} = decay · m_t + (1 − decay) · x_{t+1}
"""

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from co2.comm.collectives import consensus, local
from co2.methods import Method


class MovingAverage:
    """This worker's average of what it holds of the model; without a decay it holds nothing.

    Args:
        module: the model, whose weights are those of the start.
        decay: share of the average that stays in a step; None for no average.
    """

    def __init__(self, module: nn.Module, decay: float | None) -> None:
        self._module, self._move = module, get_ema_multi_avg_fn(decay or 0.0)
        self.tensors = [] if decay is None else [live.clone() for live in self._live()]
        """The averages of trained weights and floating-point buffers: a checkpoint holds them."""

    def update(self) -> None:
        """Move the average by the step that has just been made."""
        if self.tensors:
            self._move(self.tensors, self._live(), None)

    def shown(self, method: Method) -> AbstractContextManager[None]:
        """Inside, the model holds the mean of the averages over the replicas of a prepared method.
        Afterwards its weights are restored bit for bit. Collective."""

        def show() -> None:
            torch._foreach_copy_(self._live(), self.tensors)

        return consensus(self._module, method.group, method.replica_group, show)

    @property
    def of_weights(self) -> int:
        """How many of `tensors` are averages of weights. Those of buffers follow them."""
        return sum(p.requires_grad for p in self._module.parameters()) if self.tensors else 0

    def state_dict(self) -> list[Tensor]:
        """The averages themselves."""
        return self.tensors

    def load_state_dict(self, tensors: list[Tensor]) -> None:
        """Go on from `tensors` of another worker or another time."""
        for own, saved in zip(self.tensors, tensors, strict=True):
            own.copy_(saved)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def _live(self) -> list[Tensor]:
        weights = [local(p.detach()) for p in self._module.parameters() if p.requires_grad]
        return [*weights, *(b.detach() for b in self._module.buffers() if b.is_floating_point())]
