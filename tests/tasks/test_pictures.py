"""Pictures: folders of them, MNIST, crops, RandAugment, erasing and mixing; resnet50's and vit's
models, loss and evaluation.

What all tasks must do is in test_contract.py.
"""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.datasets import ImageFolder as Reference
from torchvision.transforms import RandomErasing, RandomResizedCrop
from torchvision.transforms.v2.functional import pil_to_tensor

from co2.config import Validation
from tasks.shared.randomness import generator, seeded, uniforms
from tasks.vision import resnet50, vit
from tasks.vision.classification import DatasetName
from tasks.vision.crops import RandomCrop, central_crop
from tasks.vision.held import mnist
from tasks.vision.image_folder import ImageFolder
from tasks.vision.images import MEAN, erasing, mixing, normalized, rand_augment
from tests.tasks.build import mesh, num_parameters, refusal
from tests.tasks.pictures import COLOURS, picture, task, tree


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tree(tmp_path_factory.mktemp("tree"))


def opened(folder: Path) -> ImageFolder:
    return ImageFolder(folder, "data.path", "tree")


def test_pictures_and_labels_are_those_of_torchvision(tmp_path: Path) -> None:
    """Whatever a name says of a picture's kind: ImageNet has a PNG among its JPEGs."""
    copy = tree(tmp_path / "tree")
    deeper = copy / "train" / "red" / "a" / "b"
    deeper.mkdir(parents=True)
    kinds = [("L", "JPEG"), ("CMYK", "JPEG"), ("P", "PNG"), ("RGBA", "PNG"), ("RGB", "WEBP")]
    for number, (mode, kind) in enumerate(kinds):
        made = picture((200, 100, 50), (31, 17), number).convert(mode)
        made.save(deeper / f"{number}.jpg", kind)
    (copy / "train" / "red" / "boxes.txt").write_text("passed by")
    (copy / "train" / "readme.txt").write_text("passed by")
    (copy / "val" / ".hidden").mkdir()
    (copy / "val" / "red" / ".x.jpg").write_text("passed by")
    images = opened(copy)
    assert images.classes == sorted(COLOURS) and images.num_classes == 3
    counts = {part: list(own) for part, own in images.counts.items()}
    assert counts == {"train": [8, 13, 8], "val": [5, 5, 5]}
    reference = Reference(str(copy / "train"))
    found = {}
    for index in range(29):
        name, label = images.path("train", index)
        read, same = images.read("train", index)
        assert same == label
        found[str(copy / name)] = label
        expected = np.array(Image.open(copy / name).convert("RGB"))
        assert read.dtype == torch.uint8 and np.array_equal(read.permute(1, 2, 0), expected)
    assert found == dict(reference.imgs)
    order = [images.path("train", index)[0] for index in range(29)]
    assert [images.path("train", n)[1] for n in range(29)] == [0] * 8 + [1] * 13 + [2] * 8
    assert order[8:21] == sorted(order[8:21])
    before = images.facts()
    os.rename(copy / "val" / "red" / "val_0.JPEG", copy / "val" / "red" / "other.JPEG")
    assert opened(copy).facts()["names_sha256"] != before["names_sha256"]


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
    own = task(validation=Validation.tuning, num_workers=1)
    _, labels = own._images.take("val", own._validation.tolist())
    assert labels.bincount().tolist() == [100] * 10, "halves have every class equally often"


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
    never = RandomCrop(24, 0.3, False, interpolation)([photo] * 20, draws)
    mirrored = 0
    for ours, plain, (top, left, height, width) in zip(crops, never, boxes, strict=True):
        part = picture.crop((left, top, left + width, top + height)).resize((24, 24), how)
        theirs = pil_to_tensor(part).int()
        off = min((ours.int() - other).abs().max() for other in (theirs, theirs.flip(-1)))
        mirrored += bool((ours.int() - theirs).abs().max() > off)
        assert off <= 1 and (plain.int() - theirs).abs().max() <= 1
    assert 4 < mirrored < 16
    ours = central_crop(24, 32, interpolation)(photo)
    theirs = pil_to_tensor(picture.resize((48, 32), how).crop((12, 4, 36, 28)))
    assert (ours.int() - theirs.int()).abs().max() <= 1


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_batch_is_cropped_as_one_by_one(interpolation: str) -> None:
    """By torchvision's resized_crop. Only cubic filters overshoot, and are clipped elsewhere."""
    images = mnist().take("train", range(0, 3000, 50))[0]
    crop, draws = RandomCrop(28, 0.5, True, interpolation), drawn(60)
    ours, theirs = crop(images, draws), crop(list(images), draws)
    off = (ours.int() - theirs.int()).abs().float()
    assert off.mean() < 0.2 and off.max() <= (1 if interpolation == "bilinear" else 3)
    for n in (0, 59):  # and a crop does not depend on the others
        assert torch.equal(crop(images[n : n + 1], draws[n : n + 1])[0], ours[n])


def test_boxes_are_spread_as_torchvisions() -> None:
    """Places and sides, where most tries fit and where none does."""
    for height, width, smallest in ((28, 28, 0.85), (60, 90, 0.08), (10, 80, 1.0)):
        ours = RandomCrop(24, smallest, True, "bilinear").boxes(drawn(4000), height, width).T
        image = torch.empty(3, height, width)
        with seeded(0):
            rule = (smallest, 1), (3 / 4, 4 / 3)
            theirs = [RandomResizedCrop.get_params(image, *rule) for _ in range(4000)]
        error = 5 * np.std(theirs, 0) * (2 / 4000) ** 0.5 + 1e-9
        assert (np.abs(ours.mean(0) - np.mean(theirs, 0)) <= error).all()
        assert np.std(ours, 0) == pytest.approx(np.std(theirs, 0), rel=0.1, abs=1e-9)


def test_rand_augment_is_timms(photo: torch.Tensor) -> None:
    """With the arguments that timm's create_transform makes of DeiT's; global generators stay."""
    from timm.data import create_transform

    how = {"auto_augment": "rand-m9-mstd0.5-inc1", "interpolation": "bicubic"}
    made = create_transform(60, is_training=True, **how)
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


def test_erasing(photo: torch.Tensor) -> None:
    """Rectangles of noise: those of torchvision, whose noise has another mean and deviation."""
    kept, shares, colours = photo.clone(), [], []
    theirs = RandomErasing(0.25, scale=(0.02, 1 / 3), value="random")
    for n in range(200):
        with seeded(n):
            changed = ((image := erasing(0.25)(photo)) != photo).any(0)
        with seeded(n):
            expected = (theirs(photo.float()) != photo).any(0)
        assert not (changed & ~expected).any()
        assert changed.sum() >= 0.95 * expected.sum()
        if expected.any():
            shares.append(changed.float().mean().item())
            colours.append(image[:, changed].float().mean(1) / 255)
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
    either = [mixing(generator(n), 8, 0.8, 1.0)[0, 0] for n in range(200)]
    assert 70 < sum(0 < keep < 1 for keep in either) < 130, "with both a coin decides"


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


LARGE = {"dataset": DatasetName.imagenet, "image_size": 224, "eval_resize": 256}


def test_sizes() -> None:
    assert num_parameters("resnet50", size=resnet50.Size.full, **LARGE) == 25_557_032
    assert num_parameters("resnet50", size=resnet50.Size.full, depth=18, **LARGE) == 11_689_512
    assert num_parameters("vit", size=vit.Size.base, **LARGE) == 86_567_656
    assert num_parameters("vit", size=vit.Size.small, **LARGE) == 22_050_664
    assert num_parameters("resnet50", depth=18) == num_parameters("resnet50")  # smoke, for both


def test_resnet_starts_as_goyals() -> None:
    own = task("resnet50", size=resnet50.Size.full, depth=18, **LARGE)
    model = own.model()
    assert model.fc.weight.std().item() == pytest.approx(0.01, rel=0.02)
    assert model.fc.weight.mean().abs().item() < 1e-4 and not model.fc.bias.any()
    assert all(not block.bn2.weight.any() for block in model.layer3)
    assert all(bool((block.bn1.weight == 1).all()) for block in model.layer3)
    conv = model.layer2[0].conv1.weight
    assert conv.std().item() == pytest.approx((2 / (conv[:, 0].numel())) ** 0.5, rel=0.02)


def test_vit_spares_positions_and_class_token() -> None:
    own = task("vit")
    model = own.model()
    spared = {id(weight) for weight in own.optimizer(model).param_groups[1]["params"]}
    assert {id(model.pos_embed), id(model.cls_token)} <= spared
    assert id(model.patch_embed.proj.weight) not in spared


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


@pytest.mark.parametrize("name", ["resnet50", "vit"])
def test_evaluation_counts_every_picture_once(folder: Path, name: str) -> None:
    own = task(name, folder, workers=1, image_size=28, eval_resize=35, num_workers=1)
    model = own.model()
    if name == "resnet50":
        own.loss(model, next(own.batches(mesh(), 0)))  # moves the running means
    scores = own.evaluate(model)
    model.eval()
    crop = central_crop(28, 35, own.interpolation)
    images, labels = own._images.take("val", range(15))
    with torch.no_grad():
        logits = torch.cat([model(normalized(crop(image)[None])) for image in images])
    assert list(scores) == ["loss", "top1", "top5"]
    assert scores["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-4)
    assert scores["top1"] == (logits.argmax(1) == labels).double().mean().item()
    assert scores["top5"] == 1.0  # of three classes
    assert own.baselines() == {"majority_top1": 1 / 3}


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


def test_what_cannot_be_used(tmp_path: Path) -> None:
    own = task("vit", root=str(tmp_path), dataset=DatasetName.imagenet)
    line = refusal(lambda: own.setup(1))
    assert line.startswith("vit.dataset=imagenet: ") and "--archives FOLDER" in line
    tree(tmp_path / "imagenet", train=2, val=1)
    line = refusal(lambda: own.setup(1))
    assert "holds 3 classes instead of 1000; " in line and " --check " in line
