"""Point-MAE: masks, batches, loss, evaluation and its SVM; and the layout of ShapeNet-55."""

import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from co2.config import DataConfig, OptimConfig, TrainConfig
from co2.errors import ConfigError
from tasks.shapenet.clouds import drawn, normalized, open_clouds, scaled_and_moved
from tasks.shapenet.point_mae import PointMAE
from tasks.shapenet.points import chamfer, farthest_points, patches, taken
from tasks.shapenet.shapenet import (
    NUM_SOLIDS,
    Objective,
    ShapeNet,
    Shapes,
    Size,
    svm_accuracy,
)
from tasks.shapenet.solids import solids
from tasks.shared.randomness import uniforms
from tests.tasks.build import mesh, sampler
from tests.tasks.test_evaluation import as_workers

SMALL = {"points": 32, "groups": 8, "group_size": 8, "eval_samples": 70, "svm_samples": 100}


def shapenet(
    path: Path | None = None,
    root: Path = Path("unused"),
    seed: int = 0,
    batch_size: int = 4,
    workers: int = 0,
    **config: Any,
) -> ShapeNet:
    data = DataConfig(str(root), None if path is None else str(path), workers)
    train = TrainConfig(seed=seed, batch_size=batch_size)
    return ShapeNet(ShapeNet.Config(**(SMALL | config)), train, OptimConfig(lr=2e-3), data)


def ready(num_replicas: int = 1, **kwargs: Any) -> ShapeNet:
    task = shapenet(**kwargs)
    task.setup(num_replicas)
    return task


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


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("clouds") / "mine")


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "mine")


def num_parameters(**config: Any) -> int:
    with torch.device("meta"):
        model = shapenet(**config).model()
    return sum(weight.numel() for weight in model.parameters())


def test_sizes() -> None:
    assert 0.4e6 < num_parameters() < 0.6e6
    published = {"points": 1024, "groups": 64, "group_size": 32, "size": Size.base}
    assert round(num_parameters(**published) / 1e6) == 29


@pytest.mark.parametrize("objective", Objective)
def test_weights_depend_on_the_seed_alone(objective: Objective) -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(time.time_ns() % 1000)
        before = torch.get_rng_state()
        model = ready(seed=seed, objective=objective).model()
        assert torch.equal(torch.get_rng_state(), before)
        return torch.cat([weight.detach().flatten() for weight in model.parameters()])

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_drop_path_grows_with_depth() -> None:
    model = shapenet(drop_path=0.1).model()
    rates = [getattr(b.drop_path1, "drop_prob", 0.0) for b in model.encoder.transformer.blocks]
    assert rates == pytest.approx([0, 0.05, 0.1])


@pytest.mark.parametrize("objective", Objective)
def test_it_normalizes_as_the_published_model(objective: Objective) -> None:
    """Every normalization there has PyTorch's eps; timm's blocks would have another."""
    norms = [
        module
        for module in ready(objective=objective).model().modules()
        if isinstance(module, torch.nn.LayerNorm | torch.nn.BatchNorm1d)
    ]
    assert len(norms) > 8 and {norm.eps for norm in norms} == {1e-5}


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_go_on_from_any_start(folder: Path, workers: int) -> None:
    task = ready(3, path=folder, batch_size=2, workers=workers)
    per_epoch = sampler(task, 14, 3).draws_per_epoch
    assert per_epoch == 2
    whole = ready(3, path=folder, batch_size=2).batches(mesh(1, 3), 0)
    batches = [next(whole) for _ in range(per_epoch + 3)]
    for start in (0, 1, 2, 4) if workers == 0 else (1,):
        again = next(task.batches(mesh(1, 3), start))
        assert all(torch.equal(a, b) for a, b in zip(again, batches[start], strict=True))
    clouds, orders = batches[0]
    assert clouds.shape == (2, 32, 3) and clouds.dtype == torch.float32
    assert orders.shape == (2, 8) and orders.dtype == torch.int64
    other = next(task.batches(mesh(2, 3), 0))
    assert not torch.equal(other[0], clouds)


def kinds_of_solids(part: str) -> np.ndarray:
    _, kinds = solids(sum(NUM_SOLIDS.values()), 2, seed=0)
    cut = NUM_SOLIDS["train"]
    return kinds[:cut] if part == "train" else kinds[cut:]


def test_a_few_solids_are_of_all_kinds() -> None:
    """Evenly spread samples of kinds that took turns could all be of one kind."""
    for part, wanted in (("test", 60), ("train", 100)):
        kinds = kinds_of_solids(part)
        chosen = np.arange(wanted) * len(kinds) // wanted
        assert len(set(kinds[chosen].tolist())) == 10


def test_every_epoch_draws_moves_and_masks_anew(folder: Path) -> None:
    """The sample alone, with seed and epoch, decides: not its place in the batch or the replica."""

    def seen(task: ShapeNet, num_replicas: int, draws: range) -> dict[tuple[int, int], tuple]:
        samples, found = sampler(task, 14, num_replicas), {}
        for replica in range(num_replicas):
            batches = task.batches(mesh(replica, num_replicas), 0)
            for draw, (clouds, orders) in zip(draws, batches, strict=False):
                for i, *made in zip(samples.indices(draw, replica), clouds, orders, strict=True):
                    found[samples.epoch(draw), int(i)] = tuple(map(torch.Tensor.tolist, made))
        return found

    alone = seen(ready(path=folder, batch_size=6), 1, range(4))
    shared = seen(ready(3, path=folder, batch_size=2), 3, range(4))
    assert alone == shared and len(alone) == 24
    again = [i for i in range(14) if (0, i) in alone and (1, i) in alone]
    assert again
    for i in again:
        assert alone[0, i][0] != alone[1, i][0]
    assert any(alone[0, i][1] != alone[1, i][1] for i in again)
    assert all(sorted(order) == list(range(8)) for _, order in alone.values())


def test_a_batch_is_points_of_its_cloud(folder: Path) -> None:
    task = ready(path=folder)
    (clouds, _), chosen = next(task.batches(mesh(), 0)), sampler(task, 14).indices(0, 0)
    for made, i in zip(clouds.double().numpy(), chosen, strict=True):
        name = open_clouds(folder, "data.path")["train"].files[i]
        points = np.load(name)[:, :3]
        (own,) = uniforms(6 + 8 + 40, 0, 0, int(i))
        part = points[own[14:].argsort()[:32]]
        part = part - part.mean(0)
        part /= np.linalg.norm(part, axis=1).max()
        factors, shift = 2 / 3 + own[:3] * 5 / 6, 0.4 * own[3:6] - 0.2
        np.testing.assert_allclose(made, part * factors + shift, atol=1e-5)


def test_points_are_drawn_without_repetition_and_in_random_order() -> None:
    cloud = np.arange(40.0)[:, None].repeat(3, 1)
    chosen = np.stack([drawn(cloud, 8, shares)[:, 0] for shares in uniforms(40, np.arange(500))])
    assert all(len(set(row)) == 8 for row in chosen.tolist())
    often = np.bincount(chosen.astype(int).ravel(), minlength=40)
    assert abs(often - 100).max() < 4.5 * 100**0.5
    assert abs(chosen.mean(0) - 19.5).max() < 4 * 40 / 12**0.5 / 500**0.5  # at every place


def test_normalizing_and_augmenting() -> None:
    cloud = np.random.default_rng(0).normal(3, 2, (50, 3)).astype(np.float32)
    made = normalized(cloud)
    np.testing.assert_allclose(made.mean(0), 0, atol=1e-6)
    assert np.linalg.norm(made, axis=1).max() == pytest.approx(1)
    assert not normalized(np.ones((4, 3), np.float32)).any()
    ends = np.array([[0, 0, 0], [1, 1, 1]], np.float32)
    moved = scaled_and_moved(np.stack([ends] * 200), uniforms(6, np.arange(200)))
    factors = moved[:, 1] - moved[:, 0]
    assert factors.min() > 0.66 and factors.max() < 1.51 and np.ptp(factors, axis=1).min() > 0
    assert 0.15 < np.abs(moved[:, 0]).max() <= 0.2


def test_the_model_sees_the_visible_patches_only() -> None:
    task = ready()
    model, (clouds, orders) = task.model().eval(), next(task.batches(mesh(), 0))
    inside, centres = patches(clouds, 8, 8)
    drawn, hidden = model(clouds, orders, task.num_visible)
    assert task.num_visible == 4 and drawn.shape == hidden.shape == (4, 4, 8, 3)
    assert torch.equal(hidden, taken(inside, orders[:, 4:]))
    seen = taken(inside, orders[:, :4])
    assert torch.equal(model.encoder.embed(seen), taken(model.encoder.embed(inside), orders[:, :4]))
    calls = []
    model.encoder.register_forward_pre_hook(lambda _, given: calls.append(given))
    model(clouds, orders, 4)
    ((patches_given, centres_given),) = calls
    assert torch.equal(patches_given, seen)
    assert torch.equal(centres_given, taken(centres, orders[:, :4]))


def test_the_loss_is_the_chamfer_distance_of_the_hidden_patches() -> None:
    task = ready()
    model, batch = task.model(), next(task.batches(mesh(), 0))
    drawn, hidden = model(*batch, task.num_visible)
    pairs = [chamfer(drawn[b, g], hidden[b, g]) for b in range(4) for g in range(4)]
    loss = task.loss(model, batch)
    assert loss.shape == () and loss.dtype == torch.float32
    assert loss.item() == pytest.approx(torch.stack(pairs).mean().item(), rel=1e-5)
    loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = task.loss(model, batch)
    assert rough.dtype == torch.float32
    assert rough.item() == pytest.approx(loss.item(), rel=0.1)


@pytest.mark.parametrize("objective", Objective)
def test_it_learns_a_batch_by_heart(objective: Objective) -> None:
    task = ready(objective=objective)
    model, batch = task.model(), next(task.batches(mesh(), 0))
    optimizer = task.optimizer(model)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if objective is Objective.classification:
        assert losses[0] > 1.5 and losses[-1] < 0.7
        return
    hidden = model(*batch, task.num_visible)[1]
    assert losses[-1] < 0.7 * hidden.square().sum(-1).mean().item()  # of drawing the centres


def judged(
    task: ShapeNet, model: torch.nn.Module
) -> tuple[dict[str, float], torch.Tensor, torch.Tensor]:
    """The scores of an evaluation; the clouds whose loss it takes, and the orders of patches."""
    clouds, orders = [], []

    def note(_: torch.nn.Module, given: tuple[Any, ...]) -> None:
        if len(given) == 3 or not task.reconstructs:
            clouds.append(given[0])
            orders.extend(given[1:2])

    with model.register_forward_pre_hook(note):
        scores = task.evaluate(model)
    return scores, torch.cat(clouds), torch.cat(orders) if orders else torch.empty(0)


@pytest.mark.parametrize("objective", Objective)
def test_evaluation_is_the_mean_over_the_test_clouds(folder: Path, objective: Objective) -> None:
    task = ready(path=folder, objective=objective)
    model = task.model()
    scores, clouds, orders = judged(task, model)
    assert model.training and next(iter(scores)) == "loss" and len(clouds) == 5
    model.eval()
    with torch.no_grad():
        if objective is Objective.classification:
            logits, kinds = model(clouds), torch.tensor([0, 1, 0, 1, 0])
            assert scores["loss"] == pytest.approx(F.cross_entropy(logits, kinds).item(), rel=1e-5)
            right = (logits.argmax(1) == kinds).float().mean().item()
            assert scores["accuracy"] == pytest.approx(right)
        else:
            loss = chamfer(*model(clouds, orders, task.num_visible)).mean().item()
            assert scores["loss"] == pytest.approx(loss, rel=1e-5)
            assert 0 <= scores["svm_accuracy"] <= 1


def test_classification_is_the_same_for_any_number_of_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In this process, so that batches can be small. (The SVM needs real workers: below.)"""
    monkeypatch.setattr(
        "tasks.shapenet.shapenet._EVAL_BATCH", 16
    )  # 70 clouds: the last batch has 6
    task = ready(objective=Objective.classification)
    model = task.model()
    alone = task.evaluate(model)
    for world in (2, 3, 5):
        with monkeypatch.context() as patch:
            assert as_workers(patch, world, lambda: task.evaluate(model)) == alone


def scores(rank: int, world: int, objective: Objective) -> dict[str, float]:
    task = ready(world, objective=objective)
    return task.evaluate(task.model())


@pytest.mark.parametrize("objective", Objective)
def test_over_gloo(workers, objective: Objective) -> None:
    alone = scores(0, 1, objective)
    for world in (1, 2, 3):
        assert workers.run(scores, world, objective) == [alone] * world


def test_evaluation_with_loading_workers(folder: Path) -> None:
    alone = ready(path=folder)
    model = alone.model()
    assert ready(path=folder, workers=1).evaluate(model) == alone.evaluate(model)


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


def test_the_svm_on_modelnet40(tmp_path: Path, folder: Path) -> None:
    from sklearn.svm import LinearSVC

    there = modelnet40(tmp_path / "modelnet40")
    task = ready(path=folder, modelnet40=str(there))
    model = task.model()
    scores = task.evaluate(model)
    plain = ready(path=folder).evaluate(model)
    assert scores.keys() - plain.keys() == {"modelnet40_accuracy"}
    assert all(scores[name] == value for name, value in plain.items())
    features, kinds = {}, {}
    for part in ("train", "test"):
        names = (there / f"modelnet40_{part}.txt").read_text().split()
        kinds[part] = np.array([name.startswith("night_stand") for name in names])
        files = [there / name.rpartition("_")[0] / f"{name}.txt" for name in names]
        clouds = np.stack([np.loadtxt(file, np.float32, delimiter=",")[:, :3] for file in files])
        whole = torch.from_numpy(normalized(clouds))
        with torch.no_grad():
            made = model.eval()(taken(whole, farthest_points(whole, 32)))
        features[part] = made.double().numpy()
    machine = LinearSVC(dual=False).fit(features["train"], kinds["train"])
    assert scores["modelnet40_accuracy"] == machine.score(features["test"], kinds["test"])
    assert task.fingerprint()["modelnet40"] == {"train": 12, "test": 6}


def test_a_damaged_modelnet40(tmp_path: Path, folder: Path) -> None:
    there = modelnet40(tmp_path / "modelnet40", points=31)
    task = ready(path=folder, modelnet40=str(there))
    with pytest.raises(ConfigError, match="holds 31 points, 32 are needed") as caught:
        task.evaluate(task.model())
    assert caught.value.key == "shapenet.modelnet40"
    file = there / "flat" / "flat_00000.txt"
    file.write_text("1,2,x\n")
    with pytest.raises(ConfigError, match=r"is not a \.txt file that can be read"):
        task.evaluate(task.model())
    file.unlink()
    with pytest.raises(ConfigError, match=r"is missing; .*modelnet40_train\.txt names it"):
        ready(path=folder, modelnet40=str(there))
    (there / "modelnet40_shape_names.txt").write_text("flat\n")
    with pytest.raises(ConfigError, match="night_stand_00010 is of no category"):
        ready(path=folder, modelnet40=str(there))
    (there / "modelnet40_shape_names.txt").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        ready(path=folder, modelnet40=str(there))
    with pytest.raises(ConfigError, match="set objective to reconstruction"):
        ShapeNet.Config(objective=Objective.classification, modelnet40=str(there))


def test_the_svm_is_that_of_scikit_learn() -> None:
    from sklearn.svm import LinearSVC

    source = np.random.default_rng(0)
    centres = source.normal(size=(4, 6))
    kinds, others = source.integers(0, 4, 120), source.integers(0, 4, 60)
    train, test = (centres[k] + source.normal(size=(len(k), 6)) for k in (kinds, others))
    expected = LinearSVC(dual=False).fit(train, kinds).score(test, others)
    assert 0.5 < expected < 1
    assert svm_accuracy(train, kinds, test, others) == expected
    one = np.zeros_like(kinds)
    assert svm_accuracy(train, one, test, others) == (others == 0).mean()
    train[3, 2] = np.nan
    assert math.isnan(svm_accuracy(train, kinds, test, others))


def test_evaluation_of_broken_weights_says_so() -> None:
    task = ready()
    model = task.model()
    with torch.no_grad():
        model.encoder.transformer.norm.bias.fill_(float("nan"))
    assert all(math.isnan(value) for value in task.evaluate(model).values())


def test_baselines() -> None:
    task = ready()
    found = task.baselines()
    chosen = np.arange(70) * 1000 // 70
    kinds = kinds_of_solids("test")[chosen]
    assert found["majority_accuracy"] == np.bincount(kinds).max() / 70
    assert 0.2 < found["untrained_svm_accuracy"] < 1
    untrained, clouds, orders = judged(task, task.model())
    assert found["untrained_svm_accuracy"] == untrained["svm_accuracy"] and len(clouds) == 70
    hidden = taken(patches(clouds, 8, 8)[0], orders[:, 4:])
    assert found["centre_loss"] == pytest.approx(hidden.square().sum(-1).mean().item(), rel=1e-5)
    assert set(ready(objective=Objective.classification).baselines()) == {"majority_accuracy"}


def test_a_folder_of_ones_own(folder: Path) -> None:
    task = ready(path=folder)
    facts = task.fingerprint()
    assert facts["num_samples"] == {"train": 14, "test": 5} and facts["num_classes"] == 2
    assert task.baselines() == {"majority_accuracy": 0.6}
    assert open_clouds(folder, "data.path")["test"].kinds.tolist() == [0, 1, 0, 1, 0]
    lists = folder / "ShapeNet-55" / "test.txt"
    lists.write_text("\n".join(lists.read_text().split()[::-1]))
    assert ready(path=folder).fingerprint()["sha256"] != facts["sha256"]
    at_root = folder.rename(folder.with_name("shapenet55"))
    task = ready(root=at_root.parent, shapes=Shapes.shapenet55)
    assert task.fingerprint()["data"] == "shapenet55"
    assert isinstance(task.model(), PointMAE)


FIRST = "shapenet_pc/02690156-train0-a.npy"


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        (FIRST, Path.unlink, "is missing; "),
        ("ShapeNet-55/train.txt", Path.unlink, "is missing"),
        ("ShapeNet-55/test.txt", lambda p: p.write_text("\n"), "names no cloud"),
        ("ShapeNet-55/test.txt", lambda p: p.write_text("a-b.npy\n../x-y.npy"), "line 2 is not"),
        ("ShapeNet-55/test.txt", lambda p: p.write_text("chair.npy"), "line 1 is not"),
        ("ShapeNet-55/train.txt", lambda p: p.write_bytes(b"\xff\xfe"), "cannot be read"),
        (
            "ShapeNet-55/train.txt",
            lambda p: p.write_text("02690156-train0-a.npy"),
            "no cloud of its category",
        ),
    ],
)
def test_bad_lists_are_refused_at_once(
    folder: Path, file: str, change: Callable[[Path], object], says: str
) -> None:
    change(folder / file)
    with pytest.raises(ConfigError) as caught:
        shapenet(path=folder).setup(1)
    assert caught.value.key == "data.path" and says in str(caught.value)
    assert Path(file).name in str(caught.value) or "test.txt" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("cloud", "says"),
    [
        (np.full((40, 3), np.nan), "holds NaN or infinity"),
        (np.where(np.arange(120) == 7, np.inf, 1.0 * np.arange(120)).reshape(40, 3), "infinity"),
        (np.zeros((31, 3)), "holds 31 points, 32 are needed"),
        (np.zeros((40, 2)), "has the shape [40, 2]"),
        (np.zeros(40), "has the shape [40]"),
        (np.ones((40, 3)), "all its points are the same"),
        (np.array([["a"] * 3] * 40), "one array of numbers"),
        (None, "is not an .npy file"),
    ],
)
def test_a_damaged_cloud_is_named_when_it_is_met(
    folder: Path, cloud: np.ndarray | None, says: str
) -> None:
    for path in (folder / "shapenet_pc").iterdir():
        path.write_bytes(b"not numpy") if cloud is None else np.save(path, cloud)
    for workers in (0, 1) if cloud is None else (0,):
        task = ready(path=folder, workers=workers)
        with pytest.raises(ConfigError) as caught:
            next(task.batches(mesh(), 0))
        told = str(caught.value)
        assert told.startswith(f"data.path={folder}/shapenet_pc/0269") and says in told
        assert "\n" not in told
    with pytest.raises(ConfigError, match="-test"):
        task.evaluate(torch.nn.Linear(1, 1))


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data\.root=.*python -m tasks\.prepare shapenet"):
        shapenet(root=tmp_path, shapes=Shapes.shapenet55).setup(1)
    with pytest.raises(ConfigError, match=r"^data\.path=.*no such folder"):
        shapenet(path=tmp_path / "none").setup(1)
    with pytest.raises(ConfigError, match=r"^train\.batch_size=1: .*batch norm"):
        shapenet(batch_size=1, objective=Objective.classification).setup(1)
    with pytest.raises(ConfigError, match=r"^train\.batch_size=1000"):
        shapenet(batch_size=1000).setup(2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("points", 0),
        ("groups", 33),
        ("group_size", 33),
        ("mask_ratio", 0.0),
        ("mask_ratio", 1.0),
        ("mask_ratio", 0.1),
        ("mask_ratio", float("nan")),
        ("drop_path", -0.1),
        ("drop_path", 1.0),
        ("eval_samples", 0),
        ("svm_samples", 0),
    ],
)
def test_config(key: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        ShapeNet.Config(**(SMALL | {key: value}))
    assert caught.value.key == key
