"""Corpora of text files, and their division into training and validation parts."""

import hashlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from co2.errors import ConfigError, require

VALIDATION_SHARE = 20
"""One part in this many is for validation."""

EMBEDDED_WITHOUT = {"tests", "benchmarks", "_antlr"}
"""Folders of sympy that are left out: tests, and tables and parsers that programs generated."""


@dataclass(frozen=True)
class Corpus:
    """UTF-8 text files, none of them empty.

    With 20 files or more, the validation part is the twentieth of the files whose paths have the
    smallest hashes. With fewer, it is the last 5 % of each file.
    """

    name: str
    folder: Path
    files: tuple[str, ...]
    """Sorted paths relative to `folder`, with / as separator."""
    key: str
    """Key of the configuration that chose this corpus, and its value; both are for errors."""
    value: str

    @cached_property
    def sha256(self) -> str:
        """Checksum of names and contents; it takes about 0.02 s for 16 MB."""
        digest = hashlib.sha256()
        for name in self.files:
            path = self.folder / name
            digest.update(os.fsencode(name) + b"\0%d\0" % path.stat().st_size)
            with self._readable(name), path.open("rb") as file:
                while piece := file.read(1 << 20):
                    digest.update(piece)
        return digest.hexdigest()

    @cached_property
    def num_bytes(self) -> int:
        return sum((self.folder / name).stat().st_size for name in self.files)

    @cached_property
    def validation_files(self) -> frozenset[str]:
        """The files of the validation part; none where each file is divided instead."""
        ranked = sorted(self.files, key=lambda name: hashlib.sha256(os.fsencode(name)).digest())
        return frozenset(ranked[: len(ranked) // VALIDATION_SHARE])

    def check(self) -> None:
        """Read every file once.

        Raises:
            ConfigError: a file is not text, or no file holds more than white space.
        """
        blank = True
        for name in self.files:
            blank = not self.text(name).strip() and blank
        require(not blank, self.key, self.value, "holds no text")

    def text(self, name: str) -> str:
        """Return the text of one file, with its line ends as they are.

        Raises:
            ConfigError: it cannot be read, or is not UTF-8 text.
        """
        with self._readable(name):
            data = (self.folder / name).read_bytes()
        hint = "is no UTF-8 text ({}); convert or remove it"
        if b"\0" in data:
            why = f"a NUL byte at {data.index(0)}: a binary file"
            raise ConfigError(self.key, self.value, f"{self._called(name)}{hint.format(why)}")
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            why = f"byte {error.start}: {error.reason}"
            raise ConfigError(
                self.key, self.value, f"{self._called(name)}{hint.format(why)}"
            ) from None

    def documents(self, part: str) -> Iterator[str]:
        """Yield the texts of "train" or "val", in the order of the files."""
        return (text for _, text in self.named_documents(part))

    def named_documents(self, part: str) -> Iterator[tuple[str, str]]:
        """Yield the names of the files too, before their texts."""
        for name in self.files:
            if self.validation_files:
                if (name in self.validation_files) == (part == "val"):
                    yield name, self.text(name)
                continue
            text = self.text(name)
            cut = len(text) - len(text) // VALIDATION_SHARE
            if piece := text[:cut] if part == "train" else text[cut:]:
                yield name, piece

    def _called(self, name: str) -> str:
        """Return a file's name for an error, or "" where the value in the error is that file."""
        return "" if Path(self.value).name == name else f"{name} "

    @contextmanager
    def _readable(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            hint = f"{self._called(name)}cannot be read ({error.strerror})"
            raise ConfigError(self.key, self.value, hint) from None


def embedded_corpus(key: str) -> Corpus:
    """Return the source of the pinned dependency sympy: 16 MB of Python in every installation.

    Args:
        key: key of the configuration that chose it, such as gpt2.corpus, for errors.
    Raises:
        ConfigError: sympy is not installed.
    """
    found = importlib.util.find_spec("sympy")  # without importing it, which takes a second
    if found is None or found.origin is None:
        hint = "reads the source of sympy, which is not installed; pip install sympy"
        raise ConfigError(key, "embedded", hint)
    folder = Path(found.origin).parent
    paths = [path.relative_to(folder) for path in folder.rglob("*.py")]
    chosen = (path for path in paths if not EMBEDDED_WITHOUT & set(path.parts))
    files = tuple(sorted(path.as_posix() for path in chosen if (folder / path).stat().st_size))
    return Corpus("embedded", folder, files, key, "embedded")


def user_corpus(path: str) -> Corpus:
    """Return the user's own file, or all files in a folder and below it.

    Hidden files and empty files are left out.

    Raises:
        ConfigError: the path does not exist, cannot be read or holds no text.
    """
    key, place = "data.path", Path(path)
    require(path.strip() != "", key, path, "must be a file or a folder, or null")
    require(place.exists(), key, path, "no such file or folder")
    if place.is_file():
        folder, names = place.parent, [place.name]
    else:
        require(place.is_dir(), key, path, "must be a file or a folder")
        folder, names = place, sorted(_visible(place, key, path))
    files = tuple(name for name in names if (folder / name).stat().st_size)
    what = "the file is empty" if place.is_file() else "the folder holds no text"
    require(bool(files), key, path, f"{what}; give UTF-8 text")
    return Corpus("user", folder, files, key, path)


def _visible(folder: Path, key: str, value: str) -> Iterator[str]:
    """Yield the paths of all files under `folder`, relative to it, without hidden ones."""

    def unreadable(error: OSError) -> None:
        raise ConfigError(key, value, f"{error.filename} cannot be read ({error.strerror})")

    for place, folders, files in os.walk(folder, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = Path(place) / name
            if not name.startswith(".") and path.is_file():
                yield path.relative_to(folder).as_posix()
