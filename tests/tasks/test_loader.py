"""Batches come in order, the same with and without worker processes; errors stay one line."""

import os
from itertools import count, islice

import numpy as np
import pytest
import torch
from torch import Tensor

from co2.errors import ConfigError
from tasks.shared.loader import load, load_blocks
from tasks.shared.randomness import Draws, generator, generators, seeded, seeds

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


def test_a_key_says_it_all() -> None:
    def drawn(*key: int) -> list[float]:
        with seeded(*key):
            return torch.rand(4).tolist()

    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert drawn(1, 2, 3) == drawn(1, 2, 3)
    assert len({tuple(drawn(*key)) for key in [(1, 2, 3), (3, 2, 1), (1, 2), (1, 2, 4)]}) == 4
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(generator(1, 2).random(3), generator(1, 2).random(3))
    assert not np.array_equal(generator(1, 2).random(3), generator(2, 1).random(3))


def test_keys_of_many_rows_are_those_of_each() -> None:
    """Of short keys, of long ones, and of seeds above 32 bits."""
    samples = np.random.default_rng(0).integers(0, 2**32, 20)
    for first in ((), (0,), (2**40 + 3, 7), (1, 2, 3, 4, 5)):
        starts = seeds(*first, samples)
        for start, source, sample in zip(starts, generators(*first, samples), samples, strict=True):
            with seeded(*first, int(sample)):
                assert torch.initial_seed() == start
            assert np.array_equal(source.random(3), generator(*first, int(sample)).random(3))


def test_draws_are_those_of_pytorch() -> None:
    starts = seeds(1, np.arange(300))
    draws, some = Draws(starts, 12), np.arange(300) % 2 == 0
    ranges = ((0.0, 1.0), (0.08, 1.0), (-0.2876, 0.2876), (0.875, 1.125))
    floats = [draws.uniform(low, high) for low, high in ranges]
    skipped = draws.uniform(0, 1, some)
    numbers = [draws.integers(high) for high in (1, 9, 2**27 + 5)]
    draws.skip(3, some)
    last = draws.uniform(0, 1)
    for row, start in enumerate(starts):
        torch.manual_seed(start)
        for found, bounds in zip(floats, ranges, strict=True):
            assert torch.empty(1).uniform_(*bounds).item() == found[row]
        if some[row]:
            assert torch.rand(()).item() == skipped[row]
        for number, high in zip(numbers, (1, 9, 2**27 + 5), strict=True):
            assert torch.randint(high, ()).item() == number[row]
        if some[row]:
            torch.randperm(4)
        assert torch.rand(()).item() == last[row]
        assert draws.used[row] == (12 if some[row] else 8)


@pytest.mark.parametrize("workers", [0, 1])
def test_blocks_change_no_batch(workers: int) -> None:
    def make(batches: range) -> tuple[torch.Tensor, ...]:
        numbers = torch.arange(batches.start, batches.stop)
        return numbers.repeat_interleave(2), numbers * 10

    for start in (0, 3, 4, 9):
        found = islice(load_blocks(make, start, 4, workers, CPU), 6)
        for number, batch in zip(range(start, start + 6), found, strict=True):
            assert isinstance(batch, tuple)
            assert batch[0].tolist() == [number, number] and batch[1].tolist() == [number * 10]
