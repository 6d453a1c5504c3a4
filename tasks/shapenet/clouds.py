"""Sets of point clouds, from files or memory, and the preparation of clouds for a model.

Files have the layout in which Point-BERT and Point-MAE publish ShapeNet-55:

    shapenet_pc/<category>-<model>.npy     points, [N, 3] or wider; 8192 points as published
    ShapeNet-55/train.txt, test.txt        names of those files, one per line
"""

import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from co2.errors import ConfigError, first_line, require

LISTS = "ShapeNet-55"
FILES = "shapenet_pc"
PARTS = ("train", "test")

_NAME = re.compile(r"([^\s/\\-]+)-[^\s/\\]+\.npy")


@dataclass(frozen=True)
class Clouds:
    """The clouds of one part of a data set, "train" or "test"."""

    kinds: np.ndarray
    """The category of each cloud, int64 [count], from 0."""
    held: np.ndarray | None = None
    """The clouds, float32 [count, N, 3]; None where they are in files."""
    files: tuple[Path, ...] = ()
    """The file of each cloud, where they are not in memory."""
    key: str = "data.root"
    """Key of the configuration that an error about a damaged file refers to."""

    def __len__(self) -> int:
        return len(self.kinds)

    def cloud(self, index: int, points: int) -> np.ndarray:
        """Return a cloud, float32 [N, 3], where N is `points` or more.

        Raises:
            ConfigError: its file cannot be read, or holds fewer points.
        """
        if self.held is not None:
            return self.held[index]
        try:
            return read_cloud(self.files[index], points)
        except ValueError as error:
            raise ConfigError(self.key, self.files[index], str(error)) from None


def open_clouds(folder: Path, key: str) -> dict[str, Clouds]:
    """Open both parts of a folder in the layout above. Only the lists are read, not the clouds.

    Args:
        key: key of the configuration that chose the folder, for errors.
    Returns:
        The clouds of each of `PARTS`.
    Raises:
        ConfigError: a list or a file is missing, a list is empty or has a line of another form,
            or the test list has a category that the training list lacks.
    """
    names: dict[str, list[str]] = {}
    for part in PARTS:
        path = folder / LISTS / f"{part}.txt"
        names[part] = []
        for fault, name in listed(path):
            require(not fault, key, path, fault)
            names[part].append(name)
        require(bool(names[part]), key, path, "names no cloud")
    there = files_in(folder)
    categories = sorted({category(name) for name in names["train"]})
    numbers = {name: number for number, name in enumerate(categories)}
    parts = {}
    for part, chosen in names.items():
        path = folder / LISTS / f"{part}.txt"
        for name in chosen:
            require(name in there, key, folder / FILES / name, f"is missing; {path} names it")
            hint = f"{name}: no cloud of its category is in train.txt"
            require(category(name) in numbers, key, path, hint)
        kinds = np.array([numbers[category(name)] for name in chosen], np.int64)
        parts[part] = Clouds(kinds, None, tuple(folder / FILES / name for name in chosen), key)
    return parts


def listed(path: Path) -> Iterator[tuple[str, str]]:
    """Yield, for each line of a list, what is wrong with it ("" if nothing) and the name in it."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        yield "is missing", ""
        return
    except (OSError, UnicodeDecodeError) as error:
        yield f"cannot be read ({error})", ""
        return
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and _NAME.fullmatch(line):
            yield "", line
        elif line:
            yield f"line {number} is not CATEGORY-MODEL.npy: {line[:60]}", line


def category(name: str) -> str:
    """Return the category in a file's name: "02691156" for "02691156-1a04e3ea.npy"."""
    return name.partition("-")[0]


def files_in(folder: Path) -> set[str]:
    """Return the names of the clouds in a folder. One listing is faster than 52,000 look-ups."""
    try:
        return set(os.listdir(folder / FILES))
    except OSError:
        return set()


def read_cloud(path: Path, points: int) -> np.ndarray:
    """Return the first three columns of an .npy file, or of a .txt file whose columns commas
    separate, float32 [N, 3].

    Raises:
        ValueError: they are not a cloud of `points` points or more; the message says why.
    """
    text = path.suffix == ".txt"
    try:
        if text:
            with warnings.catch_warnings(action="ignore"):  # of NumPy: that a file is empty
                cloud = np.loadtxt(path, np.float32, delimiter=",", ndmin=2)
        else:
            cloud = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, SyntaxError, MemoryError) as error:
        kind = "a .txt" if text else "an .npy"
        raise ValueError(f"is not {kind} file that can be read ({first_line(error)})") from None
    if not isinstance(cloud, np.ndarray) or cloud.dtype.kind not in "fiu":
        raise ValueError("does not hold one array of numbers")
    if cloud.ndim != 2 or cloud.shape[1] < 3:
        raise ValueError(f"has the shape {list(cloud.shape)}, not [points, 3] or wider")
    if len(cloud) < points:
        raise ValueError(f"holds {len(cloud)} points, {points} are needed")
    cloud = cloud[:, :3].astype(np.float32)
    if not np.isfinite(cloud).all():
        raise ValueError("holds NaN or infinity")
    if not np.ptp(cloud, axis=0).any():
        raise ValueError("all its points are the same")
    return cloud


def drawn(cloud: np.ndarray, points: int, shares: np.ndarray) -> np.ndarray:
    """Return `points` of the cloud's points, without repetition, in the order of their `shares`:
    a number for each point of the cloud."""
    return cloud.take(shares.argsort()[:points], axis=0)


def normalized(clouds: np.ndarray) -> np.ndarray:
    """Return clouds [..., N, 3] moved and scaled into the unit ball: the mean of each is at 0, its
    farthest point at distance 1."""
    clouds = clouds - clouds.mean(axis=-2, keepdims=True)
    radius = np.sqrt(np.square(clouds).sum(axis=-1).max(axis=-1))[..., None, None]
    return clouds / np.maximum(radius, np.finfo(np.float32).tiny)


def scaled_and_moved(clouds: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Apply Point-MAE's augmentation to clouds [B, N, 3]: scale each axis by 2/3 to 3/2, and move
    it by up to ±0.2.

    Args:
        shares: where in these ranges the factors and the shifts of each cloud are, from 0 to 1,
            float64 [B, 6].
    """
    factors, shifts = 2 / 3 + (3 / 2 - 2 / 3) * shares[:, :3], -0.2 + 0.4 * shares[:, 3:]
    return (clouds * factors[:, None] + shifts[:, None]).astype(np.float32)
