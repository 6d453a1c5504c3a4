"""Tasks as train.py builds them, from a few keys."""

from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from co2.comm.mesh import Mesh
from co2.config import DataConfig, OptimConfig, TrainConfig, Validation
from co2.errors import ConfigError
from co2.task import Batch
from tasks import TASKS, Toy
from tasks.shared.sampling import Sampler
from tasks.text.store import Store
from tasks.text.text import Window, opened


def built(
    task: str,
    root: Path | str = "unused",
    path: Path | str | None = None,
    *,
    num_workers: int | None = None,
    seed: int = 0,
    batch_size: int = 4,
    steps: int = 100,
    workers: int = 0,
    validation: Validation = Validation.all,
    optim: OptimConfig | None = None,
    **config: Any,
) -> Any:
    """A task, by its name.

    Args:
        root, path, workers, validation: `data.root` and so on.
        num_workers: for which it is set up; None leaves it as it is made.
        config: fields of its Config.
    """
    kind = TASKS[task]
    given = None if path is None else str(path)
    data = DataConfig(root=str(root), path=given, workers=workers, validation=validation)
    train = TrainConfig(seed=seed, batch_size=batch_size, steps=steps)
    made = kind(kind.Config(**config), train, optim or OptimConfig(lr=3e-3), data)
    if num_workers is not None:
        made.setup(num_workers)
    return made


gpt2, moe, transnormer, roberta = (
    partial(built, name) for name in ("gpt2", "moe", "transnormer", "roberta")
)
ade20k = partial(built, "ade20k", batch_size=2)


def toy(path: str | None = None, **given: Any) -> Toy:
    return built("toy", path=path, **{"batch_size": 8, "optim": OptimConfig(lr=1e-2), **given})


def num_parameters(task: str, **config: Any) -> int:
    """Of the task's model, for which nothing is set up and no memory taken."""
    with torch.device("meta"):
        model = built(task, **config).model()
    return sum(weight.numel() for weight in model.parameters())


def mesh(replica: int = 0, num_replicas: int = 1) -> Mesh:
    return Mesh(replica, num_replicas, torch.device("cpu"))


def refusal(act: Callable[[], object]) -> str:
    """The one line in which something is refused: what key=value it names, and why."""
    with pytest.raises(ConfigError) as caught:
        act()
    line = str(caught.value)
    assert line.startswith(f"{caught.value.key}=") and "\n" not in line
    return line


def drawn(task: Any, number: int = 1, start: int = 0, own: Mesh | None = None) -> list[Batch]:
    """Its batches from draw `start` on; of one worker unless `own` says otherwise."""
    batches = task.batches(own or mesh(), start)
    found = list(islice(batches, number))
    batches.close()
    assert len(found) == number, "batches are endless"
    return found


def used(task: Any, num_draws: int = 1) -> list[Batch]:
    """Its first batches, of one worker."""
    task.setup(1)
    return drawn(task, num_draws)


def sampler(task: Any, num_samples: int, num_workers: int = 1) -> Sampler:
    """What chooses the samples of a task's batches."""
    return Sampler(num_samples, num_workers, task.train.batch_size, task.train.seed)


def text_of(task: Any) -> Store:
    """The tokens of the text that a task trains on, after its `setup`."""
    config = task.config
    window = Window("context", config.context, config.context)
    return opened(task.data, "corpus", config.corpus.name, config.vocab_size, window)


def documents(store: Store, part: str) -> list[str]:
    """What the tokens say: cut at the separator, decoded with the store's own tokenizer."""
    tokenizer = Tokenizer.from_file(str(store.folder / "tokenizer.json"))
    tokens = np.asarray(store.tokens(part))
    ends = np.flatnonzero(tokens == store.meta["separator"])
    assert ends[-1] == len(tokens) - 1
    spans = zip([0, *(ends + 1)], ends, strict=False)
    return [tokenizer.decode(tokens[start:end].tolist()) for start, end in spans]
