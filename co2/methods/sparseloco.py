"""SparseLoCo (Sarfi et al., 2025, arXiv 2508.15706). Blocking.

    for round t, on every replica i:
        τ inner steps from x_{t,0} to x^i_{t,τ}     the paper: AdamW
        Δ^i = x_{t,0} − x^i_{t,τ};  e^i ← β e^i + Δ^i
        s^i = Q(TopK of each chunk of 4,096 elements of e^i);  e^i ← e^i − s^i
        x_{t+1,0} = x_{t,0} − α mean_i s^i          wait for it (co2/comm/sparse_mean.py)

τ → `tau` (the paper's H), K/4,096 → `density`, β → `error_decay`, α → `outer_lr`. What a replica
has not sent stays in its error e^i, which takes the place of outer momentum. A value that is sent
costs 14 bits, two for itself and twelve for its index; a chunk has 32 bits on top. All replicas
hold the same x_{t,0}, which is the consensus right after a round's end, without the errors: what
has not been sent is owed. The inner optimizer may be any; its state stays local and is kept.

Chosen here:
- Q has four levels in each chunk, plus or minus one of two magnitudes (sparse_mean.py). The
  authors' public code divides six standard deviations of a tensor's kept values into equal bins,
  and a value becomes the mean of its bin.
- A chunk is a part of the flattened tensor; in their code it is a square of 64 x 64 of a matrix.
  The last chunk of a tensor is shorter. K is rounded, and at least 1.
- Of equal sizes, the element with the smaller index is kept, so that a resumed run goes on exactly.
- The mean is over all replicas, as in the equation; their code has one over those replicas that
  have sent the element.
"""

from dataclasses import dataclass

from torch import Tensor

from co2.comm.sparse_mean import SparseMean
from co2.comm.transfer import Chunk
from co2.limits import Amount, PartShare, Share
from co2.methods.base import BF16, ELASTIC
from co2.methods.shared.local_method import BlockingMethod
from co2.methods.shared.rounds import Tau, WaitingRounds


class SparseLoCo(BlockingMethod):
    may_change = frozenset({"tau", "density", "outer_lr", "error_decay", "comm_share"})

    @dataclass
    class Config(WaitingRounds):
        tau: Tau = 12
        """Inner steps of a round; auto: chosen by measurement (auto_tau.py). The authors' public
        code: 30."""
        density: PartShare = 0.02
        """Share of each chunk that a replica sends. The paper: 0.01 to 0.03."""
        outer_lr: Amount = 1.0
        """α, the outer learning rate."""
        error_decay: Share = 0.95
        """β, the share of the error that is left after a round. The authors' public code:
        0.95."""

    def refusals(self) -> dict[str, str]:
        reason = "its chunks are of whole tensors, not of parts; use ddp or zero1"
        return {
            **super().refusals(),
            "mesh.strategy=zero2": reason,
            "mesh.strategy=zero3": reason,
            ELASTIC: "what a replica has not sent yet cannot be handed to a newcomer; use false",
            BF16: "sends less already; use fp32",
        }

    def init_outer_state(self) -> None:
        super().init_outer_state()
        sizes = [param.numel() for param in self.flat.params]
        density, decay = self.config.density, self.config.error_decay
        self.exchange = SparseMean(sizes, self.mesh, self.mean, density, decay)
        self.hold("error", self.exchange.error)
        for name, message in self.exchange.messages().items():  # in flight in no step's end
            self.hold(name, message, saved=False)

    def mean_now(self) -> Tensor:
        self.exchange.start(self.mean.buffer)
        mean = self.mean.wait()
        assert mean is not None
        return mean

    def outer_step(self, chunk: Chunk, x: Tensor, d: Tensor) -> None:
        x.sub_(d, alpha=self.config.outer_lr)
