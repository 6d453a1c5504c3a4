"""On a GPU: the same arithmetic, a stream of its own, and nobody waiting for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import co2
from co2.comm import _CudaLane
from co2.methods import METHODS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

FIELDS = [
    ("local_sgd", {}),
    ("slowmo", {}),
    ("diloco", {}),
    ("overlap_local_sgd", {}),
    ("cocod_sgd", {}),
    ("streaming_diloco", {"fragments": 1, "delay": 0}),
    ("eager_diloco", {}),
    ("co2", {"gap_penalty": "none"}),
    ("co2", {"gap_penalty": "gap_aware", "clip": 0.05}),
    ("co2", {"gap_penalty": "gap_aware_elementwise"}),
    ("co2", {"clip": 0.05, "clip_mode": "norm"}),
]


def trajectory(name: str, fields: dict, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1001, generator=generator, dtype=torch.float64)
    weight = torch.nn.Parameter(start.to(device))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    method = METHODS[name](METHODS[name].Config(tau=2, **fields))
    method.prepare(torch.nn.ParameterList([weight]), optimizer, co2.Mesh.world(device=device))
    for _ in range(12):
        weight.grad = torch.randn(1001, generator=generator, dtype=torch.float64).to(device)
        method.step()
    return weight.detach().cpu()


@pytest.mark.parametrize(("name", "fields"), FIELDS)
def test_a_gpu_computes_what_a_cpu_does(name: str, fields: dict):
    torch.testing.assert_close(
        trajectory(name, fields, "cuda"), trajectory(name, fields, "cpu"), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(("name", "fields"), FIELDS)
def test_a_step_never_waits_for_the_gpu(name: str, fields: dict):
    weight = torch.nn.Parameter(torch.randn(1001, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    method = METHODS[name](METHODS[name].Config(tau=1, **fields))
    method.prepare(torch.nn.ParameterList([weight]), optimizer, co2.Mesh.world(device="cuda"))
    weight.grad = torch.ones_like(weight)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            method.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("nccl", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    yield
    dist.destroy_process_group()


def test_the_lane_orders_snapshot_collective_and_reader(nccl: None):
    """Work queued before the launch is in the snapshot, and what follows the wait sees the mean."""
    lane = _CudaLane()
    buffer = torch.zeros(1 << 22, device="cuda")
    for turn in range(1, 6):
        torch.cuda._sleep(20_000_000)  # the fill below is still to come when the host goes on
        buffer.fill_(turn)
        lane.launch(buffer.split(1 << 20), dist.group.WORLD)
        lane.wait()
        copy = buffer.clone()
        buffer.zero_()
        assert copy.eq(turn).all()
    torch.cuda.synchronize()
    comm_s, exposed_s = lane.clocks()
    assert comm_s > 0
    assert exposed_s >= 0
    assert not lane._pairs
