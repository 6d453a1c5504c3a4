"""RoBERTa from scratch: masked language modelling.

Liu et al., "RoBERTa: A Robustly Optimized BERT Pretraining Approach" (2019), and, with `pre_norm`
and other masks, Wettig et al., "Should You Mask 15% in Masked Language Modeling?" (2023). The
implementation is that of transformers; the weights are random at the start.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from co2.config import DataConfig, OptimConfig, TrainConfig
from co2.errors import ConfigError, require
from co2.limits import Count, Decay, Limited, PartShare, Range, Share
from co2.task import Batch, Package, Published
from tasks.shared.evaluation import evaluating, total
from tasks.shared.loader import load
from tasks.shared.optimizer import make_optimizer
from tasks.shared.paces import TEXT
from tasks.shared.randomness import FULL_WIDTH, initial_std, seeded
from tasks.shared.sampling import Sampler, Stretches, evaluated, validation_samples
from tasks.text.attention import full_windows
from tasks.text.losses import token_losses
from tasks.text.masking import IGNORED, Masking, Vocabulary, masked
from tasks.text.portable import (
    as_robertas,
    config_json,
    other_vocabulary,
    robertas_files,
    tokenizer_of,
    unlike,
)
from tasks.text.store import Store
from tasks.text.text import Window, described, num_windows, opened, unigram_entropy, windows

if TYPE_CHECKING:
    from transformers import RobertaConfig

    from co2.comm.mesh import Mesh

PUBLIC_VOCAB_SIZE = 50265
"""Size of RoBERTa's own vocabulary, with which wikibooks is tokenized by default."""

WIKIBOOKS = 6_000_000_000
"""Tokens of its training part, about."""

_ADDED = 4
"""Number of tokens that a learned vocabulary lacks: <s>, <pad>, <unk> and <mask>."""
_EVAL_TOKENS = 4096
"""Tokens of one evaluation batch."""
_EVAL_KEY = 1907_11692
"""First part of the key of validation masks, in place of the seed, on which they do not depend."""


_PREFIX = "language."
"""What the names of this model's weights begin with, and those of transformers' do not."""
_TOLD = ("num_attention_heads", "hidden_act", "layer_norm_eps", "pad_token_id")
"""What config.json tells of the model beside the shapes of its weights."""


class Size(Enum):
    smoke = "smoke"
    base = "base"
    large = "large"


class CorpusName(Enum):
    embedded = "embedded"
    wikibooks = "wikibooks"


SHAPES = {
    Size.smoke: (2, 4, 64),  # 0.14 M parameters with a context of 32 and a vocabulary of 512
    Size.base: (12, 12, 768),  # 125 M parameters with RoBERTa's context and vocabulary
    Size.large: (24, 16, 1024),  # 355 M
}
"""Layers, heads, width."""


@dataclass
class ModelConfig(Limited):
    """What roberta and glue share."""

    size: Size = Size.smoke
    """base and large are RoBERTa's; smoke is a small one for a laptop."""
    context: Annotated[int, Range(4)] = 32
    """Tokens that the model reads at once, <s> and </s> included."""
    vocab_size: Annotated[int, Range(257, 1_000_000)] = 512
    """Size of the vocabulary that is learned from the text. That of wikibooks is of its
    tokenizer, by default RoBERTa's 50265."""
    corpus: CorpusName = CorpusName.embedded
    """embedded: Python source that every installation has. wikibooks: see tasks.prepare.
    Where data.path=FILE_OR_FOLDER is given, it replaces either."""
    pre_norm: bool = False
    """Whether layers are normalized where they begin, as Wettig et al. do, and not where they
    end."""
    dropout: Decay = 0.0
    """Rate of dropout in embeddings, attention and residuals."""
    layers: Count | None = None
    """Blocks of the model, in place of those that its size has."""
    eval_samples: Count | None = None
    """Number of validation windows in one evaluation, spread evenly; null takes all."""


class MaskedLM(nn.Module):
    """RoBERTa with its head applied to the chosen places only. With a vocabulary of 50265 the head
    is most of the work of a small model."""

    def __init__(self, shape: "RobertaConfig") -> None:
        from transformers import AutoModelForMaskedLM  # takes seconds

        super().__init__()
        self.language = AutoModelForMaskedLM.from_config(shape)
        self.language.set_attn_implementation(full_windows())
        begin_as_waves(self.language.base_model.embeddings.position_embeddings, shape)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Return logits [B, K, vocabulary] at `places` [B, K] of `tokens` [B, L]."""
        hidden = self.language.base_model(input_ids=tokens).last_hidden_state
        chosen = places.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
        return self.language.lm_head(hidden.gather(1, chosen))


class RoBERTa:
    """The task `roberta`. A sample is <s>, `context` - 2 tokens of text, and </s>.

    This is FULL-SENTENCES of the paper's section 4.2, except that windows also end within
    sentences. A window is filled to its last token across the ends of sentences and documents, with
    one </s> between documents, so nothing is padded.
    """

    @dataclass
    class Config(ModelConfig):
        mask_share: PartShare = 0.15
        """Share of a window's tokens that are predicted."""
        mask_masked: Share = 0.8
        """Share of these that <mask> replaces."""
        mask_random: Share = 0.1
        """Share of these that a random token replaces. The others are left as they are."""

        def __post_init__(self) -> None:
            super().__post_init__()
            rest = 1 - self.mask_masked
            hint = f"must be at most what mask_masked={self.mask_masked} leaves, {rest:.4g}"
            require(self.mask_random <= rest + 1e-9, "mask_random", self.mask_random, hint)

    version = 1
    pace = TEXT
    unit = "tokens"

    def __init__(
        self, config: Config, train: TrainConfig, optim: OptimConfig, data: DataConfig
    ) -> None:
        self.config, self.train, self.optim, self.data = config, train, optim, data
        self.units_per_sample = config.context
        self._inside = config.context - 2
        self._masking = Masking(config.mask_share, config.mask_masked, config.mask_random)
        self._opened: Store | None = None
        self._validation = np.empty(0, np.int64)  # the windows that an evaluation takes

    def setup(self, num_workers: int) -> None:
        """See `Task.setup`. The first run on a corpus tokenizes it: about 10 s for 16 MB."""
        self._opened = text_store("roberta", self.config, self.data)
        self._sampler(num_workers)
        available = num_windows(self._opened.count("val"), self._inside, overlap=0)
        part = self.data.validation
        self._validation = validation_samples(available, self.config.eval_samples, part)

    def model(self) -> nn.Module:
        """See `Task.model`. Any device: `with torch.device("meta")` counts parameters for free."""
        shape = architecture(self.config, self.vocabulary.size)
        with seeded(self.train.seed):
            return MaskedLM(shape)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return make_optimizer(model, self.optim)

    def batches(self, mesh: "Mesh", start: int) -> Iterator[Batch]:
        """See `Task.batches`. A batch is what `masked` returns for windows of `context` tokens.

        The mask of a window is a pure function of (seed, epoch, window).
        """
        sampler = self._sampler(mesh.num_workers, mesh.stretches)

        def make(draw: int) -> tuple[Tensor, ...]:
            samples, epoch = sampler.indices(draw, mesh.worker), sampler.epoch(draw)
            return self._batch("train", samples, self.train.seed, epoch)

        return load(make, count(start), self.data.workers, mesh.device)

    def blank(self) -> Batch:
        """See `Planned`."""
        rows, places = self.train.batch_size, self._masking.num_chosen(self.config.context)
        lengths = self.config.context, places, places
        return tuple(torch.zeros(rows, length, dtype=torch.int64) for length in lengths)

    def published(self) -> Published | None:
        """See `Planned`."""
        if not is_public(self.config, self.data):
            return None
        return Published(num_windows(WIKIBOOKS, self._inside, overlap=0), 2 * WIKIBOOKS)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy of the chosen tokens in nats, computed in fp32 even under autocast."""
        losses, counted = _losses(model, batch, self.train.compile)
        return losses.sum() / counted.clamp(min=1)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """See `Task.evaluate`. The masks are the same in all evaluations of all runs.

        Returns:
            "loss": mean cross-entropy over the chosen tokens of the validation windows, in nats;
            "perplexity": its exponential.
        """
        device = next(model.parameters()).device
        chosen, size = self._validation, max(1, _EVAL_TOKENS // self.config.context)

        def compute(batch: int) -> Tensor:
            inside = self._batch("val", chosen[batch * size : (batch + 1) * size], _EVAL_KEY)
            losses, counted = _losses(model, tuple(tensor.to(device) for tensor in inside))
            return torch.stack([losses.double().sum(), counted.double()])

        with evaluating(model):
            whole, counted = total(compute, num_batches=-(-len(chosen) // size))
        loss = whole / max(counted, 1.0)
        return {"loss": loss, "perplexity": torch.tensor(loss, dtype=torch.float64).exp().item()}

    def baselines(self) -> dict[str, float]:
        """See `Task.baselines`. "unigram_entropy" is that of the ordinary tokens of the whole
        validation text, in nats."""
        return {"unigram_entropy": self._unigram_entropy}

    def fingerprint(self) -> dict[str, object]:
        """See `Task.fingerprint`."""
        name = self.config.corpus.name if self.data.path is None else self.data.path
        samples = evaluated(self.data.validation, self._validation)
        return {**described(self._store, name), "evaluated": samples}

    def package(self, model: nn.Module) -> Package:
        """See `Portable`: what transformers reads."""
        public = is_public(self.config, self.data)
        return packaged(model, "AutoModelForMaskedLM", self._store, public)

    def adopted(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Portable`."""
        return adopted(weights)

    def refusal(
        self, model: nn.Module, config: Mapping[str, Any], tokenizer: str | None
    ) -> str | None:
        """See `Portable`."""
        public = is_public(self.config, self.data)
        return refusal(model, config, tokenizer, self._store, public, self.fingerprint()["data"])

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's vocabulary. Before `setup`, that of wikibooks counts as RoBERTa's."""
        return vocabulary(self.config, self.data, self._opened)

    @property
    def _store(self) -> Store:
        assert self._opened is not None, "call setup() first"
        return self._opened

    @cached_property
    def _unigram_entropy(self) -> float:
        tokens = self._store.tokens("val")
        return unigram_entropy(tokens[tokens != self._store.meta["separator"]])

    @cached_property
    def _ids(self) -> np.ndarray:
        return roberta_ids(self._store, is_public(self.config, self.data))

    def _batch(
        self, part: str, indices: np.ndarray, *key: int | np.ndarray
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return masked windows as `masked` does, each with the key (*key, window)."""
        tokens = windows(self._store.tokens(part), indices, self._inside, overlap=0).numpy()
        rows = np.empty((len(tokens), self.config.context), np.int64)
        rows[:, 0], rows[:, -1] = Vocabulary.START, Vocabulary.END
        try:
            rows[:, 1:-1] = self._ids[tokens]
        except IndexError:
            file, size = self._store.folder / f"{part}.bin", len(self._ids)
            hint = f"holds token {tokens.max()}, the vocabulary ends at {size}; prepare it again"
            raise ConfigError("data.root", self.data.root, f"{file} {hint}") from None
        made = masked(rows, self.vocabulary, self._masking, *key, indices)
        seen, places, targets = map(torch.from_numpy, made)
        return seen, places, targets

    def _sampler(self, num_workers: int, stretches: Stretches = ()) -> Sampler:
        samples = num_windows(self._store.count("train"), self._inside, overlap=0)
        return Sampler.of(self.train, samples, num_workers, stretches)


def is_public(config: ModelConfig, data: DataConfig) -> bool:
    """Whether the tokens of the data are RoBERTa's ids already."""
    return data.path is None and config.corpus is CorpusName.wikibooks


def vocabulary(config: ModelConfig, data: DataConfig, store: Store | None) -> Vocabulary:
    """The model's vocabulary, of the text in `store`; None where it is not open yet."""
    if not is_public(config, data):
        return Vocabulary(config.vocab_size + _ADDED)
    return Vocabulary(PUBLIC_VOCAB_SIZE if store is None else store.meta["vocab_size"])


def text_store(node: str, config: ModelConfig, data: DataConfig) -> Store:
    """The text that the vocabulary is of.

    Args:
        node: of the configuration that `config` is, for errors.
    Raises:
        ConfigError: as `opened`; the store holds no text, or its documents do not end as RoBERTa's.
    """
    corpus, key = config.corpus.name, f"{node}.corpus"
    window = Window(f"{node}.context", config.context, config.context - 2)
    store = opened(data, key, corpus, config.vocab_size, window)
    if is_public(config, data):
        end, ours = store.meta["separator"], Vocabulary.END
        hint = (
            f"documents of {store.folder} end with {end}, RoBERTa's with {ours}; prepare it again"
        )
        require(end == ours, key, corpus, hint)
    for part, facts in store.meta["parts"].items():
        hint = f"{store.folder}: {part}.bin holds separators and no text"
        name, value = (key, corpus) if data.path is None else ("data.path", data.path)
        require(facts["tokens"] > facts["documents"], name, value, hint)
    return store


def roberta_ids(store: Store, public: bool) -> np.ndarray:
    """RoBERTa's id of each token of a store, int64 [its vocabulary].

    A learned tokenizer has words and a separator, which becomes </s>; a public one has RoBERTa's
    ids already.
    """
    meta = store.meta
    if public:
        return np.arange(meta["vocab_size"])
    others = np.delete(np.arange(meta["vocab_size"]), meta["separator"])
    ids = np.full(meta["vocab_size"], Vocabulary.END)
    ids[others] = Vocabulary.FIRST_WORD + np.arange(len(others))
    return ids


def roberta_tokenizer(store: Store, public: bool, mask: int) -> str | None:
    """tokenizer.json with RoBERTa's ids for the tokens of a store; None where it has none.

    Args:
        mask: the id of <mask>.
    """
    own = tokenizer_of(store)
    if own is None or public:
        return own
    return as_robertas(own, roberta_ids(store, public), store.meta["separator"], mask)


def packaged(model: nn.Module, loader: str, store: Store, public: bool) -> Package:
    """See `Portable`.

    Args:
        model: with a model of transformers as `language`.
        loader: the class of transformers that finds it.
        store: of the text that the vocabulary is of.
        public: see `is_public`.
    """
    config = _config(model)
    tokenizer = roberta_tokenizer(store, public, Vocabulary(config.vocab_size).mask)
    length = config.max_position_embeddings - Vocabulary.PAD - 1
    files = {
        "config.json": config_json(config, type(model.get_submodule("language")).__name__),
        **robertas_files(tokenizer, length),
    }
    usage = f"""from transformers import AutoTokenizer, {loader}

model = {loader}.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")"""
    return Package(files, usage, _PREFIX)


def adopted(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """See `Portable`. The hub's RoBERTa has a pooler, which neither task uses, and older files
    have the numbers of the positions."""
    return {
        _PREFIX + name: weight
        for name, weight in weights.items()
        if ".pooler." not in name and not name.endswith(".position_ids")
    }


def refusal(
    model: nn.Module,
    config: Mapping[str, Any],
    tokenizer: str | None,
    store: Store,
    public: bool,
    data: object,
) -> str | None:
    """See `Portable`; the others as for `packaged`, and the name of the data."""
    here = _config(model)
    mask = Vocabulary(here.vocab_size).mask
    ours = roberta_tokenizer(store, public, mask)
    return unlike(config, here, _TOLD) or other_vocabulary(tokenizer, ours, data, "wikibooks")


def _config(model: nn.Module) -> "RobertaConfig":
    return cast("RobertaConfig", model.get_submodule("language").config)


def architecture(config: ModelConfig, vocab_size: int) -> "RobertaConfig":
    """RoBERTa of a size, for a vocabulary that counts special tokens."""
    from transformers import RobertaConfig, RobertaPreLayerNormConfig  # takes seconds

    layers, heads, width = SHAPES[config.size]
    # Both have the same fields.
    kind = cast(
        "type[RobertaConfig]", RobertaPreLayerNormConfig if config.pre_norm else RobertaConfig
    )
    return kind(
        vocab_size=vocab_size,
        # Positions are counted from the id of <pad> + 1 on.
        max_position_embeddings=config.context + Vocabulary.PAD + 1,
        num_hidden_layers=config.layers or layers,
        num_attention_heads=heads,
        hidden_size=width,
        intermediate_size=4 * width,
        initializer_range=initial_std(width),
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.dropout,
        bos_token_id=Vocabulary.START,
        pad_token_id=Vocabulary.PAD,
        eos_token_id=Vocabulary.END,
        use_cache=False,
        attn_implementation="sdpa",  # type: ignore[call-arg]  # one of PreTrainedConfig's own
    )


def begin_as_waves(positions: nn.Embedding, shape: "RobertaConfig") -> None:
    """Let the learned positions of a model narrower than RoBERTa's begin as sines and cosines
    (Vaswani et al., "Attention Is All You Need", 2017, section 3.5), of wavelengths from 2π to some
    200π, with twice the deviation of the other weights.

    A masked token can be told from its neighbours only. With random positions the smoke model does
    not see for some 2,000 of its 3,600 steps which these are, and stays at a loss near 4.4; methods
    are then told apart by how soon it does, which follows the learning rate in no order.
    """
    number, width = positions.weight.shape
    if width >= FULL_WIDTH:
        return
    frequencies = torch.logspace(0, -2, width // 2 + 1, device=positions.weight.device)[:-1]
    angles = torch.arange(number, device=positions.weight.device)[:, None] * frequencies
    both = torch.cat([angles.sin(), angles.cos()], dim=1)
    with torch.no_grad():
        positions.weight.copy_(2 * math.sqrt(2) * shape.initializer_range * both)


def _losses(model: nn.Module, batch: Batch, compiled: bool = False) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy at the chosen places, fp32 [B * K] in nats, with 0 at places that do
    not count; and the number of places that do."""
    assert isinstance(batch, tuple)
    seen, places, targets = batch
    losses = token_losses(model(seen, places), targets, compiled=compiled)
    return losses, (targets != IGNORED).sum()
