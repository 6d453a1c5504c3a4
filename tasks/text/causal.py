"""Next-token prediction on text, which gpt2, moe and transnormer share."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from co2.config import DataConfig, OptimConfig, TrainConfig
from co2.limits import Count, Limited, Range
from co2.task import Batch, Pace, Package, Published
from tasks.shared.evaluation import evaluating, total
from tasks.shared.loader import load
from tasks.shared.optimizer import make_optimizer
from tasks.shared.paces import TEXT
from tasks.shared.sampling import Sampler, Stretches, evaluated, validation_samples
from tasks.text.losses import token_losses
from tasks.text.portable import other_vocabulary, tokenizer_files, tokenizer_of
from tasks.text.store import SEPARATOR, Store
from tasks.text.text import (
    Window,
    described,
    num_windows,
    opened,
    token_bytes,
    unigram_entropy,
    windows,
)

if TYPE_CHECKING:
    from co2.comm.mesh import Mesh

PUBLIC_VOCAB_SIZE = 50257
"""Size of GPT-2's own vocabulary, with which openwebtext is tokenized by default."""

OPENWEBTEXT = 9_000_000_000
"""Tokens of its training part, about."""
_EVAL_TOKENS = 4096
"""Tokens of one evaluation batch. With GPT-2's vocabulary the logits take 0.8 GB in fp32."""


class CorpusName(Enum):
    embedded = "embedded"
    openwebtext = "openwebtext"


class CausalText:
    """Base class of tasks whose sample is `context` tokens and the token that follows them. A
    subclass adds the model."""

    @dataclass
    class Config(Limited):
        context: Count = 128
        """Tokens that the model reads at once."""
        vocab_size: Annotated[int, Range(257, 1_000_000)] = 4096
        """Size of the vocabulary that is learned from the text. That of openwebtext is of its
        tokenizer, by default GPT-2's 50257."""
        corpus: CorpusName = CorpusName.embedded
        """embedded: Python source that every installation has. openwebtext: see tasks.prepare.
        Where data.path=FILE_OR_FOLDER is given, it replaces either."""
        layers: Count | None = None
        """Blocks of the model, in place of those that its size has."""
        eval_samples: Count | None = None
        """Number of validation windows in one evaluation, spread evenly; null takes all."""

        def cut(self, shape: tuple[int, int, int]) -> tuple[int, int, int]:
            """A size's layers, heads and width, with as many layers as this model has."""
            return (self.layers or shape[0], *shape[1:])

    name: str
    """Name of the task and of its node in the configuration."""
    version = 1
    unit = "tokens"

    # `Any`, because each subclass has a Config of its own.
    def __init__(
        self, config: Any, train: TrainConfig, optim: OptimConfig, data: DataConfig
    ) -> None:
        self.config, self.train, self.optim, self.data = config, train, optim, data
        self.units_per_sample = config.context
        self._opened: Store | None = None
        self._validation = np.empty(0, np.int64)  # the windows that an evaluation takes

    def setup(self, num_workers: int) -> None:
        """See `Task.setup`. The first run on a corpus tokenizes it, about 10 s for 16 MB."""
        context, corpus = self.config.context, self.config.corpus.name
        window = Window(f"{self.name}.context", context, context + 1)
        key = f"{self.name}.corpus"
        self._opened = opened(self.data, key, corpus, self.config.vocab_size, window)
        self._sampler(num_workers)
        available = num_windows(self._opened.count("val"), context)
        part = self.data.validation
        self._validation = validation_samples(available, self.config.eval_samples, part)

    def logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Return logits of the next token, [B, T, vocabulary], after each of `tokens` [B, T]."""
        return self.padded_logits(model, tokens)[..., : self.vocab_size]

    def padded_logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """The same, and behind them logits of the rows that fill up the head."""
        return model(tokens)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return make_optimizer(model, self.optim)

    def batches(self, mesh: "Mesh", start: int) -> Iterator[Batch]:
        """See `Task.batches`. A batch holds windows, int64 [batch_size, context + 1]."""
        sampler, tokens = (
            self._sampler(mesh.num_workers, mesh.stretches),
            self._store.tokens("train"),
        )

        def make(draw: int) -> Tensor:
            return windows(tokens, sampler.indices(draw, mesh.worker), self.config.context)

        return load(make, count(start), self.data.workers, mesh.device)

    def blank(self) -> Batch:
        """See `Planned`."""
        return torch.zeros(self.train.batch_size, self.config.context + 1, dtype=torch.int64)

    @property
    def pace(self) -> Pace:
        """See `Planned`."""
        return TEXT

    def published(self) -> Published | None:
        """See `Planned`."""
        if self.data.path is not None or self.config.corpus is CorpusName.embedded:
            return None
        return Published(num_windows(OPENWEBTEXT, self.config.context), 2 * OPENWEBTEXT)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean next-token cross-entropy in nats, computed in fp32 even under autocast."""
        return self._losses(model, batch, "mean", self.train.compile)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """See `Task.evaluate`.

        Returns:
            "loss": mean cross-entropy over the targets of the validation windows, in nats;
            "perplexity": its exponential;
            "bits_per_byte": the same loss in bits for each byte of the targets' text, which does
            not depend on the tokenizer. Left out where the store has no tokenizer.
        """
        context, tokens = self.config.context, self._store.tokens("val")
        device = next(model.parameters()).device
        chosen, size = self._validation, max(1, _EVAL_TOKENS // context)

        def compute(batch: int) -> Tensor:
            inside = windows(tokens, chosen[batch * size : (batch + 1) * size], context)
            losses = self._losses(model, inside.to(device), "none").double()
            return torch.cat([losses.sum()[None], self.counts(model).to(losses)])

        with evaluating(model):
            whole, *counted = total(compute, num_batches=-(-len(chosen) // size))
        loss = whole / (len(chosen) * context)
        scores = {"loss": loss, "perplexity": torch.tensor(loss, dtype=torch.float64).exp().item()}
        if self._num_bytes:
            scores["bits_per_byte"] = whole / math.log(2) / self._num_bytes
        return scores | self.scores(counted)

    def counts(self, model: nn.Module) -> Tensor:
        """What else an evaluation adds up, [K], after the model has seen a batch. Nothing."""
        return torch.empty(0)

    def scores(self, counted: Sequence[float]) -> dict[str, float]:
        """What these sums are worth."""
        return {}

    def baselines(self) -> dict[str, float]:
        """See `Task.baselines`. "unigram_entropy" is that of the whole validation text, in nats."""
        return {"unigram_entropy": self._unigram_entropy}

    def fingerprint(self) -> dict[str, object]:
        """See `Task.fingerprint`."""
        name = self.config.corpus.name if self.data.path is None else self.data.path
        samples = evaluated(self.data.validation, self._validation)
        return {**described(self._store, name), "evaluated": samples}

    def package(self, model: nn.Module) -> Package:
        """See `Portable`."""
        special = {"bos_token": SEPARATOR, "eos_token": SEPARATOR}
        files = tokenizer_files(self.tokenizer(), self.config.context, **special)
        return Package(files, config={"vocab_size": self.vocab_size})

    def adopted(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Portable`."""
        return dict(weights)

    def refusal(
        self, model: nn.Module, config: Mapping[str, Any], tokenizer: str | None
    ) -> str | None:
        """See `Portable`."""
        data = self.fingerprint()["data"]
        return other_vocabulary(tokenizer, self.tokenizer(), data, "openwebtext")

    def tokenizer(self) -> str | None:
        """The text of tokenizer.json, after `setup`; None where the data have none."""
        return tokenizer_of(self._store)

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows. Before `setup`, openwebtext counts as GPT-2's."""
        if self.data.path is not None or self.config.corpus is CorpusName.embedded:
            return int(self.config.vocab_size)
        return PUBLIC_VOCAB_SIZE if self._opened is None else int(self._opened.meta["vocab_size"])

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the head: the vocabulary, filled up to a multiple of 128, as
        the tensor cores of GPUs want it. `logits` leaves out what is not in the vocabulary, so that
        loss and gradients are the same without these rows, and nothing samples one of them."""
        return -(-self.vocab_size // 128) * 128

    @property
    def separator(self) -> int:
        """The token that ends every document, after `setup`."""
        return int(self._store.meta["separator"])

    @property
    def _store(self) -> Store:
        assert self._opened is not None, "call setup() first"
        return self._opened

    @cached_property
    def _unigram_entropy(self) -> float:
        return unigram_entropy(self._store.tokens("val"))

    def _sampler(self, num_workers: int, stretches: Stretches = ()) -> Sampler:
        samples = num_windows(self._store.count("train"), self.config.context)
        return Sampler.of(self.train, samples, num_workers, stretches)

    @cached_property
    def _num_bytes(self) -> int | None:
        """Bytes of text in the targets of an evaluation; None where the tokens' are unknown."""
        lengths = token_bytes(self._store)
        if lengths is None:
            return None
        inside = windows(self._store.tokens("val"), self._validation, self.config.context)
        return int(lengths[inside[:, 1:].numpy()].sum())

    def _losses(
        self, model: nn.Module, batch: Batch, reduction: str, compiled: bool = False
    ) -> Tensor:
        """Return the next-token cross-entropy of windows [B, context + 1] in nats, fp32."""
        assert isinstance(batch, Tensor)
        logits = self.padded_logits(model, batch[:, :-1])
        return token_losses(logits, batch[:, 1:], self.vocab_size, reduction, compiled)
