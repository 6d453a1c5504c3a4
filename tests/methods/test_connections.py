"""What a worker holds open: a connection to each other worker for every process group."""

import os
import resource
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

import co2
from co2.comm import mesh
from co2.comm.background_mean import BackgroundMean
from co2.start.processes import allow_files
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
        ("cpu:gloo", "gloo", None),
    ],
)
def test_a_mean_has_the_backend_of_its_vector_alone(
    config: str, host: str, gpu: str | None
) -> None:
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
