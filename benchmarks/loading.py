"""How fast training pictures are read: our loader against torchvision's reference.

Both read the same tree of JPEGs, laid out like ImageNet's and written for this measurement: smooth
random pictures of 500×375 with a little noise, quality 90, about as many bytes as ImageNet's. Both
crop to 224 and flip. The reference is ImageFolder with RandomResizedCrop, RandomHorizontalFlip,
ToTensor and Normalize in a DataLoader. Our loader yields uint8, which the loss normalizes on the
model's device; a row of its own adds that work to the loader. Another row is task=vit with all that
scale=paper does to its pictures: bicubic crops, RandAugment, erasing, mixing. All take turns on one
thread, and ratios are computed for each turn. Without a loading process, seconds are those of the
CPU, which other programs of the machine hardly change. With one, the measuring process only waits.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from benchmarks import report
from co2.comm.mesh import Mesh
from co2.config import DataConfig, OptimConfig, TrainConfig
from tasks.vision.images import MEAN, STD, normalized
from tasks.vision.resnet50 import ResNet50
from tasks.vision.vit import ViT

BATCH_SIZE, CLASSES = 32, 3
REFERENCE, OURS, WITH_FP32 = "torchvision", "ours", "ours, normalized too"
DEIT = "ours, augmented as for ViT"


def write_tree(folder: Path, num_images: int) -> float:
    """Write a tree of JPEGs. Returns their mean size in bytes."""
    sizes = []
    for n in range(num_images):
        rng = np.random.default_rng(n)
        low = rng.integers(0, 256, (9, 12, 3)).astype(np.uint8)
        smooth = Image.fromarray(low).resize((500, 375), Image.Resampling.BICUBIC)
        grained = np.array(smooth) + rng.normal(0, 16, (375, 500, 1))
        parts = ["train", "val"] if n < CLASSES else ["train"]
        for part in parts:
            file = folder / part / f"n{n % CLASSES:08d}" / f"{n}.JPEG"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(grained.clip(0, 255).astype(np.uint8)).save(file, quality=90)
        sizes.append(file.stat().st_size)
    return statistics.mean(sizes)


def reference(folder: Path, workers: int) -> Iterator[Any]:
    """Endless batches of torchvision's own loader."""
    steps = [
        transforms.RandomResizedCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ]
    data = datasets.ImageFolder(str(folder / "train"), transforms.Compose(steps))
    loader = DataLoader(
        data,
        BATCH_SIZE,
        shuffle=True,
        num_workers=workers,
        drop_last=True,
        persistent_workers=workers > 0,  # as ours, which stay for all epochs
    )
    while True:
        yield from loader


def ours(folder: Path, workers: int) -> Iterator[Any]:
    """Endless training batches of task=resnet50."""
    config = ResNet50.Config(image_size=224, eval_resize=256)
    data = DataConfig(path=str(folder), workers=workers)
    task = ResNet50(config, TrainConfig(batch_size=BATCH_SIZE), OptimConfig(), data)
    task.setup(1)
    return task.batches(Mesh(0, 1, torch.device("cpu")), 0)


def ours_normalized(folder: Path, workers: int) -> Iterator[Any]:
    return (normalized(batch[0]) for batch in ours(folder, workers))


def ours_of_vit(folder: Path, workers: int) -> Iterator[Any]:
    """Endless training batches of task=vit with the augmentation of scale=paper."""
    mixed = {"rand_augment": 9, "random_erasing": 0.25, "mixup": 0.8, "cutmix": 1.0}
    config = ViT.Config(image_size=224, eval_resize=256, **mixed)  # type: ignore[arg-type]
    data = DataConfig(path=str(folder), workers=workers)
    task = ViT(config, TrainConfig(batch_size=BATCH_SIZE), OptimConfig(), data)
    task.setup(1)
    return task.batches(Mesh(0, 1, torch.device("cpu")), 0)


KINDS: dict[str, Callable[[Path, int], Iterator[Any]]] = {
    REFERENCE: reference,
    OURS: ours,
    WITH_FP32: ours_normalized,
    DEIT: ours_of_vit,
}


def rate(batches: Iterator[Any], num_batches: int, clock: Callable[[], float]) -> float:
    """Pictures per second, without the first batches, which are made while processes start."""
    for _ in islice(batches, 4):
        pass
    began = clock()
    for _ in islice(batches, num_batches):
        pass
    return num_batches * BATCH_SIZE / (clock() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        size = write_tree(Path(folder), args.images)
        for workers in (0, 1):
            clock = time.perf_counter if workers else time.process_time
            rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for _ in range(args.repeats):
                for kind, make in KINDS.items():
                    rates[kind].append(rate(make(Path(folder), workers), args.batches, clock))
            for kind, found in rates.items():
                pairs = zip(found, rates[REFERENCE], strict=True)
                ratios = [own / other for own, other in pairs]
                middle = statistics.median(ratios)
                spread = f"{middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                rows.append([str(workers), kind, f"{statistics.median(found):.0f}", spread])
                print(*rows[-1], sep="  ", flush=True)
    report.write(
        args.out / "loading.md",
        "Reading training pictures",
        f"{args.images} JPEGs of 500×375 and {size / 1e3:.0f} kB, cropped to 224; batches of "
        f"{BATCH_SIZE}, one thread, medians over {args.repeats} turns of {args.batches} batches. "
        "Without loading processes a second is one of the CPU.",
        ["loading processes", "loader", "pictures/s", "against torchvision (min to max)"],
        rows,
    )


if __name__ == "__main__":
    main()
