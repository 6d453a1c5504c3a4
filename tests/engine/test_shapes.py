"""What a step takes, worked out from shapes, against what real steps hold; and the GPUs' table."""

import dataclasses

import pytest
import torch

import train
from co2 import Mesh
from co2.config import Config
from co2.gpus import GPUS, gpu_of
from co2.methods import METHODS
from co2.train.estimate import Live, holdings, work
from co2.train.within_replica import blocks, checkpoint_activations


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
        for _ in range(3):
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


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("method", METHODS)
def test_every_method(method: str, workers: int) -> None:
    config = run_of(
        "task=toy",
        f"method={method}",
        "optim.name=adamw",
        *METHODS[method].needs,
        f"launch.workers={workers}",
    )
    held = holdings(train.APP.make_task(config), config, workers)
    numel = held.num_parameters
    assert held.memory.parameter_bytes == held.memory.gradient_bytes == 4 * numel
    assert held.saved_bytes >= workers * 4 * numel
    assert not torch.distributed.is_initialized()


def test_a_replica_of_several_workers_shares() -> None:
    """zero1, zero2 and zero3, by the table in co2/train/within_replica.py."""
    alone = run_of("task=gpt2", "launch.workers=8")
    whole = holdings(train.APP.make_task(alone), alone, 8)
    for strategy in ("ddp", "zero1", "zero2", "zero3"):
        config = run_of(
            "task=gpt2", "launch.workers=8", "mesh.replica_size=4", f"mesh.strategy={strategy}"
        )
        held = holdings(train.APP.make_task(config), config, 8)
        weights, inner = (1, 1) if strategy == "ddp" else (1, 4) if strategy == "zero1" else (4, 4)
        before, now = whole.memory, held.memory
        assert now.parameter_bytes == pytest.approx(before.parameter_bytes / weights, rel=1e-4)
        assert now.gradient_bytes == pytest.approx(before.gradient_bytes / weights, rel=1e-4)
        assert now.extra_bytes == pytest.approx(before.extra_bytes / weights, rel=1e-4)
        assert now.inner_state_bytes == pytest.approx(before.inner_state_bytes / inner, rel=1e-4)
        gathered = {"zero2": before.parameter_bytes}.get(strategy, 0)
        if strategy == "zero3":
            assert 0 < held.gathered_bytes < before.parameter_bytes
        else:
            assert held.gathered_bytes == gathered


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


def test_experts_are_shared() -> None:
    choice = ("task=moe", "launch.workers=8", "train.compile=false")
    alone = run_of(*choice)
    config = run_of(*choice, "mesh.replica_size=4", "mesh.strategy=ep")
    whole, held = (holdings(train.APP.make_task(one), one, 8) for one in (alone, config))
    assert held.num_parameters == whole.num_parameters
    assert held.memory.parameter_bytes < 0.7 * whole.memory.parameter_bytes


def test_sharded_outer_state() -> None:
    config = run_of("task=gpt2", "method=co2", "launch.workers=8", "co2.shard=true")
    held = holdings(train.APP.make_task(config), config, 8)
    assert held.memory.extra_bytes == pytest.approx(1.25 * held.local_bytes, rel=0.01)


def test_messages_from_one_worker_to_another() -> None:
    config = run_of("task=toy", "method=noloco", "noloco.tau=1", "launch.workers=4")
    held = holdings(train.APP.make_task(config), config, 4)
    assert held.memory.extra_bytes == 4 * held.local_bytes


def test_copies_in_the_host_s_memory() -> None:
    config = run_of("task=gpt2", "method=co2", "comm.device=cpu")
    memory = holdings(train.APP.make_task(config), config, 1).memory
    assert memory.extra_bytes == memory.scratch_bytes == 0
    assert memory.host_bytes >= 3 * memory.parameter_bytes


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100 80GB PCIe", "a100-80g"),
        ("NVIDIA A100-PCIE-40GB", "a100-40g"),
        ("Tesla V100-SXM2-32GB", "v100-32g"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 D", "rtx4090"),
        ("NVIDIA A10G", None),
        ("NVIDIA L40", None),
    ],
)
def test_gpus_by_the_driver_s_name(device: str, name: str | None) -> None:
    assert gpu_of(device) == (None if name is None else GPUS[name])


def test_gpus_are_told_apart() -> None:
    assert len({dataclasses.astuple(gpu) for gpu in GPUS.values()}) == len(GPUS)
