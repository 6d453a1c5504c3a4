"""The toy learns, and its data depend on the seed alone."""

import os
import time
from pathlib import Path

import pytest
import torch

from co2.config import Validation
from co2.errors import ConfigError
from co2.record.files import whole_lines
from tests.tasks.build import mesh, sampler, toy


def test_it_learns() -> None:
    task = toy()
    task.setup(1)
    model = task.model()
    optimizer = task.optimizer(model)
    before = task.evaluate(model)
    for _, batch in zip(range(150), task.batches(mesh(), 0), strict=False):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    after = task.evaluate(model)
    assert after["loss"] < before["loss"] / 2
    assert after["accuracy"] > 0.8 > task.baselines()["majority_accuracy"]
    assert model.training


def test_batches_go_on_from_any_start() -> None:
    task = toy(samples=50, batch_size=4)
    task.setup(3)
    whole = task.batches(mesh(2, 3), 0)
    points = [next(whole)[0] for _ in range(12)]
    assert all(
        torch.equal(next(task.batches(mesh(2, 3), start))[0], points[start]) for start in range(12)
    )


def test_the_ledger_tells_what_was_trained_on(tmp_path: Path) -> None:
    task = toy(samples=48, batch_size=4, ledger=str(tmp_path))
    task.setup(3)
    places, of = sampler(task, 48, 3), {}
    for worker in range(3):
        for draw, (points, *_) in zip(range(4), task.batches(mesh(worker, 3), 0), strict=False):
            of.update(zip(places.indices(draw, worker).tolist(), points, strict=True))
    batches = task.batches(mesh(2, 3), 3)
    made = [next(batches) for _ in range(2)]
    for batch in made:
        task.loss(task.model(), batch)
    lines = whole_lines(tmp_path / f"{os.getpid()}.jsonl")
    assert [(draw, epoch) for draw, epoch, _ in lines] == [(3, 0), (4, 1)]
    for (points, *_), (_, _, samples) in zip(made, lines, strict=True):
        assert torch.equal(points, torch.stack([of[sample] for sample in samples]))


def test_everything_depends_on_the_seed_alone() -> None:
    def state(seed: int) -> tuple[str, list[float]]:
        torch.manual_seed(time.time_ns() % 1000)
        before = torch.get_rng_state()
        task = toy(seed=seed)
        task.setup(1)
        weights = task.model().state_dict()["0.weight"]
        assert torch.equal(torch.get_rng_state(), before)
        return task.fingerprint()["sha256"], weights.flatten().tolist()

    assert state(1) == state(1)
    other = state(2)
    assert state(1)[0] != other[0] and state(1)[1] != other[1]


def test_buffers_of_both_kinds() -> None:
    kinds = {buffer.is_floating_point() for buffer in toy().model().buffers()}
    assert kinds == {True, False}


def test_the_halves_of_the_validation_points() -> None:
    scores = {}
    for part in Validation:
        task = toy()
        task.data.validation = part
        task.setup(1)
        scores[part] = task.evaluate(task.model())["loss"]
    whole, report, tuning = scores.values()
    assert whole == pytest.approx((report + tuning) / 2, rel=1e-6) and report != tuning


def test_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    task = toy(delay_s=0.05)
    task.setup(1)
    task.loss(task.model(), next(task.batches(mesh(), 0)))
    assert slept == [0.05]


@pytest.mark.parametrize(
    ("kwargs", "replicas", "key"),
    [
        ({"batch_size": 1}, 1, "train.batch_size"),
        ({"samples": 16, "batch_size": 9}, 2, "train.batch_size"),
        ({"samples": 3}, 4, "launch.workers"),
        ({"path": "text.txt"}, 1, "data.path"),
    ],
)
def test_refused(kwargs: dict, replicas: int, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        toy(**kwargs).setup(replicas)
    assert caught.value.key == key


@pytest.mark.parametrize("key", ["samples", "features", "hidden", "delay_s", "late_s"])
def test_config(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        toy(**{key: -1})
    assert caught.value.key == key
