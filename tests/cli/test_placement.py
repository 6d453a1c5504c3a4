"""Which worker trains on which device, and what carries its collectives."""

from pathlib import Path

import pytest
import torch

from co2.train import launch
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
        ("auto", "auto", 1, 2, ["cpu gloo", "cpu gloo"]),
        ("auto", "auto", 3, 2, [f"cuda:0 {BOTH}", f"cuda:1 {BOTH}"]),
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
    found = [launch.placement(config, rank, workers) for rank in range(workers)]
    assert [f"{device} {backend}" for device, backend in found] == placed


@pytest.mark.parametrize("gpus", [2], indirect=True)
def test_a_mesh_is_where_its_worker_was_placed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    words = ("launch.backend=auto", "launch.workers=4")
    config = configured(*words, "comm.device=cpu", runs=tmp_path)
    assert launch.mesh(config).device == torch.device("cuda", 1)
    assert launch.mesh(configured(*words, runs=tmp_path)).device == torch.device("cpu")
