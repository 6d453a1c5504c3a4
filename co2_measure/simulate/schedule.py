"""When each replica computes, sends and waits, round after round, under each method.

A round is τ steps (one under allreduce and acco). The replicas are a vector of clocks, so a round
costs a few vector operations however many replicas there are; where all are alike, one clock stands
for all. A collective begins when the last replica has launched it, and not before the previous one
on the same group is over; its buckets run one after another.

The simulation leaves out the arithmetic of the outer step, the slowing down of computation by the
communication beside it, data loading, and a `delay` below what there is: an overlapped mean has a
whole round to arrive, and that of one of P fragments a P-th of it at least, until the next one is
sent.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from co2.config import Blocking
from co2.errors import require, require_number
from co2_measure.simulate.methods import ALLREDUCE, ENTRIES, LIMIT, require_simulated
from co2_measure.simulate.network import Carrier, ring_bytes

BUCKET_BYTES = 25 * 2**20
"""The default of `comm.bucket_mb`, and of PyTorch's DDP."""

Clocks = np.ndarray
"""Seconds by replica, [G], or [1] where all replicas are alike."""
Advance = Callable[[Clocks, Clocks, int], tuple[Clocks, Clocks, Clocks]]
"""What a round does to the clocks: (starts, compute seconds, vectors that are averaged) to (the
next round's starts, exposed seconds, seconds from the launch of the round's collective to its
completion)."""


@dataclass(frozen=True)
class Noise:
    """What makes replicas differ. The same seed gives the same noise in every simulation."""

    jitter: float = 0.0
    """Coefficient of variation of the factor on each step's compute time, lognormal with mean 1."""
    slow_count: int = 0
    """Replicas that are slower in every step; the larger of this and `slow_share` holds."""
    slow_share: float = 0.0
    """The same as a share of all replicas, rounded up."""
    slowdown: float = 1.0
    """Factor on a slow replica's compute time."""
    seed: int = 0

    def num_slow(self, workers: int) -> int:
        """How many of `workers` replicas are slow."""
        return min(workers, max(self.slow_count, math.ceil(self.slow_share * workers)))


NO_NOISE = Noise()
"""All replicas are alike."""


class Replicas:
    """The replicas' compute times, drawn round after round."""

    def __init__(self, workers: int, step_s: float, noise: Noise) -> None:
        num_slow = noise.num_slow(workers)
        alike = noise.jitter == 0 and (num_slow == 0 or noise.slowdown == 1)
        self.step_s = np.full(1 if alike else workers, step_s, np.float64)
        self.step_s[:num_slow] *= noise.slowdown
        self._jitter = noise.jitter
        self._random = np.random.default_rng(noise.seed)

    def seconds(self, steps: int) -> np.ndarray:
        """Compute seconds of the next `steps` steps together, by replica, [G] or [1].

        The sum of lognormal factors is drawn as one lognormal number with the sum's mean and
        variance (Fenton, IRE Trans. 1960): exact for one step, and close for more.
        """
        seconds = self.step_s * steps
        if self._jitter == 0 or steps == 0:
            return seconds
        variance = math.log1p(self._jitter**2 / steps)
        normal = self._random.standard_normal(len(seconds), dtype=np.float32)
        return seconds * np.exp(math.sqrt(variance) * normal - variance / 2)


@dataclass(frozen=True)
class Figures:
    """What a simulated run shows, as means over the replicas, named as in a run's summary."""

    throughput: float
    """Units (tokens or images) per second, the sum of the replicas' own rates."""
    step_s: float
    """Waiting included."""
    exposed_s: float
    """Seconds per step of standing still, for the network or for slower replicas."""
    exposed_share: float
    """`exposed_s` as a share of the training time."""
    comm_s: float
    """Seconds per collective from a replica's own launch to completion (allreduce: from the first
    bucket's launch), the wait for slower replicas included."""
    wire_s: float
    """Seconds that a collective takes once all replicas have launched it; on average, where some
    carry more than others."""
    overlap: float | None
    """1 − exposed/comm; None without communication."""
    bytes_per_step: float
    """Bytes that one worker sends per step."""


def simulate(
    *,
    method: str,
    workers: int,
    vector_bytes: int,
    step_s: float,
    network: Carrier,
    steps: int,
    tau: int = 12,
    warmup_rounds: int = 0,
    units_per_step: float = 1.0,
    bucket_bytes: int = BUCKET_BYTES,
    backward_share: float = 2 / 3,
    average_moments: bool = False,
    fragments: int = 1,
    delay: int | None = None,
    noise: Noise = NO_NOISE,
) -> Figures:
    """Simulate `steps` steps of data-parallel training by `workers` replicas.

    Args:
        vector_bytes: n, what one all-reduce carries: parameters × 4 for fp32, × 2 for bf16. A
            method that gathers messages has a share of n in each.
        step_s: seconds of one step's computation on one replica, on average.
        steps: those beyond the last whole round are computed and not communicated.
        tau: τ, the steps of a round. It has no meaning under `none`, `allreduce` and `acco`.
        warmup_rounds: rounds before those that are measured. 2 reach the steady state without
            noise; replicas that differ need more, until the fast are a round ahead of the slow.
            0 shows a run from its start, where overlapped methods wait once less.
        units_per_step: of one replica.
        bucket_bytes: the most that one collective carries.
        backward_share: share of the step during which gradients become ready, at its end; under
            allreduce they are sent meanwhile. Backward costs about twice the forward pass.
        average_moments: whether methods that can also average Adam's two moments.
        fragments: P, equal parts of the vector that travel one after the other, in methods that
            have them; at most τ.
        delay: steps that the mean of a fragment has, rounded down to what several take to compute;
            None, or less than one takes: until the next one is sent.

    Raises:
        ConfigError: the method is not simulated, `step_s` is no finite time above 0 s, or the
            workers do not fill whole servers.
    """
    require_simulated("method", method)
    require_number("step_s", step_s, 1e-12, "must be a finite time above 0 s")
    network.check(workers)
    entry = ENTRIES[method]
    parts = fragments if entry.fragments else 1
    require(1 <= parts <= tau, "fragments", parts, f"must be 1 to tau, which is {tau}")

    replicas = Replicas(workers, step_s, noise)
    sent = sending(method, vector_bytes // parts, bucket_bytes, network, workers)
    length = tau if entry.rounds else steps if method == LIMIT else 1
    in_flight = max(1, (delay or 0) * parts // length) if parts > 1 else 1
    advance = advance_of(method, sent, backward_share, in_flight)
    # Of the steps between two fragments.
    lengths = [(n + 1) * length // parts - n * length // parts for n in range(parts)]

    rounds, rest = divmod(steps, length)
    clocks = began = np.zeros_like(replicas.step_s)
    exposed_s = comm_s = 0.0
    carried = 0
    for number in range(-warmup_rounds, rounds):
        if number == 0:
            began = clocks
        vectors = entry.vectors_in(number + 1, average_moments)
        for part in lengths:
            clocks, exposed, comm = advance(clocks, replicas.seconds(part), vectors)
            if number >= 0:
                exposed_s += float(exposed.mean())
                comm_s += float(comm.mean())
                carried += vectors
    clocks = clocks + replicas.seconds(rest)
    own_s = clocks - began
    exposed_s = max(0.0, exposed_s)  # a sum of differences of clocks, which round

    if method == LIMIT:
        carried = 0
    return Figures(
        throughput=workers * units_per_step * steps * float((1 / own_s).mean()),
        step_s=float(own_s.mean()) / steps,
        exposed_s=exposed_s / steps,
        exposed_share=exposed_s / float(own_s.mean()),
        comm_s=comm_s / max(rounds * parts, 1),
        wire_s=sent.wire_s * carried / max(rounds * parts, 1),
        overlap=max(0.0, 1 - exposed_s / comm_s) if comm_s > 0 else None,
        bytes_per_step=sent.num_bytes * carried / steps,
    )


@dataclass(frozen=True)
class Sending:
    """What the collective of a round carries, in buckets of a vector; a message is one bucket."""

    shares: np.ndarray
    """Of each bucket in the vector."""
    seconds: np.ndarray
    """On the wire, of each bucket."""
    num_bytes: int
    """That one worker sends for all buckets."""

    @property
    def wire_s(self) -> float:
        """Seconds on the wire, of all buckets."""
        return float(self.seconds.sum())


def sending(
    method: str, vector_bytes: int, bucket_bytes: int, network: Carrier, workers: int
) -> Sending:
    """What the collective of a round carries under this method."""
    num_bytes = round(ENTRIES[method].share * vector_bytes)
    if ENTRIES[method].exchange == "gather":
        seconds = np.array([network.all_gather_s(num_bytes, workers)])
        return Sending(np.ones(1), seconds, (workers - 1) * num_bytes)
    whole, last = divmod(num_bytes, bucket_bytes)
    sizes = np.array([bucket_bytes] * whole + [last] * (last > 0))
    by_size = {size: network.all_reduce_s(size, workers) for size in {sizes[0], sizes[-1]}}
    seconds = np.array([by_size[size] for size in sizes])
    return Sending(sizes / num_bytes, seconds, ring_bytes(num_bytes, workers))


def advance_of(method: str, sent: Sending, backward_share: float, in_flight: int = 1) -> Advance:
    """What a round of this method does to the clocks. An overlapped method's keeps so many
    collectives in flight from one call to the next."""
    if method == ALLREDUCE:
        return _bucketed(sent, backward_share)
    waits = ENTRIES[method].blocking
    if waits is Blocking.never:
        return _silent
    if waits is Blocking.always:
        return _blocking(sent.wire_s)
    return _overlapped(sent.wire_s, in_flight)


def _silent(start: Clocks, compute: Clocks, _: int) -> tuple[Clocks, Clocks, Clocks]:
    nothing = np.zeros_like(start)
    return start + compute, nothing, nothing


def _blocking(wire_s: float) -> Advance:
    """All replicas go on together when the mean has arrived: at the end of the slowest one's round,
    plus the seconds on the wire."""

    def advance(start: Clocks, compute: Clocks, vectors: int) -> tuple[Clocks, Clocks, Clocks]:
        end = start + compute
        arrived = np.full_like(end, end.max() + vectors * wire_s)
        return arrived, arrived - end, arrived - end

    return advance


def _overlapped(wire_s: float, in_flight: int) -> Advance:
    """At a round's end each replica waits for the mean launched so many rounds before, launches the
    next one and goes on. A mean is on the wire once the last replica has launched it and the one
    before has arrived."""
    arrivals = deque([0.0] * in_flight)

    def advance(start: Clocks, compute: Clocks, vectors: int) -> tuple[Clocks, Clocks, Clocks]:
        end, last = start + compute, arrivals[-1]
        launch = np.maximum(end, arrivals.popleft())
        arrives = max(float(launch.max()), last) + vectors * wire_s
        arrivals.append(arrives)
        return launch, launch - end, arrives - launch

    return advance


def _bucketed(sent: Sending, backward_share: float) -> Advance:
    """Gradients are sent while the rest of backward runs.

    Bucket k is ready on replica i when its share of backward has passed, and begins when it is
    ready everywhere and bucket k−1 is over, so the last one is over at
    max over k of (ready_k + c_k + … + c_N). All start together, so the slowest sets every ready_k.
    With N equal buckets of c seconds and the window W = backward_share · step, the exposed time is
    max(c, N·c − W·(N−1)/N): even of a hidden all-reduce the last bucket is exposed. The optimizer's
    step, which waits for the last bucket, counts as computation at the start of the next step,
    which gives the same sum. DDP's smaller first bucket (1 MiB) is left out.
    """
    ready = 1 - backward_share + backward_share * np.cumsum(sent.shares)
    remaining_s = np.cumsum(sent.seconds[::-1])[::-1]

    def advance(start: Clocks, compute: Clocks, _: int) -> tuple[Clocks, Clocks, Clocks]:
        end = start + compute
        over = start + (ready * compute.max() + remaining_s).max()
        return over, over - end, over - (start + ready[0] * compute)

    return advance
