r"""The paper's Figure 1 from real runs: when a worker computes, sends, and stands still.

    python train.py task=gpt2 method=allreduce trace=true
    python train.py task=gpt2 method=co2 trace=true
    python -m co2.record.timeline results/runs/gpt2/allreduce/default/seed0 \
        results/runs/gpt2/co2/default/seed0

Draws a lane for computation and one for the network for each run, and prints what they add up to.
All runs are shown with the same number of steps: the last ones of each trace.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from co2 import program
from co2.arguments import Parser
from co2.comm.phases import OUTER_STEP, SNAPSHOT, STEP_END, WAIT
from co2.errors import REFUSED, ConfigError, require, unusable
from co2.record import drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Span = tuple[float, float]
"""Begin and end, in seconds."""

_PAUSE_S = 1e-3
"""Shorter pauses between operators are the interpreter's, not the network's."""
_FLOATS = ("float", "double", "c10::BFloat16", "c10::Half")
_DRAWN = {
    "compute": ("computes", 1, drawing.COMPUTE),
    "outer_steps": ("outer step", 1, "#8fbbe8"),
    "snapshots": ("snapshot", 1, "#1d3f73"),
    "still": ("stands still", 1, drawing.WAIT),
    "collectives": ("sends", 0, drawing.SEND),
}
"""Of the spans of a timeline: their name, their lane and their colour. Later ones hide others."""
_SEEN = 2e-3
"""The shortest span, as a share of the panel, that a reader can see."""


@dataclass(frozen=True)
class Timeline:
    """One worker's spans within the traced window, which begins at 0."""

    seconds: float
    compute: list[Span]
    """Operators and kernels."""
    outer_steps: list[Span]
    snapshots: list[Span]
    collectives: list[Span]
    """Collectives of floating-point numbers; those of flags are left out."""
    still: list[Span]
    """No operator runs although a collective does."""
    step_ends: list[float] = field(default_factory=list)
    """When steps end, and before them when the first one begins. Empty: the trace has no marks."""

    @property
    def steps(self) -> int:
        """Number of whole steps; 0 where they are not marked."""
        return max(0, len(self.step_ends) - 1)

    def last(self, steps: int) -> "Timeline":
        """The timeline of the last so many steps, at least one."""
        ends = self.step_ends[-steps - 1 :]
        begin, end = ends[0], ends[-1]

        def cut(spans: list[Span]) -> list[Span]:
            clipped = [(max(span[0], begin), min(span[1], end)) for span in spans]
            return [(since - begin, until - begin) for since, until in clipped if since < until]

        spans = {name: cut(getattr(self, name)) for name in _DRAWN}
        return Timeline(end - begin, step_ends=[moment - begin for moment in ends], **spans)

    def figures(self) -> dict[str, float | None]:
        """What the lanes add up to, in seconds; overlap as in a run's summary."""
        comm_s, still_s = total(self.collectives), total(self.still)
        return {
            "steps": float(self.steps),
            "window_s": self.seconds,
            "compute_s": total(self.compute),
            "collectives": float(len(self.collectives)),
            "collective_s": comm_s,
            "still_s": still_s,
            "overlap": 1 - still_s / comm_s if comm_s > 0 else None,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns 0, or 2 for a run that holds no trace."""
    parser = Parser(
        prog="python -m co2.record.timeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--rank", type=int, default=0, help="of the worker to draw (default: 0)")
    place = "default: trace/timeline.png in the first run's folder"
    parser.add_argument("--out", type=Path, help=f"the picture ({place})")
    args = parser.parse_args(argv)
    out = args.out or args.runs[0] / "trace" / "timeline.png"
    try:
        found = alike({title(run): read(run, args.rank) for run in args.runs})
        out.parent.mkdir(parents=True, exist_ok=True)
        figure(found).savefig(out, dpi=150)
    except (ConfigError, OSError) as error:
        refusal = unusable(error) if isinstance(error, OSError) else error
        print(f"error: {refusal}", file=sys.stderr)
        return REFUSED
    for name, lanes in found.items():
        figures = {
            key: "none" if own is None else f"{own:.3g}" for key, own in lanes.figures().items()
        }
        print(f"{name}: {'  '.join(f'{key}={own}' for key, own in figures.items())}")
    print(out)
    return 0


def title(run: Path) -> str:
    """Task, method and tag, which are the folders above the seed's."""
    return " · ".join(run.resolve().parts[-4:-1])


def read(run: Path, rank: int = 0) -> Timeline:
    """The trace of one worker of a run. Raises `ConfigError` where none can be read."""
    path = run / "trace" / f"rank_{rank}.json"
    hint = f"{path} is missing; train with trace=true, at least two rounds and three steps"
    require(path.is_file(), "RUN", run, hint)
    try:
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    except (ValueError, KeyError):
        raise ConfigError("RUN", run, f"{path} is no Chrome trace") from None
    return timeline(events)


def timeline(events: Sequence[dict[str, Any]]) -> Timeline:
    """Lanes from the complete events of a Chrome trace by torch.profiler."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    marked = [event for event in events if event.get("cat") == "user_annotation"]
    # gloo's threads carry what lies in the host's memory, also beside a GPU (comm.device=cpu).
    carried = [event for event in marked if event["name"].startswith("gloo:") and _floats(event)]
    worked = [event for event in kernels if "nccl" not in event["name"].lower()]
    carried += [event for event in kernels if "nccl" in event["name"].lower()]
    if not kernels:
        worked = [event for event in events if event.get("cat") == "cpu_op"]
        worked = [event for event in worked if not event["name"].startswith("c10d::")]
    begin = min(event["ts"] for event in (*worked, *carried))

    def spans(chosen: Iterable[dict[str, Any]]) -> list[Span]:
        return [((e["ts"] - begin) / 1e6, (e["ts"] + e["dur"] - begin) / 1e6) for e in chosen]

    def named(name: str) -> list[Span]:
        return merged(spans(event for event in marked if event["name"] == name))

    compute = merged(spans(worked), _PAUSE_S)
    last = max(end for _, end in compute)
    # The trace ends with its last step; a collective may then be under way.
    collectives = [(start, min(end, last)) for start, end in spans(carried) if start < last]
    if not kernels:  # a GPU works on while its host waits
        compute = without(compute, named(WAIT))
    return Timeline(
        seconds=last,
        compute=compute,
        outer_steps=named(OUTER_STEP),
        snapshots=named(SNAPSHOT),
        collectives=collectives,
        still=without(merged(collectives), compute),
        step_ends=sorted(end for _, end in spans(e for e in marked if e["name"] == STEP_END)),
    )


def _floats(event: dict[str, Any]) -> bool:
    return any(kind in _FLOATS for kind in event.get("args", {}).get("Input type", ()))


def merged(spans: Iterable[Span], pause: float = 0.0) -> list[Span]:
    """Their union, in order; pauses up to `pause` are filled."""
    union: list[Span] = []
    for begin, end in sorted(spans):
        if union and begin <= union[-1][1] + pause:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((begin, end))
    return union


def without(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """What of `spans` no other span covers; both are in order, without overlaps of their own."""
    left: list[Span] = []
    for begin, end in spans:
        for other_begin, other_end in others:
            if other_end <= begin or other_begin >= end:
                continue
            if other_begin > begin:
                left.append((begin, other_begin))
            begin = max(begin, other_end)
        if begin < end:
            left.append((begin, end))
    return left


def alike(timelines: dict[str, Timeline]) -> dict[str, Timeline]:
    """The timelines of equally many steps: as many as all have. Whole where one has no marks."""
    steps = min(timeline.steps for timeline in timelines.values())
    return {name: one.last(steps) if steps else one for name, one in timelines.items()}


def total(spans: Iterable[Span]) -> float:
    """Seconds of all spans together."""
    return sum(end - begin for begin, end in spans)


def figure(timelines: dict[str, Timeline]) -> "Figure":
    """A panel for each run on one scale of time: above what computes, below what travels, and how
    long the steps took. Its letters can be read on a phone. The legend names what can be seen."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shortest = _SEEN * max(lanes.seconds for lanes in timelines.values())
    seen: dict[str, Patch] = {}
    with rc_context({"font.size": 14}):
        drawn = Figure(figsize=(6, 1 + 1.3 * len(timelines)), layout="constrained")
        panels = drawn.subplots(len(timelines), 1, squeeze=False, sharex=True)[:, 0]
        for axis, (name, lanes) in zip(panels, timelines.items(), strict=True):
            for kind, (words, lane, colour) in _DRAWN.items():
                spans = getattr(lanes, kind)
                bars = [(begin, end - begin) for begin, end in spans]
                axis.broken_barh(bars, (lane - 0.4, 0.8), color=colour, linewidth=0)
                hidden = [] if kind in ("collectives", "still") else lanes.still
                if any(end - begin > shortest for begin, end in without(spans, hidden)):
                    seen[kind] = Patch(color=colour, label=words)
            axis.set_yticks([1, 0], ["worker", "network"])
            axis.set_ylim(-0.6, 1.6)
            axis.set_title(name, loc="left", fontsize="medium")
            if lanes.steps:
                words = f"{lanes.steps} steps in {lanes.seconds:.1f} s"
                axis.set_title(words, loc="right", fontsize="medium")
        panels[-1].set_xlabel("seconds")
        drawn.legend(
            handles=[seen[kind] for kind in _DRAWN if kind in seen],
            loc="outside upper left",
            ncols=3,
            frameon=False,
            handlelength=1,
            columnspacing=1,
        )
    return drawn


if __name__ == "__main__":
    program.run(main)
