"""Pictures: folders of them, MNIST, crops, RandAugment, erasing and mixing; resnet50's and vit's
models, loss and evaluation.

What all tasks must do is in test_contract.py.
"""

import io
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image
from torchvision.datasets import ImageFolder as Reference
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2.functional import pil_to_tensor, resize

from co2.config import Validation
from co2.errors import ConfigError
from tasks.shared.pictures import BadImage, decode
from tasks.shared.randomness import generator, seeded, uniforms
from tasks.vision import resnet50, vit
from tasks.vision.classification import Classification, DatasetName
from tasks.vision.crops import RandomCrop, central_crop
from tasks.vision.held import mnist
from tasks.vision.image_folder import ImageFolder
from tasks.vision.images import MEAN, STD, erasing, mixing, normalized, rand_augment
from tests.tasks.build import mesh, num_parameters
from tests.tasks.pictures import COLOURS, picture, task, tree


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tree(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "tree"))


def opened(folder: Path) -> ImageFolder:
    return ImageFolder(folder, "data.path", "tree")


def test_pictures_and_labels_are_those_of_torchvision(copy: Path) -> None:
    deeper = copy / "train" / "red" / "a" / "b"
    deeper.mkdir(parents=True)
    picture((1, 2, 3), (30, 20), 0).save(deeper / "x.png")
    (copy / "train" / "red" / "boxes.txt").write_text("passed by")
    (copy / "train" / "readme.txt").write_text("passed by")
    (copy / "val" / ".hidden").mkdir()
    (copy / "val" / "red" / ".x.jpg").write_text("passed by")
    images = opened(copy)
    assert images.classes == sorted(COLOURS) and images.num_classes == 3
    assert {part: list(counts) for part, counts in images.counts.items()} == {
        "train": [8, 9, 8],
        "val": [5, 5, 5],
    }
    reference = Reference(str(copy / "train"))
    found = {}
    for index in range(25):
        name, label = images.path("train", index)
        read, same = images.read("train", index)
        assert same == label
        found[str(copy / name)] = label
        expected = np.array(Image.open(copy / name).convert("RGB"))
        assert read.dtype == torch.uint8 and np.array_equal(read.permute(1, 2, 0), expected)
    assert found == dict(reference.imgs)
    order = [images.path("train", index)[0] for index in range(25)]
    assert [images.path("train", n)[1] for n in range(25)] == [0] * 8 + [1] * 9 + [2] * 8
    assert order[8:17] == sorted(order[8:17])


def test_names_alone_are_fingerprinted(copy: Path) -> None:
    before = opened(copy).facts()
    assert opened(copy).facts() == before
    os.rename(copy / "val" / "red" / "val_0.JPEG", copy / "val" / "red" / "other.JPEG")
    assert opened(copy).facts()["names_sha256"] != before["names_sha256"]


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("RGB", "JPEG"),
        ("L", "JPEG"),
        ("CMYK", "JPEG"),
        ("RGB", "PNG"),
        ("P", "PNG"),
        ("RGBA", "PNG"),
        ("L", "BMP"),
        ("RGB", "WEBP"),
    ],
)
def test_every_kind_of_picture_is_rgb(tmp_path: Path, mode: str, kind: str) -> None:
    file = tmp_path / "picture.jpg"  # whatever its name says: ImageNet has a PNG among its JPEGs
    picture((200, 100, 50), (31, 17), 0).convert(mode).save(file, kind)
    expected = np.array(Image.open(file).convert("RGB"))
    assert np.array_equal(decode(file).permute(1, 2, 0), expected)


def jpeg() -> bytes:
    data = io.BytesIO()
    picture((9, 99, 199), (64, 48), 0).save(data, "JPEG")
    return data.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is no picture"),
        (b"no picture at all", "is no picture"),
        (jpeg()[:-40], "is damaged (image file is truncated"),
        (jpeg()[:-2], "is damaged (image file is truncated"),
        (b"\x89PNG\r\n\x1a\n" + bytes(20), "is no picture"),
    ],
)
def test_bad_pictures(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "x.jpg").write_bytes(data)
    with pytest.raises(BadImage) as caught:
        decode(tmp_path / "x.jpg")
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_a_bad_picture_is_named_when_it_is_met(copy: Path) -> None:
    file = copy / "train" / "élan" / "train_3.JPEG"
    file.write_bytes(file.read_bytes()[:-60])
    images = opened(copy)
    with pytest.raises(ConfigError) as caught:
        images.read("train", 16 + 3)
    start = "data.path=tree: train/élan/train_3.JPEG is damaged (image file is trunc"
    assert str(caught.value).startswith(start)
    file.unlink()
    with pytest.raises(ConfigError, match=r"train_3.JPEG cannot be read \(No such file"):
        images.read("train", 16 + 3)


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (lambda t: shutil.rmtree(t), "no such folder"),
        (lambda t: shutil.rmtree(t / "val"), "has no folder val; a folder of pictures needs"),
        (lambda t: emptied(t / "train"), "train holds no folder; a folder of pictures needs"),
        (lambda t: shutil.rmtree(t / "val" / "red"), "val has no folder red, which train has"),
        (lambda t: (t / "val" / "new").mkdir(), "train has no folder new, which val has"),
        (lambda t: emptied(t / "train" / "red"), "train/red holds no picture (.jpg, .jpeg"),
    ],
)
def test_a_tree_that_does_not_fit(copy: Path, spoil: Callable[[Path], None], line: str) -> None:
    spoil(copy)
    with pytest.raises(ConfigError) as caught:
        opened(copy)
    assert str(caught.value).startswith(f"data.path=tree: {line}")
    assert "\n" not in str(caught.value)


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


BOTH = pytest.mark.parametrize("name", ["resnet50", "vit"])
STRONG = {"rand_augment": 9, "random_erasing": 0.5, "mixup": 0.8, "cutmix": 1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tree(tmp_path_factory.mktemp("tree"))


def test_sizes() -> None:
    own = {"dataset": DatasetName.imagenet, "image_size": 224, "eval_resize": 256}
    assert num_parameters("resnet50", size=resnet50.Size.full, **own) == 25_557_032
    assert num_parameters("resnet50", size=resnet50.Size.full, depth=18, **own) == 11_689_512
    assert num_parameters("vit", size=vit.Size.base, **own) == 86_567_656
    assert num_parameters("vit", size=vit.Size.small, **own) == 22_050_664
    assert 0.68e6 < num_parameters("resnet50") < 0.74e6
    assert num_parameters("resnet50", depth=18) == num_parameters("resnet50")  # smoke, for both
    assert 0.33e6 < num_parameters("vit") < 0.37e6


def test_resnet_starts_as_goyals() -> None:
    own = {"dataset": DatasetName.imagenet, "image_size": 224, "eval_resize": 256}
    task_of = task("resnet50", size=resnet50.Size.full, depth=18, **own)
    model = task_of.model()
    assert model.fc.weight.std().item() == pytest.approx(0.01, rel=0.02)
    assert model.fc.weight.mean().abs().item() < 1e-4 and not model.fc.bias.any()
    assert all(not block.bn2.weight.any() for block in model.layer3)
    assert all(bool((block.bn1.weight == 1).all()) for block in model.layer3)
    decayed = {id(weight) for weight in task_of.optimizer(model).param_groups[0]["params"]}
    assert decayed == {id(weight) for weight in model.parameters() if weight.dim() > 1}
    conv = model.layer2[0].conv1.weight
    assert conv.std().item() == pytest.approx((2 / (conv[:, 0].numel())) ** 0.5, rel=0.02)


def test_vit_spares_positions_and_class_token() -> None:
    own = task("vit", drop_path=0.3)
    model = own.model()
    spared = {id(weight) for weight in own.optimizer(model).param_groups[1]["params"]}
    assert {id(model.pos_embed), id(model.cls_token)} <= spared
    assert id(model.patch_embed.proj.weight) not in spared
    rates = [m.drop_prob for m in model.modules() if type(m).__name__ == "DropPath"]
    assert max(rates) == pytest.approx(0.3)


def test_a_picture_changes_from_epoch_to_epoch_and_seed_to_seed(folder: Path) -> None:
    def first(seed: int, epoch: int) -> torch.Tensor:
        own = task(path=folder, batch_size=24, seed=seed, num_workers=1)
        images, _ = next(own.batches(mesh(), epoch))
        at = np.flatnonzero(own._sampler(1).indices(epoch, 0) == 5)[0]
        return images[at]

    assert torch.equal(first(0, 1), first(0, 1))
    assert not torch.equal(first(0, 0), first(0, 1))
    assert not torch.equal(first(0, 0), first(1, 0))


def test_repeats_of_a_picture_differ(folder: Path) -> None:
    own = task("vit", folder, batch_size=24, repeats=3, num_workers=1)
    images, labels = next(own.batches(mesh(), 0))
    samples = own._sampler(1).indices(0, 0)
    assert len(set(samples.tolist())) == 8
    for sample in set(samples.tolist()):
        views = np.flatnonzero(samples == sample)
        assert len(views) == 3 and len(set(labels[views].tolist())) == 1
        pairs = [(views[a], views[b]) for a, b in ((0, 1), (0, 2), (1, 2))]
        assert not any(torch.equal(images[a], images[b]) for a, b in pairs)


def test_labels_are_those_of_the_pictures(folder: Path) -> None:
    own = task(path=folder, batch_size=12, crop=0.8, num_workers=1)
    images, labels = next(own.batches(mesh(), 0))
    strongest = images.float().mean((2, 3)).argmax(1)  # blue, green, red: classes 0, 2, 1 by name
    assert labels.tolist() == [{2: 0, 1: 2, 0: 1}[colour] for colour in strongest.tolist()]


def test_an_export_names_the_classes(folder: Path) -> None:
    """In the order of the labels. Those of ImageNet are left to the libraries, which describe them
    in words."""
    from timm.data import ImageNetInfo

    def labels(own: Classification) -> list[str] | None:
        text = own.package(own.model()).files["config.json"]
        return json.loads(text).get("label_names")

    own = task(path=folder, num_workers=1)
    assert labels(own) == ["blue sky", "red", "élan"]
    with patch.object(own._images, "classes", ImageNetInfo().label_names()):
        assert labels(own) is None


def test_the_loss_is_that_of_smoothed_and_mixed_labels() -> None:
    own = task("vit", label_smoothing=0.1, cutmix=1.0, num_workers=1)
    model = own.model().eval()
    images, labels, keep = next(own.batches(mesh(), 3))
    assert 0 < keep.mean() < 1
    inputs, soft = normalized(images), F.one_hot(labels, 10) * 0.9 + 0.1 / 10
    order = [3, 0, 1, 2]
    mixed = torch.where(keep == 1, inputs, inputs[order])
    soft = soft * keep.mean() + soft[order] * (1 - keep.mean())
    expected = -(soft * model(mixed).log_softmax(1)).sum(1).mean()
    loss = own.loss(model, (images, labels, keep))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_mixing_differs_between_replicas_and_draws() -> None:
    own = task("vit", mixup=0.8)
    keeps = [own.mixing(draw, replica) for draw in range(3) for replica in range(2)]
    assert len({keep[0, 0].item() for keep in keeps}) == 6
    assert task("vit").mixing(0, 0) is None


@BOTH
def test_evaluation_counts_every_picture_once(folder: Path, name: str) -> None:
    own = task(name, folder, workers=1, image_size=28, eval_resize=35, num_workers=1)
    model = own.model()
    if name == "resnet50":
        own.loss(model, next(own.batches(mesh(), 0)))  # moves the running means
    scores = own.evaluate(model)
    assert all(module.training for module in model.modules())
    model.eval()
    from tasks.vision.crops import central_crop

    crop = central_crop(28, 35, own.interpolation)
    images, labels = own._images.take("val", range(15))
    with torch.no_grad():
        logits = torch.cat([model(normalized(crop(image)[None])) for image in images])
    assert list(scores) == ["loss", "top1", "top5"]
    assert scores["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-4)
    assert scores["top1"] == (logits.argmax(1) == labels).double().mean().item()
    assert scores["top5"] == 1.0  # of three classes
    assert own.baselines() == {"majority_top1": 1 / 3}


def test_the_halves_of_the_validation_images() -> None:
    """Those of MNIST have every class equally often."""
    for part in Validation:
        own = task(validation=part, num_workers=1)
        _, labels = own._images.take("val", own._validation.tolist())
        of_class = 200 if part is Validation.all else 100
        assert labels.bincount().tolist() == [of_class] * 10


def test_top5_is_among_the_first_five() -> None:
    own = task(num_workers=1)
    model = own.model()
    with torch.no_grad():
        model.fc.weight.zero_()
        model.fc.bias.copy_(torch.arange(10.0))  # always names 9, then 8, 7, 6, 5
    counts = own._images.counts["val"]
    scores = own.evaluate(model)
    assert scores["top1"] == counts[9] / counts.sum()
    assert scores["top5"] == counts[5:].sum() / counts.sum()


def test_the_same_digits_whatever_the_seed() -> None:
    facts = []
    for seed in (0, 1):
        own = task(seed=seed, num_workers=2)
        facts.append(own.fingerprint())
    assert facts[0] == facts[1]
    assert facts[0]["data"] == "mnist" and facts[0]["num_classes"] == 10
    assert sum(facts[0]["num_samples"].values()) == 5000


def test_a_damaged_picture_ends_training_in_one_line(tmp_path: Path) -> None:
    path = tree(tmp_path / "tree", train=2, val=2)
    file = path / "val" / "red" / "val_1.JPEG"
    file.write_bytes(file.read_bytes()[:-50])
    for workers in (0, 1):
        own = task(path=path, workers=workers, num_workers=1)
        with pytest.raises(ConfigError) as caught:
            own.evaluate(own.model())
        assert str(caught.value).startswith(f"data.path={path}: val/red/val_1.JPEG is damaged")


def test_imagenet_that_is_not_there_or_not_whole(tmp_path: Path) -> None:
    own = task("vit", root=str(tmp_path), dataset=DatasetName.imagenet)
    with pytest.raises(ConfigError, match=r"^vit\.dataset=imagenet: .*--archives FOLDER"):
        own.setup(1)
    tree(tmp_path / "imagenet", train=2, val=1)
    with pytest.raises(ConfigError, match=r"holds 3 classes instead of 1000; .* --check "):
        own.setup(1)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("resnet50", "eval_resize", 27),
        ("vit", "image_size", 15),
    ],
)
def test_config(name: str, key: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        task(name, **{key: value})
    assert caught.value.key == key
