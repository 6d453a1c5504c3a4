"""Semantic segmentation, whatever the model and the data: augmentation and metrics.

Augmentation is mmsegmentation's for ADE20K (configs/_base_/datasets/ade20k.py): a random scale, a
crop that no class fills, a flip, and changes of colour.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = 255
"""The label of pixels that have none: no loss and no metric counts them."""

_TRIES = 10
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
    image: Tensor, labels: Tensor, crop: int, short_side: int, scales: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """A random view of a sample, drawn from PyTorch's CPU generator.

    Args:
        image, labels: of one sample, see `Samples`.
        crop: side of the view, in pixels. What the image does not fill has the mean colour and
            no label.
        short_side: of the image at scale 1, in pixels.
        scales: smallest and largest.
    Returns:
        The normalized image, fp32 [3, crop, crop], and labels, uint8 [crop, crop].
    """
    low, high = scales
    image, labels = _resized(image, labels, short_side, low + (high - low) * _uniform())
    image, labels = _cropped(image, labels, crop)
    if _uniform() < 0.5:
        image, labels = image.flip(-1), labels.flip(-1)
    image = normalized(_colours()(image))
    below, beside = crop - labels.shape[0], crop - labels.shape[1]
    if below or beside:
        image = F.pad(image, (0, beside, 0, below))  # 0 is the mean
        labels = F.pad(labels, (0, beside, 0, below), value=IGNORED)
    return image, labels.contiguous()


def whole(image: Tensor, short_side: int) -> Tensor:
    """A whole image as it is evaluated: its short side resized, its shape kept; normalized."""
    from torchvision.transforms.v2 import functional as transforms

    size = _size(image.shape[1], image.shape[2], short_side, 1.0)
    return normalized(transforms.resize(image, list(size), antialias=True))


def normalized(image: Tensor) -> Tensor:
    """Pixels from 0 to 255, [3, H, W], with ImageNet's mean at 0 and its deviation at 1; fp32."""
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


def _uniform() -> float:
    return torch.rand(()).item()


def _size(height: int, width: int, short_side: int, scale: float) -> tuple[int, int]:
    side = short_side * scale
    factor = min(side / min(height, width), _LONG_SIDE * side / max(height, width))
    return max(1, round(height * factor)), max(1, round(width * factor))


def _resized(image: Tensor, labels: Tensor, short_side: int, scale: float) -> tuple[Tensor, Tensor]:
    from torchvision.transforms.v2 import functional as transforms

    size = list(_size(labels.shape[0], labels.shape[1], short_side, scale))
    nearest = transforms.InterpolationMode.NEAREST_EXACT
    image = transforms.resize(image, size, antialias=True)
    return image, transforms.resize(labels[None], size, interpolation=nearest)[0]


def _cropped(image: Tensor, labels: Tensor, crop: int) -> tuple[Tensor, Tensor]:
    """The crop, smaller where the image is. No class fills it, if ten tries suffice."""
    height, width = labels.shape
    for _ in range(_TRIES):
        top = int(_uniform() * (max(0, height - crop) + 1))
        left = int(_uniform() * (max(0, width - crop) + 1))
        window = (slice(top, top + crop), slice(left, left + crop))
        seen = torch.bincount(labels[window].flatten(), minlength=IGNORED + 1)[:IGNORED]
        if seen.max() < _LARGEST_SHARE * seen.sum():
            break
    return image[:, window[0], window[1]], labels[window]


@cache
def _colours() -> Any:
    """Brightness, contrast, saturation and hue, each changed in half of the images."""
    from torchvision.transforms import v2

    # 32 levels of 255, factors from 0.5 to 1.5, and 18 of 180 degrees (mmsegmentation).
    changes: list[dict[str, Any]] = [
        {"brightness": 0.125},
        {"contrast": 0.5},
        {"saturation": 0.5},
        {"hue": 0.1},
    ]
    return v2.Compose([v2.RandomApply([v2.ColorJitter(**change)], 0.5) for change in changes])
