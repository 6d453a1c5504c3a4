"""What every task offers to the training loop."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from co2.comm.clocks import ExchangeTotals
from co2.comm.mesh import Mesh
from co2.config import DataConfig, OptimConfig, Strategy, TrainConfig

Batch: TypeAlias = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
"""One micro-batch of one worker, on the CPU; the loop moves it."""


class Task(Protocol):
    """Model, data, loss and metrics of one experiment; `docs/` tells how to add one."""

    @property
    def Config(self) -> Any:
        """A nested dataclass, the node `<name>:` of the configuration. Its `__post_init__` raises
        `ConfigError` with keys that leave the node out."""

    version: int
    """Of its code: data, model, loss and metrics. From 1; its author raises it when results change,
    so that no table mixes the two (tests/recipes/test_golden.py)."""
    unit: str
    """What throughput counts: "tokens" or "samples"."""
    units_per_sample: int
    """Units in one sample: the context length for text, 1 for the toy."""

    def __init__(
        self, config: Any, train: TrainConfig, optim: OptimConfig, data: DataConfig
    ) -> None:
        """Cheap: no file is read."""

    def setup(self, num_workers: int) -> None:
        """Check the data, prepare and cache it where needed, and open it.

        Idempotent, and safe when several processes call it at once: what is written appears whole
        or not at all. Raises `ConfigError` where the data cannot be used, or are too few for
        `num_workers` batches; nothing has been written then.
        """

    def model(self) -> nn.Module:
        """A new model on the default device. Its weights depend on `train.seed` alone, and no
        random generator moves."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        """The inner optimizer. Each of its groups keeps the peak rate as "initial_lr"."""

    def batches(self, mesh: Mesh, start: int) -> Iterator[Batch]:
        """Endless micro-batches of `mesh.worker`, from the one with index `start` on. Number n is a
        pure function of (seed, n, worker), so training resumes exactly with `start` = the number
        of those that were drawn."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean loss over the micro-batch: a scalar in fp32. `batch` is on the model's device."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Metrics on the part of the validation data that `data.validation` names: "loss" and the
        task's own. Collective over the default process group, where there is one: all workers call
        it, hold the same weights and get the same figures. The mode of every module is restored."""

    def baselines(self) -> dict[str, float]:
        """What no model should be worse than, shown beside the result. May be empty."""

    def fingerprint(self) -> dict[str, object]:
        """What identifies the data, for `manifest.json`: name, sha256, counts, tokenizer."""


@dataclass(frozen=True)
class Published:
    """A public data set, as `tasks.prepare` leaves it on the disk."""

    samples: int
    """Of the training part, rounded where the source rounds."""
    num_bytes: int
    """Rounded."""


@dataclass(frozen=True)
class Pace:
    """How fast such a model is trained, for `co2 plan`."""

    mfu: float
    """Share of a GPU's peak that a public program reaches."""
    source: str
    """Which one."""
    samples_per_s: float | None = None
    """Samples that one loading process makes in a second; None where that is next to no work."""


@runtime_checkable
class Planned(Protocol):
    """Optional protocol: what training takes is known before there are data."""

    def blank(self) -> Batch:
        """A micro-batch of zeros on the default device, with the types of `batches`, and shapes no
        smaller than any of theirs. Call `setup` first, unless the data set is public."""

    def published(self) -> Published | None:
        """The public data set that this task trains on; None for other data."""

    @property
    def pace(self) -> Pace:
        """What is known of the speed of such a training."""


@runtime_checkable
class Exchanging(Protocol):
    """Optional protocol: the workers of a replica exchange parts of their batches."""

    def traffic(self, model: nn.Module) -> ExchangeTotals:
        """Totals of training since the model was made."""


@dataclass
class ReadTotals:
    """What a worker has read from disk for its batches since the last start."""

    needed_bytes: int = 0
    """Samples that no cache held."""
    read_bytes: int = 0
    """What was read for them."""
    planning_s: float = 0.0
    """Seconds in which batches were laid out ahead of training."""
    plan_bytes: int = 0
    """Largest size of such a layout on disk."""


@runtime_checkable
class Reading(Protocol):
    """Optional protocol: batches come from disk in training."""

    def read(self) -> ReadTotals:
        """Totals of this worker; zeros if nothing is on disk."""


@runtime_checkable
class Placed(Protocol):
    """Optional protocol: the task does not train everywhere."""

    def check_place(self, device: torch.device, strategy: Strategy) -> None:
        """Raise `ConfigError` for a device of the workers or a `mesh.strategy` that this task's
        settings cannot be combined with. Called before any worker starts, when CUDA must not be
        initialized (`torch.cuda.is_initialized`), and by each worker on its device."""


@dataclass(frozen=True)
class Package:
    """What others need beside the weights of a model to read them."""

    files: Mapping[str, str]
    """Text files by name, such as config.json and tokenizer.json."""
    usage: str = """from safetensors.torch import load_file

weights = load_file("FOLDER/model.safetensors")"""
    """Lines of Python that read the folder, which they call FOLDER."""
    prefix: str = ""
    """Of the names of the task's weights, which the other library's names lack."""
    config: Mapping[str, object] = field(default_factory=dict)
    """What config.json says beside the task's settings, if it is not among `files`. The size of a
    vocabulary is "vocab_size", as in transformers, by which `tasks.prepare` finds it."""
    note: str = ""
    """A sentence for the README.md: what the model reads."""


@runtime_checkable
class Portable(Protocol):
    """Optional protocol: other libraries know the task's model, or its vocabulary matters. Weights
    of any other task are exported and read by their own names."""

    def package(self, model: nn.Module) -> Package:
        """What `co2 export` writes beside the weights, after `setup`."""

    def adopted(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights by the names of this task's model, without what is no weight of it.
        `weights` has them by the names of the other library."""

    def refusal(
        self, model: nn.Module, config: Mapping[str, Any], tokenizer: str | None
    ) -> str | None:
        """Why this task, after `setup`, cannot start from a folder; None if names and shapes of
        the weights are all that must agree.

        Args:
            model: of this run; it may be on the device "meta".
            config: the folder's config.json; empty where there is none.
            tokenizer: the text of its tokenizer.json, if it has one.
        """


@runtime_checkable
class Writing(Protocol):
    """Optional protocol: the task's model writes text."""

    config: Any
    """Its `context` is the number of tokens that the model reads at once."""

    @property
    def separator(self) -> int:
        """The token that ends every document, after `setup`."""

    def tokenizer(self) -> str | None:
        """The text of tokenizer.json, after `setup`; None where the data have none."""

    def logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Of the token after each of `tokens` [batch, length]: [batch, length, vocabulary]."""


@runtime_checkable
class FineTuning(Protocol):
    """Optional protocol: runs may start from runs of other tasks (`init_from`). With any other task
    they start from runs of its own, whose weights must have the same names and shapes."""

    heads: tuple[str, ...]
    """Prefixes of the names of weights that the two models need not share. In the new model they
    begin as without `init_from`."""

    def objection(self, run: Mapping[str, Any], data: Mapping[str, Any]) -> str | None:
        """Why this task, after `setup`, cannot start from the run with this config.yaml and this
        fingerprint of its data; None if it can."""
