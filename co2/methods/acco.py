"""ACCO (Nabli et al., NeurIPS 2025, arXiv 2406.02613). Fully overlapped.

Every call of `step` ends one half of an update's batch. On every replica i, for update t:
    first half   its gradient g̃^i is taken at the estimate x̃_t
        wait for ḡ = mean_i ½ (g̃^i + g^i) of the update before;  x_t = Opt(x_{t−1}, ḡ)
        start the mean of g̃^i;  the second half is computed at x_t
    second half  its gradient g^i is taken at x_t
        wait for mean_i g̃^i;  x̃_{t+1} = Opt(x_t, mean_i g̃^i), and Opt's state is put back
        start the mean of ½ (g̃^i + g^i);  the next first half is computed at x̃_{t+1}

Opt is the inner optimizer. So a mean has one half of a batch to arrive, and the gradients that x
learns from are of x itself and of an estimate of it. x̃_0 = x_0: the first update arrives with the
third call. All replicas hold the same weights after every call.
Two calls make one update: `train.batch_size` is that of a half, `train.steps` counts halves, and
each step of Opt has the learning rate of the call it is done in.
Chosen here: after a second half it is x̃ that is evaluated and saved, which knows more batches than
x does. Gradients that are under way have moved no weights, so they are not shown. While the
estimate is made there is a copy of Opt's state, to put it back.
Deviations: `train.clip_norm` clips a replica's own half, not the mean. Halves are of equal size;
the paper lets fast workers compute more. The paper shards Opt's state over the replicas; here every
replica has all of it. Held: communication buffer, and one vector that is g̃^i while its mean
travels, x_t while that of both halves does.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from co2.comm.collectives import local
from co2.comm.flat import FlatParams
from co2.comm.phases import OUTER_STEP, SNAPSHOT
from co2.errors import require
from co2.limits import Limited
from co2.methods.base import HOST, Method


class ACCO(Method):
    equal_weights = True
    reads_gradients = True

    @dataclass
    class Config(Limited):
        """Nothing to choose."""

    def refusals(self) -> dict[str, str]:
        zero1 = "it takes back a step of the inner optimizer, whose state must be here; use ddp"
        return {
            **super().refusals(),
            "mesh.strategy=zero1": zero1,
            "optim.name=muon": "steps parameter by parameter, muon by groups; use adamw or sgd",
            HOST: "updates the model at every step, where it is; use auto",
        }

    def set_up(self) -> nn.Module:
        # Its schedule reads the state of an inner step, of which the first two calls make none.
        own_rate = any(group.get("relative_step") for group in self.optimizer.param_groups)
        hint = "acco needs a learning rate that is given: relative_step=False, and lr"
        require(not own_rate, "optimizer", type(self.optimizer).__name__, hint)
        self.flat = flat = FlatParams(self.optimizer)
        self.mean = self.new_mean(flat)
        self.held = self.hold("held", flat.zeros())
        """g̃^i after a first half, x_t after a second one."""
        return self.model

    @torch.no_grad()
    def update(self) -> None:
        with record_function(OUTER_STEP):
            if self.steps % 2 == 1:
                self._first_half_ends()
            else:
                self._second_half_ends()

    def _first_half_ends(self) -> None:
        arrived = self.mean.wait()
        with record_function(SNAPSHOT):
            if arrived is not None:
                self.flat.write(self.held)  # x_{t−1} in place of x̃_t
            self.flat.gradients(out=self.held)
            if arrived is not None:
                self.flat.set_gradients(arrived)
            self.mean.buffer.copy_(self.held)
        self.mean.start()
        if arrived is not None:
            self.optimizer.step()

    def _second_half_ends(self) -> None:
        arrived = self.mean.wait()
        assert arrived is not None
        with record_function(SNAPSHOT):
            self.flat.gradients(out=self.held, add=True)
            self.flat.set_gradients(arrived)
            torch.mul(self.held, 0.5, out=self.held)
            self.mean.buffer.copy_(self.held)
            self.flat.copy_to(self.held)  # x_t
        self.mean.start()
        self._estimate()

    def _estimate(self) -> None:
        """Do the inner optimizer's step, and put back all of its state but the weights."""
        state, groups = self.optimizer.state, self.optimizer.param_groups
        before = {param: dict(own) for param, own in state.items()}
        settings = [dict(group) for group in groups]
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for value in (value for own in before.values() for value in own.values()):
            if isinstance(value, Tensor):
                alike.setdefault((value.device, value.dtype), []).append(local(value))
        copies = [[torch.empty_like(value) for value in values] for values in alike.values()]
        for values, copied in zip(alike.values(), copies, strict=True):
            torch._foreach_copy_(copied, values)
        self.optimizer.step()
        for values, copied in zip(alike.values(), copies, strict=True):
            torch._foreach_copy_(values, copied)
        state.clear()
        state.update(before)
        for group, own in zip(groups, settings, strict=True):
            group.clear()
            group.update(own)

    def scratch_tensors(self) -> list[Tensor]:
        return self.flat.transfer.scratch_tensors()
