"""Numbers depend on the key alone, and are uniform and independent."""

import numpy as np
import pytest
from scipy.stats import chisquare, kstest

from tasks.shared.randomness import _GAMMA, _hashed, uniforms

SAMPLES = np.arange(20_000)


def test_the_hash_is_that_of_splitmix64() -> None:
    """What Vigna's splitmix64.c, the common reference, makes of the seed 1234567."""
    words = _hashed(np.uint64(1234567) + np.arange(1, 6, dtype=np.uint64) * _GAMMA)
    assert words.tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_a_row_is_a_function_of_its_key() -> None:
    """Of any key: with two arrays, numbers above 32 bits, rows alone and among others; and more
    numbers begin with the same ones."""
    epochs, samples = np.arange(8) // 3, np.arange(8) * 2**36
    whole = uniforms(5, 2**40 + 1, epochs, samples)
    assert whole.shape == (8, 5) and whole.dtype == np.float64
    assert np.array_equal(whole[4:], uniforms(5, 2**40 + 1, epochs[4:], samples[4:]))
    assert np.array_equal(whole[:, :2], uniforms(2, 2**40 + 1, epochs, samples))
    for row, (epoch, sample) in enumerate(zip(epochs.tolist(), samples.tolist(), strict=True)):
        assert np.array_equal(whole[row], uniforms(5, 2**40 + 1, epoch, sample)[0])


def test_other_keys_have_other_numbers() -> None:
    keys = [
        (),
        (0,),
        (0, 0),
        (0, 0, 0),
        (1,),
        (0, 1),
        (1, 0),
        (1, 2),
        (2, 1),
        (2**63, 0),
        (1, 2, 0),
    ]
    assert len({float(uniforms(1, *key)[0, 0]) for key in keys}) == len(keys)
    epochs, samples = np.divmod(np.arange(90_000), 300)
    assert len(np.unique(uniforms(2, 0, epochs, samples))) == 180_000


@pytest.mark.parametrize("column", [0, 1, 30])
@pytest.mark.parametrize("varying", [0, 1, 2])
def test_numbers_are_uniform(column: int, varying: int) -> None:
    """Over neighbouring keys that differ in one part; and along one sequence."""
    key: list[int | np.ndarray] = [3, 5, 7]
    key[varying] = SAMPLES
    for numbers in (uniforms(31, *key)[:, column], uniforms(20_000, 3, varying, column)[0]):
        assert numbers.min() >= 0 and numbers.max() < 1
        assert kstest(numbers, "uniform").pvalue > 1e-3
        assert chisquare(np.bincount((numbers * 97).astype(int), minlength=97)).pvalue > 1e-3


@pytest.mark.parametrize("varying", [0, 1, 2])
def test_neighbours_are_independent(varying: int) -> None:
    """Of keys, of places in a sequence, and of both, by the correlation and by a grid of pairs."""
    key: list[int | np.ndarray] = [3, 5, 7]
    key[varying] = SAMPLES
    numbers = uniforms(2, *key)
    first, second = numbers.T
    for some, others in ((first, second), (first[:-1], first[1:]), (first[1:], second[:-1])):
        assert abs(np.corrcoef(some, others)[0, 1]) < 4 / np.sqrt(len(SAMPLES))
        pairs = (some * 12).astype(int) * 12 + (others * 12).astype(int)
        assert chisquare(np.bincount(pairs, minlength=144)).pvalue > 1e-3
