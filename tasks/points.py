"""Point clouds in plain tensors: farthest points, patches around them, Chamfer distance.

Distances are sums of squared differences, not the cheaper |a|² − 2ab + |b|²: in fp32 that one
loses the small distances between neighbours, and they are what is compared here.
"""

import torch
from torch import Tensor


def squared_distances(first: Tensor, second: Tensor) -> Tensor:
    """Between all points of two sets, [..., N, 3] and [..., M, 3]: [..., N, M]."""
    return (first.unsqueeze(-2) - second.unsqueeze(-3)).square().sum(-1)


@torch.no_grad()
def farthest_points(clouds: Tensor, count: int) -> Tensor:
    """Farthest point sampling: each point is the one farthest from all that came before.

    The first is point 0, and among equals the one with the lowest index is taken, so nothing is
    random. Where a cloud has fewer distinct points than `count`, point 0 is repeated.

    Args:
        clouds: [B, N, 3].
        count: from 1 to N.
    Returns:
        Indices, int64 [B, count].
    """
    assert 1 <= count <= clouds.shape[1]
    rows = torch.arange(len(clouds), device=clouds.device)
    current = torch.zeros_like(rows)
    chosen, nearest = [current], None
    for _ in range(count - 1):
        away = (clouds - clouds[rows, current].unsqueeze(1)).square().sum(-1)
        nearest = away if nearest is None else torch.minimum(nearest, away)
        current = nearest.argmax(dim=1)
        chosen.append(current)
    return torch.stack(chosen, dim=1)


@torch.no_grad()
def patches(clouds: Tensor, num_patches: int, size: int) -> tuple[Tensor, Tensor]:
    """Each cloud as patches: the points nearest to its farthest points.

    Args:
        clouds: [B, N, 3].
        num_patches, size: G and K, each at most N. A point may be in several patches, or in none.
    Returns:
        The patches, [B, G, K, 3], each relative to its centre and with the nearest point (the
        centre itself, or its double) first; and the centres, [B, G, 3].
    """
    centres = taken(clouds, farthest_points(clouds, num_patches))
    near = squared_distances(centres, clouds).topk(size, dim=-1, largest=False).indices
    inside = taken(clouds, near.flatten(1)).unflatten(1, near.shape[1:])
    return inside - centres.unsqueeze(2), centres


def taken(values: Tensor, indices: Tensor) -> Tensor:
    """Choose elements of each row: values [B, N, ...] at indices [B, M] give [B, M, ...]."""
    rows = torch.arange(len(values), device=values.device).unsqueeze(1)
    return values[rows, indices]


def chamfer(first: Tensor, second: Tensor) -> Tensor:
    """Chamfer-L2: the mean squared distance to the nearest point of the other set, both ways.

    Fan et al., "A Point Set Generation Network for 3D Object Reconstruction" (CVPR 2017), with
    means in place of its sums, as Point-MAE has it. Where two points are equally near, the
    gradient is shared between them.

    Args:
        first, second: [..., N, 3] and [..., M, 3].
    Returns:
        [...], in squared units of the points.
    """
    apart = squared_distances(first, second)
    return apart.amin(-1).mean(-1) + apart.amin(-2).mean(-1)
