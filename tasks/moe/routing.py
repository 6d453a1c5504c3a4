"""Which expert computes which token."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """Which expert computes which of a worker's tokens: A assignments in the order of the experts,
    for each of them first choices before second ones, and earlier tokens before later ones."""

    choice: Tensor
    """int64 [A]: number c T + t of choice c of token t."""
    weight: Tensor
    """[A]: g."""
    counts: Tensor
    """int64 [N, E]: assignments of each expert by each worker, those over its capacity left out."""
    wanted: Tensor
    """int64 [N, E]: with those."""


def route(
    shares: Tensor,
    active: int,
    capacity: float | None,
    group: dist.ProcessGroup | None = None,
    fixed: bool = False,
) -> Routing:
    """Choose experts. Collective in the group.

    Args:
        shares: p, [T, E].
        active: k.
        capacity: an expert takes at most this many times the k T N / E assignments that it would
            have if all were chosen alike. Those beyond it are left out, such a token has nothing of
            that expert: second choices first, then those of later workers, then of later tokens.
            None: no limit.
        group: N workers that share the experts, each with T tokens; None: one.
        fixed: no size may depend on the data: what is left out comes last, with a weight of 0.
    """
    num_tokens, num_experts = shares.shape
    weight, expert = shares.topk(active)
    if active > 1:
        weight = weight / weight.sum(-1, keepdim=True)
    chosen = expert.T  # [k, T]
    own = chosen.new_zeros(active, num_experts)
    own.scatter_add_(1, chosen, torch.ones_like(chosen))
    everywhere = own[None] if group is None else _gathered(own, group)  # [N, k, E]
    counts, choice = everywhere.sum(1), chosen.flatten().argsort(stable=True)
    wanted = counts
    if capacity is not None:
        workers = len(everywhere)
        most = math.ceil(capacity * active * num_tokens * workers / num_experts)
        in_turn = everywhere.transpose(0, 1).flatten(0, 1)  # first choices of all workers first
        before = (in_turn.cumsum(0) - in_turn).view(active, workers, num_experts)
        room = (most - before).clamp(min=0)
        counts = torch.minimum(everywhere.transpose(0, 1), room).sum(0)
        me = 0 if group is None else dist.get_rank(group)
        # Among a worker's choices of one kind for one expert, earlier tokens have lower places.
        place = F.one_hot(chosen, num_experts).cumsum(1).gather(2, chosen[..., None])[..., 0] - 1
        kept = place < room[:, me].gather(1, chosen)
        if fixed:
            choice = (chosen + num_experts * ~kept).flatten().argsort(stable=True)
            weight = weight * kept.T
        else:
            choice = choice[kept.flatten()[choice]]
    return Routing(choice, weight.T.flatten()[choice], counts, wanted)


def _gathered(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same counts of every worker of the group, stacked."""
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return torch.stack(parts)
