"""Pictures for classification: the sources, and the augmentation of training pictures."""

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tasks.randomness import Draws

if TYPE_CHECKING:
    from torchvision.transforms.v2 import InterpolationMode

PARTS = ("train", "val")

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and deviation of ImageNet's red, green and blue, from 0 to 1; used for all pictures."""

_RATIOS, _CROP_TRIES = (3 / 4, 4 / 3), 10
CROP_DRAWS = 2 * _CROP_TRIES + 3
"""Words that `random_crops` draws at most for one picture."""

_DIGITS_VAL = 5
"""One digit in so many validates."""

Augment = Callable[[Tensor], Tensor]
"""Changes a picture, uint8 [3, size, size]; draws from PyTorch's global CPU generator."""


class Images(Protocol):
    """A set of labelled pictures in two parts, "train" and "val"."""

    counts: dict[str, np.ndarray]
    """Number of pictures of each class, int64 [classes], by part. The pictures of a part are
    numbered from 0, class by class."""

    @property
    def num_classes(self) -> int: ...

    def read(self, part: str, index: int) -> tuple[Tensor, int]:
        """One picture, uint8 [3, height, width] of any size, and its label."""
        ...

    def read_many(self, part: str, indices: np.ndarray) -> tuple[list[Tensor] | Tensor, np.ndarray]:
        """Pictures as `random_crops` takes them, and their labels, int64 [B]."""
        ...

    blockwise: bool
    """Whether pictures lie in memory, so that many batches can be made at once."""

    def facts(self) -> dict[str, Any]:
        """What tells these pictures from others, for `Task.fingerprint`; JSON, hence `Any`."""
        ...


class Digits:
    """scikit-learn's handwritten digits: 1797 pictures of 8×8, ten classes.

    Of each class every fifth picture validates, in the order of the data set, whatever the seed.
    """

    num_classes = 10
    blockwise = True

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

    def read_many(self, part: str, indices: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """See `Images.read_many`: one channel for three alike."""
        return self._images[part][torch.from_numpy(indices), :1], self._labels[part][indices]

    def facts(self) -> dict[str, Any]:
        """See `Images.facts`."""
        digest = hashlib.sha256()
        for part in PARTS:
            digest.update(self._images[part].numpy().tobytes() + self._labels[part].tobytes())
        return {"data": "digits", "sha256": digest.hexdigest()}


def random_crops(
    pictures: Sequence[Tensor] | Tensor,
    draws: Draws,
    size: int,
    smallest: float,
    flip: bool,
    interpolation: str,
) -> Tensor:
    """The usual training crop of each picture, and a flip from left to right of half of them.

    Szegedy et al., "Going deeper with convolutions" (2015): a crop covers `smallest` to all of the
    area, has an aspect ratio of 3/4 to 4/3, and is resized to size×size. Numbers and pixels are
    those of torchvision's RandomResizedCrop and RandomHorizontalFlip under `seeded`; here all
    pictures are cropped at once, which is twenty times faster where they are small.

    Args:
        pictures: uint8, a list of [3, height, width] of any sizes, or one tensor [B, C, height,
            width], where C is 3, or 1 for grey pictures.
        draws: B rows of at least `CROP_DRAWS` words.
    Returns:
        uint8 [B, 3, size, size].
    """
    from torchvision.transforms import v2

    shapes = np.array([picture.shape[1:] for picture in pictures])
    boxes = _crop_boxes(shapes, smallest, draws)
    how, cropped = v2.InterpolationMode(interpolation), torch.empty(0, dtype=torch.uint8)
    sizes, groups = np.unique(boxes[:, 2:], axis=0, return_inverse=True)
    for number, (height, width) in enumerate(sizes.tolist()):
        rows = np.flatnonzero(groups == number)
        tops, lefts = torch.from_numpy(boxes[rows, :2]).unbind(1)
        if isinstance(pictures, Tensor):
            windows = pictures.unfold(2, height, 1).unfold(3, width, 1)
            windows = windows[torch.from_numpy(rows), :, tops, lefts]
        else:
            places = zip(rows.tolist(), tops.tolist(), lefts.tolist(), strict=True)
            windows = torch.stack(
                [pictures[row][:, t : t + height, x : x + width] for row, t, x in places]
            )
        resized = _resized(windows, size, how)
        if not len(cropped):
            cropped = resized.new_empty(len(boxes), *resized.shape[1:])
        cropped[torch.from_numpy(rows)] = resized
    if flip:
        mirrored = torch.from_numpy(draws.uniform(0, 1) < 0.5)
        cropped = torch.where(mirrored.view(-1, 1, 1, 1), cropped.flip(-1), cropped)
    return cropped.expand(-1, 3, -1, -1).contiguous()


def _crop_boxes(shapes: np.ndarray, smallest: float, draws: Draws) -> np.ndarray:
    """Random crops as in torchvision's RandomResizedCrop.make_params.

    Args:
        shapes: heights and widths of the pictures, int64 [B, 2].
        smallest: share of the area that a crop covers at least.
    Returns:
        Top, left, height and width, int64 [B, 4].
    """
    low, high = torch.tensor(_RATIOS).log().tolist()
    heights, widths = shapes.T
    boxes = np.empty((len(shapes), 4), np.int64)
    pending = np.ones(len(shapes), bool)
    for _ in range(_CROP_TRIES):
        area = heights * widths * draws.uniform(smallest, 1.0, pending).astype(np.float64)
        drawn = torch.from_numpy(draws.uniform(low, high, pending)).exp().double().numpy()
        width, height = np.rint(np.sqrt(area * drawn)), np.rint(np.sqrt(area / drawn))
        fits = pending & (width > 0) & (width <= widths) & (height > 0) & (height <= heights)
        boxes[fits, 2], boxes[fits, 3] = height[fits], width[fits]
        pending = pending & ~fits
        if not pending.any():
            break
    found = ~pending
    # Ten tries in vain: all of the picture, or as much as has an allowed aspect ratio.
    (least, most), ratio = _RATIOS, widths / heights
    boxes[pending, 2] = np.where(ratio < least, np.rint(widths / least), heights)[pending]
    boxes[pending, 3] = np.where(ratio > most, np.rint(heights * most), widths)[pending]
    free = shapes - boxes[:, 2:]
    for column in range(2):
        corner = draws.integers(np.where(found, free[:, column] + 1, 1), found)
        boxes[:, column] = np.where(found, corner, free[:, column] // 2)
    return boxes


def _resized(pictures: Tensor, size: int, how: "InterpolationMode") -> Tensor:
    """uint8 [B, C, height, width] to [B, C, size, size]; antialiased."""
    from torchvision.transforms.v2 import functional

    if pictures.shape[1] != 1:
        return functional.resize(pictures, [size, size], interpolation=how, antialias=True)
    # PyTorch is fastest with four channels, side by side in memory. So four grey pictures become
    # the channels of one.
    count, _, *shape = pictures.shape
    packed = F.pad(pictures, (0, 0, 0, 0, 0, 0, 0, -count % 4)).view(-1, 4, *shape)
    packed = packed.contiguous(memory_format=torch.channels_last)
    packed = functional.resize(packed, [size, size], interpolation=how, antialias=True)
    return packed.reshape(-1, 1, size, size)[:count]


def central_crop(size: int, resize: int, interpolation: str) -> Augment:
    """Evaluation's crop: the shorter side becomes `resize`, and the middle size×size is kept."""
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
    """`MEAN` and `STD` on the scale 0 to 255, [3, 1, 1]. Cached: a copy to a GPU would wait."""
    mean, std = (255 * torch.tensor(colours).view(3, 1, 1) for colours in (MEAN, STD))
    return mean.to(device), std.to(device)
