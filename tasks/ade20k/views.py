"""Random views of labelled images: a scale, a crop in which no class has too large a share, a flip,
and changes of colour.

Augmentation is mmsegmentation's for ADE20K (configs/_base_/datasets/ade20k.py), with its
PhotoMetricDistortion. Where that draws whole levels and degrees, amounts are continuous here.
"""

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tasks.ade20k.segmentation import IGNORED, normalized, size_at
from tasks.shared.resampling import resized, weights

Pair = tuple[Tensor, Tensor]
"""An image, uint8 [3, H, W], and its labels, uint8 [H, W]; or a batch of them of one size."""

_TRIES = 10
_LARGEST_SHARE = 0.75
"""Largest share of one class in a crop. The crop of the last try is taken as it is."""

_BRIGHTNESS = 32
"""Levels that are added, at most; of 255."""
_FACTORS = (0.5, 1.5)
"""Of contrast and of saturation."""
_HUE = 18 / 180
"""Largest turn, as a share of the circle."""
_CHANGES = 4
COLOUR_DRAWS = 2 * _CHANGES + 1
"""Random numbers of `distorted`: whether each change is made, how much, and in which order."""


class Views:
    """Makes random views.

    Args:
        crop: side of the views, in pixels. Where an image does not fill its view, the view has the
            mean colour and no label.
        short_side: shorter side of an image at scale 1, in pixels.
        scales: smallest and largest scale.
    """

    draws = 2 + 2 * _TRIES + COLOUR_DRAWS
    """Random numbers that a view takes."""

    def __init__(self, crop: int, short_side: int, scales: tuple[float, float]) -> None:
        self.crop, self.short_side, self.scales = crop, short_side, scales

    def __call__(self, pairs: Pair | list[Pair], draws: np.ndarray) -> Pair:
        """Return views of B samples: normalized, fp32 [B, 3, crop, crop], and their labels, uint8
        [B, crop, crop].

        Args:
            pairs: a batch of one size, or B pairs of any sizes, which are cut one by one; no pixel
                differs by more than rounding.
            draws: from 0 to below 1, float64 [B, `draws`].
        """
        if isinstance(pairs, list):
            cut = [self._one(*pair, row) for pair, row in zip(pairs, draws, strict=True)]
            images, labels, filled = (torch.stack(part) for part in zip(*cut, strict=True))
        else:
            images, labels, filled = self._batch(*pairs, draws)
        images = distorted(images.float(), draws[:, -COLOUR_DRAWS:])
        return normalized(images).mul_(filled[:, None]), labels

    def _size(self, height: int, width: int, draw: float) -> tuple[int, int]:
        low, high = self.scales
        return size_at(height, width, self.short_side, low + (high - low) * draw)

    def _one(self, image: Tensor, labels: Tensor, draws: np.ndarray) -> tuple[Tensor, ...]:
        """Cut one view. Returns it, uint8, its labels, and which of its pixels are filled."""
        from torchvision.transforms import v2

        height, width = labels.shape
        size = list(self._size(height, width, draws[0]))
        image = v2.functional.resize(image, size, antialias=True)
        nearest = v2.InterpolationMode.NEAREST_EXACT
        labels = v2.functional.resize(labels[None], size, interpolation=nearest)[0]
        rows, columns = self._window(labels, draws)
        image, labels = image[:, rows, columns], labels[rows, columns]
        if draws[1] < 0.5:
            image, labels = image.flip(-1), labels.flip(-1)
        border = (0, self.crop - labels.shape[1], 0, self.crop - labels.shape[0])
        filled = F.pad(torch.ones_like(labels), border)
        return F.pad(image, border), F.pad(labels, border, value=IGNORED), filled

    def _window(self, labels: Tensor, draws: np.ndarray) -> tuple[slice, slice]:
        """Choose the rows and columns of a crop: the first of ten tries in which no class has too
        large a share, or else the last."""
        free = np.maximum(np.array(labels.shape) - self.crop, 0)
        tries = _corners(draws[None], free)[: _TRIES if free.any() else 1, 0]
        for corner in tries.tolist():
            rows, columns = (slice(first, first + self.crop) for first in corner)
            if _fit(labels[None, rows, columns].numpy())[0]:
                break
        return rows, columns

    def _batch(self, images: Tensor, labels: Tensor, draws: np.ndarray) -> tuple[Tensor, ...]:
        """Do what `_one` does, to images of one size at once."""
        known = labels.numpy()
        _, height, width = known.shape
        scales = draws[:, 0].tolist()
        sizes = np.array([self._size(height, width, scale) for scale in scales])
        corners = self._windows(known, sizes, draws)
        rows = self._places(sizes[:, 0], corners[:, 0])
        columns = self._places(sizes[:, 1], corners[:, 1], draws[:, 1] < 0.5)
        seen, filled = _seen(known, sizes, rows, columns)
        down = _chosen_weights(sizes[:, 0], height, rows)
        right = _chosen_weights(sizes[:, 1], width, columns)
        cut = resized(images, down, right).round_()
        return cut, torch.from_numpy(seen), torch.from_numpy(filled)

    def _windows(self, labels: np.ndarray, sizes: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Choose the corner of each crop as `_window` does, int64 [B, 2]."""
        free = np.maximum(sizes - self.crop, 0)
        tries = _corners(draws, free)
        found, left = tries[0].copy(), np.flatnonzero(free.any(1))
        for corners in tries:
            if not len(left):
                break
            found[left] = corners[left]
            places = (self._places(sizes[left, axis], found[left, axis]) for axis in (0, 1))
            left = left[~_fit(_seen(labels[left], sizes[left], *places)[0])]
        return found

    def _places(
        self, size: np.ndarray, corner: np.ndarray, mirrored: np.ndarray | None = None
    ) -> np.ndarray:
        """Return along a side which pixel of the resized image each one of the view shows, int64
        [B, crop]; one beyond the last where it shows none."""
        pixels, length = np.arange(self.crop), np.minimum(size, self.crop)[:, None]
        order = (
            pixels if mirrored is None else np.where(mirrored[:, None], length - 1 - pixels, pixels)
        )
        return np.where(pixels < length, corner[:, None] + order, size[:, None])


def _corners(draws: np.ndarray, free: np.ndarray) -> np.ndarray:
    """Return the corner of each try's crop, int64 [tries, B, 2]; `free` is the room, [B, 2]."""
    places = draws[:, 2 : 2 + 2 * _TRIES].reshape(-1, _TRIES, 2).swapaxes(0, 1)
    return np.floor(places * (free + 1)).astype(np.int64)


def _fit(labels: np.ndarray) -> np.ndarray:
    """Whether no class has too large a share of crops, uint8 [B, h, w]."""
    number = len(labels)
    at = labels.reshape(number, -1) + (np.arange(number) * (IGNORED + 1))[:, None]
    counts = np.bincount(at.ravel(), minlength=number * (IGNORED + 1))
    counts = counts.reshape(number, -1)[:, :IGNORED]
    return counts.max(1) < _LARGEST_SHARE * counts.sum(1)


def _seen(
    labels: np.ndarray, sizes: np.ndarray, rows: np.ndarray, columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the labels at these rows and columns of the resized images, uint8 [B, crop, crop], and
    which pixels there are. The nearest pixel of the original tells the label."""
    sources, there = [], []
    for axis, places in enumerate((rows, columns)):
        size, whole = sizes[:, axis, None], labels.shape[1 + axis]
        scale = (whole / size).astype(np.float32)  # torchvision's precision, which decides ties
        nearest = ((places.astype(np.float32) + np.float32(0.5)) * scale).astype(np.int64)
        sources.append(np.minimum(nearest, whole - 1))
        there.append(places < size)
    filled = there[0][:, :, None] & there[1][:, None, :]
    images = np.arange(len(labels))[:, None, None]
    seen = labels[images, sources[0][:, :, None], sources[1][:, None, :]]
    return np.where(filled, seen, np.uint8(IGNORED)), filled


def _chosen_weights(sizes: np.ndarray, whole: int, places: np.ndarray) -> Tensor:
    """Return the weights of these pixels of the resized images, fp32 [B, crop, whole]."""
    chosen = zip(sizes.tolist(), places, strict=True)
    return torch.from_numpy(np.stack([_weights(size, whole)[place] for size, place in chosen]))


@lru_cache(maxsize=1024)
def _weights(size: int, whole: int) -> np.ndarray:
    """Return the weights that resize a side of `whole` pixels, fp32 [size + 1, whole]: after the
    last pixel one that shows nothing."""
    made = weights(torch.zeros(1), torch.tensor([whole]), size, whole, "bilinear")[0]
    return F.pad(made, (0, 0, 0, 1)).numpy()


def distorted(images: Tensor, draws: np.ndarray) -> Tensor:
    """Change colours as mmsegmentation's PhotoMetricDistortion: each change with probability 1/2,
    clipped to 0 and 255. Brightness adds; contrast multiplies, before or after the others;
    saturation multiplies and hue turns in HSV.

    Args:
        images: levels from 0 to 255, fp32 [B, 3, H, W].
        draws: from 0 to below 1, float64 [B, `COLOUR_DRAWS`].
    """
    amounts = torch.from_numpy(draws[:, _CHANGES:-1]).float()[..., None, None, None].unbind(1)
    made = torch.from_numpy(draws < 0.5)
    low, high = _FACTORS

    def multiplied(images: Tensor, chosen: Tensor) -> Tensor:
        factor = torch.where(chosen[:, None, None, None], low + (high - low) * amounts[1], 1.0)
        return (images * factor).clamp_(0, 255)

    shift = _BRIGHTNESS * (2 * amounts[0] - 1) * made[:, 0, None, None, None]
    images = multiplied((images + shift).clamp_(0, 255), made[:, 1] & made[:, -1])
    for number, change in ((2, _saturated), (3, _turned)):
        own = made[:, number].nonzero()[:, 0]
        images[own] = change(images[own], amounts[number][own])
    return multiplied(images, made[:, 1] & ~made[:, -1])


def _saturated(images: Tensor, draw: Tensor) -> Tensor:
    """Multiply the saturation of HSV, 1 − min/max, up to 1. The largest channel stays, and the
    others' distances from it are multiplied."""
    low, high = _FACTORS
    value, least = images.amax(1, keepdim=True), images.amin(1, keepdim=True)
    factor = torch.minimum(low + (high - low) * draw, value / (value - least))
    return value - (value - images) * factor.nan_to_num_(1.0)


def _turned(images: Tensor, draw: Tensor) -> Tensor:
    """Turn the hue of HSV."""
    value, least = images.amax(1, keepdim=True), images.amin(1, keepdim=True)
    chroma = value - least
    red, green, blue = images.split(1, 1)
    # In sixths of the circle, from red over green to blue.
    sector = torch.where(
        value == red,
        (green - blue) / chroma,
        torch.where(value == green, 2 + (blue - red) / chroma, 4 + (red - green) / chroma),
    ).nan_to_num_(0.0)
    start = torch.tensor([5.0, 3.0, 1.0])[:, None, None]
    place = (start + sector + 6 * _HUE * (2 * draw - 1)) % 6
    return value - chroma * torch.minimum(place, 4 - place).clamp_(0, 1)
