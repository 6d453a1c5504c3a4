"""Step time, exposed communication and throughput against the number of GPUs."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from co2.simulate.figure import Panel
from co2.simulate.methods import LIMIT, label, rounds_of, tau_word
from co2.simulate.models import MODELS
from co2.simulate.options import Options
from co2.simulate.report import Report
from co2.simulate.schedule import Figures


@dataclass(frozen=True)
class ScalingPoint:
    """One simulated run: a link, a method, a τ and a number of GPUs."""

    link: str
    """As the command line names it."""
    method: str
    tau: int
    """Steps of a round; 1 for a method without rounds."""
    gpus: int
    figures: Figures
    of_limit: float
    """Throughput against that of GPUs that never wait for each other."""
    scaling_ratio: float
    """Throughput against that of `base_gpus` GPUs, scaled up: see `scaling_ratio()`."""

    def columns(self) -> dict[str, object]:
        """The columns of a CSV line."""
        return {
            "link": self.link,
            "method": self.method,
            "tau": self.tau,
            "gpus": self.gpus,
            **asdict(self.figures),
            "of_limit": self.of_limit,
            "scaling_ratio": self.scaling_ratio,
        }


def scaling_points(options: Options) -> list[ScalingPoint]:
    """A point for each link, method, τ and number of GPUs."""
    points = []
    for link, network in options.networks.items():
        limits = [options.figures(network, LIMIT, 1, gpus).throughput for gpus in options.gpus]
        for method in options.methods:
            for tau in rounds_of(method, options.taus):
                base = options.figures(network, method, tau, options.base_gpus)
                for gpus, limit in zip(options.gpus, limits, strict=True):
                    figures = options.figures(network, method, tau, gpus)
                    ratio = scaling_ratio(
                        figures.throughput, gpus, base.throughput, options.base_gpus
                    )
                    of_limit = figures.throughput / limit
                    points.append(ScalingPoint(link, method, tau, gpus, figures, of_limit, ratio))
    return points


def scaling_ratio(throughput: float, gpus: int, base: float, base_gpus: int) -> float:
    """Throughput against that of fewer GPUs, scaled up: the CO2 paper's T(128)/(8·T(16))."""
    return throughput / (gpus / base_gpus * base)


_CELLS: dict[str, Callable[[ScalingPoint], str]] = {
    "link": lambda point: point.link,
    "method": lambda point: point.method,
    "tau": lambda point: tau_word(point.method, point.tau),
    "gpus": lambda point: f"{point.gpus:,}",
    "throughput": lambda point: f"{point.figures.throughput:,.0f}",
    "of_limit": lambda point: f"{point.of_limit:.1%}",
    "scaling_ratio": lambda point: f"{point.scaling_ratio:.3f}",
    "step_s": lambda point: f"{point.figures.step_s:.4g}",
    "comm_s": lambda point: f"{point.figures.comm_s:.4g}",
    "exposed_s": lambda point: f"{point.figures.exposed_s:.4g}",
    "exposed_share": lambda point: f"{point.figures.exposed_share:.1%}",
    "overlap": lambda point: _share(point.figures.overlap),
    "bytes_per_step": lambda point: f"{point.figures.bytes_per_step:,.0f}",
}
"""The columns of the table, and how each one is written."""


def _share(share: float | None) -> str:
    return "–" if share is None else f"{share:.3f}"


def scaling_report(options: Options, points: Sequence[ScalingPoint]) -> Report:
    """The points as a table, with what they rest on."""
    return Report(
        title=f"{options.model}, simulated",
        statement=statement(options),
        head=list(_CELLS),
        cells=[[write(point) for write in _CELLS.values()] for point in points],
        records=[point.columns() for point in points],
    )


def scaling_panels(points: Sequence[ScalingPoint]) -> list[Panel]:
    """Throughput and scaling, with a line for each link, method and τ."""
    throughput: dict[str, list[tuple[int, float]]] = {}
    scaling: dict[str, list[tuple[int, float]]] = {}
    for point in points:
        line = f"{label(point.method, point.tau)}, {point.link}"
        throughput.setdefault(line, []).append((point.gpus, point.figures.throughput))
        scaling.setdefault(line, []).append((point.gpus, point.scaling_ratio))
    return [Panel("units per second", throughput, "log"), Panel("scaling ratio", scaling)]


def statement(options: Options) -> str:
    """What the figures rest on, in sentences."""
    unit = MODELS[options.model].unit
    network = next(iter(options.networks.values()))
    noise, differ = options.noise, ""
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
