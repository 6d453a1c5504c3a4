"""Fragments: parts of a model that are synchronized one after the other.

Each has a flat vector, a mean and an outer state of its own. The link carries as many bytes as for
the whole model at once, but each mean is under way for a share of the round only.
"""

from torch import Tensor

from co2.comm.background_mean import BackgroundMean
from co2.comm.flat import FlatParams
from co2.methods.base import Method


class Fragment:
    """Some of what is trained, with a mean of its own.

    Args:
        prefix: of the names of what it holds.
        params: the tensors; None for all that are trained.
        part: see `FlatParams`.
        beside: see `BackgroundMean`.
    """

    def __init__(
        self,
        method: Method,
        prefix: str = "",
        params: list[Tensor] | None = None,
        part: tuple[int, int] | None = None,
        beside: BackgroundMean | None = None,
    ) -> None:
        self.method, self.prefix = method, prefix
        self.flat = FlatParams(method.optimizer, method.comm.device, params, part=part)
        self.mean = method.new_mean(self.flat, f"{prefix}buffer", beside=beside)

    def hold(
        self, name: str, tensor: Tensor, *, replicated: bool = False, saved: bool = True
    ) -> Tensor:
        """See `Method.hold`."""
        return self.method.hold(f"{self.prefix}{name}", tensor, replicated=replicated, saved=saved)


def offset(number: int, tau: int, fragments: int) -> int:
    """Return round(number · τ/P), halves up: by how many steps a fragment's round is behind that of
    fragment 0. No two fragments share one, because they are τ/P ≥ 1 apart before they are rounded.
    """
    return (2 * number * tau + fragments) // (2 * fragments)
