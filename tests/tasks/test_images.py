"""MNIST, crops, RandAugment, erasing and mixing."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2.functional import pil_to_tensor, resize

from tasks.shared.randomness import generator, seeded, uniforms
from tasks.vision.crops import RandomCrop, central_crop
from tasks.vision.held import mnist
from tasks.vision.images import MEAN, STD, erasing, mixing, normalized, rand_augment

RATIOS = (3 / 4, 4 / 3)


@pytest.fixture(scope="module")
def photo() -> torch.Tensor:
    """uint8 [3, 60, 90], smooth."""
    low = np.random.default_rng(0).integers(0, 256, (5, 7, 3)).astype(np.uint8)
    image = Image.fromarray(low).resize((90, 60), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def test_every_image_of_mnist_is_in_one_part() -> None:
    held, seen = mnist(), []
    for part, number in (("train", 300), ("val", 200)):
        assert held.counts[part].tolist() == [number] * 10
        images, labels = held.take(part, range(10 * number))
        assert images.shape == (10 * number, 1, 28, 28) and images.dtype == torch.uint8
        assert labels.tolist() == [n // number for n in range(10 * number)]  # class by class
        seen += [image.numpy().tobytes() for image in images]
    assert len(set(seen)) == 5000
    assert held.facts() == mnist().facts()


def test_mnist_shows_digits() -> None:
    """A zero has no ink in its middle, a one has; the ink lies inside, on black."""
    held = mnist()
    of = {n: held.take("train", range(300 * n, 300 * n + 300))[0] for n in (0, 1)}
    assert of[0].max() == 255 and of[0].min() == 0
    middle = {n: images[:, 0, 12:16, 12:16].float().mean().item() for n, images in of.items()}
    assert middle[0] < 50 and middle[1] > 100
    assert all(images[:, 0, 0].float().mean() < 1 for images in of.values())


def drawn(number: int) -> np.ndarray:
    """The random numbers of crops."""
    return uniforms(RandomCrop.draws, 3, np.arange(number))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_crops_are_those_of_pil(photo: torch.Tensor, interpolation: str) -> None:
    """Ours are resized as uint8 tensors; no pixel is off by more than rounding."""
    how = getattr(Image.Resampling, interpolation.upper())
    picture = Image.fromarray(photo.permute(1, 2, 0).numpy())
    crop, draws = RandomCrop(24, 0.3, True, interpolation), drawn(20)
    crops, boxes = crop([photo] * 20, draws), crop.boxes(draws, 60, 90).T.tolist()
    assert crops.shape == (20, 3, 24, 24) and crops.dtype == torch.uint8
    mirrored = 0
    for ours, (top, left, height, width) in zip(crops, boxes, strict=True):
        part = picture.crop((left, top, left + width, top + height)).resize((24, 24), how)
        theirs = pil_to_tensor(part).int()
        off = min((ours.int() - other).abs().max() for other in (theirs, theirs.flip(-1)))
        mirrored += bool((ours.int() - theirs).abs().max() > off)
        assert off <= 1
    assert 4 < mirrored < 16
    ours = central_crop(24, 32, interpolation)(photo)
    theirs = pil_to_tensor(picture.resize((48, 32), how).crop((12, 4, 36, 28)))
    assert (ours.int() - theirs.int()).abs().max() <= 1


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("whole", [(28, 28), (64, 50)])  # as digits are, and larger than crops
def test_a_batch_is_cropped_as_one_by_one(whole: tuple[int, int], interpolation: str) -> None:
    """By torchvision's resized_crop. Only cubic filters overshoot, and are clipped elsewhere."""
    if whole == (28, 28):
        images = mnist().take("train", range(0, 3000, 50))[0]
    else:
        low = torch.randint(
            0, 256, (60, 3, 8, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
        )
        images = resize(low, list(whole))
    crop, draws = RandomCrop(28, 0.5, True, interpolation), drawn(60)
    ours, theirs = crop(images, draws), crop(list(images), draws)
    off = (ours.int() - theirs.int()).abs().float()
    assert off.mean() < 0.2 and off.max() <= (1 if interpolation == "bilinear" else 3)
    for n in (0, 59):  # and a crop does not depend on the others
        assert torch.equal(crop(images[n : n + 1], draws[n : n + 1])[0], ours[n])


@pytest.mark.parametrize("flip", [True, False])
def test_crops_have_the_areas_and_shapes_asked_for(flip: bool) -> None:
    """Each pixel of the image tells its place, and so each crop its box."""
    rows, columns = torch.meshgrid(torch.arange(240), torch.arange(240), indexing="ij")
    image = torch.stack([rows, columns, torch.zeros_like(rows)]).to(torch.uint8)
    areas, ratios, mirrored = [], [], []
    for top, left, _ in RandomCrop(24, 0.2, flip, "bilinear")([image] * 300, drawn(300)).float():
        height, width = ((top[-1] - top[0]).mean(), (left[:, -1] - left[:, 0]).mean())
        areas.append(float(height * width.abs()) / 240**2)
        ratios.append(float(width.abs() / height))
        mirrored.append(bool(width < 0))
    assert 0.15 < min(areas) < 0.25 and 0.85 < max(areas) <= 1
    assert 0.7 < min(ratios) < 0.8 and 1.25 < max(ratios) < 1.45
    assert 110 < sum(mirrored) < 190 if flip else not any(mirrored)


def test_boxes_are_spread_as_torchvisions() -> None:
    """Places and sides, where most tries fit and where none does."""
    for height, width, smallest in ((28, 28, 0.85), (60, 90, 0.08), (10, 80, 1.0)):
        ours = RandomCrop(24, smallest, True, "bilinear").boxes(drawn(4000), height, width).T
        image = torch.empty(3, height, width)
        with seeded(0):
            rule = (smallest, 1), RATIOS
            theirs = [RandomResizedCrop.get_params(image, *rule) for _ in range(4000)]
        error = 5 * np.std(theirs, 0) * (2 / 4000) ** 0.5 + 1e-9
        assert (np.abs(ours.mean(0) - np.mean(theirs, 0)) <= error).all()
        assert np.std(ours, 0) == pytest.approx(np.std(theirs, 0), rel=0.1, abs=1e-9)


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
