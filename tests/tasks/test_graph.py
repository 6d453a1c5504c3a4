"""The task graph: what it refuses, its model and figures. Batches: test_graph_stores.py."""

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from co2.config import DataConfig, OptimConfig, TrainConfig, Validation
from co2.errors import ConfigError
from co2.program import python
from tasks.graph.graph import DatasetName, Graph
from tasks.graph.networks import GraphNetwork, Network
from tasks.graph.sampling import Topology
from tasks.graph.stores import StoreName
from tests.tasks import random_graph
from tests.tasks.build import mesh
from tests.tasks.waits import no_waits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_graph.write(tmp_path_factory.mktemp("graph") / "mine").folder


def graph(
    path: Path | None, root: str = "data", seed: int = 0, batch_size: int = 10, **config: Any
) -> Graph:
    data = DataConfig(root=root, path=None if path is None else str(path))
    train = TrainConfig(seed=seed, batch_size=batch_size)
    return Graph(Graph.Config(**config), train, OptimConfig(lr=1e-2), data)


def ready(path: Path, **given: Any) -> Graph:
    task = graph(path, **given)
    task.setup(2)
    return task


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"fanout": []}, "fanout=[]: must have a number for each layer"),
        ({"model": Network.gat, "hidden": 30}, "heads=4: must divide hidden=30"),
    ],
)
def test_wrong_values(config: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(line)):
        Graph.Config(**config)


@pytest.mark.parametrize("name", [one for one in DatasetName if one.value != "calls"])
def test_a_graph_that_is_not_prepared(tmp_path: Path, name: DatasetName) -> None:
    """One line with the command that makes it; the command knows the name."""
    with pytest.raises(ConfigError) as e:
        graph(None, str(tmp_path), dataset=name).setup(1)
    command = f"{python()} -m tasks.prepare graph --set {name.value} --root {tmp_path}"
    assert str(e.value).endswith(f"make it: {command}") and "\n" not in str(e.value)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.path=.*: is no sound graph; docs/data.md has the"):
        graph(tmp_path).setup(1)


def test_loading_processes_are_refused(folder: Path) -> None:
    task = graph(folder)
    task.data.workers = 2
    with pytest.raises(ConfigError, match=r"data.workers=2: task=graph loads in threads"):
        task.setup(1)


def test_too_few_nodes(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.batch_size=100: 2 workers draw 200 samples"):
        graph(folder, batch_size=100).setup(2)


@pytest.mark.parametrize("kind", Network)
def test_weights_depend_on_the_seed_alone(folder: Path, kind: Network) -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(time.time_ns() % 1000)
        before = torch.get_rng_state()
        model = ready(folder, seed=seed, model=kind).model()
        assert torch.equal(torch.get_rng_state(), before)
        return torch.cat([weight.detach().flatten() for weight in model.parameters()])

    assert torch.equal(weights(3), weights(3)) and not torch.equal(weights(3), weights(4))


def test_the_published_size() -> None:
    """GraphSAGE of papers100M: two matrices and a bias for each layer."""
    with torch.device("meta"):
        model = GraphNetwork(Network.sage, (128, 256, 256, 172), 4, 0.2)
    pairs = ((128, 256), (256, 256), (256, 172))
    expected = sum(2 * wide * narrow + narrow for wide, narrow in pairs)
    assert sum(weight.numel() for weight in model.parameters()) == expected


def test_halves_of_the_validation_nodes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()
    original = Topology.neighbourhood

    def neighbourhood(topology: Topology, nodes: np.ndarray, *more: Any) -> Any:
        seen.update(nodes.tolist())
        return original(topology, nodes, *more)

    monkeypatch.setattr(Topology, "neighbourhood", neighbourhood)

    def chosen(part: Validation) -> set[int]:
        task = graph(folder)
        task.data.validation = part
        task.setup(1)
        seen.clear()
        task.evaluate(task.model())
        assert task.fingerprint()["evaluated"] == {"part": part.value, "num_samples": len(seen)}
        return set(seen)

    halves = [chosen(part) for part in (Validation.report, Validation.tuning)]
    assert set.isdisjoint(*halves)
    whole = ready(folder)
    assert halves[0] | halves[1] == chosen(Validation.all) == set(whole.graph.part("val").tolist())


def test_figures(folder: Path) -> None:
    """Of a model whose answer is known: the majority's class with little doubt."""
    task = ready(folder)
    labels = task.graph.labels()[task.graph.part("val")]
    counts = np.bincount(labels)

    class Fixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(
                torch.nn.functional.one_hot(torch.tensor(int(counts.argmax())), 3).float()
            )

        def forward(self, x: torch.Tensor, edges: Any) -> torch.Tensor:
            return self.bias.expand(len(edges[-1][0]) - 1, 3)

    found = task.evaluate(Fixed())
    share = counts.max() / counts.sum()
    right, wrong = -torch.tensor([1.0, 0.0, 0.0]).log_softmax(0)[:2].double()
    assert found["accuracy"] == pytest.approx(share) == task.baselines()["majority_accuracy"]
    assert found["loss"] == pytest.approx((share * right + (1 - share) * wrong).item())


def test_fingerprint_changes_with_the_data(tmp_path: Path, folder: Path) -> None:
    other = random_graph.write(tmp_path / "other", seed=1).folder
    found = [ready(path).fingerprint()["sha256"] for path in (folder, folder, other)]
    assert found[0] == found[1] != found[2]


def test_half_precision_features(tmp_path: Path) -> None:
    """They are stored and moved as they are, and computed with in fp32."""
    task = ready(random_graph.write(tmp_path / "half", dtype="float16").folder)
    batches = task.batches(mesh(0, 2), 0)
    batch = next(batches)
    batches.close()
    assert batch["features"].dtype == torch.float16
    assert task.loss(task.model(), batch).dtype == torch.float32


@pytest.mark.parametrize("kind", Network)
def test_no_host_waits_in_a_step(tmp_path: Path, folder: Path, kind: Network) -> None:
    """Also where some features are on the device already."""
    task = graph(folder, str(tmp_path), model=kind, store=StoreName.diskgnn, device_mb=1 / 1024)
    task.setup(2)
    model, batches = task.model(), task.batches(mesh(0, 2), 0)
    batch = next(batches)
    batches.close()
    assert len(batch["table"]) > 0
    with no_waits():
        task.loss(model, batch).backward()


@pytest.mark.parametrize(
    "waiting",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.repeat_interleave(x.long()),
    ],
)
def test_waits_are_found(waiting: Any) -> None:
    """By what the test above rests on."""
    with no_waits(), pytest.raises(AssertionError, match="the host would wait for"):
        waiting(torch.arange(3.0))
