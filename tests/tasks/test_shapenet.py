"""Clouds: distances, patches and generated solids. Point-MAE: masks, loss, evaluation and its SVM;
and the layout of ShapeNet-55.

What all tasks must do is in test_contract.py. The shapes of the solids are in the losses of
results/golden.json.
"""

import math
import shutil
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from co2.config import OptimConfig
from tasks.prepare.__main__ import main
from tasks.shapenet.clouds import normalized, open_clouds, scaled_and_moved
from tasks.shapenet.point_mae import PointMAE
from tasks.shapenet.points import chamfer, farthest_points, patches, taken
from tasks.shapenet.shapenet import NUM_SOLIDS, Objective, ShapeNet, Shapes, Size, svm_accuracy
from tasks.shapenet.solids import solids
from tasks.shared.randomness import uniforms
from tests.tasks.build import built, mesh, num_parameters, refusal, used
from tests.tasks.small_sets import modelnet40
from tests.tasks.small_sets import shapenet55 as write


def cloud(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, 3, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def loop_farthest(points: list[list[float]], count: int) -> list[int]:
    chosen = [0]
    while len(chosen) < count:
        gaps = [min(math.dist(p, points[c]) for c in chosen) for p in points]
        chosen.append(gaps.index(max(gaps)))
    return chosen


def loop_chamfer(first: list[list[float]], second: list[list[float]]) -> float:
    def one_way(here: list[list[float]], there: list[list[float]]) -> float:
        return fmean(min(math.dist(p, q) ** 2 for q in there) for p in here)

    return one_way(first, second) + one_way(second, first)


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


def test_patches() -> None:
    """A cloud has the same ones in any batch."""
    clouds = cloud(3, 40, dtype=torch.float64)
    inside, centres = patches(clouds, 6, 9)
    assert inside.shape == (3, 6, 9, 3) and centres.shape == (3, 6, 3)
    for n in range(3):
        points = clouds[n].tolist()
        for g, first in enumerate(loop_farthest(points, 6)):
            assert centres[n, g].tolist() == points[first]
            near = sorted(points, key=partial(math.dist, points[first]))[:9]
            expected = np.array(near) - points[first]
            np.testing.assert_allclose(inside[n, g].numpy(), expected, rtol=0, atol=1e-15)
            assert inside[n, g, 0].tolist() == [0, 0, 0]
        alone = patches(clouds[n : n + 1], 6, 9)
        assert torch.equal(alone[0][0], inside[n]) and torch.equal(alone[1][0], centres[n])


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
    """And small distances far from 0 keep their digits, most of which |a|² − 2ab + |b|² would
    lose."""
    a = cloud(4, 32)
    mixed = a[:, torch.randperm(32, generator=torch.Generator().manual_seed(0))]
    assert chamfer(a, mixed).tolist() == [0.0] * 4
    assert chamfer(a.repeat(1, 2, 1), mixed).tolist() == [0.0] * 4
    a = cloud(2, 32, dtype=torch.float64) + 10
    b = a + 1e-2 * cloud(2, 32, seed=1, dtype=torch.float64)
    exact = chamfer(a.float().double(), b.float().double())
    assert chamfer(a.float(), b.float()).tolist() == pytest.approx(exact.tolist(), rel=1e-5)


SMALL = {"points": 32, "groups": 8, "group_size": 8, "eval_samples": 70, "svm_samples": 100}
ready = partial(built, "shapenet", num_workers=1, optim=OptimConfig(lr=2e-3), **SMALL)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("clouds") / "mine")


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "mine")


def test_sizes() -> None:
    """Every normalization has PyTorch's eps as in the published model; timm's blocks would have
    another."""
    assert 0.4e6 < num_parameters("shapenet", **SMALL) < 0.6e6
    published = {"points": 1024, "groups": 64, "group_size": 32, "size": Size.base}
    assert round(num_parameters("shapenet", **{**SMALL, **published}) / 1e6) == 29
    blocks = ready(drop_path=0.1).model().encoder.transformer.blocks
    rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in blocks]
    assert rates == pytest.approx([0, 0.05, 0.1])
    for objective in Objective:
        modules = ready(objective=objective).model().modules()
        norms = [one for one in modules if isinstance(one, nn.LayerNorm | nn.BatchNorm1d)]
        assert len(norms) > 8 and {norm.eps for norm in norms} == {1e-5}


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


def judged(task: ShapeNet, model: nn.Module) -> tuple[dict[str, float], torch.Tensor, torch.Tensor]:
    """The scores of an evaluation; the clouds whose loss it takes, and the orders of patches."""
    clouds, orders = [], []

    def note(_: nn.Module, given: tuple[Any, ...]) -> None:
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


def test_a_check_counts_what_modelnet40_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = modelnet40(tmp_path / "modelnet40", points=1024)
    assert main(["shapenet", "--check", str(there)]) == 1
    test, train = (f"{there}/modelnet40_{part}.txt: names" for part in ("test", "train"))
    assert {*capsys.readouterr().out.splitlines()} == {
        f"{train} 12 clouds, ModelNet40 has 9843",
        f"{test} 6 clouds, ModelNet40 has 2468",
        *(f"{part} 2 categories, ModelNet40 has 40" for part in (train, test)),
        f"{there}: 4 faults",
    }


def test_what_an_svm_cannot_tell() -> None:
    source = np.random.default_rng(0)
    train, test, kinds = source.normal(size=(12, 6)), source.normal(size=(6, 6)), np.arange(6) % 2
    one = np.zeros(12)
    assert svm_accuracy(train, one, test, kinds) == 0.5, "all are of one kind"
    train[3, 2] = np.nan
    assert math.isnan(svm_accuracy(train, np.arange(12) % 2, test, kinds))


def test_a_damaged_modelnet40(tmp_path: Path, folder: Path) -> None:
    there = modelnet40(tmp_path / "modelnet40", points=31)
    file, names = there / "flat" / "flat_00000.txt", there / "modelnet40_shape_names.txt"
    task = ready(path=folder, modelnet40=str(there))
    for spoil, says in (
        (lambda: None, "holds 31 points, 32 are needed"),
        (lambda: file.write_text("1,2,x\n"), "is not a .txt file that can be read"),
    ):
        spoil()
        assert says in refusal(lambda: task.evaluate(task.model()))
    for spoil, says in (
        (file.unlink, "modelnet40_train.txt names it"),
        (lambda: names.write_text("flat\n"), "night_stand_00010 is of no category"),
    ):
        spoil()
        line = refusal(lambda: ready(path=folder, modelnet40=str(there)))
        assert line.startswith("shapenet.modelnet40=") and says in line


def test_baselines() -> None:
    """Evenly spread samples of kinds that took turns could all be of one kind."""
    task = ready()
    found = task.baselines()
    _, kinds = solids(sum(NUM_SOLIDS.values()), 2, seed=0)
    chosen = kinds[NUM_SOLIDS["train"] :][np.arange(70) * 1000 // 70]
    assert found["majority_accuracy"] == np.bincount(chosen).max() / 70 < 0.3
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


@pytest.mark.parametrize(
    ("cloud", "says"),
    [
        (np.full((40, 3), np.nan), "holds NaN or infinity"),
        (np.where(np.arange(120) == 7, np.inf, 1.0 * np.arange(120)).reshape(40, 3), "infinity"),
        (np.zeros((40, 2)), "has the shape [40, 2]"),
        (np.ones((40, 3)), "all its points are the same"),
        (None, "is not an .npy file"),
    ],
)
def test_a_damaged_cloud_is_named_when_it_is_met(
    folder: Path, cloud: np.ndarray | None, says: str
) -> None:
    for path in (folder / "shapenet_pc").iterdir():
        path.write_bytes(b"not numpy") if cloud is None else np.save(path, cloud)
    task = ready(path=folder)
    line = refusal(lambda: used(task))
    assert line.startswith(f"data.path={folder}/shapenet_pc/0269") and says in line
    assert "-test" in refusal(lambda: task.evaluate(nn.Linear(1, 1)))
