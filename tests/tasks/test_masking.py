"""Masks: the papers' shares, and nothing but the key decides."""

import math

import numpy as np
import pytest

from tasks.shared.randomness import generator
from tasks.text.masking import IGNORED, Vocabulary, _drawn, masked, num_chosen

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
    seen, places, targets = masked(given, WORDS, 0, 0, np.arange(50))
    assert np.array_equal(given, before)
    assert places.shape == targets.shape == (50, 15)
    assert (np.diff(places, axis=1) > 0).all()
    assert np.array_equal(np.take_along_axis(given, places, axis=1), targets)
    restored = seen.copy()
    np.put_along_axis(restored, places, targets, axis=1)
    assert np.array_equal(restored, given)


def test_only_ordinary_tokens_are_chosen_and_drawn() -> None:
    given = rows(400)
    seen, _, targets = masked(given, WORDS, 0, 0, np.arange(400))
    assert targets.min() >= 4 and targets.max() < WORDS.mask
    special = (given < 4) | (given == WORDS.mask)
    assert np.array_equal(seen[special], given[special])
    drawn = seen[(seen != given) & (seen != WORDS.mask)]
    assert len(drawn) > 300 and drawn.min() >= 4 and drawn.max() < WORDS.mask


def test_the_shares_are_80_10_10() -> None:
    """Within four standard deviations of a binomial."""
    given = rows(4000)
    seen, places, targets = masked(given, WORDS, 0, 0, np.arange(4000))
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
    first = masked(given, WORDS, 3, 7, np.arange(8))
    np.random.seed(1)
    again = masked(given[4:], WORDS, 3, 7, np.arange(4, 8))  # of other neighbours
    for whole, half in zip(first, again, strict=True):
        assert np.array_equal(whole[4:], half)
    for other in ((3, 8), (4, 7)):
        found = masked(given, WORDS, *other, np.arange(8))
        assert (found[1] != first[1]).any(axis=1).all()


@pytest.mark.parametrize("size", [261, 516, 50265])
def test_numbers_are_those_of_a_generator_for_each_window(size: int) -> None:
    vocabulary, samples = Vocabulary(size), np.arange(200)
    rank, coin, words = _drawn(40, 7, vocabulary, 3, samples % 5, samples)
    for row in range(200):
        source = generator(3, row % 5, row)
        assert np.array_equal(source.random(40), rank[row])
        assert np.array_equal(source.random(7), coin[row])
        assert np.array_equal(source.integers(4, vocabulary.mask, 7), words[row])


def test_a_word_that_is_rejected_is_drawn_again() -> None:
    """In a vocabulary just above 2³¹ every second draw is rejected."""
    vocabulary = Vocabulary(2**31 + 100)
    _, _, words = _drawn(4, 5, vocabulary, 1, np.arange(20))
    for row in range(20):
        source = generator(1, row)
        source.random(9)
        assert np.array_equal(source.integers(4, vocabulary.mask, 5), words[row])


def test_windows_with_too_few_words() -> None:
    given = np.full((2, 22), Vocabulary.END)
    given[0, 5] = 9
    seen, places, targets = masked(given, WORDS, 0, np.arange(2))
    assert sorted(targets[0]) == [IGNORED, IGNORED, 9]
    assert places[0][targets[0] == 9].tolist() == [5]
    assert (targets[1] == IGNORED).all() and np.array_equal(seen[1], given[1])


@pytest.mark.parametrize(("length", "number"), [(2, 1), (20, 3), (40, 6), (512, 77)])
def test_fifteen_percent(length: int, number: int) -> None:
    assert num_chosen(length) == number
