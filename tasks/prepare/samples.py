"""Reads all samples of a data set in threads, and tells which are broken."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from tasks.shared.progress import progress

_AT_ONCE = 256
"""Samples that a thread reads before it tells of them."""


def broken(what: str, count: int, fault_of: Callable[[int], str | None]) -> Iterator[str]:
    """Yield the faults of samples in their order, with progress.

    Threads are enough: decoding and waiting for a disk release the interpreter's lock.

    Args:
        what: text of the progress.
        count: number of samples.
        fault_of: reads the sample of this number; returns what is wrong with it, or None.
    """

    def read(numbers: range) -> tuple[int, list[str]]:
        found = (fault_of(number) for number in numbers)
        return len(numbers), [fault for fault in found if fault is not None]

    pieces = [range(at, min(at + _AT_ONCE, count)) for at in range(0, count, _AT_ONCE)]
    with progress(what, count) as advance, ThreadPoolExecutor(os.cpu_count()) as pool:
        for done, faults in pool.map(read, pieces):
            yield from faults
            advance(done)
