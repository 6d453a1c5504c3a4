"""Step time, exposed communication and throughput against the number of GPUs."""

from dataclasses import asdict

from co2_measure.simulate.methods import LIMIT, WITH_FRAGMENTS
from co2_measure.simulate.models import MODELS
from co2_measure.simulate.options import Options
from co2_measure.simulate.report import Panel, Report, report_of

FORMATS = {
    "link": "",
    "method": "",
    "tau": "",
    "gpus": ",",
    "throughput": ",.0f",
    "of_limit": ".1%",
    "scaling_ratio": ".3f",
    "step_s": ".4g",
    "comm_s": ".4g",
    "exposed_s": ".4g",
    "exposed_share": ".1%",
    "overlap": ".3f",
    "bytes_per_step": ",.0f",
}
"""The columns of the table, and how each is written."""


def scaling_report(options: Options) -> Report:
    """A line for each link, method, τ and number of GPUs."""
    network, *_ = options.networks.values()
    limits = [options.figures(network, LIMIT, 1, gpus).throughput for gpus in options.gpus]
    records = []
    throughputs, ratios = Panel("units per second", "log"), Panel("scaling ratio")
    for link, network, method, tau in options.cases():
        base = options.figures(network, method, tau, options.base_gpus).throughput
        for gpus, limit in zip(options.gpus, limits, strict=True):
            figures = options.figures(network, method, tau, gpus)
            throughput = figures.throughput
            ratio = scaling_ratio(throughput, gpus, base, options.base_gpus)
            case = {"link": link, "method": method, "tau": tau, "gpus": gpus}
            shares = {"of_limit": throughput / limit, "scaling_ratio": ratio}
            records.append({**case, **asdict(figures), **shares})
            name = options.line(link, method, tau)
            throughputs.add(method, name, gpus, throughput)
            ratios.add(method, name, gpus, ratio)
    title, panels = f"{options.model}, simulated", (throughputs, ratios)
    return report_of(title, _statement(options), records, FORMATS, panels)


def scaling_ratio(throughput: float, gpus: int, base: float, base_gpus: int) -> float:
    """Throughput against that of fewer GPUs, scaled up: the CO2 paper's T(128)/(8·T(16))."""
    return throughput / (gpus / base_gpus * base)


def _statement(options: Options) -> str:
    """What the figures rest on, in sentences."""
    unit = MODELS[options.model].unit
    network = next(iter(options.networks.values()))
    noise, differ = options.noise, ""
    if options.fragments > 1:
        late = "" if options.delay is None else f", each {options.delay} steps late"
        differ += f"In {options.fragments} fragments{late}: {', '.join(WITH_FRAGMENTS)}. "
    if noise.jitter:
        differ += f"Jitter {noise.jitter:g} of a step's time, seed {noise.seed}. "
    if noise.slow_count or noise.slow_share:
        slow = f"{noise.slow_share:.3g} of all" if noise.slow_share else noise.slow_count
        differ += f"Slower by {noise.slowdown:g} in every step: {slow}. "
    return (
        f"Simulated, not measured. {options.units:g} {unit} per GPU and step; a step computes for "
        f"{options.step_s:.4g} s ({options.compute}); {options.wire} on the wire in buckets of "
        f"{options.bucket_mb:g} MiB; backward is the last {options.backward_share:.0%} of a step. "
        f"Servers of {network.server_size} share a link, of which {network.link.efficiency:.0%} is "
        f"left for payload; all-reduce: {network.collective}. "
        f"{differ}comm_s is per collective, exposed_s per step, of_limit is against GPUs that "
        "never wait for each other, scaling_ratio = "
        f"T(G)/(G/{options.base_gpus}·T({options.base_gpus}))."
    )
