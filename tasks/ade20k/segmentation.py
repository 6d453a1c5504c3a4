"""Semantic segmentation: augmentation and metrics, for any model and any data.

Augmentation is mmsegmentation's for ADE20K (configs/_base_/datasets/ade20k.py): a random scale, a
crop in which no class has too large a share, a flip, and changes of colour.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tasks.shared.randomness import Draws

IGNORED = 255
"""The label of unlabelled pixels, which no loss and no metric counts."""

_TRIES = 10
VIEW_DRAWS = 1 + 2 * _TRIES + 1 + 4 * 5
"""Words of 32 bits that `augmented` draws at most for one sample."""
_LARGEST_SHARE = 0.75
"""Largest share of one class in a crop. The crop of the last try is taken as it is."""

_AT_ONCE = 64
"""Number of images that are processed at once, few enough to stay in the processor's cache."""

_LONG_SIDE = 4
"""Largest ratio of the longer side to `short_side`; images beyond it are resized to it."""

_MEAN, _STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
"""Mean and standard deviation of ImageNet's pixels, with which public backbones are trained."""


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
    """Make a random view of each sample.

    Args:
        samples: B images with their labels, see `Samples`.
        draws: B rows of at least `VIEW_DRAWS` words.
        crop: side of the views, in pixels. Where an image does not fill its view, the view has the
            mean colour and no label.
        short_side: shorter side of an image at scale 1, in pixels.
        scales: smallest and largest scale.
    Returns:
        The normalized views, fp32 [B, 3, crop, crop], and their labels, uint8 [B, crop, crop].
    """
    low, high = scales
    scale = low + (high - low) * draws.uniform(0, 1).astype(np.float64)
    groups = _resized(samples, short_side, scale.tolist())
    corners = _corners(groups, draws, crop)
    flipped = draws.uniform(0, 1) < 0.5
    pixels = np.zeros((len(samples), 4, crop, crop), np.uint8)
    pixels[:, 3] = IGNORED
    extents = np.empty((len(samples), 2), np.int64)
    for group in groups:
        extents[group.rows] = height, width = group.extent(crop)
        for row, sample in zip(group.rows, group.pixels.numpy(), strict=True):
            top, left = corners[row]
            window = sample[:, top : top + height, left : left + width]
            pixels[row, :, :height, :width] = window[:, :, ::-1] if flipped[row] else window
    images, masks = pixels[:, :3].copy(), pixels[:, 3].copy()
    recolour(images, extents, draws)
    views = normalized(torch.from_numpy(images))
    for row in np.flatnonzero((extents < crop).any(axis=1)).tolist():  # 0 is the mean colour
        height, width = extents[row].tolist()
        views[row, :, height:], views[row, :, :, width:] = 0, 0
    return views, torch.from_numpy(masks)


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


@dataclass(frozen=True)
class _Group:
    """Samples of the same size, for which one call of PyTorch is enough."""

    rows: np.ndarray
    """The rows of these samples in the batch, int64 [N]."""
    pixels: Tensor
    """Red, green, blue and label of each pixel, uint8 [N, 4, H, W]."""

    def extent(self, crop: int) -> tuple[int, int]:
        """Return height and width of the part of a crop that these samples fill."""
        height, width = self.pixels.shape[2:]
        return min(crop, height), min(crop, width)


def _resized(
    samples: Sequence[tuple[Tensor, Tensor]], short_side: int, scales: list[float]
) -> list[_Group]:
    """Resize each sample to its scale. Samples of equal old and new size are resized together."""
    from torchvision.transforms.v2 import functional

    sizes: dict[tuple[int, ...], list[int]] = {}
    for row, ((_, labels), scale) in enumerate(zip(samples, scales, strict=True)):
        height, width = labels.shape
        size = _size(height, width, short_side, scale)
        sizes.setdefault((height, width, *size), []).append(row)
    groups = []
    for (_, _, *wanted), rows in sizes.items():
        images, labels = (torch.stack([samples[row][part] for row in rows]) for part in (0, 1))
        images = functional.resize(images, wanted, antialias=True)
        for axis in (1, 2):
            labels = labels.index_select(axis, _nearest(labels.shape[axis], wanted[axis - 1]))
        groups.append(_Group(np.array(rows), torch.cat([images, labels[:, None]], dim=1)))
    return groups


@lru_cache(maxsize=256)
def _nearest(before: int, after: int) -> Tensor:
    """Return the indices that nearest-exact interpolation takes from an axis, int64 [after]."""
    places = torch.arange(before, dtype=torch.float32).view(1, 1, -1)
    return F.interpolate(places, size=after, mode="nearest-exact").flatten().long()


def _corners(groups: list[_Group], draws: Draws, crop: int) -> np.ndarray:
    """Choose where each sample is cropped: the first of ten tries in which no class has too large a
    share, or else the last.

    Returns:
        Top and left, int64 [B, 2].
    """
    count = sum(len(group.rows) for group in groups)
    sides = np.empty((count, 2), np.int64)
    for group in groups:
        sides[group.rows] = group.pixels.shape[2:]
    free = (sides - crop).clip(0)
    # All labels in one array, at least as large as a crop.
    labels = np.full((count, *np.maximum(sides.max(axis=0), crop)), IGNORED, np.uint8)
    for group in groups:
        height, width = group.pixels.shape[2:]
        labels[group.rows, :height, :width] = group.pixels[:, 3].numpy()
    crops = np.lib.stride_tricks.sliding_window_view(labels, (crop, crop), axis=(1, 2))
    corners = np.zeros((count, 2), np.int64)
    pending = np.arange(count)
    for tried in range(1, _TRIES + 1):
        chosen = np.isin(np.arange(count), pending)
        shares = np.stack([draws.uniform(0, 1, chosen) for _ in range(2)], axis=1)
        corners[pending] = (shares.astype(np.float64) * (free + 1)).astype(np.int64)[pending]
        filled = [_is_filled(crops[some, *corners[some].T]) for some in _parts(pending)]
        pending = pending[np.concatenate(filled)]
        # Where only one crop is possible, all further tries would choose it again.
        single = ~free[pending].any(axis=1)
        draws.skip(2 * (_TRIES - tried), np.isin(np.arange(count), pending[single]))
        pending = pending[~single]
        if not len(pending):
            break
    return corners


def _is_filled(labels: np.ndarray) -> np.ndarray:
    """Return whether one class has too large a share of a crop: bool [N] for labels [N, H, W]."""
    places = labels.reshape(len(labels), -1) + 256 * np.arange(len(labels))[:, None]
    counts = np.bincount(places.ravel(), minlength=256 * len(labels)).reshape(-1, 256)
    counts = counts[:, :IGNORED]
    filled: np.ndarray = counts.max(axis=1) >= _LARGEST_SHARE * counts.sum(axis=1)
    return filled


def recolour(images: np.ndarray, extents: np.ndarray, draws: Draws) -> None:
    """Change brightness, contrast, saturation and hue in place, each in half of the images.

    The random numbers and the pixels are those of torchvision's RandomApply of one ColorJitter for
    each change. All images that have the same change are changed at once.

    Args:
        images: uint8 [B, 3, H, W]; changed in place.
        extents: number of rows and columns of each image that hold its pixels, int64 [B, 2]. Beyond
            them, at the bottom and at the right, the image is 0, and afterwards it has no meaning.
        draws: B rows of random words.
    """
    for change, low, high in _COLOURS:
        changed = draws.uniform(0, 1) < 0.5
        draws.skip(3, changed)  # torchvision draws an order of four changes, even for one
        factors = draws.uniform(low, high, changed)
        for some in _parts(np.flatnonzero(changed)):
            each = torch.from_numpy(factors[some])[:, None, None]
            images[some] = change(torch.from_numpy(images[some]), each, extents[some]).numpy()


def _parts(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Divide rows into parts of at most `_AT_ONCE`."""
    for start in range(0, len(rows), _AT_ONCE):
        yield rows[start : start + _AT_ONCE]


# Each change takes pixels, uint8 [N, 3, H, W], factors, fp32 [N, 1, 1], extents, int64 [N, 2],
# and returns pixels, uint8 [N, 3, H, W].


def _brighter(pixels: Tensor, factors: Tensor, extents: np.ndarray) -> Tensor:
    return (pixels * factors[:, None]).clamp_(0, 255).byte()


def _contrasted(pixels: Tensor, factors: Tensor, extents: np.ndarray) -> Tensor:
    # Pixels that an image does not fill are still 0, and add nothing to the sum.
    grey, numels = _grey(pixels), torch.from_numpy(extents.prod(axis=1))
    return _blended(pixels, (grey.flatten(1).sum(dim=1) / numels)[:, None, None], factors)


def _saturated(pixels: Tensor, factors: Tensor, extents: np.ndarray) -> Tensor:
    return _blended(pixels, _grey(pixels), factors)


def _turned(pixels: Tensor, factors: Tensor, extents: np.ndarray) -> Tensor:
    """Rotate the hue of each pixel by a share of the circle."""
    colours = pixels.float().mul_(1 / 255)
    red, green, blue = colours.unbind(1)
    value = torch.maximum(torch.maximum(red, green), blue)
    span = value - torch.minimum(torch.minimum(red, green), blue)
    # Levels are 1/255 apart, so clamping changes zeros only, and those divide zeros.
    saturation = span / value.clamp(min=1e-3)
    away = (value[:, None] - colours).div_(span.clamp(min=1e-3)[:, None])
    from_red, from_green, from_blue = away.unbind(1)
    hue = torch.where(value == green, from_red + 2 - from_blue, from_green + 4 - from_red)
    hue = torch.where(value == red, from_blue - from_green, hue)
    hue = _fraction(hue * (1 / 6) + 1)
    sixths = _fraction(hue + factors) * 6
    sector = sixths.floor()
    inside = saturation * (sixths - sector)
    pale = 1 - saturation
    falling, rising, least = (
        (share * value).clamp_(0, 1) for share in (1 - inside, inside + pale, pale)
    )
    levels = torch.stack([value, least, falling, rising], dim=1)
    # PyTorch's index_select takes three times as long.
    order = np.take(_SECTORS, sector.long().numpy(), axis=1, mode="clip")
    return levels.gather(1, torch.from_numpy(order).transpose(0, 1)).mul_(256 - 1e-3).byte()


def _fraction(numbers: Tensor) -> Tensor:
    return numbers - numbers.floor()


def _grey(pixels: Tensor) -> Tensor:
    """Return the grey levels of pixels: whole numbers from 0 to 255, fp32 [N, H, W]."""
    red, green, blue = pixels.unbind(1)
    return red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114).floor_()


def _blended(pixels: Tensor, others: Tensor, factors: Tensor) -> Tensor:
    """Return pixels · factor + others · (1 − factor), clipped to 0 and 255; others are grey."""
    # The sum is rounded once, as PyTorch rounds it where the factor is a single number.
    sums = (pixels * factors[:, None]).double() + (others.double() * (1 - factors).double())[
        :, None
    ]
    return sums.float().clamp_(0, 255).byte()


_SECTORS = np.array([[0, 2, 1, 1, 3, 0, 0], [3, 0, 0, 2, 1, 1, 3], [1, 1, 3, 0, 0, 2, 1]])
"""Which level red, green and blue have in each sixth of the circle of hues, with the first repeated
at the end: 0 is the value, 1 the least, 2 the falling and 3 the rising level."""

_COLOURS = (
    (_brighter, 0.875, 1.125),
    (_contrasted, 0.5, 1.5),
    (_saturated, 0.5, 1.5),
    (_turned, -0.1, 0.1),
)
"""Changes of colour in their order, and the ranges of their factors. They are mmsegmentation's: up
to 32 of 255 levels of brightness, factors from 0.5 to 1.5, and up to 18 of 180 degrees of hue."""
