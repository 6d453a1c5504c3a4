"""Streaming DiLoCo (2501.18512): a round is one step here.

Layer l belongs to fragment l mod P. Fragment p syncs after the steps n with
n = (p + 1) tau / P modulo tau, rounded up. `delay` steps earlier the mean of outer - local is
started, if there was a step by then; at the sync DiLoCo's outer step is taken with it, and
local <- (1 - mix) outer + mix local. Without a delay a mean starts at the sync of the fragment
before; where there is one fragment alone, a step after its own. Every parameter is simulated on its
own, but for the mean of a quantized exchange: a fragment's parameters lie in the optimizer's order
there.
"""

import math
import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import count, pairwise

import torch
from torch import Tensor

from tests.reference.replica import Replica, mean
from tests.reference.two_stages import TwoStages


def layer(name: str) -> str:
    """The path up to the first number, or the whole name."""
    found = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", name)
    return found.group() if found else name


def trained(replica: Replica) -> dict[str, Tensor]:
    known = {id(parameter) for parameter in replica.trainable()}
    return {n: p.detach() for n, p in replica.model.named_parameters() if id(p) in known}


def in_order(replica: Replica, names: list[str]) -> list[str]:
    """As the optimizer lists them."""
    name_of = {id(p): n for n, p in replica.model.named_parameters()}
    return [name_of[id(p)] for p in replica.trainable() if name_of[id(p)] in names]


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
    delay: int | None,
    mixing: float,
    outer_lr: float,
    outer_momentum: float,
    exchange: str = "full",
) -> Iterator[None]:
    local = [trained(replica) for replica in replicas]
    outer = {name: value.clone() for name, value in local[0].items()}
    v = {name: torch.zeros_like(value) for name, value in outer.items()}
    arriving: dict[tuple[int, str], Tensor] = {}
    members = [in_order(replicas[0], part) for part in split(list(outer), fragments)]
    quantized = [two_stages(len(replicas), exchange, outer, part) for part in members]
    phases = [math.ceil((p + 1) * Fraction(tau, fragments)) for p in range(fragments)]
    apart_by = [b - a for a, b in pairwise([0, *phases])]
    for n in count(1):
        for replica in replicas:
            replica.train(1)
        for p in range(fragments):
            late = min(apart_by[p], tau - 1) if delay is None else delay
            if (n + late - phases[p]) % tau == 0:
                apart = [{name: outer[name] - w[name] for name in members[p]} for w in local]
                for name, d in average(apart, quantized[p]).items():
                    arriving[n + late, name] = d
            for name in members[p]:
                d = arriving.pop((n, name), None)
                if d is None:
                    continue
                v[name] = outer_momentum * v[name] + d
                outer[name] = outer[name] - outer_lr * (d + outer_momentum * v[name])
                for weights in local:
                    mixed = (1 - mixing) * outer[name] + mixing * weights[name]
                    weights[name].copy_(mixed)
        yield


def two_stages(
    workers: int, exchange: str, outer: dict[str, Tensor], names: list[str]
) -> TwoStages | None:
    if exchange == "full":
        return None
    like = torch.cat([outer[name].reshape(-1) for name in names])
    return TwoStages(workers, like, [outer[name].numel() for name in names], exchange)


def average(apart: list[dict[str, Tensor]], quantized: TwoStages | None) -> dict[str, Tensor]:
    """The replicas' mean of each parameter."""
    first = apart[0]
    if quantized is None:
        return {name: mean(own[name] for own in apart) for name in first}
    flat = quantized.mean([torch.cat([d.reshape(-1) for d in own.values()]) for own in apart])
    parts = flat.split([d.numel() for d in first.values()])
    return {name: part.view_as(first[name]) for name, part in zip(first, parts, strict=True)}
