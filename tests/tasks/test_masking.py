"""Masks: the papers' shares, and nothing but the key decides."""

import math

import numpy as np
import pytest

from tasks.masking import IGNORED, Vocabulary, masked, num_chosen
from tasks.randomness import generator

WORDS = Vocabulary(1000)


def rows(number: int, length: int = 100) -> np.ndarray:
    """Windows of ordinary tokens between <s> and </s>, with a separator here and there."""
    source = generator(5)
    found = source.integers(4, WORDS.mask, (number, length))
    found[source.random(found.shape) < 0.05] = Vocabulary.END
    found[:, 0], found[:, -1] = Vocabulary.START, Vocabulary.END
    return found


def keys(number: int, *first: int) -> list[tuple[int, ...]]:
    return [(*first, sample) for sample in range(number)]


def test_a_window_loses_just_the_chosen_places() -> None:
    given = rows(50)
    before = given.copy()
    seen, places, targets = masked(given, WORDS, keys(50, 0, 0))
    assert np.array_equal(given, before)
    assert places.shape == targets.shape == (50, 15)
    assert (np.diff(places, axis=1) > 0).all()
    assert np.array_equal(np.take_along_axis(given, places, axis=1), targets)
    restored = seen.copy()
    np.put_along_axis(restored, places, targets, axis=1)
    assert np.array_equal(restored, given)


def test_only_ordinary_tokens_are_chosen_and_drawn() -> None:
    given = rows(400)
    seen, _, targets = masked(given, WORDS, keys(400, 0, 0))
    assert targets.min() >= 4 and targets.max() < WORDS.mask
    special = (given < 4) | (given == WORDS.mask)
    assert np.array_equal(seen[special], given[special])
    drawn = seen[(seen != given) & (seen != WORDS.mask)]
    assert len(drawn) > 300 and drawn.min() >= 4 and drawn.max() < WORDS.mask


def test_the_shares_are_80_10_10() -> None:
    """Within four standard deviations of a binomial."""
    given = rows(4000)
    seen, places, targets = masked(given, WORDS, keys(4000, 0, 0))
    shown = np.take_along_axis(seen, places, axis=1)
    kinds = {0.8: shown == WORDS.mask, 0.1: shown == targets}
    kinds_random = ~(kinds[0.8] | kinds[0.1])
    number = targets.size
    for share, kind in [*kinds.items(), (0.1, kinds_random)]:
        # One random token in 995 is the token itself.
        assert abs(kind.mean() - share) < 4 * math.sqrt(share * (1 - share) / number) + 2e-4
    # Random tokens are uniform over the ordinary ones, and places over the window.
    drawn = shown[kinds_random]
    assert abs(drawn.mean() - (4 + WORDS.mask - 1) / 2) < 4 * 995 / math.sqrt(12 * len(drawn))
    often = np.bincount(places.ravel(), minlength=100)[1:-1]
    expected = number / 98
    assert abs(often - expected).max() < 6 * math.sqrt(expected)


def test_the_key_alone_decides() -> None:
    given = rows(8)
    first = masked(given, WORDS, keys(8, 3, 7))
    np.random.seed(1)
    again = masked(given[4:], WORDS, keys(8, 3, 7)[4:])  # of other neighbours
    for whole, half in zip(first, again, strict=True):
        assert np.array_equal(whole[4:], half)
    for other in (keys(8, 3, 8), keys(8, 4, 7)):
        found = masked(given, WORDS, other)
        assert (found[1] != first[1]).any(axis=1).all()


def test_windows_with_too_few_words() -> None:
    given = np.full((2, 22), Vocabulary.END)
    given[0, 5] = 9
    seen, places, targets = masked(given, WORDS, keys(2, 0))
    assert sorted(targets[0]) == [IGNORED, IGNORED, 9]
    assert places[0][targets[0] == 9].tolist() == [5]
    assert (targets[1] == IGNORED).all() and np.array_equal(seen[1], given[1])


@pytest.mark.parametrize(("length", "number"), [(2, 1), (20, 3), (40, 6), (512, 77)])
def test_fifteen_percent(length: int, number: int) -> None:
    assert num_chosen(length) == number
