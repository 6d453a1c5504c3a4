"""A worker's state as a file: everything comes back, and PyTorch's own tools read the weights."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from co2.train import state_file
from co2.train.state_file import ELSEWHERE, REPLICA, HostCopy, Split, split
from tests.cli.harness import pooled, weights
from tests.cli.test_checkpoint import part
from tests.workers import Pool


def written(path: Path, state: dict[str, Any], worker: int = 0) -> Path:
    own = split(state, worker)
    state_file.write(path, own, HostCopy().take(own.tensors))
    return path


def names(path: Path) -> set[str]:
    return set(load_file(path))


def loaded(folder: Path, state: dict[str, Any], **options: Any) -> None:
    """Into these tensors, by torch.distributed.checkpoint alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no group
        reader = dcp.HuggingFaceStorageReader(str(folder))
        dcp.load(state, storage_reader=reader, no_dist=True, **options)


PLAIN = {
    "numbers": [0, -(2**70), 0.1, 1e-308, math.inf, -math.inf],
    "texts": ["", 'a"\n', "ü"],
    "nothing": [None, True, False, {}, []],
    "by number": {0: {"step": 1}, 7: {}},
    "by name": {"0": 1, "a.b": 2},
}


def test_plain_values_come_back(tmp_path: Path) -> None:
    found = state_file.read(written(tmp_path / "file", {**PLAIN, "nan": math.nan}))
    assert math.isnan(found.pop("nan"))
    assert found == PLAIN
    assert state_file.read(written(tmp_path / "file", {"pair": (1, (2,))})) == {"pair": [1, [2]]}


TENSORS = {
    "scalar": torch.tensor(3, dtype=torch.int64),
    "flags": torch.tensor([True, False]),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "half": torch.linspace(0, 1, 7, dtype=torch.bfloat16),
    "double": torch.full((2, 3), math.pi, dtype=torch.float64),
    "empty": torch.empty(0, 4),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "every other": torch.arange(8.0)[::2],
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
}


def test_tensors_come_back(tmp_path: Path) -> None:
    state = {"nested": [{"of": TENSORS}, [TENSORS["half"].clone()]], REPLICA: {"model": {"w": -1}}}
    found = state_file.read(written(tmp_path / "file", state))
    ((of, (half,)), saved) = found["nested"], TENSORS["half"]
    for name, value in TENSORS.items():
        assert of["of"][name].dtype == value.dtype and torch.equal(of["of"][name], value), name
    assert torch.equal(half, saved)


def test_names(tmp_path: Path) -> None:
    """Those of the replica are the same on all workers, and everybody has names for the rest."""
    one = torch.ones(2)
    for worker, own in ((0, "model.mean"), (3, "worker_3.model.mean")):
        state = {REPLICA: {"model": {"w": one.clone()}}, "model": {"mean": one.clone()}}
        assert names(written(tmp_path / "file", state, worker)) == {"model.w", own}


def test_tied_weights_are_there_once(tmp_path: Path) -> None:
    weight = torch.randn(4, 3, requires_grad=True)
    path = written(tmp_path / "file", {"in": weight, "out": weight.detach(), "more": weight[:2]})
    assert names(path) == {"in", "more"}
    found = state_file.read(path)
    assert found["in"] is found["out"] and torch.equal(found["in"], weight)
    assert torch.equal(found["more"], weight[:2])


def test_two_tensors_of_one_name() -> None:
    state = {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}
    with pytest.raises(AssertionError, match=r"called a\.b"):
        split(state, 0)


def test_what_is_neither_plain_nor_a_tensor(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="set"):
        written(tmp_path / "file", {"a": {1, 2}})


def test_what_another_worker_saves(tmp_path: Path) -> None:
    """And of what both have, the own."""
    here, there = ({"w": torch.full((2,), float(n)), "bias": torch.ones(1)} for n in range(2))
    first = written(tmp_path / "0", {REPLICA: {"model": here}})
    state = {REPLICA: {"model": {**there, "bias": ELSEWHERE}}}
    second = written(tmp_path / "1", state, 1)
    assert names(second) == {"model.w"}
    model = state_file.read(second, [first])[REPLICA]["model"]
    assert model["w"].tolist() == [1.0, 1.0] and model["bias"].tolist() == [1.0]
    with pytest.raises(KeyError, match="bias"):
        state_file.read(second)


def shards(folder: Path) -> Tensor:
    """A weight of [5, 2] in parts of three, two and no rows."""
    whole = torch.arange(10.0).reshape(5, 2)
    for worker, (begin, end) in enumerate(((0, 3), (3, 5), (5, 5))):
        own = Split({}, {"model.w": whole[begin:end]}, {"model.w": [begin, 0]})
        state_file.write(folder / f"{worker}.safetensors", own, own.tensors)
    return whole


def test_shards_are_put_together(tmp_path: Path) -> None:
    """By PyTorch's own reader, and its tool that makes one file of many."""
    from torch.distributed.checkpoint import _consolidate_hf_safetensors as tool

    whole = shards(tmp_path)
    state = {"model": {"w": torch.zeros(5, 2)}}
    loaded(tmp_path, state)
    assert torch.equal(state["model"]["w"], whole)
    (tmp_path / "one").mkdir()
    tool.consolidate_safetensors_files(
        str(tmp_path), str(tmp_path / "one"), fqn_to_index_mapping={"model.w": 1}
    )
    (made,) = (tmp_path / "one").glob("*.safetensors")
    assert torch.equal(load_file(made)["model.w"], whole)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(6, 4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def test_a_model_with_buffers_and_tied_weights(tmp_path: Path) -> None:
    """Under their first name; who needs both lets PyTorch leave out the other."""
    model, other = Tied(), Tied()
    written(tmp_path / "own.safetensors", {REPLICA: {"model": model.state_dict()}})
    loaded(
        tmp_path, {"model": other.state_dict()}, planner=DefaultLoadPlanner(allow_partial_load=True)
    )
    for (name, one), same in zip(
        model.state_dict().items(), other.state_dict().values(), strict=True
    ):
        assert torch.equal(one, same), name


@pytest.fixture(scope="module")
def trained(workers: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two replicas that are averaged at the very end, and its last checkpoint."""
    arguments = ("method=local_sgd", "local_sgd.tau=5", "train.steps=8", "optim.name=adamw")
    arguments = (*arguments, "checkpoint.every=8")
    run = pooled(workers, 2, *arguments, runs=tmp_path_factory.mktemp("trained"))
    assert run.status == 0, run.err
    return run.folder


def test_the_weights_of_a_run(trained: Path) -> None:
    """The mean of what torch.distributed.checkpoint loads from its replicas is its consensus."""
    step, consensus = trained / "checkpoints" / "step_8", weights(trained)
    replicas = []
    for replica in range(2):
        state = {"model": {name: torch.zeros_like(value) for name, value in consensus.items()}}
        loaded(step / f"replica_{replica}", state)
        replicas.append(state["model"])
    first, second = replicas
    assert any(not torch.equal(first[name], second[name]) for name in first)
    for name, value in consensus.items():
        mean = torch.stack([first[name].double(), second[name].double()]).mean(0)
        torch.testing.assert_close(mean.to(value.dtype), value, msg=name)


def test_everything_of_a_run_as_one_file(trained: Path, tmp_path: Path) -> None:
    """As `dcp_to_torch_save` does it, which knows no other reader than that of `.distcp`."""
    folder, found = trained / "checkpoints" / "step_8" / "replica_0", {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no group
        _load_state_dict(
            found,
            storage_reader=dcp.HuggingFaceStorageReader(str(folder)),
            planner=_EmptyStateDictLoadPlanner(),
            no_dist=True,
        )
    torch.save(found, tmp_path / "all.pt")
    found, saved = torch.load(tmp_path / "all.pt"), load_file(folder / "worker_0.safetensors")
    assert found.keys() == saved.keys()
    for name, value in saved.items():
        assert torch.equal(found[name], value), name
    assert {"model", "optimizer", "method", "random"} == {name.partition(".")[0] for name in found}
    moments = {name for name in found if name.startswith("optimizer.state.")}
    assert {name.rpartition(".")[2] for name in moments} == {"step", "exp_avg", "exp_avg_sq"}


def test_a_person_can_read_what_is_no_tensor(trained: Path) -> None:
    with safe_open(trained / "checkpoints" / "step_8" / part(), "pt") as file:
        values = json.loads(file.metadata()["co2"])
    assert values["step"] == 8 and values["method"]["method"] == "local_sgd"
