"""Small pictures in folders, and the tasks that look at them."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from co2.config import OptimConfig, Optimizer
from tasks.vision.classification import Classification
from tests.tasks.build import built

COLOURS = {"blue sky": (40, 80, 220), "élan": (60, 160, 60), "red": (220, 60, 40)}


def picture(colour: tuple[int, int, int], size: tuple[int, int], seed: int) -> Image.Image:
    """A colour with noise on it; `size` is width and height."""
    noise = np.random.default_rng(seed).normal(0, 20, (size[1], size[0], 3))
    return Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8))


def tree(folder: Path, train: int = 8, val: int = 5) -> Path:
    """ImageFolder's layout: classes of `COLOURS`, JPEG of changing sizes."""
    for part, number in (("train", train), ("val", val)):
        for label, (name, colour) in enumerate(COLOURS.items()):
            (folder / part / name).mkdir(parents=True)
            for n in range(number):
                made = picture(colour, (40 + n, 50 - n % 40), seed=100 * label + n)
                made.save(folder / part / name / f"{part}_{n}.JPEG", quality=95)
    return folder


def task(
    name: str = "resnet50", path: Path | None = None, root: str = "data", **given: Any
) -> Classification:
    kind = Optimizer.adamw if name == "vit" else Optimizer.sgd
    return built(name, root, path, optim=OptimConfig(lr=0.05, name=kind), **given)
