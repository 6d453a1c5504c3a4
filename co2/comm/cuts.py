"""How vectors are cut into parts that one pass of arithmetic or one message takes.

- `pack` puts neighbours together as long as they fit: the tensors of a flat vector (flat.py), rows
  of blocks (dct_mean.py), chunks (sparse_mean.py), what one collective carries (collectives.py).
- `segmented` cuts a vector after every so many elements, and tells which tensors are in each part:
  the chunks of servers (compressed_mean.py), the elements of a mask (compressed_adam.py).
- `part_between` does it for any two places: codes that are packed together (codec.py).

Sums are taken part by part, so another cut may change their last bits.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a vector."""

    span: slice | int
    """Its elements; of a vector that lies in rows, one row."""
    share: float = 1.0
    """How much each element counts in a sum over the replica's workers, so that all elements count
    once: 1/N for those that all N workers hold."""

    def of(self, vector: Tensor) -> Tensor:
        """Return this part of a vector, as a view."""
        return vector[self.span]


@dataclass(frozen=True, kw_only=True)
class SegmentedPart(Part):
    """A part of a vector that consists of segments, such as parameter tensors."""

    segments: slice
    """Those that have elements in it."""
    counts: list[int]
    """How many elements each of them has in it."""

    def of_elements(self, values: Tensor) -> Tensor:
        """From values (…, segments) return those of the elements (…, numel), or (…, 1) if all of
        them have the same one."""
        own = values[..., self.segments]
        if len(self.counts) == 1:
            return own
        every = zip(own.split(1, dim=-1), self.counts, strict=True)
        return torch.cat([one.expand(*own.shape[:-1], count) for one, count in every], dim=-1)


def segmented(sizes: Sequence[int], most: int) -> list[SegmentedPart]:
    """Cut a vector, of segments of these sizes, each at least 1, after every `most` elements."""
    starts = [*accumulate(sizes, initial=0)]
    numel = starts.pop()
    return [part_between(starts, at, min(at + most, numel)) for at in range(0, numel, most)]


def part_between(starts: Sequence[int], begin: int, end: int) -> SegmentedPart:
    """Return the elements from `begin` to `end` of a vector whose segments, of at least one element
    each, begin at `starts`."""
    segments = slice(bisect_right(starts, begin) - 1, bisect_left(starts, end))
    bounds = [begin, *starts[segments][1:], end]
    counts = [after - before for before, after in pairwise(bounds)]
    return SegmentedPart(span=slice(begin, end), segments=segments, counts=counts)


def pack(
    sizes: Sequence[int], most: int, kinds: Sequence[Hashable] | None = None
) -> Iterator[slice]:
    """Yield slices of neighbours whose sizes add up to at most `most`, or of a single larger one.

    Args:
        kinds: of each; only neighbours of one kind are put together. None: all are of one.
    """
    first = used = 0
    for index, size in enumerate(sizes):
        other = kinds is not None and kinds[index] != kinds[first]
        if index > first and (other or used + size > most):
            yield slice(first, index)
            first, used = index, 0
        used += size
    if sizes:
        yield slice(first, len(sizes))
