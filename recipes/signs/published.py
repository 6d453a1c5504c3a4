"""Published trainings, as far as their schedules decide when Adam sends what.

A number without a source is marked "assumed".
"""

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Training:
    """A published training, as far as it decides when Adam sends what."""

    steps: int
    freeze_step: int
    """The step at which 1-bit Adam freezes v."""
    warmup: int
    """The step at which 0/1 Adam freezes v: the end of the learning rate's warm-up."""
    lr: Callable[[int], float]
    """The learning rate of a step after `warmup`, as a share of the largest."""
    source: str
    """Where each number is from."""


def _bert(step: int) -> float:
    return 0.99 ** max(0, (step - 12_500) // 520)


def _cosine(steps: int, warmup: int, least: float) -> Callable[[int], float]:
    def lr(step: int) -> float:
        done = (step - warmup) / (steps - warmup)
        return least + (1 - least) * (1 + math.cos(math.pi * done)) / 2

    return lr


def _imagenet(step: int) -> float:
    return 0.1 ** (step // (30 * _EPOCH))


_EPOCH = 1_281_167 // 256

TRAININGS = {
    "BERT-base": Training(
        118_000,
        16_000,
        12_500,
        _bert,
        "warm-up of 12,500 steps, then × 0.99 every 520 steps: the paper. Freeze at 16,000: "
        "DeepSpeed's tutorial of 1-bit Adam. 118,000 steps: assumed",
    ),
    "BERT-large": Training(
        152_000,
        23_000,
        12_500,
        _bert,
        "warm-up of 12,500 steps, then × 0.99 every 520 steps: the paper. Freeze at 23,000: "
        "DeepSpeed's tutorial of 1-bit Adam. 152,000 steps, of which that is 15 %: assumed",
    ),
    "GPT-2": Training(
        300_000,
        60_000,
        3_000,
        _cosine(300_000, 3_000, 1 / 15),
        "all assumed: 300,000 steps, a warm-up of 1 %, a cosine down to a fifteenth, freeze after "
        "20 %",
    ),
    "ImageNet": Training(
        90 * _EPOCH,
        round(0.15 * 90 * _EPOCH),
        5 * _EPOCH,
        _imagenet,
        "90 epochs of batches of 256, × 0.1 at epochs 30 and 60: the paper. Freeze of 1-bit Adam "
        "after 15 %, that of 0/1 Adam after 5 epochs: assumed",
    ),
}
