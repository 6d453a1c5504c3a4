"""The same weights give the same figures, to the last digit, for any number of workers."""

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from tasks.shared import evaluation
from tasks.shared.evaluation import evaluating, share, tally, total
from tests.tasks.build import toy


class Workers:
    """`co2.comm.collectives` for a worker. Run the ranks in order: the last has every row."""

    def __init__(self, world: int) -> None:
        self.world, self.rank, self.sum = world, 0, torch.zeros(())

    def place(self) -> tuple[int, int]:
        return self.rank, self.world

    def add_up(self, rows: Tensor) -> None:
        self.sum = self.sum + rows
        rows.copy_(self.sum)
        self.rank += 1


def as_workers(monkeypatch: pytest.MonkeyPatch, world: int, run: Callable[[], object]) -> object:
    """What `run` returns on the last of `world` workers, one after the other in this process."""
    monkeypatch.setattr(evaluation, "collectives", Workers(world))
    results = [run() for _ in range(world)]
    monkeypatch.undo()
    return results[-1]


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_every_batch_counts_once(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    values = torch.randn(7, 2, dtype=torch.float64).exp()
    alone = total(lambda batch: values[batch], 7)
    assert alone == pytest.approx(values.sum(0).tolist())
    assert as_workers(monkeypatch, world, lambda: total(lambda b: values[b], 7)) == alone


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_counts_count_once(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    values = torch.randn(7, 2, dtype=torch.float64)
    counts = torch.randint(0, 9, (7, 3, 3))

    class Both(Workers):
        """Sums and counts are reduced in one order, by all ranks."""

        def __init__(self, world: int) -> None:
            super().__init__(world)
            self.counts, self.order = torch.zeros(3, 3, dtype=torch.int64), []

        def add_up(self, rows: Tensor) -> None:
            self.order.append(rows.dtype)
            if rows.dtype == torch.int64:
                self.counts = self.counts + rows
                rows.copy_(self.counts)
                self.rank += 1
            else:
                self.sum = self.sum + rows
                rows.copy_(self.sum)

    workers = Both(world)
    monkeypatch.setattr(evaluation, "collectives", workers)
    asked: list[int] = []
    for rank in range(world):
        expected = share(7)
        asked.clear()
        sums, found = tally(lambda b: asked.append(b) or (values[b], counts[b]), 7)
        assert asked == expected and workers.rank == rank + 1
    monkeypatch.undo()
    assert sums == total(lambda b: values[b], 7)
    assert torch.equal(found, counts.sum(0))


def test_every_worker_runs_as_many_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapped model's forward may be collective: one idle worker would block the others."""
    calls = []
    as_workers(
        monkeypatch,
        3,
        lambda: (
            calls.append([])
            or total(lambda b: calls[-1].append(b) or torch.ones(1, dtype=torch.float64), 7)
        ),
    )
    assert [len(own) for own in calls] == [3, 3, 3]
    assert [own[:2] for own in calls] == [[0, 3], [1, 4], [2, 5]]


def test_a_broken_batch_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.tensor([1.0, float("nan"), 2.0], dtype=torch.float64)
    (result,) = as_workers(monkeypatch, 2, lambda: total(lambda b: values[b : b + 1], 3))
    assert result != result


def test_modes_are_restored_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    model[1].eval()  # frozen by its owner
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with suppress(ZeroDivisionError), evaluating(model):
        assert not torch.backends.cudnn.benchmark
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        raise ZeroDivisionError
    assert [module.training for module in model] == [True, False, True] and model.training
    assert torch.backends.cudnn.benchmark


def scores(rank: int, world: int) -> dict[str, float]:
    task = toy(samples=250)
    task.setup(world)
    return task.evaluate(task.model())


def test_toy_over_gloo(workers) -> None:
    alone = scores(0, 1)
    for world in (1, 2, 3):
        assert workers.run(scores, world) == [alone] * world
