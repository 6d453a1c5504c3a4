"""Operations on point clouds: farthest points, patches around them, Chamfer distance.

Distances are sums of squared differences, not the cheaper |a|² − 2ab + |b|², because in fp32 the
latter loses the small distances between neighbours, which matter here.
"""

import torch
from torch import Tensor


def squared_distances(first: Tensor, second: Tensor) -> Tensor:
    """Return the squared distances, [..., N, M], between the points [..., N, 3] and [..., M, 3]."""
    return (first.unsqueeze(-2) - second.unsqueeze(-3)).square().sum(-1)


@torch.no_grad()
def farthest_points(clouds: Tensor, count: int) -> Tensor:
    """Sample farthest points: each next point is the one farthest from all points taken so far.

    The first is point 0, and of points equally far the one with the lowest index is taken, so
    nothing is random. Where a cloud has fewer distinct points than `count`, point 0 is repeated.

    Args:
        clouds: [B, N, 3].
        count: number of points, from 1 to N.
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
    """Divide clouds into patches: the points nearest to the farthest points of each cloud.

    A point may be in several patches, or in none.

    Args:
        clouds: [B, N, 3].
        num_patches: G, the patches of a cloud, at most N.
        size: K, the points of a patch, at most N.
    Returns:
        The patches, [B, G, K, 3], relative to their centres and sorted by distance from them (the
        first point is the centre itself or a point at the same place); and the centres, [B, G, 3].
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
    """Return Chamfer-L2: the mean squared distance to the nearest point of the other set, added up
    for both directions.

    Fan et al., "A Point Set Generation Network for 3D Object Reconstruction" (CVPR 2017), with
    means in place of sums, as in Point-MAE. Where two points are equally near, the gradient is
    divided between them.

    Args:
        first, second: points, [..., N, 3] and [..., M, 3].
    Returns:
        [...], in squared units of the points.
    """
    apart = squared_distances(first, second)
    return apart.amin(-1).mean(-1) + apart.amin(-2).mean(-1)
