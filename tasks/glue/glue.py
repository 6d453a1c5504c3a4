"""Fine-tuning RoBERTa on GLUE, or on two tasks made of text files.

Wang et al., "GLUE: A Multi-Task Benchmark and Analysis Platform for Natural Language
Understanding" (2018); Liu et al., "RoBERTa" (2019), section 5.1. `init_from` is the folder of a run
of task=roberta, whose encoder the model starts from; the classification head is new. Without it the
encoder is new, too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from co2.config import DataConfig, OptimConfig, TrainConfig
from co2.errors import ConfigError, require
from co2.limits import Count
from co2.program import python
from co2.task import Batch, Package, Published
from tasks.glue import passages
from tasks.glue.examples import Examples
from tasks.glue.glue_tables import GLUE_TASKS, BadTable, read_examples
from tasks.glue.scores import METRICS
from tasks.shared.corpus import embedded_corpus, user_corpus
from tasks.shared.evaluation import evaluating, table
from tasks.shared.loader import load
from tasks.shared.optimizer import make_optimizer
from tasks.shared.paces import TEXT
from tasks.shared.randomness import seeded
from tasks.shared.sampling import Sampler, Stretches, evaluated, validation_samples
from tasks.text import roberta
from tasks.text.masking import Vocabulary
from tasks.text.store import Store
from tasks.text.text import described

if TYPE_CHECKING:
    from transformers import RobertaConfig

    from co2.comm.mesh import Mesh

GLUE_BYTES = 150_000_000
"""Of all nine tasks on the disk, about."""
_EVAL_TOKENS = 4096
"""Tokens of one evaluation batch, <pad> included."""


class Name(Enum):
    topic = "topic"
    adjoin = "adjoin"
    cola = "cola"
    sst2 = "sst2"
    mrpc = "mrpc"
    qqp = "qqp"
    stsb = "stsb"
    mnli = "mnli"
    qnli = "qnli"
    rte = "rte"
    wnli = "wnli"


class Classifier(nn.Module):
    """RoBERTa with the head of transformers, which reads <s>: a dense layer, tanh, and a linear
    layer."""

    def __init__(self, shape: "RobertaConfig") -> None:
        from transformers import AutoModelForSequenceClassification  # takes seconds

        super().__init__()
        # The name is that of roberta.MaskedLM's, so that the encoders' weights are namesakes.
        self.language = AutoModelForSequenceClassification.from_config(shape)
        positions = self.language.base_model.embeddings.position_embeddings
        roberta.begin_as_waves(positions, shape)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, classes] of tokens [B, L]; of a regression, [B, 1]."""
        seen = (tokens != Vocabulary.PAD).long()
        logits: Tensor = self.language(input_ids=tokens, attention_mask=seen).logits
        return logits


class GLUE:
    """The task `glue`. A sample is <s> A </s>, or <s> A </s></s> B </s>, and <pad> to `length`
    tokens."""

    @dataclass
    class Config(roberta.ModelConfig):
        """The fields of roberta must have the values that the run of `init_from` has. `vocab_size`
        and `corpus` tell whose tokenizer it is, as does data.path."""

        name: Name = Name.topic
        """topic, adjoin: made of the text, see tasks/glue/passages.py. Others: GLUE's, see
        tasks.prepare."""
        length: Count | None = None
        """Tokens of a sample, <s>, </s> and <pad> included; longer texts are cut. null stands for
        `context`."""

        def __post_init__(self) -> None:
            super().__post_init__()
            hint = "must be 8 or more: two pieces of text and four special tokens"
            require(self.context >= 8, "context", self.context, hint)
            good = self.length is None or 8 <= self.length <= self.context
            hint = f"must be a whole number from 8 to the context, {self.context}, or null"
            require(good, "length", self.length, hint)

    version = 1
    pace = TEXT
    unit = "samples"
    units_per_sample = 1
    heads = ("language.classifier.", "language.lm_head.")

    def __init__(
        self, config: Config, train: TrainConfig, optim: OptimConfig, data: DataConfig
    ) -> None:
        self.config, self.train, self.optim, self.data = config, train, optim, data
        self.length = config.length or config.context
        self._text: Store | None = None
        self._examples: dict[str, Examples] = {}
        self._validation = np.empty(0, np.int64)  # the samples that an evaluation takes

    def setup(self, num_workers: int) -> None:
        """See `Task.setup`."""
        self._text = roberta.text_store("glue", self.config, self.data)
        name = self.config.name.value
        if self._of_glue:
            self._examples = self._read()
        else:
            key = "glue.corpus"
            hint = f"glue.name={name} is made of text files; use glue.corpus=embedded or data.path"
            require(not self._public, key, self.config.corpus.value, hint)
            path = self.data.path
            corpus = embedded_corpus(key) if path is None else user_corpus(path)
            if self.config.name is Name.topic:
                self._examples = passages.topic(self._text, corpus, self.length - 2)
            else:
                self._examples = passages.adjoin(self._text, corpus, (self.length - 4) // 2)
        self._sampler(num_workers)
        available, wanted = len(self._examples["val"]), self.config.eval_samples
        self._validation = validation_samples(available, wanted, self.data.validation)

    def model(self) -> nn.Module:
        """See `Task.model`. The number of topics is known after `setup`."""
        known = roberta.vocabulary(self.config, self.data, self._text)
        shape = roberta.architecture(self.config, known.size)
        shape.num_labels = self.num_labels
        with seeded(self.train.seed):
            return Classifier(shape)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return make_optimizer(model, self.optim)

    def batches(self, mesh: "Mesh", start: int) -> Iterator[Batch]:
        """Tokens [B, length] and labels [B]. See `Task.batches`."""
        sampler = self._sampler(mesh.num_workers, mesh.stretches)

        def make(draw: int) -> tuple[Tensor, ...]:
            return self._batch("train", sampler.indices(draw, mesh.worker))

        return load(make, count(start), self.data.workers, mesh.device)

    def blank(self) -> Batch:
        """See `Planned`."""
        rows, kind = self.train.batch_size, torch.float32 if self.num_labels == 1 else torch.int64
        return torch.zeros(rows, self.length, dtype=torch.int64), torch.zeros(rows, dtype=kind)

    def published(self) -> Published | None:
        """See `Planned`. The text whose vocabulary it has is not counted."""
        if not self._of_glue or not self._public:
            return None
        return Published(GLUE_TASKS[self.config.name.value].rows["train"], GLUE_BYTES)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy in nats, or the mean squared error of a regression, in fp32 whatever
        the autocast."""
        losses, _ = self._losses(model, batch)
        return losses.mean()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """See `Task.evaluate`. Every worker gets all predictions, so that the metrics are exact.

        Returns:
            "loss": its mean over the validation samples; GLUE's metrics of the task, for mnli
            "accuracy" (matched) and "accuracy_mismatched", for topic and adjoin "accuracy".
        """
        device, size = next(model.parameters()).device, max(1, _EVAL_TOKENS // self.length)
        chosen = self._validation

        def compute(batch: int) -> Tensor:
            inside = self._batch("val", chosen[batch * size : (batch + 1) * size])
            losses, predictions = self._losses(model, tuple(part.to(device) for part in inside))
            row = torch.zeros(1 + size, dtype=torch.float64, device=device)
            row[0] = losses.double().sum()
            row[1 : 1 + len(predictions)] = predictions.double()
            return row

        with evaluating(model):
            rows = table(compute, num_batches=-(-len(chosen) // size)).cpu()
        predictions = rows[:, 1:].flatten()[: len(chosen)].numpy()
        loss = sum(rows[:, 0].tolist()) / len(chosen)
        return {"loss": loss, **self._scores(chosen, predictions)}

    def baselines(self) -> dict[str, float]:
        """ "majority_accuracy": of the class that is most frequent in training. "variance": the
        loss, in a regression, of the mean in training."""
        train = self._examples["train"].labels
        val = self._examples["val"].labels[self._validation]
        if self.num_labels == 1:
            return {"variance": float(((val - train.mean()) ** 2).mean())}
        most = np.bincount(train).argmax()
        return {"majority_accuracy": float((val == most).mean())}

    def fingerprint(self) -> dict[str, Any]:
        name = self.config.corpus.name if self.data.path is None else self.data.path
        return {
            "data": self.config.name.value,
            "num_samples": {part: len(found) for part, found in self._examples.items()},
            "text": described(self._store, name),
            "evaluated": evaluated(self.data.validation, self._validation),
        }

    def objection(self, run: Mapping[str, Any], data: Mapping[str, Any]) -> str | None:
        """See `FineTuning`. Runs of task=glue will do as well: GLUE's small tasks gain by a start
        from mnli."""
        task = run["task"]
        if task not in ("roberta", "glue"):
            return f"is a run of task={task}; give one of task=roberta"
        own = self.config
        shape = {"size": own.size.value, "context": own.context, "pre_norm": own.pre_norm}
        if not self._public:
            shape["vocab_size"] = self.config.vocab_size
        for key, here in shape.items():
            there = run[task].get(key, False)  # older runs have no pre_norm
            if there != here:
                return f"has {task}.{key}={there}, this run glue.{key}={here}; make them equal"
        there, here = data if task == "roberta" else data["text"], self.fingerprint()["text"]
        if there["tokens_sha256"] != here["tokens_sha256"]:
            theirs, ours = (f"{text['data']} ({text['tokenizer']})" for text in (there, here))
            return (
                f"its vocabulary is that of {theirs}, this run's that of {ours}; "
                "give this run the same corpus, vocab_size and data.path"
            )
        return None

    def package(self, model: nn.Module) -> Package:
        """See `Portable`: what transformers reads."""
        loader = "AutoModelForSequenceClassification"
        return roberta.packaged(model, loader, self._store, self._public)

    def adopted(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Portable`."""
        return roberta.adopted(weights)

    def refusal(
        self, model: nn.Module, config: Mapping[str, Any], tokenizer: str | None
    ) -> str | None:
        """See `Portable`: a model for masks will do, and one for classes."""
        data = self.fingerprint()["text"]["data"]
        return roberta.refusal(model, config, tokenizer, self._store, self._public, data)

    @property
    def num_labels(self) -> int:
        """Classes; 1 stands for a regression."""
        if self._of_glue:
            return GLUE_TASKS[self.config.name.value].num_labels
        if self.config.name is Name.adjoin or not self._examples:
            return 2
        return int(self._examples["train"].labels.max()) + 1

    @property
    def _of_glue(self) -> bool:
        return self.config.name.value in GLUE_TASKS

    @property
    def _public(self) -> bool:
        return roberta.is_public(self.config, self.data)

    @property
    def _store(self) -> Store:
        assert self._text is not None, "call setup() first"
        return self._text

    @cached_property
    def _ids(self) -> np.ndarray:
        return roberta.roberta_ids(self._store, self._public)

    def _read(self) -> dict[str, Examples]:
        root, name = Path(self.data.root), self.config.name.value
        try:
            return read_examples(root / "glue" / name, name, self._store, root)
        except BadTable as bad:
            hint = f"{bad}; make it: {python()} -m tasks.prepare glue --root {root}"
            raise ConfigError("glue.name", name, hint) from None
        except OSError as error:
            hint = f"{error.filename or root}: {error.strerror or error}"
            raise ConfigError("data.root", root, hint) from None

    def _batch(self, part: str, chosen: np.ndarray) -> tuple[Tensor, Tensor]:
        examples = self._examples[part]
        rows = examples.rows(chosen, self._ids, self.length)
        return torch.from_numpy(rows), torch.from_numpy(examples.labels[chosen])

    def _losses(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Of each sample: the loss, fp32 [B], and the prediction: a class or a number, [B]."""
        assert isinstance(batch, tuple)
        tokens, labels = batch
        logits = model(tokens)
        with torch.autocast(logits.device.type, enabled=False):
            logits = logits.float()
            if self.num_labels == 1:
                values = logits.squeeze(-1)
                return F.mse_loss(values, labels, reduction="none"), values
            return F.cross_entropy(logits, labels, reduction="none"), logits.argmax(-1)

    def _scores(self, chosen: np.ndarray, predictions: np.ndarray) -> dict[str, float]:
        """The metrics of predictions for these validation samples, both [N]."""
        labels, whole = self._examples["val"].labels[chosen], np.full(len(chosen), True)
        parts = {"": whole}
        metrics = GLUE_TASKS[self.config.name.value].metrics if self._of_glue else ("accuracy",)
        if self.config.name is Name.mnli:
            matched = chosen < self._examples["val"].first
            parts = {"": matched, "_mismatched": ~matched}
        return {
            f"{name}{end}": METRICS[name](labels[of], predictions[of])
            for end, of in parts.items()
            for name in metrics
            if of.any()
        }

    def _sampler(self, num_workers: int, stretches: Stretches = ()) -> Sampler:
        samples = len(self._examples["train"])
        return Sampler.of(self.train, samples, num_workers, stretches)
