"""Batches come in order, the same with and without worker processes; errors stay one line."""

import errno
import os
import signal
from itertools import count, islice

import pytest
import torch
from torch import Tensor

from co2.errors import ConfigError, from_outside
from tasks.shared import loader
from tasks.shared.loader import load
from tasks.shared.randomness import seeded

CPU = torch.device("cpu")


def make(index: int) -> tuple[Tensor, Tensor]:
    with seeded(7, index):
        return torch.rand(3), torch.tensor([index, os.getpid()])


@pytest.mark.parametrize("start", [0, 5])
def test_workers_change_nothing(start: int) -> None:
    before = torch.get_rng_state()
    alone = list(islice(load(make, count(start), 0, CPU), 12))
    ahead = list(islice(load(make, count(start), 2, CPU), 12))
    assert torch.equal(torch.get_rng_state(), before)
    assert [int(tag[0]) for _, tag in ahead] == list(range(start, start + 12))
    assert {type(batch) for batch in (*alone, *ahead)} == {tuple}
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(alone, ahead, strict=True))
    assert {int(tag[1]) for _, tag in alone} == {os.getpid()}
    assert len({int(tag[1]) for _, tag in ahead} - {os.getpid()}) == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fault_in_the_data_stays_one_line(workers: int) -> None:
    def faulty(index: int) -> Tensor:
        if index == 2:
            raise ConfigError("data.path", "tree", "a.jpg is cut short")
        return torch.tensor(index)

    batches = load(faulty, range(5), workers, CPU)
    assert [int(next(batches)), int(next(batches))] == [0, 1]
    with pytest.raises(ConfigError) as caught:
        next(batches)
    assert str(caught.value) == "data.path=tree: a.jpg is cut short"


def test_a_loading_process_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(loader.DataLoader, "__iter__", limited)
    with pytest.raises(
        ConfigError, match=r"^data.workers=2: a loading process cannot start \(Reso"
    ):
        next(load(make, count(), 2, CPU))


def test_a_loading_process_is_killed() -> None:
    def killed(index: int) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(index)

    with pytest.raises(RuntimeError) as caught:
        next(load(killed, count(), 1, CPU))
    line = from_outside(caught.value)
    assert line is not None and line.endswith("fewer data.workers; the same command goes on")
