"""When two workers compute, send and wait under each method: the pictures of docs/methods.md.

They show the simulator's own rounds (co2_measure/simulate/schedule.py) with τ = 4, steps of 1 and
1.1 seconds in turn, and a network that takes 2.4 seconds for a whole model. DES-LOC, and what the
simulator leaves out, is drawn from the equations.
"""

import argparse
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from co2.catalogue import CATALOGUE
from co2.config import Blocking
from co2_measure.simulate.methods import SIMULATED
from co2_measure.simulate.network import Link, Network
from co2_measure.simulate.schedule import advance_of, sending

TAU, WORKERS, WINDOW_S = 4, 2, 17.0
FRAGMENTS, DELAY = 2, 1
MODEL_BYTES, NUM_BUCKETS = 3_000_000, 3
NETWORK = Network(Link(rate_bits=10e6), server_size=1, collective="ring")
PERIODS = {"m": 2, "v": 3}
"""For DES-LOC: rounds of the weights from one mean of a moment to the next."""
FREEZE = 2
"""For the variants of Adam: steps before v is frozen."""

_SCALE, _LEFT, _LANE, _BAR = 33.0, 78, 26, 20
_LANES = ("worker 0", "worker 1", "network")
_STYLE = (
    "text{font:12px sans-serif;fill:#444}.in{fill:#fff;text-anchor:middle}"
    ".compute{fill:#3b76b4}.wait{fill:none;stroke:#c33;stroke-dasharray:3 2}.send{fill:#2d8a4e}"
    "@media(prefers-color-scheme:dark){text{fill:#bbb}.in{fill:#fff}}"
)


@dataclass(frozen=True)
class Span:
    lane: int
    kind: str
    """compute, wait or send."""
    begin: float
    end: float
    label: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for method in DRAWN:
        (args.out / f"{method}.svg").write_text(picture(method))


def picture(method: str) -> str:
    """The SVG of a method. The same code always makes the same file."""
    own = EQUATIONS.get(method)
    return svg(list(simulated(method) if own is None else own()))


def simulated(method: str) -> Iterator[Span]:
    """Rounds of the simulator until the window is full; each begins where the last one ended."""
    sent = sending(method, MODEL_BYTES, MODEL_BYTES // NUM_BUCKETS, NETWORK, WORKERS)
    advance = advance_of(method, sent, backward_share=2 / 3)
    entry, starts, number = CATALOGUE[method], np.zeros(WORKERS), 0
    while starts.min() < WINDOW_S:
        compute = compute_s(number, TAU if entry.rounds else 1)
        following, exposed, comm = advance(starts, compute, entry.vectors_in(number + 1))
        for worker in range(WORKERS):
            end = starts[worker] + compute[worker]
            yield Span(worker, "compute", starts[worker], end, str(number))
            if exposed[worker] > 1e-9:
                yield Span(worker, "wait", end, end + exposed[worker])
        # Under allreduce no bucket waits here once the first has left: the network is the slower.
        late = entry.blocking is Blocking.beyond_delay
        over = float((following + comm if late else following).max())
        yield Span(2, "send", over - sent.wire_s, over, str(number))
        starts, number = following, number + 1


def in_fragments(delay: int) -> Iterator[Span]:
    """Fragment p takes in, after steps (p + 1) τ/P modulo τ, the mean it started `delay` before."""
    send_s = 8 * MODEL_BYTES / FRAGMENTS / NETWORK.link.rate_bits
    starts, sent_until, step = np.zeros(WORKERS), {0: 0.0}, 0
    while starts.min() < WINDOW_S:
        ends = starts + compute_s(step, 1)
        for worker in range(WORKERS):
            yield Span(worker, "compute", starts[worker], ends[worker], str(step // TAU))
        step += 1
        starts = ends
        if step in sent_until:
            starts = np.maximum(ends, sent_until[step])
            for worker in range(WORKERS):
                if starts[worker] > ends[worker]:
                    yield Span(worker, "wait", ends[worker], starts[worker])
        due, left = divmod(step + delay, TAU // FRAGMENTS)
        if left == 0:
            begin = float(starts.max())
            sent_until[step + delay] = begin + send_s
            label = f"{(step - 1) // TAU}{'ab'[(due - 1) % FRAGMENTS]}"
            yield Span(2, "send", begin, begin + send_s, label)


def paired() -> Iterator[Span]:
    """NoLoCo: of two workers each waits for the other, as for a mean."""
    return simulated("local_sgd")


def desynced() -> Iterator[Span]:
    """DES-LOC: weights after every `TAU` steps, m and v after every `PERIODS` times as many."""
    whole_s = 8 * MODEL_BYTES / NETWORK.link.rate_bits
    starts, number = np.zeros(WORKERS), 0
    while starts.min() < WINDOW_S:
        ends = starts + compute_s(number, TAU)
        parts = ["x", *(name for name, period in PERIODS.items() if (number + 1) % period == 0)]
        begin = float(ends.max())
        over = begin + whole_s * len(parts)
        for worker in range(WORKERS):
            yield Span(worker, "compute", starts[worker], ends[worker], str(number))
            yield Span(worker, "wait", ends[worker], over)
        for place, name in enumerate(parts):
            start = begin + whole_s * place
            yield Span(2, "send", start, start + whole_s, f"{number} {name}")
        starts, number = np.full(WORKERS, over), number + 1


def every_step() -> Iterator[Span]:
    """1-bit Adam: gradients until v is frozen, signs of the momentum after it."""
    return signs("onebit_adam", range(20), FREEZE)


def some_steps() -> Iterator[Span]:
    """0/1 Adam: gradients where v is refreshed, signs at the other exchanges, ever rarer."""
    return signs("zero_one_adam", (0, 1, 2, 3, 5, 7, 11, 15), FREEZE)


def drawn() -> Iterator[Span]:
    """SPARTA without a delay: some weights after every step."""
    return signs("sparta", range(20))


def waves() -> Iterator[Span]:
    """DeMo: a message of the largest coefficients at every step."""
    return signs("demo", range(20))


def signs(method: str, exchanges: Collection[int], freeze: int = 0) -> Iterator[Span]:
    """All wait after these steps: for whole vectors, and from `freeze` on for the method's share of
    one."""
    whole_s = 8 * MODEL_BYTES / NETWORK.link.rate_bits
    starts, step = np.zeros(WORKERS), 0
    while starts.min() < WINDOW_S:
        ends = starts + compute_s(step, 1)
        for worker in range(WORKERS):
            yield Span(worker, "compute", starts[worker], ends[worker], str(step))
        starts = ends
        if step in exchanges:
            begin = float(ends.max())
            over = begin + (whole_s if step < freeze else whole_s * CATALOGUE[method].share)
            for worker in range(WORKERS):
                yield Span(worker, "wait", ends[worker], over)
            yield Span(2, "send", begin, over, str(step))
            starts = np.full(WORKERS, over)
        step += 1


FRAGMENTED = "_fragments"
"""Ends the name of a picture of a method that has another one without fragments."""
EQUATIONS: dict[str, Callable[[], Iterator[Span]]] = {
    "streaming_diloco": partial(in_fragments, DELAY),
    "co2_keep_fragments": partial(in_fragments, TAU // FRAGMENTS),
    "noloco": paired,
    "sparta": drawn,
    "desloc": desynced,
    "demo": waves,
    "onebit_adam": every_step,
    "zero_one_adam": some_steps,
}
DRAWN = (*SIMULATED[1:], *EQUATIONS)


def compute_s(round_number: int, steps: int) -> np.ndarray:
    """Seconds that both workers compute in a round; they take turns at having the slower steps."""
    slower = (np.arange(WORKERS) + round_number) % WORKERS
    return steps * (1 + 0.1 * slower)


def svg(spans: list[Span]) -> str:
    width, height = _LEFT + round(WINDOW_S * _SCALE) + 4, _LANE * len(_LANES) + 4
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">',
        f"<style>{_STYLE}</style>",
    ]
    for lane, name in enumerate(_LANES):
        lines.append(f'<text x="2" y="{lane * _LANE + 17}">{name}</text>')
    for span in spans:
        if span.begin < WINDOW_S:
            lines.append(_bar(span))
    return "\n".join([*lines, "</svg>", ""])


def _bar(span: Span) -> str:
    x, y = _LEFT + span.begin * _SCALE, span.lane * _LANE + 3
    wide = (min(span.end, WINDOW_S) - span.begin) * _SCALE
    inside = max(wide - 1, 0.5)  # a gap of one, so that neighbours are told apart
    bar = f'<rect class="{span.kind}" x="{x:.1f}" y="{y}" width="{inside:.1f}" height="{_BAR}"/>'
    if span.label and wide > 14:
        bar += f'<text class="in" x="{x + wide / 2:.1f}" y="{y + 14}">{span.label}</text>'
    return bar


if __name__ == "__main__":
    main()
