"""Blocking collectives that belong to no method: equal starting weights, and the consensus."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def local(tensor: Tensor) -> Tensor:
    """What this worker holds of a tensor: its part of a DTensor, which `fully_shard` makes of a
    parameter and which may be empty; of others the tensor itself."""
    part = getattr(tensor, "to_local", None)  # to import DTensor costs half a second
    return tensor if part is None else part()


def carries(group: dist.ProcessGroup | None, tensor: Tensor) -> bool:
    """Whether a group takes a tensor where it lies: gloo is for the host's memory."""
    return group is None or not tensor.is_cuda or "nccl" in dist.get_backend_config(group)


def replicate(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Give every replica the parameters and buffers of replica 0; of the workers of a group, those
    of the first."""
    if group is not None:
        for tensor in (*model.parameters(), *model.buffers()):
            part = local(tensor.detach())
            _apply(part, group, lambda t: dist.broadcast(t, group_src=0, group=group))


def data_parallel(
    model: nn.Module, bucket_mb: float, group: dist.ProcessGroup | None = None
) -> DistributedDataParallel:
    """PyTorch's own averaging of gradients, over all workers or those of a group; every worker
    keeps its own buffers."""
    with warnings.catch_warnings():
        # torch renames broadcast_buffers; the old name is the one that 2.11 knows too.
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(
            model,
            process_group=group,
            broadcast_buffers=False,
            bucket_cap_mb=bucket_mb,
            gradient_as_bucket_view=True,
        )


@contextmanager
def consensus(
    model: nn.Module, group: dist.ProcessGroup | None, replica_group: dist.ProcessGroup | None
) -> Iterator[None]:
    """Inside: the model holds its mean over the replicas, trainable parameters and floating-point
    buffers. After: restored bit for bit.

    Args:
        model: the module that was prepared, without wrapping.
        group: of the counterparts.
        replica_group: of the replica. Each of its workers has buffers of its own, and their mean is
            taken as well.
    """
    weights = [local(p.detach()) for p in model.parameters() if p.requires_grad]
    buffers = [b.detach() for b in model.buffers() if b.is_floating_point()]
    try:
        with averaged([*weights, *buffers], group), averaged(buffers, replica_group):
            _forget_gathered(model)
            yield
    finally:
        _forget_gathered(model)


@contextmanager
def averaged(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> Iterator[None]:
    """Inside: the tensors hold their means over the replicas. After: restored bit for bit.

    Blocking, and all replicas must enter together. Holds one copy of the tensors meanwhile.
    """
    saved = [tensor.clone() for tensor in tensors]
    try:
        if group is not None:
            for tensor in tensors:
                _apply(
                    tensor, group, lambda t: dist.all_reduce(t, op=dist.ReduceOp.AVG, group=group)
                )
        yield
    finally:
        for tensor, value in zip(tensors, saved, strict=True):
            tensor.copy_(value)


def _forget_gathered(model: nn.Module) -> None:
    """fully_shard keeps what a forward pass has gathered for the backward pass, which after an
    evaluation does not come; the local shards have changed since."""
    for module in model.modules():
        reshard = getattr(module, "reshard", None)
        if reshard is not None:
            reshard()


def _apply(tensor: Tensor, group: dist.ProcessGroup, collective: Callable[[Tensor], Any]) -> None:
    """Collectives take contiguous tensors, where the group can reach them; channels-last weights
    are not contiguous."""
    if tensor.numel() == 0:  # so is every counterpart's
        return
    dense = tensor.contiguous()
    if not carries(group, dense):
        dense = dense.cpu()
    collective(dense)
    if dense.device != tensor.device or dense.data_ptr() != tensor.data_ptr():
        tensor.copy_(dense)
