"""Methods on a GPU: the same arithmetic, streams of their own, and nobody waiting for them."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import co2
from co2.comm.flat import FlatParams
from co2.comm.reproducible import checksum, squared_norm
from co2.comm.runners import CudaRunner
from co2.comm.waiting import everyone, use
from co2.config import CommConfig, CommDevice
from co2.elastic.members import Members
from co2.elastic.sockets import Sockets
from co2.errors import ConfigError
from co2.methods import METHODS
from co2.methods.base import HOST, Method
from co2.streams import BatchCopies
from co2.train.state_file import HostCopy
from tests.gpu import CUDA, DEVICES, SLOWLY, gpu_only, no_waits
from tests.methods.driver import MOMENTS, NEEDS_SGD, SETTINGS, SHARDED, Case, assert_same, inner_of
from tests.methods.interpreted import results
from tests.methods.test_packed_means import KERNELS
from tests.workers import Pool, replicas

FIELDS: list[Case] = [
    *SETTINGS.items(),
    *MOMENTS.items(),
    SHARDED[0],
    ("co2", {"tau": 3, "gap_penalty": "none"}),
    ("co2", {"tau": 3, "gap_penalty": "gap_aware_elementwise", "clip": 0.05, "clip_mode": "norm"}),
    ("streaming_diloco", {**SETTINGS["streaming_diloco"], "exchange": "int8"}),
    ("co2_keep", {**SETTINGS["co2_keep"], "fragments": 2}),
    ("sparta", {"share": 0.3, "delay": 0}),
]
ON_HOST = [case for case in FIELDS if HOST not in METHODS[case[0]](**case[1]).refusals()]
"""Whose vectors may lie in the host's memory."""
BESIDE, IN_HOST = CommConfig(), CommConfig(device=CommDevice.cpu)


def optimizer_for(case: Case, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    if inner_of(case) == "adamw":
        return torch.optim.AdamW(params, lr=0.01)
    return torch.optim.SGD(params, lr=0.1, momentum=0.0 if case[0] in NEEDS_SGD else 0.9)


def prepared(case: Case, optimizer: torch.optim.Optimizer, comm: CommConfig = BESIDE) -> Method:
    name, settings = case
    params = optimizer.param_groups[0]["params"]
    method = METHODS[name](METHODS[name].Config(**settings), comm)
    mesh = co2.Mesh.world(device=params[0].device)
    method.prepare(nn.ParameterList(params), optimizer, mesh)
    return method


def trajectory(
    case: Case, device: str, comm: CommConfig = BESIDE, rank: int = 0
) -> list[torch.Tensor]:
    """The weights after four rounds, and the replicas' mean of them."""
    generator = torch.Generator().manual_seed(rank)

    def drawn() -> list[torch.Tensor]:
        vector = torch.randn(1001, generator=generator, dtype=torch.float64)
        return list(vector.to(device).split([700, 301]))

    params = [nn.Parameter(weight) for weight in drawn()]
    method = prepared(case, optimizer_for(case, params), comm)
    for _ in range(12):
        for param, gradient in zip(params, drawn(), strict=True):
            param.grad = gradient
        method.step()
    with method.consensus():
        mean = [param.detach().cpu().clone() for param in params]
    method.flush()
    return [*mean, *(param.detach().cpu() for param in params)]


def assert_close(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("case", "comm"),
    [*((case, BESIDE) for case in FIELDS), *((case, IN_HOST) for case in ON_HOST)],
    ids=str,
)
def test_a_gpu_computes_what_a_cpu_does(case: Case, comm: CommConfig, device: str) -> None:
    assert_close(trajectory(case, device, comm), trajectory(case, "cpu"))


@gpu_only
@pytest.mark.parametrize("case", FIELDS, ids=str)
def test_a_step_never_waits_for_the_gpu(case: Case) -> None:
    params = [nn.Parameter(torch.randn(size, device="cuda")) for size in (700, 301)]
    method = prepared(case, optimizer_for(case, params))
    for param in params:
        param.grad = torch.ones_like(param)
    with no_waits():
        for _ in range(8):
            method.step()


@gpu_only
@pytest.mark.parametrize("case", ON_HOST, ids=str)
def test_on_the_host_a_method_holds_nothing_on_the_gpu(case: Case) -> None:
    params = [nn.Parameter(torch.randn(size, device="cuda")) for size in (3_000_000, 77)]
    optimizer = optimizer_for(case, params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()  # makes its own state
    gc.collect()  # what other tests have left must not go meanwhile
    before = torch.cuda.memory_allocated()
    method = prepared(case, optimizer, IN_HOST)
    for _ in range(4):
        method.step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert method.state_device == torch.device("cpu")


def on_one_gpu(rank: int, world: int, case: Case) -> tuple[Any, Any]:
    torch.cuda.set_device(0)
    return trajectory(case, "cuda", IN_HOST, rank), trajectory(case, "cpu", rank=rank)


@gpu_only
@pytest.mark.parametrize("case", ON_HOST, ids=str)
def test_two_replicas_share_a_gpu(workers: Pool, case: Case) -> None:
    for found, expected in workers.run(on_one_gpu, 2, case):
        assert_close(found, expected)


@replicas(2)
@gpu_only
def test_gloo_does_not_carry_a_gpus_memory() -> None:
    with pytest.raises(ConfigError, match=r"^comm.device=auto: .* use cpu"):
        trajectory(("co2", {}), "cuda")


OF_TWO = [case for case in FIELDS if case[0] != "allreduce"]
"""DDP averages what a backward pass has made, and `trajectory` has none."""


def on_place(mesh: co2.Mesh) -> list[Any]:
    return [trajectory(case, str(mesh.device), rank=mesh.replica) for case in OF_TWO]


def in_pool(rank: int, world: int) -> list[Any]:
    return [trajectory(case, "cpu", rank=rank) for case in OF_TWO]


@pytest.mark.parametrize("device", SLOWLY)
def test_two_replicas_of_co2_run(
    workers: Pool, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """They share the GPU through NCCL, which every method can."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0" if device == "cuda" else "")
    found = co2.run(on_place, replicas=2)
    for on_device, on_cpu in zip(found, workers.run(in_pool, 2), strict=True):
        for one, other in zip(on_device, on_cpu, strict=True):
            assert_close(one, other)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_for_packed_means_make_the_same_bits(name: str, device: str) -> None:
    assert_same(results(KERNELS[name], device), results(KERNELS[name]))


# Reproducible sums, and copies.


@gpu_only
@pytest.mark.parametrize("size", [5, 4097, 3_000_001])
def test_norms_are_reproducible_and_checksums_those_of_a_cpu(size: int) -> None:
    x = torch.randn(size, device="cuda")
    with no_waits():
        norms, sums = torch.stack([squared_norm(x) for _ in range(20)]), checksum(x)
    assert norms.unique().numel() == 1
    assert norms[0].item() == pytest.approx(x.double().square().sum().item(), rel=1e-6)
    assert sums.item() == checksum(x.cpu()).item()


@gpu_only
def test_a_batch_is_copied_while_the_host_goes_on() -> None:
    """From pageable memory, in the order of the streams."""
    made = BatchCopies(torch.device("cuda"))
    with no_waits():
        found = []
        for turn in range(20):
            torch.cuda._sleep(5_000_000)  # the computation is behind
            batch = {"x": torch.full((1000, 77), float(turn)), "y": (torch.arange(turn + 1),)}
            coming = made.begin(batch)
            torch.cuda._sleep(5_000_000)
            found.append(coming()["x"].sum() + coming()["y"][0].sum())
    assert [value.item() for value in found] == [77000 * n + n * (n + 1) // 2 for n in range(20)]


@gpu_only
def test_a_checkpoint_is_copied_while_the_gpu_computes() -> None:
    """Into pinned memory, of what was there at `take`, whatever changes it behind `hold`. Neither
    the host nor, up to `hold`, the computation waits."""
    copy, weight = HostCopy(), torch.zeros(1 << 24, device="cuda")
    copy.take({"weight": weight})  # allocates
    for turn in range(1, 6):
        copy.wait()
        weight.fill_(turn)
        with no_waits():
            torch.cuda._sleep(50_000_000)  # the copy is still to come when the host goes on
            taken = copy.take({"weight": weight})["weight"]
            copy.hold()
            weight.zero_()
        copy.wait()
        assert taken.is_pinned() and taken.eq(turn).all()
    torch.cuda.synchronize()
    assert not weight.any()


@gpu_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_side_stream_orders_inner_step_copies_and_reader(dtype: torch.dtype) -> None:
    """What was queued before a round's end is read in it, and what follows sees what it wrote."""
    weight = nn.Parameter(torch.zeros(5_000_000, dtype=dtype, device="cuda"))
    image = nn.Parameter(torch.zeros(8, 3, 5, 5, dtype=dtype, device="cuda"))
    image.data = image.data.contiguous(memory_format=torch.channels_last)
    flat = FlatParams(torch.optim.SGD([weight, image], lr=0.1), CommDevice.cpu)
    vector = flat.zeros()
    assert vector.is_pinned()
    for turn in range(1, 6):
        torch.cuda._sleep(20_000_000)  # the fill below is still to come when the host goes on
        with torch.no_grad():
            weight.fill_(turn)
            image.fill_(-turn)
        with flat.round():
            for chunk in flat.chunks:
                part = chunk.of(vector)
                torch.mul(chunk.read(), 2, out=part)
                chunk.write(part)
        seen = weight.detach().clone(), image.detach().clone()
        with torch.no_grad():
            weight.zero_()
        assert seen[0].eq(2 * turn).all()
        assert seen[1].eq(-2 * turn).all()


# What runs a collective, and members that may be lost.


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("nccl", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    yield
    dist.destroy_process_group()


@gpu_only
def test_the_runner_orders_snapshot_collective_and_reader(nccl: None) -> None:
    """Work queued before the launch is in the snapshot, and what follows the wait sees the mean."""
    runner = CudaRunner()
    buffer = torch.zeros(1 << 22, device="cuda")
    for turn in range(1, 6):
        torch.cuda._sleep(20_000_000)  # the fill below is still to come when the host goes on
        buffer.fill_(turn)
        runner.launch(buffer.split(1 << 20), dist.group.WORLD, None)
        runner.wait()
        copy = buffer.clone()
        buffer.zero_()
        assert copy.eq(turn).all()
    torch.cuda.synchronize()
    assert len(runner.comm.take()) == len(runner.exposed.take()) == 5
    assert runner.comm.take() == []


@pytest.fixture
def alone() -> Iterator[Members]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members = Members(("127.0.0.1", store.port), 0, 30.0, "cpu:gloo,cuda:nccl")
    members.first((0,))
    members.formed()
    yield members
    members.leave()


@gpu_only
def test_a_lane_tells_how_it_ended(alone: Members) -> None:
    told: list[bool] = []
    runner = CudaRunner()
    buffer = torch.ones(1 << 20, device="cuda")
    runner.launch(buffer.split(1 << 18), everyone(), told.append)
    copied = torch.empty(1 << 20, pin_memory=True)
    arrived = runner.copy(buffer, copied)
    runner.wait()
    arrived()
    assert told == [True] and copied.eq(1).all()
    sockets = Sockets()
    use(sockets)
    torch.cuda._sleep(200_000_000)  # it has not ended yet when they are cut
    runner.launch(buffer.split(1 << 18), everyone(), told.append)
    arrived = runner.copy(buffer, copied)
    sockets.cut()
    runner.wait()
    with pytest.raises(RuntimeError, match="aborted"):
        arrived()
    runner.close()
    assert told == [True, False]


@gpu_only
def test_a_generation_follows_another(alone: Members) -> None:
    """Groups of NCCL are aborted and made anew."""
    for turn in range(3):
        mine = torch.full((1000,), float(turn), device="cuda")
        dist.all_reduce(mine, group=everyone())
        assert mine.eq(turn).all()
        alone.renew(admit=False)
        alone.formed()
