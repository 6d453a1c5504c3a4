"""How long an all-reduce takes, by links, servers and the way of sending.

Units are bytes, bits per second and seconds. Each of G workers has n bytes. Sending b bytes over a
link of R bit/s with L seconds of latency takes L + 8b/R, and a link sends and receives at its rate
at the same time. Nothing else uses the links, and adding numbers up costs nothing.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Protocol

from co2.errors import ConfigError, nearest, require

COLLECTIVES = ("ring", "hierarchical", "tree", "auto")
"""Ways of sending; `auto` is the quickest of the others for the size that is sent."""


@dataclass(frozen=True)
class Link:
    """A link with the same rate in both directions."""

    rate_bits: float
    """Bit/s in each direction."""
    latency_s: float = 0.0
    """Seconds until the first byte sent has arrived, whatever the size."""
    efficiency: float = 1.0
    """Share of the rate that headers, congestion control and the host leave for payload. 1 is the
    bare rate, since what a protocol loses has to be measured."""

    def seconds(self, num_bytes: float) -> float:
        """Seconds until `num_bytes` have arrived: L + 8·bytes/(R·efficiency)."""
        return self.latency_s + 8 * num_bytes / (self.rate_bits * self.efficiency)


PROFILES = {
    "80gbps-tcp": Link(80e9, 50e-6),
    "800gbps-rdma": Link(800e9, 5e-6),
    "nvswitch": Link(2.4e12, 3e-6),
}
"""Links by name. The rates are those of the CO2 paper's clusters (arXiv 2401.16265): 80 Gbps
TCP/IP or 800 Gbps RDMA between servers, and NVSwitch of 600 GB/s inside one, which NVIDIA counts
over both directions, so 300 GB/s each. The latencies are assumed: no source gives them."""

_RATE = re.compile(r"(\d{1,20}(?:\.\d+)?)([kmgt]?)(?:bit|bps)")
_LATENCY = re.compile(r"(\d{1,20}(?:\.\d+)?)(us|ms|s)")
_RATE_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_link(text: str, key: str = "link") -> Link:
    """A link from `80gbps-tcp`, `20mbit`, `1gbit@50us` or `800gbps-rdma@2us`. A bare rate has no
    latency; `@` gives the latency, or replaces a profile's. Raises `ConfigError`."""
    name, at, latency = text.strip().lower().partition("@")
    link = PROFILES.get(name)
    if rate := _RATE.fullmatch(name):
        link = Link(float(rate[1]) * _RATE_UNITS[rate[2]])
    if link is None or link.rate_bits == 0:
        hint = "must be a rate such as 20mbit or 1gbit@50us, or a profile"
        raise ConfigError(key, text, f"{hint}; {nearest(name, PROFILES)}")
    if not at:
        return link
    found = _LATENCY.fullmatch(latency)
    if not found:
        raise ConfigError(key, text, "must have a latency such as 50us, 2ms or 0.1s behind the @")
    return replace(link, latency_s=float(found[1]) * _TIME_UNITS[found[2]])


class Carrier(Protocol):
    """What a simulation needs of a network: `Network` computes it, co2/app/probe.py has measured
    it."""

    def check(self, workers: int) -> None:
        """Raise `ConfigError` where so many workers cannot be there."""

    def all_reduce_s(self, num_bytes: float, workers: int) -> float:
        """Seconds of one all-reduce of `num_bytes` on each worker, all starting together."""

    def all_gather_s(self, num_bytes: float, workers: int) -> float:
        """Seconds of one all-gather of `num_bytes` from each worker, all starting together."""


@dataclass(frozen=True)
class Network:
    """Servers of equal size, each with one link to the others that its GPUs share.

    A server with a network card for each GPU has one link with the sum of the rates.
    `server_size=1` gives every worker a link of its own.
    """

    link: Link
    """Between servers."""
    server_size: int = 1
    """GPUs of a server."""
    inside: Link = PROFILES["nvswitch"]
    """Between the GPUs of a server; every GPU has its own."""
    collective: str = "ring"
    """One of `COLLECTIVES`."""

    def check(self, workers: int, key: str = "workers") -> None:
        """Raise `ConfigError` unless the workers fill whole servers, or fit into one."""
        size = self.server_size
        whole = workers <= size or workers % size == 0
        require(whole, key, workers, f"must fill servers of {size}, or fit into one")

    def all_reduce_s(self, num_bytes: float, workers: int) -> float:
        """Seconds of one all-reduce of `num_bytes` on each worker, all starting together.

        ring: One ring through all GPUs, server by server, so that it leaves each server once. A
            phase lasts as long as on the slower kind of link. This is an upper bound: phases that
            are not in step would pay the outer latency at one hop in `server_size` only.
        hierarchical: Reduce-scatter inside, rings across servers, all-gather inside. The GPUs with
            number j of all servers form a ring for their n/g bytes. The g rings of a server share
            its link, and so take as long as one ring of the servers on n bytes.
        tree: As hierarchical, with a double binary tree across servers: 8·2n/R + 2⌈log₂ S⌉·L. Two
            trees carry half of the bytes each, and a leaf of one is an inner node of the other
            (Sanders, Speck, Träff, Parallel Computing 2009; in NCCL since 2.4). Perfect pipelining
            is assumed.
        """
        if workers == 1:
            return 0.0
        if workers <= self.server_size:
            return ring_s(num_bytes, workers, self.inside)
        servers, link = workers // self.server_size, self.link
        flat_s = ring_s(num_bytes, workers, link)
        if self.server_size > 1:
            flat_s = max(flat_s, ring_s(num_bytes, workers, self.inside))
        inside_s = ring_s(num_bytes, self.server_size, self.inside)
        hops = 2 * math.ceil(math.log2(servers))
        times = {
            "ring": flat_s,
            "hierarchical": inside_s + ring_s(num_bytes, servers, link),
            "tree": inside_s + (link.seconds(2 * num_bytes) + (hops - 1) * link.latency_s),
        }
        return min(times.values()) if self.collective == "auto" else times[self.collective]

    def all_gather_s(self, num_bytes: float, workers: int) -> float:
        """Seconds of one all-gather of `num_bytes` from each worker, all starting together: the
        second half of an all-reduce of what they have together."""
        return self.all_reduce_s(workers * num_bytes, workers) / 2


def ring_s(num_bytes: float, workers: int, link: Link) -> float:
    """Seconds of a ring all-reduce: 2(G−1) phases, each of n/G bytes: 2(G−1)·(L + 8n/(G·R)).

    G−1 phases reduce-scatter, G−1 gather (Patarasuk and Yuan, JPDC 2009).
    """
    return 2 * (workers - 1) * link.seconds(num_bytes / workers)


def ring_bytes(num_bytes: int, workers: int) -> int:
    """Bytes that one worker sends in an all-reduce: ⌊2(G−1)n/G⌋, as `BackgroundMean` counts them.

    A hierarchical all-reduce sends as many, (2(g−1)/g + 2(S−1)/(S·g))·n with G = g·S, and so does
    a tree on average.
    """
    return 2 * (workers - 1) * num_bytes // workers
