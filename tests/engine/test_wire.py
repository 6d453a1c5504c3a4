"""The byte ledger, against the payloads handed to collectives and against the loopback device."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import co2
from co2.config import CommConfig, Precision
from co2.methods import METHODS
from tests.counted_bytes import measured_and_counted, needs_root
from tests.grids import grid
from tests.methods.driver import DENSE
from tests.workers import replicas

SIZES = (1000, 77)
FP32, BF16 = Precision.fp32, Precision.bf16
TAU, STEPS = 3, 12


def payloads_and_count(name: str, comm: CommConfig, **own: Any) -> tuple[dict[str, int], float]:
    """Bytes of this worker in each kind of collective of a training, and its own count."""
    payloads = dict.fromkeys(("all_reduce", "all_gather_into_tensor", "all_to_all_single"), 0)

    def counting(collective: str) -> Any:
        real = getattr(dist, collective)

        def call(tensor: torch.Tensor, *others: Any, **kwargs: Any) -> Any:
            payloads[collective] += tensor.nbytes
            return real(tensor, *others, **kwargs)

        return call

    params = [torch.nn.Parameter(torch.randn(n)) for n in SIZES]
    optimizer = torch.optim.SGD(params, lr=0.1)
    method = METHODS[name](comm=comm, tau=TAU, **own)
    method.prepare(torch.nn.ParameterList(params), optimizer, co2.Mesh.world())
    with patch.multiple(dist, **{name: counting(name) for name in payloads}):
        for _ in range(STEPS):
            for param in params:
                param.grad = torch.ones_like(param)
            method.step()
        method.flush()
    return payloads, method.stats().bytes_sent


@replicas()
@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize(("world", "wire", "width"), [(1, FP32, 4), (2, FP32, 4), (3, BF16, 2)])
def test_bytes_are_those_of_a_ring_over_the_payload(
    world: int, name: str, wire: Precision, width: int
) -> None:
    payloads, counted = payloads_and_count(name, CommConfig(dtype=wire))
    payload = payloads.pop("all_reduce")
    assert payload == (0 if world == 1 else STEPS // TAU * width * sum(SIZES))
    assert counted == pytest.approx(2 * (world - 1) / world * payload, abs=STEPS)
    assert not any(payloads.values())


@replicas()
@pytest.mark.parametrize(("world", "padded"), [(1, 0), (2, 1080), (3, 1080)])
def test_bytes_when_sharded(world: int, padded: int) -> None:
    """Scattered once, gathered once: as much as a mean. Two sums for the norm are not counted."""
    rounds = STEPS // TAU
    payloads, counted = payloads_and_count("co2", CommConfig(bucket_mb=1000 / 2**20), shard=True)
    assert payloads["all_to_all_single"] == rounds * 4 * padded
    assert payloads["all_gather_into_tensor"] == rounds * 4 * padded
    assert payloads["all_reduce"] == (0 if world == 1 else rounds * 2 * 8)
    assert counted == rounds * (2 * (world - 1) * 4 * padded // world)


@needs_root
@pytest.mark.parametrize(
    ("name", "world", "wire", "fields"),
    grid(
        [
            ("co2", 3, "fp32", {}),
            ("co2", 2, "bf16", {}),
            ("co2", 3, "fp32", {"shard": True}),
            ("allreduce", 2, "fp32", {}),
            ("onebit_adam", 3, "fp32", {"freeze_step": 1}),
            ("sparseloco", 3, "fp32", {"tau": 1}),
        ],
        lambda case: case[1] == 3 and case[0] != "onebit_adam",
    ),
)
def test_bytes_are_what_the_network_device_counts(
    tmp_path: Path, name: str, world: int, wire: str, fields: dict
) -> None:
    """In a namespace where nothing else speaks: the ledger is within 3 % of the device's count."""
    measured, counted = measured_and_counted(tmp_path, world, name, wire, **fields)
    assert measured > 1_000_000 and counted == pytest.approx(measured, rel=0.03)
