"""Attention over windows that are full, for models of transformers.

Their own `sdpa` first looks for padding and for several texts in a row. While a model is traced,
this search cannot be skipped, so that PyTorch's attention gets a mask, with which FlashAttention
cannot run; in eager mode it waits for the device in every forward pass. Our windows have neither.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

_NAME = "full_windows"


def full_windows() -> str:
    """Register the attention with transformers, and return its name: `attn_implementation`."""
    from transformers import AttentionInterface  # takes seconds

    AttentionInterface.register(_NAME, _attend)
    return _NAME


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return [B, T, H, D] from queries, keys and values [B, H, T, D]; causal if the module is."""
    assert attention_mask is None, "transformers makes none for an attention that it does not know"
    mixed = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None,
        dropout_p=dropout,
        is_causal=bool(module.is_causal),
        scale=scaling,
    )
    return mixed.transpose(1, 2).contiguous(), None
