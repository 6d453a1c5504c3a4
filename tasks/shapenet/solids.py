"""Generated solids of ten kinds as point clouds, for use without a data set.

The surface of a solid is a grid of vertices: a profile rotated about the vertical axis (with four
sides, a box or a pyramid), or a tube along a spiral. Points are drawn from the surface uniformly by
area. Proportions differ between solids, and so do the scales of the axes. All solids stand upright
and, like ShapeNet's, face about the same way. Noise is added to every point.
"""

import numpy as np

from tasks.shared.randomness import generator

NAMES = (
    "ball",
    "capsule",
    "cylinder",
    "cone",
    "hourglass",
    "torus",
    "star",
    "box",
    "pyramid",
    "spring",
)
NOISE = 0.02
"""Standard deviation of the noise, in units of the solid's radius (about 1)."""
STRETCH = 0.7, 1.4
"""Range of the factors that scale the three axes."""
TURN = 0.2
"""Largest rotation about the vertical axis, in radians."""

_ROUND = 24
"""Number of sides of round shapes."""


def solids(count: int, points: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Generate `count` solids, equally many of each kind, in random order.

    Returns:
        Clouds, float32 [count, points, 3], about as large as the unit ball; and kinds, int64
        [count], indices into `NAMES`.
    """
    rng = generator(seed)
    kinds = rng.permutation(np.arange(count) % len(NAMES))
    clouds = np.empty((count, points, 3))
    for kind, name in enumerate(NAMES):
        mine = kinds == kind
        clouds[mine] = surface(name, int(mine.sum()), points, rng)
    clouds *= rng.uniform(*STRETCH, (count, 1, 3))
    angle = rng.uniform(-TURN, TURN, (count, 1))
    x, y, z = np.moveaxis(clouds, -1, 0)
    turned = [np.cos(angle) * x - np.sin(angle) * y, np.sin(angle) * x + np.cos(angle) * y, z]
    clouds = np.stack(turned, -1)
    clouds += rng.normal(0, NOISE, clouds.shape)
    return clouds.astype(np.float32), kinds.astype(np.int64)


def surface(name: str, count: int, points: int, rng: np.random.Generator) -> np.ndarray:
    """Draw points on `count` solids of one kind, upright and without noise: [count, points, 3]."""
    return _spread(_grid(name, count, rng), points, rng)


def _grid(name: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return vertices [count, U, V, 3] of one kind. Each four neighbours span a quadrilateral."""

    def between(low: float, high: float) -> np.ndarray:
        return rng.uniform(low, high, (count, 1))

    if name == "spring":
        turns, rise, tube = between(1.5, 3), between(1, 2), between(0.12, 0.25)
        way = np.linspace(0, 1, 64)
        return _tube(2 * np.pi * turns * way, rise * (way - 0.5), tube)
    if name in ("ball", "capsule"):
        straight = 0 if name == "ball" else between(0.5, 1.2)
        arc = np.linspace(0, np.pi, 2 * _ROUND // 2)  # even, so no vertex is on the equator
        height = np.cos(arc) + straight * np.sign(np.cos(arc))
        return _turned(np.sin(arc), height, _ROUND, count)
    if name == "torus":
        arc, tube = np.linspace(0, 2 * np.pi, _ROUND // 2 + 1), between(0.25, 0.5)
        return _turned(1 + tube * np.cos(arc), tube * np.sin(arc), _ROUND, count)
    half = between(0.6, 1.4)
    if name == "hourglass":
        waist = between(0.1, 0.4)
        radius = np.concatenate([0 * waist, 0 * waist + 1, waist, 0 * waist + 1, 0 * waist], 1)
        return _turned(radius, half * [1, 1, 0, -1, -1], _ROUND, count)
    sides = {"star": 10, "box": 4, "pyramid": 4}.get(name, _ROUND)
    if name in ("cone", "pyramid"):
        return _turned(np.array([0, 1, 0]), half * [1, -1, -1], sides, count)
    grid = _turned(np.array([0, 1, 1, 0]), half * [1, 1, -1, -1], sides, count)
    if name == "star":
        grid[:, :, 1::2, :2] *= between(0.3, 0.5)[..., None, None]
    return grid


def _turned(radius: np.ndarray, height: np.ndarray, sides: int, count: int) -> np.ndarray:
    """Rotate a profile, [U] or [count, U] each, about the vertical axis.

    Returns:
        Vertices, [count, U, sides + 1, 3].
    """
    radius, height = (np.broadcast_to(a, (count, a.shape[-1])) for a in (radius, height))
    angle = np.linspace(0, 2 * np.pi, sides + 1)
    x, y = radius[..., None] * np.cos(angle), radius[..., None] * np.sin(angle)
    return np.stack([x, y, np.broadcast_to(height[..., None], x.shape)], -1)


def _tube(angle: np.ndarray, height: np.ndarray, radius: np.ndarray) -> np.ndarray:
    """Return the vertices of a tube around a spiral of radius 1: [count, U, 9, 3].

    Args:
        angle, height: the points of the spiral, [count, U] each.
        radius: radius of the tube, [count, 1].
    """
    around = np.linspace(0, 2 * np.pi, 9)
    out = 1 + radius[..., None] * np.cos(around)
    up = height[..., None] + radius[..., None] * np.sin(around)
    x, y = out * np.cos(angle)[..., None], out * np.sin(angle)[..., None]
    return np.stack([x, y, np.broadcast_to(up, x.shape)], -1)


def _spread(grid: np.ndarray, points: int, rng: np.random.Generator) -> np.ndarray:
    """Draw points [count, points, 3] uniformly from the surface that a grid of vertices spans."""
    a, b = grid[:, :-1, :-1], grid[:, 1:, :-1]
    c, d = grid[:, :-1, 1:], grid[:, 1:, 1:]
    corners = np.stack([np.stack([a, b, c], -2), np.stack([d, c, b], -2)], 1)
    corners = corners.reshape(len(grid), -1, 3, 3)  # count, triangles, corners, xyz
    origin = corners[:, :, 0]
    first, second = corners[:, :, 1] - origin, corners[:, :, 2] - origin
    area = np.linalg.norm(np.cross(first, second), axis=-1).cumsum(1)
    # One search serves all solids: the areas of solid n are mapped to between n and n + 1.
    row = np.arange(len(grid))[:, None]
    ladder = (area / area[:, -1:] + row).ravel()
    wanted = rng.uniform(0, 1, (len(grid), points)) + row
    chosen = np.searchsorted(ladder, wanted) - row * area.shape[1]
    chosen = chosen.clip(0, area.shape[1] - 1)
    along, across = rng.uniform(0, 1, (2, len(grid), points, 1))
    outside = along + across > 1  # in the other half of the parallelogram, which is folded back
    along, across = np.where(outside, 1 - along, along), np.where(outside, 1 - across, across)
    return origin[row, chosen] + along * first[row, chosen] + across * second[row, chosen]
