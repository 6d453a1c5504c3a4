"""Memory: the ledger, against the storages that really exist and what a step allocates; and what is
worked out from shapes, against what real steps hold."""

import contextlib
import gc
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import co2
import train
from co2 import Mesh
from co2.catalogue import CATALOGUE
from co2.comm import codec, flat, sparse_mean
from co2.config import CommConfig, Config, Precision
from co2.gpus import GPUS, gpu_of
from co2.methods import METHODS
from co2.methods.shared import compressed_adam
from co2.train.estimate import Attention, Holdings, Live, holdings, work
from co2.train.within_replica import blocks, checkpoint_activations
from tests.methods.driver import ADAM, FP32_ONLY, NEEDS_SGD
from tests.workers import replicas

WIDTH = 257
PARAMS = WIDTH * WIDTH + WIDTH + WIDTH * 8


def storages() -> dict[int, torch.UntypedStorage]:
    """Every storage that a Python object holds, by address. As long as somebody holds what is
    returned, no other one gets the address."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter) and not thing.is_meta:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage
    return found


def build(
    name: str, wire: Precision = Precision.fp32, **fields
) -> tuple[nn.Module, torch.optim.Optimizer, co2.Method]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8, bias=False))
    kind = torch.optim.SGD if name in NEEDS_SGD else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-3)
    own = {"freeze_step": 2} if name in ADAM else {"tau": 2} if CATALOGUE[name].rounds else {}
    return model, optimizer, METHODS[name](comm=CommConfig(dtype=wire), **own, **fields)


def make_steps(model: nn.Module, method: co2.Method, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(4, WIDTH)).square().mean().backward()
        method.step()


def held_beyond_the_ledger(name: str, wire: Precision, **fields: Any) -> tuple[float, float]:
    """Model copies on this worker that are neither weights, gradients nor inner state, and how
    many the method tells."""
    # Scratch is no model copy either.
    with patch.dict(flat._CHUNK, cpu=512):
        before = storages()
        model, optimizer, method = build(name, wire, **fields)
        wrapped = method.prepare(model, optimizer, co2.Mesh.world())
        make_steps(wrapped, method, 5)
        method.state_dict()  # brings in what is in flight
        now = storages()
    params = list(model.parameters())
    own = params + [p.grad for p in params if p.grad is not None]
    own += [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    known = {t.untyped_storage().data_ptr() for t in own}
    new = (one for at, one in now.items() if at not in before and at not in known)
    extra = sum(storage.nbytes() for storage in new)
    method.flush()
    return extra / (4 * PARAMS), method.extra_copies


WHOLE = [name for name in METHODS if name not in (*ADAM, *FP32_ONLY, *NEEDS_SGD)]
"""Those that bf16 can carry."""


def test_attention_is_measured_without_dropout() -> None:
    """With it a CPU keeps the scores, and a GPU does not."""
    x = torch.randn(1, 1, 4, 8)
    with Attention():
        found = F.scaled_dot_product_attention(x, x, x, dropout_p=0.9)
    assert torch.equal(found, F.scaled_dot_product_attention(x, x, x))


@replicas(2)
@pytest.mark.parametrize("name", METHODS)
def test_copies_held_are_those_of_the_ledger(name: str) -> None:
    """How many a method should hold says its card (tests/methods/test_declared.py)."""
    ledgers = {}
    for wire in Precision if name in WHOLE else [Precision.fp32]:
        copies, ledgers[wire] = held_beyond_the_ledger(name, wire)
        # A few scalars, the last batch and the scratch are not model copies.
        assert copies < ledgers[wire] + 0.04
        # DDP may have let go of the rounded gradients already.
        assert copies >= ledgers[wire] or (name, wire) == ("allreduce", Precision.bf16)
    if name in WHOLE:  # the buffer is half as large; DDP's rounded gradients are beside the others
        half = 0.5 if name == "allreduce" else -0.5
        assert ledgers[Precision.bf16] == pytest.approx(ledgers[Precision.fp32] + half, abs=1e-9)


MOMENTS = {"average_moments": True}
LATE = {"first_moment_every": 2, "late_momentum": True}


@replicas(2)
@pytest.mark.parametrize(
    ("name", "wire", "fields", "expected"),
    [
        # A buffer, and what was sent, where the method overlaps.
        ("diloco", "fp32", MOMENTS, 3),
        ("co2", "fp32", MOMENTS, 3 + 4),
        ("co2_keep", "bf16", MOMENTS, 3.5 + 3),
        ("co2_keep", "bf16", {"fragments": 2, "momentum_weight": 0.2}, 3.5),
        ("mt_dao", "fp32", LATE, 2 + 2),
        # One fragment: the messages on two workers are twice a vector of so many bits.
        ("streaming_diloco", "fp32", {"fragments": 1, "exchange": "int8"}, 3 + 1.5 + 2 * 8 / 32),
        ("streaming_diloco", "fp32", {"fragments": 1, "exchange": "int4"}, 3 + 1.5 + 2 * 4 / 32),
        # A copy and two parts, with a row of the buffer.
        ("co2", "fp32", {"shard": True}, 1 + 2 / 2),
    ],
)
def test_what_options_cost(name: str, wire: str, fields: dict[str, Any], expected: float) -> None:
    copies, told = held_beyond_the_ledger(name, Precision[wire], **fields)
    assert told == pytest.approx(expected, rel=0.01)
    assert told <= copies < told + 0.04


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


def end_round(method: Any) -> None:
    method.end_round()
    if method.moments is not None:
        method.moments.end_round(method.steps)


def average_moments(method: Any) -> None:
    for moment, _ in method.periods:
        moment.average(method.mean)
    if method.moments is not None:
        method.moments.end_round(method.steps + 2)


def sync_fragments(method: Any) -> None:
    """Streaming DiLoCo has no end of a round: every fragment starts and syncs on its own."""
    for fragment in method.fragments:
        fragment.start()
        fragment.sync()


ELEMENTWISE, NORM = {"gap_penalty": "gap_aware_elementwise", "clip": 0.1}, {"clip_mode": "norm"}


@pytest.mark.parametrize(
    ("name", "act", "fields"),
    [
        *((name, end_round, {}) for name in ("local_sgd", "slowmo", "co2_released", "diloco")),
        *((name, end_round, {}) for name in ("overlap_local_sgd", "cocod_sgd", "eager_diloco")),
        *((name, end_round, {}) for name in ("noloco", "co2_keep", "sparseloco")),
        *((name, end_round, MOMENTS) for name in ("diloco", "co2", "co2_keep")),
        ("co2", end_round, ELEMENTWISE),
        ("co2", end_round, {"clip": 0.1, **NORM}),
        ("co2", end_round, {**ELEMENTWISE, "shard": True}),
        ("co2", end_round, {"clip": 0.1, **NORM, "shard": True}),
        ("desloc", average_moments, {}),
        ("mt_dao", average_moments, LATE),
        *(("streaming_diloco", sync_fragments, {"exchange": e}) for e in ("full", "int8", "int4")),
        *((name, co2.Method.step, {}) for name in ADAM),
    ],
)
def test_synchronizing_makes_no_temporary_of_model_size(
    monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[Any], None], fields: dict[str, Any]
) -> None:
    """A sparse mean's are as large as a chunk of 4,096, by a few columns."""
    largest = sparse_mean.CHUNK if name == "sparseloco" else 1024
    monkeypatch.setitem(flat._CHUNK, "cpu", 1024)
    monkeypatch.setattr(sparse_mean, "_PIECE", sparse_mean.CHUNK)
    monkeypatch.setattr(compressed_adam, "_SAMPLE", 1024)
    monkeypatch.setattr(codec, "_PIECE", 1024)
    delay = {"delay": 0} if name == "streaming_diloco" else {}
    model, optimizer, method = build(name, **fields, **delay)
    method.prepare(model, optimizer, co2.Mesh.world())
    make_steps(model, method, 3 if name in ADAM else 4)
    with contextlib.nullcontext() if name in ADAM else torch.no_grad(), LargestAllocation() as seen:
        act(method)
    assert seen.operations > 0 and seen.largest <= largest < PARAMS / 10


def test_the_watch_sees_a_temporary():
    with LargestAllocation() as seen:
        torch.zeros(5000) + 1
    assert seen.largest == 5000


def run_of(*overrides: str) -> Config:
    return train.APP.config(["resume=never", "launch.backend=gloo", "launch.workers=1", *overrides])


def held_in_training(config: Config) -> tuple[int, int]:
    """Bytes that a real worker holds after a step, and at most, its weights included."""
    task = train.APP.make_task(config)
    module = task.model()
    if config.train.checkpoint_activations:
        checkpoint_activations(module)
    own = sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
    bf16 = config.train.precision.value == "bf16"
    with Live(module) as live:
        optimizer = task.optimizer(module)
        method = train.APP.make_method(config)
        wrapped = method.prepare(module, optimizer, Mesh.world(device="cpu"), lambda step: 1e-3)
        for _ in range(2):
            for _ in range(config.train.accumulate):
                batch = task.blank()
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    loss = task.loss(wrapped, batch)
                loss.backward()
                del loss, batch
            method.step()
            between = live.now
            optimizer.zero_grad(set_to_none=True)
    return own + between, own + live.peak


@pytest.mark.parametrize(
    "overrides",
    [
        ("task=vit", "method=co2"),
        ("task=vit", "method=slowmo", "train.accumulate=3"),
        ("task=vit", "method=allreduce", "train.checkpoint_activations=true"),
        ("task=gpt2", "method=local_sgd", "train.precision=bf16", "train.accumulate=2"),
        ("task=transnormer", "method=co2_keep", "optim.name=sgd"),
        ("task=resnet50", "method=diloco"),
    ],
    ids=" ".join,
)
def test_a_real_worker_holds_what_was_worked_out(overrides: tuple[str, ...]) -> None:
    config = run_of(*overrides, "train.batch_size=16")
    between, most = held_in_training(config)
    task = train.APP.make_task(config)
    held = holdings(task, config, 1)
    assert held.device_bytes == pytest.approx(between, rel=0.01)
    averages = METHODS[config.method].averages_gradients
    found = held.device_bytes + work(task, config, 1, averages).beyond_bytes
    assert found == pytest.approx(most, rel=0.05)


@pytest.mark.parametrize("method", METHODS)
def test_every_method(method: str) -> None:
    needs = METHODS[method].needs
    words = ("task=toy", f"method={method}", "optim.name=adamw", *needs, "launch.workers=4")
    config = run_of(*words)
    held = holdings(train.APP.make_task(config), config, 4)
    numel = held.num_parameters
    assert held.memory.parameter_bytes == held.memory.gradient_bytes == 4 * numel
    assert held.saved_bytes >= (1 if METHODS[method].equal_weights else 4) * 4 * numel
    assert not torch.distributed.is_initialized()


def test_a_replica_of_several_workers_shares() -> None:
    """zero1, zero2 and zero3, by the table in co2/train/within_replica.py."""
    alone = run_of("task=gpt2", "launch.workers=8")
    whole = holdings(train.APP.make_task(alone), alone, 8)
    shares = {"ddp": (1, 1), "zero1": (1, 4), "zero2": (4, 4), "zero3": (4, 4)}
    for strategy, (weights, inner) in shares.items():
        words = ("launch.workers=8", "mesh.replica_size=4", f"mesh.strategy={strategy}")
        config = run_of("task=gpt2", *words)
        held = holdings(train.APP.make_task(config), config, 8)
        for name in ("parameter_bytes", "gradient_bytes", "extra_bytes", "inner_state_bytes"):
            before, now = getattr(whole.memory, name), getattr(held.memory, name)
            share = inner if name == "inner_state_bytes" else weights
            assert now == pytest.approx(before / share, rel=1e-4)
        gathered, most = held.gathered_bytes, whole.memory.parameter_bytes
        assert 0 < gathered < most if strategy == "zero3" else gathered in (0, most)
        assert (gathered == most) == (strategy == "zero2")


def test_options_that_change_what_is_held() -> None:
    """Copies in the host's memory; a sharded outer state; a pair's messages; shared experts."""

    def held(workers: int, *words: str) -> Holdings:
        config = run_of(*words, f"launch.workers={workers}")
        return holdings(train.APP.make_task(config), config, workers)

    memory = held(1, "task=gpt2", "method=co2", "comm.device=cpu").memory
    assert memory.extra_bytes == memory.scratch_bytes == 0
    assert memory.host_bytes >= 3 * memory.parameter_bytes
    sharded = held(8, "task=gpt2", "method=co2", "co2.shard=true")
    assert sharded.memory.extra_bytes == pytest.approx(1.25 * sharded.local_bytes, rel=0.01)
    pair = held(4, "task=toy", "method=noloco", "noloco.tau=1")
    assert pair.memory.extra_bytes == 4 * pair.local_bytes
    experts = ("task=moe", "train.compile=false")
    whole, part = (
        held(8, *experts, *more) for more in ((), ("mesh.replica_size=4", "mesh.strategy=ep"))
    )
    assert part.num_parameters == whole.num_parameters
    assert part.memory.parameter_bytes < 0.7 * whole.memory.parameter_bytes


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100-PCIE-40GB", "a100-40g"),
        ("Tesla V100-SXM2-32GB", "v100-32g"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090 D", "rtx4090"),
        ("NVIDIA A10G", None),
        ("NVIDIA L40", None),
    ],
)
def test_gpus_by_the_driver_s_name(device: str, name: str | None) -> None:
    assert gpu_of(device) == (None if name is None else GPUS[name])


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_gpu_gathers_blocks_in_bf16(strategy: str) -> None:
    words = ("task=gpt2", "launch.workers=4", "mesh.replica_size=4", f"mesh.strategy={strategy}")
    found = []
    for precision in ("fp32", "bf16"):
        config = run_of(*words, f"train.precision={precision}")
        found.append(holdings(train.APP.make_task(config), config, 4).gathered_bytes)
    with torch.device("meta"):
        model = train.APP.make_task(config).model()
    sizes = [sum(p.nbytes for p in block.parameters()) for block in blocks(model)]
    whole = sum(sizes) if strategy == "zero2" else 2 * max(sizes)
    assert found[0] - found[1] == whole / 2
