"""Semantic segmentation, whatever the model and the data: augmentation and metrics.

Augmentation is mmsegmentation's for ADE20K (configs/_base_/datasets/ade20k.py): a random scale, a
crop that no class fills, a flip, and changes of colour.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tasks.randomness import Draws

IGNORED = 255
"""The label of pixels that have none: no loss and no metric counts them."""

_COLOURS = (
    ("brightness", 0.875, 1.125),
    ("contrast", 0.5, 1.5),
    ("saturation", 0.5, 1.5),
    ("hue", -0.1, 0.1),
)
"""Changes of colour, in this order, and the ranges of their factors: mmsegmentation's 32 levels of
255, factors of 0.5 to 1.5, and 18 of 180 degrees."""

_TRIES = 10
VIEW_DRAWS = 1 + 2 * _TRIES + 1 + 5 * len(_COLOURS)
"""Words that `augmented` draws at most for one sample."""
_LARGEST_SHARE = 0.75
"""Of one class in a crop: after ten tries a crop is taken as it is."""

_LONG_SIDE = 4
"""Of an image, at most, in short sides; beyond it the image is made smaller still."""

_MEAN, _STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
"""Of ImageNet's pixels, which public backbones are trained with."""


class Samples(Protocol):
    """Images, uint8 [3, H, W] of any size, with their labels, uint8 [H, W]: class or IGNORED."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]: ...


def augmented(
    samples: Sequence[tuple[Tensor, Tensor]],
    draws: Draws,
    crop: int,
    short_side: int,
    scales: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """A random view of each sample.

    Args:
        samples: B images with their labels, see `Samples`.
        draws: B rows of at least `VIEW_DRAWS` words.
        crop: side of the view, in pixels. What the image does not fill has the mean colour and
            no label.
        short_side: short side of an image at scale 1, in pixels.
        scales: smallest and largest scale.
    Returns:
        The normalized views, fp32 [B, 3, crop, crop], and their labels, uint8 [B, crop, crop].
    """
    low, high = scales
    scale = low + (high - low) * draws.uniform(0, 1).astype(np.float64)
    views = _cropped(_resized(samples, short_side, scale.tolist()), draws, crop)
    mirrored = (draws.uniform(0, 1) < 0.5).tolist()
    changes = [_drawn_changes(draws, name, *ranges) for name, *ranges in _COLOURS]
    images = torch.zeros(len(views), 3, crop, crop, dtype=torch.uint8)
    masks = torch.full((len(views), crop, crop), IGNORED, dtype=torch.uint8)
    for row, (image, labels) in enumerate(views):
        if mirrored[row]:
            image, labels = image.flip(-1), labels.flip(-1)
        for change in changes:
            image = change(row, image)
        height, width = labels.shape
        images[row, :, :height, :width], masks[row, :height, :width] = image, labels
    found = normalized(images)
    for row, (_, labels) in enumerate(views):
        height, width = labels.shape
        if height < crop or width < crop:  # 0 is the mean
            found[row, :, height:], found[row, :, :, width:] = 0, 0
    return found, masks


def whole(image: Tensor, short_side: int) -> Tensor:
    """A whole image as it is evaluated: its short side resized, its shape kept; normalized."""
    from torchvision.transforms.v2 import functional as transforms

    size = _size(image.shape[1], image.shape[2], short_side, 1.0)
    return normalized(transforms.resize(image, list(size), antialias=True))


def normalized(image: Tensor) -> Tensor:
    """Pixels from 0 to 255, [..., 3, H, W], with ImageNet's mean at 0 and its deviation at 1; fp32."""
    mean, std = torch.tensor(_MEAN)[:, None, None], torch.tensor(_STD)[:, None, None]
    return (image.float() - mean) / std


def enlarged(logits: Tensor, size: Sequence[int]) -> Tensor:
    """Logits [B, K, h, w] at the resolution of the labels: bilinear, fp32 whatever the autocast."""
    with torch.autocast(logits.device.type, enabled=False):
        return F.interpolate(logits.float(), size=tuple(size), mode="bilinear", align_corners=False)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each pixel in nats, [B, H, W]; 0 where there is no label.

    Args:
        logits: fp32 [B, K, H, W].
        labels: uint8 [B, H, W].
    """
    # Summed by the caller: on a GPU, reduction="sum" adds in no fixed order.
    with torch.autocast(logits.device.type, enabled=False):
        return F.cross_entropy(logits, labels.long(), ignore_index=IGNORED, reduction="none")


def confusion(predicted: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """How many labelled pixels of class t are taken for class p, at [t, p]: int64, [K, K].

    Args:
        predicted: classes, int64 of any shape.
        labels: uint8 of the same shape.
    """
    labelled = labels != IGNORED
    pairs = labels[labelled].long() * num_classes + predicted[labelled]
    return torch.bincount(pairs, minlength=num_classes**2).view(num_classes, num_classes)


def scores(counts: Tensor) -> dict[str, float]:
    """Metrics of a confusion matrix of the whole data: "miou" and "pixel_accuracy", 0 to 1.

    The mean IoU is over the classes that occur, in truth or prediction (as in mmsegmentation).
    """
    table = counts.cpu().double()
    right = table.diagonal()
    union = table.sum(0) + table.sum(1) - right
    occurs = union > 0
    iou = right[occurs] / union[occurs]
    return {"miou": iou.mean().item(), "pixel_accuracy": (right.sum() / table.sum()).item()}


def _size(height: int, width: int, short_side: int, scale: float) -> tuple[int, int]:
    side = short_side * scale
    factor = min(side / min(height, width), _LONG_SIDE * side / max(height, width))
    return max(1, round(height * factor)), max(1, round(width * factor))


def _resized(
    samples: Sequence[tuple[Tensor, Tensor]], short_side: int, scales: list[float]
) -> list[tuple[Tensor, Tensor]]:
    """Each sample at its scale. Samples of one size that become another are resized together."""
    from torchvision.transforms.v2 import InterpolationMode, functional

    groups: dict[tuple[int, ...], list[int]] = {}
    for row, ((_, labels), scale) in enumerate(zip(samples, scales, strict=True)):
        height, width = labels.shape
        size = _size(height, width, short_side, scale)
        groups.setdefault((height, width, *size), []).append(row)
    resized: list[tuple[Tensor, Tensor]] = list(samples)
    for (_, _, *size), rows in groups.items():
        images, labels = (torch.stack([samples[row][part] for row in rows]) for part in (0, 1))
        images = functional.resize(images, size, antialias=True)
        nearest = InterpolationMode.NEAREST_EXACT
        labels = functional.resize(labels[:, None], size, interpolation=nearest)[:, 0]
        for row, *pair in zip(rows, images, labels, strict=True):
            resized[row] = pair[0], pair[1]
    return resized


def _cropped(
    samples: list[tuple[Tensor, Tensor]], draws: Draws, crop: int
) -> list[tuple[Tensor, Tensor]]:
    """The crops, smaller where the image is. No class fills one, if ten tries suffice."""
    free = np.array([[max(0, side - crop) for side in labels.shape] for _, labels in samples])
    views = list(samples)
    pending = np.ones(len(samples), bool)
    for tried in range(1, _TRIES + 1):
        shares = np.stack([draws.uniform(0, 1, pending) for _ in range(2)], axis=1)
        corners = (shares.astype(np.float64) * (free + 1)).astype(np.int64)
        for row in np.flatnonzero(pending).tolist():
            image, labels = samples[row]
            top, left = corners[row].tolist()
            if free[row].any():
                window = (slice(top, top + crop), slice(left, left + crop))
                image, labels = image[:, window[0], window[1]], labels[window]
            views[row] = image, labels
            seen = np.bincount(labels.numpy().ravel(), minlength=IGNORED + 1)[:IGNORED]
            if seen.max() < _LARGEST_SHARE * seen.sum():
                pending[row] = False
            elif not free[row].any():  # all other tries would see the same
                draws.skip(2 * (_TRIES - tried), np.arange(len(samples)) == row)
                pending[row] = False
    return views


def _drawn_changes(
    draws: Draws, name: str, low: float, high: float
) -> Callable[[int, Tensor], Tensor]:
    """A change of colour in half of the images, each by its own factor.

    The numbers are drawn as by torchvision's RandomApply of a ColorJitter, and its function
    adjust_<name>_image does the work.

    Returns:
        What changes the image of a row, uint8 [3, H, W], where it is to be changed.
    """
    from torchvision.transforms.v2 import functional

    changed = draws.uniform(0, 1) < 0.5
    draws.skip(3, changed)  # an order of four changes, of which there is only one
    factors, chosen = draws.uniform(low, high, changed).tolist(), changed.tolist()
    adjust = getattr(functional, f"adjust_{name}_image")

    def change(row: int, image: Tensor) -> Tensor:
        return adjust(image, factors[row]) if chosen[row] else image

    return change
