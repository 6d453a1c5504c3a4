"""What a worker holds open: a connection to each other worker for every process group."""

import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

import co2
import train
from co2.comm import mesh
from co2.comm.background_mean import BackgroundMean
from co2.comm.collectives import place
from co2.errors import REFUSED, ConfigError
from co2.start.processes import allow_files
from tests.cli.harness import configured
from tests.workers import replicas


def connections() -> int:
    found = Path("/proc/self/fd").iterdir()
    return sum(os.readlink(one).startswith("socket:") for one in found if one.is_symlink())


@replicas(4)
def test_a_group_more_is_a_connection_more_to_each_worker() -> None:
    """And the group of control is PyTorch's own."""
    workers, before = co2.Mesh.world(), connections()
    control = workers.control_group()
    assert control is dist.group.WORLD and connections() == before
    dist.barrier(control)
    mean = BackgroundMean(3, workers)
    assert connections() == before + 3 + 1, "to the three others, and one that listens"
    dist.barrier(control)
    mean.close()


@pytest.mark.parametrize(
    ("config", "host", "gpu"),
    [
        ("cpu:gloo,cuda:nccl", "gloo", "nccl"),
        ("cuda:nccl", "gloo", "nccl"),
        ("cpu:gloo,cuda:gloo", "gloo", "gloo"),
        ("cpu:gloo", "gloo", "gloo"),
    ],
)
def test_a_mean_has_the_backend_of_its_vector_alone(config: str, host: str, gpu: str) -> None:
    own = {"is_initialized": lambda: True, "get_backend_config": lambda: config}
    with patch.multiple(dist, **own):
        assert (mesh.backend_of("cpu"), mesh.backend_of("cuda")) == (host, gpu)
    assert mesh.backend_of("cpu") is None, "there is no process group"


def test_as_many_open_files_as_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    try:
        allow_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Options:
    """Stands in for NCCL's, which a PyTorch without CUDA has not."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(max_ctas=0)


@pytest.mark.parametrize(("backend", "limit"), [("nccl", 4), ("nccl", None), ("gloo", 4)])
def test_nccl_takes_no_more_of_the_gpu_for_a_mean(backend: str, limit: int | None) -> None:
    seen: dict[str, Any] = {}

    def new_group(ranks: list[int], **given: Any) -> Any:
        seen.update(given)
        return Mock(dist.ProcessGroup)

    workers = co2.Mesh(0, 2, torch.device("cpu"))
    own = {"new_group": new_group, "ProcessGroupNCCL": SimpleNamespace(Options=Options)}
    with patch.multiple(dist, create=True, **own):
        workers.new_group_across_replicas(backend, limit)
    options = seen["pg_options"]
    assert (options and options.config.max_ctas) == (limit if backend == "nccl" else None)


@replicas(2)
def test_a_mean_asks_for_it() -> None:
    """On a CPU it changes nothing."""
    with patch.object(co2.Mesh, "new_group_across_replicas", return_value=None) as made:
        BackgroundMean(3, co2.Mesh.world(), co2.CommConfig(max_ctas=2))
    made.assert_called_once_with("gloo", 2)


def test_elastic_runs_make_other_groups(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^comm\.max_ctas=2: elastic runs have none; use null"):
        configured("comm.max_ctas=2", "launch.elastic=true", runs=tmp_path)


@replicas(3)
def test_an_evaluation_is_shared(rank: int, world: int) -> None:
    """Else all workers would evaluate everything, with the same result."""
    assert place() == (rank, world)


def test_too_few_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))
    assert train.APP.main(["task=toy"]) == REFUSED
    line = "error: ulimit -n=20: 2 workers need 72 open files: ulimit -n 65536\n"
    assert capsys.readouterr().err == line
