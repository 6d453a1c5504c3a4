"""Unpacks ShapeNet-55 as point clouds from the user's archive, for shapenet.

Clouds are written aside and renamed, one by one, into `<root>/shapenet55.part/`, and a later run
continues at the first that is missing. When all are there, the folder is renamed.
"""

import argparse
import gzip
import os
import shutil
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

import numpy as np

from co2.atomic import locked
from co2.errors import ConfigError, first_line, require
from tasks.prepare.samples import broken
from tasks.shapenet import modelnet40
from tasks.shapenet.clouds import (
    FILES,
    LISTS,
    PARTS,
    category,
    files_in,
    listed,
    open_clouds,
    read_cloud,
)
from tasks.shared.progress import progress

NUM_CLOUDS = {"train": 41952, "test": 10518}
NUM_CATEGORIES = 55
NUM_POINTS = 1024
"""Number of points that Point-MAE takes from each cloud; the files have 8192."""
_DAMAGED = zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error

HELP = """\
ShapeNet-55 as point clouds for task=shapenet shapenet.shapes=shapenet55.

52,470 clouds of 8192 points in 55 categories, some 5 GB; for research only, under the terms of
use of shapenet.org. There is no direct download: the files DATASET.md of the repositories
Julie-tang00/Point-BERT and Pang-Yatian/Point-MAE on GitHub link to an archive with the clouds
(shapenet_pc), and Point-BERT's folder data/ShapeNet55-34/ShapeNet-55 has the lists. Then
  --archive FILE --lists FOLDER
makes of them
  <root>/shapenet55/shapenet_pc/<category>-<model>.npy    points, [8192, 3]
  <root>/shapenet55/ShapeNet-55/{train,test}.txt          names of those files, one a line
The lists may be in the archive too. Stop it whenever you like; the same command goes on where it
stopped.

For shapenet.modelnet40=FOLDER unpack modelnet40_normal_resampled.zip, 12,311 clouds of 10,000
points, to which PointNet++'s repository links; --check FOLDER looks through it."""

_MISSING = (
    "give the archive of shapenet_pc that DATASET.md of the GitHub repositories "
    "Julie-tang00/Point-BERT and Pang-Yatian/Point-MAE link to (terms of use: shapenet.org)"
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """See `DataSet.arguments`."""
    parser.add_argument("--archive", metavar="FILE", help="zip or tar with the clouds")
    parser.add_argument("--lists", metavar="FOLDER", help="holds train.txt and test.txt")


def run(options: argparse.Namespace) -> str:
    """See `DataSet.run`."""
    final = Path(options.root) / "shapenet55"
    try:
        with locked(final):
            if not final.exists():
                _make(final, options.archive, options.lists)
    except OSError as error:
        what = f"{error.filename or final}: {error.strerror or error}"
        raise ConfigError("--root", options.root, f"{what}; make room or choose another") from None
    names = {part: list(listed(final / LISTS / f"{part}.txt")) for part in PARTS}
    counts = ", ".join(f"{len(found):,} {part}" for part, found in names.items())
    return f"{final}: {counts} clouds; train with: task=shapenet shapenet.shapes=shapenet55"


def check(path: Path, options: argparse.Namespace) -> Iterator[str]:
    """See `DataSet.check`. Reads the lists and all clouds, of ModelNet40 where `path` holds it."""
    if (path / modelnet40.NAMES).exists():
        yield from _check_modelnet40(path)
        return
    there, named = files_in(path), Counter[str]()
    for part in PARTS:
        names, whole = _names(path / LISTS / f"{part}.txt")
        yield from (f"{path / LISTS / part}.txt: {fault}" for fault in whole)
        if len(names) != NUM_CLOUDS[part]:
            count = f"names {len(names)} clouds, ShapeNet-55 has {NUM_CLOUDS[part]}"
            yield f"{path / LISTS / part}.txt: {count}"
        named.update(names)
    categories = len({category(name) for name in named})
    if categories != NUM_CATEGORIES:
        yield f"{path}: the lists name {categories} categories, ShapeNet-55 has {NUM_CATEGORIES}"
    yield from (f"{name}: is named {times} times" for name, times in named.items() if times > 1)
    yield from (f"{path / FILES / name}: is missing" for name in named if name not in there)
    yield from _broken([path / FILES / name for name in named if name in there])


def verify(path: Path) -> Iterator[str]:
    """See `DataSet.verify`."""
    is_modelnet40 = (path / modelnet40.NAMES).exists()
    opened = (modelnet40.open_modelnet40 if is_modelnet40 else open_clouds)(path, "--verify")
    for clouds in opened.values():
        yield from _broken(clouds.files)


def _check_modelnet40(path: Path) -> Iterator[str]:
    try:
        parts = modelnet40.open_modelnet40(path, "--check")
    except ConfigError as error:
        yield f"{error.value}: {error.hint}"
        return
    for part, clouds in parts.items():
        count = f"names {len(clouds)} clouds, ModelNet40 has {modelnet40.NUM_CLOUDS[part]}"
        if len(clouds) != modelnet40.NUM_CLOUDS[part]:
            yield f"{path / f'modelnet40_{part}.txt'}: {count}"
        if len(np.unique(clouds.kinds)) != modelnet40.NUM_CATEGORIES:
            count = f"names {len(np.unique(clouds.kinds))} categories, ModelNet40 has 40"
            yield f"{path / f'modelnet40_{part}.txt'}: {count}"
        yield from _broken(clouds.files)


def _broken(files: Sequence[Path]) -> Iterator[str]:
    def fault(number: int) -> str | None:
        try:
            read_cloud(files[number], NUM_POINTS)
        except ValueError as error:
            return f"{files[number]}: {error}"
        return None

    return broken(f"reading {len(files):,} clouds", len(files), fault)


def _make(final: Path, archive: str | None, lists: str | None) -> None:
    if archive is None:
        raise ConfigError("--archive", "", _MISSING)
    require(Path(archive).is_file(), "--archive", archive, f"no such file; {_MISSING}")
    if lists is not None:
        for part in PARTS:
            held = (Path(lists) / f"{part}.txt").is_file()
            hint = f"does not hold {part}.txt; give Point-BERT's data/ShapeNet55-34/ShapeNet-55"
            require(held, "--lists", lists, hint)
    work = final.with_name(final.name + ".part")
    found = _unpack(Path(archive), work)
    require(found > 0, "--archive", archive, "holds no .npy file")
    for part in PARTS:
        target = work / LISTS / f"{part}.txt"
        if lists is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(lists) / f"{part}.txt", target)
        hint = "is not in the archive; give --lists with the folder that holds it"
        require(target.is_file(), "--archive", archive, f"{LISTS}/{part}.txt {hint}")
        names, faults = _names(target)
        require(not faults, "--lists", target, faults[0] if faults else "")
        absent = set(names) - files_in(work)
        hint = (
            f"{len(absent)} clouds of {part}.txt are not in it, such as {min(absent, default='')}"
        )
        require(not absent, "--archive", archive, hint)
    os.rename(work, final)


def _unpack(archive: Path, work: Path) -> int:
    """Write clouds and lists of an archive into `work`; returns the number of clouds.

    Only the last part of a member's name is used, so no file is written outside of `work`.
    """
    found = 0
    try:
        with progress(f"unpacking {archive}", archive.stat().st_size) as advance:
            for name, size, opened in _members(archive, advance):
                path = PurePosixPath(name)
                if path.suffix == ".npy":
                    target = work / FILES / path.name
                    found += 1
                elif path.parent.name == LISTS and path.name in {f"{p}.txt" for p in PARTS}:
                    target = work / LISTS / path.name
                else:
                    continue
                if target.exists() and target.stat().st_size == size:
                    continue  # written by an earlier run
                target.parent.mkdir(parents=True, exist_ok=True)
                aside = target.with_suffix(".tmp")
                with opened() as source, aside.open("wb") as copy:
                    shutil.copyfileobj(source, copy)
                os.replace(aside, target)
    except _DAMAGED as error:
        hint = f"cannot be unpacked ({first_line(error)})"
        raise ConfigError("--archive", archive, hint) from None
    return found


def _members(
    archive: Path, advance: Callable[[int], None]
) -> Iterator[tuple[str, int, Callable[[], IO[bytes]]]]:
    """Yield name, size and a function that opens it for each regular file of a zip or a tar."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as pack:
            for entry in pack.infolist():
                if not entry.is_dir():
                    yield entry.filename, entry.file_size, partial(pack.open, entry)
                advance(entry.compress_size)
        return
    with tarfile.open(archive) as roll:
        for member in roll:
            if member.isfile():
                yield member.name, member.size, partial(_content, roll, member)
            advance(member.size)


def _content(roll: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    opened = roll.extractfile(member)
    assert opened is not None, f"{member.name} is no plain file"
    return opened


def _names(path: Path) -> tuple[list[str], list[str]]:
    """Return the files that a list names, and what is wrong with the list."""
    lines = list(listed(path))
    return [name for fault, name in lines if not fault], [fault for fault, _ in lines if fault]
