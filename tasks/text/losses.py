"""The cross-entropy of tokens: of a small language model, the part with most memory traffic."""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tasks.text.masking import IGNORED


def token_losses(
    logits: Tensor,
    targets: Tensor,
    vocab_size: int | None = None,
    reduction: str = "none",
    compiled: bool = False,
) -> Tensor:
    """The cross-entropy at each place, fp32 [N] in nats, also under autocast; 0 where the target is
    `IGNORED`.

    Args:
        logits: of the N places, [..., V].
        targets: [...].
        vocab_size: logits beyond so many are of no token; None: there are none.
        reduction: "mean": the mean over the places that count instead.
        compiled: fuse the conversion to fp32, the softmax and its gradient. Else each is a tensor
            as large as the logits in fp32, which is written and read again. Losses may differ in
            the last bits.
    """
    losses = _compiled() if compiled else _losses
    with torch.autocast(logits.device.type, enabled=False):
        return losses(logits, targets, vocab_size or logits.size(-1), reduction)


def _losses(logits: Tensor, targets: Tensor, vocab_size: int, reduction: str) -> Tensor:
    of_tokens = logits[..., :vocab_size].flatten(0, -2).float()
    where = targets.flatten()
    return F.cross_entropy(of_tokens, where, reduction=reduction, ignore_index=IGNORED)


@cache
def _compiled() -> Callable[[Tensor, Tensor, int, str], Tensor]:
    return torch.compile(_losses)
