"""A replica of several workers: how they share its gradients, its inner state and its weights.

PyTorch does all of it: DistributedDataParallel, ZeroRedundancyOptimizer and fully_shard. N workers
share a replica.

    mesh.strategy   gradients              inner state   weights    each worker exchanges
    ddp             averaged               whole         whole      the whole vector
    zero1           averaged               1/N           whole      the whole vector
    zero2           averaged, 1/N kept     1/N           1/N *      1/N of it
    zero3           averaged, 1/N kept     1/N           1/N        1/N of it
    ep              as ddp; of experts: where these are, 1/N of them, also exchanged

    * whole from the forward pass to the backward pass; with zero3 one block at a time

A method sees the local parameters only, and exchanges them with this worker's counterparts in the
other replicas. A method that averages gradients over the replicas, too, leaves that to the same
classes: DistributedDataParallel then spans all workers, and fully_shard replicates its shards
(hybrid mode).
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from co2.comm.collectives import data_parallel, local, replicate
from co2.comm.mesh import Mesh, check_replica_size
from co2.config import CommConfig, CommDevice, Config, MeshConfig, Precision, Strategy
from co2.config import Optimizer as OptimizerName
from co2.errors import require
from co2.methods.base import Method
from co2.train.expert_parallel import ExpertShards, divide
from co2.train.state_file import ELSEWHERE

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

_SYNC = "mesh.sync_batch_norm"
CUT = (Strategy.zero2, Strategy.zero3)
"""Strategies under which a worker holds a shard of every weight."""


def check(config: Config, world: int, method: Method, device: torch.device) -> None:
    """Refuse settings that cannot be combined, before any worker starts. Raises `ConfigError`."""
    size, strategy = config.mesh.replica_size, config.mesh.strategy
    check_replica_size(size, world)
    if config.mesh.sync_batch_norm:
        hint = "is shared by the workers of a replica; set mesh.replica_size to 2 or more"
        require(size > 1, _SYNC, "true", hint)
        hint = "PyTorch synchronizes batch norm on GPUs only, not on the CPU; use false"
        require(device.type == "cuda", _SYNC, "true", hint)
    if size == 1:
        hint = "shares a replica among its workers; set mesh.replica_size to 2 or more"
        require(strategy is Strategy.ddp, "mesh.strategy", strategy.value, hint)
        return
    method.refuse("mesh.strategy", strategy.value)
    hint = "gloo would have to carry the gradients inside a replica too; use auto"
    require(config.comm.device is CommDevice.auto, "comm.device", "cpu", hint)
    if strategy is Strategy.ep:
        _check_ep(config)
    if strategy in CUT:
        hint = (
            "optim.name=muon needs whole matrices, and here a worker has a part; use zero1 or ddp"
        )
        muon = config.optim.name is OptimizerName.muon
        require(not muon, "mesh.strategy", strategy.value, hint)
    if strategy in (*CUT, Strategy.ep):
        hooks = method.averages_gradients and config.comm.dtype is Precision.bf16
        hint = f"with mesh.strategy={strategy.value} gradients travel as they are; use fp32"
        require(not hooks, "comm.dtype", "bf16", hint)


def _check_ep(config: Config) -> None:
    size = config.mesh.replica_size
    experts = getattr(config.task_config, "num_experts", 0)
    hint = f"divides experts, and task={config.task} has none; use task=moe, or zero1, zero2, zero3"
    require(experts > 0, "mesh.strategy", "ep", hint)
    require(experts % size == 0, "mesh.replica_size", size, f"must divide the {experts} experts")
    hint = "with mesh.strategy=ep tokens travel between the operations; use false"
    require(not config.train.compile, "train.compile", "true", hint)


class Replica:
    """The workers of this worker's replica.

    Args:
        config: size and strategy.
        mesh: of the workers.
        across: whether gradients are averaged over the replicas too.
    """

    def __init__(self, config: MeshConfig, mesh: Mesh, across: bool) -> None:
        self.strategy, self.mesh, self.across = config.strategy, mesh, across
        self._synchronizes = config.sync_batch_norm
        self.alone = mesh.replica_size == 1
        self.group = mesh.new_group_within_replica()
        self.experts = ExpertShards()
        """Experts of which this worker holds a part, once it does."""

    def synchronize_batch_norm(self, module: nn.Module) -> None:
        """With mesh.sync_batch_norm, let the batch norms of a module take their statistics over
        the workers of the replica. Names and weights stay; it comes before `compile`.

        Raises:
            ConfigError: a batch norm that does more than PyTorch's own.
        """
        if not self._synchronizes:
            return
        for name, part in module.named_modules():
            if isinstance(part, _BatchNorm):
                plain = type(part).__module__ == nn.BatchNorm2d.__module__
                hint = f"{name} is a {type(part).__name__}, more than a batch norm; use false"
                require(plain, _SYNC, "true", hint)
        nn.SyncBatchNorm.convert_sync_batchnorm(module, self.group)

    def shard(self, module: nn.Module, precision: Precision = Precision.fp32) -> None:
        """Give all workers the weights of the first one; under zero2 and zero3 each then keeps its
        shard of them.

        Args:
            module: the model.
            precision: of the forward pass. With bf16 GPUs gather the weights of blocks in bf16.
        Raises:
            ConfigError: a weight that cannot be sharded.
        """
        if self.alone:
            return
        replicate(module, self.group)
        if self.strategy is Strategy.ep:
            self.experts = divide(module, self._device_mesh()["shard"])
        if self.strategy not in CUT:
            return
        from torch.distributed.fsdp import fully_shard  # costs half a second
        from torch.distributed.tensor import debug

        # DTensor caches how it shards operations, and the cache names process groups. In a sweep
        # those of an equal mesh, made earlier in this process, no longer exist.
        debug._clear_sharding_prop_cache()

        value = self.strategy.value
        for name, param in module.named_parameters():
            hint = f"cannot cut {name}, a single number; give it one dimension, or use zero1"
            require(param.dim() > 0, "mesh.strategy", value, hint)
        whole = self._device_mesh()
        mesh = whole if self.across and self.mesh.num_replicas > 1 else whole["shard"]
        # None: weights are freed after a forward pass, but for the root's, which are used next.
        keep = False if self.strategy is Strategy.zero2 else None
        for block in blocks(module):
            policy = gathered_as(block, precision, self.mesh.device)
            fully_shard(block, mesh=mesh, reshard_after_forward=keep, mp_policy=policy)
        # What stands outside of blocks, such as embeddings, keeps the sum that passes through the
        # blocks in fp32, as under autocast alone.
        fully_shard(module, mesh=mesh, reshard_after_forward=keep)

    def _device_mesh(self) -> DeviceMesh:
        """The workers of the default group, by replica and by place in it. Collective."""
        from torch.distributed.device_mesh import init_device_mesh

        shape = (dist.get_world_size() // self.mesh.replica_size, self.mesh.replica_size)
        return init_device_mesh(self.mesh.device.type, shape, mesh_dim_names=("replica", "shard"))

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer, which must not have stepped yet; under zero1 one whose state is
        sharded."""
        if self.strategy is not Strategy.zero1:
            return optimizer
        from torch.distributed.optim import ZeroRedundancyOptimizer

        # The groups hold every option, including the defaults of the optimizer that made them.
        return ZeroRedundancyOptimizer(
            optimizer.param_groups, optimizer_class=type(optimizer), process_group=self.group
        )

    def wrap(self, model: nn.Module, comm: CommConfig) -> nn.Module:
        """The module that the forward pass goes through, from the one that the method prepared."""
        if self.alone or self.across or self.strategy in CUT:
            return model
        return data_parallel(model, comm, self.group)


def gathered_as(
    block: nn.Module, precision: Precision, device: torch.device
) -> "MixedPrecisionPolicy":
    """How `fully_shard` gathers the weights of a block that computes under autocast: in bf16, as
    autocast would cast them, where autocast also casts what norms take, which is on a GPU. Batch
    norm takes no bf16 weights beside its fp32 statistics."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    norms = any(isinstance(part, _BatchNorm) for part in block.modules())
    if precision is Precision.fp32 or norms or device.type == "cpu":
        return MixedPrecisionPolicy()
    bf16, fp32 = torch.bfloat16, torch.float32
    return MixedPrecisionPolicy(bf16, reduce_dtype=fp32, cast_forward_inputs=False)


class ReplicaState:
    """Weights and inner state of a replica, by the names of the parameters.

    One worker saves a tensor that all hold alike. Each saves its own shards, and with zero1 the
    inner state of its parameters.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, replica: Replica) -> None:
        self.params, self.experts = dict(module.named_parameters()), replica.experts
        self.inner, self.mesh = local_optimizer(optimizer), replica.mesh
        self._alike = replica.strategy is not Strategy.zero1
        """Whether all workers have the inner state of all parameters."""

    def state(self, everything: bool = False) -> dict[str, Any]:
        """What this worker holds of it, as it is now. `ELSEWHERE` stands for what another worker
        saves, unless `everything` is wanted."""
        weights, inner = {}, {}
        for number, (name, param) in enumerate(self.params.items()):
            turn = number % self.mesh.replica_size == self.mesh.rank_in_replica
            here = everything or turn
            weights[name] = self._saved(name, param.detach(), here)
            if param in self.inner.state:
                fields = self.inner.state[param].items()
                here = here or not self._alike
                inner[name] = {key: self._saved(name, value, here) for key, value in fields}
        return {"model": weights, "optimizer": {"state": inner}}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned, with the tensors in place of `ELSEWHERE`."""
        for name, value in state["model"].items():
            local(self.params[name].detach()).copy_(value)
        order = [param for group in self.inner.param_groups for param in group["params"]]
        numbers = {param: number for number, param in enumerate(order)}
        packed = self.inner.state_dict()
        packed["state"] = {
            numbers[self.params[name]]: {
                key: _like(value, self.params[name]) for key, value in fields.items()
            }
            for name, fields in state["optimizer"]["state"].items()
            if self.params[name] in numbers  # with zero1 others hold the rest
        }
        self.inner.load_state_dict(packed)

    def _saved(self, name: str, value: Any, here: bool) -> Any:
        """A value that belongs to a parameter, as a checkpoint has it. `Any`: or a plain value."""
        if not isinstance(value, Tensor):
            return value
        if value.size() == self.params[name].size():
            value = self.experts.seen_whole(name, value)
        return value if here or local(value) is not value else ELSEWHERE


def _like(value: Any, param: Tensor) -> Any:
    """A value of the inner state in the form that its optimizer gave it: of the parameter's size,
    it lies in memory and is sharded as that is. `Any`: or a plain value."""
    if not isinstance(value, Tensor):
        return value
    if value.size() != local(param.detach()).size():
        return value.clone()  # not a view of the file
    made = torch.empty_like(param, dtype=value.dtype, requires_grad=False)
    local(made).copy_(value)
    return made


def local_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer whose state this worker holds: ZeroRedundancyOptimizer has another inside."""
    return getattr(optimizer, "optim", optimizer)


def own_buffers(module: nn.Module) -> dict[str, Any]:
    """A copy of the buffers in a module's state dict, which every worker has for itself, and the
    next forward pass may change. `Any`: or a module's extra state."""
    params = dict(module.named_parameters(remove_duplicate=False))
    own = {name: value for name, value in module.state_dict().items() if name not in params}
    return tree_map_only(Tensor, Tensor.clone, own)


def whole_weights(module: nn.Module, experts: ExpertShards) -> dict[str, Any]:
    """The module's state dict, with parameters of which each worker has a part gathered in the
    host's memory. Collective in the replica."""
    state: dict[str, Any] = {
        name: experts.seen_whole(name, value) for name, value in module.state_dict().items()
    }
    return {
        name: value.full_tensor().cpu() if local(value) is not value else value
        for name, value in state.items()
    }


def accumulating(model: nn.Module, last: bool) -> contextlib.AbstractContextManager[None]:
    """Around a micro-batch: only the last one's backward pass averages gradients over all workers.
    Where weights are sharded, every backward pass reduces gradients to the workers' shards, so that
    whole gradients are never kept."""
    of_cut_weights = getattr(model, "set_requires_all_reduce", None)
    if of_cut_weights is not None:
        of_cut_weights(last)
    elif isinstance(model, nn.parallel.DistributedDataParallel) and not last:
        return model.no_sync()
    return contextlib.nullcontext()


def blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model: the entries of its outermost lists and sequences that have
    parameters of their own and share none with another part."""
    used = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))

    def independent(block: nn.Module) -> bool:
        inside = Counter(id(p) for _, p in block.named_parameters(remove_duplicate=False))
        return len(inside) > 0 and all(used[key] == count for key, count in inside.items())

    return [block for block in _listed(module) if independent(block)]


def _listed(module: nn.Module) -> Iterator[nn.Module]:
    numbered = isinstance(module, nn.ModuleList | nn.Sequential)
    for child in module.children():
        if numbered and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield child
        else:
            yield from _listed(child)


def compile_model(module: nn.Module, strategy: Strategy) -> None:
    """Compile the model in place: as a whole, or block by block where weights are sharded, so that
    they are gathered between what is compiled. Call it before `checkpoint_activations` and
    `Replica.shard`, whose work then stays outside of the blocks."""
    if strategy not in CUT:
        module.compile()
        return
    for block in blocks(module):
        block.forward = torch.compile(block.forward)


def checkpoint_activations(module: nn.Module) -> None:
    """Keep the inputs of the model's blocks only, and compute the rest again in the backward
    pass."""
    for block in blocks(module):
        block.forward = partial(_checkpointed, block, block.forward)


def _checkpointed(block: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """What `forward` returns. `Any`: it is a block's, whatever that takes and returns."""
    if not torch.compiler.is_compiling():  # compiled code takes no context, and needs none
        kwargs["context_fn"] = lambda: (contextlib.nullcontext(), _without_side_effects(block))
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


@contextlib.contextmanager
def _without_side_effects(block: nn.Module) -> Iterator[None]:
    """Restore the block's buffers, because batch norm has counted this batch already."""
    saved = [(buffer, buffer.clone()) for buffer in block.buffers()]
    try:
        yield
    finally:
        for buffer, value in saved:
            buffer.copy_(value)
