"""Which worker trains on which device, and what carries its collectives."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from co2.app.plan import usable_bytes
from co2.config import Config
from co2.errors import ConfigError
from co2.gpus import ON_ONE_MACHINE, USABLE
from co2.randomness import random_states
from co2.record.provenance import UNKNOWN, manifest
from co2.start import launch, placement, processes
from tests.cli.harness import configured

BOTH = "cpu:gloo,cuda:nccl"


@pytest.fixture
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    return request.param


@pytest.mark.parametrize(
    ("backend", "device", "gpus", "workers", "placed"),
    [
        ("auto", "auto", 0, 2, ["cpu gloo", "cpu gloo"]),
        ("auto", "auto", 1, 1, [f"cuda:0 {BOTH}"]),
        ("auto", "auto", 3, 2, [f"cuda:0 {BOTH}", f"cuda:1 {BOTH}"]),
        ("auto", "auto", 1, 4, [f"cuda:0 {BOTH}"] * 4),
        ("auto", "auto", 2, 3, [f"cuda:0 {BOTH}", f"cuda:1 {BOTH}", f"cuda:0 {BOTH}"]),
        ("nccl", "auto", 2, 2, [f"cuda:0 {BOTH}", f"cuda:1 {BOTH}"]),
        ("gloo", "auto", 2, 2, ["cpu gloo", "cpu gloo"]),
        ("gloo", "cpu", 2, 2, ["cpu gloo", "cpu gloo"]),
        ("auto", "cpu", 0, 2, ["cpu gloo", "cpu gloo"]),
        ("auto", "cpu", 1, 3, ["cuda:0 gloo", "cuda:0 gloo", "cuda:0 gloo"]),
        ("auto", "cpu", 2, 3, ["cuda:0 gloo", "cuda:1 gloo", "cuda:0 gloo"]),
        ("auto", "cpu", 2, 1, ["cuda:0 gloo"]),
    ],
    indirect=["gpus"],
)
def test_placement(
    tmp_path: Path, backend: str, device: str, gpus: int, workers: int, placed: list[str]
) -> None:
    config = configured(
        f"launch.backend={backend}",
        f"launch.workers={workers}",
        f"comm.device={device}",
        runs=tmp_path,
    )
    found = [placement.place_of(config, rank, workers) for rank in range(workers)]
    assert [f"{device} {backend}" for device, backend in found] == placed


@pytest.mark.parametrize("gpus", [2], indirect=True)
def test_a_mesh_is_where_its_worker_was_placed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    words = ("launch.backend=auto", "launch.workers=4")
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    config = configured(*words, "comm.device=cpu", runs=tmp_path)
    assert launch.mesh(config).device == torch.device("cuda", 1)
    assert taken == [torch.device("cuda", 1)]
    on_cpu = configured("launch.backend=gloo", "launch.workers=4", runs=tmp_path)
    assert launch.mesh(on_cpu).device == torch.device("cpu") and len(taken) == 1


@pytest.mark.parametrize("gpus", [1], indirect=True)
def test_workers_share_the_gpus_of_one_machine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("task=resnet50", "scale=gpu", "launch.backend=auto", "launch.workers=4")
    config = configured(*words, runs=tmp_path)
    monkeypatch.setattr(launch, "_start", lambda worker, config: 3)
    assert launch.run(stop, config) == 3
    assert capsys.readouterr().err == (
        "launch.workers=4: sharing one GPU, through NCCL's sockets; comm.device=cpu goes through "
        "gloo and the host's memory\n"
    )
    for key in ("comm.device=cpu", "launch.backend=gloo"):
        assert launch.run(stop, configured(*words, key, runs=tmp_path)) == 3
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("gpus", [2], indirect=True)
def test_nccl_takes_workers_that_share_a_gpu_for_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    """It refuses a second one of the same machine."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    for name in ("NCCL_HOSTID", *ON_ONE_MACHINE):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_NET", "mine")
    for workers in (2, 3):
        monkeypatch.setenv("LOCAL_RANK", "1")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(workers))
        words = ("launch.backend=auto", f"launch.workers={workers}")
        assert launch.mesh(configured(*words, runs=tmp_path)).device == torch.device("cuda", 1)
        assert ("NCCL_HOSTID" in os.environ) == (workers > gpus)
    assert str(os.getpid()) in os.environ["NCCL_HOSTID"]
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo" and os.environ["NCCL_NET"] == "mine"


@pytest.mark.parametrize("gpus", [1, 2], indirect=True)
def test_memory_is_shared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    one = SimpleNamespace(total_memory=3 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: one)
    config = configured("launch.backend=auto", "launch.workers=3", runs=tmp_path)
    sharing = 3 if gpus == 1 else 2
    assert usable_bytes(config) == pytest.approx(USABLE * (3 << 30) / sharing, abs=1)


@pytest.mark.parametrize("gpus", [1], indirect=True)
@pytest.mark.parametrize("where", ["elastic", "two machines"])
def test_workers_that_cannot_share_train_on_the_cpu_at_smoke_scale_only(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    where: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["launch.backend=auto", "launch.workers=2", "log.wandb=disabled"]
    if where == "elastic":
        words += ["method=co2", "launch.elastic=true"]
    else:
        two = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        for name, value in two.items():
            monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as refused:
        configured("task=resnet50", "scale=gpu", *words, runs=tmp_path)
    line = str(refused.value)
    assert line.startswith("launch.workers=2: 2 GPUs needed, 1 here; use 1, or comm.device=cpu")
    configured("task=resnet50", "scale=gpu", *words, "comm.device=cpu", runs=tmp_path)
    small = configured(*words, runs=tmp_path)
    assert placement.place_of(small, 1, 2) == (torch.device("cpu"), "gloo")
    if where == "elastic":
        monkeypatch.setattr(launch.elastic, "launch", lambda *rest: 3)
        assert launch.run(stop, small) == 3
        told = "launch.workers=2: training on the CPU; 2 GPUs needed, 1 here; use 1,"
        assert capsys.readouterr().err.startswith(told)


def stop(config: Config) -> None:
    raise SystemExit(3)


@pytest.mark.parametrize("gpus", [2], indirect=True)
def test_who_starts_the_workers_takes_no_gpus_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    """A context of CUDA takes hundreds of megabytes, which only a worker needs."""

    def init() -> None:
        raise AssertionError("CUDA is initialized")

    monkeypatch.setattr(torch.cuda, "_lazy_init", init)
    monkeypatch.setattr(torch._C, "_cuda_init", init)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", init)
    words = ("launch.backend=auto", "launch.workers=2", "train.precision=bf16")
    config = configured("task=moe", *words, "moe.kernel=fused", runs=tmp_path)
    assert placement.first_device(config).type == "cuda"
    assert random_states().keys() == {"python", "numpy", "torch"}
    assert manifest(2, UNKNOWN, {})["hardware"]["gpus"] == []


def test_a_gpu_without_bf16_is_refused_by_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(placement, "bf16_supported", lambda device: device != "cuda")
    words = ("launch.backend=auto", "launch.workers=1", "train.precision=bf16")
    config = configured(*words, runs=tmp_path)
    with pytest.raises(ConfigError, match=r"^train.precision=bf16: .* use fp32"):
        launch.mesh(config)


def test_the_fork_server_starts_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries ask `torch.cuda.is_available()` as they are imported."""
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    processes.context()
    assert torch.cuda._nvml_based_avail()
