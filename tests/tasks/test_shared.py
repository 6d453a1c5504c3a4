"""What the tasks share: random numbers, the choice of samples, loading, evaluation; and the toy."""

import errno
import multiprocessing
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count, islice
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest
from torch import Tensor, nn

from co2.config import Validation
from co2.errors import ConfigError, from_outside
from co2.record.files import whole_lines
from co2.start.processes import STOP_SIGNALS
from recipes.runs.processes import is_running
from tasks.shared import evaluation, loader
from tasks.shared.evaluation import evaluating, share, tally, total
from tasks.shared.loader import load
from tasks.shared.randomness import _GAMMA, _hashed, generator, seeded, uniforms
from tasks.shared.sampling import Sampler, validation_samples
from tests.tasks.build import mesh, sampler, toy

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


def test_generators_depend_on_the_key_alone() -> None:
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


CPU = torch.device("cpu")
LIMIT_S = 300.0


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


def stuck(index: int) -> Tensor:
    """The loader's number; each is stuck after its second batch."""
    if index >= 4:
        time.sleep(2 * LIMIT_S)
    return torch.tensor(os.getpid())


def test_a_stop_signal_leaves_loaders_alive() -> None:
    """One that reaches all processes of a run, which needs them until it has saved."""
    batches = load(lambda _: torch.tensor(os.getpid()), range(20), 2, CPU)
    loaders = [str(int(next(batches))) for _ in range(2)]
    for number in STOP_SIGNALS:
        subprocess.run(["kill", f"-{int(number)}", *loaders], check=True)
    assert [str(int(batch)) for batch in batches] == loaders * 9


def beside_another_thread(found: Connection) -> None:
    """Threads of each loader in which a stop signal is not blocked, where forking starts one."""
    idle = partial(threading.Thread, target=time.sleep, args=(LIMIT_S,), daemon=True)
    os.register_at_fork(after_in_child=lambda: idle().start())
    batches = load(lambda _: torch.tensor(os.getpid()), count(), 2, CPU)
    masks = [
        [
            int(re.findall(r"SigBlk:\s*(\w+)", status.read_text())[0], 16)
            for status in Path(f"/proc/{int(next(batches))}/task").glob("*/status")
        ]
        for _ in range(2)
    ]
    bits = [1 << number - 1 for number in STOP_SIGNALS]
    found.send([sum(not mask & bit for mask in own for bit in bits) for own in masks])


def test_a_stop_signal_finds_no_other_thread() -> None:
    """But the one that waits for SIGTERM, if it waits already."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=beside_another_thread, args=(there,))
    process.start()
    try:
        assert max(here.recv()) <= 1
    finally:
        process.kill()


def uses_stuck_loaders(loaders: Connection, terminates: bool) -> None:
    batches = load(stuck, count(), 2, CPU)
    pids = [int(next(batches)) for _ in range(2)]
    loaders.send(pids)
    if terminates:  # as DataLoader does with those that do not end by themselves
        for process in multiprocessing.active_children():
            process.terminate()
    time.sleep(2 * LIMIT_S)


@pytest.mark.parametrize("terminates", [True, False])
def test_stuck_loaders_end_with_their_worker(terminates: bool) -> None:
    """Also by SIGKILL; or else when it terminates them."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    worker = context.Process(target=uses_stuck_loaders, args=(there, terminates))
    worker.start()
    loaders = here.recv()
    if not terminates:
        os.kill(worker.pid or 0, signal.SIGKILL)
    try:
        deadline = time.monotonic() + LIMIT_S
        while any(map(is_running, loaders)):
            assert time.monotonic() < deadline, "a loader outlives its worker"
            time.sleep(0.02)
    finally:
        worker.kill()
        worker.join()
        for pid in loaders:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


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


def test_it_learns() -> None:
    task = toy(num_workers=1)
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


def test_it_has_no_data_to_be_given() -> None:
    with pytest.raises(ConfigError, match=r"^data\.path=text\.txt: "):
        toy(path="text.txt").setup(1)


def test_the_ledger_tells_what_was_trained_on(tmp_path: Path) -> None:
    task = toy(samples=48, batch_size=4, ledger=str(tmp_path), num_workers=3)
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


def test_buffers_of_both_kinds() -> None:
    kinds = {buffer.is_floating_point() for buffer in toy().model().buffers()}
    assert kinds == {True, False}


def test_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    task = toy(delay_s=0.05, num_workers=1)
    task.loss(task.model(), next(task.batches(mesh(), 0)))
    assert slept == [0.05]
