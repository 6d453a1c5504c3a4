"""ade20k: model, loss, evaluation and batches, on scenes and on a small folder."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from co2.errors import ConfigError
from tasks import ADE20K
from tasks.ade20k.ade20k import Source
from tasks.ade20k.pairs import FOLDER, Pairs
from tasks.ade20k.segmentation import IGNORED
from tasks.ade20k.upernet import upernet
from tests.grids import nonempty
from tests.tasks import small_ade20k as small
from tests.tasks.build import ade20k, mesh


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small.write(tmp_path / FOLDER)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation of 20 scenes."""
    monkeypatch.setattr("tasks.ade20k.scenes.Scenes.__len__", lambda self: 20)


@pytest.fixture(scope="module")
def task() -> ADE20K:
    task = ade20k(hidden=16, num_workers=3)
    return task


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


@pytest.mark.parametrize(
    ("backbone", "hint"),
    [
        ("resnt50", "timm has no such model; the nearest name is resnet50"),
        ("vit_tiny_patch16_224", "does not give 4 maps of different sizes"),
        ("hf-hub:somebody/model", "timm has no such model; the nearest name is "),
    ],
)
def test_backbones_that_do_not_fit(backbone: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ade20k(backbone=backbone).setup(1)
    assert str(caught.value).startswith(f"ade20k.backbone={backbone}: {hint}")
    assert len(str(caught.value)) < 150


def test_another_backbone(few: None) -> None:
    task = ade20k(backbone="mobilenetv3_small_050", hidden=8, num_workers=1)
    model = task.model()
    assert model.backbone.feature_info.reduction() == [4, 8, 16, 32]
    assert math.isfinite(task.loss(model, next(task.batches(mesh(), 0))).item())


@pytest.mark.parametrize("suffix", [pytest.param(".pth", marks=pytest.mark.slow), ".safetensors"])
def test_weights_of_the_backbone(tmp_path: Path, suffix: str) -> None:
    import timm
    from safetensors.torch import save_file

    name = "mobilenetv3_small_050"
    trained = timm.create_model(name, num_classes=1000).state_dict()
    file = tmp_path / f"trained{suffix}"
    if suffix == ".pth":
        torch.save({"state_dict": trained}, file)
    else:
        save_file(trained, file)
    task = ade20k(backbone=name, weights=str(file), hidden=8, num_workers=1)
    inside = task.model().backbone.state_dict()
    for key in nonempty(inside.keys() & trained.keys()):
        assert torch.equal(inside[key], trained[key]), key
    with torch.device("meta"):
        assert next(task.model().parameters()).is_meta
    # The head does not change with the backbone's weights.
    bare = ade20k(backbone=name, hidden=8).model()
    assert bare.backbone.conv_stem.weight.shape == task.model().backbone.conv_stem.weight.shape
    assert torch.equal(task.model().backbone.conv_stem.weight, trained["conv_stem.weight"])
    assert not torch.equal(bare.backbone.conv_stem.weight, trained["conv_stem.weight"])


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    import timm

    trained = timm.create_model("resnet10t", num_classes=0).state_dict()
    torch.save(trained, tmp_path / "resnet10t.pth")
    trained["conv1.0.weight"] = torch.zeros(3, 3)
    torch.save(trained, tmp_path / "shape.pth")
    (tmp_path / "text.pth").write_text("not weights")
    for backbone, name, hint in [
        ("resnet10t", "none.pth", "no such file"),
        ("resnet10t", "text.pth", "is not a state dict of timm ("),
        ("resnet18", "resnet10t.pth", "does not fit resnet18: it lacks conv1.weight, one of "),
        ("resnet10t", "shape.pth", "does not fit resnet10t: conv1.0.weight has the shape [3, 3], "),
    ]:
        with pytest.raises(ConfigError) as caught:
            ade20k(backbone=backbone, weights=str(tmp_path / name)).setup(1)
        assert str(caught.value).startswith(f"ade20k.weights={tmp_path / name}: {hint}")


def test_views_depend_on_the_epoch_and_the_sample_alone(folder: Path) -> None:
    """Two replicas draw in four batches what one draws in two of twice the size."""
    one = ade20k(path=folder, batch_size=4)
    two = ade20k(path=folder, batch_size=2)
    one.setup(1), two.setup(2)
    alone = [next(one.batches(mesh(), n)) for n in range(3)]
    for n in range(3):
        halves = [next(two.batches(mesh(replica, 2), n)) for replica in (0, 1)]
        for part in (0, 1):
            assert torch.equal(torch.cat([half[part] for half in halves]), alone[n][part])
    assert not torch.equal(alone[0][0].sort(0)[0], alone[1][0].sort(0)[0])  # another epoch


def validation(folder: Path) -> Pairs:
    return Pairs(folder, "validation", "data.path", str(folder), "is missing")


def test_classes_are_read_as_the_benchmark_counts_them(folder: Path) -> None:
    task = ade20k(folder.parent, source=Source.ade20k, num_workers=1)
    image, labels = validation(folder)[1]
    mask = np.array(Image.open(small.annotation(folder, "validation", 2))).astype(int)
    pixels = np.array(Image.open(small.image(folder, "validation", 2)))
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
    loss = task.loss(model, batch)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_a_batch_without_labels_teaches_nothing(task: ADE20K) -> None:
    model, (images, labels) = task.model(), next(task.batches(mesh(), 0))
    loss = task.loss(model, (images, torch.full_like(labels, IGNORED)))
    loss.backward()
    assert loss.item() == 0
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
        pixels = F.interpolate(
            image[None].float(), size, mode="bilinear", antialias=True
        ).round()  # as resizing bytes does, give or take one
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
    assert scores["pixel_accuracy"] == pytest.approx(
        (truth == found).float().mean().item(), abs=2e-3
    )
    classes = set(truth.tolist()) | set(found.tolist())
    ious = [
        ((truth == k) & (found == k)).sum().item() / ((truth == k) | (found == k)).sum().item()
        for k in classes
    ]
    assert scores["miou"] == pytest.approx(sum(ious) / len(ious), abs=2e-3)


def test_evaluation_does_not_compile(few: None) -> None:
    """Whole images have many sizes; the training step alone is worth compiling."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    task = ade20k(hidden=8, num_workers=1)
    model = task.model()
    model.compile(backend=backend)
    before = task.evaluate(model)
    assert not compiled
    task.loss(model, next(task.batches(mesh(), 0)))
    assert compiled
    assert before["loss"] > 0


def test_baselines(folder: Path) -> None:
    task = ade20k(path=folder, num_workers=1)
    samples = validation(folder)
    labels = torch.cat([samples.labels(number).flatten() for number in range(3)])
    counts = labels[labels != IGNORED].bincount()
    share = counts.max().item() / counts.sum().item()
    expected = {
        "majority_miou": share / (counts > 0).sum().item(),
        "majority_pixel_accuracy": share,
    }
    assert task.baselines() == pytest.approx(expected)


def test_fingerprint(folder: Path, task: ADE20K) -> None:
    def facts() -> dict[str, Any]:
        task = ade20k(path=folder, num_workers=1)
        return task.fingerprint()

    first = facts()
    assert first == facts() and first["data"] == str(folder)
    assert first["num_samples"] == {"training": 4, "validation": 3}
    with small.annotation(folder, "training", 1).open("ab") as file:
        file.write(b" ")
    assert facts()["sha256"] != first["sha256"]
    assert task.fingerprint()["num_samples"] == {"training": 1024, "validation": 1024}


def spoilt(folder: Path, what: str) -> str:
    """Spoil the first pair of both splits; returns what the error says."""
    import shutil

    image, mask = small.image(folder, "training", 1), small.annotation(folder, "training", 1)
    if what == "no folder":
        shutil.rmtree(mask.parent)
        return f"{mask.parent}: no such folder; must hold images/ and annotations/"
    if what == "empty":
        for file in image.parent.iterdir():
            file.unlink()
        return f"{image.parent}: holds no image (.jpg)"
    if what == "no mask":
        mask.unlink()
        return f"{mask}: is missing, the mask of {image.name}"
    if what == "cut":
        image.write_bytes(image.read_bytes()[:-300])
        return f"{image}: cannot be read (image file is truncated"
    if what == "text":
        mask.write_text("not a mask")
        return f"{mask}: cannot be read (cannot identify image file"
    if what == "class":
        Image.fromarray(np.full((40, 60), 200, np.uint8)).save(mask)
        return f"{mask}: has class 200; ADE20K's are 1 to 150"
    assert what == "size"
    Image.fromarray(np.ones((40, 61), np.uint8)).save(mask)
    return f"{mask}: has 61×40 pixels, {image.name} 60×40; they must be alike"


@pytest.mark.parametrize("what", ["no folder", "empty", "no mask"])
def test_faults_of_structure_show_before_training(folder: Path, what: str) -> None:
    says = spoilt(folder, what)
    with pytest.raises(ConfigError) as caught:
        ade20k(path=folder).setup(1)
    assert str(caught.value).startswith(f"data.path={folder}: {says}")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("what", ["cut", "text", "class", "size"])
def test_faults_of_content_show_when_they_are_met(folder: Path, what: str, workers: int) -> None:
    says = spoilt(folder, what)
    task = ade20k(path=folder, workers=workers, num_workers=1)
    with pytest.raises(ConfigError) as caught:
        for _, _ in zip(range(4), task.batches(mesh(), 0), strict=False):
            pass
    assert str(caught.value).startswith(f"data.path={folder}: {says}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("scales", (2.0, 1.0)), ("scales", (0.0, 1.0)), ("scales", (1.0, math.inf))],
)
def test_config(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        ADE20K.Config(**{key: value})
    assert caught.value.key == key


def test_dropout_takes_whole_channels_before_the_classes_in_training_alone() -> None:
    model = upernet("tiny", None, 200, 5, 0.25)
    assert model.state_dict().keys() == upernet("tiny", None, 200, 5).state_dict().keys()
    seen: list[torch.Tensor] = []
    for head in (model.decode_head, model.auxiliary_head):
        head.classifier.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        head.classifier.weight.data.abs_()
    model(torch.randn(64, 3, 32, 32))
    for maps in seen:
        gone = (maps.flatten(2) == 0).all(dim=2).float().mean().item()
        assert gone > 0.2, "ReLU makes few maps of zeros only"
    seen.clear()
    model.eval()(torch.randn(64, 3, 32, 32))
    assert ((seen[0].flatten(2) == 0).all(dim=2).float().mean().item()) < gone - 0.2


def test_training_mode_alone_pays_for_the_auxiliary_head() -> None:
    model = upernet("tiny", None, 8, 5)
    images = torch.randn(2, 3, 32, 48)
    logits, auxiliary = model(images)
    assert logits.shape == (2, 5, 16, 24) and auxiliary.shape == (2, 5, 4, 6)
    assert model.eval()(images[:1]).shape == (1, 5, 16, 24)
