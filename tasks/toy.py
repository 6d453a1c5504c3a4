"""A toy task that trains in milliseconds, for tests and for a first look at a method."""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from co2.config import DataConfig, OptimConfig, TrainConfig
from co2.errors import require
from co2.limits import Count, Limited, Seconds
from co2.task import Batch, Published
from tasks.shared.evaluation import evaluating, total
from tasks.shared.loader import load
from tasks.shared.optimizer import make_optimizer
from tasks.shared.paces import UNKNOWN
from tasks.shared.randomness import seeded
from tasks.shared.sampling import Sampler, Stretches, evaluated, validation_samples

if TYPE_CHECKING:
    from co2.comm.mesh import Mesh

CLASSES = 4
_EVAL_BATCH = 64


class Toy:
    """The task `toy`: classify Gaussian points into the four classes of a random linear map.

    The model has batch norm, so that methods are tested with buffers of floats (running means) and
    of integers (counts of batches).
    """

    @dataclass
    class Config(Limited):
        samples: Count = 512
        """Number of samples in the training set, and in the validation set."""
        features: Count = 16
        """Numbers of a sample."""
        hidden: Count = 32
        """Width of the hidden layer."""
        delay_s: Seconds = 0.0
        """Seconds by which the loss of each training step is delayed, for tests that kill a run."""
        late_s: Seconds = 0.0
        """Seconds by which each batch of the last worker is late, for tests of slow replicas."""
        ledger: str | None = None
        """A folder in which every process writes the samples of its steps, for tests of runs that
        lose replicas: a file each, with a line [draw, epoch, samples] for each step."""

    version = 1
    pace = UNKNOWN
    unit = "samples"
    units_per_sample = 1

    def __init__(
        self, config: Config, train: TrainConfig, optim: OptimConfig, data: DataConfig
    ) -> None:
        self.config, self.train, self.optim, self.data = config, train, optim, data
        self._points = self._labels = torch.empty(0)
        self._validation = np.empty(0, np.int64)  # the samples that an evaluation takes

    def setup(self, num_workers: int) -> None:
        """See `Task.setup`. Nothing is written."""
        hint = "task=toy makes its own data; leave it null"
        require(self.data.path is None, "data.path", self.data.path, hint)
        hint = "batch norm, in the toy's model, needs at least 2"
        require(self.train.batch_size >= 2, "train.batch_size", self.train.batch_size, hint)
        self._sampler(num_workers)
        source = torch.Generator().manual_seed(self.train.seed)
        config = self.config
        # The second half of the samples is for validation.
        held = validation_samples(config.samples, None, self.data.validation)
        self._validation = config.samples + held
        self._points = torch.randn(2 * config.samples, config.features, generator=source)
        rule = torch.randn(config.features, CLASSES, generator=source)
        self._labels = (self._points @ rule).argmax(dim=1)

    def model(self) -> nn.Module:
        """See `Task.model`. The layers are features → hidden → batch norm → ReLU → classes."""
        with seeded(self.train.seed):
            return nn.Sequential(
                nn.Linear(self.config.features, self.config.hidden),
                nn.BatchNorm1d(self.config.hidden),
                nn.ReLU(),
                nn.Linear(self.config.hidden, CLASSES),
            )

    def optimizer(self, model: nn.Module) -> Optimizer:
        *_, head = (name for name, part in model.named_modules() if isinstance(part, nn.Linear))
        return make_optimizer(model, self.optim, ends={f"{head}.weight"})

    def batches(self, mesh: "Mesh", start: int) -> Iterator[Batch]:
        """See `Task.batches`. A batch holds points, fp32 [batch_size, features], labels, int64
        [batch_size], and draw, epoch and number of each sample, int64 [batch_size, 3]."""
        sampler = self._sampler(mesh.num_workers, mesh.stretches)

        def make(draw: int) -> tuple[Tensor, ...]:
            chosen = torch.from_numpy(sampler.indices(draw, mesh.worker))
            origin = torch.tensor((draw, sampler.epoch(draw), 0)).repeat(len(chosen), 1)
            origin[:, 2] = chosen
            return self._points[chosen], self._labels[chosen], origin

        batches = load(make, count(start), self.data.workers, mesh.device)
        late = self.config.late_s and mesh.worker == mesh.num_workers - 1
        return _late(batches, self.config.late_s) if late else batches

    def blank(self) -> Batch:
        """See `Planned`."""
        rows = self.train.batch_size
        kind = torch.int64
        points, labels = torch.zeros(rows, self.config.features), torch.zeros(rows, dtype=kind)
        return points, labels, torch.zeros(rows, 3, dtype=kind)

    def published(self) -> Published | None:
        """See `Planned`."""
        return None

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy in nats, fp32."""
        if self.config.delay_s:
            time.sleep(self.config.delay_s)
        assert isinstance(batch, tuple)
        points, labels, origin = batch
        if self.config.ledger:
            self._tell(origin, Path(self.config.ledger))
        return F.cross_entropy(model(points).float(), labels)

    def _tell(self, origin: Tensor, ledger: Path) -> None:
        """Write which samples are trained on."""
        draws, epochs, samples = origin.T.tolist()
        ledger.mkdir(parents=True, exist_ok=True)
        with (ledger / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps([draws[0], epochs[0], samples]) + "\n")

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """See `Task.evaluate`. "loss" is in nats, "accuracy" from 0 to 1."""
        device = next(model.parameters()).device
        points = self._points[self._validation].split(_EVAL_BATCH)
        labels = self._labels[self._validation].split(_EVAL_BATCH)

        def compute(batch: int) -> Tensor:
            truth = labels[batch].to(device)
            logits = model(points[batch].to(device)).float()
            losses = F.cross_entropy(logits, truth, reduction="none")
            right = logits.argmax(dim=1) == truth
            return torch.stack([losses.double().sum(), right.double().sum()])

        with evaluating(model):
            loss, right = total(compute, len(points))
        whole = len(self._validation)
        return {"loss": loss / whole, "accuracy": right / whole}

    def baselines(self) -> dict[str, float]:
        """See `Task.baselines`. "majority_accuracy" is that of always predicting the most frequent
        class."""
        labels = self._labels[self._validation]
        return {"majority_accuracy": labels.bincount().max().item() / len(labels)}

    def fingerprint(self) -> dict[str, object]:
        """See `Task.fingerprint`."""
        digest = hashlib.sha256(self._points.numpy().tobytes() + self._labels.numpy().tobytes())
        return {
            "data": "toy",
            "sha256": digest.hexdigest(),
            "num_samples": self.config.samples,
            "evaluated": evaluated(self.data.validation, self._validation),
        }

    def _sampler(self, num_workers: int, stretches: Stretches = ()) -> Sampler:
        return Sampler.of(self.train, self.config.samples, num_workers, stretches)


def _late(batches: Iterator[Batch], seconds: float) -> Iterator[Batch]:
    for batch in batches:
        time.sleep(seconds)
        yield batch
