"""A small data set in ADE20K's own layout."""

from pathlib import Path

import numpy as np
from PIL import Image

SIZES = {
    "training": [(40, 60), (64, 48), (50, 50), (33, 90)],
    "validation": [(45, 70), (80, 40), (36, 36)],
}
"""Height and width of each image."""


def write(folder: Path, **numbers: int) -> Path:
    """Images of noise; masks of the classes 0 to 150 in blocks, each class somewhere.

    Args:
        numbers: of images by split, whose sizes recur then.
    """
    source = np.random.default_rng(0)
    for split, known in SIZES.items():
        sizes = [known[number % len(known)] for number in range(numbers.get(split, len(known)))]
        for kind in ("images", "annotations"):
            (folder / kind / split).mkdir(parents=True)
        for number, (height, width) in enumerate(sizes, 1):
            pixels = source.integers(0, 256, (height, width, 3), np.uint8)
            classes = source.integers(0, 151, (height // 8 + 1, width // 8 + 1), np.uint8)
            mask = classes.repeat(8, 0).repeat(8, 1)[:height, :width]
            Image.fromarray(pixels).save(image(folder, split, number), quality=95)
            Image.fromarray(mask).save(annotation(folder, split, number))
    return folder


def name(split: str, number: int) -> str:
    return f"ADE_{'train' if split == 'training' else 'val'}_{number:08d}"


def image(folder: Path, split: str, number: int) -> Path:
    return folder / "images" / split / f"{name(split, number)}.jpg"


def annotation(folder: Path, split: str, number: int) -> Path:
    return folder / "annotations" / split / f"{name(split, number)}.png"
