"""ModelNet40 as point clouds, for the linear SVM that papers report on it.

Wu et al., "3D ShapeNets" (CVPR 2015), in the layout of modelnet40_normal_resampled (Qi et al.,
PointNet++), of whose text files nothing but numbers can be read:

    modelnet40_shape_names.txt              airplane, …: the categories, one a line
    modelnet40_train.txt, _test.txt         airplane_0001, …: the clouds, one a line
    airplane/airplane_0001.txt, …           x,y,z,nx,ny,nz: a point of 10,000 a line
"""

from pathlib import Path

import numpy as np

from co2.errors import ConfigError, require
from tasks.shapenet.clouds import PARTS, Clouds

NAMES = "modelnet40_shape_names.txt"
NUM_CLOUDS = {"train": 9843, "test": 2468}
NUM_CATEGORIES = 40


def open_modelnet40(folder: Path, key: str) -> dict[str, Clouds]:
    """Open both parts of a folder in the layout above. Only the lists are read, not the clouds.

    Args:
        key: key of the configuration that chose the folder, for errors.
    Raises:
        ConfigError: a list or a file is missing, or a list names no cloud or an unknown category.
    """
    categories = {name: number for number, name in enumerate(_lines(folder / NAMES, key))}
    parts = {}
    for part in PARTS:
        path = folder / f"modelnet40_{part}.txt"
        names = _lines(path, key)
        for name in names:
            known = name.rpartition("_")[0] in categories
            require(known, key, path, f"{name[:60]} is of no category in {NAMES}")
        files = tuple(folder / name.rpartition("_")[0] / f"{name}.txt" for name in names)
        for file in files:
            require(file.is_file(), key, file, f"is missing; {path} names it")
        kinds = np.array([categories[name.rpartition("_")[0]] for name in names], np.int64)
        parts[part] = Clouds(kinds, None, files, key)
    return parts


def _lines(path: Path, key: str) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise ConfigError(key, path, f"cannot be read ({why})") from None
    found = [line for line in lines if line]
    require(bool(found), key, path, "names nothing")
    return found
