"""Semantic segmentation: augmentation and metrics, for any model and any data.

Augmentation is mmsegmentation's for ADE20K (configs/_base_/datasets/ade20k.py): a random scale, a
crop in which no class has too large a share, a flip, and changes of colour.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = 255
"""The label of unlabelled pixels, which no loss and no metric counts."""

_TRIES = 10
_LARGEST_SHARE = 0.75
"""Largest share of one class in a crop. The crop of the last try is taken as it is."""

_LONG_SIDE = 4
"""Largest ratio of the longer side to `short_side`; images beyond it are resized to it."""

_MEAN, _STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
"""Mean and standard deviation of ImageNet's pixels, with which public backbones are trained."""


_COLOURS: tuple[dict[str, float], ...] = (
    {"brightness": 0.125},
    {"contrast": 0.5},
    {"saturation": 0.5},
    {"hue": 0.1},
)
"""Changes of colour in their order, as arguments of torchvision's ColorJitter. The ranges are
mmsegmentation's: up to 32 of 255 levels of brightness, and up to 18 of 180 degrees of hue."""

View = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes an image with its labels, see `Samples`, and draws from PyTorch's global CPU generator.
Returns a normalized view, fp32 [3, crop, crop], and its labels, uint8 [crop, crop]."""


class Samples(Protocol):
    """Images, uint8 [3, H, W] of any size, with their labels, uint8 [H, W]: class or IGNORED."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]: ...


def augmentation(crop: int, short_side: int, scales: tuple[float, float]) -> View:
    """Return the function that makes a random view of a sample.

    Args:
        crop: side of the views, in pixels. Where an image does not fill its view, the view has the
            mean colour and no label.
        short_side: shorter side of an image at scale 1, in pixels.
        scales: smallest and largest scale.
    """
    from torchvision.transforms import v2

    changes = [v2.RandomApply([v2.ColorJitter(**change)], p=0.5) for change in _COLOURS]

    def view(image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.empty(()).uniform_(*scales).item()
        size = list(_size(labels.shape[0], labels.shape[1], short_side, scale))
        image = v2.functional.resize(image, size, antialias=True)
        nearest = v2.InterpolationMode.NEAREST_EXACT
        labels = v2.functional.resize(labels[None], size, interpolation=nearest)[0]
        rows, columns = _window(labels, crop)
        image, labels = image[:, rows, columns], labels[rows, columns]
        if torch.rand(()) < 0.5:
            image, labels = image.flip(-1), labels.flip(-1)
        for change in changes:
            image = change(image)
        border = (0, crop - labels.shape[1], 0, crop - labels.shape[0])
        return F.pad(normalized(image), border), F.pad(labels, border, value=IGNORED)

    return view


def whole(image: Tensor, short_side: int) -> Tensor:
    """Return an image as it is evaluated: resized to `short_side` pixels at its shorter side, and
    normalized, fp32 [3, H, W]."""
    from torchvision.transforms.v2 import functional as transforms

    size = _size(image.shape[1], image.shape[2], short_side, 1.0)
    return normalized(transforms.resize(image, list(size), antialias=True))


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


def _size(height: int, width: int, short_side: int, scale: float) -> tuple[int, int]:
    side = short_side * scale
    factor = min(side / min(height, width), _LONG_SIDE * side / max(height, width))
    return max(1, round(height * factor)), max(1, round(width * factor))


def _window(labels: Tensor, crop: int) -> tuple[slice, slice]:
    """Choose the rows and columns of a crop: the first of ten tries in which no class has too large
    a share, or else the last."""
    free = [max(0, side - crop) for side in labels.shape]
    for _ in range(_TRIES if any(free) else 1):
        corner = [int(torch.randint(most + 1, ())) for most in free]
        rows, columns = (slice(first, first + crop) for first in corner)
        counts = labels[rows, columns].flatten().bincount(minlength=IGNORED + 1)[:IGNORED]
        if counts.max() < _LARGEST_SHARE * counts.sum():
            break
    return rows, columns
