"""Kept progress (ours), of the whole model or of fragments. A round is one step here."""

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

import torch
from torch import Tensor

from tests.reference.replica import Replica, State, correct, mean, moments


def sent_at(tau: int, fragments: int) -> list[int]:
    """By fragment: round(f tau / P), halves up."""
    return [math.floor(Fraction(f * tau, fragments) + Fraction(1, 2)) for f in range(fragments)]


def rows(tensor: Tensor) -> list[Tensor]:
    """Along the first axis."""
    return list(tensor) if tensor.ndim else [tensor]


def cut(sizes: list[int], fragments: int) -> list[list[int]]:
    """Rows, by their places: P parts of the whole, each with the rows that begin in it."""
    begins = [sum(sizes[:place]) for place in range(len(sizes))]
    ends = [sum(sizes) * (f + 1) // fragments for f in range(fragments)]
    parts: list[list[int]] = [[] for _ in range(fragments)]
    for place, begin in enumerate(begins):
        parts[sum(end <= begin for end in ends)].append(place)
    return parts


def co2_keep(
    replicas: list[Replica],
    tau: int,
    outer_momentum: float,
    momentum_weight: float,
    keep_local: float = 0.5,
    delay: int | None = None,
    fragments: int | None = None,
    average_moments: bool = False,
    blocking_share: float = 0.0,
) -> Iterator[Tensor | None]:
    """P fragments, each with a center c and a momentum u that are the same on all replicas.

    Without a number there are 12, or as many as steps; with moments there is one.

    Fragment f is sent after the steps s with s = round(f tau / P) modulo tau: delta, the mean of
    all own steps since it was sent before. It arrives `delay` steps later; without a delay, as the
    next fragment is sent; in early rounds at once. An arrival is before what is sent in the same
    step. Then u = beta u + delta and c = c + delta + w u, and replica i goes on from c + kappa q^i,
    where q^i is the sum of its own steps since. All steps count, whatever kappa cut. Consensus
    shows c + delta in flight + the mean of the own steps since, of the whole model only after a
    round. Every row of a parameter is simulated on its own.
    """
    weights = [
        [row for p in replica.trainable() for row in rows(p.detach())] for replica in replicas
    ]
    if fragments is None:
        fragments = 1 if average_moments else min(12, tau)
    members = cut([row.numel() for row in weights[0]], fragments)
    starts = sent_at(tau, fragments)
    gaps = [b - a for a, b in itertools.pairwise([*starts, tau])]
    center = [one.clone() for one in weights[0]]
    u = [torch.zeros_like(one) for one in center]
    own = [[torch.zeros_like(one) for one in center] for _ in replicas]
    flying: dict[int, tuple[int, list[Tensor]]] = {}
    sent: State = []
    sent_after = 0

    def arrive(f: int, s: int) -> None:
        _, deltas = flying.pop(f)
        for k, delta in zip(members[f], deltas, strict=True):
            u[k] = outer_momentum * u[k] + delta
            center[k] = center[k] + delta + momentum_weight * u[k]
            for mine, since in zip(weights, own, strict=True):
                mine[k].copy_(center[k] + keep_local * since[k])
        if average_moments:
            correct(replicas, sent, s - sent_after)

    for s in itertools.count(1):
        before = [[one.clone() for one in mine] for mine in weights]
        for replica in replicas:
            replica.train(1)
        for since, mine, then in zip(own, weights, before, strict=True):
            for k in range(len(center)):
                since[k] += mine[k] - then[k]
        for f in [f for f, (due, _) in flying.items() if due == s]:
            arrive(f, s)
        for f, start in enumerate(starts):
            if (s - start) % tau == 0:
                late = gaps[f] if delay is None else delay
                if replicas[0].is_early(blocking_share):
                    late = 0
                flying[f] = (s + late, [mean(since[k] for since in own) for k in members[f]])
                for since in own:
                    for k in members[f]:
                        since[k] = torch.zeros_like(since[k])
                if average_moments:
                    sent, sent_after = moments(replicas), s
                if late == 0:
                    arrive(f, s)
        shown = [c + mean(since[k] for since in own) for k, c in enumerate(center)]
        for f, (_, deltas) in flying.items():
            for k, delta in zip(members[f], deltas, strict=True):
                shown[k] = shown[k] + delta
        of_all = fragments > 1 or s % tau == 0
        yield torch.cat([one.reshape(-1) for one in shown]) if of_all else None
