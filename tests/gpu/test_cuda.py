"""On a GPU: the same arithmetic, a stream of its own, and nobody waiting for it."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import co2
from co2.comm.flat import FlatParams
from co2.comm.reproducible import checksum, squared_norm
from co2.comm.runners import CudaRunner
from co2.config import CommConfig, CommDevice
from co2.errors import ConfigError
from co2.gpus import gpu_of
from co2.methods import METHODS
from co2.streams import BatchCopies
from co2.train.state_file import HostCopy
from tests.cli.harness import command, execute
from tests.gpu.conftest import CUDA
from tests.grids import nonempty
from tests.methods.driver import NEEDS_SGD, inner
from tests.server import environment
from tests.workers import Pool, replicas

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def gpu_only(test: Any) -> Any:
    for mark in on_gpu:
        test = mark(test)
    return test


TAU = {"tau": 2}
AVERAGED = {**TAU, "average_moments": True}
ON_HOST = [
    ("local_sgd", TAU),
    ("slowmo", TAU),
    ("diloco", TAU),
    ("overlap_local_sgd", TAU),
    ("cocod_sgd", TAU),
    ("streaming_diloco", {**TAU, "fragments": 1, "delay": 0}),
    ("streaming_diloco", {**TAU, "fragments": 1, "delay": 0, "exchange": "int8"}),
    ("eager_diloco", TAU),
    ("sparseloco", {**TAU, "density": 0.3}),
    ("noloco", TAU),
    ("co2_keep", TAU),
    ("desloc", {**TAU, "first_moment_every": 2, "second_moment_every": 4}),
    ("mt_dao", {**TAU, "first_moment_every": 2, "late_momentum": True}),
    ("co2", {**TAU, "gap_penalty": "none"}),
    ("co2", {**TAU, "gap_penalty": "gap_aware", "clip": 0.05}),
    ("co2", {**TAU, "gap_penalty": "gap_aware_elementwise"}),
    ("co2", {**TAU, "clip": 0.05, "clip_mode": "norm"}),
    ("diloco", AVERAGED),
    ("co2", AVERAGED),
    ("co2_keep", AVERAGED),
]
"""Whose vectors may lie in the host's memory."""
FIELDS = [
    *ON_HOST,
    ("co2", {**TAU, "clip": 0.05, "shard": True}),
    ("allreduce", {}),
    ("acco", {}),
    ("sparta", {"share": 0.3, "delay": 0}),
    ("sparta", {"share": 0.3, "delay": 2}),
    ("demo", {"top_k": 3}),
    ("onebit_adam", {"freeze_step": 4}),
    ("zero_one_adam", {"freeze_step": 4, "kappa": 2, "double_every": 2, "max_interval": 4}),
]


HOST = CommConfig(device=CommDevice.cpu)
BESIDE = CommConfig()


def optimizer_for(
    name: str, fields: dict[str, Any], weights: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    if inner(name) == "adamw" or "average_moments" in fields:
        return torch.optim.AdamW(weights, lr=0.01)
    return torch.optim.SGD(weights, lr=0.1, momentum=0.0 if name in NEEDS_SGD else 0.9)


def trajectory(
    name: str, fields: dict, device: str, comm: CommConfig = BESIDE, rank: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights after six rounds, and the replicas' mean of them."""
    generator = torch.Generator().manual_seed(rank)
    start = torch.randn(1001, generator=generator, dtype=torch.float64)
    weight = torch.nn.Parameter(start.to(device))
    optimizer = optimizer_for(name, fields, [weight])
    method = METHODS[name](METHODS[name].Config(**fields), comm)
    method.prepare(torch.nn.ParameterList([weight]), optimizer, co2.Mesh.world(device=device))
    for _ in range(12):
        weight.grad = torch.randn(1001, generator=generator, dtype=torch.float64).to(device)
        method.step()
    with method.consensus():
        mean = weight.detach().cpu().clone()
    method.flush()
    return weight.detach().cpu(), mean


def assert_close(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> None:
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize(
    ("name", "fields", "comm"),
    [
        *((*case, BESIDE) for case in FIELDS),
        *((*case, HOST) for case in ON_HOST),
    ],
)
def test_a_gpu_computes_what_a_cpu_does(name: str, fields: dict, comm: CommConfig, device: str):
    assert_close(trajectory(name, fields, device, comm), trajectory(name, fields, "cpu"))


@gpu_only
@pytest.mark.parametrize(("name", "fields"), FIELDS)
def test_a_step_never_waits_for_the_gpu(name: str, fields: dict):
    weight = torch.nn.Parameter(torch.randn(1001, device="cuda"))
    optimizer = optimizer_for(name, fields, [weight])
    method = METHODS[name](METHODS[name].Config(**fields))
    method.prepare(torch.nn.ParameterList([weight]), optimizer, co2.Mesh.world(device="cuda"))
    weight.grad = torch.ones_like(weight)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(8):
            method.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu_only
@pytest.mark.parametrize("size", [5, 4097, 3_000_001])
def test_norms_are_reproducible_and_checksums_those_of_a_cpu(size: int) -> None:
    x = torch.randn(size, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        norms, sums = torch.stack([squared_norm(x) for _ in range(20)]), checksum(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert norms.unique().numel() == 1
    assert norms[0].item() == pytest.approx(x.double().square().sum().item(), rel=1e-6)
    assert sums.item() == checksum(x.cpu()).item()


@gpu_only
def test_a_batch_is_copied_while_the_host_goes_on() -> None:
    """From pageable memory, in the order of the streams."""
    made = BatchCopies(torch.device("cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = []
        for turn in range(20):
            torch.cuda._sleep(5_000_000)  # the computation is behind
            batch = {"x": torch.full((1000, 77), float(turn)), "y": (torch.arange(turn + 1),)}
            coming = made.begin(batch)
            torch.cuda._sleep(5_000_000)
            found.append(coming()["x"].sum() + coming()["y"][0].sum())
    finally:
        torch.cuda.set_sync_debug_mode("default")
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
        torch.cuda._sleep(50_000_000)  # the copy is still to come when the host goes on
        torch.cuda.set_sync_debug_mode("error")
        try:
            taken = copy.take({"weight": weight})["weight"]
            copy.hold()
            weight.zero_()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        copy.wait()
        assert taken.is_pinned() and taken.eq(turn).all()
    torch.cuda.synchronize()
    assert not weight.any()


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("nccl", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    yield
    dist.destroy_process_group()


@gpu_only
def test_the_runner_orders_snapshot_collective_and_reader(nccl: None):
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


def on_one_gpu(rank: int, world: int, name: str, fields: dict) -> tuple:
    torch.cuda.set_device(0)
    device = trajectory(name, fields, "cuda", HOST, rank)
    return device, trajectory(name, fields, "cpu", rank=rank)


@gpu_only
@pytest.mark.parametrize(("name", "fields"), ON_HOST)
def test_two_replicas_share_a_gpu(workers: Pool, name: str, fields: dict):
    (first, expected), (second, own) = workers.run(on_one_gpu, 2, name, fields)
    assert_close(first, expected)
    assert_close(second, own)
    assert torch.equal(first[1], second[1])
    if name in ("local_sgd", "slowmo", "co2"):
        assert torch.equal(first[0], second[0])


@replicas(2)
@gpu_only
def test_gloo_does_not_carry_a_gpus_memory() -> None:
    with pytest.raises(ConfigError, match=r"^comm.device=auto: .* use cpu"):
        trajectory("co2", {}, "cuda", BESIDE)


@gpu_only
@pytest.mark.parametrize(("name", "fields"), ON_HOST)
def test_on_the_host_a_method_holds_nothing_on_the_gpu(name: str, fields: dict):
    weights = [torch.nn.Parameter(torch.randn(n, device="cuda")) for n in (3_000_000, 77)]
    optimizer = optimizer_for(name, fields, weights)
    method = METHODS[name](METHODS[name].Config(**fields), HOST)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()  # makes its own state
    gc.collect()  # what other tests have left must not go meanwhile
    before = torch.cuda.memory_allocated()
    method.prepare(torch.nn.ParameterList(weights), optimizer, co2.Mesh.world(device="cuda"))
    for _ in range(4):
        method.step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert method.state_device == torch.device("cpu")


@gpu_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_side_stream_orders_inner_step_copies_and_reader(dtype: torch.dtype):
    """What was queued before a round's end is read in it, and what follows sees what it wrote."""
    weight = torch.nn.Parameter(torch.zeros(5_000_000, dtype=dtype, device="cuda"))
    image = torch.nn.Parameter(torch.zeros(8, 3, 5, 5, dtype=dtype, device="cuda"))
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


@gpu_only
def test_train_py_shares_a_gpu(tmp_path: Path):
    words = (
        "method=co2",
        "co2.tau=3",
        "train.steps=30",
        "launch.backend=auto",
        "comm.device=cpu",
    )
    runs = tmp_path / "runs"
    run = execute(command(*words, "launch.workers=2", runs=runs), runs)
    assert run.status == 0, run.err
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["device"].startswith("cuda")
    assert summary["memory"]["extra_bytes"] == 0 < summary["memory"]["host_bytes"]
    assert "in the host's memory" in run.out


@gpu_only
def test_train_py_tells_how_well_a_gpu_is_used(tmp_path: Path):
    """MFU beside throughput where the peak is known, and what the memory held beside the trace."""
    words = ("train.steps=40", "launch.workers=1", "launch.backend=auto", "log.every=10")
    runs = tmp_path / "runs"
    run = execute(command(*words, "trace=true", runs=runs), runs)
    assert run.status == 0, run.err
    metrics = run.folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    known = gpu_of(torch.cuda.get_device_name()) is not None
    trained = nonempty(line for line in lines if line["kind"] == "train")
    assert all(("mfu" in line) == known for line in trained)
    assert all(0 < line["mfu"] < 1 for line in trained if known and line["samples_per_s"])
    assert (run.folder / "trace" / "rank_0_memory.pickle").stat().st_size > 0


OF_TWO = [case for case in FIELDS if case[0] != "allreduce"]
"""DDP averages what a backward pass has made, and `trajectory` has none."""


def on_place(mesh: co2.Mesh) -> list[Any]:
    device = str(mesh.device)
    return [trajectory(name, fields, device, rank=mesh.replica) for name, fields in OF_TWO]


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_two_replicas_of_co2_run(
    workers: Pool, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """They share the GPU through NCCL, which every method can."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0" if device == "cuda" else "")
    found = co2.run(on_place, replicas=2)
    for on_device, on_cpu in zip(found, workers.run(in_pool, 2), strict=True):
        for one, other in zip(on_device, on_cpu, strict=True):
            assert_close(one, other)


def in_pool(rank: int, world: int) -> list[Any]:
    return [trajectory(name, fields, "cpu", rank=rank) for name, fields in OF_TWO]


@gpu_only
@pytest.mark.parametrize("method", ["allreduce", "co2"])
def test_four_workers_of_train_py_share_a_gpu(tmp_path: Path, method: str) -> None:
    words = ("train.steps=24", "launch.backend=auto", "launch.workers=4", f"method={method}")
    runs = tmp_path / "runs"
    run = execute(command(*words, runs=runs), runs, environment(CUDA_VISIBLE_DEVICES="0"))
    assert run.status == 0, run.err
    assert "launch.workers=4: sharing one GPU, through NCCL's sockets" in run.err
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["device"].startswith("cuda")
