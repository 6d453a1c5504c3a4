"""Images and masks in the layout of ADEChallengeData2016.

    images/training/ADE_train_00000001.jpg        20210 of them
    images/validation/ADE_val_00000001.jpg        2000
    annotations/training/ADE_train_00000001.png   one channel: 0 for unlabelled, else class + 1
    annotations/validation/ADE_val_00000001.png

Zhou et al., "Scene Parsing through ADE20K Dataset" (CVPR 2017).
"""

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from co2.errors import ConfigError, first_line, require
from tasks.shared.pictures import FORMATS

CLASSES = 150
FOLDER = "ADEChallengeData2016"
SPLITS = {"training": 20210, "validation": 2000}
"""Each split of the data set, and how many images it has."""


class BadPair(Exception):
    """An image or a mask that cannot be used; the message is one line that names the file."""


class Pairs:
    """A split of a folder in the layout above, as `tasks.ade20k.segmentation.Samples`. Its files
    are read when a sample is asked for.

    Args:
        folder: holds images/ and annotations/.
        split: "training" or "validation".
        key, value: key of the configuration that chose the folder, and its value, for errors.
        missing: what to do if the folder does not exist; the end of the error's line.
    Raises:
        ConfigError: a folder is missing or empty, or an image has no mask. When a sample is asked
            for: an image or a mask is damaged, they differ in size, or a class is unknown.
    """

    def __init__(self, folder: Path, split: str, key: str, value: str, missing: str) -> None:
        self._key, self._value = key, value
        images, masks = folder / "images" / split, folder / "annotations" / split
        for needed in (images, masks):
            require(needed.is_dir(), key, value, f"{needed}: no such folder; {missing}")
        self._images = listed(images, ".jpg")
        require(bool(self._images), key, value, f"{images}: holds no image (.jpg); {missing}")
        self._masks = [masks / f"{image.stem}.png" for image in self._images]
        there = set(listed(masks, ".png"))
        for image, mask in zip(self._images, self._masks, strict=True):
            require(mask in there, key, value, f"{mask}: is missing, the mask of {image.name}")

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        try:
            return read_pair(self._images[index], self._masks[index])
        except BadPair as bad:
            raise ConfigError(self._key, self._value, str(bad)) from None

    def labels(self, index: int) -> Tensor:
        """Return the labels of a sample, uint8 [H, W], without reading its image."""
        try:
            return _read_mask(self._masks[index])
        except BadPair as bad:
            raise ConfigError(self._key, self._value, str(bad)) from None

    def files(self) -> list[tuple[Path, Path]]:
        """Return the image and the mask of every sample."""
        return list(zip(self._images, self._masks, strict=True))

    def digest(self) -> str:
        """Return the sha256 of all files' names and sizes; to read the files would take minutes."""
        text = hashlib.sha256()
        for file in (*self._images, *self._masks):
            text.update(f"{file.parent.parent.name}/{file.name} {file.stat().st_size}\n".encode())
        return text.hexdigest()


def listed(folder: Path, suffix: str) -> list[Path]:
    """Return the files with this suffix, sorted; hidden ones, which macOS adds, are left out."""
    files = (file for file in folder.iterdir() if file.suffix.lower() == suffix)
    return sorted(file for file in files if not file.name.startswith("."))


def read_pair(image: Path, mask: Path) -> tuple[Tensor, Tensor]:
    """Return an image, uint8 [3, H, W], and its labels, uint8 [H, W]: class from 0, 255 for none.

    Raises:
        BadPair: one of them is damaged, they differ in size, or a class is unknown.
    """
    pixels, labels = _read(image, "RGB"), _read_mask(mask)
    (height, width), other = pixels.shape[:2], tuple(labels.shape)
    if (height, width) != other:
        sizes = f"{other[1]}×{other[0]} pixels, {image.name} {width}×{height}"
        raise BadPair(f"{mask}: has {sizes}; they must be alike")
    return torch.from_numpy(pixels).permute(2, 0, 1), labels


def _read_mask(mask: Path) -> Tensor:
    classes = _read(mask, None)
    if classes.dtype.kind not in "bui":
        raise BadPair(f"{mask}: holds {classes.dtype} values; a mask holds whole numbers")
    for label in (int(classes.max()), int(classes.min())):
        if not 0 <= label <= CLASSES:
            kinds = f"ADE20K's are 1 to {CLASSES}, 0 is unlabelled"
            raise BadPair(f"{mask}: has class {label}; {kinds}")
    return torch.from_numpy(classes.astype(np.uint8) - np.uint8(1))  # 0 becomes 255


def _read(file: Path, mode: str | None) -> np.ndarray:
    """Return the pixels of a file in a mode of PIL, for "RGB" uint8 [H, W, 3]; with None, those of
    a single channel as they are stored, [H, W]."""
    from PIL import Image

    try:
        with Image.open(file, formats=FORMATS) as opened:
            if mode is None and len(opened.getbands()) != 1:
                raise BadPair(f"{file}: has {len(opened.getbands())} channels; a mask has one")
            return np.array(opened.convert(mode) if mode else opened)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise BadPair(f"{file}: cannot be read ({first_line(error)})") from None
