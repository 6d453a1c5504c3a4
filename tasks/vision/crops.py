"""Crops of images: random ones for training, central ones for evaluation."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from tasks.shared.resampling import resized, weights

_TRIES = 10
_RATIOS = (3 / 4, 4 / 3)
"""Narrowest and widest shape of a crop, width over height."""
_LARGEST = 64
"""Largest side, in pixels, of images and crops that are resized as a batch: its table has a matrix
for every stretch of a side."""


class RandomCrop:
    """The usual crop for training: of random place, area and shape, resized to size×size.

    Szegedy et al., "Going deeper with convolutions" (2015); the rule is torchvision's
    RandomResizedCrop.

    Args:
        size: side of the result, in pixels.
        smallest: smallest share of the image's area that a crop covers, above 0 and at most 1.
        flip: whether to mirror half of the crops, left to right.
        interpolation: "bilinear" or "bicubic".
    """

    draws = 2 * _TRIES + 3
    """Random numbers that a crop takes."""

    def __init__(self, size: int, smallest: float, flip: bool, interpolation: str) -> None:
        self.size, self.smallest, self.flip = size, smallest, flip
        self.interpolation = interpolation
        self._tables: dict[int, Tensor] = {}

    def __call__(self, images: Tensor | Sequence[Tensor], draws: np.ndarray) -> Tensor:
        """Crop images. Small ones of one size are cropped as a batch, others one by one; no pixel
        differs by more than rounding.

        Args:
            images: uint8 [B, C, H, W], or B images, uint8 [C, H, W], of any sizes.
            draws: from 0 to below 1, float64 [B, `draws`].
        Returns:
            uint8 [B, C, size, size].
        """
        if isinstance(images, Tensor) and max(*images.shape[2:], self.size) <= _LARGEST:
            return self._batch(images, draws)
        return torch.stack([self._one(image, draws[n : n + 1]) for n, image in enumerate(images)])

    def boxes(self, draws: np.ndarray, height: int, width: int) -> np.ndarray:
        """Return the crops of images of this size: top, left, height and width, int64 [4, B]."""
        areas = height * width * (self.smallest + (1 - self.smallest) * draws[:, :_TRIES])
        low, high = map(math.log, _RATIOS)
        ratios = np.exp(low + (high - low) * draws[:, _TRIES : 2 * _TRIES])
        heights, widths = np.rint(np.sqrt(areas / ratios)), np.rint(np.sqrt(areas * ratios))
        fits = (heights >= 1) & (heights <= height) & (widths >= 1) & (widths <= width)
        rows, chosen = np.arange(len(draws)), fits.argmax(1)  # the first try that fits
        sides = np.stack([heights[rows, chosen], widths[rows, chosen]])
        none = ~fits.any(1)
        if none.any():  # as much as has an allowed shape
            narrowest, widest = _RATIOS
            sides[0, none] = min(height, round(width / narrowest))
            sides[1, none] = min(width, round(height * widest))
        free = np.array([[height], [width]]) - sides
        corners = np.where(none, free // 2, np.floor(draws[:, -3:-1].T * (free + 1)))
        return np.concatenate([corners, sides]).astype(np.int64)

    def _mirrored(self, draws: np.ndarray) -> np.ndarray:
        return draws[:, -1] < (0.5 if self.flip else 0)

    def _batch(self, images: Tensor, draws: np.ndarray) -> Tensor:
        high, wide = images.shape[2:]
        boxes = torch.from_numpy(self.boxes(draws, high, wide))
        top, left, height, width = boxes
        down = self._table(high)[top * high + height - 1]
        right = self._table(wide)[left * wide + width - 1]
        mirrored = torch.from_numpy(self._mirrored(draws))
        if self.flip:
            right = torch.where(mirrored[:, None, None], right.flip(1), right)
        return resized(images, down, right).round_().to(torch.uint8)

    def _table(self, whole: int) -> Tensor:
        """The weights of every stretch of a side: those from pixel `first` on, `length` long, are
        at first · whole + length − 1."""
        if whole not in self._tables:
            first = torch.arange(whole).repeat_interleave(whole)
            length = torch.arange(1, whole + 1).repeat(whole)
            made = weights(first, length, self.size, whole, self.interpolation)
            self._tables[whole] = made
        return self._tables[whole]

    def _one(self, image: Tensor, draws: np.ndarray) -> Tensor:
        from torchvision.transforms import v2

        how, side = v2.InterpolationMode(self.interpolation), [self.size, self.size]
        box = self.boxes(draws, *image.shape[1:])[:, 0].tolist()
        crop = v2.functional.resized_crop(image, *box, side, interpolation=how, antialias=True)
        return crop.flip(-1) if self._mirrored(draws)[0] else crop


def central_crop(size: int, resize: int, interpolation: str) -> Callable[[Tensor], Tensor]:
    """Return the crop for evaluation: resize the shorter side to `resize`, then keep the central
    size×size pixels. It takes uint8 [..., C, H, W]."""
    from torchvision.transforms import v2

    how = v2.InterpolationMode(interpolation)
    return v2.Compose([v2.Resize(resize, interpolation=how, antialias=True), v2.CenterCrop(size)])
