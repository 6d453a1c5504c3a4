"""GPT-2 from scratch: next-token prediction on text.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019). The implementation is
that of transformers; the weights are random at the start, as in GPT-2 (see `initial_std`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from co2.limits import Decay
from co2.task import Package
from tasks.shared.randomness import initial_std, seeded
from tasks.text.attention import full_windows
from tasks.text.causal import CausalText
from tasks.text.portable import config_json, unlike

if TYPE_CHECKING:
    from transformers import GPT2Config, GPT2LMHeadModel


class Size(Enum):
    tiny = "tiny"
    smoke = "smoke"
    small = "small"
    medium = "medium"
    large = "large"
    xl = "xl"


SHAPES = {
    Size.tiny: (3, 4, 64),  # 0.19 M parameters with a context of 64 and a vocabulary of 512
    Size.smoke: (4, 4, 128),  # 1.3 M parameters with a context of 128 and a vocabulary of 4096
    Size.small: (12, 12, 768),  # 124 M; this and all below with GPT-2's context and vocabulary
    Size.medium: (24, 16, 1024),  # 355 M
    Size.large: (36, 20, 1280),  # 774 M
    Size.xl: (48, 25, 1600),  # 1558 M
}
"""Layers, heads, width."""

_TOLD = (
    *("n_head", "activation_function", "layer_norm_epsilon", "scale_attn_weights"),
    *("scale_attn_by_inverse_layer_idx", "tie_word_embeddings"),
)
"""What config.json tells of the model beside the shapes of its weights."""
_USAGE = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")"""


class GPT2(CausalText):
    """The task `gpt2`."""

    @dataclass
    class Config(CausalText.Config):
        size: Size = Size.smoke
        """small to xl are GPT-2's; tiny and smoke are small ones for a laptop."""
        dropout: Decay = 0.0
        """Rate of dropout in embeddings, attention and residuals."""

    name = "gpt2"

    def model(self) -> nn.Module:
        """See `Task.model`. On the device "meta" it takes no memory, to count parameters."""
        with seeded(self.train.seed):
            config, shape = self.config, self.config.cut(SHAPES[self.config.size])
            return transformer(self.padded_vocab_size, config.context, shape, config.dropout)

    def padded_logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        return model(input_ids=tokens).logits

    def package(self, model: nn.Module) -> Package:
        """See `Portable`: what transformers reads. It takes the padding off the model, because
        transformers would sample from the logits of these rows too."""
        cast("GPT2LMHeadModel", model).resize_token_embeddings(self.vocab_size)
        ends = {"bos_token_id": self.separator, "eos_token_id": self.separator}
        text = config_json(_config(model), "GPT2LMHeadModel", use_cache=True, **ends)
        plain = super().package(model)
        return replace(plain, files={**plain.files, "config.json": text}, usage=_USAGE)

    def adopted(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Portable`. The hub's GPT-2 has no head, so that no name begins with "transformer.",
        and keeps the masks of its attention; its vocabulary is not padded."""
        whole = {
            name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}": weight
            for name, weight in weights.items()
            if not name.endswith((".attn.bias", ".attn.masked_bias"))
        }
        for name in whole.keys() & {"transformer.wte.weight", "lm_head.weight"}:
            missing = self.padded_vocab_size - len(whole[name])
            if missing == self.padded_vocab_size - self.vocab_size:
                whole[name] = F.pad(whole[name], (0, 0, 0, missing))
        return whole

    def refusal(
        self, model: nn.Module, config: Mapping[str, Any], tokenizer: str | None
    ) -> str | None:
        """See `Portable`."""
        other = unlike(config, _config(model), _TOLD)
        return other or super().refusal(model, config, tokenizer)


def _config(model: nn.Module) -> "GPT2Config":
    return cast("GPT2Config", model.config)


def transformer(
    vocab_size: int, context: int, shape: tuple[int, int, int], dropout: float
) -> nn.Module:
    """GPT-2 of this shape: layers, heads, width."""
    from transformers import GPT2Config, GPT2LMHeadModel  # takes seconds

    layers, heads, width = shape
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocab_size,
            n_positions=context,
            n_layer=layers,
            n_head=heads,
            n_embd=width,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            activation_function="gelu_pytorch_tanh",  # GPT-2's own, "gelu_new", as one operation
            initializer_range=initial_std(width),
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation=full_windows(),  # type: ignore[call-arg]  # PreTrainedConfig's own
        )
    )
