"""What makes each task small enough for the tests. A new task needs one entry here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from co2.config import OptimConfig
from co2.task import Batch
from tasks.glue.glue import Name
from tasks.graph.networks import Network
from tasks.shapenet.shapenet import Objective
from tests.tasks import pictures, random_graph
from tests.tasks.build import built, text_of
from tests.tasks.conftest import story
from tests.tasks.small_sets import scenes, shapenet55


def _counted(task: Any) -> int:
    return task.fingerprint()["num_samples"]["train"]


def _first(batch: Batch) -> Tensor:
    return batch if isinstance(batch, Tensor) else batch[0]


@dataclass(frozen=True)
class Small:
    """A task with few samples and a small model."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the task's Config."""
    data: Callable[[Path], Path] | None = None
    """Writes the data set to a path that is not there yet; None where the task needs none."""
    batch_size: int = 4
    smallest: int = 1
    """Least batch size that the task takes."""
    samples: Callable[[Any], int] = _counted
    """Training samples, after `setup`."""
    inputs: Callable[[Batch], Tensor] = _first
    """What tells the samples of a batch apart, a row for each."""
    whole: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the Config that the larger sizes need."""
    exact: Mapping[str, Any] = field(default_factory=dict)
    """Fields with which the loss of a sample in an evaluation depends on nothing else."""
    in_processes: bool = True
    """Whether data.workers loads its batches."""
    by_sample: bool = True
    """Whether rows of a batch have nothing to do with each other."""
    fixed: bool = False
    """Whether a sample is the same in every epoch."""
    weighs_alike: bool = True
    """Whether each sample weighs as much in the loss of an evaluation."""
    lr: float = 3e-3
    steps: int = 40
    """In which it learns a batch by heart."""
    left: float = 0.5
    """The share of the first loss that is left then, at most."""


def _text(path: Path) -> Path:
    path.write_bytes(story(100_000).encode())
    return path


_TEXT: dict[str, Any] = {"context": 32, "vocab_size": 300, "eval_samples": 300}
_CAUSAL: dict[str, Any] = {
    "config": _TEXT,
    "data": _text,
    "samples": lambda task: (text_of(task).count("train") - 1) // 32,
    "fixed": True,
}
_MASKED: dict[str, Any] = {**_TEXT, "context": 34}
_PICTURES: dict[str, Any] = {
    "data": lambda folder: pictures.tree(folder, val=70),
    "whole": {"image_size": 224, "eval_resize": 256},
}
_GRAPH: dict[str, Any] = {
    "data": lambda folder: random_graph.write(folder, nodes=2900).folder,
    "exact": {"fanout": [2900, 2900]},  # all neighbours
    "in_processes": False,
    "by_sample": False,
    "lr": 1e-2,
}
_CLOUDS = {"points": 32, "groups": 8, "group_size": 8, "svm_samples": 20}


def _clouds(folder: Path) -> Path:
    return shapenet55(folder, train=26, test=130)


def _nodes(batch: Batch) -> Tensor:
    """Those whose labels are learned come first."""
    return batch["features"][: len(batch["labels"])]


SMALL: dict[str, Small] = {
    "ade20k": Small(
        {"hidden": 16},
        data=lambda folder: scenes(folder, training=14, validation=5),
        batch_size=2,
        smallest=2,
        samples=lambda task: task.fingerprint()["num_samples"]["training"],
        weighs_alike=False,
        steps=60,
    ),
    "glue": Small({**_MASKED, "name": Name.adjoin}, data=_text, fixed=True),
    "gpt2": Small(**_CAUSAL),
    "graph": Small({"hidden": 8, "fanout": [3, 4], "dropout": 0.0}, inputs=_nodes, **_GRAPH),
    "graph gat": Small(
        {"model": Network.gat, "hidden": 8, "fanout": [3, 4], "dropout": 0.0},
        inputs=_nodes,
        **_GRAPH,
    ),
    "moe": Small(**_CAUSAL),
    "resnet50": Small(smallest=2, lr=0.01, **_PICTURES),
    "roberta": Small(
        _MASKED, data=_text, samples=lambda task: text_of(task).count("train") // 32, steps=60
    ),
    "shapenet": Small(_CLOUDS, data=_clouds, steps=60, left=0.8),
    "shapenet classification": Small(
        {**_CLOUDS, "objective": Objective.classification}, data=_clouds, smallest=2, steps=60
    ),
    "toy": Small(
        {"samples": 150},
        smallest=2,
        lr=1e-2,
        samples=lambda task: task.fingerprint()["num_samples"],
    ),
    "transnormer": Small(**_CAUSAL),
    "vit": Small(**_PICTURES),
    "vit augmented": Small(
        {"rand_augment": 9, "random_erasing": 0.5, "mixup": 0.8, "cutmix": 1.0, "drop_path": 0.1},
        left=0.8,
        **_PICTURES,
    ),
}
"""By the name of the task; a second word tells entries of one task apart. An evaluation has three
batches or more, of which the last is short; the two halves of the samples do not fill as many."""


def small_task(name: str, root: Path, path: Path | None, num_workers: int = 1, **given: Any) -> Any:
    """The task of an entry of `SMALL`, set up for `num_workers`; `given` is what `built` takes."""
    entry = SMALL[name]
    optim = OptimConfig(lr=entry.lr)
    defaults = {"batch_size": entry.batch_size, "optim": optim, **entry.config}
    return built(name.split()[0], root, path, num_workers=num_workers, **{**defaults, **given})


def tensors(batch: Batch) -> list[Tensor]:
    """The parts of a batch of any type."""
    if isinstance(batch, Tensor):
        return [batch]
    return list(batch.values() if isinstance(batch, dict) else batch)


def equal(one: Batch, other: Batch) -> bool:
    """Whether two batches are the same, bit for bit."""
    pairs = zip(tensors(one), tensors(other), strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
