"""Streaming DiLoCo (2501.18512): a round is one step here.

Layer l belongs to fragment l mod P. Fragment p syncs after the steps n with
n = (p + 1) round(tau / P) modulo tau. `delay` steps earlier the mean of outer - local is started,
if there was a step by then; at the sync DiLoCo's outer step is taken with it, and
local <- (1 - mix) outer + mix local. Every parameter is simulated on its own.
"""

import re
from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor

from tests.reference.replica import Replica, mean


def layer(name: str) -> str:
    """The path up to the first number, or the whole name."""
    found = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", name)
    return found.group() if found else name


def trained(replica: Replica) -> dict[str, Tensor]:
    known = {id(parameter) for parameter in replica.trainable()}
    return {n: p.detach() for n, p in replica.model.named_parameters() if id(p) in known}


def split(names: list[str], fragments: int) -> list[list[str]]:
    """The parameters' names by fragment."""
    result: list[list[str]] = [[] for _ in range(fragments)]
    index, previous = -1, None
    for name in names:
        if layer(name) != previous:
            index, previous = index + 1, layer(name)
        result[index % fragments].append(name)
    return result


def rounds(
    replicas: list[Replica],
    tau: int,
    fragments: int,
    delay: int,
    mixing: float,
    outer_lr: float,
    outer_momentum: float,
) -> Iterator[None]:
    local = [trained(replica) for replica in replicas]
    outer = {name: value.clone() for name, value in local[0].items()}
    v = {name: torch.zeros_like(value) for name, value in outer.items()}
    arriving: dict[tuple[int, str], Tensor] = {}
    members = split(list(outer), fragments)
    for n in count(1):
        for replica in replicas:
            replica.train(1)
        for p in range(fragments):
            phase = (p + 1) * round(tau / fragments)
            for name in members[p]:
                if (n + delay - phase) % tau == 0:
                    d = mean(outer[name] - weights[name] for weights in local)
                    arriving[n + delay, name] = d
                d = arriving.pop((n, name), None)
                if d is None:
                    continue
                v[name] = outer_momentum * v[name] + d
                outer[name] = outer[name] - outer_lr * (d + outer_momentum * v[name])
                for weights in local:
                    mixed = (1 - mixing) * outer[name] + mixing * weights[name]
                    weights[name].copy_(mixed)
        yield
