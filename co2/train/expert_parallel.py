"""Experts that the workers of a replica share: mesh.strategy=ep.

Each of the N workers computes with its E/N experts alone, on all tokens of the replica that chose
them. Their gradients are thus sums over the N workers' batches, and the mean that the method asks
for is 1/N of them; the other weights are whole on every worker, and averaged by
DistributedDataParallel.
"""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from co2.comm.collectives import mark_part


@runtime_checkable
class Divisible(Protocol):
    """A module whose experts can be shared."""

    def divide(self, group: dist.ProcessGroup) -> tuple[str, ...]:
        """Leave this worker its part of the experts, and send tokens to the others' from now on.

        Returns:
            the names of the parameters that are parts now, along their first dimension.
        """
        ...


@dataclass(frozen=True)
class ExpertShards:
    """Which of a module's parameters are parts."""

    names: frozenset[str] = frozenset()
    mesh: DeviceMesh | None = field(default=None, compare=False)
    """Of the workers that hold the others."""

    def seen_whole(self, name: str, value: Tensor) -> Tensor:
        """A parameter, or what belongs to one, such as its moments: where it is a part, a DTensor
        over all parts, which shares the memory of this one."""
        if name not in self.names:
            return value
        from torch.distributed.tensor import DTensor, Shard  # costs half a second

        return DTensor.from_local(value, self.mesh, [Shard(0)], run_check=False)


def divide(module: nn.Module, mesh: DeviceMesh) -> ExpertShards:
    """Divide the experts of a module, all of which every worker of the mesh holds now."""
    names = set()
    for prefix, part in list(module.named_modules()):
        if isinstance(part, Divisible):
            for name in part.divide(mesh.get_group()):
                param = getattr(part, name)
                mark_part(param, mesh.size())
                param.register_hook(lambda gradient: gradient / mesh.size())
                names.add(f"{prefix}.{name}" if prefix else name)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    return ExpertShards(frozenset(names), mesh)


def clip(module: nn.Module, most: float, experts: ExpertShards) -> None:
    """Scale all gradients so that the norm of the whole model's is at most this. Collective where
    there are parts."""
    if experts.mesh is None or not experts.names:
        nn.utils.clip_grad_norm_(module.parameters(), most)
        return
    whole: list[Tensor] = []
    own: list[Tensor] = []
    for name, param in module.named_parameters():
        if param.grad is not None:
            (own if name in experts.names else whole).append(param.grad)
    squared = nn.utils.get_total_norm(own).square()
    dist.all_reduce(squared, group=experts.mesh.get_group())
    total = (squared + nn.utils.get_total_norm(whole).square()).sqrt()
    nn.utils.clip_grads_with_norm_(module.parameters(), most, total)
