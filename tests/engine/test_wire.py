"""The byte ledger, against the payloads handed to collectives and against the loopback device."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import co2
from co2.comm.background_mean import BackgroundMean
from co2.config import CommConfig, Precision
from co2.methods import METHODS
from tests.counted_bytes import measured_and_counted, needs_root
from tests.grids import grid
from tests.methods.driver import DENSE, SPARSE

SIZES = (1000, 77)
FP32, BF16 = Precision.fp32, Precision.bf16
TAU, STEPS = 3, 12


def payload_and_count(rank: int, world: int, name: str, wire: Precision) -> tuple[int, float]:
    """Payload bytes of the training collectives that this worker launched, and its own count."""
    payload = 0
    real = dist.all_reduce

    def counting(tensor, *args, **kwargs):
        nonlocal payload
        payload += tensor.numel() * tensor.element_size()
        return real(tensor, *args, **kwargs)

    params = [torch.nn.Parameter(torch.randn(n)) for n in SIZES]
    optimizer = torch.optim.SGD(params, lr=0.1)
    method = METHODS[name](METHODS[name].Config(tau=TAU), CommConfig(dtype=wire))
    method.prepare(torch.nn.ParameterList(params), optimizer, co2.Mesh.world())
    dist.all_reduce = counting
    try:
        for _ in range(STEPS):
            for param in params:
                param.grad = torch.ones_like(param)
            method.step()
        method.flush()
    finally:
        dist.all_reduce = real
    return payload, method.stats().bytes_sent


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize(("world", "wire", "width"), [(1, FP32, 4), (2, FP32, 4), (3, BF16, 2)])
def test_bytes_are_those_of_a_ring_over_the_payload(workers, name, world, wire, width):
    for payload, counted in workers.run(payload_and_count, world, name, wire):
        assert payload == (0 if world == 1 else STEPS // TAU * width * sum(SIZES))
        assert counted == pytest.approx(2 * (world - 1) / world * payload, abs=STEPS)


def messages_and_count(rank: int, world: int, name: str) -> tuple[int, float]:
    """Bytes of the messages that this worker gave to all-gathers, and its own count."""
    given, real = 0, dist.all_gather_into_tensor

    def counting(output, message, **kwargs):
        nonlocal given
        given += message.nbytes
        return real(output, message, **kwargs)

    with patch.object(dist, "all_gather_into_tensor", counting):
        payload, counted = payload_and_count(rank, world, name, FP32)
    assert payload == 0
    return given, counted


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_bytes_are_those_of_a_message_to_each_other_replica(workers, name, world):
    for given, counted in workers.run(messages_and_count, world, name):
        # Two magnitudes for each of the tensors; and 20 of 1,000 and 2 of 77 values, of which 8
        # bits lie in a byte each, and 6 bits of every four together in three bytes.
        message = 2 * 4 + (20 + 2) + 3 * 6
        assert given == (0 if world == 1 else STEPS // TAU * message)
        assert counted == (world - 1) * STEPS // TAU * message


def payloads_when_sharded(rank: int, world: int) -> tuple[dict[str, int], float]:
    """Bytes of what each kind of collective carried in all, and the worker's own count."""
    payloads = {"all_to_all_single": 0, "all_gather_into_tensor": 0, "all_reduce": 0}

    def counting(name):
        real = getattr(dist, name)

        def call(tensor, *args, **kwargs):
            payloads[name] += tensor.numel() * tensor.element_size()
            return real(tensor, *args, **kwargs)

        return patch.object(dist, name, call)

    params = [torch.nn.Parameter(torch.randn(n)) for n in SIZES]
    method = co2.CO2(co2.CO2.Config(tau=TAU, shard=True), CommConfig(bucket_mb=1000 / 2**20))
    optimizer = torch.optim.SGD(params, lr=0.1)
    method.prepare(torch.nn.ParameterList(params), optimizer, co2.Mesh.world())
    with counting("all_to_all_single"), counting("all_gather_into_tensor"), counting("all_reduce"):
        for _ in range(STEPS):
            for param in params:
                param.grad = torch.ones_like(param)
            method.step()
        method.flush()
    return payloads, method.stats().bytes_sent


@pytest.mark.parametrize(("world", "padded"), [(1, 0), (2, 1080), (3, 1080), (4, 1080)])
def test_bytes_when_sharded(workers, world, padded):
    """Scattered once, gathered once: as much as a mean. Two sums for the norm are not counted."""
    rounds = STEPS // TAU
    for payloads, counted in workers.run(payloads_when_sharded, world):
        assert payloads["all_to_all_single"] == rounds * 4 * padded
        assert payloads["all_gather_into_tensor"] == rounds * 4 * padded
        assert payloads["all_reduce"] == (0 if world == 1 else rounds * 2 * 8)
        assert counted == rounds * (2 * (world - 1) * 4 * padded // world)


@needs_root
@pytest.mark.parametrize(
    ("name", "world", "wire", "fields"),
    grid(
        [
            ("co2", 2, "fp32", {}),
            ("co2", 3, "fp32", {}),
            ("co2", 2, "bf16", {}),
            ("co2", 2, "fp32", {"shard": True}),
            ("co2", 3, "fp32", {"shard": True}),
            ("allreduce", 2, "fp32", {}),
            ("allreduce", 2, "bf16", {}),
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


def test_a_mean_in_flight_must_be_waited_for():
    mean = BackgroundMean(3, co2.Mesh.world())
    mean.start(torch.ones(3))
    with pytest.raises(AssertionError, match="not waited for"):
        mean.start()
    assert mean.wait().tolist() == [1.0, 1.0, 1.0]
    assert mean.wait() is None
