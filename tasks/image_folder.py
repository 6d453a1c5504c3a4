"""Pictures in folders: train/<class>/… and val/<class>/…, as ImageNet is commonly unpacked."""

import hashlib
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from co2.errors import ConfigError, require
from tasks.images import PARTS

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""What counts as a picture, in either case; these are torchvision's. Other files are passed by."""

_THREADS = 8
"""Folders listed at once: on a network file system listing is all waiting."""


class ImageFolder:
    """A tree of pictures, listed but not read. See `tasks.images.Images`.

    A class is a folder in train/ and in val/; pictures may lie deeper inside it. What begins with
    a dot is passed by. Names are kept as packed bytes: 1.28 million take some 40 MB, which forked
    loading processes share for good (Python strings would be copied as they are counted).

    Args:
        folder: that holds train/ and val/.
        key, value: of the configuration that chose it, for errors.
    Raises:
        ConfigError: a part is missing or holds no class, train and val differ in their classes,
            or a class has no picture.
    """

    blockwise = False

    def __init__(self, folder: Path, key: str, value: object) -> None:
        self.folder, self._key, self._value = folder, key, value
        require(folder.is_dir(), key, value, "no such folder")
        self.classes = self._classes()
        self._names: dict[str, list[np.ndarray]] = {part: self._listed(part) for part in PARTS}
        self.counts = {p: np.array([len(n) for n in self._names[p]]) for p in PARTS}
        self._ends = {part: np.cumsum(counts) for part, counts in self.counts.items()}

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def path(self, part: str, index: int) -> tuple[str, int]:
        """Where a picture lies below `folder`, and its label."""
        label = int(np.searchsorted(self._ends[part], index, side="right"))
        first = self._ends[part][label] - self.counts[part][label]
        name = os.fsdecode(bytes(self._names[part][label][index - first]))
        return os.path.join(part, self.classes[label], name), label

    def read(self, part: str, index: int) -> tuple[Tensor, int]:
        """See `Images.read`.

        Raises:
            ConfigError: the file cannot be read, is damaged or is no picture.
        """
        name, label = self.path(part, index)
        try:
            return decode(self.folder / name), label
        except BadImage as error:
            raise self._error(f"{shown(name)} {error}; replace or remove it") from None

    def read_many(self, part: str, indices: np.ndarray) -> tuple[list[Tensor], np.ndarray]:
        """See `Images.read_many`. Raises ConfigError as `read` does."""
        read = [self.read(part, index) for index in indices.tolist()]
        return [picture for picture, _ in read], np.array([label for _, label in read])

    def facts(self) -> dict[str, Any]:
        """See `Images.facts`. The sha256 covers the files' names only."""
        digest = hashlib.sha256()
        for part in PARTS:
            for name, files in zip(self.classes, self._names[part], strict=True):
                digest.update(os.fsencode(f"{part}/{name}\0{len(files)}\0") + b"\0".join(files))
        return {"data": str(self._value), "names_sha256": digest.hexdigest()}

    def _classes(self) -> list[str]:
        found: dict[str, list[str]] = {}
        needs = "a folder of pictures needs train/ and val/, in each a folder for every class"
        for part in PARTS:
            if not (self.folder / part).is_dir():
                raise self._error(f"has no folder {part}; {needs}")
            with self._readable(part), os.scandir(self.folder / part) as entries:
                names = [e.name for e in entries if not e.name.startswith(".") and e.is_dir()]
            if not names:
                raise self._error(f"{part} holds no folder; {needs}")
            found[part] = sorted(names)
        for here, there in (PARTS, PARTS[::-1]):
            missing = sorted(set(found[there]) - set(found[here]))
            if missing:
                more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                what = f"has no folder {shown(missing[0])}{more}, which {there} has"
                raise self._error(f"{here} {what}; both need the same classes")
        return found["train"]

    def _listed(self, part: str) -> list[np.ndarray]:
        """The pictures of each class, sorted: bytes, relative to the folder of the class."""

        def listed(name: str) -> np.ndarray:
            with self._readable(f"{part}/{name}"):
                return np.array(sorted(os.fsencode(n) for n in pictures(self.folder / part / name)))

        with ThreadPoolExecutor(_THREADS) as pool:
            names = list(pool.map(listed, self.classes))
        for name, files in zip(self.classes, names, strict=True):
            if not len(files):
                raise self._error(f"{part}/{shown(name)} holds no picture ({', '.join(SUFFIXES)})")
        return names

    def _error(self, hint: str) -> ConfigError:
        return ConfigError(self._key, self._value, hint)

    @contextmanager
    def _readable(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = f"{shown(name)} cannot be read ({error.strerror})"
            raise self._error(what) from None


class BadImage(Exception):
    """Why a file cannot be used, as the rest of a sentence that begins with its name."""


def decode(path: Path) -> Tensor:
    """A picture as RGB: uint8 [3, height, width].

    By PIL: torchvision's own decoder is hardly faster, and about to be removed.

    Raises:
        BadImage: with what is wrong.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():  # about odd metadata, which a million pictures do have
            warnings.simplefilter("ignore")
            with Image.open(path) as image:
                pixels = np.array(image.convert("RGB"))
    except UnidentifiedImageError:
        raise BadImage("is no picture") from None
    except OSError as error:
        what = "cannot be read" if error.errno else "is damaged"
        raise BadImage(f"{what} ({error.strerror or _first_line(error)})") from None
    except Exception as error:  # each of PIL's decoders raises kinds of its own
        raise BadImage(f"is damaged ({_first_line(error)})") from None
    return torch.from_numpy(pixels).permute(2, 0, 1)


def pictures(folder: str | Path, below: str = "") -> Iterator[str]:
    """Pictures in `folder` and in folders below it: names relative to it, in no certain order.

    The kind of an entry comes with the listing, so nothing is asked of the files themselves.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.name.lower().endswith(SUFFIXES):
                yield below + entry.name
            elif entry.is_dir():
                yield from pictures(entry.path, f"{below}{entry.name}/")


def shown(name: str) -> str:
    """A file's name as it can be printed, whatever its bytes."""
    return os.fsencode(name).decode(errors="replace")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
