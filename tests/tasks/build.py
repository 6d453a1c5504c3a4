"""Tasks as train.py builds them, from a few keys."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from co2.comm.mesh import Mesh
from co2.config import DataConfig, OptimConfig, TrainConfig
from tasks import GPT2, MoE, Toy, TransNormer
from tasks.shared.sampling import Sampler
from tasks.text.causal import CausalText
from tasks.text.store import Store
from tasks.text.text import Window, opened

Text = TypeVar("Text", bound=CausalText)


def _on_text(task: type[Text]) -> Callable[..., Text]:
    def build(
        root: Path, path: Path | None = None, seed: int = 0, batch_size: int = 4, **config: Any
    ) -> Text:
        data = DataConfig(root=str(root), path=None if path is None else str(path))
        train = TrainConfig(seed=seed, batch_size=batch_size)
        return task(task.Config(**config), train, OptimConfig(lr=3e-3), data)

    return build


gpt2, moe, transnormer = _on_text(GPT2), _on_text(MoE), _on_text(TransNormer)


def toy(seed: int = 0, batch_size: int = 8, path: str | None = None, **config: Any) -> Toy:
    train = TrainConfig(seed=seed, batch_size=batch_size)
    return Toy(Toy.Config(**config), train, OptimConfig(lr=1e-2), DataConfig(path=path))


def mesh(replica: int = 0, num_replicas: int = 1) -> Mesh:
    return Mesh(replica, num_replicas, torch.device("cpu"))


def sampler(task: Any, num_samples: int, num_workers: int = 1) -> Sampler:
    """What chooses the samples of a task's batches."""
    return Sampler(num_samples, num_workers, task.train.batch_size, task.train.seed)


def text_of(task: Any) -> Store:
    """The tokens of the text that a task trains on, after its `setup`."""
    config = task.config
    window = Window("context", config.context, config.context)
    return opened(task.data, "corpus", config.corpus.name, config.vocab_size, window)
