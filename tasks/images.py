"""Pictures for classification: where they come from, and what training does to them."""

import hashlib
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

PARTS = ("train", "val")

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's colours, from 0 to 1: the usual constants, used for all pictures."""

_DIGITS_VAL = 5
"""One digit in so many validates."""

Augment = Callable[[Tensor], Tensor]
"""uint8 [3, height, width] to uint8 [3, size, size], by PyTorch's global CPU generator."""


class Images(Protocol):
    """A set of labelled pictures in two parts, "train" and "val"."""

    counts: dict[str, np.ndarray]
    """Pictures of each class, by part. Pictures are numbered through, class by class."""

    @property
    def num_classes(self) -> int: ...

    def read(self, part: str, index: int) -> tuple[Tensor, int]:
        """One picture, uint8 [3, height, width] of any size, and its label."""
        ...

    def facts(self) -> dict[str, Any]:
        """Of the data, for the task's fingerprint."""
        ...


class Digits:
    """scikit-learn's handwritten digits: 1797 pictures of 8×8, ten classes.

    Of each class every fifth picture validates, in the order of the data set, whatever the seed.
    """

    num_classes = 10

    def __init__(self) -> None:
        from sklearn.datasets import load_digits  # costs a second

        raw = load_digits()
        grey = np.rint(raw.images * (255 / 16)).astype(np.uint8)
        order = [np.flatnonzero(raw.target == label) for label in range(self.num_classes)]
        rows = {
            "train": [np.delete(own, np.s_[::_DIGITS_VAL]) for own in order],
            "val": [own[::_DIGITS_VAL] for own in order],
        }
        self.counts = {part: np.array([len(own) for own in rows[part]]) for part in PARTS}
        self._images, self._labels = {}, {}
        for part in PARTS:
            chosen = np.concatenate(rows[part])
            self._images[part] = torch.from_numpy(grey[chosen])[:, None].expand(-1, 3, -1, -1)
            self._labels[part] = raw.target[chosen]

    def read(self, part: str, index: int) -> tuple[Tensor, int]:
        """See `Images.read`: 8×8 pixels, grey."""
        return self._images[part][index], int(self._labels[part][index])

    def facts(self) -> dict[str, Any]:
        """See `Images.facts`."""
        digest = hashlib.sha256()
        for part in PARTS:
            digest.update(self._images[part].numpy().tobytes() + self._labels[part].tobytes())
        return {"data": "digits", "sha256": digest.hexdigest()}


def random_crop(size: int, smallest: float, flip: bool, interpolation: str) -> list[Augment]:
    """The usual training crop, and a flip from left to right in half of the cases.

    Szegedy et al., "Going deeper with convolutions" (2015): `smallest` to all of the area, an
    aspect ratio of 3/4 to 4/3, resized to size×size.
    """
    from torchvision.transforms import v2

    how = v2.InterpolationMode(interpolation)
    crop = v2.RandomResizedCrop(size, scale=(smallest, 1.0), interpolation=how, antialias=True)
    return [crop, v2.RandomHorizontalFlip()] if flip else [crop]


def central_crop(size: int, resize: int, interpolation: str) -> Augment:
    """What evaluation sees: the shorter side brought to `resize`, the size×size in the middle."""
    from torchvision.transforms import v2

    how = v2.InterpolationMode(interpolation)
    return v2.Compose([v2.Resize(resize, interpolation=how, antialias=True), v2.CenterCrop(size)])


def rand_augment(magnitude: int) -> list[Augment]:
    """Two random operations one after the other, each left out in half of the cases.

    RandAugment (Cubuk et al., 2020) as DeiT takes it from timm, "rand-m9": magnitudes from 0 to
    10, where 10 is a rotation by 30° or a shear by 0.3. The operations are torchvision's: timm's
    also invert and add to dark pixels, posterize to fewer levels, and vary the magnitude a little.
    """
    from torchvision.transforms import v2

    fill = [round(255 * mean) for mean in MEAN]
    how = v2.InterpolationMode.BICUBIC
    one = v2.RandAugment(1, magnitude, num_magnitude_bins=11, interpolation=how, fill=fill)
    # As PIL pictures: tensors are turned and sheared several times slower, and not bicubically.
    return [v2.ToPILImage(), *[v2.RandomApply([one], p=0.5)] * 2, v2.PILToTensor()]


def erasing(chance: float) -> Augment:
    """A random rectangle becomes noise: random erasing, Zhong et al. (2020), by pixel.

    2 to 33 % of the area, an aspect ratio of 0.3 to 3.3. The noise has the colours' mean and
    deviation; what falls outside of 0 to 255 is cut off there.
    """
    from torchvision.transforms import RandomErasing

    def erase(image: Tensor) -> Tensor:
        if torch.rand(()) >= chance:
            return image
        top, left, height, width, noise = RandomErasing.get_params(
            image, scale=(0.02, 1 / 3), ratio=(0.3, 3.3)
        )
        if noise.is_floating_point():  # else ten rectangles in a row did not fit
            mean, std = _moments(torch.device("cpu"))
            colours = (noise * std + mean).clamp_(0, 255).to(torch.uint8)
            image = image.clone()  # it may still be the data set's own
            image[:, top : top + height, left : left + width] = colours
        return image

    return erase


def mixing(rng: np.random.Generator, size: int, mixup: float, cutmix: float) -> Tensor:
    """How much of each pixel stays when a picture is mixed with another one.

    Mixup (Zhang et al., 2018): the same share everywhere, drawn from Beta(mixup, mixup). CutMix
    (Yun et al., 2019): 0 in a square whose share of the area is drawn from Beta(cutmix, cutmix),
    before it is cut off at the edges, and 1 elsewhere. Where both are on, a coin decides. The mean
    is what the picture's own label weighs.

    Args:
        mixup, cutmix: the parameters of the distributions; 0 is off, and one of them is on.
    Returns:
        fp32 [size, size], from 0 to 1.
    """
    if cutmix == 0 or (mixup > 0 and rng.random() < 0.5):
        return torch.full((size, size), rng.beta(mixup, mixup), dtype=torch.float32)
    side = int(size * np.sqrt(1 - rng.beta(cutmix, cutmix)))
    keep = torch.ones(size, size)
    middle = rng.integers(0, size, 2)
    (top, left), (bottom, right) = (middle - side // 2).clip(0), middle + (side + 1) // 2
    keep[top:bottom, left:right] = 0
    return keep


def normalized(images: Tensor) -> Tensor:
    """uint8 [..., 3, H, W] to fp32 with ImageNet's mean and deviation, on the same device."""
    mean, std = _moments(images.device)
    return images.float().sub_(mean).div_(std)


@cache
def _moments(device: torch.device) -> tuple[Tensor, Tensor]:
    """`MEAN` and `STD` on the scale 0 to 255, [3, 1, 1]; kept, as copying them to a GPU waits."""
    mean, std = (255 * torch.tensor(colours).view(3, 1, 1) for colours in (MEAN, STD))
    return mean.to(device), std.to(device)
