"""Solids: points lie on the surface that the name promises, and are spread evenly over it."""

import numpy as np
import pytest

from tasks.shapenet.solids import NOISE, STRETCH, solids, surface
from tasks.shared.randomness import generator


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
