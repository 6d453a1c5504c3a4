"""Kept progress in fragments (ours), and which simulation a configuration has."""

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from tests.reference import co2
from tests.reference.replica import Replica, mean


def co2_keep(replicas: list[Replica], fragments: int = 1, **settings: Any) -> Iterator[Tensor]:
    """Kept progress: of the whole model, or of fragments."""
    if fragments == 1:
        return co2.co2_keep(replicas, **settings)
    return in_fragments(replicas, fragments=fragments, **settings)


def sent_at(tau: int, fragments: int) -> list[int]:
    """By fragment: round(f tau / P), halves up."""
    return [math.floor(Fraction(f * tau, fragments) + Fraction(1, 2)) for f in range(fragments)]


def dealt(sizes: list[int], fragments: int) -> list[list[int]]:
    """Whole tensors, by their places: the largest first, each to the smallest fragment."""
    parts: list[list[int]] = [[] for _ in range(fragments)]
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        totals = [sum(sizes[one] for one in part) for part in parts]
        parts[totals.index(min(totals))].append(place)
    return parts


def in_fragments(
    replicas: list[Replica],
    tau: int,
    fragments: int,
    outer_momentum: float,
    momentum_weight: float,
    keep_local: float = 0.5,
    delay: int | None = None,
    blocking_share: float = 0.0,
) -> Iterator[Tensor]:
    """P fragments: a round is one step here.

    Fragment f is sent after the steps s with s = round(f tau / P) modulo tau. `delay` steps later
    its mean arrives; without a delay, as the next fragment is sent. An arrival is before what is
    sent in the same step. Consensus shows c + delta in flight + the mean of the own steps since.
    Every parameter is simulated on its own.
    """
    weights = [[p.detach() for p in replica.trainable()] for replica in replicas]
    sizes = replicas[0].sizes()
    members = dealt(sizes, fragments)
    starts = sent_at(tau, fragments)
    gaps = [b - a for a, b in itertools.pairwise([*starts, tau])]
    center = [one.clone() for one in weights[0]]
    u = [torch.zeros_like(one) for one in center]
    own = [[torch.zeros_like(one) for one in center] for _ in replicas]
    flying: dict[int, tuple[int, list[Tensor]]] = {}

    def arrive(f: int) -> None:
        _, deltas = flying.pop(f)
        for k, delta in zip(members[f], deltas, strict=True):
            u[k] = outer_momentum * u[k] + delta
            center[k] = center[k] + delta + momentum_weight * u[k]
            for mine, since in zip(weights, own, strict=True):
                mine[k].copy_(center[k] + keep_local * since[k])

    for s in itertools.count(1):
        before = [[one.clone() for one in mine] for mine in weights]
        for replica in replicas:
            replica.train(1)
        for since, mine, then in zip(own, weights, before, strict=True):
            for k in range(len(center)):
                since[k] += mine[k] - then[k]
        for f in [f for f, (due, _) in flying.items() if due == s]:
            arrive(f)
        for f, start in enumerate(starts):
            if (s - start) % tau == 0:
                late = gaps[f] if delay is None else delay
                if replicas[0].is_early(blocking_share):
                    late = 0
                flying[f] = (s + late, [mean(since[k] for since in own) for k in members[f]])
                for since in own:
                    for k in members[f]:
                        since[k] = torch.zeros_like(since[k])
                if late == 0:
                    arrive(f)
        shown = [c + mean(since[k] for since in own) for k, c in enumerate(center)]
        for f, (_, deltas) in flying.items():
            for k, delta in zip(members[f], deltas, strict=True):
                shown[k] = shown[k] + delta
        yield torch.cat([one.reshape(-1) for one in shown])
