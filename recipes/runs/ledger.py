"""Which samples a run has trained on, by what its processes have written (`toy.ledger`)."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from co2.record.files import whole_lines


def doubled_and_left_out(ledgers: Iterable[Path], samples: int) -> tuple[int, int]:
    """How many samples were trained on twice within an epoch, and how many not at all in an epoch
    that the run has passed.

    Args:
        ledgers: folders, one for each time that the run as a whole was started, oldest first. One
            that was started again goes on from a checkpoint; what others had made since does not
            count.
        samples: number of samples of the training set.
    """
    kept: list[tuple[int, int, list[int]]] = []
    for folder in ledgers:
        lines = [line for path in folder.glob("*.jsonl") for line in whole_lines(path)]
        first = min((draw for draw, _, _ in lines), default=0)
        kept = [line for line in kept if line[0] < first] + lines
    seen: dict[int, Counter[int]] = {}
    for _, epoch, drawn in kept:
        seen.setdefault(epoch, Counter()).update(drawn)
    doubled = sum(count - 1 for one in seen.values() for count in one.values())
    passed = range(max(seen, default=0))
    return doubled, sum(samples - len(seen.get(epoch, ())) for epoch in passed)
