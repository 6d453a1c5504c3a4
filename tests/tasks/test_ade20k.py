"""ade20k: generated scenes, random views and metrics; model, loss, evaluation and batches."""

import colorsys
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.metrics import accuracy_score, jaccard_score

from tasks import ADE20K
from tasks.ade20k.ade20k import Source
from tasks.ade20k.pairs import FOLDER, SPLITS, Pairs
from tasks.ade20k.scenes import Scenes
from tasks.ade20k.segmentation import _MEAN, _STD, IGNORED, normalized, size_at, whole
from tasks.ade20k.upernet import upernet
from tasks.ade20k.views import COLOUR_DRAWS, Views, distorted
from tasks.shared.randomness import uniforms
from tests.grids import nonempty
from tests.tasks.build import ade20k, mesh, refusal, used
from tests.tasks.small_sets import scene_image, scene_mask
from tests.tasks.small_sets import scenes as write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / FOLDER)


@pytest.fixture(scope="module")
def task() -> ADE20K:
    return ade20k(hidden=16, num_workers=3)


def test_the_model_of_scale_paper() -> None:
    """37 M weights of the head, 23.5 M of the backbone: counted on mmsegmentation's config."""
    with torch.device("meta"):
        task = ade20k(backbone="resnet50c", hidden=512, source=Source.ade20k, root="none")
        model = task.model()
        logits, auxiliary = model(torch.empty(2, 3, 512, 512))
    assert logits.shape == (2, 150, 128, 128) and auxiliary.shape == (2, 150, 32, 32)
    convs = [(1024 * 256 * 9), 150 * 257]  # auxiliary
    convs += [2048 * 512] * 4 + [(2048 + 4 * 512) * 512 * 9]  # pyramid pooling
    convs += [channels * 512 for channels in (256, 512, 1024)] + [512 * 512 * 9] * 3
    convs += [4 * 512 * 512 * 9, 150 * 513]  # fusion, classes
    norms = 2 * (256 + 512 * (4 + 1 + 3 + 3 + 1))
    backbone = 25_557_032 - 2048 * 1000 - 1000  # ResNet-50 without its classifier
    # Three 3×3 convolutions in place of the 7×7 one, two of them of 32 channels.
    backbone += 9 * (3 * 32 + 32 * 32 + 32 * 64) - 49 * 3 * 64 + 2 * (32 + 32)
    count = sum(weight.numel() for weight in model.parameters())
    assert count == sum(convs) + norms + backbone


def test_samples_of_the_public_set() -> None:
    assert SPLITS == {"training": 20_210, "validation": 2_000}


def test_weights_of_the_backbone(tmp_path: Path) -> None:
    import timm
    from safetensors.torch import save_file

    name = "mobilenetv3_small_050"
    trained = timm.create_model(name, num_classes=1000).state_dict()
    torch.save({"state_dict": trained}, tmp_path / "trained.pth")
    save_file(trained, tmp_path / "trained.safetensors")
    for file in nonempty(sorted(tmp_path.iterdir())):
        task = ade20k(backbone=name, weights=str(file), hidden=8, num_workers=1)
        inside = task.model().backbone.state_dict()
        for key in nonempty(inside.keys() & trained.keys()):
            assert torch.equal(inside[key], trained[key]), key
    with torch.device("meta"):
        assert next(task.model().parameters()).is_meta
    bare = ade20k(backbone=name, hidden=8).model()
    assert not torch.equal(bare.backbone.conv_stem.weight, trained["conv_stem.weight"])


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"backbone": "resnt50"}, "backbone=resnt50: timm has no such model; the nearest name is"),
        ({"backbone": "vit_tiny_patch16_224"}, "does not give 4 maps of different sizes"),
        ({"backbone": "resnet18", "weights": "resnet10t.pth"}, "fit resnet18: it lacks conv1.we"),
        ({"backbone": "resnet10t", "weights": "shape.pth"}, "conv1.0.weight has the shape [3, 3]"),
        ({"scales": (1.0, math.inf)}, "scales="),
    ],
)
def test_what_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], says: str
) -> None:
    import timm

    monkeypatch.chdir(tmp_path)
    trained = timm.create_model("resnet10t", num_classes=0).state_dict()
    torch.save(trained, "resnet10t.pth")
    torch.save({**trained, "conv1.0.weight": torch.zeros(3, 3)}, "shape.pth")
    line = refusal(lambda: ade20k(**config).setup(1))
    assert says in line and len(line) < 200


def validation(folder: Path) -> Pairs:
    return Pairs(folder, "validation", "data.path", str(folder), "is missing")


def test_classes_are_read_as_the_benchmark_counts_them(folder: Path) -> None:
    task = ade20k(folder.parent, source=Source.ade20k, num_workers=1)
    image, labels = validation(folder)[1]
    mask = np.array(Image.open(scene_mask(folder, "validation", 2))).astype(int)
    pixels = np.array(Image.open(scene_image(folder, "validation", 2)))
    assert (image.permute(1, 2, 0).numpy() == pixels).all()
    assert (labels.numpy() == np.where(mask == 0, IGNORED, mask - 1)).all()
    assert task.num_classes == 150


def test_the_loss_is_that_of_both_heads(task: ADE20K) -> None:
    model, batch = task.model(), next(task.batches(mesh(), 0))
    images, labels = batch[0], batch[1].long()
    expected = 0.0
    for logits, weight in zip(model(images), (1, 0.4), strict=True):
        large = F.interpolate(logits, (32, 32), mode="bilinear")
        chances = large.log_softmax(1)
        pixels = [p for p in np.ndindex(2, 32, 32) if labels[p] != IGNORED]
        mean = -sum(chances[n, labels[n, y, x], y, x].item() for n, y, x in pixels) / len(pixels)
        expected += weight * mean
    assert task.loss(model, batch).item() == pytest.approx(expected, rel=1e-5)
    nothing = task.loss(model, (images, torch.full_like(batch[1], IGNORED)))
    nothing.backward()
    assert nothing.item() == 0
    assert all(weight.grad.abs().max() == 0 for weight in model.parameters())


def test_evaluation_is_that_of_all_pixels_at_their_own_size(folder: Path) -> None:
    task = ade20k(path=folder, hidden=16, num_workers=1)
    model = task.model()
    scores = task.evaluate(model)
    assert list(scores) == ["loss", "miou", "pixel_accuracy"] and model.training

    model.eval()
    truths, founds, losses = [], [], []
    samples = validation(folder)
    for number in range(3):
        image, labels = samples[number]
        short = min(labels.shape)
        size = [round(side * 32 / short) for side in labels.shape]
        # Rounded as resizing bytes does, give or take one.
        pixels = F.interpolate(image[None].float(), size, mode="bilinear", antialias=True).round()
        mean = torch.tensor([123.675, 116.28, 103.53])[:, None, None]
        deviation = torch.tensor([58.395, 57.12, 57.375])[:, None, None]
        with torch.no_grad():
            logits = model((pixels - mean) / deviation)
        logits = F.interpolate(logits, labels.shape, mode="bilinear")[0].permute(1, 2, 0)
        kept = labels != IGNORED
        truths.append(labels[kept].long())
        founds.append(logits[kept].argmax(1))
        losses.append(F.cross_entropy(logits[kept], labels[kept].long(), reduction="none"))
    truth, found = torch.cat(truths), torch.cat(founds)
    assert scores["loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-4)
    accuracy = accuracy_score(truth, found)
    assert scores["pixel_accuracy"] == pytest.approx(accuracy, abs=2e-3)
    miou = jaccard_score(truth, found, average="macro")
    assert scores["miou"] == pytest.approx(miou, abs=2e-3)
    counts = truth.bincount()
    share = counts.max().item() / counts.sum().item()
    baselines = task.baselines()
    assert baselines["majority_pixel_accuracy"] == pytest.approx(share)
    assert baselines["majority_miou"] == pytest.approx(share / (counts > 0).sum().item())


IMAGE = "images/training/ADE_train_00000001.jpg"
MASK = "annotations/training/ADE_train_00000001.png"
MASK_OF_VALIDATION = "annotations/validation/ADE_val_00000001.png"


def painted(path: Path) -> None:
    Image.fromarray(np.full((40, 60), 200, np.uint8)).save(path)


@pytest.mark.parametrize(
    ("name", "spoil", "at_once", "says"),
    [
        (MASK, Path.unlink, True, "is missing, the mask of ADE_train_00000001.jpg"),
        (IMAGE, lambda path: path.write_bytes(path.read_bytes()[:-300]), False, "cannot be read ("),
        (MASK, painted, False, "has class 200; ADE20K's are 1 to 150"),
        (MASK_OF_VALIDATION, painted, False, "has class 200; ADE20K's are 1 to 150"),
    ],
)
def test_what_is_spoilt_is_named(
    folder: Path, name: str, spoil: Callable[[Path], object], at_once: bool, says: str
) -> None:
    """What is not there before training, what is inside when it is met; by a loader, too."""
    spoil(folder / name)
    for workers in (0, 2):
        task = ade20k(path=folder, workers=workers)
        line = refusal(
            lambda: task.setup(1) if at_once else (used(task, 4), task.baselines())  # noqa: B023
        )
        assert line.startswith(f"data.path={folder}: {folder / name}: {says}")


def test_dropout_takes_whole_channels_before_the_classes_in_training_alone() -> None:
    model = upernet("tiny", None, 200, 5, 0.25)
    assert model.state_dict().keys() == upernet("tiny", None, 200, 5).state_dict().keys()
    seen: list[torch.Tensor] = []
    for head in (model.decode_head, model.auxiliary_head):
        head.classifier.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        head.classifier.weight.data.abs_()
    model(torch.randn(16, 3, 32, 32))
    for maps in seen:
        gone = (maps.flatten(2) == 0).all(dim=2).float().mean().item()
        assert gone > 0.2, "ReLU makes few maps of zeros only"
    seen.clear()
    model.eval()(torch.randn(16, 3, 32, 32))
    assert ((seen[0].flatten(2) == 0).all(dim=2).float().mean().item()) < gone - 0.2


def drawn(number: int, colours: bool = False) -> np.ndarray:
    """The random numbers of views, without changes of colour unless asked for."""
    draws = uniforms(Views.draws, 7, np.arange(number))
    if not colours:
        draws[:, -COLOUR_DRAWS:] = 0.75
    return draws


def sample(height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The image tells its own label: red is 10 times the class, in blocks of 8 pixels."""
    source = np.random.default_rng(height)
    blocks = source.integers(0, 20, (height // 8 + 1, width // 8 + 1), np.uint8)
    labels = torch.from_numpy(blocks.repeat(8, 0).repeat(8, 1)[:height, :width])
    image = torch.stack([labels * 10, torch.full_like(labels, 7), torch.full_like(labels, 9)])
    return image, labels


def test_no_side_is_left_without_a_pixel() -> None:
    """The long one has at most four times the short side's length."""
    assert size_at(5000, 1, 32, 1.0) == (128, 1) and size_at(1, 5000, 32, 0.5) == (1, 64)
    assert size_at(300, 200, 32, 1.0) == (48, 32)


def levels(views: torch.Tensor) -> torch.Tensor:
    """Pixels from 0 to 255 of normalized ones."""
    mean, deviation = (torch.tensor(rgb)[:, None, None] for rgb in (_MEAN, _STD))
    return views * deviation + mean


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 2.0)])
def test_image_and_labels_stay_together(scales: tuple[float, float]) -> None:
    views, labels = Views(48, 64, scales)([sample(64, 80)] * 20, drawn(20))
    assert views.shape == (20, 3, 48, 48) and views.dtype == torch.float32
    assert labels.shape == (20, 48, 48) and labels.dtype == torch.uint8
    inside = F.max_pool2d(labels.float(), 5, 1, 2) == labels
    inside &= -F.max_pool2d(-labels.float(), 5, 1, 2) == labels
    inside &= labels != IGNORED
    inside[:, [0, 1, -2, -1]] = False  # resizing mixes at borders, of the view too
    inside[:, :, [0, 1, -2, -1]] = False
    assert inside.sum() > 2000
    difference = levels(views)[:, 0] - labels.float() * 10
    assert (difference[inside].abs() < 6).all()


@pytest.mark.parametrize(("short_side", "scales"), [(32, (0.4, 3.0)), (40, (1.0, 1.0))])
def test_a_batch_is_cut_as_one_by_one(short_side: int, scales: tuple[float, float]) -> None:
    chosen, cut = np.arange(64), Views(32, short_side, scales)
    images, labels = (part[..., :-16] for part in Scenes("training").take(chosen))  # not square
    for colours in (False, True):
        draws = drawn(64, colours)
        views, seen = cut((images, labels), draws)
        others, expected = cut(list(zip(images, labels, strict=True)), draws)
        assert torch.equal(seen, expected)
        off = (levels(views) - levels(others)).abs()
        assert off.mean() < 0.3
        assert colours or off.max() < 1.01  # a level, which changes of colour multiply
    for n in (0, 63):  # and a view does not depend on the others
        alone = cut((images[n : n + 1], labels[n : n + 1]), draws[n : n + 1])
        assert torch.equal(alone[0][0], views[n]) and torch.equal(alone[1][0], seen[n])


def test_what_the_image_does_not_fill_has_no_label() -> None:
    views, labels = Views(64, 40, (1.0, 1.0))([sample(40, 80)], drawn(1, colours=True))
    assert (labels[0, 40:] == IGNORED).all() and (views[0, :, 40:] == 0).all()
    assert (labels[0, :40] != IGNORED).all()


def test_no_class_fills_a_crop_where_that_can_be() -> None:
    labels = torch.zeros(64, 256, dtype=torch.uint8)
    labels[:, 96:] = torch.arange(160, dtype=torch.uint8).clamp(max=99) % 5 + 1
    image = labels.expand(3, -1, -1).contiguous()
    cut = Views(64, 64, (1.0, 1.0))
    shares = (cut([(image, labels)] * 60, drawn(60))[1] == 0).float().mean((1, 2))
    assert shares.max() < 0.75 and shares.max() > 0.3
    bare = torch.zeros(64, 64, dtype=torch.uint8)
    # Ten tries, then as it is.
    assert (Views(48, 64, (1.0, 1.0))([(image[:, :, :64], bare)], drawn(1))[1] == 0).all()


def photometric(pixel: list[float], draws: np.ndarray) -> list[float]:
    """mmsegmentation's PhotoMetricDistortion of one pixel, with the standard library's HSV."""
    made, amounts, contrast_first = draws[:4] < 0.5, draws[4:8], draws[8] < 0.5

    def clipped(pixel: list[float]) -> list[float]:
        return [min(max(level, 0.0), 255.0) for level in pixel]

    def contrasted(pixel: list[float]) -> list[float]:
        return clipped([level * (0.5 + amounts[1]) for level in pixel]) if made[1] else pixel

    if made[0]:
        pixel = clipped([level + 32 * (2 * amounts[0] - 1) for level in pixel])
    if contrast_first:
        pixel = contrasted(pixel)
    hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
    if made[2]:
        saturation = min(saturation * (0.5 + amounts[2]), 1.0)
    if made[3]:
        hue = (hue + 18 / 180 * (2 * amounts[3] - 1)) % 1
    pixel = list(colorsys.hsv_to_rgb(hue, saturation, value))
    return pixel if contrast_first else contrasted(pixel)


def test_colours_change_as_in_mmsegmentation() -> None:
    numbers = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (200, 3, 2, 3), generator=numbers).float()
    images[:9] = torch.tensor([0.0, 128.0, 255.0])  # greys, which have no hue
    draws = uniforms(COLOUR_DRAWS, 1, np.arange(200))
    before, found = images.clone(), distorted(images, draws)
    assert torch.equal(images, before)
    for image, row, other in zip(images, draws, found, strict=True):
        pixels = image.flatten(1).T.tolist()
        changed = [photometric(pixel, row) for pixel in pixels]
        expected = torch.tensor(changed, dtype=torch.float32).T.view(3, 2, 3)
        assert torch.allclose(other, expected, atol=2e-3)
    kept = (draws[:, :4] >= 0.5).all(1)
    assert kept.any() and torch.equal(found[kept], images[kept])


def test_whole_images_keep_their_shape() -> None:
    image = torch.randint(0, 256, (3, 64, 96), dtype=torch.uint8)
    assert whole(image, 32).shape == (3, 32, 48)
    assert torch.equal(whole(image, 64), normalized(image))
    long = image[:, :20].repeat(1, 1, 5)[:, :, :400]
    assert whole(long, 32).shape == (3, 6, 128), "the long side is at most 4 × 32"
