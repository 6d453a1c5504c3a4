"""The figures of a run, their names and their units: what files, console, W&B and recipes show.

A field's metadata holds its unit and its meaning, which W&B shows as a table.
"""

# ruff: noqa: RUF009 — `figure` makes a dataclass field
import dataclasses
import json
import math
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, ClassVar

Line = dict[str, Any]
"""One line of metrics.jsonl: "kind", "step" and the figures. `Any`, because it is JSON."""


def figure(unit: str, meaning: str, **options: Any) -> Any:
    """A dataclass field with a meaning, and with a unit if it is a number."""
    return field(metadata={"unit": unit, "meaning": meaning}, **options)


@dataclass(frozen=True)
class Entry:
    """What becomes one line of metrics.jsonl."""

    kind: ClassVar[str]
    step: int

    def line(self, unit: str = "") -> Line:
        """This entry as a line; `unit` is what throughput counts."""
        return finite({"kind": self.kind, **dataclasses.asdict(self)})


@dataclass(frozen=True)
class Metrics(Entry):
    """What training did since the previous line of metrics.jsonl, on worker 0."""

    kind = "train"
    loss: float = figure("nats", "training loss of worker 0 in the newest step that it has made")
    lr: float = figure("1", "learning rate of the inner optimizer's first parameter group")
    throughput: float = figure("", "of all workers together: <unit>_per_s in a line")
    comm_s: float = figure("s", "collectives, from launch to completion")
    exposed_s: float = figure("s", "computation stood still for collectives")
    bytes: float = figure("bytes", "sent by worker 0")
    exposed_share: float = figure("share", "exposed_s as a share of the training time")
    data_share: float = figure("share", "waiting for batches as a share of the training time")
    own: dict[str, float] = field(default_factory=dict)
    """The method's own figures, which stand beside the others in a line."""
    per_gpu: float | None = None
    """Throughput of one GPU."""
    mfu: float | None = figure(
        "share", "model FLOP utilization: of the GPU's peak, on GPUs of co2/gpus.py", default=None
    )

    def line(self, unit: str = "") -> Line:
        values = super().line()
        own, mfu = values.pop("own"), values.pop("mfu")
        rates = {f"{unit}_per_s": values.pop("throughput")}
        per_gpu = {f"{unit}_per_s_per_gpu": values.pop("per_gpu"), "mfu": mfu}
        return values | own | rates | ({} if mfu is None else per_gpu)


@dataclass(frozen=True)
class Evaluation(Entry):
    """One evaluation of the consensus on the validation data."""

    kind = "eval"
    scores: dict[str, float]
    """The task's metrics; "loss" is one of them."""
    train_s: float
    """Seconds of training so far, without evaluations and checkpoints."""

    def line(self, unit: str = "") -> Line:
        values = super().line()
        train_s = values.pop("train_s")
        return values | values.pop("scores") | {"train_s": train_s}


@dataclass(frozen=True)
class Notice(Entry):
    """A decision of the method, in words."""

    kind = "notice"
    text: str


@dataclass(frozen=True)
class Change(Entry):
    """Replicas have come or gone since `step`, the last one that all of them have trained."""

    kind = "members"
    generation: int
    members: tuple[int, ...]
    """By their numbers, which are never given twice in a run."""
    lost: dict[int, str]
    """Who is gone, and why."""
    joined: tuple[int, ...]
    seconds: float
    """From the detection until training went on."""

    @classmethod
    def of(cls, line: Line) -> "Change":
        """The reverse of `line`."""
        lost = {int(one): why for one, why in line["lost"].items()}
        lists = {name: tuple(line[name]) for name in ("members", "joined")}
        return cls(line["step"], line["generation"], lost=lost, seconds=line["seconds"], **lists)

    def text(self) -> str:
        """This entry for a person."""
        parts = [f"worker {one} is lost ({why})" for one, why in self.lost.items()]
        parts += [f"worker {one} has joined" for one in self.joined]
        return f"{', '.join(parts) or 'a connection broke'}; {len(self.members)} train on"


@dataclass(frozen=True)
class Shares(Entry):
    """After `step` replicas make other numbers of steps in a round than before (launch.quorum)."""

    kind = "steps"
    round_steps: int
    """τ: steps of a round."""
    steps: dict[int, int]
    """By the numbers of the members: how many of them each makes."""
    fewer: tuple[int, ...]
    """Members that made all steps until now."""
    again: tuple[int, ...]
    """Members that make all steps again."""

    def text(self) -> str:
        """This entry for a person; empty if no replica entered or left reduced-step mode."""
        steps = f"of {self.round_steps} steps in a round"
        parts = [f"worker {one} makes {self.steps[one]} {steps}" for one in self.fewer]
        parts += [f"worker {one} makes all steps again" for one in self.again]
        return ", ".join(parts)


@dataclass(frozen=True)
class Ledger:
    """Bytes that one worker holds between steps, its gradients included."""

    parameter_bytes: int = figure("bytes", "weights that this worker holds")
    buffer_bytes: int = figure("bytes", "buffers of the model")
    gradient_bytes: int = figure("bytes", "gradients of the trained weights")
    inner_state_bytes: int = figure("bytes", "state of the inner optimizer")
    scratch_bytes: int = figure("bytes", "the method's scratch, on the model's device")
    extra_bytes: int = figure("bytes", "the method's copies of the model, on the model's device")
    host_bytes: int = figure("bytes", "scratch and copies, where they lie in the host's memory")
    average_bytes: int = figure("bytes", "moving average of the weights", default=0)


@dataclass(frozen=True)
class Summary:
    """The figures of a finished run, as summary.json keeps them. None where a figure is not known.

    Times, bytes and shares of communication are means over the workers; `train_s` and with it
    `throughput` are those of the slowest worker, `saving_s` of the one that stood still longest.
    """

    title: str
    task: str
    method: str
    tag: str
    scale: str
    seed: int
    final: dict[str, float | None] = figure("", "metrics of the last evaluation")
    baselines: dict[str, float | None] = figure("", "what no model should be worse than")
    steps: int = figure("steps", "optimizer steps of every replica")
    workers: int = figure("workers", "processes that trained")
    replica_size: int = figure("workers", "workers that share one replica")
    unit: str = figure("", "what throughput counts")
    throughput: float = figure("units/s", "tokens or samples of all workers together")
    comm_s: float | None = figure("s", "collectives, from launch to completion")
    exposed_s: float | None = figure("s", "computation stood still for collectives")
    exposed_share: float | None = figure("share", "exposed_s as a share of train_s")
    data_share: float = figure("share", "waiting for batches as a share of train_s")
    overlap: float | None = figure("share", "1 - exposed_s/comm_s")
    bytes_per_step: float = figure("bytes", "sent by one worker in one step")
    train_s: float = figure("s", "training, without evaluations and checkpoints")
    wall_s: float = figure("s", "from the start of the training loop to its end")
    peak_memory_bytes: int = figure("bytes", "held by one worker at most")
    extra_model_copies: float = figure("copies", "beyond parameters, gradients and inner state")
    memory: Ledger = figure("", "held by one worker between steps")
    device: str = figure("", "where worker 0 computed")
    folder: str = figure("", "of the run, relative to where it was started")
    mfu: float | None = figure("share", "model FLOP utilization; of known GPUs", default=None)
    saving_s: float | None = figure("s", "training stood still for checkpoints", default=None)
    members: list[Line] = field(default_factory=list)
    """How replicas came and went."""
    steps_made: list[int] = field(default_factory=list)
    """Steps that each replica has made, with launch.quorum."""
    exchange: dict[str, float | None] = field(default_factory=dict)
    """Of tokens that travelled to experts, since the last start."""
    reading: dict[str, float | None] = field(default_factory=dict)
    """Of samples from disk, of one worker since the last start."""
    own: dict[str, float | None] = field(default_factory=dict)
    """The method's own figures, which stand beside the others in summary.json."""

    def as_json(self) -> dict[str, Any]:
        """The content of summary.json."""
        values = dataclasses.asdict(self)
        own = values.pop("own")
        if self.mfu is None:
            del values["mfu"]
        return finite(values | own)

    @classmethod
    def read(cls, folder: Path) -> "Summary | None":
        """The summary of the run in a folder; None where the run has not finished."""
        path = folder / "summary.json"
        if not path.exists():
            return None
        values = json.loads(path.read_text())
        names = {own.name for own in dataclasses.fields(cls)}
        known = {name: value for name, value in values.items() if name in names}
        own = {name: value for name, value in values.items() if name not in names}
        return cls(**{**known, "memory": Ledger(**known["memory"])}, own=own)


UNITS: tuple[tuple[str, str, str], ...] = (
    *(
        (prefix + own.name, own.metadata["unit"], own.metadata["meaning"])
        for prefix, kind in (("train/", Metrics), ("", Summary), ("memory.", Ledger))
        for own in dataclasses.fields(kind)
        if own.metadata.get("unit")
    ),
    ("exchange.behind_s", "s", "experts computed between exchanges"),
    ("exchange.*_s", "s", "tokens were under way to experts, or computation stood still for them"),
    ("exchange.overlap", "share", "1 - exposed_s/comm_s of tokens"),
    ("exchange.bytes_per_step", "bytes", "of tokens, sent by one worker in one step"),
    ("reading.needed_bytes", "bytes", "of samples that no cache held"),
    ("reading.read_bytes", "bytes", "read for them"),
    ("reading.amplification", "1", "read_bytes over needed_bytes"),
    ("reading.planning_s", "s", "batches were laid out ahead of training"),
    ("reading.plan_bytes", "bytes", "of the largest such layout on disk"),
    ("step", "steps", "optimizer steps of every replica; the axis of all charts"),
    ("*_per_s", "units/s", "the unit is in the name; all workers together"),
    ("*_per_s_per_gpu", "units/s", "the unit is in the name; one GPU"),
    ("eval/train_s", "s", "training so far, without evaluations and checkpoints"),
    ("*loss", "nats", "mean over the validation data; shapenet rebuilds clouds: Chamfer-L2"),
    ("*perplexity", "1", "e to the validation loss"),
    ("*accuracy", "share", "0 to 1"),
    ("*top[15]", "share", "0 to 1"),
    ("*miou", "share", "0 to 1"),
    ("*entropy", "nats", "of the text's unigrams"),
    ("*gap", "1", "the staleness gap"),
    ("*busiest_expert", "1", "tokens that want it, over the mean of all experts"),
    ("*dropped", "share", "of the tokens' choices, over an expert's capacity"),
    ("*clipped", "share", "of the outer momentum's elements"),
    ("*tau", "steps", "of a round"),
    ("*interval", "steps", "between two exchanges"),
    ("*rounds", "rounds", "in which replicas have exchanged anything"),
)
"""Pattern of a metric's name, unit, meaning; the first pattern that fits counts. Scores of tasks
and the figures that only some methods have come last, as patterns."""


def unit_of(name: str) -> str:
    """The unit of a metric, as in `train/loss`, or of a figure of the summary; empty for none."""
    return next((unit for pattern, unit, _ in UNITS if fnmatch(name, pattern)), "")


def named(line: Line) -> dict[str, Any]:
    """The values of a line of metrics.jsonl by full names such as `train/loss`. `Any`: there are
    words and lists too."""
    return {f"{line['kind']}/{key}": line[key] for key in line if key not in ("kind", "step")}


def figures(line: Line) -> dict[str, float | None]:
    """The numbers among them; None for one that was not finite."""
    kinds = (int, float, type(None))
    return {name: value for name, value in named(line).items() if type(value) in kinds}


def flat(groups: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested groups by their full names: `final.loss`. `Any`: JSON or YAML."""
    found: dict[str, Any] = {}
    for key, value in groups.items():
        name = f"{prefix}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found


def finite(value: Any) -> Any:
    """The same values with None for what is no finite number, which JSON cannot hold."""
    if isinstance(value, dict):
        return {key: finite(own) for key, own in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
