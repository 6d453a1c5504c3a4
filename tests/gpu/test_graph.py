"""The task graph on a GPU: batches arrive while it computes, and the host waits for nothing."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from co2.comm.mesh import Mesh
from co2.config import DataConfig, OptimConfig, TrainConfig
from tasks.graph.graph import Graph
from tasks.graph.networks import Network
from tasks.graph.stores import StoreName
from tests.tasks import random_graph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def no_waits() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def task(tmp_path: Path, **config: Any) -> Graph:
    path = tmp_path / "graph"
    random_graph.write(path)
    data = DataConfig(root=str(tmp_path), path=str(path))
    own = Graph.Config(fanout=[3, 4], hidden=8, dropout=0.0, **config)
    made = Graph(own, TrainConfig(batch_size=10, steps=8), OptimConfig(lr=1e-2), data)
    made.setup(1)
    return made


def drawn(made: Graph, device: str, number: int) -> list[dict[str, torch.Tensor]]:
    batches = made.batches(Mesh(0, 1, torch.device(device)), 0)
    found = list(islice(batches, number))
    batches.close()
    return found


@pytest.mark.parametrize("kind", Network)
@pytest.mark.parametrize("device_mb", [0.0, 1 / 1024])
@pytest.mark.parametrize("depth", [0, 2])
def test_as_on_a_cpu(tmp_path: Path, kind: Network, device_mb: float, depth: int) -> None:
    """Losses and gradients, with a part of the features on the GPU from the beginning."""
    given = {"store": StoreName.diskgnn, "device_mb": device_mb, "ahead": depth, "model": kind}
    made, found = task(tmp_path, **given), []
    for device in ("cpu", "cuda"):
        model = made.model().to(device)
        for batch in drawn(made, device, 3):
            assert {part.device.type for part in batch.values()} == {device}
            loss = made.loss(model, batch)
            loss.backward()
        assert ("table" in batch) == (device_mb > 0)
        found.append([loss.detach().cpu(), *(weight.grad.cpu() for weight in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", Network)
def test_a_step_never_waits_for_the_gpu(
    tmp_path: Path, kind: Network, request: pytest.FixtureRequest
) -> None:
    made = task(tmp_path, store=StoreName.diskgnn, device_mb=1 / 1024, model=kind)
    model, (first, *batches) = made.model().cuda(), drawn(made, "cuda", 4)
    made.loss(model, first).backward()  # loads kernels
    request.getfixturevalue("no_waits")
    for batch in batches:
        made.loss(model, batch).backward()
