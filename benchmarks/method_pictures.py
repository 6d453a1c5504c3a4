"""What two workers do under each method: the pictures of docs/methods.md.

The lanes show when workers compute and wait and what the network carries, with τ = 4, steps of 1
and 1.1 seconds in turn, and a network that takes 2.4 seconds for a whole model. They are the
simulator's own rounds (co2_measure/simulate/schedule.py); DES-LOC, MT-DAO, and what the simulator
leaves out, is drawn from the equations. An arrow is where a worker takes in what has come.

Below are the workers' weights, as the method's reference (tests/reference) trains them with the
default settings: each worker is drawn to a target of its own, the best point for all is in the
middle, and the learning rate falls in a line. What a method sends and declares is drawn beside the
lanes: which part of a vector, outer momentum as a share of a circle, and a gap penalty.
"""

import argparse
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import cos, pi, sin
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from co2.catalogue import CATALOGUE, Entry
from co2.config import Blocking
from co2.methods import METHODS
from co2.record.drawing import COMPUTE, GREY, WAIT
from co2_measure.simulate.methods import ALLREDUCE, SIMULATED
from co2_measure.simulate.network import Link, Network
from co2_measure.simulate.schedule import advance_of, sending
from tests.methods.driver import SETTINGS, inner
from tests.reference import REFERENCES
from tests.reference.chance import pairs
from tests.reference.replica import Replica
from tests.reference.signs import exchanges

TAU, WORKERS, WINDOW_S = 4, 2, 22.0
FRAGMENTS, DELAY = 2, 1
MODEL_BYTES, NUM_BUCKETS = 3_000_000, 3
NETWORK = Network(Link(rate_bits=10e6), server_size=1, collective="ring")
WHOLE_S = 8 * MODEL_BYTES / NETWORK.link.rate_bits
FREEZE, DOUBLE_EVERY, LONGEST = 2, 2, 4
"""For the variants of Adam: steps before v is frozen; then, for 0/1 Adam, steps after which the
interval of exchanges doubles, and the longest one."""
PERIODS = {"desloc": {"m": 2, "v": 2}, "mt_dao": {"u": 1, "v": 1}}
"""Rounds of the weights from one mean of a moment to the next."""
FRAGMENTED = "_fragments"
"""Ends the name of a picture of a method that has another one without fragments."""
OWN: dict[str, dict[str, Any]] = {
    "streaming_diloco": {"fragments": FRAGMENTS, "delay": DELAY},
    "co2_keep": {"fragments": 1},
    f"co2_keep{FRAGMENTED}": {"fragments": FRAGMENTS},
    "desloc": {"first_moment_every": 2 * TAU, "second_moment_every": 2 * TAU},
    "mt_dao": {"first_moment_every": TAU, "second_moment_every": TAU},
    "sparseloco": {"density": 0.25},  # of 64 elements, not of 4,096
    "demo": {"top_k": 8, "block": 8},
    "onebit_adam": {"freeze_step": FREEZE},
    "zero_one_adam": {
        "freeze_step": FREEZE, "double_every": DOUBLE_EVERY, "max_interval": LONGEST
    },
}  # fmt: skip
"""Settings that differ from the defaults, beside τ, because pictures are short."""

GRADIENTS, PROGRESS, WEIGHTS, MOMENTUM = "gradients", "progress", "weights", "momentum"
SENT = {
    "g": (GRADIENTS, "#9a6a00"),
    "d": (PROGRESS, "#2d8a4e"),
    "x": (WEIGHTS, "#0f7f8c"),
    "m": (MOMENTUM, "#7d54b5"),
}
"""By the sign in a picture: what is sent, and its colour."""


@dataclass(frozen=True)
class Card:
    """What a picture says of a method in words."""

    sends: str
    """One of `SENT`."""
    text: str
    """Fields in braces are those of the method's configuration."""
    local: bool = True
    """Whether weights move during a step, and not only with a mean."""


CARDS = {
    "allreduce": Card("g", "The mean of the gradients, bucket by bucket. Every step waits.", False),
    "local_sgd": Card("d", "All wait, and go on from the mean of their weights."),
    "slowmo": Card(
        "d", "All wait. Outer momentum {outer_momentum:g}, in units of the learning rate."
    ),
    "diloco": Card(
        "d", "All wait. Nesterov's outer step: momentum {outer_momentum:g}, rate {outer_lr:g}."
    ),
    "noloco": Card(
        "d", "Pairs, drawn anew each round, wait for each other alone. Momentum {outer_momentum:g}."
    ),
    "overlap_local_sgd": Card(
        "x",
        "The mean is a round late: it moves an anchor with momentum {outer_momentum:g}, which "
        "pulls workers by {pull:g}.",
    ),
    "cocod_sgd": Card(
        "d", "A round late, a worker replaces its own progress of then by the mean progress."
    ),
    "streaming_diloco": Card(
        "d",
        "Halves a and b of the model in turn, {delay} step late. Nesterov momentum "
        "{outer_momentum:g}; {mixing:.0%} of the own weights stays.",
    ),
    "eager_diloco": Card(
        "d",
        "The mean is a round late; a worker's own newest progress stands in for its share. "
        "Nesterov momentum {outer_momentum:g}.",
    ),
    "sparseloco": Card(
        "d", "The largest {density:.0%} of what each owes; the rest is kept for later rounds."
    ),
    "co2": Card(
        "d",
        "A round late, from an older common point: outer momentum {outer_momentum:g}, and the mean "
        "divided by the gap Λ.",
    ),
    "co2_keep": Card(
        "d",
        "The whole model, a round late. Each keeps {keep_local:.0%} of its own steps made "
        "meanwhile; {momentum_weight:.0%} of an outer momentum of {outer_momentum:g} is added.",
    ),
    f"co2_keep{FRAGMENTED}": Card(
        "d", "Halves a and b of the model in turn, half a round late; {keep_local:.0%} is kept."
    ),
    "co2_released": Card(
        "d", "All wait. Outer momentum {outer_momentum:g}, and a constant Λ of {gap_penalty:g}."
    ),
    "acco": Card(
        "g", "Gradients of half-batches, a step late: an estimate and an update by turns.", False
    ),
    "sparta": Card("x", "{share:.1%} of the weights, drawn anew, at every step."),
    "desloc": Card("x", "Weights in every round; Adam's m and v more rarely. All wait."),
    "mt_dao": Card("x", "Weights, a slow momentum u and v. All wait."),
    "demo": Card("m", "The largest waves of each worker's momentum; steps are signs.", False),
    "onebit_adam": Card("m", "Gradients g until v is frozen, then one bit an element of m.", False),
    "zero_one_adam": Card(
        "d", "Gradients g until v is frozen, then one bit an element of steps, ever more rarely."
    ),
}
_DEFAULT = Card("d", "")
"""Of a method without a card of its own."""

_SCALE, _LEFT, _BAR, _GAP, _UNIT = 20.0, 84, 20, 12, 44
_DASHES = ("none", "5 3", "1 3", "8 2 1 2")
"""By worker."""
_STYLE = (
    f"text{{font:12px sans-serif;fill:{GREY}}}text.in{{fill:#fff;text-anchor:middle}}"
    f"text.small{{font-size:11px}}.compute{{fill:{COMPUTE}}}"
    f".wait{{fill:none;stroke:{WAIT};stroke-dasharray:3 2}}"
    f".line,.take,.icon,.best{{fill:none;stroke:{GREY}}}.best{{stroke-dasharray:1 3}}"
    f".wave{{fill:none;stroke:{SENT['m'][1]};stroke-width:1.5}}"
    ".take{marker-end:url(#tip)}"
    f".path{{fill:none;stroke:{COMPUTE};stroke-width:1.8}}.cell{{fill:{GREY};opacity:.3}}"
    + "".join(f".{kind}{{fill:{colour}}}" for kind, colour in SENT.values())
)
_TIP = (
    '<marker id="tip" orient="auto" refX="4" refY="3" markerWidth="6" markerHeight="6">'
    '<path class="line" d="M0 0.5L4 3L0 5.5"/></marker>'
)
"""The head of an arrow."""


@dataclass(frozen=True)
class Span:
    """A bar in a lane: a worker's, by its number, or the network's."""

    lane: int
    kind: str
    """compute, wait, or what is sent."""
    begin: float
    end: float
    label: str = ""
    part: tuple[int, int] = (0, 1)
    """Which of how many bars above each other."""


@dataclass
class Course:
    """What happens in a picture."""

    workers: int = WORKERS
    spans: list[Span] = field(default_factory=list)
    steps: list[list[tuple[float, float]]] = field(init=False)
    """Of each worker: when each begins and ends."""
    taken: list[tuple[float, float, int]] = field(default_factory=list)
    """From when the network has something to when a worker takes it in, and the worker."""

    def __post_init__(self) -> None:
        self.steps = [[] for _ in range(self.workers)]

    def compute(self, worker: int, begin: float, end: float, label: object, steps: int = 1) -> None:
        self.spans.append(Span(worker, "compute", begin, end, str(label)))
        length = (end - begin) / steps
        self.steps[worker] += [(begin + n * length, begin + (n + 1) * length) for n in range(steps)]

    def wait(self, worker: int, begin: float, end: float) -> None:
        if end > begin + 1e-9:
            self.spans.append(Span(worker, "wait", begin, end))

    def send(
        self, begin: float, end: float, label: str, sign: str, part: tuple[int, int] = (0, 1)
    ) -> None:
        self.spans.append(Span(self.workers, SENT[sign][0], begin, end, label, part))

    def take(self, sent: float, moments: Sequence[float] | np.ndarray, workers: Any = None) -> None:
        places = range(self.workers) if workers is None else workers
        self.taken += [(sent, float(at), who) for at, who in zip(moments, places, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in DRAWN:
        (args.out / f"{name}.svg").write_text(picture(name))


def picture(name: str) -> str:
    """The SVG of a method. The same code always makes the same file."""
    course = course_of(name)
    return svg(name, course, weights(name, course))


# When workers compute and wait.


def course_of(name: str) -> Course:
    """From the equations where there are such, or as the simulator has it."""
    own = EQUATIONS.get(name)
    return simulated(name) if own is None else own()


def simulated(method: str) -> Course:
    """Rounds of the simulator until the window is full; each begins where the last one ended."""
    sent = sending(method, MODEL_BYTES, MODEL_BYTES // NUM_BUCKETS, NETWORK, WORKERS)
    advance = advance_of(method, sent, backward_share=2 / 3)
    entry, course, sign = CATALOGUE[method], Course(), card(method).sends
    starts, number = np.zeros(WORKERS), 0
    late = entry.blocking is Blocking.beyond_delay
    flying: float | None = None
    while starts.min() < WINDOW_S:
        steps = TAU if entry.rounds else 1
        compute = compute_s(number, steps)
        following, exposed, comm = advance(starts, compute, entry.vectors_in(number + 1))
        for worker in range(WORKERS):
            end = starts[worker] + compute[worker]
            course.compute(worker, starts[worker], end, number, steps)
            course.wait(worker, end, end + exposed[worker])
        # Under allreduce no bucket waits here once the first has left: the network is the slower.
        over = float((following + comm if late else following).max())
        buckets = NUM_BUCKETS if method == ALLREDUCE else 1
        for bucket in range(buckets):
            begin = over - sent.wire_s * (buckets - bucket) / buckets
            label = f"{sign}{number}" if buckets == 1 else sign
            course.send(begin, begin + sent.wire_s / buckets, label, sign)
        if not late:
            course.take(over, following)
        elif flying is not None:
            course.take(flying, following)
        flying, starts, number = over, following, number + 1
    return course


def in_fragments(delay: int) -> Course:
    """Fragment p takes in, after steps (p + 1) τ/P modulo τ, the mean it started `delay` before."""
    course, starts, step = Course(), np.zeros(WORKERS), 0
    sent_until: dict[int, float] = {}
    while starts.min() < WINDOW_S:
        ends = starts + compute_s(step, 1)
        for worker in range(WORKERS):
            course.compute(worker, starts[worker], ends[worker], step // TAU)
        step += 1
        starts = ends
        if step in sent_until:
            starts = np.maximum(ends, sent_until[step])
            for worker in range(WORKERS):
                course.wait(worker, ends[worker], starts[worker])
            course.take(sent_until[step], starts)
        due, left = divmod(step + delay, TAU // FRAGMENTS)
        if left == 0:
            begin, fragment = float(starts.max()), (due - 1) % FRAGMENTS
            sent_until[step + delay] = begin + WHOLE_S / FRAGMENTS
            label = f"{(step - 1) // TAU}{'ab'[fragment]}"
            part = (fragment, FRAGMENTS)
            course.send(begin, sent_until[step + delay], label, "d", part)
    return course


def paired() -> Course:
    """NoLoCo, with four workers: of two each waits for the other alone. Rounds 4 to 6, because all
    three ways to pair four workers are in them."""
    course = Course(2 * WORKERS)
    starts, number = np.zeros(course.workers), 0
    while starts.min() < WINDOW_S:
        ends = starts + np.resize(compute_s(number, TAU), course.workers)
        both = sorted(map(sorted, pairs(course.workers, seed=(number + 4) * TAU)))
        for place, pair in enumerate(both):
            begin = float(ends[pair].max())
            for worker in pair:
                course.compute(worker, starts[worker], ends[worker], number, TAU)
                course.wait(worker, ends[worker], begin + WHOLE_S)
            label = "–".join(map(str, pair))
            course.send(begin, begin + WHOLE_S, label, "d", (place, len(both)))
            starts[pair] = begin + WHOLE_S
            course.take(begin + WHOLE_S, starts[pair], pair)
        number += 1
    return course


def with_moments(method: str) -> Course:
    """Weights after every `TAU` steps, moments after every `PERIODS` times as many."""
    course, starts, number = Course(), np.zeros(WORKERS), 0
    while starts.min() < WINDOW_S:
        ends = starts + compute_s(number, TAU)
        periods = PERIODS[method].items()
        parts = ["x", *(name for name, period in periods if (number + 1) % period == 0)]
        begin = float(ends.max())
        over = begin + WHOLE_S * len(parts)
        for worker in range(WORKERS):
            course.compute(worker, starts[worker], ends[worker], number, TAU)
            course.wait(worker, ends[worker], over)
        for place, name in enumerate(parts):
            start = begin + WHOLE_S * place
            sign = "x" if name == "x" else "m"
            course.send(start, start + WHOLE_S, f"{name}{number}", sign)
        starts, number = np.full(WORKERS, over), number + 1
        course.take(over, starts)
    return course


def every_step(method: str, at: Collection[int] = range(30), freeze: int = 0) -> Course:
    """All wait after these steps: for whole gradients, and from `freeze` on for the method's share
    of a vector."""
    course, starts, step = Course(), np.zeros(WORKERS), 0
    sign = card(method).sends
    while starts.min() < WINDOW_S:
        ends = starts + compute_s(step, 1)
        for worker in range(WORKERS):
            course.compute(worker, starts[worker], ends[worker], step)
        starts = ends
        if step in at:
            begin = float(ends.max())
            over = begin + (WHOLE_S if step < freeze else WHOLE_S * CATALOGUE[method].share)
            for worker in range(WORKERS):
                course.wait(worker, ends[worker], over)
            label = "g" if step < freeze else sign
            course.send(begin, over, f"{label}{step}", label)
            starts = np.full(WORKERS, over)
            course.take(over, starts)
        step += 1
    return course


def compute_s(round_number: int, steps: int) -> np.ndarray:
    """Seconds that both workers compute in a round; they take turns at having the slower steps."""
    slower = (np.arange(WORKERS) + round_number) % WORKERS
    return steps * (1 + 0.1 * slower)


RARE = exchanges(FREEZE, DOUBLE_EVERY, LONGEST)
EQUATIONS: dict[str, Callable[[], Course]] = {
    "streaming_diloco": partial(in_fragments, DELAY),
    f"co2_keep{FRAGMENTED}": partial(in_fragments, TAU // FRAGMENTS),
    "noloco": paired,
    "sparta": partial(every_step, "sparta"),
    "desloc": partial(with_moments, "desloc"),
    "mt_dao": partial(with_moments, "mt_dao"),
    "demo": partial(every_step, "demo"),
    "onebit_adam": partial(every_step, "onebit_adam", freeze=FREEZE),
    "zero_one_adam": partial(every_step, "zero_one_adam", RARE, FREEZE),
}
DRAWN = tuple(dict.fromkeys((*SIMULATED[1:], *EQUATIONS)))


# What the workers' weights do meanwhile.

SIZE, NUM_TENSORS = 8, 2
RATES = {"sgd": 0.16, "adamw": 0.1, "decay": 0.05}
"""Learning rates at the start, by the inner optimizer as the tests name it: AdamW, and the steps of
signs that are made of an SGD."""
NUM_STEPS = 32
"""From the first rate to none."""


class Watched(Replica):
    """A replica that notes, for each of its steps, the weights before and after it."""

    def __init__(self, target: float, rate: float, adam: bool) -> None:
        size = SIZE * SIZE
        self.ways = torch.cat([0.97 ** torch.arange(size)] * NUM_TENSORS).double()
        tensors = self.ways.split(size)
        model = nn.ParameterList(nn.Parameter(way.clone().view(SIZE, SIZE)) for way in tensors)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        if adam:
            optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0)
        self.target, self.rate = target, rate
        self.path: list[list[float]] = []
        super().__init__(model, optimizer, self.pulled, self.decayed)

    @property
    def place(self) -> float:
        """How far the weights are from 0, in units of how far they were at first."""
        return float(self.weights() @ self.ways / self.ways.square().sum())

    def pulled(self, model: nn.Module, step: int) -> None:
        """The gradient of half the squared distance to the target."""
        self.path.append([self.place])
        away = self.weights() - self.target * self.ways
        for parameter, part in self.parts(away):
            parameter.grad = part.clone()

    def decayed(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self.rate * (1 - step / NUM_STEPS)

    def update(self) -> None:
        super().update()
        self.path[-1].append(self.place)


def weights(name: str, course: Course) -> list[list[list[float]]]:
    """By worker and step: the weights before it, and after it where nothing is taken in at once."""
    method = name.removesuffix(FRAGMENTED)
    kind = inner(method)
    targets = np.linspace(0.5, -0.5, course.workers)
    replicas = [Watched(target, RATES[kind], kind == "adamw") for target in targets]
    config = METHODS[method].Config()
    settings = {key: getattr(config, key) for key in SETTINGS[method]}
    settings |= {key: TAU for key in settings if key == "tau"} | OWN.get(name, {})
    reference: Any = REFERENCES[method]
    rounds = reference(list(replicas), **settings)
    count = max(map(len, course.steps)) + 1
    while len(replicas[0].path) < count:
        next(rounds)
    return [list(islice(replica.path, count)) for replica in replicas]


# The picture.


def card(name: str) -> Card:
    return CARDS.get(name, _DEFAULT)


def svg(name: str, course: Course, paths: list[list[list[float]]]) -> str:
    """Lanes, with the network in the middle, and the weights below."""
    count, method = course.workers, name.removesuffix(FRAGMENTED)
    order = [*range(count // 2), count, *range(count // 2, count)]
    tops = {lane: 3 + place * (_BAR + _GAP) for place, lane in enumerate(order)}
    below = 3 + len(order) * (_BAR + _GAP) - 4
    config = METHODS[method].Config()
    sends = f"{card(name).sends}: {SENT[card(name).sends][0]}."
    words = textwrap.wrap(f"{sends} {card(name).text.format(**config.__dict__)}", 84)
    width = _LEFT + round(WINDOW_S * _SCALE) + 4
    curves = [_curve(*own, card(name).local) for own in zip(course.steps, paths, strict=True)]
    deepest = min(-0.15, *(value for curve in curves for _, value in curve))
    under = round(_height(deepest, below)) + 18
    height = under + 16 * len(words) - 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">',
        f"<style>{_STYLE}</style>",
        _TIP,
    ]
    for lane, top in tops.items():
        label = "network" if lane == count else f"worker {lane}"
        lines.append(f'<text x="2" y="{top + 14}">{label}</text>')
        if lane < count:
            lines.append(_line("path", [(60, top + 10), (78, top + 10)], lane))
    lines.append(_icon(CATALOGUE[method], SENT[card(name).sends][0], name, tops[count]))
    lines += [_bar(span, tops[span.lane]) for span in course.spans if span.begin < WINDOW_S]
    lines += _arrows(course, tops)
    lines.append(f'<text x="2" y="{below + 30}">weights</text>')
    lines += _outer(config, below + 24)
    best = _height(0.0, below)
    lines.append(_line("best", [(_LEFT, best), (width - 4, best)]))
    lines.append(f'<text class="small" x="2" y="{best + 4:.1f}">best for all</text>')
    for worker, curve in enumerate(curves):
        places = [(_LEFT + at * _SCALE, _height(value, below)) for at, value in curve]
        lines.append(_line("path", places, worker))
    for number, line in enumerate(words):
        lines.append(f'<text x="2" y="{under + 16 * number}">{line}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _bar(span: Span, top: int) -> str:
    place, count = span.part
    x, high = _LEFT + span.begin * _SCALE, _BAR / count
    y = top + place * high
    wide = (min(span.end, WINDOW_S) - span.begin) * _SCALE
    inside = max(wide - 1, 1.2)  # a gap of one, so that neighbours are told apart
    bar = (
        f'<rect class="{span.kind}" x="{x:.1f}" y="{y:g}" width="{inside:.1f}" height="{high:g}"/>'
    )
    if span.label and wide > 7 * len(span.label) + 4:
        middle = y + high / 2 + 4
        style = ' style="font-size:10px"' if count > 1 else ""
        bar += f'<text class="in" x="{x + wide / 2:.1f}" y="{middle:g}"{style}>{span.label}</text>'
    return bar


def _arrows(course: Course, tops: dict[int, int]) -> Iterator[str]:
    """From the network to each worker that takes something in, and before it along the network
    while that lies there."""
    network = tops[course.workers]
    for sent, at, worker in course.taken:
        if at >= WINDOW_S:
            continue
        x, up = _LEFT + at * _SCALE - 0.5, tops[worker] < network
        begin, tip = (network, tops[worker] + _BAR) if up else (network + _BAR, tops[worker])
        if at > sent + 0.1:
            lies = network - 3 if up else network + _BAR + 3
            before = _LEFT + min(sent, at) * _SCALE - 0.5
            yield _line("take", [(before, begin), (before, lies), (x, lies), (x, tip)])
        else:
            yield _line("take", [(x, begin), (x, tip)])


def _icon(entry: Entry, kind: str, name: str, top: int) -> str:
    """Which part of a vector is sent: cells of it, a half, one bit of each, waves, or to whom."""
    x, y = 58, top
    if entry.exchange == "pairs":
        rings = "".join(
            f'<circle class="{kind}" cx="{x + c}" cy="{y + 10}" r="4"/>' for c in (5, 17)
        )
        return rings + _line("icon", [(x + 5, y + 10), (x + 17, y + 10)])
    if entry.exchange == "gather" and not entry.rounds:
        wave = [(x + n, y + 10 - 8 * sin(n * pi / 5.5) * (1 - n / 30)) for n in range(23)]
        return _line("wave", wave)
    cells = []
    for number in range(25):
        row, column = divmod(number, 5)
        sent = number % 7 == 3 if entry.exchange == "gather" else number == 12
        if entry.share == 1:
            half = FRAGMENTED in name or "fragments" in OWN.get(name, {})
            sent = row < 2 if half else True
        side = 3.2
        if entry.share == 1 / 32:  # a bit of each element
            sent, side = True, 1.6 if number % 2 else 2.6
        inset = (3.2 - side) / 2
        place = f'x="{x + 4.2 * column + inset:.1f}" y="{y + 4.2 * row + inset:.1f}"'
        cells.append(
            f'<rect class="{kind if sent else "cell"}" {place} width="{side}" height="{side}"/>'
        )
    return "".join(cells)


def _outer(config: Any, y: float) -> Iterator[str]:
    """A circle of which the outer momentum's share is filled; Λ, with a foot if it is constant."""
    beta = getattr(config, "outer_momentum", 0.0)
    if beta and getattr(config, "momentum_weight", 1.0):
        x, r = 58, 6
        turn = 2 * pi * beta
        end = f"{x + r * sin(turn):.1f} {y - r * cos(turn):.1f}"
        yield f'<circle class="icon" cx="{x}" cy="{y:g}" r="{r}"/>'
        arc = f"A{r} {r} 0 {int(beta > 0.5)} 1 {end}"
        yield f'<path class="{MOMENTUM}" d="M{x} {y:g}L{x} {y - r:g}{arc}z"/>'
    gap = getattr(config, "gap_penalty", None)
    if gap is not None:
        yield _line("icon", [(68, y + 6), (73, y - 6), (78, y + 6)])
        if isinstance(gap, float):
            yield _line("icon", [(66, y + 8), (80, y + 8)])


def _height(value: float, below: float) -> float:
    """Of a place of the weights: they begin at 1, and 0 is best for all workers together."""
    return below + 6 + _UNIT * (1 - value)


def _curve(
    steps: Sequence[tuple[float, float]], path: list[list[float]], local: bool
) -> list[tuple[float, float]]:
    """Seconds and places: from the beginning of each step to its end, along until the next begins,
    and to where that begins."""
    points: list[tuple[float, float]] = []
    for number, (begin, end) in enumerate(steps):
        before, after = path[number][0], path[number + 1][0]
        points += [(begin, points[-1][1])] if points else []
        trained = path[number][1] if len(path[number]) > 1 else after
        points += [(begin, before), (end, trained if local else before)]
    return [(at, value) for at, value in points if at <= WINDOW_S]


def _line(kind: str, points: Sequence[tuple[float, float]], worker: int = 0) -> str:
    dash = f' stroke-dasharray="{_DASHES[worker]}"' if worker else ""
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{kind}"{dash} points="{places}"/>'


if __name__ == "__main__":
    main()
