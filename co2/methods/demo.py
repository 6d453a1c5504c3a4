"""DeMo (Peng, Quesnelle and Kingma, 2024, arXiv 2411.19870). Blocking at every step.

    at every step, on every replica i, with its gradient g:
        δ^i ← β δ^i + γ g;  c = DCT of each block of δ^i
        s^i = the k largest |c| of each block;  δ^i ← δ^i − IDCT(s^i)
        s̄ = each coefficient's mean over those replicas that have sent it; 0 if none has
        x ← (1 − γ λ) x − γ sign(IDCT(s̄))            wait for the s^i (co2/comm/dct_mean.py)

β → `decay`, k → `top_k`; γ and λ are the inner SGD's rate and weight decay. A momentum δ^i stays on
its replica but for its largest waves, which are taken out of it as they are sent. All replicas hold
the same x after every step, bit for bit. The inner SGD without momentum makes the last line, with
sign(…) for its gradient: in its step, coupled and decoupled weight decay are the same.

Chosen here:
- A tensor of more than two dimensions is a matrix, flattened behind the first; the authors' public
  code has no way for it.
- An index takes 16 bits, and a value the type of the weights' vector; in their code an index has
  64 bits.
- Of equal sizes the coefficient with the smaller index is sent, so that a resumed run goes on
  exactly. Messages are added in the order of the replicas; their code warns that its order, and so
  its rounding, may differ between devices.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import nn
from torch.optim import SGD

from co2.comm.dct_mean import WIDEST, DCTMean
from co2.comm.flat import FlatParams
from co2.errors import require
from co2.limits import Count, Decay, Limited, Range
from co2.methods.base import BF16, HOST, Method, synchronizing


class DeMo(Method):
    equal_weights = True
    reads_gradients = True
    needs = ("optim.name=sgd", "optim.momentum=0", "optim.nesterov=false")
    may_change = frozenset({"decay", "top_k"})

    @dataclass
    class Config(Limited):
        decay: Decay = 0.999
        """β: the share of the momentum that is left after a step. The authors' public code:
        0.999."""
        top_k: Count = 32
        """k: coefficients that are sent of each block. The authors' public code: 32."""
        block: Annotated[int, Range(1, WIDEST)] = 64
        """Rows and columns that a block has at most. The authors' public code: 64."""

    def refusals(self) -> dict[str, str]:
        blocks = "its blocks are of whole tensors, not of parts; use ddp"
        signs = "it gives SGD signs for gradients; use sgd with optim.momentum=0"
        return {
            **super().refusals(),
            "mesh.strategy=zero1": "SGD without momentum has no state to share; use ddp",
            "mesh.strategy=zero2": blocks,
            "mesh.strategy=zero3": blocks,
            "optim.name=adamw": signs,
            "optim.name=muon": signs,
            "optim.momentum": "has a momentum of its own; use 0",
            BF16: "sends less already; use fp32",
            HOST: "updates the model at every step, where it is; use auto",
        }

    def set_up(self) -> nn.Module:
        """Raises `ConfigError` for an optimizer other than plain SGD without momentum."""
        kind = type(self.optimizer)
        groups = self.optimizer.param_groups
        plain = kind is SGD and not any(one["momentum"] or one["maximize"] for one in groups)
        hint = "demo needs sgd with a momentum of 0, without maximize"
        require(plain, "optim.name", kind.__name__, hint)
        self.flat = FlatParams(self.optimizer)
        fields = self.config
        self.exchange = DCTMean(
            self.flat, self.mesh, self.comm, fields.decay, fields.top_k, fields.block
        )
        self.hold("coefficients", self.exchange.coefficients)
        # Nothing is in flight between two steps, so messages are not saved.
        self.hold("sent", self.exchange.sent, saved=False)
        self.send_by(self.exchange.mean, "received")
        return self.model

    def update(self) -> None:
        groups = self.optimizer.param_groups
        with synchronizing():
            self.exchange.replace_gradients([float(groups[n]["lr"]) for n in self.flat.group_of])
            torch._foreach_sign_([p.grad for p in self.flat.owners if p.grad is not None])
        self.optimizer.step()
