"""The picture of `python -m co2.simulate --figure`: panels of lines against GPUs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from co2.errors import ConfigError, require
from co2.simulate.report import writing


@dataclass(frozen=True)
class Panel:
    """A part of the picture."""

    text: str
    """What its lines show."""
    lines: Mapping[str, Sequence[tuple[int, float]]]
    """GPUs and the value at them, by label."""
    scale: str = "linear"
    """Of the values: `linear` or `log`."""


def draw(panels: Sequence[Panel], title: str, name: str) -> None:
    """The panels side by side, in the format of the file's ending. The first has the legend.

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
    (axes,) = figure.subplots(1, len(panels), squeeze=False)
    for axis, panel in zip(axes, panels, strict=True):
        for label, line in panel.lines.items():
            axis.plot(*zip(*line, strict=True), marker="o", markersize=3, label=label)
        axis.set_xscale("log", base=2)
        axis.set_yscale(panel.scale)
        axis.set_xlabel("GPUs")
        axis.set_ylabel(panel.text)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.suptitle(title)
    with writing("--figure", name) as path:
        figure.savefig(path, dpi=150)
