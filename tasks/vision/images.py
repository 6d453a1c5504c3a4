"""Images for classification: what a source gives, and what changes crops of training images."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

PARTS = ("train", "val")

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's red, green and blue, from 0 to 1. All data sets are
normalized with them."""

Augment = Callable[[Tensor], Tensor]
"""Takes and returns an image, uint8 [3, H, W]; draws from PyTorch's global CPU generator."""


class Images(Protocol):
    """A set of labelled images in two parts, "train" and "val"."""

    counts: dict[str, np.ndarray]
    """Number of images of each class, int64 [classes], by part. The images of a part are numbered
    from 0, class by class."""

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes, in the order of their labels."""
        ...

    @property
    def num_classes(self) -> int: ...

    def take(self, part: str, indices: Sequence[int]) -> tuple[Tensor | list[Tensor], Tensor]:
        """Return images and their labels, int64 [B]. The images are uint8 [B, C, height, width]
        where they are held in memory, else B of uint8 [C, height, width] and of any sizes; C is 3,
        or 1 where they are grey."""
        ...

    def facts(self) -> dict[str, object]:
        """Return what identifies these images, for `Task.fingerprint`: values of JSON."""
        ...


def rand_augment(magnitude: int, size: int) -> list[Augment]:
    """Return two random operations, of which each is applied with probability 1/2.

    This is RandAugment (Cubuk et al., 2020) in timm's variant, which DeiT takes:
    "rand-m9-mstd0.5-inc1" with the magnitude 9. The magnitude of each operation is drawn from a
    normal distribution around `magnitude` with deviation 0.5, clipped to 0 and 10, where 10 is a
    rotation by 30° or a shear by 0.3. Translations are up to 0.45 of `size`, in pixels.
    """
    from PIL import Image
    from timm.data.auto_augment import rand_augment_transform  # takes seconds
    from torchvision.transforms import v2

    colours = tuple(round(255 * mean) for mean in MEAN)
    about = {"translate_const": int(0.45 * size), "img_mean": colours}
    about["interpolation"] = Image.Resampling.BICUBIC
    two = rand_augment_transform(f"rand-m{magnitude}-mstd0.5-inc1", about)
    for operation in two.ops:
        if operation.name == "PosterizeIncreasing":
            operation.magnitude_max = 9.99  # at 10 no bit is left, which Pillow refuses

    def augment(picture: Image.Image) -> Image.Image:
        with _others_seeded(int(torch.randint(2**32, ()))):
            return two(picture)

    return [v2.ToPILImage(), augment, v2.PILToTensor()]


@contextmanager
def _others_seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of Python and NumPy, from which timm draws, and restore them."""
    before = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def erasing(chance: float) -> Augment:
    """Return random erasing (Zhong et al., 2020): with probability `chance`, noise replaces the
    pixels of a random rectangle.

    The rectangle has 2 to 33 % of the area and an aspect ratio of 0.3 to 3.3. The noise has mean
    `MEAN` and standard deviation `STD`, and is clipped to 0 and 255.
    """
    from torchvision.transforms import RandomErasing

    def erase(image: Tensor) -> Tensor:
        if torch.rand(()) >= chance:
            return image
        top, left, height, width, noise = RandomErasing.get_params(
            image, scale=(0.02, 1 / 3), ratio=(0.3, 3.3)
        )
        if noise.is_floating_point():  # it is not if ten rectangles in a row did not fit
            mean, std = _moments(torch.device("cpu"))
            colours = (noise * std + mean).clamp_(0, 255).to(torch.uint8)
            image = image.clone()  # because it may be the data set's own tensor
            image[:, top : top + height, left : left + width] = colours
        return image

    return erase


def mixing(rng: np.random.Generator, size: int, mixup: float, cutmix: float) -> Tensor:
    """Draw the weight that each pixel of an image has when the image is mixed with another one.

    Mixup (Zhang et al., 2018): the same weight everywhere, drawn from Beta(mixup, mixup). CutMix
    (Yun et al., 2019): 0 in a square and 1 elsewhere. The square's share of the area is drawn from
    Beta(cutmix, cutmix), before it is clipped at the edges. Where both are on, each is taken with
    probability 1/2. The mean weight is also the weight of the image's own label.

    Args:
        rng: draws the numbers.
        size: side of the image, in pixels.
        mixup, cutmix: parameters of the distributions; 0 turns one off, and one must be on.
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
    """Normalize uint8 [..., 3, H, W] with `MEAN` and `STD`: fp32 on the same device."""
    mean, std = _moments(images.device)
    return images.float().sub_(mean).div_(std)


@cache
def _moments(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return `MEAN` and `STD` on the scale from 0 to 255, fp32 [3, 1, 1] each. They are cached,
    because the host waits for a copy to a GPU."""
    mean, std = (255 * torch.tensor(colours).view(3, 1, 1) for colours in (MEAN, STD))
    return mean.to(device), std.to(device)
