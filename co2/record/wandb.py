"""W&B: a run is one W&B run, in as many segments as it was trained in.

Offline each segment is a folder `wandb/offline-run-<time>-<id>`, and `wandb sync` joins those of
one id. `wandb/segments.json` keeps the id and where each segment begins and ends. A segment that
holds steps which are trained again, or whose process was killed with what it had not written yet,
is replaced by the next one: that is told from its beginning on, out of metrics.jsonl. So every step
is there once.

No error of W&B ends a training: it is said in one line, and the run goes on without W&B.
"""

import contextlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from co2.config import Config
from co2.files import write_durably
from co2.record import timeline

Line = dict[str, Any]
"""Of metrics.jsonl: "kind", "step", and the figures."""

SEGMENTS = "segments.json"
_FINISH_S = 120.0
"""For what is not uploaded yet when a segment ends; the files keep it."""

UNITS = (
    ("step", "steps", "optimizer steps of every replica; the axis of all charts"),
    ("*loss", "nats", "mean of a batch or of the validation part; shapenet rebuilds: Chamfer-L2"),
    ("*perplexity", "1", "e to the validation loss"),
    ("*accuracy", "share", "0 to 1"),
    ("*top[15]", "share", "0 to 1"),
    ("*miou", "share", "0 to 1"),
    ("*_share", "share", "of training time, 0 to 1"),
    ("*_per_s", "units/s", "the unit is in the name; all workers together"),
    ("throughput", "units/s", "the config's task tells the unit; all workers together"),
    ("*comm_s", "s", "collectives, from launch to completion; train: since the line before"),
    ("*exposed_s", "s", "computation stood still for collectives; train: since the line before"),
    ("*train_s", "s", "training so far, without evaluations and checkpoints"),
    ("*_s", "s", ""),
    ("train/bytes", "bytes", "sent by worker 0 since the line before"),
    ("bytes_per_step", "bytes", "sent by one worker"),
    ("*bytes", "bytes", "held by one worker"),
    ("overlap", "share", "1 - exposed_s/comm_s"),
    ("extra_model_copies", "copies", "of the model, beyond parameters, gradients and inner state"),
    ("*entropy", "nats", "of the text's unigrams"),
    ("train/lr", "1", "of the inner optimizer"),
    ("*gap", "1", "the staleness gap"),
    ("*clipped", "share", "of the outer momentum's elements"),
    ("*tau", "steps", "of a round"),
    ("*interval", "steps", "between two exchanges"),
    ("*rounds", "rounds", "in which replicas have exchanged anything"),
    ("steps", "steps", ""),
)
"""Pattern of a name, unit, what it is. The first that fits counts."""

_LOWER_IS_BETTER = ("loss", "perplexity")


def unit(name: str) -> str:
    """Of a metric, `train/loss`, or of a figure of the summary; empty for a mere number."""
    return next((unit for pattern, unit, _ in UNITS if fnmatch(name, pattern)), "")


class Tracking:
    """Tells W&B what a run's folder is told.

    Args:
        config: of the run.
        values: the same, as plain values.
        folder: of the run; its metrics.jsonl ends at `step`.
        step: where training goes on.
        say: prints a line for the person at the console.
    """

    def __init__(
        self,
        config: Config,
        values: dict[str, Any],
        folder: Path,
        step: int,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._values, self._folder, self._say = config, values, folder, say
        self._run: Any = None
        self._step = step
        self._defined: set[str] = set()
        self._guarded(lambda: self._begin(step))

    def log(self, line: Line) -> None:
        """A line of metrics.jsonl, where it is already."""
        self._tell(lambda: self._log(line))

    def finish(self, summary: dict[str, Any]) -> None:
        """The final figures, with tables and pictures."""
        self._tell(lambda: self._end(summary))

    def close(self, status: int) -> None:
        """The segment is over. `status` 0: the run has finished, or will go on."""
        self._tell(lambda: self._close(status))
        self._run = None

    def _tell(self, tell: Callable[[], None]) -> None:
        """A SIGTERM to all of a job, as a cluster sends it, ends W&B's own process, and what it
        has not written yet is lost: another segment takes the place of this one."""

        def told() -> None:
            try:
                tell()
            except ConnectionError:
                import wandb

                with contextlib.suppress(ConnectionError):
                    wandb.teardown()
                self._begin(self._step)
                tell()

        if self._run is not None:
            self._guarded(told)

    def _guarded(self, tell: Callable[[], None]) -> None:
        try:
            tell()
        except Exception as error:  # whatever it is, it is not worth a training
            self._run = None
            reason = (str(error).strip() or "no reason given").splitlines()[0]
            self._say(f"W&B: {type(error).__name__}: {reason}; the run goes on without it")

    def _begin(self, step: int) -> None:
        """Another segment, told what those that it replaces were told."""
        import wandb

        path = self._folder / "wandb" / SEGMENTS
        state = json.loads(path.read_text()) if path.exists() else {}
        state = {"id": uuid.uuid4().hex[:12], "segments": [], **state}
        replaced = list(_to_replace(path.parent, state["segments"], step))
        begun = min([step, *(segment["begun"] for segment in replaced)])
        self._run = wandb.init(
            project="co2-suite",
            dir=self._folder,
            mode=self._config.log.wandb.value,
            id=state["id"],
            resume="allow",
            config=self._values,
            **_labels(self._config),
            settings=wandb.Settings(
                silent=True,
                console="off",
                x_disable_stats=True,
                finish_timeout=_FINISH_S,
                finish_timeout_raises=True,
            ),
        )
        own = {"folder": Path(self._run.dir).parent.name, "begun": begun, "ended": None}
        for segment in replaced:
            if segment["folder"].startswith("offline-") and segment["folder"] != own["folder"]:
                shutil.rmtree(path.parent / segment["folder"], ignore_errors=True)
        kept = state["segments"][: len(state["segments"]) - len(replaced)]
        path.parent.mkdir(exist_ok=True)
        write_durably(path, json.dumps({**state, "segments": [*kept, own]}, indent=1))
        self._defined.clear()
        if begun == 0:
            table = wandb.Table(columns=["metric", "unit", "meaning"], data=list(map(list, UNITS)))
            self._run.log({"units": table}, step=0)
        for line in self._lines():
            if line["step"] > begun:
                self._log(line)

    def _log(self, line: Line) -> None:
        values = {
            f"{line['kind']}/{key}": value
            for key, value in line.items()
            if key not in ("kind", "step") and value is not None
        }
        for name in sorted(values.keys() - self._defined):
            self._run.define_metric(name, step_metric="step", summary=_best(name))
            self._defined.add(name)
        self._step = line["step"]
        self._run.log({**values, "step": self._step}, step=self._step)

    def _end(self, summary: dict[str, Any]) -> None:
        import wandb

        lines = list(self._lines())
        with tempfile.TemporaryDirectory() as folder:
            pictures = {
                f"figures/{path.stem}": wandb.Image(str(path))
                for path in _draw(self._folder, lines, Path(folder))
            }
            self._run.log({**_tables(summary, lines), **pictures}, step=self._step)
        self._run.summary.update(summary)

    def _close(self, status: int) -> None:
        self._run.finish(exit_code=status)
        path = self._folder / "wandb" / SEGMENTS
        state = json.loads(path.read_text())
        state["segments"][-1]["ended"] = self._step
        write_durably(path, json.dumps(state, indent=1))

    def _lines(self) -> Iterator[Line]:
        path = self._folder / "metrics.jsonl"
        return map(json.loads, path.read_text().splitlines() if path.exists() else ())


def is_open(folder: Path) -> bool:
    """Whether the last segment in a run's folder `wandb` is being written, or was cut off."""
    path = folder / SEGMENTS
    segments = json.loads(path.read_text())["segments"] if path.exists() else []
    return bool(segments) and segments[-1]["ended"] is None


def _to_replace(folder: Path, segments: Sequence[Line], step: int) -> Iterator[Line]:
    """The last segments, newest first: those cut off, or with steps after `step`. What has been
    synced is not called back."""
    for segment in reversed(segments):
        whole = segment["ended"] is not None and segment["ended"] <= step
        if whole or any((folder / segment["folder"]).glob("*.wandb.synced")):
            return
        yield segment


def _labels(config: Config) -> dict[str, Any]:
    """How people find the run. W&B's own variables count: WANDB_RUN_GROUP, which a sweep sets, in
    place of ours; WANDB_TAGS, where recipes put their names, beside ours."""
    more = [tag for tag in os.environ.get("WANDB_TAGS", "").split(",") if tag]
    return {
        "name": f"{config.task}-{config.method}-{config.tag}-seed{config.train.seed}",
        "group": os.environ.get("WANDB_RUN_GROUP", f"{config.task}-{config.method}"),
        "tags": list(dict.fromkeys((config.task, config.method, config.scale, *more))),
    }


def _best(name: str) -> str | None:
    """What the summary keeps of a metric beside its last value."""
    kind, _, key = name.partition("/")
    if key in _LOWER_IS_BETTER:
        return "min,last"
    return "max,last" if kind == "eval" and key != "train_s" else None


def _tables(summary: dict[str, Any], lines: Sequence[Line]) -> dict[str, Any]:
    """Evaluations; what is held and sent; the other figures of the summary."""
    import wandb

    scores = [line for line in lines if line["kind"] == "eval"]
    names: list[Any] = [key for key in scores[-1] if key != "kind"] if scores else []
    rows = [[name, float(value), unit(name)] for name, value in _numbers(summary)]
    ledger = [row for row in rows if row[2] in ("bytes", "copies")]
    head: list[Any] = ["figure", "value", "unit"]
    return {
        "tables/evaluations": wandb.Table(names, [[s.get(name) for name in names] for s in scores]),
        "tables/ledger": wandb.Table(head, ledger),
        "tables/summary": wandb.Table(head, [row for row in rows if row not in ledger]),
    }


def _numbers(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Of the summary, those of its nodes too: `final.loss`."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{name}", number) for name, number in _numbers(value))
        elif isinstance(value, int | float):
            yield key, value


def _draw(run: Path, lines: Sequence[Line], folder: Path) -> Iterator[Path]:
    """The loss, and the timeline of a run with trace=true."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for kind, label in (("train", "training, worker 0"), ("eval", "validation, consensus")):
        told = [e for e in lines if e["kind"] == kind and e.get("loss") is not None]
        steps, losses = [e["step"] for e in told], [e["loss"] for e in told]
        axis.plot(steps, losses, label=label, marker="o" if kind == "eval" else None)
    axis.set_xlabel("steps")
    axis.set_ylabel("loss")
    axis.legend()
    figure.savefig(folder / "loss.png", dpi=150)
    yield folder / "loss.png"
    if (run / "trace" / "rank_0.json").is_file():
        timeline.draw({timeline.title(run): timeline.read(run)}, folder / "timeline.png")
        yield folder / "timeline.png"
