"""Farthest points, patches and Chamfer distance, against loops that a child could follow."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tasks.shapenet.points import chamfer, farthest_points, patches, squared_distances, taken


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
