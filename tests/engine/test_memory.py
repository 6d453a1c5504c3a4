"""The memory ledger, against the storages that really exist, and against what a step allocates."""

import gc
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import co2
from co2.comm import codec, flat, sparse_mean
from co2.config import CommConfig, Precision
from co2.methods import METHODS
from co2.methods.shared import compressed_adam
from co2.train import meters
from tests.grids import grid
from tests.methods.driver import ADAM, FP32_ONLY, NEEDS_ADAM, NEEDS_SGD, ROUNDS_OF

WIDTH = 257
PARAMS = WIDTH * WIDTH + WIDTH + WIDTH * 8


def storages() -> dict[int, int]:
    """Bytes of every storage that a Python object holds, by address."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter) and not thing.is_meta:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def build(
    name: str, wire: Precision = Precision.fp32, **fields
) -> tuple[nn.Module, torch.optim.Optimizer, co2.Method]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8, bias=False))
    kind = torch.optim.SGD if name in NEEDS_SGD else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-3)
    own = (
        {"tau": 2}
        if name in (*ROUNDS_OF, *NEEDS_ADAM)
        else {"freeze_step": 2}
        if name in ADAM
        else {}
    )
    config = METHODS[name].Config(**own, **fields)
    return model, optimizer, METHODS[name](config, CommConfig(dtype=wire))


def train(model: nn.Module, method: co2.Method, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(4, WIDTH)).square().mean().backward()
        method.step()


def held_beyond_the_ledger(
    rank: int, world: int, name: str, wire: Precision, fields: dict[str, Any] | None = None
) -> tuple[float, float]:
    """Model copies on this worker that are neither weights, gradients nor inner state, and how
    many the method tells."""
    # Scratch is no model copy either.
    with patch.dict(flat._CHUNK, cpu=512):
        before = storages()
        model, optimizer, method = build(name, wire, **(fields or {}))
        wrapped = method.prepare(model, optimizer, co2.Mesh.world())
        train(wrapped, method, 5)
        method.state_dict()  # brings in what is in flight
        now = storages()
    params = list(model.parameters())
    own = params + [p.grad for p in params if p.grad is not None]
    own += [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    known = {t.untyped_storage().data_ptr() for t in own}
    extra = sum(size for at, size in now.items() if at not in before and at not in known)
    method.flush()
    return extra / (4 * PARAMS), method.extra_copies


SHARD = {"shard": True}
WHOLE = [name for name in METHODS if name not in (*ADAM, *FP32_ONLY, *NEEDS_SGD)]
"""Those that bf16 can carry."""


@pytest.mark.parametrize("name", METHODS)
def test_copies_held_are_those_of_the_ledger(workers, name):
    """How many a method should hold says its card (tests/methods/test_cards.py)."""
    ledgers = {}
    for wire in Precision if name in WHOLE else [Precision.fp32]:
        for copies, told in workers.run(held_beyond_the_ledger, 2, name, wire):
            ledgers[wire] = told
            # A few scalars, the last batch and the scratch are not model copies.
            assert copies < told + 0.04
            # DDP may have let go of the rounded gradients already.
            assert copies >= told or (name, wire) == ("allreduce", Precision.bf16)
    if name in WHOLE:  # the buffer is half as large; DDP's rounded gradients are beside the others
        half = 0.5 if name == "allreduce" else -0.5
        assert ledgers[Precision.bf16] == pytest.approx(ledgers[Precision.fp32] + half, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "wire", "expected"),
    [
        ("diloco", Precision.fp32, 3),
        ("co2", Precision.fp32, 3 + 4),
        ("co2_keep", Precision.fp32, 3 + 4),
        ("co2_keep", Precision.bf16, 2.5 + 3),
    ],
)
def test_averaged_moments_cost_an_overlapped_method_a_buffer_and_what_was_sent(
    workers, name, wire, expected
):
    for copies, told in workers.run(
        held_beyond_the_ledger, 2, name, wire, {"average_moments": True}
    ):
        assert told == pytest.approx(expected, abs=1e-9)
        assert told <= copies < told + 0.04


def test_a_late_momentum_costs_a_buffer_and_what_was_sent(workers):
    fields = {"first_moment_every": 2, "late_momentum": True}
    for copies, told in workers.run(held_beyond_the_ledger, 2, "mt_dao", Precision.fp32, fields):
        assert told == pytest.approx(2 + 2, abs=1e-9)
        assert told <= copies < told + 0.04


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("int4", 4)])
def test_quantized_exchange_holds_errors_and_messages(workers, kind, bits):
    """One fragment: the messages on two workers are twice a vector of so many bits."""
    fields = {"fragments": 1, "exchange": kind}
    arguments = ("streaming_diloco", Precision.fp32, fields)
    for copies, told in workers.run(held_beyond_the_ledger, 2, *arguments):
        assert told == pytest.approx(3 + 1.5 + 2 * bits / 32, abs=1e-3)
        assert told <= copies < told + 0.04


@pytest.mark.parametrize("world", grid([1, 2, 3, 4], (3).__eq__))
def test_sharded_outer_state_is_one_copy_and_two_parts(workers, world):
    for copies, told in workers.run(held_beyond_the_ledger, world, "co2", Precision.fp32, SHARD):
        assert told == pytest.approx(1 + 2 / world, rel=0.01)  # parts are alike, but for padding
        assert told <= copies < told + 0.04  # and a row of the buffer


class LargestAllocation(TorchDispatchMode):
    """Elements of the largest storage that an operation has newly made, of how many operations."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        known = {t.untyped_storage().data_ptr() for t in leaves if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for made in torch.utils._pytree.tree_leaves(result):
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, made.numel())
        return result


FIELDS = [
    ("local_sgd", {}),
    ("slowmo", {}),
    ("co2_released", {}),
    ("diloco", {}),
    ("overlap_local_sgd", {}),
    ("cocod_sgd", {}),
    ("eager_diloco", {}),
    ("noloco", {}),
    ("co2_keep", {}),
    *((name, {"average_moments": True}) for name in ("diloco", "co2", "co2_keep")),
    ("co2", {"gap_penalty": "gap_aware_elementwise", "clip": 0.1}),
    ("co2", {"clip": 0.1, "clip_mode": "norm"}),
    ("co2", {"gap_penalty": "gap_aware_elementwise", "clip": 0.1, "shard": True}),
    ("co2", {"clip": 0.1, "clip_mode": "norm", "shard": True}),
]


@pytest.mark.parametrize(("name", "fields"), FIELDS)
def test_the_end_of_a_round_makes_no_temporary_of_model_size(monkeypatch, name, fields):
    monkeypatch.setitem(flat._CHUNK, "cpu", 1024)
    model, optimizer, method = build(name, **fields)
    method.prepare(model, optimizer, co2.Mesh.world())
    train(model, method, 4)
    with torch.no_grad(), LargestAllocation() as seen:
        method.end_round()
        if method.moments is not None:
            method.moments.end_round(method.steps)
    assert seen.operations > 0 and seen.largest <= 1024


@pytest.mark.parametrize(
    ("name", "fields"),
    [("desloc", {}), ("mt_dao", {"first_moment_every": 2, "late_momentum": True})],
)
def test_a_mean_of_moments_makes_none_either(monkeypatch, name, fields):
    monkeypatch.setitem(flat._CHUNK, "cpu", 1024)
    model, optimizer, method = build(name, **fields)
    method.prepare(model, optimizer, co2.Mesh.world())
    train(model, method, 4)
    with torch.no_grad(), LargestAllocation() as seen:
        for moment, _ in method.periods:
            moment.average(method.mean)
        if method.moments is not None:
            method.moments.end_round(method.steps + 2)
    assert seen.operations > 0 and seen.largest <= 1024


def test_a_sparse_mean_makes_none_either(monkeypatch):
    """Its temporaries are as large as a chunk of 4,096, by a few columns."""
    monkeypatch.setitem(flat._CHUNK, "cpu", 1024)
    monkeypatch.setattr(sparse_mean, "_PIECE", sparse_mean.CHUNK)
    model, optimizer, method = build("sparseloco")
    method.prepare(model, optimizer, co2.Mesh.world())
    train(model, method, 4)
    with torch.no_grad(), LargestAllocation() as seen:
        method.end_round()
    assert seen.operations > 0 and seen.largest <= sparse_mean.CHUNK < PARAMS / 10


@pytest.mark.parametrize("kind", ["full", "int8", "int4"])
def test_a_fragment_makes_no_temporary_of_its_size(monkeypatch, kind):
    """Streaming DiLoCo has no end of a round: every fragment starts and syncs on its own."""
    monkeypatch.setitem(flat._CHUNK, "cpu", 1024)
    monkeypatch.setattr(codec, "_PIECE", 1024)
    model, optimizer, method = build("streaming_diloco", delay=0, exchange=kind)
    method.prepare(model, optimizer, co2.Mesh.world())
    train(model, method, 4)
    with torch.no_grad(), LargestAllocation() as seen:
        for fragment in method.fragments:
            fragment.start()
            fragment.sync()
    assert seen.operations > 0 and seen.largest <= 1024


@pytest.mark.parametrize("name", ADAM)
def test_a_step_of_adams_variants_makes_none_either(monkeypatch, name):
    monkeypatch.setitem(flat._CHUNK, "cpu", 1024)
    monkeypatch.setattr(compressed_adam, "_SAMPLE", 1024)
    monkeypatch.setattr(codec, "_PIECE", 1024)
    model, optimizer, method = build(name)
    method.prepare(model, optimizer, co2.Mesh.world())
    train(model, method, 3)
    with LargestAllocation() as seen:
        method.step()
    assert seen.operations > 0 and seen.largest <= 1024


def test_the_watch_sees_a_temporary():
    with LargestAllocation() as seen:
        torch.zeros(5000) + 1
    assert seen.largest == 5000


def test_ledger_adds_up():
    model, optimizer, method = build("co2")
    method.prepare(model, optimizer, co2.Mesh.world())
    train(model, method, 2)
    ledger = meters.ledger(model, optimizer, method)
    assert ledger.parameter_bytes == ledger.gradient_bytes == 4 * PARAMS
    assert ledger.inner_state_bytes == 2 * 4 * PARAMS + 3 * 4  # AdamW counts steps in a float
    assert ledger.extra_bytes == 3 * 4 * PARAMS
    assert ledger.scratch_bytes == min(4 * PARAMS, 4 * flat._CHUNK["cpu"])
