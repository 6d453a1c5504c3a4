"""W&B: a run is one W&B run, in as many segments as it was trained in.

Offline each segment is a folder `wandb/offline-run-<time>-<id>`, and `wandb sync` joins the
segments of one id. `wandb/segments.json` keeps the id and the first and last step of each segment.
A new segment replaces those with steps that are trained again, and those that a killed process left
incomplete: it begins where the first of them began, with the lines of metrics.jsonl. So W&B has
every step once.
"""

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from co2.atomic import write_durably
from co2.config import Config, Wandb
from co2.record import curves, timeline
from co2.record.console import Console
from co2.record.metrics import UNITS, Change, Line, Summary, flat, named, unit_of
from co2.record.tracking import Tracking

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEGMENTS = "segments.json"
_FINISH_S = 120.0
"""Seconds that uploading may go on when a segment ends; what is left then stays in its files."""
_MODES = (Wandb.disabled, Wandb.offline, Wandb.online)
_BEST = {
    **dict.fromkeys(("train/*", "eval/train_s", "members/*", "notice/*", "steps/*")),
    **dict.fromkeys(("train/loss", "eval/loss", "eval/perplexity"), "min,last"),
    "eval/*": "max,last",
}
"""Which extreme W&B's summary keeps of metrics, by their names, beside the last value."""


def mode(chosen: Wandb) -> Wandb:
    """`log.wandb`, or what W&B's own variable WANDB_MODE names, whichever records less."""
    named = {own.value: own for own in Wandb} | {"dryrun": Wandb.offline}  # as W&B called it once
    own = named.get(os.environ.get("WANDB_MODE", ""), Wandb.online)
    return min(chosen, own, key=_MODES.index)


class WandB(Tracking):
    """The W&B run of a run.

    Args:
        values: `config` as plain values.
        tags: of the W&B run, beside task, method and scale.
    """

    name = "W&B"

    def __init__(
        self, config: Config, values: dict[str, Any], tags: Sequence[str], console: Console
    ) -> None:
        super().__init__(config, console)
        self._values, self._tags = values, tags
        self._run: Any = None  # wandb's own type, which would have to be imported for it

    def _attempt(self, action: Callable[[], None]) -> None:
        """Again in a new segment where W&B's own process has died: a SIGTERM that a cluster sends
        to all of a job ends it, and what it had not written yet is lost."""
        try:
            super()._attempt(action)
        except ConnectionError:
            with contextlib.suppress(ConnectionError):
                _await_end()
            self._has_begun = False
            super()._attempt(action)

    def _begin(self) -> None:
        """Start another segment, with all the lines of those that it replaces."""
        import wandb

        place, config = self._folder / "wandb", self._config
        state = {"id": uuid.uuid4().hex[:12], "segments": [], **_state(place)}
        replaced = list(_to_replace(place, state["segments"], self._step))
        begun = min([self._step, *(segment["begun"] for segment in replaced)])
        # WANDB_RUN_GROUP, which a sweep sets, counts in place of our group, WANDB_TAGS beside ours.
        tags = [*os.environ.get("WANDB_TAGS", "").split(","), *self._tags]
        tags = [config.task, config.method, config.scale, *filter(None, tags)]
        self._run = wandb.init(
            project="co2-suite",
            dir=self._folder,
            mode=mode(config.log.wandb).value,
            id=state["id"],
            resume="allow",
            config=self._values,
            name=f"{config.task}-{config.method}-{config.tag}-seed{config.train.seed}",
            group=os.environ.get("WANDB_RUN_GROUP", f"{config.task}-{config.method}"),
            tags=list(dict.fromkeys(tags)),
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
                shutil.rmtree(place / segment["folder"], ignore_errors=True)
        kept = state["segments"][: len(state["segments"]) - len(replaced)]
        place.mkdir(exist_ok=True)
        _keep(place, {**state, "segments": [*kept, own]})
        for name, best in _BEST.items():
            self._run.define_metric(name, step_metric="step", summary=best)
        if begun == 0:
            table = wandb.Table(columns=["metric", "unit", "meaning"], data=list(map(list, UNITS)))
            self._run.log({"units": table}, step=0)
        for line in self._lines():
            if line["step"] > begun:
                self._log(line)

    def _log(self, line: Line) -> None:
        self._step = line["step"]
        values = {name: value for name, value in named(line).items() if value is not None}
        self._run.log({**values, "step": self._step}, step=self._step)

    def _finish(self, summary: Summary) -> None:
        """Show the final figures, with tables and pictures."""
        import wandb
        from PIL import Image

        values = summary.as_json()
        shown = _tables(values, self._lines())
        for name, figure in _figures(self._folder).items():
            file = BytesIO()
            figure.savefig(file, dpi=150)
            shown[f"figures/{name}"] = wandb.Image(Image.open(file))
        self._run.log(shown, step=self._step)
        self._run.summary.update(values)

    def _close(self, status: int) -> None:
        self._run.finish(exit_code=status)
        _await_end()
        state = _state(self._folder / "wandb")
        state["segments"][-1]["ended"] = self._step
        _keep(self._folder / "wandb", state)


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


def is_open(place: Path) -> bool:
    """Whether the last segment in a run's folder `wandb` is still being written, or was cut off."""
    segments = _state(place).get("segments", [])
    return bool(segments) and segments[-1]["ended"] is None


def _state(place: Path) -> dict[str, Any]:
    path = place / SEGMENTS
    return json.loads(path.read_text()) if path.exists() else {}


def _keep(place: Path, state: dict[str, Any]) -> None:
    write_durably(place / SEGMENTS, json.dumps(state, indent=1))


def _to_replace(place: Path, segments: Sequence[Line], step: int) -> Iterator[Line]:
    """The last segments, newest first, that were cut off or have steps after `step`. A segment that
    has been synced stays."""
    for segment in reversed(segments):
        whole = segment["ended"] is not None and segment["ended"] <= step
        if whole or any((place / segment["folder"]).glob("*.wandb.synced")):
            return
        yield segment


def _tables(summary: dict[str, Any], lines: Sequence[Line]) -> dict[str, Any]:
    """The evaluations, memory and traffic, the summary's other figures, and who came and went."""
    import wandb

    scores = [line for line in lines if line["kind"] == "eval"]
    names: list[Any] = [key for key in scores[-1] if key != "kind"] if scores else []
    numbers = {name: own for name, own in flat(summary).items() if isinstance(own, int | float)}
    rows = [[name, float(value), unit_of(name)] for name, value in numbers.items()]
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


def _figures(run: Path) -> dict[str, "Figure"]:
    """The losses, and the timeline of a run with trace=true."""
    figures = {"loss": curves.drawn(curves.chosen(curves.read([run]), [curves.LOSS]))}
    if (run / "trace" / "rank_0.json").is_file():
        figures["timeline"] = timeline.figure({timeline.title(run): timeline.read(run)})
    return figures
