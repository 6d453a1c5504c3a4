"""Masks: the papers' shares, and nothing but the key decides."""

import math

import numpy as np
import pytest
from scipy.stats import chisquare

from tasks.shared.randomness import generator
from tasks.text.masking import IGNORED, Masking, Vocabulary, masked

WORDS = Vocabulary(1000)


def rows(number: int, length: int = 100) -> np.ndarray:
    """Windows of ordinary tokens between <s> and </s>, with a separator here and there."""
    source = generator(5)
    found = source.integers(4, WORDS.mask, (number, length))
    found[source.random(found.shape) < 0.05] = Vocabulary.END
    found[:, 0], found[:, -1] = Vocabulary.START, Vocabulary.END
    return found


def test_a_window_loses_just_the_chosen_places() -> None:
    given = rows(50)
    before = given.copy()
    seen, places, targets = masked(given, WORDS, Masking(), 0, 0, np.arange(50))
    assert np.array_equal(given, before)
    assert places.shape == targets.shape == (50, 15)
    assert (np.diff(places, axis=1) > 0).all()
    assert np.array_equal(np.take_along_axis(given, places, axis=1), targets)
    restored = seen.copy()
    np.put_along_axis(restored, places, targets, axis=1)
    assert np.array_equal(restored, given)


def test_only_ordinary_tokens_are_chosen_and_drawn() -> None:
    given = rows(400)
    seen, _, targets = masked(given, WORDS, Masking(), 0, 0, np.arange(400))
    assert targets.min() >= 4 and targets.max() < WORDS.mask
    special = (given < 4) | (given == WORDS.mask)
    assert np.array_equal(seen[special], given[special])
    drawn = seen[(seen != given) & (seen != WORDS.mask)]
    assert len(drawn) > 300 and drawn.min() >= 4 and drawn.max() < WORDS.mask


@pytest.mark.parametrize("masking", [Masking(), Masking(0.4, 0.5, 0.3), Masking(0.2, 1.0, 0.0)])
def test_the_shares_are_those_of_the_recipe(masking: Masking) -> None:
    """Within four standard deviations of a binomial."""
    given = rows(4000)
    seen, places, targets = masked(given, WORDS, masking, 0, 0, np.arange(4000))
    assert places.shape == (4000, round(100 * masking.share))
    shown = np.take_along_axis(seen, places, axis=1)
    is_mask, is_same = shown == WORDS.mask, shown == targets
    is_random = ~(is_mask | is_same)
    rest = 1 - masking.masked - masking.random
    number = targets.size
    kinds = ((masking.masked, is_mask), (rest, is_same), (masking.random, is_random))
    for share, kind in kinds:
        # One random token in 995 is the token itself.
        error = 4 * math.sqrt(abs(share * (1 - share)) / number)
        assert abs(kind.mean() - share) <= error + 4e-4 * masking.random + 1e-12
    # Random tokens are uniform over the ordinary ones, and places over the window.
    if masking.random:
        drawn = shown[is_random]
        often = np.bincount(drawn, minlength=WORDS.size)[4 : WORDS.mask]
        assert chisquare(often).pvalue > 1e-3
    often = np.bincount(places.ravel(), minlength=100)[1:-1]
    expected = number / 98
    assert abs(often - expected).max() < 6 * math.sqrt(expected)


def test_the_key_alone_decides() -> None:
    given = rows(8)
    first = masked(given, WORDS, Masking(), 3, 7, np.arange(8))
    np.random.seed(1)
    again = masked(given[4:], WORDS, Masking(), 3, 7, np.arange(4, 8))  # of other neighbours
    for whole, half in zip(first, again, strict=True):
        assert np.array_equal(whole[4:], half)
    for other in ((3, 8), (4, 7)):
        found = masked(given, WORDS, Masking(), *other, np.arange(8))
        assert (found[1] != first[1]).any(axis=1).all()


def test_windows_with_too_few_words() -> None:
    given = np.full((2, 22), Vocabulary.END)
    given[0, 5] = 9
    seen, places, targets = masked(given, WORDS, Masking(), 0, np.arange(2))
    assert sorted(targets[0]) == [IGNORED, IGNORED, 9]
    assert places[0][targets[0] == 9].tolist() == [5]
    assert (targets[1] == IGNORED).all() and np.array_equal(seen[1], given[1])


@pytest.mark.parametrize(("length", "number"), [(2, 1), (20, 3), (40, 6), (512, 77)])
def test_fifteen_percent(length: int, number: int) -> None:
    assert Masking().num_chosen(length) == number
