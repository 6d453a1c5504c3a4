"""Downloads, unpacks and checks ADE20K's scene parsing benchmark, for task=ade20k."""

import argparse
import os
import shutil
import stat
import sys
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from co2.atomic import locked
from co2.errors import ConfigError, require
from tasks.ade20k.pairs import FOLDER, SPLITS, BadPair, Pairs, listed, read_pair
from tasks.prepare.samples import broken
from tasks.shared.progress import progress

_ARCHIVE = f"{FOLDER}.zip"
_CHUNK = 1 << 20
URL = f"http://data.csail.mit.edu/places/ADEchallenge/{_ARCHIVE}"
SHA1 = "sha1:219e1696abb36c8ba3a3afe7fb2f4b4606a897c7"
"""The archive's checksum, from public toolkits (GluonCV's scripts/datasets/ade20k.py and
others)."""

HELP = f"""\
ADE20K, 150 classes, for task=ade20k ade20k.source=ade20k.

Downloads {_ARCHIVE} (about 0.9 GB) and unpacks it into
  <root>/{FOLDER}/images/{{training,validation}}/*.jpg        20210 and 2000 images
  <root>/{FOLDER}/annotations/{{training,validation}}/*.png   their masks
Stopped while unpacking, the same command goes on where it stopped; a download begins anew.
Its terms of use: https://groups.csail.mit.edu/vision/datasets/ADE20K/

Without the network:
  --archive FILE, the archive from
  {URL}"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """See `DataSet.arguments`."""
    parser.add_argument("--archive", metavar="FILE", help=f"an {_ARCHIVE} that you have")


def run(options: argparse.Namespace) -> str:
    """See `DataSet.run`."""
    folder = prepare(Path(options.root), None if options.archive is None else Path(options.archive))
    return f"{folder}: ready; train with: task=ade20k ade20k.source=ade20k"


def prepare(root: Path, archive: Path | None = None) -> Path:
    """Return the folder `root/ADEChallengeData2016`, which is made unless it exists.

    Args:
        root: folder of all data sets.
        archive: the user's own archive; None downloads one, which is removed at the end.
    Raises:
        ConfigError: the archive cannot be downloaded or unpacked, or `root` cannot be written.
    """
    final = root / FOLDER
    if archive is not None:
        require(archive.is_file(), "--archive", archive, f"no such file; get it from {URL}")
    if final.exists():
        return final
    try:
        with locked(final):
            if not final.exists():
                _unpack(archive or _downloaded(root), final)
            if archive is None:
                (root / _ARCHIVE).unlink(missing_ok=True)
    except OSError as error:
        what = f"{error.filename or final}: {error.strerror or error}"
        raise ConfigError("--root", root, f"{what}; make room or choose another") from None
    return final


def check(path: Path, options: argparse.Namespace) -> Iterator[str]:
    """See `DataSet.check`. Checks the numbers of files, that each image has a mask, and, by reading
    all files, their sizes and classes."""
    pairs = []
    for split, expected in SPLITS.items():
        images, masks = path / "images" / split, path / "annotations" / split
        missing = [folder for folder in (images, masks) if not folder.is_dir()]
        yield from (f"{folder}: no such folder" for folder in missing)
        if missing:
            continue
        found = {image.stem: image for image in listed(images, ".jpg")}
        labels = {mask.stem: mask for mask in listed(masks, ".png")}
        if len(found) != expected:
            yield f"{images}: holds {len(found)} images, not {expected}"
        yield from (f"{found[name]}: has no mask" for name in sorted(found.keys() - labels.keys()))
        yield from (
            f"{labels[name]}: has no image" for name in sorted(labels.keys() - found.keys())
        )
        pairs += [(found[name], labels[name]) for name in sorted(found.keys() & labels.keys())]
    yield from _broken("reading images and masks", pairs)


def verify(path: Path) -> Iterator[str]:
    """See `DataSet.verify`."""
    for split in SPLITS:
        pairs = Pairs(path, split, "--verify", str(path), "see docs/data.md")
        yield from _broken(f"reading {split}", pairs.files())


def _broken(what: str, pairs: Sequence[tuple[Path, Path]]) -> Iterator[str]:
    def fault(number: int) -> str | None:
        try:
            read_pair(*pairs[number])
        except BadPair as bad:
            return str(bad)
        return None

    return broken(what, len(pairs), fault)


def _downloaded(root: Path) -> Path:
    """Return the archive, which appears only when it is complete and its checksum is right."""
    import pooch
    from requests import RequestException

    loader = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), chunk_size=_CHUNK)
    try:
        return Path(pooch.retrieve(URL, SHA1, _ARCHIVE, root, downloader=loader))
    except (RequestException, ValueError) as error:
        hint = f"fetch it yourself (curl -C - -O {URL}) and give --archive FILE"
        raise ConfigError("download", URL, f"{error}; {hint}") from None


def _unpack(archive: Path, final: Path) -> None:
    """Unpack the archive's folder beside `final` and rename it. Files of an earlier run that was
    interrupted are kept where their checksums fit."""
    aside = final.with_name(f".{final.name}.unpacking")
    try:
        with zipfile.ZipFile(archive) as source:
            entries = [(entry, _place(entry, archive)) for entry in source.infolist()]
            wanted = [(entry, place) for entry, place in entries if place is not None]
            _require_layout([place for _, place in wanted], archive)
            size = sum(entry.file_size for entry, _ in wanted)
            with progress(f"unpacking {len(wanted)} files", size) as advance:
                for entry, place in wanted:
                    target = aside / place
                    if not _holds(target, entry):
                        target.parent.mkdir(parents=True, exist_ok=True)
                        with source.open(entry) as packed, target.open("wb") as file:
                            shutil.copyfileobj(packed, file)
                    advance(entry.file_size)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        hint = f"is damaged, or no archive that can be unpacked ({error})"
        raise ConfigError("--archive", archive, hint) from None
    os.rename(aside, final)


def _place(entry: zipfile.ZipInfo, archive: Path) -> Path | None:
    """Return the path of an entry in the data set's folder; None for folders and for other files.

    Raises:
        ConfigError: the name leads out of the folder, or the entry is a symbolic link.
    """
    parts = entry.filename.replace("\\", "/").split("/")
    hint = f"holds {entry.filename!r}, which leads elsewhere; it is not ADE20K's archive"
    safe = ".." not in parts and parts[0] != "" and ":" not in parts[0]
    require(safe and not stat.S_ISLNK(entry.external_attr >> 16), "--archive", archive, hint)
    if entry.is_dir() or parts[0] != FOLDER or len(parts) < 2:
        return None
    return Path(*parts[1:])


def _require_layout(places: list[Path], archive: Path) -> None:
    there = {place.parent for place in places}
    for kind in ("images", "annotations"):
        for split in SPLITS:
            hint = f"holds no file in {FOLDER}/{kind}/{split}; it is not ADE20K's archive"
            require(Path(kind, split) in there, "--archive", archive, hint)


def _holds(target: Path, entry: zipfile.ZipInfo) -> bool:
    if not target.is_file() or target.stat().st_size != entry.file_size:
        return False
    return zlib.crc32(target.read_bytes()) == entry.CRC
