"""What the tasks share: random numbers, the choice of samples, loading, evaluation, optimizers; and
the toy."""

import math
import multiprocessing
import os
import re
import signal
import subprocess
import threading
import time
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest
from torch import Tensor, nn

from co2.config import OptimConfig, Optimizer, Validation
from co2.errors import ConfigError, from_outside
from co2.start.processes import STOP_SIGNALS
from recipes.runs.processes import is_running
from tasks.shapenet.shapenet import Objective
from tasks.shared.evaluation import share, tally, total
from tasks.shared.loader import load
from tasks.shared.optimizer import make_optimizer
from tasks.shared.randomness import _GAMMA, _hashed, generator, seeded, uniforms
from tasks.shared.sampling import Sampler, validation_samples
from tests.tasks.build import built, refusal, toy
from tests.workers import everybody, replicas

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


def test_keys_have_numbers_of_their_own() -> None:
    """Also where all of a key but one part, or its length, is the same."""
    keys = [(1, 2, 3), (3, 2, 1), (1, 2), (1, 2, 4)]
    found = [(torch_number(key), generator(*key).random()) for key in keys]
    assert all(len(set(numbers)) == len(keys) for numbers in zip(*found, strict=True))
    keys += [(), (0,), (0, 0), (1,), (0, 1), (1, 0), (2, 1), (2**63, 0), (1, 2, 0)]
    assert len({float(uniforms(1, *key)[0, 0]) for key in keys}) == len(keys)


def torch_number(key: tuple[int, ...]) -> float:
    with seeded(*key):
        return torch.rand(()).item()


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


@pytest.mark.parametrize("varying", [0, 1, 2])
def test_numbers_are_uniform_and_independent(varying: int) -> None:
    """Over neighbouring keys that differ in one part, and along one sequence; and neighbours of
    both, by the correlation and by a grid of pairs."""
    key: list[int | np.ndarray] = [3, 5, 7]
    key[varying] = SAMPLES
    columns = uniforms(31, *key)[:, [0, 1, 30]].T
    for numbers in (*columns, uniforms(20_000, 3, varying, 1)[0]):
        assert numbers.min() >= 0 and numbers.max() < 1
        assert kstest(numbers, "uniform").pvalue > 1e-3
        assert chisquare(np.bincount((numbers * 97).astype(int), minlength=97)).pvalue > 1e-3
    first, second, _ = columns
    for some, others in ((first, second), (first[:-1], first[1:]), (first[1:], second[:-1])):
        assert abs(np.corrcoef(some, others)[0, 1]) < 4 / np.sqrt(len(SAMPLES))
        pairs = (some * 12).astype(int) * 12 + (others * 12).astype(int)
        assert chisquare(np.bincount(pairs, minlength=144)).pvalue > 1e-3


def drawn(sampler: Sampler, draws: range) -> list[np.ndarray]:
    return [
        sampler.indices(draw, replica) for draw in draws for replica in range(sampler.num_workers)
    ]


@pytest.mark.parametrize(
    ("workers", "batch", "repeats"), [(1, 12, 1), (3, 4, 1), (4, 6, 3), (8, 2, 3), (1, 12, 3)]
)
def test_an_epoch_is_dealt_out(workers: int, batch: int, repeats: int) -> None:
    """It is a permutation, of which each worker takes its part of every draw. With repeats it is
    DeiT's RASampler: every sample so many times, of which worker w takes each `workers`-th from w
    on, until all together have taken as many as there are samples."""
    samples = 100
    sampler = Sampler(samples, workers, batch, seed=1, repeats=repeats)
    per_epoch = sampler.draws_per_epoch
    assert per_epoch == samples // (workers * batch)
    for epoch in range(2):
        order = np.random.default_rng((1, epoch)).permutation(samples)
        repeated = np.repeat(order, repeats)[: per_epoch * batch * workers]
        views = np.tile(np.arange(repeats), samples)[: len(repeated)] + epoch * repeats
        draws = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        for worker in range(workers):
            own = np.arange(worker, len(repeated), workers)
            if repeats == 1:
                own = np.arange(len(repeated)).reshape(per_epoch, workers, batch)[:, worker].ravel()
            taken = np.concatenate([sampler.indices(draw, worker) for draw in draws])
            numbers = np.concatenate([sampler.views(draw, worker) for draw in draws])
            assert np.array_equal(taken, repeated[own])
            assert np.array_equal(numbers, views[own])


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


@pytest.mark.parametrize(
    ("samples", "workers", "batch", "whole", "says"),
    [
        (31, 2, 4, 32, r"train\.global_batch=32: the training data hold 31 "),
        (31, 8, 4, 24, r"train\.batch_size=4: .* hold 24; use at most 3$"),  # one that has grown
    ],
)
def test_too_few_samples(
    samples: int, workers: int, batch: int, whole: int | None, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        Sampler(samples, workers, batch, seed=0, global_batch=whole)


def test_neighbours_share_a_half_unless_samples_alternate() -> None:
    """6400 samples are 64 blocks of a hundred, and the halves take them in turn; one has none."""
    blocks = validation_samples(6400, None, Validation.report).reshape(32, 100)
    assert (np.diff(blocks) == 1).all() and (blocks[:, 0] == np.arange(0, 6400, 200)).all()
    second = validation_samples(6400, None, Validation.tuning, alternate=True)
    assert (second == np.arange(1, 6400, 2)).all()
    assert validation_samples(1, None, Validation.report).tolist() == [0]
    every = validation_samples(101, None, Validation.all)
    halves = (
        validation_samples(101, None, part) for part in (Validation.report, Validation.tuning)
    )
    assert sorted(np.concatenate([*halves])) == every.tolist() == list(range(101))
    line = refusal(lambda: validation_samples(1, None, Validation.tuning))
    assert line.startswith("data.validation=tuning: ") and " hold 1 samples" in line


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


@replicas(3)
def test_sums_and_counts_of_all_workers() -> None:
    """As of one. All run as many batches: a wrapped model's forward may be collective, and an idle
    worker would block the others."""
    values = torch.rand(7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts, asked = torch.arange(63).view(7, 3, 3), []
    sums, found = tally(lambda batch: asked.append(batch) or (values[batch], counts[batch]), 7)
    assert sums == total(lambda batch: values[batch], 7) == pytest.approx(values.sum(0).tolist())
    assert torch.equal(found, counts.sum(0)) and asked == share(7)
    everyone = everybody(asked)
    assert [own[:2] for own in everyone] == [[0, 3], [1, 4], [2, 5]]
    assert [len(own) for own in everyone] == [3, 3, 3] and everyone[0][2] == 6
    broken = torch.where(torch.arange(7) == 4, torch.nan, 1.0)
    assert math.isnan(total(lambda batch: broken[batch].double().view(1), 7)[0]), "it shows"


def test_it_has_no_data_to_be_given() -> None:
    assert refusal(lambda: toy(path="text.txt").setup(1)).startswith("data.path=text.txt: ")


def test_buffers_of_both_kinds() -> None:
    kinds = {buffer.is_floating_point() for buffer in toy().model().buffers()}
    assert kinds == {True, False}


def model() -> nn.Module:
    layers = nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.Linear(4, 5))
    layers[2].weight.requires_grad_(False)
    return layers


def test_matrices_decay_and_frozen_weights_stay_out() -> None:
    """A group may be empty: what is named is spared, too."""
    layers = model()
    optimizer = make_optimizer(layers, OptimConfig(lr=0.5, weight_decay=0.1, betas=(0.8, 0.9)))
    decayed, spared = optimizer.param_groups
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [weight is layers[0].weight for weight in decayed["params"]] == [True]
    rest = (layers[0].bias, layers[1].weight, layers[1].bias, layers[2].bias)
    assert {id(weight) for weight in spared["params"]} == {id(weight) for weight in rest}
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    for group in optimizer.param_groups:
        assert group["lr"] == group["initial_lr"] == 0.5
        assert group["betas"] == (0.8, 0.9)
    none, spared = make_optimizer(layers, OptimConfig(), spared=["0.weight"]).param_groups
    assert not none["params"] and any(w is layers[0].weight for w in spared["params"])


def test_sgd() -> None:
    optim = OptimConfig(name=Optimizer.sgd, lr=0.1, momentum=0.7, nesterov=True, weight_decay=0.2)
    optimizer = make_optimizer(model(), optim)
    assert isinstance(optimizer, torch.optim.SGD)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    assert all(group["momentum"] == 0.7 and group["nesterov"] for group in optimizer.param_groups)


OPTIM = OptimConfig(name=Optimizer.muon, lr=0.02, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6)


class Words(nn.Module):
    """An embedding tied to the output, two hidden matrices, a kernel and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 9, bias=False)
        self.table = nn.Embedding(9, 6)
        self.table.weight = self.out.weight
        self.kernel = nn.Conv2d(6, 6, 1)
        self.wide, self.narrow = nn.Linear(6, 10), nn.Linear(10, 6)
        self.norm = nn.LayerNorm(6)


def tied() -> Words:
    torch.manual_seed(0)
    return Words()


def train(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """Six steps, of a falling rate, with gradients that depend on the step alone."""
    for step in range(6):
        torch.manual_seed(step)
        for weight in model.parameters():
            weight.grad = torch.randn_like(weight)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = OPTIM.lr * (1 - step / 10)
            optimizer.step()


def test_equals_the_two_stepped_by_hand() -> None:
    ours, theirs = tied(), tied()
    train(ours, make_optimizer(ours, OPTIM))
    matrices = [theirs.wide.weight, theirs.narrow.weight]
    muon = torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    chosen = {id(weight) for weight in matrices}
    rest = [weight for weight in theirs.parameters() if id(weight) not in chosen]
    groups: list[dict[str, Any]] = [
        {"params": [w for w in rest if w.dim() > 1], "weight_decay": 0.1},
        {"params": [w for w in rest if w.dim() == 1], "weight_decay": 0.0},
    ]
    train(theirs, muon, torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-6))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


TABLES = ("word_embeddings", "position_embeddings", "token_type_embeddings")
PLACES = {"encoder.position.0.weight", "encoder.embed.first.0.weight"}
"""Of shapenet: what reads coordinates."""


@pytest.mark.parametrize(
    ("task", "config", "adamw"),
    [
        ("gpt2", {}, {"transformer.wte.weight", "transformer.wpe.weight"}),  # wte is the head, too
        ("roberta", {}, {f"language.roberta.embeddings.{table}.weight" for table in TABLES}),
        ("transnormer", {}, {"embedding.weight", "layers.0.tokens.theta"}),
        ("vit", {}, {"cls_token", "pos_embed", "patch_embed.proj.weight", "head.weight"}),
        ("shapenet", {}, PLACES | {"position.0.weight", "head.weight"}),
        ("shapenet", {"objective": Objective.classification}, PLACES | {"head.8.weight"}),
        ("toy", {}, {"3.weight"}),
    ],
)
def test_the_ends_of_a_model_are_adamw_s(
    task: str, config: dict[str, Any], adamw: set[str]
) -> None:
    """Of the weights of two or more dimensions in its smoke model."""
    own = built(task, optim=OPTIM, **config)
    with torch.device("meta"):
        model = own.model()
        groups = own.optimizer(model).param_groups
    muon = {id(w) for group in groups if group["muon"] for w in group["params"]}
    names = {name: id(w) in muon for name, w in model.named_parameters() if w.dim() > 1}
    assert any(names.values()) and {name for name in names if not names[name]} == adamw
