"""Goodput of nodes that fail against the number of GPUs, for each way to deal with a failure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from co2.errors import require
from co2.simulate.drawn import drawn_goodput
from co2.simulate.failures import DISCARD, RESTART, WAYS, Round, goodput
from co2.simulate.figure import Panel
from co2.simulate.methods import LIMIT, NO_ROUNDS, NOT_ELASTIC, label, rounds_of, tau_word
from co2.simulate.models import MODELS
from co2.simulate.network import Network
from co2.simulate.options import Options
from co2.simulate.report import Report
from co2.simulate.schedule import Figures

STATE_VECTORS = 5
"""What a newcomer is sent, in fp32 vectors as large as the weights: those, Adam's two moments, and
an anchor and a momentum of the outer step. Methods with less are charged for as much."""


@dataclass(frozen=True)
class GoodputPoint:
    """A link, a method, a τ and a number of GPUs, with the goodput of each way that there is."""

    link: str
    """As the command line names it."""
    method: str
    tau: int
    """Steps of a round; 1 for a method without rounds."""
    gpus: int
    throughput: float
    """Units (tokens or images) per second without failures."""
    failure_every_s: float
    """Mean seconds between failures of any node."""
    checkpoint_every_s: float
    """Seconds of training between two checkpoints, of the way that needs them."""
    goodput: Mapping[str, float]
    """By closed forms."""
    drawn: Mapping[str, float]
    """The same by drawing failures."""

    def columns(self) -> dict[str, object]:
        """The columns of a CSV line; None for a way that the method does not have."""
        return {
            "link": self.link,
            "method": self.method,
            "tau": self.tau,
            "gpus": self.gpus,
            "throughput": self.throughput,
            "failure_every_s": self.failure_every_s,
            "checkpoint_every_s": self.checkpoint_every_s,
            **{way: self.goodput.get(way) for way in WAYS},
            **{f"{way}_drawn": self.drawn.get(way) for way in WAYS},
        }

    def cells(self) -> list[str]:
        """The cells of the table's line, under `HEAD`."""
        shares = [self.goodput.get(way) for way in WAYS]
        return [
            self.link,
            self.method,
            tau_word(self.method, self.tau),
            f"{self.gpus:,}",
            f"{self.throughput:,.0f}",
            f"{self.failure_every_s:,.0f}",
            f"{self.checkpoint_every_s:,.0f}",
            *("–" if share is None else f"{share:.4f}" for share in shares),
        ]


HEAD = (
    *("link", "method", "tau", "gpus", "throughput", "failure_every_s", "checkpoint_every_s"),
    *WAYS,
)


def ways(method: str, nodes: int) -> tuple[str, ...]:
    """The ways that a method has to deal with a failure. A single node has no others."""
    if nodes == 1:
        return (RESTART,)
    return (RESTART, DISCARD) if method in (*NO_ROUNDS, *NOT_ELASTIC) else WAYS


def goodput_points(options: Options) -> list[GoodputPoint]:
    """A point for each link, method, τ and number of GPUs.

    Raises:
        ConfigError: `none` is among the methods.
    """
    hint = "has no means that a failure could disturb"
    require(LIMIT not in options.methods, "--method", LIMIT, hint)
    return [
        _point(options, link, method, tau, gpus)
        for link in options.networks
        for method in options.methods
        for tau in rounds_of(method, options.taus)
        for gpus in options.gpus
    ]


def _point(options: Options, link: str, method: str, tau: int, gpus: int) -> GoodputPoint:
    network, faults = options.networks[link], options.faults
    figures = options.figures(network, method, tau, gpus)
    nodes = -(-gpus // network.server_size)
    round_ = round_of(options, network, figures, tau)
    found = ways(method, nodes)
    return GoodputPoint(
        link=link,
        method=method,
        tau=tau,
        gpus=gpus,
        throughput=figures.throughput,
        failure_every_s=faults.mtbf_s / nodes,
        checkpoint_every_s=faults.interval_s(nodes),
        goodput={way: goodput(way, faults, nodes, round_) for way in found},
        drawn={
            way: drawn_goodput(way, faults, nodes, round_, options.num_failures, options.noise.seed)
            for way in found
        },
    )


def round_of(options: Options, network: Network, figures: Figures, tau: int) -> Round:
    """The times of an undisturbed run that count when a node fails.

    The replicas of a newcomer, one for each GPU of its server, share its link to receive the state.
    """
    state_bytes = STATE_VECTORS * 4 * MODELS[options.model].num_parameters
    return Round(
        seconds=tau * figures.step_s,
        mean_s=figures.wire_s,
        state_s=network.link.seconds(network.server_size * state_bytes),
    )


def goodput_report(options: Options, points: Sequence[GoodputPoint]) -> Report:
    """The points as a table, with what they rest on."""
    return Report(
        title=f"{options.model}, goodput where nodes fail, simulated",
        statement=statement(options, points),
        head=HEAD,
        cells=[point.cells() for point in points],
        records=[point.columns() for point in points],
    )


def goodput_panels(points: Sequence[GoodputPoint]) -> list[Panel]:
    """Goodput and what is left of the throughput, with a line for each link, method, τ and way."""
    share: dict[str, list[tuple[int, float]]] = {}
    throughput: dict[str, list[tuple[int, float]]] = {}
    for point in points:
        for way, value in point.goodput.items():
            line = f"{label(point.method, point.tau)}, {way}, {point.link}"
            share.setdefault(line, []).append((point.gpus, value))
            throughput.setdefault(line, []).append((point.gpus, value * point.throughput))
    return [Panel("goodput", share), Panel("useful units per second", throughput, "log")]


def statement(options: Options, points: Sequence[GoodputPoint]) -> str:
    """What the figures rest on, in sentences."""
    faults = options.faults
    network = next(iter(options.networks.values()))
    differ = max(
        abs(drawn - point.goodput[way]) for point in points for way, drawn in point.drawn.items()
    )
    daly = " (Daly's optimum)" if faults.checkpoint_every_s is None else ""
    return (
        "Simulated, not measured. Goodput is useful replica-steps per second, as a share of those "
        "of the same method without failures; throughput is "
        f"{MODELS[options.model].unit} per second without failures. A node of "
        f"{network.server_size} GPUs fails once in {faults.mtbf_s / 3600:,.4g} hours on average; "
        f"{faults.detect_s:g} s to detect it, {faults.repair_s:g} s until another stands in, and "
        f"{faults.restart_s:g} s until its processes can train. restart: all start again from the "
        f"last checkpoint, which takes {faults.checkpoint_s:g} s, every checkpoint_every_s of "
        f"training{daly}. discard: the others throw the round away; without rounds, the step. "
        "elastic: they keep it, and take its mean again. Under both all pause for "
        f"{faults.regroup_s:g} s to regroup, and while a newcomer receives {STATE_VECTORS} fp32 "
        "vectors as large as the model for each of its GPUs. By closed forms; "
        f"{options.num_failures:,} failures drawn for each, seed {options.noise.seed}, differ from "
        f"them by {differ:.4f} at most."
    )
