"""Process groups beside PyTorch's default one.

The default group of a worker is the world of its own replica. It is made once, so that whatever
PyTorch keeps inside a replica (DistributedDataParallel, fully_shard, DeviceMesh) never sees other
replicas come and go. The groups of a generation have members of other replicas, whom the default
one does not know. They end by `torch.distributed.destroy_process_group(group)`, as all others do.
"""

from datetime import timedelta

import torch.distributed as dist


def make(
    name: str, store: dist.Store, rank: int, size: int, backend: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Make a process group, while its other members make it too.

    Args:
        name: which no other group of this process has; equal on all members.
        rank: of this worker in it.
        size: number of members.
        backend, timeout: as `init_process_group` takes them.
    Raises:
        RuntimeError: a member is lost, or does not come in time.
    """
    c10d = dist.distributed_c10d
    # No ranks: PyTorch would look for them in the default group.
    make = c10d._new_process_group_helper
    group, _ = make(size, rank, [], backend, store, c10d.GroupName(name), timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    # PyTorch asks for a worker's rank in a group by its rank in the default one.
    c10d._world.pg_group_ranks[group] = {dist.get_rank(): rank}
    return group
