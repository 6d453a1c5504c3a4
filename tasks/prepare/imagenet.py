"""Unpacks ImageNet-1K into folders from the archives of ILSVRC 2012, for resnet50 and vit.

The tree is made in `<root>/imagenet.partial/`, and renamed at the end. A class of the training part
appears complete, by a rename. An image of the validation part that was not completely written has
the wrong size and is written again. A later run therefore continues where an earlier one stopped.
"""

import argparse
import hashlib
import io
import os
import re
import shutil
import tarfile
import warnings
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from co2.atomic import locked
from co2.errors import ConfigError, require
from tasks.prepare.samples import broken
from tasks.shared.pictures import FORMATS, BadImage, decode
from tasks.shared.progress import progress
from tasks.vision.image_folder import ImageFolder, pictures, shown
from tasks.vision.images import PARTS

ARCHIVES = {
    "train": ("ILSVRC2012_img_train.tar", "1d675b47d978889d74fa0da5fadfb00e"),
    "val": ("ILSVRC2012_img_val.tar", "29b22e2961454d5413ddabcf34fc5622"),
    "devkit": ("ILSVRC2012_devkit_t12.tar.gz", "fa75699e90414af021442c21a62c3abf"),
}
"""Names and MD5 sums of the archives, the same as in torchvision.datasets.imagenet."""

NUM_TRAIN, VAL_OF_CLASS = 1_281_167, 50
_DEVKIT = "ILSVRC2012_devkit_t12/data"
_PIECE = 1 << 24

HELP = """\
ImageNet-1K for task=resnet50 and task=vit, with dataset=imagenet.

It cannot be downloaded without an account, and is for non-commercial research and teaching.
Register at https://image-net.org (ILSVRC 2012), put these three files into one folder
  ILSVRC2012_img_train.tar (138 GB)  ILSVRC2012_img_val.tar (6.3 GB)
  ILSVRC2012_devkit_t12.tar.gz (2.5 MB)
and give it as --archives FOLDER. They are verified (MD5) and unpacked to
  <root>/imagenet/{train,val}/<class, such as n01440764>/*.JPEG
145 GB more, 1,281,167 and 50,000 images. The archives stay as they are. Stop it whenever you
like; the same command goes on where it stopped.

--check PATH looks for missing classes and images, and for files that do not begin as images do.
--verify PATH decodes every image, which finds damaged ones."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """See `DataSet.arguments`."""
    parser.add_argument("--archives", metavar="FOLDER", help="where the three archives lie")
    parser.add_argument("--unverified", action="store_true", help="do not compare MD5 sums")


def run(options: argparse.Namespace) -> str:
    """See `DataSet.run`."""
    archives = None if options.archives is None else Path(options.archives)
    final = prepare(Path(options.root), archives, verify=not options.unverified)
    return f"{final}: ready; train with: task=resnet50 resnet50.dataset=imagenet"


def prepare(root: Path, archives: Path | None, verify: bool = True) -> Path:
    """Return the folder `root/imagenet`, which is made unless it exists.

    Args:
        root: folder of all data sets.
        archives: the folder of the three archives.
        verify: whether to compare their MD5 sums first. A later run does not verify again what an
            interrupted one has verified.
    Raises:
        ConfigError: an archive is missing or damaged, or `root` cannot be written.
    """
    final = root / "imagenet"
    if final.exists():
        return final
    files = _found(archives)
    try:
        with locked(final):
            if not final.exists():
                work = final.with_name(final.name + ".partial")
                work.mkdir(parents=True, exist_ok=True)
                if verify:
                    for part, file in files.items():
                        _verify(file, ARCHIVES[part][1], work)
                _unpack_train(files["train"], work / "train")
                _unpack_val(files["val"], _val_classes(files["devkit"]), work / "val")
                for note in work.glob("*.verified"):
                    note.unlink()
                os.rename(work, final)
    except OSError as error:
        what = f"{error.filename or final}: {error.strerror or error}"
        raise ConfigError("--root", root, f"{what}; make room or choose another") from None
    return final


def check(path: Path, options: argparse.Namespace) -> Iterator[str]:
    """See `DataSet.check`. Finds missing and unknown classes, wrong counts and files that do not
    begin as images do. Only the beginning of an image is read."""
    for part in PARTS:
        if not (path / part).is_dir():
            yield f"{part}: no such folder"
            continue
        there = {entry.name for entry in (path / part).iterdir() if entry.is_dir()}
        yield from (f"{part}/{name}: missing" for name in sorted(_classes() - there))
        yield from (f"{part}/{shown(name)}: no class" for name in sorted(there - _classes()))
        yield from _check_part(path, part, sorted(there & _classes()))


def verify(path: Path) -> Iterator[str]:
    """See `DataSet.verify`."""
    folder = ImageFolder(path, "--verify", path)
    for part, counts in folder.counts.items():

        def fault(number: int, part: str = part) -> str | None:
            name, _ = folder.path(part, number)
            try:
                decode(path / name)
            except BadImage as error:
                return f"{shown(name)} {error}"
            return None

        yield from broken(f"decoding {part}", int(counts.sum()), fault)


def _check_part(path: Path, part: str, classes: list[str]) -> Iterator[str]:
    def looked(name: str) -> tuple[int, list[str]]:
        faults, files = [], sorted(pictures(path / part / name))
        for file in files:
            fault = _begun(path / part / name / file)
            if fault is not None:
                faults.append(f"{part}/{name}/{shown(file)} {fault}")
        return len(files), faults

    whole = 0
    # Threads are enough: decoding and waiting for a disk release the interpreter's lock.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        with progress(f"looking through {part}", len(classes)) as advance:
            for name, (found, faults) in zip(classes, pool.map(looked, classes), strict=True):
                if part == "val" and found != VAL_OF_CLASS:
                    yield f"val/{name}: {found} pictures instead of {VAL_OF_CLASS}"
                if part == "train" and not found:
                    yield f"train/{name}: no picture"
                yield from faults
                whole += found
                advance(1)
    if part == "train" and whole != NUM_TRAIN:
        yield f"train: {whole:,} pictures instead of {NUM_TRAIN:,}"


def _begun(file: Path) -> str | None:
    from PIL import Image

    try:
        with warnings.catch_warnings():  # about odd metadata
            warnings.simplefilter("ignore")
            Image.open(file, formats=FORMATS).close()
    except Exception as error:  # each of PIL's decoders raises errors of its own
        return f"is no picture ({type(error).__name__})"
    return None


def _classes() -> set[str]:
    """Return the WordNet names of the 1000 classes, from timm."""
    from timm.data import ImageNetInfo

    return set(ImageNetInfo("imagenet-1k").label_names())


def _found(archives: Path | None) -> dict[str, Path]:
    where = "from https://image-net.org, after registration"
    names = [name for name, _ in ARCHIVES.values()]
    hint = f"give the folder that holds {_listed(names)}, {where}"
    if archives is None:
        raise ConfigError("--archives", "", hint)
    require(archives.is_dir(), "--archives", archives, f"no such folder; {hint}")
    files = {part: archives / name for part, (name, _) in ARCHIVES.items()}
    missing = [file.name for file in files.values() if not file.is_file()]
    require(not missing, "--archives", archives, f"holds no {_listed(missing)}; get it {where}")
    return files


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _verify(file: Path, md5: str, work: Path) -> None:
    """Compare a file with its MD5 sum, unless an earlier run has verified it unchanged."""
    state = file.stat()
    note, mark = work / f"{file.name}.verified", f"{state.st_size} {state.st_mtime_ns}"
    if note.exists() and note.read_text() == mark:
        return
    digest = hashlib.md5(usedforsecurity=False)
    with progress(f"verifying {file.name}", state.st_size) as advance, file.open("rb") as data:
        while piece := data.read(_PIECE):
            digest.update(piece)
            advance(len(piece))
    hint = f"{file.name} is damaged or another file: its MD5 sum is not {md5}; fetch it again"
    require(digest.hexdigest() == md5, "--archives", file.parent, hint)
    note.write_text(mark)


def _unpack_train(file: Path, target: Path) -> None:
    """Unpack the training archive, which contains an archive for each class."""
    target.mkdir(exist_ok=True)
    with progress(f"unpacking {file.name}", file.stat().st_size) as advance:
        with _tar(file) as outer:
            for member in outer:
                name = PurePosixPath(member.name).stem
                if not member.isfile() or not re.fullmatch(r"n\d{8}", name):
                    continue
                if not (target / name).exists():
                    aside = target / f".{name}"
                    shutil.rmtree(aside, ignore_errors=True)
                    aside.mkdir()
                    with tarfile.open(fileobj=outer.extractfile(member)) as inner:
                        for picture in inner:
                            _write(inner, picture, aside)
                    os.rename(aside, target / name)
                advance(member.size)


def _unpack_val(file: Path, classes: list[str], target: Path) -> None:
    """Unpack the validation archive, whose images are numbered from 1 and not sorted by class;
    `classes[n - 1]` is the class of image n."""
    for name in set(classes):
        (target / name).mkdir(parents=True, exist_ok=True)
    with progress(f"unpacking {file.name}", file.stat().st_size) as advance:
        with _tar(file) as heap:
            for member in heap:
                number = re.fullmatch(r"ILSVRC2012_val_(\d{8})\.JPEG", member.name.split("/")[-1])
                if number:
                    _write(heap, member, target / classes[int(number[1]) - 1])
                advance(member.size)


def _val_classes(devkit: Path) -> list[str]:
    """Return the class of each validation image, in the order of their numbers."""
    from scipy.io import loadmat

    with _tar(devkit) as kit:
        meta = kit.extractfile(f"{_DEVKIT}/meta.mat")
        truth = kit.extractfile(f"{_DEVKIT}/ILSVRC2012_validation_ground_truth.txt")
        assert meta is not None and truth is not None
        synsets = loadmat(io.BytesIO(meta.read()), squeeze_me=True)["synsets"]
        names = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
        return [names[int(line)] for line in truth.read().split()]


@contextmanager
def _tar(file: Path) -> Iterator[tarfile.TarFile]:
    """Open an archive. If it is damaged, a `ConfigError` that names it is raised."""
    try:
        with tarfile.open(file) as archive:
            yield archive
    except (tarfile.TarError, EOFError, KeyError, zlib.error) as error:
        hint = f"{file.name} is damaged ({error}); fetch it again"
        raise ConfigError("--archives", file.parent, hint) from None


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Write one image of an archive, unless it is there completely."""
    target = folder / PurePosixPath(member.name).name
    if not member.isfile() or (target.exists() and target.stat().st_size == member.size):
        return
    data = archive.extractfile(member)
    assert data is not None
    with target.open("wb") as out:
        shutil.copyfileobj(data, out)
