"""Clouds: distances, patches, and the solids that they lie on. Point-MAE: masks, batches, loss,
evaluation and its SVM; and the layout of ShapeNet-55.

What all tasks must do is in test_contract.py.
"""

import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from co2.config import OptimConfig
from co2.errors import ConfigError
from tasks.shapenet.clouds import drawn, normalized, open_clouds, scaled_and_moved
from tasks.shapenet.point_mae import PointMAE
from tasks.shapenet.points import chamfer, farthest_points, patches, squared_distances, taken
from tasks.shapenet.shapenet import (
    NUM_SOLIDS,
    Objective,
    ShapeNet,
    Shapes,
    Size,
    svm_accuracy,
)
from tasks.shapenet.solids import NOISE, STRETCH, solids, surface
from tasks.shared.randomness import generator, uniforms
from tests.tasks.build import built, mesh, num_parameters, sampler
from tests.tasks.small_clouds import modelnet40, write


def cloud(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, 3, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def loop_farthest(points: list[list[float]], count: int) -> list[int]:
    chosen = [0]
    while len(chosen) < count:
        gaps = [
            min(sum((a - b) ** 2 for a, b in zip(p, points[c], strict=True)) for c in chosen)
            for p in points
        ]
        chosen.append(gaps.index(max(gaps)))
    return chosen


def loop_chamfer(first: list[list[float]], second: list[list[float]]) -> float:
    def one_way(here: list[list[float]], there: list[list[float]]) -> float:
        nearest = [
            min(sum((a - b) ** 2 for a, b in zip(p, q, strict=True)) for q in there) for p in here
        ]
        return sum(nearest) / len(nearest)

    return one_way(first, second) + one_way(second, first)


def test_squared_distances() -> None:
    a, b = cloud(2, 4), cloud(2, 5, seed=1)
    found = squared_distances(a, b)
    assert found.shape == (2, 4, 5)
    for n, i, j in np.ndindex(2, 4, 5):
        assert found[n, i, j].item() == pytest.approx(
            sum((a[n, i] - b[n, j]).tolist()[k] ** 2 for k in range(3)), rel=1e-5
        )


@pytest.mark.parametrize(("batch", "points", "count"), [(1, 30, 7), (3, 17, 17), (4, 5, 1)])
def test_farthest_points(batch: int, points: int, count: int) -> None:
    clouds = cloud(batch, points, dtype=torch.float64)
    found = farthest_points(clouds, count)
    assert found.dtype == torch.int64 and found.shape == (batch, count)
    assert found.tolist() == [loop_farthest(one.tolist(), count) for one in clouds]


def test_farthest_points_where_points_are_the_same() -> None:
    """Two places, five points: the third choice finds nothing far and takes point 0 again."""
    twice = torch.tensor([[[0.0, 0, 0], [1, 0, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0]]])
    assert farthest_points(twice, 4).tolist() == [[0, 1, 0, 0]]
    assert farthest_points(torch.ones(2, 3, 3), 3).tolist() == [[0, 0, 0]] * 2


@pytest.mark.parametrize("batch", [1, 3])
def test_patches(batch: int) -> None:
    clouds = cloud(batch, 40, dtype=torch.float64)
    inside, centres = patches(clouds, 6, 9)
    assert inside.shape == (batch, 6, 9, 3) and centres.shape == (batch, 6, 3)
    for n in range(batch):
        points = clouds[n].tolist()
        for g, first in enumerate(loop_farthest(points, 6)):
            assert centres[n, g].tolist() == points[first]
            near = sorted(points, key=lambda p: sum((np.array(p) - points[first]) ** 2))[:9]
            expected = np.array(near) - points[first]
            np.testing.assert_allclose(inside[n, g].numpy(), expected, rtol=0, atol=1e-15)
            assert inside[n, g, 0].tolist() == [0, 0, 0]


def test_patches_of_points_that_are_the_same() -> None:
    inside, centres = patches(torch.full((2, 8, 3), 5.0), 4, 3)
    assert torch.equal(inside, torch.zeros(2, 4, 3, 3))
    assert torch.equal(centres, torch.full((2, 4, 3), 5.0))


def test_a_cloud_has_the_same_patches_in_any_batch() -> None:
    clouds = cloud(5, 64)
    whole = patches(clouds, 8, 16)
    for n in range(5):
        alone = patches(clouds[n : n + 1], 8, 16)
        assert all(torch.equal(a[0], b[n]) for a, b in zip(alone, whole, strict=True))


def test_taken() -> None:
    values, indices = torch.arange(24).reshape(2, 4, 3), torch.tensor([[3, 0], [1, 1]])
    found = taken(values, indices)
    assert found.tolist() == [[[9, 10, 11], [0, 1, 2]], [[15, 16, 17], [15, 16, 17]]]


@pytest.mark.parametrize(("n", "m"), [(1, 1), (6, 6), (7, 3)])
def test_chamfer(n: int, m: int) -> None:
    a, b = cloud(2, 3, n, dtype=torch.float64), cloud(2, 3, m, seed=1, dtype=torch.float64)
    found = chamfer(a, b)
    assert found.shape == (2, 3)
    for i, j in np.ndindex(2, 3):
        expected = loop_chamfer(a[i, j].tolist(), b[i, j].tolist())
        assert found[i, j].item() == pytest.approx(expected, rel=1e-12)
    assert torch.equal(chamfer(b, a), found)


def test_chamfer_of_a_set_and_itself_is_exactly_0() -> None:
    a = cloud(4, 32)
    mixed = a[:, torch.randperm(32, generator=torch.Generator().manual_seed(0))]
    assert chamfer(a, mixed).tolist() == [0.0] * 4
    assert chamfer(a.repeat(1, 2, 1), mixed).tolist() == [0.0] * 4


def test_chamfer_keeps_small_distances_in_fp32() -> None:
    """Points far from 0 and near each other: |a|² − 2ab + |b|² would lose most digits."""
    a = cloud(2, 32, dtype=torch.float64) + 10
    b = a + 1e-2 * cloud(2, 32, seed=1, dtype=torch.float64)
    exact = chamfer(a.float().double(), b.float().double())
    assert chamfer(a.float(), b.float()).tolist() == pytest.approx(exact.tolist(), rel=1e-5)


def test_gradients_of_chamfer() -> None:
    a = cloud(2, 5, dtype=torch.float64).requires_grad_()
    b = cloud(2, 4, seed=1, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(chamfer, (a, b))
    twins = torch.zeros(1, 2, 3, dtype=torch.float64, requires_grad=True)
    chamfer(twins, torch.ones(1, 1, 3, dtype=torch.float64)).sum().backward()
    assert torch.equal(twins.grad[0, 0], twins.grad[0, 1])  # a tie is shared


def test_no_gradient_runs_through_the_choice_of_patches() -> None:
    clouds = cloud(1, 16).requires_grad_()
    assert not any(made.requires_grad for made in patches(clouds, 4, 4))


def upright(name: str, count: int = 20, points: int = 400) -> tuple[np.ndarray, ...]:
    """Distance from the vertical axis, height and angle of the points of solids of one kind."""
    cloud = surface(name, count, points, generator(3))
    assert cloud.shape == (count, points, 3)
    x, y, z = np.moveaxis(cloud, -1, 0)
    return np.hypot(x, y), z, np.arctan2(y, x)


def test_ball() -> None:
    out, up, _ = upright("ball")
    distance = np.hypot(out, up)
    assert distance.max() <= 1 + 1e-9 and distance.min() > 0.97  # the grid cuts corners
    share = (np.abs(up) < 0.5).mean()  # Archimedes: heights of a sphere are uniform
    assert share == pytest.approx(0.5, abs=0.02)


def test_torus() -> None:
    out, up, _ = upright("torus")
    tube = np.hypot(out - 1, up)
    assert (tube.max(1) <= 0.51).all() and (tube.min(1) > 0.15).all()
    assert (np.ptp(tube, axis=1) < 0.06).all()  # one radius for each


def test_cylinder_has_two_lids_and_a_wall() -> None:
    out, up, _ = upright("cylinder", points=2000)
    half = np.abs(up).max(1, keepdims=True)
    assert ((half > 0.59) & (half < 1.41)).all()
    lid, wall = np.abs(np.abs(up) - half) < 1e-9, out > 0.99
    assert (lid | wall).all()
    expected = 2 * np.pi / (2 * np.pi + 2 * np.pi * 2 * half[:, 0])  # areas
    np.testing.assert_allclose(lid.mean(1), expected, atol=0.06)


@pytest.mark.parametrize("name", ["cone", "pyramid"])
def test_a_peak_narrows_in_a_straight_line(name: str) -> None:
    out, up, _ = upright(name)
    half = np.abs(up).max(1, keepdims=True)
    bound = (1 - up / np.maximum(half, 1e-9)) / 2
    assert (out <= bound + 0.05).all()
    assert (np.abs(up + half) < 0.02).mean() > 0.1  # a floor


@pytest.mark.parametrize(("name", "sides"), [("box", 4)])
def test_flat_walls(name: str, sides: int) -> None:
    out, up, angle = upright(name)
    half = np.abs(up).max(1, keepdims=True)
    wall = np.abs(np.abs(up) - half) > 1e-9
    middle = (np.floor(angle / (2 * np.pi / sides)) + 0.5) * 2 * np.pi / sides
    distance = out * np.cos(angle - middle)
    np.testing.assert_allclose(distance[wall], np.cos(np.pi / sides), atol=1e-9)


def test_capsule_and_hourglass() -> None:
    out, up, _ = upright("capsule")
    assert (np.abs(up).max(1) > 1.3).all() and (out <= 1 + 1e-9).all()
    out, up, _ = upright("hourglass")
    waist = np.where(np.abs(up) < 0.1, out, 0).max(1)
    assert (waist < 0.55).all() and (out.max(1) > 0.9).all()


def test_spring_is_a_tube_around_a_spiral() -> None:
    out, up, _ = upright("spring")
    assert out.min() > 0.7 and out.max() < 1.3
    assert (np.ptp(up, axis=1) > 0.9).all() and (np.ptp(up, axis=1) < 2.6).all()


def test_a_star_has_five_arms() -> None:
    out, up, angle = upright("star", points=2000)
    arm = np.cos(5 * angle)  # 1 along an arm, -1 between two
    assert out[arm > 0.99].max() > 0.95 and out[arm < -0.99].max() < 0.62
    assert (np.abs(np.abs(up).max(1) - 1) < 0.41).all()


def test_there_are_as_many_of_each_kind_and_all_differ() -> None:
    clouds, kinds = solids(43, 64, seed=1)
    assert clouds.shape == (43, 64, 3) and clouds.dtype == np.float32
    assert sorted(np.bincount(kinds)) == [4] * 7 + [5] * 3 and kinds.dtype == np.int64
    assert kinds[:10].tolist() != sorted(kinds[:10].tolist())
    assert len({cloud.tobytes() for cloud in clouds}) == 43
    assert np.linalg.norm(clouds, axis=-1).max() < 2.4 * STRETCH[1] + 6 * NOISE


def test_they_depend_on_the_seed_alone() -> None:
    assert np.array_equal(solids(20, 32, 5)[0], solids(20, 32, 5)[0])
    assert not np.array_equal(solids(20, 32, 5)[0], solids(20, 32, 6)[0])


SMALL = {"points": 32, "groups": 8, "group_size": 8, "eval_samples": 70, "svm_samples": 100}


shapenet = partial(built, "shapenet", optim=OptimConfig(lr=2e-3), **SMALL)


def ready(num_replicas: int = 1, **given: Any) -> ShapeNet:
    return shapenet(num_workers=num_replicas, **given)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("clouds") / "mine")


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "mine")


def test_sizes() -> None:
    assert 0.4e6 < num_parameters("shapenet", **SMALL) < 0.6e6
    published = {"points": 1024, "groups": 64, "group_size": 32, "size": Size.base}
    assert round(num_parameters("shapenet", **{**SMALL, **published}) / 1e6) == 29


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
    assert loss.item() == pytest.approx(torch.stack(pairs).mean().item(), rel=1e-5)


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
    with pytest.raises(ConfigError, match=r"^data\.path=.*no such folder"):
        shapenet(path=tmp_path / "none").setup(1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("groups", 33),
        ("group_size", 33),
        ("mask_ratio", 0.1),
    ],
)
def test_config(key: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        ShapeNet.Config(**(SMALL | {key: value}))
    assert caught.value.key == key
