"""Labelled scenes of shapes, generated in memory, for semantic segmentation at scale=smoke.

Up to three shapes, slightly rotated, lie on a shaded ground, later ones over earlier ones. Colours
are random, darker for the ground, and noise is added, so only the form of a shape tells its class.
Every second scene has a rectangle without labels, as images of real data sets have.
"""

import hashlib
from functools import cache

import numpy as np
import torch
from torch import Tensor

from tasks.ade20k.segmentation import IGNORED

SIZE = 32
"""Side of a scene, in pixels."""

CLASSES = ("ground", "disc", "square", "triangle", "ring", "cross")
COUNTS = {"training": 1024, "validation": 1024}
_SHAPES = 3
_NOISE = 0.05


class Scenes:
    """The scenes of "training" or "validation", as `tasks.ade20k.segmentation.Samples`."""

    def __init__(self, split: str) -> None:
        self._images, self._labels = (torch.from_numpy(part) for part in scenes(split))

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._images[index], self._labels[index]

    def take(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return samples as one batch: uint8 [B, 3, SIZE, SIZE] and [B, SIZE, SIZE]."""
        return self._images[indices], self._labels[indices]

    def labels(self, index: int) -> Tensor:
        """Return the labels of a sample, uint8 [SIZE, SIZE]."""
        return self._labels[index]

    def digest(self) -> str:
        """Return the sha256 of all pixels and labels."""
        return hashlib.sha256(
            self._images.numpy().tobytes() + self._labels.numpy().tobytes()
        ).hexdigest()


@cache
def scenes(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Make all scenes of "training" or "validation"; they are the same in every run.

    Returns:
        Images, uint8 [N, 3, SIZE, SIZE], and labels, uint8 [N, SIZE, SIZE]: an index into CLASSES,
        or IGNORED. They are cached, so nobody may write to them.
    """
    number = COUNTS[split]
    source = np.random.default_rng((2016, list(COUNTS).index(split)))
    rows, columns = np.indices((SIZE, SIZE), np.float32)

    def draw(low: float, high: float, *shape: int) -> np.ndarray:
        return source.uniform(low, high, (number, *shape)).astype(np.float32)

    shade = draw(-0.2, 0.2, 2)[:, :, None, None] * (np.stack([rows, columns]) / SIZE - 0.5)
    ground = draw(0, 0.45, 3)
    images = ground[:, :, None, None] + shade.sum(1, keepdims=True)
    labels = np.zeros((number, SIZE, SIZE), np.uint8)
    for _ in range(_SHAPES):
        kinds = source.integers(0, len(CLASSES), number)  # 0, the ground, draws no shape
        centre, radius = draw(4, SIZE - 4, 2), draw(5, 9)[:, None, None]
        turn = draw(-0.3, 0.3)[:, None, None]
        down = (rows - centre[:, 0, None, None]) / radius
        right = (columns - centre[:, 1, None, None]) / radius
        inside = np.zeros(labels.shape, bool)
        for kind in range(1, len(CLASSES)):
            chosen = kinds == kind
            c, s = np.cos(turn[chosen]), np.sin(turn[chosen])
            y = c * down[chosen] - s * right[chosen]
            x = s * down[chosen] + c * right[chosen]
            inside[chosen] = _inside(CLASSES[kind], x, y)
        images = np.where(inside[:, None], draw(0.35, 1, 3)[:, :, None, None], images)
        labels = np.where(inside, kinds[:, None, None].astype(np.uint8), labels)
    images += source.standard_normal(images.shape, np.float32) * _NOISE
    _unlabel(labels[::2], source)
    images = (images.clip(0, 1) * 255).round().astype(np.uint8)
    return images, labels


def _inside(kind: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return whether points are in a shape around 0 whose radius is about 1: bool, as x and y."""
    if kind in ("disc", "ring"):
        far = x * x + y * y
        return far < 1 if kind == "disc" else (far < 1) & (far > 0.3)
    across, along = np.abs(x), np.abs(y)
    if kind == "square":
        return np.maximum(across, along) < 0.8
    if kind == "cross":
        return (np.minimum(across, along) < 0.28) & (np.maximum(across, along) < 1)
    assert kind == "triangle"
    return (y > -0.6) & (y < 1 - 1.85 * across)


def _unlabel(labels: np.ndarray, source: np.random.Generator) -> None:
    """Remove the labels of a rectangle of each scene, in place."""
    rows, columns = np.indices((SIZE, SIZE))
    top, left = source.integers(0, SIZE - 8, (2, len(labels), 1, 1))
    height, width = source.integers(6, 16, (2, len(labels), 1, 1))
    inside = (rows >= top) & (rows < top + height) & (columns >= left) & (columns < left + width)
    labels[inside] = IGNORED
