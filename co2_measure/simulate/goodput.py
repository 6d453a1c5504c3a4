"""Goodput of nodes that fail against the number of GPUs, for each way to deal with a failure."""

from co2.errors import require
from co2_measure.simulate.drawn import drawn_goodput
from co2_measure.simulate.failures import DISCARD, RESTART, WAYS, Round, goodput
from co2_measure.simulate.methods import ENTRIES, LIMIT
from co2_measure.simulate.models import MODELS
from co2_measure.simulate.options import Options
from co2_measure.simulate.report import Panel, Report, report_of

STATE_VECTORS = 5
"""What a newcomer is sent, in fp32 vectors as large as the weights: those, Adam's two moments, and
an anchor and a momentum of the outer step. Methods with less are charged for as much."""
FORMATS = {
    "link": "",
    "method": "",
    "tau": "",
    "gpus": ",",
    "throughput": ",.0f",
    "failure_every_s": ",.0f",
    "checkpoint_every_s": ",.0f",
    **dict.fromkeys(WAYS, ".4f"),
}
"""The columns of the table, and how each is written."""


def ways(method: str, nodes: int) -> tuple[str, ...]:
    """The ways that a method has to deal with a failure. A single node has no others."""
    if nodes == 1:
        return (RESTART,)
    return WAYS if ENTRIES[method].elastic else (RESTART, DISCARD)


def goodput_report(options: Options) -> Report:
    """A line for each link, method, τ and number of GPUs.

    A newcomer's replicas, one for each GPU of its server, share its link to receive the state.

    Raises:
        ConfigError: `none` is among the methods.
    """
    hint = "has no means that a failure could disturb"
    require(LIMIT not in options.methods, "--method", LIMIT, hint)
    faults, state_bytes = options.faults, STATE_VECTORS * 4 * MODELS[options.model].num_parameters
    records, differ = [], 0.0
    lost = Panel("work lost, %", "log")
    for link, network, method, tau in options.cases():
        state_s = network.link.seconds(network.server_size * state_bytes)
        for gpus in options.gpus:
            nodes = -(-gpus // network.server_size)
            figures = options.figures(network, method, tau, gpus)
            round_ = Round(tau * figures.step_s, figures.wire_s, state_s)
            drawing = (faults, nodes, round_, options.num_failures, options.noise.seed)
            closed = {way: goodput(way, faults, nodes, round_) for way in ways(method, nodes)}
            drawn = {way: drawn_goodput(way, *drawing) for way in closed}
            differ = max(differ, *(abs(drawn[way] - closed[way]) for way in closed))
            records.append(
                {
                    "link": link,
                    "method": method,
                    "tau": tau,
                    "gpus": gpus,
                    "throughput": figures.throughput,
                    "failure_every_s": faults.mtbf_s / nodes,
                    "checkpoint_every_s": faults.interval_s(nodes),
                    **{way: closed.get(way) for way in WAYS},
                    **{f"{way}_drawn": drawn.get(way) for way in WAYS},
                }
            )
            for way, share in closed.items():
                lost.add(method, options.line(link, method, tau), gpus, 100 * (1 - share), way)
    title = f"{options.model}, goodput where nodes fail, simulated"
    return report_of(title, _statement(options, differ), records, FORMATS, (lost,))


def _statement(options: Options, differ: float) -> str:
    """What the figures rest on, in sentences. `differ`: the largest difference of what is drawn."""
    faults = options.faults
    network = next(iter(options.networks.values()))
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
