"""Packed images: {train,val}/<class>.npy, an array of all images of a class, which are small."""

from pathlib import Path

import numpy as np

from co2.errors import ConfigError, first_line, require
from tasks.vision.held import Held
from tasks.vision.image_folder import require_same_classes, shown
from tasks.vision.images import PARTS

FASHION_MNIST = "fashion_mnist"
"""The folder that `tasks.prepare` makes below its root."""
_LAYOUT = "needs uint8 [images, height, width] or [images, height, width, 3]"


def is_packed(folder: Path) -> bool:
    """Whether a folder's images are packed, rather than files of their own."""
    return any(files(folder, part) for part in PARTS)


def files(folder: Path, part: str) -> dict[str, Path]:
    """Return the array of each class of a part, by name and in the order of the labels."""
    there = (folder / part).glob("*.npy")
    return {file.stem: file for file in sorted(there) if not file.name.startswith(".")}


def packed(folder: Path, key: str, value: object) -> Held:
    """Read packed images; they stay in memory.

    Args:
        folder: holds train/ and val/, in each an array for every class, all of one size.
        key, value: key of the configuration that chose the folder, and its value, for errors.
    Raises:
        ConfigError: train and val differ in their classes, or an array is damaged or has another
            layout.
    """
    found = {part: files(folder, part) for part in PARTS}
    require_same_classes({part: list(own) for part, own in found.items()}, key, value, ".npy")
    arrays: dict[str, list[np.ndarray]] = {part: [] for part in PARTS}
    shape: tuple[int, ...] | None = None
    for part, own in found.items():
        for file in own.values():
            name = f"{part}/{shown(file.name)}"
            try:
                array = np.load(file, allow_pickle=False)
            except (OSError, ValueError, EOFError) as error:
                hint = f"{name} cannot be read ({first_line(error)})"
                raise ConfigError(key, value, hint) from None
            sides = array.shape[1:]
            sound = array.dtype == np.uint8 and 0 not in array.shape
            sound = sound and (array.ndim == 3 or (array.ndim == 4 and sides[-1] == 3))
            holds = f"{name} holds {array.dtype} {list(array.shape)}"
            require(sound, key, value, f"{holds}; {_LAYOUT}")
            shape = shape or sides
            like = " × ".join(map(str, shape))
            require(sides == shape, key, value, f"{holds}; others are of {like}, and all must be")
            arrays[part].append(array)
    return Held(str(value), arrays, list(found["train"]))
