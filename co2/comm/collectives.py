"""Blocking collectives that every method uses: equal starting weights, and the consensus."""

import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from co2.comm.cuts import pack
from co2.comm.deadlocks import DeadlockWatch
from co2.comm.mesh import serves_gpus
from co2.comm.reproducible import checksum
from co2.comm.transfer import views
from co2.comm.waiting import as_one, everyone, in_use, until_cut
from co2.config import CommConfig
from co2.errors import ConfigError, ReplicasDiffer, require

T = TypeVar("T")


def local(tensor: Tensor) -> Tensor:
    """Return what this worker holds of a tensor: of a DTensor, which `fully_shard` makes of each
    parameter, the local shard, which may be empty; of any other tensor, the tensor itself."""
    part = getattr(tensor, "to_local", None)  # to import DTensor costs half a second
    return tensor if part is None else part()


_FLAT_BYTES = 1 << 27
"""Bytes that one blocking collective carries, which bounds its copies."""


def mark_part(param: Tensor, num_parts: int) -> None:
    """Say that a parameter, which is no DTensor, is one of `num_parts` parts of equal size, and
    that other workers of the replica hold the others."""
    param.num_parts = num_parts  # type: ignore[attr-defined]


def num_parts(param: Tensor) -> int:
    """What `mark_part` said of a parameter, and 1 of any other."""
    return int(getattr(param, "num_parts", 1))


def carries(group: dist.ProcessGroup | None, tensor: Tensor) -> bool:
    """Return whether a group's backend reaches the memory that a tensor lies in: gloo's collectives
    work on the host's memory only."""
    return group is None or not tensor.is_cuda or serves_gpus(dist.get_backend_config(group))


def place() -> tuple[int, int]:
    """Return this worker's rank among all workers, and their number."""
    group = everyone()
    return (0, 1) if group is None else (group.rank(), group.size())


def add_up(tensor: Tensor) -> None:
    """Sum a contiguous tensor over all workers, in place. Collective."""
    group = everyone()
    if group is not None:
        as_one(lambda: _apply(tensor, group, lambda part: dist.all_reduce(part, group=group)))


def replicate(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Give all workers of a group the parameters and buffers of its first worker; across replicas
    that is replica 0. Collective. None: there is only one, and nothing happens."""
    if group is not None:
        held = [local(t.detach()) for t in (*model.parameters(), *model.buffers())]

        def broadcast(flat: Tensor) -> None:  # in bytes, for backends do not know every type
            dist.broadcast(flat.view(torch.uint8), group_src=0, group=group)

        _together(held, group, broadcast)


def check_plain(model: nn.Module) -> None:
    """Raise `ConfigError` for a model that something of PyTorch's keeps in step already."""
    hint = "is wrapped already; give the plain model, which the method itself keeps in step"
    for module in model.modules():
        kind = type(module).__name__  # to import FullyShardedDataParallel costs half a second
        parallel = isinstance(module, (DistributedDataParallel, nn.DataParallel))
        require(not parallel and kind != "FullyShardedDataParallel", "model", kind, hint)


def data_parallel(
    model: nn.Module, comm: CommConfig, group: dist.ProcessGroup | None = None
) -> DistributedDataParallel:
    """Wrap a model so that PyTorch averages its gradients, over all workers or those of a group.
    Every worker keeps its own buffers. Each forward pass begins with `check_reduced`."""
    with warnings.catch_warnings():
        # torch renames broadcast_buffers; the old name is the one that 2.11 knows too.
        warnings.simplefilter("ignore", FutureWarning)
        ddp = DistributedDataParallel(
            model,
            process_group=group,
            broadcast_buffers=False,
            bucket_cap_mb=comm.bucket_mb,
            find_unused_parameters=comm.find_unused_parameters,
            gradient_as_bucket_view=True,
        )
    ddp.register_forward_pre_hook(check_reduced)
    return ddp


def check_reduced(ddp: nn.Module, _: object = None) -> None:
    """Raise `ConfigError` where a backward pass has left gradients that DDP did not average,
    because the loss did not depend on all parameters."""
    assert isinstance(ddp, DistributedDataParallel)
    try:
        ddp._check_reducer_finalized()
    except RuntimeError:
        if ddp.find_unused_parameters:  # another cause
            raise
        averaged = ((n, p) for n, p in ddp.module.named_parameters() if p.requires_grad)
        unused = (n for n, p in averaged if p.grad is None and n not in ddp.parameters_to_ignore)
        name = next(unused, "some parameters")
        hint = (
            f"the loss did not depend on {name}, so DDP has not averaged all gradients; use "
            "comm.find_unused_parameters=true, or in a loop of your own "
            "CommConfig(find_unused_parameters=True)"
        )
        raise ConfigError("comm.find_unused_parameters", False, hint) from None


@contextmanager
def consensus(
    model: nn.Module,
    group: dist.ProcessGroup | None,
    replica_group: dist.ProcessGroup | None,
    show_trained: Callable[[], None],
) -> Iterator[None]:
    """Inside, trainable parameters hold the mean over the replicas of what `show_trained` makes of
    them; floating-point buffers and frozen parameters hold theirs where replicas differ, and stay
    as they are where not. Afterwards all are restored bit for bit.

    Args:
        model: the module that was given to `prepare`, not a wrapper around it.
        group: this worker and its counterparts in the other replicas.
        replica_group: the workers of this replica, which have buffers of their own.
        show_trained: see `Method`.
    """
    weights = [local(p.detach()) for p in model.parameters() if p.requires_grad]
    frozen = [local(p.detach()) for p in model.parameters() if not p.requires_grad]
    buffers = [b.detach() for b in model.buffers() if b.is_floating_point()]
    others = _differing([*(one for one in frozen if one.is_floating_point()), *buffers], group)
    try:
        with (
            averaged(buffers, None),  # which restores them all: an evaluation may write them
            averaged([*weights, *others], group, show_trained),
            averaged(_differing(buffers, replica_group), replica_group),
        ):
            _forget_gathered(model)
            yield
    finally:
        _forget_gathered(model)


def _differing(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Those that are not equal on all workers of a group, bit for bit. Blocking."""
    if group is None or not tensors:
        return []
    own = torch.stack([checksum(one).to(tensors[0].device) for one in tensors])
    sums = _gathered(own, group)
    return [one for one, found in zip(tensors, sums, strict=True) if len(set(found)) > 1]


@contextmanager
def averaged(
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup | None,
    begin: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Inside, the tensors hold their means over the group, taken after `begin`, which may change
    them. Afterwards they are restored bit for bit.

    Blocking: all workers of the group must enter together. A copy of the tensors is kept meanwhile.
    """
    saved = [tensor.clone() for tensor in tensors]
    mean = dist.ReduceOp.AVG
    try:
        begin()
        if group is not None:
            _together(tensors, group, lambda flat: dist.all_reduce(flat, op=mean, group=group))
        yield
    finally:
        for tensor, value in zip(tensors, saved, strict=True):
            tensor.copy_(value)


def _forget_gathered(model: nn.Module) -> None:
    """Make the next forward pass gather the weights anew. fully_shard keeps what one has gathered
    for the backward pass; after an evaluation there is none, and the local shards have changed."""
    for module in model.modules():
        getattr(module, "reshard", lambda: None)()


CALLS = ("consensus", "save", "resume")
"""Calls that all replicas must make together."""


def meet(
    watch: DeadlockWatch,
    call: str,
    group: dist.ProcessGroup | None,
    device: torch.device,
    layout: Mapping[str, str],
) -> None:
    """Wait until all replicas are at a call, and compare the numbers of their steps and the layouts
    of their models. Blocking.

    Args:
        watch: has the number of this replica's steps.
        call: one of `CALLS`.
        group: this worker and its counterparts in the other replicas.
        device: of the workers.
        layout: shape and type of each parameter and buffer, by name.
    Raises:
        ReplicasDiffer: on all workers: they are at other calls, or have made other steps, or what
            would be averaged is of other shapes.
        WrongCall: another replica waits elsewhere (`DeadlockWatch`).
    """
    if group is None:
        return
    own = [CALLS.index(call), watch.steps, zlib.crc32(repr(layout).encode())]
    calls, steps, layouts = _gathered(torch.tensor(own, device=device), group, watch)
    compare("the call", [CALLS[index] for index in calls], _OTHER_CALLS)
    compare("steps", steps, _OTHER_STEPS)
    if len(set(layouts)) > 1:
        check_alike(layout, group, _OTHER_SHAPES)


def check_equal(
    tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Compare by checksums what must be equal on all replicas, bit for bit. Blocking.

    Args:
        tensors: by name, in the same order on all replicas.
        group: this worker and its counterparts in the other replicas.
        device: of the workers.
    Raises:
        ReplicasDiffer: on all workers. It names the replicas that differ from most others.
    """
    if group is None or not tensors:
        return
    own = torch.stack([checksum(tensor).to(device) for tensor in tensors.values()])
    for name, sums in zip(tensors, _gathered(own, group), strict=True):
        compare(name, sums, _OTHER_BITS)


def _gathered(
    own: Tensor, group: dist.ProcessGroup, watch: DeadlockWatch | None = None
) -> list[list[int]]:
    """Return each number of `own` as all replicas have it. Blocking.

    Args:
        watch: waits for the collective, unless replicas are elastic.
    """
    found = own.new_zeros(group.size() * len(own))

    def gather(out: Tensor) -> None:
        work = dist.all_gather_into_tensor(out, own.to(out.device), group=group, async_op=True)
        assert work is not None, "this worker is in the group"
        if watch is not None and in_use() is None:
            watch.gather(work, gloo=not out.is_cuda)
        else:
            work.wait()

    as_one(lambda: _apply(found, group, gather))
    rows: list[list[int]] = found.view(-1, len(own)).t().tolist()
    return rows


_OTHER_CALLS = "every replica must make the same calls in the same order"
_OTHER_STEPS = "give every replica as many batches and steps as the others"
_OTHER_CODE = "start all with the same code and settings"
_OTHER_SHAPES = "what the model holds must have the same shape on all, for it is averaged"
_OTHER_BITS = (
    "give all the same learning rates, and train the module that prepare returned; else go on from "
    "an earlier checkpoint, and if it comes back, suspect the machine"
)


def compare(name: str, found: Sequence[object], why: str) -> None:
    """Raise `ReplicasDiffer` unless the values `found`, one of each replica, are equal."""
    usual = max(found, key=found.count)
    others = [replica for replica, one in enumerate(found) if one != usual]
    if others:
        raise ReplicasDiffer(name, others, found.index(usual), why)


def gathered(own: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return the objects of all workers of a group, small and picklable. Blocking. None: of this
    worker alone."""
    if group is None:
        return [own]
    found = [own] * group.size()
    as_one(lambda: until_cut(lambda: dist.all_gather_object(found, own, group=group)))
    return found


def check_alike(
    own: Mapping[str, str], group: dist.ProcessGroup | None, why: str = _OTHER_CODE
) -> None:
    """Compare the replicas' descriptions of themselves, by name. Blocking.

    Args:
        why: they must be equal, or what to do.
    Raises:
        ReplicasDiffer: on all workers, with what differs.
    """
    found = gathered(own, group)
    for name in dict.fromkeys(name for one in found for name in one):
        values = [one.get(name, "nothing") for one in found]
        told = ", ".join(f"{values.index(value)} has {value}" for value in dict.fromkeys(values))
        compare(name, values, f"{told}; {why}")


def _together(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, collective: Callable[[Tensor], Any]
) -> None:
    """Run a collective on tensors, in place, as on one vector."""

    def run() -> None:
        for same in _alike(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            _apply(flat, group, collective)
            torch._foreach_copy_(same, views(flat, same))

    as_one(run)


def _alike(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors of one type and device, and of `_FLAT_BYTES` at most or one tensor."""
    for kind in dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors):
        same = [tensor for tensor in tensors if (tensor.dtype, tensor.device) == kind]
        for some in pack([tensor.nbytes for tensor in same], _FLAT_BYTES):
            yield same[some]


def _apply(tensor: Tensor, group: dist.ProcessGroup, collective: Callable[[Tensor], Any]) -> None:
    """Run a collective on a contiguous tensor, or on a copy of it in memory that the group can
    reach, and copy the result back."""
    if tensor.numel() == 0:  # then the counterparts' tensors are empty too
        return
    within_reach = tensor if carries(group, tensor) else tensor.cpu()
    until_cut(lambda: collective(within_reach))
    sockets = in_use()
    if within_reach.is_cuda and sockets is not None:
        torch.cuda.synchronize(within_reach.device)
        if sockets.were_cut:  # NCCL ends without an error when it is aborted
            raise RuntimeError("a collective was aborted")
    if within_reach is not tensor:
        tensor.copy_(within_reach)
