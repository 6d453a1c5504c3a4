"""Semantic segmentation, whatever the model and the data: augmentation and metrics.

Augmentation is mmsegmentation's for ADE20K (configs/_base_/datasets/ade20k.py): a random scale, a
crop that no class fills, a flip, and changes of colour.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tasks.randomness import Draws

IGNORED = 255
"""The label of pixels that have none: no loss and no metric counts them."""

_TRIES = 10
VIEW_DRAWS = 1 + 2 * _TRIES + 1 + 4 * 5
"""Words that `augmented` draws at most for one sample."""
_LARGEST_SHARE = 0.75
"""Largest share of one class in a crop. After ten tries a crop is taken as it is."""

_LONG_SIDE = 4
"""Longest side of an image, in short sides; a longer image is made smaller still."""

_MEAN, _STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
"""Mean and deviation of ImageNet's pixels, with which public backbones are trained."""


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
    images, masks = _cropped(_resized(samples, short_side, scale.tolist()), draws, crop)
    for row in np.flatnonzero(draws.uniform(0, 1) < 0.5).tolist():
        images[row] = images[row].flip(-1)
        masks[row, :, : images[row].shape[2]] = masks[row, :, : images[row].shape[2]].flip(-1)
    found = images[0].new_zeros(len(images), 3, crop, crop)
    for row, image in enumerate(recoloured(images, draws)):
        found[row, :, : image.shape[1], : image.shape[2]] = image
    views = normalized(found)
    for row, image in enumerate(images):
        if image.shape[1] < crop or image.shape[2] < crop:  # 0 is the mean
            views[row, :, image.shape[1] :], views[row, :, :, image.shape[2] :] = 0, 0
    return views, masks


def whole(image: Tensor, short_side: int) -> Tensor:
    """A whole image as it is evaluated: its short side resized, its shape kept; normalized."""
    from torchvision.transforms.v2 import functional as transforms

    size = _size(image.shape[1], image.shape[2], short_side, 1.0)
    return normalized(transforms.resize(image, list(size), antialias=True))


def normalized(image: Tensor) -> Tensor:
    """Pixels from 0 to 255, [..., 3, H, W], with ImageNet's mean at 0 and its deviation at 1.
    Returns fp32 of the same shape."""
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
    from torchvision.transforms.v2 import functional

    groups: dict[tuple[int, ...], list[int]] = {}
    for row, ((_, labels), scale) in enumerate(zip(samples, scales, strict=True)):
        height, width = labels.shape
        size = _size(height, width, short_side, scale)
        groups.setdefault((height, width, *size), []).append(row)
    resized: list[tuple[Tensor, Tensor]] = list(samples)
    for (_, _, *wanted), rows in groups.items():
        images, labels = (torch.stack([samples[row][part] for row in rows]) for part in (0, 1))
        images = functional.resize(images, wanted, antialias=True)
        for axis in (1, 2):
            labels = labels.index_select(axis, _nearest(labels.shape[axis], wanted[axis - 1]))
        for row, *pair in zip(rows, images, labels, strict=True):
            resized[row] = pair[0], pair[1]
    return resized


def _nearest(before: int, after: int) -> Tensor:
    """The places that nearest-exact interpolation takes from an axis, int64 [after]."""
    places = torch.arange(before, dtype=torch.float32).view(1, 1, -1)
    return F.interpolate(places, size=after, mode="nearest-exact").flatten().long()


def _cropped(
    samples: list[tuple[Tensor, Tensor]], draws: Draws, crop: int
) -> tuple[list[Tensor], Tensor]:
    """A crop of each sample that no class fills, if ten tries suffice.

    Returns:
        The images, each as large as the crop or, where the sample is smaller, as that; and their
        labels, uint8 [B, crop, crop], with IGNORED at the right and below of smaller samples.
    """
    free = np.array([[max(0, side - crop) for side in labels.shape] for _, labels in samples])
    images = [image for image, _ in samples]
    masks = np.full((len(samples), crop, crop), IGNORED, np.uint8)
    pending = np.arange(len(samples))
    for tried in range(1, _TRIES + 1):
        chosen = np.isin(np.arange(len(samples)), pending)
        shares = np.stack([draws.uniform(0, 1, chosen) for _ in range(2)], axis=1)
        corners = (shares.astype(np.float64) * (free + 1)).astype(np.int64)
        for row, (top, left) in zip(pending.tolist(), corners[pending].tolist(), strict=True):
            image, labels = samples[row]
            images[row] = image[:, top : top + crop, left : left + crop]
            window = labels.numpy()[top : top + crop, left : left + crop]
            masks[row, : window.shape[0], : window.shape[1]] = window
        places = masks[pending].reshape(len(pending), -1) + 256 * np.arange(len(pending))[:, None]
        counts = np.bincount(places.ravel(), minlength=256 * len(pending)).reshape(-1, 256)
        counts = counts[:, :IGNORED]
        pending = pending[counts.max(axis=1) >= _LARGEST_SHARE * counts.sum(axis=1)]
        # Where there is one crop only, all other tries would find the same.
        single = ~free[pending].any(axis=1)
        draws.skip(2 * (_TRIES - tried), np.isin(np.arange(len(samples)), pending[single]))
        pending = pending[~single]
        if not len(pending):
            break
    return images, torch.from_numpy(masks)


def recoloured(images: list[Tensor], draws: Draws) -> list[Tensor]:
    """Brightness, contrast, saturation and hue, each changed in half of the images.

    Numbers and pixels are those of torchvision's RandomApply of a ColorJitter for each. All images
    that a change concerns are changed at once, as one long row of pixels.

    Args:
        images: uint8 [3, H, W] each, of any sizes.
    """
    rows = [image.flatten(1) for image in images]
    for change, low, high in _COLOURS:
        changed = draws.uniform(0, 1) < 0.5
        draws.skip(3, changed)  # torchvision draws an order of four changes, of which it has one
        factors = torch.from_numpy(draws.uniform(low, high, changed))
        chosen = np.flatnonzero(changed).tolist()
        if chosen:
            sizes = [rows[row].shape[1] for row in chosen]
            each = factors[chosen].repeat_interleave(torch.tensor(sizes))
            pixels = change(torch.cat([rows[row] for row in chosen], dim=1), each, sizes)
            for row, part in zip(chosen, pixels.split(sizes, dim=1), strict=True):
                rows[row] = part
    return [row.view_as(image) for row, image in zip(rows, images, strict=True)]


def _brighter(pixels: Tensor, factors: Tensor, sizes: list[int]) -> Tensor:
    return (pixels * factors).clamp_(0, 255).byte()


def _contrasted(pixels: Tensor, factors: Tensor, sizes: list[int]) -> Tensor:
    means = torch.stack([image.mean() for image in _grey(pixels).split(sizes)])
    return _blended(pixels, means.repeat_interleave(torch.tensor(sizes)), factors)


def _saturated(pixels: Tensor, factors: Tensor, sizes: list[int]) -> Tensor:
    return _blended(pixels, _grey(pixels), factors)


def _turned(pixels: Tensor, factors: Tensor, sizes: list[int]) -> Tensor:
    """The hue of each pixel turned by a share of the circle."""
    colours = pixels.float().mul_(1 / 255)
    low, value = colours.aminmax(dim=0)
    span = value - low
    grey = span == 0
    saturation = span / value.masked_fill(grey, 1)
    red, green, blue = (value - colours) / span.masked_fill(grey, 1)
    hue = torch.where(value == colours[1], red + 2 - blue, green + 4 - red)
    hue = torch.where(value == colours[0], blue - green, hue)
    hue = (hue * (1 / 6) + 1).fmod_(1)
    sixths = (hue + factors).remainder_(1) * 6
    sector = sixths.floor()
    inside = saturation * (sixths - sector)
    pale = 1 - saturation
    falling, rising, least = (
        (share * value).clamp_(0, 1) for share in (1 - inside, inside + pale, pale)
    )
    levels = torch.stack([value, least, falling, rising])
    order = torch.tensor(_SECTORS)[:, sector.long().remainder_(6)]
    return levels.gather(0, order).mul_(256 - 1e-3).byte()


def _grey(pixels: Tensor) -> Tensor:
    """Whole numbers from 0 to 255, fp32 [P], of pixels [3, P]."""
    red, green, blue = pixels
    return red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114).floor_()


def _blended(pixels: Tensor, others: Tensor, factors: Tensor) -> Tensor:
    """pixels · factor + others · (1 − factor), cut off at 0 and 255."""
    # The sum is rounded once, as PyTorch's does where the factor is one number.
    sums = (pixels * factors).double() + others.double() * (1 - factors).double()
    return sums.float().clamp_(0, 255).byte()


_SECTORS = [[0, 2, 1, 1, 3, 0], [3, 0, 0, 2, 1, 1], [1, 1, 3, 0, 0, 2]]
"""For red, green and blue in each sixth of the circle of hues: 0 for the value, 1 for the least, 2
and 3 for the falling and the rising level."""

_COLOURS = (
    (_brighter, 0.875, 1.125),
    (_contrasted, 0.5, 1.5),
    (_saturated, 0.5, 1.5),
    (_turned, -0.1, 0.1),
)
"""Changes of colour, in this order, and the ranges of their factors: mmsegmentation's 32 levels of
255, factors of 0.5 to 1.5, and 18 of 180 degrees."""
