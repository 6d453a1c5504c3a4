"""Fragments: parts of a model that are synchronized one after the other.

Each has a flat vector, a mean and an outer state of its own. The link carries as many bytes as for
the whole model at once, but each mean is under way for a share of the round only.
"""

from torch import Tensor

from co2.comm.background_mean import BackgroundMean
from co2.comm.flat import FlatParams
from co2.errors import require
from co2.methods.base import Method


class Fragment:
    """Some of the trained tensors, with a mean of their own.

    Args:
        prefix: of the names of what it holds.
        params: the tensors; None for all that are trained.
        beside: see `BackgroundMean`.
    """

    def __init__(
        self,
        method: Method,
        prefix: str = "",
        params: list[Tensor] | None = None,
        beside: BackgroundMean | None = None,
    ) -> None:
        self.method, self.prefix = method, prefix
        self.flat = FlatParams(method.optimizer, method.comm.device, params)
        self.mean = method.new_mean(self.flat, f"{prefix}buffer", beside=beside)

    def hold(
        self, name: str, tensor: Tensor, *, replicated: bool = False, saved: bool = True
    ) -> Tensor:
        """See `Method.hold`."""
        return self.method.hold(f"{self.prefix}{name}", tensor, replicated=replicated, saved=saved)


def dealt(tensors: list[Tensor], fragments: int, key: str) -> list[list[Tensor]]:
    """Deal whole tensors to fragments of near equal size: the largest first, each to the fragment
    that has least so far.

    Args:
        key: full name of the setting that `fragments` is.
    Raises:
        ConfigError: there are fewer tensors than fragments.
    """
    hint = f"must be at most {len(tensors)}, the tensors that are trained"
    require(fragments <= len(tensors), key, fragments, hint)
    parts: list[list[Tensor]] = [[] for _ in range(fragments)]
    held = [(0, 0)] * fragments  # of empty tensors, too, each has one at least
    for tensor in sorted(tensors, key=Tensor.numel, reverse=True):
        number = held.index(min(held))
        parts[number].append(tensor)
        held[number] = (held[number][0] + tensor.numel(), held[number][1] + 1)
    return parts


def offset(number: int, tau: int, fragments: int) -> int:
    """Return round(number · τ/P), halves up: by how many steps a fragment's round is behind that of
    fragment 0. No two fragments share one, because they are τ/P ≥ 1 apart before they are rounded.
    """
    return (2 * number * tau + fragments) // (2 * fragments)
