"""Packs Fashion-MNIST for resnet50 and vit: an array of each class, which training holds in memory.

The folder appears whole, by a rename. What was stopped begins anew, which takes seconds.
"""

import argparse
import gzip
import hashlib
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from co2.atomic import locked, written_aside
from co2.errors import ConfigError, require
from tasks.vision.images import PARTS
from tasks.vision.packed import FASHION_MNIST, files, packed

CLASSES = (
    "0-t-shirt",
    "1-trouser",
    "2-pullover",
    "3-dress",
    "4-coat",
    "5-sandal",
    "6-shirt",
    "7-sneaker",
    "8-bag",
    "9-ankle-boot",
)
"""With the published numbers, so that these are the labels."""
SOURCES = {
    "train": (
        (
            "train-images-idx3-ubyte.gz",
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        ),
        (
            "train-labels-idx1-ubyte.gz",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        ),
    ),
    "val": (
        (
            "t10k-images-idx3-ubyte.gz",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        ),
        (
            "t10k-labels-idx1-ubyte.gz",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    ),
}
"""Images and labels of each part: file, and SHA-256 of its content. That of the packed file is
another one with every packer, Debian's too."""
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package puts them."""
_PACKAGE = "dataset-fashion-mnist"
PACKED = "683671886fab005fe7a947f1ab258c26e4dc85a6da6d7f25554ff10a6c03b4f5"
"""SHA-256 of all pixels and labels as they are packed."""

HELP = f"""\
Fashion-MNIST for task=resnet50 and task=vit, with data.path=FOLDER.

60,000 and 10,000 grey images of 28×28 of ten kinds of clothing (Xiao et al., 2017), 31 MB, under
the MIT licence. Debian's package has them (apt-get install {_PACKAGE}); otherwise
put these files from https://github.com/zalandoresearch/fashion-mnist into one folder
  train-images-idx3-ubyte.gz  train-labels-idx1-ubyte.gz
  t10k-images-idx3-ubyte.gz   t10k-labels-idx1-ubyte.gz
and give it as --source FOLDER. Their content is verified (SHA-256) and packed into
  <root>/{FASHION_MNIST}/{{train,val}}/<class, such as 0-t-shirt>.npy
55 MB, which training holds in memory. The sources stay as they are."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """See `DataSet.arguments`."""
    hint = f"where the four files lie (default: {DEBIAN})"
    parser.add_argument("--source", metavar="FOLDER", help=hint)


def run(options: argparse.Namespace) -> str:
    """See `DataSet.run`."""
    final = prepare(Path(options.root), None if options.source is None else Path(options.source))
    return f"{final}: ready; train with: task=resnet50 data.path={final} resnet50.flip=true"


def prepare(root: Path, source: Path | None = None) -> Path:
    """Return the folder `root/fashion_mnist`, which is made unless it exists.

    Args:
        root: folder of all data sets.
        source: the folder of the four files; None takes Debian's.
    Raises:
        ConfigError: a file is missing, damaged or another one, or `root` cannot be written.
    """
    final = root / FASHION_MNIST
    if final.exists():
        return final
    folder = source or DEBIAN
    missing = [name for own in SOURCES.values() for name, _ in own if not (folder / name).is_file()]
    hint = f"holds no {', '.join(missing)}; apt-get install {_PACKAGE} has them, or give --source"
    require(not missing, "--source", folder, hint)
    parts = {part: [_array(folder, *file) for file in own] for part, own in SOURCES.items()}
    try:
        with locked(final), written_aside(final, lambda: True) as aside:
            for part, (images, labels) in parts.items():
                (aside / part).mkdir()
                for label, name in enumerate(CLASSES):
                    np.save(aside / part / f"{name}.npy", images[labels == label])
    except OSError as error:
        what = f"{error.filename or final}: {error.strerror or error}"
        raise ConfigError("--root", root, f"{what}; make room or choose another") from None
    return final


def check(path: Path, options: argparse.Namespace) -> Iterator[str]:
    """See `DataSet.check`. Compares all pixels and labels with the published ones."""
    for part in PARTS:
        there = files(path, part)
        yield from (f"{part}/{name}.npy: missing" for name in CLASSES if name not in there)
        yield from (f"{part}/{name}.npy: no class" for name in there if name not in CLASSES)
    try:
        found = packed(path, "--check", path).facts()["sha256"]
    except ConfigError as error:
        yield error.hint
        return
    if found != PACKED:
        yield f"pixels or labels differ from the published ones: their SHA-256 is not {PACKED}"


def verify(path: Path) -> Iterator[str]:
    """See `DataSet.verify`. To read the arrays is to decode them."""
    packed(path, "--verify", path)
    yield from ()


def _array(folder: Path, name: str, digest: str) -> np.ndarray:
    """Return the values of a file in the format idx, uint8."""
    try:
        content = gzip.decompress((folder / name).read_bytes())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        hint = f"{name} is damaged ({error}); fetch it again"
        raise ConfigError("--source", folder, hint) from None
    hint = f"{name} is damaged or another file: the SHA-256 of its content is not {digest}"
    require(hashlib.sha256(content).hexdigest() == digest, "--source", folder, hint)
    dimensions = content[3]
    shape = np.frombuffer(content, ">u4", dimensions, 4).tolist()
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
