"""The picture of `python -m co2.simulate --figure`: throughput and scaling against GPUs."""

from collections.abc import Sequence
from pathlib import Path

from co2.errors import ConfigError, require
from co2.simulate.methods import NO_ROUNDS
from co2.simulate.report import writing
from co2.simulate.scaling import ScalingPoint


def draw(points: Sequence[ScalingPoint], title: str, name: str) -> None:
    """Two panels with a line for each link, method and τ, in the format of the file's ending.

    Raises:
        ConfigError: matplotlib is not installed, does not know the format, or cannot write the
            file.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        hint = "needs matplotlib: pip install matplotlib"
        raise ConfigError("--figure", name, hint) from None
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    known = sorted(FigureCanvasAgg(figure).get_supported_filetypes())
    hint = f"must end in one of {', '.join(known)}"
    require(Path(name).suffix.lstrip(".") in known, "--figure", name, hint)
    lines: dict[str, list[ScalingPoint]] = {}
    for point in points:
        tau = "" if point.method in NO_ROUNDS else f" τ={point.tau}"
        lines.setdefault(f"{point.method}{tau}, {point.link}", []).append(point)
    left, right = figure.subplots(1, 2)
    for label, line in lines.items():
        gpus = [point.gpus for point in line]
        style = {"marker": "o", "markersize": 3, "label": label}
        left.plot(gpus, [point.figures.throughput for point in line], **style)
        right.plot(gpus, [point.scaling_ratio for point in line], **style)
    for axis, text in ((left, "units per second"), (right, "scaling ratio")):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("GPUs")
        axis.set_ylabel(text)
        axis.grid(alpha=0.3)
    left.set_yscale("log")
    left.legend(fontsize="small")
    figure.suptitle(title)
    with writing("--figure", name) as path:
        figure.savefig(path, dpi=150)
