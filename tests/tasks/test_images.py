"""MNIST, crops, RandAugment, erasing and mixing."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from tasks.shared.randomness import generator, seeded
from tasks.vision.images import (
    MEAN,
    MNIST,
    STD,
    central_crop,
    erasing,
    mixing,
    normalized,
    rand_augment,
    random_crop,
)


@pytest.fixture(scope="module")
def photo() -> torch.Tensor:
    """uint8 [3, 60, 90], smooth."""
    low = np.random.default_rng(0).integers(0, 256, (5, 7, 3)).astype(np.uint8)
    image = Image.fromarray(low).resize((90, 60), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def test_every_image_of_mnist_is_in_one_part() -> None:
    mnist = MNIST()
    seen = []
    for part, number in (("train", 300), ("val", 200)):
        assert mnist.counts[part].tolist() == [number] * 10
        for index in range(10 * number):
            image, label = mnist.read(part, index)
            assert image.shape == (3, 28, 28) and bool((image == image[0]).all())
            assert label == index // number  # class by class
            seen.append(image[0].numpy().tobytes())
    assert len(set(seen)) == 5000
    assert mnist.facts() == MNIST().facts()


def test_mnist_shows_digits() -> None:
    """A zero has no ink in its middle, a one has; the ink lies inside, on black."""
    mnist = MNIST()
    of = {
        n: torch.stack([mnist.read("train", index)[0] for index in range(300 * n, 300 * n + 300)])
        for n in (0, 1)
    }
    assert of[0].max() == 255 and of[0].min() == 0
    middle = {n: images[:, 0, 12:16, 12:16].float().mean().item() for n, images in of.items()}
    assert middle[0] < 50 and middle[1] > 100
    assert all(images[:, 0, 0].float().mean() < 1 for images in of.values())


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_crops_are_those_of_pil(photo: torch.Tensor, interpolation: str) -> None:
    """Ours are resized as uint8 tensors; no pixel is off by more than rounding."""
    from torchvision.transforms import v2

    how = v2.InterpolationMode(interpolation)
    picture = Image.fromarray(photo.permute(1, 2, 0).numpy())
    reference = v2.Compose(
        [v2.RandomResizedCrop(24, scale=(0.3, 1), interpolation=how), v2.RandomHorizontalFlip()]
    )
    crop = random_crop(24, 0.3, True, interpolation)
    for n in range(20):
        with seeded(3, n):
            ours = crop(photo)
        with seeded(3, n):
            theirs = v2.functional.pil_to_tensor(reference(picture))
        assert ours.shape == (3, 24, 24) and ours.dtype == torch.uint8
        assert (ours.int() - theirs.int()).abs().max() <= 1
    ours = central_crop(24, 32, interpolation)(photo)
    whole = picture.resize((48, 32), getattr(Image.Resampling, interpolation.upper()))
    theirs = v2.functional.pil_to_tensor(whole.crop((12, 4, 36, 28)))
    assert (ours.int() - theirs.int()).abs().max() <= 1


@pytest.mark.parametrize("flip", [True, False])
def test_crops_have_the_areas_and_shapes_asked_for(flip: bool) -> None:
    """Each pixel of the image tells its place, and so each crop its box."""
    rows, columns = torch.meshgrid(torch.arange(240), torch.arange(240), indexing="ij")
    image = torch.stack([rows, columns, torch.zeros_like(rows)]).to(torch.uint8)
    crop, areas, ratios, mirrored = random_crop(24, 0.2, flip, "bilinear"), [], [], []
    for n in range(300):
        with seeded(n):
            top, left, _ = crop(image).float()
        height, width = ((top[-1] - top[0]).mean(), (left[:, -1] - left[:, 0]).mean())
        areas.append(float(height * width.abs()) / 240**2)
        ratios.append(float(width.abs() / height))
        mirrored.append(bool(width < 0))
    assert 0.15 < min(areas) < 0.25 and 0.85 < max(areas) <= 1
    assert 0.7 < min(ratios) < 0.8 and 1.25 < max(ratios) < 1.45
    assert 110 < sum(mirrored) < 190 if flip else not any(mirrored)


def test_rand_augment_is_timms(photo: torch.Tensor) -> None:
    """With the arguments that timm's create_transform makes of DeiT's; global generators stay."""
    from timm.data import create_transform

    made = create_transform(
        60, is_training=True, auto_augment="rand-m9-mstd0.5-inc1", interpolation="bicubic"
    )
    (theirs,) = (t for t in made.transforms if type(t).__name__ == "RandAugment")
    for operation in theirs.ops:
        operation.magnitude_max = 9.99 if operation.name.startswith("Posterize") else None
    picture, changes = Image.fromarray(photo.permute(1, 2, 0).numpy()), rand_augment(9, 60)

    def augmented(n: int) -> tuple[torch.Tensor, int]:
        image: Any = photo
        with seeded(n):
            for change in changes:
                image = change(image)
        with seeded(n):
            return image, int(torch.randint(2**32, ()))

    states = random.getstate(), np.random.get_state()[1].tolist()
    images = [augmented(n) for n in range(120)]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states
    for image, seed in images:
        random.seed(seed)
        np.random.seed(seed)
        assert image.dtype == torch.uint8
        assert np.array_equal(image.permute(1, 2, 0).numpy(), np.array(theirs(picture)))
    same = sum(torch.equal(image, photo) for image, _ in images) / len(images)
    # (1/2)² = 0.25 where neither is applied, and a few operations that change nothing.
    assert 0.2 < same < 0.4


def test_the_largest_magnitude_leaves_a_picture(photo: torch.Tensor) -> None:
    to_pil, augment, _ = rand_augment(10, 60)
    picture: Any = to_pil(photo)
    for n in range(400):
        with seeded(n):
            assert augment(picture).size == (90, 60)


def test_erasing(photo: torch.Tensor) -> None:
    kept, shares, colours = photo.clone(), [], []
    for n in range(200):
        with seeded(n):
            image = erasing(0.25)(photo)
        changed = (image != photo).any(0)
        if not changed.any():
            continue
        rows, columns = changed.any(1).nonzero(), changed.any(0).nonzero()
        area = (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1)
        shares.append(area.item() / (60 * 90))
        colours.append(image[:, changed].float().mean(1) / 255)
        assert changed.sum() > 0.95 * area  # a rectangle of noise
    assert torch.equal(photo, kept)
    assert 0.15 < len(shares) / 200 < 0.35
    assert min(shares) > 0.015 and max(shares) < 0.35
    assert torch.stack(colours).mean(0).tolist() == pytest.approx(list(MEAN), abs=0.03)


def test_mixup_keeps_one_share_everywhere() -> None:
    keeps = [mixing(generator(n), 8, 0.8, 0.0) for n in range(400)]
    assert all(keep.unique().numel() == 1 for keep in keeps)
    shares = torch.stack([keep[0, 0] for keep in keeps])
    assert shares.mean().item() == pytest.approx(0.5, abs=0.05)
    variance = 1 / (4 * (2 * 0.8 + 1))  # of Beta(a, a)
    assert shares.var().item() == pytest.approx(variance, rel=0.15)


def test_cutmix_cuts_a_square() -> None:
    shares = []
    for n in range(400):
        keep = mixing(generator(n), 32, 0.0, 1.0)
        assert set(keep.unique().tolist()) <= {0.0, 1.0}
        cut = keep == 0
        rows, columns = cut.any(1).nonzero(), cut.any(0).nonzero()
        if len(rows):
            assert cut[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1].all()
            inside = rows.min() > 0 and rows.max() < 31 and 0 < columns.min() < columns.max() < 31
            assert not inside or len(rows) == len(columns)
        shares.append(1 - keep.mean().item())
    assert max(shares) > 0.8 and min(shares) < 0.02


def test_with_both_a_coin_decides() -> None:
    keeps = [mixing(generator(n), 8, 0.8, 1.0) for n in range(200)]
    mixed = sum(0 < keep[0, 0] < 1 for keep in keeps)
    assert 70 < mixed < 130


def test_normalized() -> None:
    images = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    expected = torchvision.transforms.functional.normalize(images / 255, MEAN, STD)
    assert torch.allclose(normalized(images), expected, atol=1e-5)
    assert normalized(images).dtype == torch.float32
