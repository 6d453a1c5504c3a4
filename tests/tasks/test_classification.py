"""resnet50 and vit: models, batches, loss and evaluation, on MNIST and on folders of pictures."""

import json
import math
import time
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from co2.config import Validation
from co2.errors import ConfigError
from tasks.vision import resnet50, vit
from tasks.vision.classification import Classification, DatasetName
from tasks.vision.images import normalized
from tests.tasks.build import mesh
from tests.tasks.pictures import task, tree
from tests.tasks.test_evaluation import as_workers

BOTH = pytest.mark.parametrize("name", ["resnet50", "vit"])
STRONG = {"rand_augment": 9, "random_erasing": 0.5, "mixup": 0.8, "cutmix": 1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tree(tmp_path_factory.mktemp("tree"))


def num_parameters(name: str, **config) -> int:
    with torch.device("meta"):
        model = task(name, **config).model()
    return sum(weight.numel() for weight in model.parameters())


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


@BOTH
def test_weights_depend_on_the_seed_alone(name: str) -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(time.time_ns() % 1000)
        before = torch.get_rng_state()
        model = task(name, seed=seed).model()
        assert torch.equal(torch.get_rng_state(), before)
        return torch.cat([weight.detach().flatten() for weight in model.parameters()])

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_vit_spares_positions_and_class_token() -> None:
    own = task("vit", drop_path=0.3)
    model = own.model()
    spared = {id(weight) for weight in own.optimizer(model).param_groups[1]["params"]}
    assert {id(model.pos_embed), id(model.cls_token)} <= spared
    assert id(model.patch_embed.proj.weight) not in spared
    rates = [m.drop_prob for m in model.modules() if type(m).__name__ == "DropPath"]
    assert max(rates) == pytest.approx(0.3)


@pytest.mark.parametrize(("name", "config"), [("resnet50", {}), ("vit", STRONG)])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_go_on_from_any_start(folder: Path, name: str, config: dict, workers: int) -> None:
    own = task(name, folder, workers=workers, **config)
    own.setup(2)
    alone = task(name, folder, **config)
    alone.setup(2)
    torch.manual_seed(time.time_ns() % 1000)
    before = torch.get_rng_state()
    batches = list(islice(alone.batches(mesh(1, 2), 0), 8))  # 3 draws an epoch
    for start in (0, 2, 5):
        others = islice(own.batches(mesh(1, 2), start), 2)
        for batch, other in zip(batches[start:], others, strict=False):
            assert all(torch.equal(a, b) for a, b in zip(batch, other, strict=True))
    assert torch.equal(torch.get_rng_state(), before)
    images, labels = batches[0][:2]
    size = own.config.image_size
    assert images.shape == (4, 3, size, size) and images.dtype == torch.uint8
    assert labels.shape == (4,) and labels.dtype == torch.int64
    assert len(batches[0]) == (3 if config else 2)


def test_a_picture_changes_from_epoch_to_epoch_and_seed_to_seed(folder: Path) -> None:
    def first(seed: int, epoch: int) -> torch.Tensor:
        own = task(path=folder, batch_size=24, seed=seed)
        own.setup(1)
        images, _ = next(own.batches(mesh(), epoch))
        at = np.flatnonzero(own._sampler(1).indices(epoch, 0) == 5)[0]
        return images[at]

    assert torch.equal(first(0, 1), first(0, 1))
    assert not torch.equal(first(0, 0), first(0, 1))
    assert not torch.equal(first(0, 0), first(1, 0))


def test_repeats_of_a_picture_differ(folder: Path) -> None:
    own = task("vit", folder, batch_size=24, repeats=3)
    own.setup(1)
    images, labels = next(own.batches(mesh(), 0))
    samples = own._sampler(1).indices(0, 0)
    assert len(set(samples.tolist())) == 8
    for sample in set(samples.tolist()):
        views = np.flatnonzero(samples == sample)
        assert len(views) == 3 and len(set(labels[views].tolist())) == 1
        pairs = [(views[a], views[b]) for a, b in ((0, 1), (0, 2), (1, 2))]
        assert not any(torch.equal(images[a], images[b]) for a, b in pairs)


def test_labels_are_those_of_the_pictures(folder: Path) -> None:
    own = task(path=folder, batch_size=12, crop=0.8)
    own.setup(1)
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

    own = task(path=folder)
    own.setup(1)
    assert labels(own) == ["blue sky", "red", "élan"]
    with patch.object(own._images, "classes", ImageNetInfo().label_names()):
        assert labels(own) is None


def test_the_loss_is_that_of_smoothed_and_mixed_labels() -> None:
    own = task("vit", label_smoothing=0.1, cutmix=1.0)
    own.setup(1)
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
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = own.loss(model, (images, labels, keep))
    assert half.dtype == torch.float32 and half.item() == pytest.approx(loss.item(), abs=0.05)


def test_mixing_differs_between_replicas_and_draws() -> None:
    own = task("vit", mixup=0.8)
    keeps = [own.mixing(draw, replica) for draw in range(3) for replica in range(2)]
    assert len({keep[0, 0].item() for keep in keeps}) == 6
    assert task("vit").mixing(0, 0) is None


@BOTH
def test_evaluation_counts_every_picture_once(folder: Path, name: str) -> None:
    own = task(name, folder, workers=1, image_size=28, eval_resize=35)
    own.setup(1)
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


def test_the_halves_of_the_validation_images(folder: Path) -> None:
    """Both halves of MNIST have every class equally often; the whole is their mean."""
    scores = {}
    for part in Validation:
        own = task(part=part)
        own.setup(1)
        _, labels = own._images.take("val", own._validation.tolist())
        of_class = 200 if part is Validation.all else 100
        assert labels.bincount().tolist() == [of_class] * 10
        samples = {"part": part.value, "num_samples": 10 * of_class}
        assert own.fingerprint()["evaluated"] == samples
        scores[part] = own.evaluate(own.model())
    for name, whole in scores[Validation.all].items():
        halves = [scores[part][name] for part in (Validation.report, Validation.tuning)]
        assert whole == pytest.approx(sum(halves) / 2, rel=1e-6)
    assert scores[Validation.report]["loss"] != scores[Validation.tuning]["loss"]


def test_top5_is_among_the_first_five() -> None:
    own = task()
    own.setup(1)
    model = own.model()
    with torch.no_grad():
        model.fc.weight.zero_()
        model.fc.bias.copy_(torch.arange(10.0))  # always names 9, then 8, 7, 6, 5
    counts = own._images.counts["val"]
    scores = own.evaluate(model)
    assert scores["top1"] == counts[9] / counts.sum()
    assert scores["top5"] == counts[5:].sum() / counts.sum()


@BOTH
def test_evaluation_is_the_same_for_any_number_of_workers(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    own = task(name, part=Validation.report)  # 1000 digits: ten batches
    own.setup(1)
    model = own.model()
    alone = own.evaluate(model)
    for world in (2, 3):
        with monkeypatch.context() as patch:
            assert as_workers(patch, world, lambda: own.evaluate(model)) == alone


def scores(rank: int, world: int, path: Path) -> dict[str, float]:
    own = task(path=path)
    own.setup(world)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 28 * 28, 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tasks.vision.classification._EVAL_BATCH", 4)
        return own.evaluate(model)


def test_evaluation_over_gloo(workers, folder: Path) -> None:
    alone = scores(0, 1, folder)
    for world in (2, 3):
        assert workers.run(scores, world, folder) == [alone] * world


@pytest.mark.parametrize(("name", "lr"), [("resnet50", 0.1), ("vit", 3e-3)])
def test_it_learns_a_folder(folder: Path, name: str, lr: float) -> None:
    own = task(name, folder, batch_size=12, lr=lr)
    own.setup(1)
    model = own.model()
    optimizer = own.optimizer(model)
    for batch in islice(own.batches(mesh(), 0), 30):
        optimizer.zero_grad()
        own.loss(model, batch).backward()
        optimizer.step()
    after = own.evaluate(model)
    assert after["top1"] > 0.9 and after["loss"] < math.log(3) / 2


def test_the_same_digits_whatever_the_seed() -> None:
    facts = []
    for seed in (0, 1):
        own = task(seed=seed)
        own.setup(2)
        facts.append(own.fingerprint())
    assert facts[0] == facts[1]
    assert facts[0]["data"] == "mnist" and facts[0]["num_classes"] == 10
    assert sum(facts[0]["num_samples"].values()) == 5000


def test_a_damaged_picture_ends_training_in_one_line(tmp_path: Path) -> None:
    path = tree(tmp_path / "tree", train=2, val=2)
    file = path / "val" / "red" / "val_1.JPEG"
    file.write_bytes(file.read_bytes()[:-50])
    for workers in (0, 1):
        own = task(path=path, workers=workers)
        own.setup(1)
        with pytest.raises(ConfigError) as caught:
            own.evaluate(own.model())
        assert str(caught.value).startswith(f"data.path={path}: val/red/val_1.JPEG is damaged")


def test_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^train\.batch_size=1: batch norm needs at least 2$"):
        task(batch_size=1).setup(1)
    task("vit", batch_size=1).setup(1)
    with pytest.raises(ConfigError, match=r"^train\.batch_size=4: 7 workers draw 28"):
        task(path=folder).setup(7)
    for name in ("resnet50", "vit"):
        own = task(name, root=str(tmp_path), dataset=DatasetName.imagenet)
        with pytest.raises(ConfigError, match=rf"^{name}\.dataset=imagenet: .*--archives FOLDER"):
            own.setup(1)
    tree(tmp_path / "imagenet", train=2, val=1)
    with pytest.raises(ConfigError, match=r"holds 3 classes instead of 1000; .* --check "):
        own.setup(1)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("resnet50", "image_size", 0),
        ("resnet50", "eval_resize", 27),
        ("resnet50", "crop", 0.0),
        ("resnet50", "crop", 1.5),
        ("resnet50", "label_smoothing", 1.0),
        ("vit", "image_size", 15),
        ("vit", "rand_augment", 11),
        ("vit", "random_erasing", 1.1),
        ("vit", "mixup", -1.0),
        ("vit", "cutmix", math.inf),
        ("vit", "drop_path", 1.0),
    ],
)
def test_config(name: str, key: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        task(name, **{key: value})
    assert caught.value.key == key
