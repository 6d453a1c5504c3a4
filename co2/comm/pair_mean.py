"""The mean over two replicas that chance puts together, in place of the mean over all of them.

A replica sends its vector to one other and gets that one's, so the cost does not depend on how many
replicas there are, and nobody waits for more than one. Of an odd number one is left alone.
(NoLoCo, arXiv 2506.10911.)
"""

import random

import torch
import torch.distributed as dist
from torch import Tensor

from co2.comm.background_mean import BackgroundMean
from co2.comm.mesh import Mesh


def partner_of(replica: int, num_replicas: int, seed: int) -> int | None:
    """Return the replica that chance gives to `replica`; None for the one that is left over. The
    same seed pairs all replicas without a message."""
    order = list(range(num_replicas))
    random.Random(seed).shuffle(order)
    place = order.index(replica) ^ 1
    return order[place] if place < num_replicas else None


class PairMean:
    """Takes means over pairs of what lies in a `BackgroundMean`'s buffer, which carries them.

    Args:
        mesh: the replicas.
        mean: gives the buffer (numel,) and the process group.
    """

    def __init__(self, mesh: Mesh, mean: BackgroundMean) -> None:
        self._mesh, self._mean = mesh, mean
        self.received = torch.zeros_like(mean.buffer)
        if mean.group is not None:
            # All members must join NCCL's first call in a group, and a pair is not all of them.
            dist.all_reduce(mean.buffer.new_zeros(1), group=mean.group)

    def mean_now(self, seed: int) -> Tensor:
        """Return the mean of the buffers of this replica and its partner, in the buffer, once it
        has come. Both have the same bits. Alone it is the buffer as it is.

        Args:
            seed: equal on all replicas, and another one for every mean.
        """
        mean = self._mean
        partner = partner_of(self._mesh.replica, self._mesh.num_replicas, seed)
        if partner is None or mean.buffer.numel() == 0:
            mean.mark_arrived()
        else:
            mean.run(lambda: self._exchange(partner), mean.buffer.nbytes)
        arrived = mean.wait()
        assert arrived is not None
        return arrived

    def _exchange(self, partner: int) -> None:
        mean = self._mean
        # In one batch: NCCL runs calls one after another, and both would wait for the other's.
        calls = [
            dist.P2POp(dist.isend, mean.buffer, group=mean.group, group_peer=partner),
            dist.P2POp(dist.irecv, self.received, group=mean.group, group_peer=partner),
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        mean.buffer.add_(self.received).div_(2)
