"""Small sets of clouds in the layouts of ShapeNet-55 and ModelNet40."""

from pathlib import Path

import numpy as np


def write(folder: Path, train: int = 14, test: int = 5, points: int = 40) -> Path:
    """A folder in the layout of ShapeNet-55: two categories, 40 points in four columns."""
    for name in ("shapenet_pc", "ShapeNet-55"):
        (folder / name).mkdir(parents=True)
    source = np.random.default_rng(0)
    for part, number in (("train", train), ("test", test)):
        names = [f"0269{n % 2}156-{part}{n}-a.npy" for n in range(number)]
        for n, name in enumerate(names):
            cloud = source.normal(size=(points, 4)) * [1, 1, 5 if n % 2 else 0.2, 1] + 7
            np.save(folder / "shapenet_pc" / name, cloud.astype(np.float64))
        (folder / "ShapeNet-55" / f"{part}.txt").write_text("\n".join(names) + "\n\n")
    return folder


def modelnet40(folder: Path, train: int = 12, test: int = 6, points: int = 40) -> Path:
    """A folder in the layout of ModelNet40: two categories, flat and long."""
    names, source = ("flat", "night_stand"), np.random.default_rng(1)
    folder.mkdir()
    (folder / "modelnet40_shape_names.txt").write_text("\n".join(names) + "\n")
    for part, number in (("train", train), ("test", test)):
        listed = [f"{names[n % 2]}_{n:04d}{part == 'test':d}" for n in range(number)]
        (folder / f"modelnet40_{part}.txt").write_text("\n".join(listed) + "\n")
        for n, name in enumerate(listed):
            cloud = source.normal(size=(points, 6)) * [1, 1, 5 if n % 2 else 0.1, 1, 1, 1] + 3
            file = folder / names[n % 2] / f"{name}.txt"
            file.parent.mkdir(exist_ok=True)
            np.savetxt(file, cloud, "%.6f", delimiter=",")
    return folder
