"""The batch of (seed, draw, replica) is a pure function, and replicas share nothing."""

import numpy as np
import pytest

from co2.config import Validation
from co2.errors import ConfigError
from tasks.shared.sampling import Sampler, validation_samples


def drawn(sampler: Sampler, draws: range) -> list[np.ndarray]:
    return [
        sampler.indices(draw, replica) for draw in draws for replica in range(sampler.num_workers)
    ]


@pytest.mark.parametrize(
    ("samples", "replicas", "batch"), [(24, 3, 4), (25, 3, 4), (47, 2, 5), (5, 5, 1), (7, 1, 7)]
)
def test_an_epoch_sees_no_sample_twice(samples: int, replicas: int, batch: int) -> None:
    sampler = Sampler(samples, replicas, batch, seed=1)
    per_epoch = sampler.draws_per_epoch
    assert per_epoch == samples // (replicas * batch)
    for epoch in range(3):
        batches = drawn(sampler, range(epoch * per_epoch, (epoch + 1) * per_epoch))
        seen = np.concatenate(batches)
        assert len(seen) == len(set(seen.tolist())) == per_epoch * replicas * batch
        assert seen.min() >= 0 and seen.max() < samples


@pytest.mark.parametrize(
    ("workers", "batch", "repeats"), [(4, 6, 3), (8, 2, 3), (1, 12, 3), (2, 8, 2)]
)
def test_repeats_are_dealt_out_as_by_deit(workers: int, batch: int, repeats: int) -> None:
    """Its RASampler: every sample of a permutation so many times, of which worker w takes each
    `workers`-th from w on, until all together have taken as many as there are samples."""
    samples = 100
    sampler = Sampler(samples, workers, batch, seed=1, repeats=repeats)
    per_epoch = sampler.draws_per_epoch
    assert per_epoch == samples // (workers * batch)
    for epoch in range(2):
        order = np.random.default_rng((1, epoch)).permutation(samples)
        repeated = np.repeat(order, repeats)
        views = np.tile(np.arange(repeats), samples) + epoch * repeats
        draws = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        for worker in range(workers):
            taken = np.concatenate([sampler.indices(draw, worker) for draw in draws])
            numbers = np.concatenate([sampler.views(draw, worker) for draw in draws])
            own = slice(worker, per_epoch * batch * workers, workers)
            assert np.array_equal(taken, repeated[own])
            assert np.array_equal(numbers, views[own])
            if workers >= repeats:
                assert len(set(taken.tolist())) == len(taken)


def test_without_repeats_the_number_of_a_view_is_the_epoch() -> None:
    sampler = Sampler(24, 3, 4, seed=1)
    for draw in range(5):
        assert sampler.views(draw, 1).tolist() == [sampler.epoch(draw)] * 4


def test_left_over_samples_get_their_turn_in_other_epochs() -> None:
    sampler = Sampler(25, 2, 4, seed=0)
    assert len(set(np.concatenate(drawn(sampler, range(60))).tolist())) == 25


def test_order_of_asking_does_not_matter() -> None:
    asked = [(draw, replica) for draw in range(40) for replica in range(2)]
    sampler = Sampler(50, 2, 4, seed=3)
    forward = {key: sampler.indices(*key).tolist() for key in asked}
    again = Sampler(50, 2, 4, seed=3)
    assert all(again.indices(*key).tolist() == forward[key] for key in reversed(asked))


def test_seed_and_epoch_change_the_order() -> None:
    first, other = Sampler(64, 1, 64, seed=0), Sampler(64, 1, 64, seed=1)
    orders = [first.indices(0, 0), first.indices(1, 0), other.indices(0, 0), other.indices(1, 0)]
    assert len({tuple(order.tolist()) for order in orders}) == 4


def test_number_of_replicas_does_not_change_the_global_batch() -> None:
    two, four = Sampler(100, 2, 8, seed=5), Sampler(100, 4, 4, seed=5)
    for draw in range(20):
        assert np.array_equal(
            np.concatenate(drawn(two, range(draw, draw + 1))),
            np.concatenate(drawn(four, range(draw, draw + 1))),
        )


def test_a_step_has_the_same_samples_however_it_is_cut() -> None:
    """Over three epochs; 100 samples hold three steps of 32, and four are left over."""

    def steps(workers: int, batch: int) -> list[list[int]]:
        sampler = Sampler(100, workers, batch, seed=5, global_batch=32)
        micro = 32 // (workers * batch)
        assert sampler.draws_per_epoch == 3 * micro
        ranges = (range(step * micro, (step + 1) * micro) for step in range(9))
        return [np.concatenate(drawn(sampler, draws)).tolist() for draws in ranges]

    whole = steps(1, 32)
    assert len({sample for step in whole[:3] for sample in step}) == 96
    for workers, batch in ((1, 8), (2, 8), (4, 8), (8, 1), (2, 16)):
        assert steps(workers, batch) == whole


def test_an_order_is_drawn_once_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten million samples it takes long."""
    drawn: list[object] = []
    original = np.random.default_rng

    def default_rng(seed: object) -> np.random.Generator:
        drawn.append(seed)
        return original(seed)  # type: ignore[arg-type]

    monkeypatch.setattr(np.random, "default_rng", default_rng)
    sampler = Sampler(1000, 4, 8, seed=0)
    for draw in range(2 * sampler.draws_per_epoch):
        sampler.indices(draw, 3)
    assert len(drawn) == 2


@pytest.mark.parametrize(
    ("samples", "replicas", "batch", "key", "best"),
    [(3, 4, 1, "launch.workers", "3"), (10, 4, 3, "train.batch_size", "2")],
)
def test_too_few_samples(samples: int, replicas: int, batch: int, key: str, best: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Sampler(samples, replicas, batch, seed=0)
    assert caught.value.key == key
    assert str(caught.value).endswith(f"use at most {best}")
    Sampler(samples, replicas if batch > 1 else int(best), min(batch, int(best)), seed=0)


def test_too_few_samples_for_a_global_batch() -> None:
    with pytest.raises(ConfigError, match=r"train\.global_batch=32: the training data hold 31 "):
        Sampler(31, 2, 4, seed=0, global_batch=32)
    with pytest.raises(ConfigError, match=r"train\.batch_size=4: .* hold 24; use at most 3$"):
        Sampler(31, 8, 4, seed=0, global_batch=24)  # an elastic run that has grown


HALVES = (Validation.report, Validation.tuning)


@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize("available", [2, 3, 64, 100, 129, 4711])
def test_the_halves_of_the_validation_samples(available: int, alternate: bool) -> None:
    report, tuning = (validation_samples(available, None, part, alternate) for part in HALVES)
    assert sorted([*report, *tuning]) == list(range(available))
    assert abs(len(report) - len(tuning)) <= max(1, 0.05 * available)
    everything = validation_samples(available, None, Validation.all, alternate)
    assert everything.tolist() == list(range(available))


def test_neighbours_share_a_half_unless_samples_alternate() -> None:
    """6400 samples are 64 blocks of a hundred, and the halves take them in turn."""
    blocks = validation_samples(6400, None, Validation.report).reshape(32, 100)
    assert (np.diff(blocks) == 1).all() and (blocks[:, 0] == np.arange(0, 6400, 200)).all()
    second = validation_samples(6400, None, Validation.tuning, alternate=True)
    assert (second == np.arange(1, 6400, 2)).all()


def test_fewer_samples_are_spread_over_their_own_half() -> None:
    for part in HALVES:
        whole, some = (validation_samples(6400, wanted, part) for wanted in (None, 50))
        assert len(some) == 50 and set(some) <= set(whole)
        assert some[0] == whole[0] and some[-1] > 0.9 * 6400


def test_a_single_sample_has_no_halves() -> None:
    assert validation_samples(1, None, Validation.report).tolist() == [0]
    with pytest.raises(ConfigError, match=r"^data\.validation=tuning: .* hold 1 samples.*use all$"):
        validation_samples(1, None, Validation.tuning)


@pytest.mark.parametrize("whole", [None, 12])
@pytest.mark.parametrize("changes", [((0, 3), (4, 2)), ((0, 2), (3, 4), (5, 1)), ((0, 1), (30, 3))])
def test_where_workers_come_and_go_an_epoch_sees_no_sample_twice(
    changes: tuple[tuple[int, int], ...], whole: int | None
) -> None:
    """And none is left out but those that do not fill a draw or a global batch at its end."""
    samples, batch, draws = 50, 2, 60
    seen: dict[int, list[int]] = {}
    for number, (first, workers) in enumerate(changes):
        sampler = Sampler(
            samples, workers, batch, seed=3, stretches=changes[: number + 1], global_batch=whole
        )
        end = changes[number + 1][0] if number + 1 < len(changes) else draws
        for draw in range(first, end):
            for worker in range(workers):
                found = sampler.indices(draw, worker).tolist()
                assert len(found) == batch
                seen.setdefault(sampler.epoch(draw), []).extend(found)
    assert sorted(seen) == list(range(len(seen))), "no epoch is skipped"
    *ended, _ = seen.values()
    for found in ended:
        assert len(set(found)) == len(found)
        left_over = batch * max(workers for _, workers in changes)
        assert len(found) > samples - samples % (whole or 1) - left_over
    later = Sampler(samples, changes[-1][1], batch, seed=3, stretches=changes, global_batch=whole)
    assert all(
        later.indices(draw, 0).tolist() == sampler.indices(draw, 0).tolist()
        for draw in range(changes[-1][0], draws)
    ), "what is known of earlier stretches is enough"
