"""Images in folders: train/<class>/… and val/<class>/…, as ImageNet is commonly unpacked."""

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from co2.errors import ConfigError, require
from tasks.shared.pictures import BadImage, decode
from tasks.vision.images import PARTS

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Suffixes of images, in any case; torchvision has the same ones. Other files are ignored."""

_THREADS = 8
"""Folders that are listed at once, because on a network file system listing is mostly waiting."""


class ImageFolder:
    """A tree of images, which is listed but not read. See `tasks.vision.images.Images`.

    A class is a folder in train/ and in val/; its images may also lie in folders inside it. Names
    that begin with a dot are ignored. The names are kept as packed bytes: 1.28 million take about
    40 MB, which loading processes share after a fork (Python strings would be copied, because
    reading them changes their reference counts).

    Args:
        folder: holds train/ and val/.
        key, value: key of the configuration that chose the folder, and its value, for errors.
    Raises:
        ConfigError: a part is missing or holds no class, train and val differ in their classes,
            or a class has no image.
    """

    def __init__(self, folder: Path, key: str, value: object) -> None:
        self.folder, self._key, self._value = folder, key, value
        hint = "is a file; give a folder" if folder.is_file() else "no such folder"
        require(folder.is_dir(), key, value, hint)
        self.classes = self._classes()
        self._names: dict[str, list[np.ndarray]] = {part: self._listed(part) for part in PARTS}
        self.counts = {p: np.array([len(n) for n in self._names[p]]) for p in PARTS}
        self._ends = {part: np.cumsum(counts) for part, counts in self.counts.items()}

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def path(self, part: str, index: int) -> tuple[str, int]:
        """Return the path of an image relative to `folder`, and its label."""
        label = int(np.searchsorted(self._ends[part], index, side="right"))
        first = self._ends[part][label] - self.counts[part][label]
        name = os.fsdecode(bytes(self._names[part][label][index - first]))
        return os.path.join(part, self.classes[label], name), label

    def take(self, part: str, indices: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """See `Images.take`. Raises `ConfigError`."""
        images, labels = zip(*(self.read(part, index) for index in indices), strict=True)
        return list(images), torch.tensor(labels)

    def read(self, part: str, index: int) -> tuple[Tensor, int]:
        """Return one image, uint8 [3, height, width], and its label.

        Raises:
            ConfigError: the file cannot be read, is damaged or is not an image.
        """
        name, label = self.path(part, index)
        try:
            return decode(self.folder / name), label
        except BadImage as error:
            raise self._error(f"{shown(name)} {error}; replace or remove it") from None

    def facts(self) -> dict[str, object]:
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
        require_same_classes(found, self._key, self._value)
        return found["train"]

    def _listed(self, part: str) -> list[np.ndarray]:
        """Return the images of each class: sorted paths, bytes, relative to the class's folder."""

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


def require_same_classes(
    found: Mapping[str, Collection[str]], key: str, value: object, suffix: str = ""
) -> None:
    """Raise `ConfigError` unless train and val have the same classes; `suffix` is that of what
    holds a class, such as a folder."""
    for here, there in (PARTS, PARTS[::-1]):
        missing = sorted(set(found[there]) - set(found[here]))
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            kind = "file" if suffix else "folder"
            what = f"has no {kind} {shown(missing[0])}{suffix}{more}, which {there} has"
            raise ConfigError(key, value, f"{here} {what}; both need the same classes")


def pictures(folder: str | Path, below: str = "") -> Iterator[str]:
    """Yield the images in `folder` and below it: paths relative to it, in no fixed order.

    The listing tells files from folders, so the files themselves are not accessed.
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
    """Return a file's name as text that can be printed, whatever its bytes are."""
    return os.fsencode(name).decode(errors="replace")
