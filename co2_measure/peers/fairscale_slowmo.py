"""FairScale's SlowMoDistributedDataParallel, by SlowMo's authors. Blocking.

SlowMo (arXiv 1910.00643) over local SGD, as in co2/methods/slowmo.py, in FairScale's recommended
memory-efficient form: start and outer momentum are sharded over the workers. Each shard is
reduced to its owner, which does the outer step and broadcasts the result.

By default FairScale remembers where the first round started only after the first inner step, when
the replicas differ already; the adapter makes it remember before. Its other form, without shards,
waits for a GPU even if there is none. FairScale divides by zero if the inner learning rate is 0 at
the end of a round.
"""

import warnings
from dataclasses import dataclass

from torch import nn

from co2.errors import require
from co2.limits import Amount, Count, Decay, Limited
from co2_measure.peers.base import Peer


class FairscaleSlowMo(Peer):
    package = "fairscale"

    @dataclass
    class Config(Limited):
        tau: Count = 12
        """Inner steps of a round: `slowmo_frequency` and `localsgd_frequency`."""
        outer_lr: Amount = 1.0
        """α, the outer learning rate: `slowmo_lr`."""
        outer_momentum: Decay = 0.5
        """β, the outer momentum: `slowmo_momentum`."""

        def __post_init__(self) -> None:
            super().__post_init__()
            hint = "must be above 0 with outer_lr=1: FairScale turns SlowMo off"
            on = self.outer_lr != 1 or self.outer_momentum > 0
            require(on, "outer_momentum", self.outer_momentum, hint)

    def set_up(self) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it imports names that torch has changed
            from fairscale.experimental.nn.data_parallel import SlowMoDistributedDataParallel

        # The warning is about its backward hook, which only concerns the GPUs of one node.
        warnings.filterwarnings("ignore", message="Using a non-full backward hook")
        self.slowmo = SlowMoDistributedDataParallel(
            super().set_up(),
            nprocs_per_node=1,
            broadcast_buffers=False,  # local while training, as in every method here
            slowmo_momentum=self.config.outer_momentum,
            slowmo_lr=self.config.outer_lr,
            slowmo_frequency=self.config.tau,
            localsgd_frequency=self.config.tau,
            slowmo_num_shards=self.mesh.num_replicas,
            global_group=self.group,  # a group that it made itself would wait for a GPU
        )
        self.slowmo._init_global_momentum_buffers(self.optimizer)
        self.keep(self.slowmo, "old_params", "global_momentum_buffer")
        return self.slowmo

    def advance(self) -> None:
        self.inner_step()
        self.slowmo.perform_slowmo(self.optimizer)

    def bytes_per_round(self) -> float:
        """(G−1)/G (1 + 1/G + 1) of what the optimizer holds, as the mean over the workers.

        Gloo reduces a shard by a ring, for which each worker sends (G−1)/G of it, and collects the
        parts, for which each worker but the owner sends 1/G. Then the owner broadcasts G − 1 copies
        of the result.
        """
        groups, replicas = self.optimizer.param_groups, self.mesh.num_replicas
        payload = sum(param.nbytes for group in groups for param in group["params"])
        return (replicas - 1) / replicas * (2 + 1 / replicas) * payload

    @property
    def extra_copies(self) -> float:
        """Shards of start and momentum, and the shard that is under way."""
        return 3 / self.mesh.num_replicas

    def loaded(self) -> None:
        self.slowmo.num_updates = self.steps
