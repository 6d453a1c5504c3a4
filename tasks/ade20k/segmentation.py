"""Semantic segmentation: evaluated images, losses and metrics, for any model and any data."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = 255
"""The label of unlabelled pixels, which no loss and no metric counts."""

_LONG_SIDE = 4
"""Largest ratio of the longer side to `short_side`; images beyond it are resized to it."""

_MEAN, _STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
"""Mean and standard deviation of ImageNet's pixels, with which public backbones are trained."""


class Samples(Protocol):
    """Images, uint8 [3, H, W] of any size, with their labels, uint8 [H, W]: class or IGNORED."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]: ...


def whole(image: Tensor, short_side: int) -> Tensor:
    """Return an image as it is evaluated: resized to `short_side` pixels at its shorter side, and
    normalized, fp32 [3, H, W]."""
    from torchvision.transforms.v2 import functional as transforms

    size = size_at(image.shape[1], image.shape[2], short_side, 1.0)
    return normalized(transforms.resize(image, list(size), antialias=True))


def size_at(height: int, width: int, short_side: int, scale: float) -> tuple[int, int]:
    """Return the height and width of an image at a scale of `short_side`."""
    side = short_side * scale
    factor = min(side / min(height, width), _LONG_SIDE * side / max(height, width))
    return max(1, round(height * factor)), max(1, round(width * factor))


def normalized(image: Tensor) -> Tensor:
    """Normalize pixels from 0 to 255, [..., 3, H, W], to ImageNet's mean and standard deviation.
    Returns fp32 of the same shape."""
    mean, std = torch.tensor(_MEAN)[:, None, None], torch.tensor(_STD)[:, None, None]
    return image.to(torch.float32, copy=True).sub_(mean).div_(std)


def enlarged(logits: Tensor, size: Sequence[int]) -> Tensor:
    """Resize logits [B, K, h, w] to `size` (H, W): bilinear, in fp32 even under autocast."""
    with torch.autocast(logits.device.type, enabled=False):
        return F.interpolate(logits.float(), size=tuple(size), mode="bilinear", align_corners=False)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each pixel in nats, [B, H, W]; 0 where there is no label.

    Args:
        logits: fp32 [B, K, H, W].
        labels: uint8 [B, H, W].
    """
    # The caller adds them, because reduction="sum" adds in no fixed order on a GPU.
    with torch.autocast(logits.device.type, enabled=False):
        return F.cross_entropy(logits, labels.long(), ignore_index=IGNORED, reduction="none")


def confusion(predicted: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return the confusion matrix, int64 [K, K]: at [t, p] the labelled pixels of class t that were
    predicted as class p.

    Args:
        predicted: classes, int64 of any shape.
        labels: uint8 of the same shape.
    """
    labelled = labels != IGNORED
    pairs = labels[labelled].long() * num_classes + predicted[labelled]
    return torch.bincount(pairs, minlength=num_classes**2).view(num_classes, num_classes)


def scores(counts: Tensor) -> dict[str, float]:
    """Return the metrics of a confusion matrix of all data: "miou" and "pixel_accuracy", 0 to 1.

    The mean IoU is over the classes that occur in labels or predictions, as in mmsegmentation.
    """
    table = counts.cpu().double()
    right = table.diagonal()
    union = table.sum(0) + table.sum(1) - right
    occurs = union > 0
    iou = right[occurs] / union[occurs]
    return {"miou": iou.mean().item(), "pixel_accuracy": (right.sum() / table.sum()).item()}
