"""W&B: a run is one W&B run, in as many segments as it was trained in.

Offline each segment is a folder `wandb/offline-run-<time>-<id>`, and `wandb sync` joins the
segments of one id. `wandb/segments.json` keeps the id and the first and last step of each segment.
The next segment replaces one that holds steps which are trained again, or whose process was killed
before it had written everything: the next one then begins where that one began, with the lines of
metrics.jsonl. So W&B has every step once.

No error of W&B ends a training: it is printed in one line, and the run goes on without W&B.
"""

import contextlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from co2.config import Config, Wandb
from co2.record import timeline
from co2.record.console import Console
from co2.record.files import whole_lines, write_durably
from co2.record.metrics import UNITS, Change, Line, Summary, numbers, unit_of

SEGMENTS = "segments.json"
_FINISH_S = 120.0
"""Seconds that uploading may go on when a segment ends; what is left then stays in its files."""
_LOWER_IS_BETTER = ("loss", "perplexity")


_MODES = (Wandb.disabled, Wandb.offline, Wandb.online)


def mode(chosen: Wandb) -> Wandb:
    """`log.wandb`, or what W&B's own variable WANDB_MODE names, whichever records less."""
    named = {own.value: own for own in Wandb} | {"dryrun": Wandb.offline}  # as W&B called it once
    own = named.get(os.environ.get("WANDB_MODE", ""), Wandb.online)
    return min(chosen, own, key=_MODES.index)


class Tracking:
    """An experiment tracker that hears of every line of metrics.jsonl. This one ignores it all."""

    def log(self, line: Line) -> None:
        """A line has been written to metrics.jsonl."""

    def finish(self, summary: Summary) -> None:
        """The final figures are known."""

    def close(self, status: int) -> None:
        """The segment is over. `status` 0: the run has finished, or can go on."""


class WandbTracking(Tracking):
    """A segment of a W&B run.

    Args:
        config: of the run.
        values: the same as plain values.
        folder: of the run; its metrics.jsonl ends at `step`.
        step: where training goes on.
        tags: of the W&B run, beside task, method and scale.
        console: prints the line that a person reads when W&B fails.
    """

    def __init__(
        self,
        config: Config,
        values: dict[str, Any],
        folder: Path,
        step: int,
        tags: Sequence[str],
        console: Console,
    ) -> None:
        self._config, self._values, self._folder = config, values, folder
        self._tags, self._console = tuple(tags), console
        self._run: Any = None  # wandb's own type, which would have to be imported for it
        self._step = step
        self._defined: set[str] = set()
        self._guarded(lambda: self._begin(step))

    def log(self, line: Line) -> None:
        self._send(lambda: self._log(line))

    def finish(self, summary: Summary) -> None:
        """The final figures, with tables and pictures."""
        self._send(lambda: self._end(summary.as_json()))

    def close(self, status: int) -> None:
        self._send(lambda: self._close(status))
        self._run = None

    def _send(self, action: Callable[[], None]) -> None:
        """Call W&B, and again in a new segment where its own process has died: a SIGTERM that a
        cluster sends to all of a job ends it, and what it had not written yet is lost."""

        def attempt() -> None:
            try:
                action()
            except ConnectionError:
                with contextlib.suppress(ConnectionError):
                    _await_end()
                self._begin(self._step)
                action()

        if self._run is not None:
            self._guarded(attempt)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever it is, it is not worth a training
            self._run = None
            reason = (str(error).strip() or "no reason given").splitlines()[0]
            line = f"W&B: {type(error).__name__}: {reason}; the run goes on without it"
            self._console.print_line(line)

    def _begin(self, step: int) -> None:
        """Start another segment, with all the lines of those that it replaces."""
        import wandb

        path = self._folder / "wandb" / SEGMENTS
        state = json.loads(path.read_text()) if path.exists() else {}
        state = {"id": uuid.uuid4().hex[:12], "segments": [], **state}
        replaced = list(_to_replace(path.parent, state["segments"], step))
        begun = min([step, *(segment["begun"] for segment in replaced)])
        self._run = wandb.init(
            project="co2-suite",
            dir=self._folder,
            mode=mode(self._config.log.wandb).value,
            id=state["id"],
            resume="allow",
            config=self._values,
            **_labels(self._config, self._tags),
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

        lines = self._lines()
        with tempfile.TemporaryDirectory() as folder:
            pictures = {
                f"figures/{path.stem}": wandb.Image(str(path))
                for path in _draw(self._folder, lines, Path(folder))
            }
            self._run.log({**_tables(summary, lines), **pictures}, step=self._step)
        self._run.summary.update(summary)

    def _close(self, status: int) -> None:
        self._run.finish(exit_code=status)
        _await_end()
        path = self._folder / "wandb" / SEGMENTS
        state = json.loads(path.read_text())
        state["segments"][-1]["ended"] = self._step
        write_durably(path, json.dumps(state, indent=1))

    def _lines(self) -> list[Line]:
        return whole_lines(self._folder / "metrics.jsonl")


def _await_end() -> None:
    """Wait for W&B's own process, which writes the end of a segment after `finish`. It ends with
    this process, and W&B's hook that waits for it does not run in one of multiprocessing.

    Raises:
        ConnectionError: when it was killed, or failed.
    """
    import wandb

    try:
        wandb.teardown()
    except SystemExit as ended:
        raise ConnectionError(f"W&B's own process ended with {ended.code}") from ended


def is_open(folder: Path) -> bool:
    """Whether the last segment in a run's folder `wandb` is still being written, or was cut off."""
    path = folder / SEGMENTS
    segments = json.loads(path.read_text())["segments"] if path.exists() else []
    return bool(segments) and segments[-1]["ended"] is None


def _to_replace(folder: Path, segments: Sequence[Line], step: int) -> Iterator[Line]:
    """The last segments, newest first, that were cut off or have steps after `step`. A segment that
    has been synced stays."""
    for segment in reversed(segments):
        whole = segment["ended"] is not None and segment["ended"] <= step
        if whole or any((folder / segment["folder"]).glob("*.wandb.synced")):
            return
        yield segment


def _labels(config: Config, tags: Sequence[str]) -> dict[str, Any]:
    """How people find the run. W&B's own variables count: WANDB_RUN_GROUP, which a sweep sets, in
    place of our group; WANDB_TAGS beside our tags."""
    environment = [tag for tag in os.environ.get("WANDB_TAGS", "").split(",") if tag]
    known = (config.task, config.method, config.scale, *environment, *tags)
    return {
        "name": f"{config.task}-{config.method}-{config.tag}-seed{config.train.seed}",
        "group": os.environ.get("WANDB_RUN_GROUP", f"{config.task}-{config.method}"),
        "tags": list(dict.fromkeys(known)),
    }


def _best(name: str) -> str | None:
    """Which extreme W&B's summary keeps of a metric beside its last value."""
    kind, _, key = name.partition("/")
    if key in _LOWER_IS_BETTER:
        return "min,last"
    return "max,last" if kind == "eval" and key != "train_s" else None


def _tables(summary: dict[str, Any], lines: Sequence[Line]) -> dict[str, Any]:
    """The evaluations, memory and traffic, the summary's other figures, and who came and went."""
    import wandb

    scores = [line for line in lines if line["kind"] == "eval"]
    names: list[Any] = [key for key in scores[-1] if key != "kind"] if scores else []
    rows = [[name, float(value), unit_of(name)] for name, value in numbers(summary)]
    ledger = [row for row in rows if row[2] in ("bytes", "copies")]
    head: list[Any] = ["figure", "value", "unit"]
    tables = {
        "tables/evaluations": wandb.Table(names, [[s.get(name) for name in names] for s in scores]),
        "tables/ledger": wandb.Table(head, ledger),
        "tables/summary": wandb.Table(head, [row for row in rows if row not in ledger]),
    }
    changes = [Change.of(line) for line in lines if line["kind"] == "members"]
    if changes:
        told: list[Any] = [[c.step, len(c.members), c.seconds, c.text()] for c in changes]
        tables["tables/members"] = wandb.Table(["step", "members", "seconds", "change"], told)
    return tables


def _draw(run: Path, lines: Sequence[Line], folder: Path) -> Iterator[Path]:
    """The loss, and the timeline of a run with trace=true."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for kind, label in (("train", "training, worker 0"), ("eval", "validation, consensus")):
        found = [e for e in lines if e["kind"] == kind and e.get("loss") is not None]
        steps, losses = [e["step"] for e in found], [e["loss"] for e in found]
        axis.plot(steps, losses, label=label, marker="o" if kind == "eval" else None)
    axis.set_xlabel("steps")
    axis.set_ylabel("loss")
    axis.legend()
    figure.savefig(folder / "loss.png", dpi=150)
    yield folder / "loss.png"
    if (run / "trace" / "rank_0.json").is_file():
        timeline.draw({timeline.title(run): timeline.read(run)}, folder / "timeline.png")
        yield folder / "timeline.png"
