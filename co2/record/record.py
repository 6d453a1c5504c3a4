"""Record: writes one run's folder, and hands W&B and TensorBoard the same figures."""

import contextlib
import json
import os
from collections import deque
from pathlib import Path
from typing import Any

import yaml

from co2.atomic import write_durably
from co2.config import Config, Wandb
from co2.record.console import Console
from co2.record.files import DAMAGE, unreadable
from co2.record.fingerprint import Fingerprint
from co2.record.folder import begun, kept_config, kept_manifest, plain, run_folder
from co2.record.metrics import Entry, Line, Summary, flat
from co2.record.provenance import Origin, manifest, of_all_starts
from co2.record.tensorboard import TensorBoard
from co2.record.tracking import Tracking
from co2.record.wandb import WandB, mode

_RECENT = 256


class Record:
    """Keeps the figures of a run. This class writes nothing: all workers but the first have it. It
    remembers the last entries, in case the first worker is lost."""

    def __init__(self) -> None:
        self.recent: deque[Entry] = deque(maxlen=_RECENT)
        self.fingerprint: Fingerprint | None = None

    def begin(self, step: int, before: "Record | None" = None) -> None:
        """Training goes on from `step`: metrics of later steps, of a segment cut off, go.

        Args:
            before: the former record of a worker that is now the first. Entries that were lost with
                the first one before are written from it.
        """

    def tell_replicas(self, text: str) -> None:
        """Keep in words what becomes of the replicas where another number of them goes on. Before
        `begin`."""

    def log(self, entry: Entry) -> None:
        """Keep one line of figures."""
        self.recent.append(entry)

    def tell_fingerprint(self, fingerprint: Fingerprint) -> None:
        """Keep what the run trains on and with."""
        self.fingerprint = fingerprint

    def finish(self, summary: Summary) -> None:
        """Keep the final figures, whose presence means that the run has finished."""

    def close(self, status: int) -> None:
        """Nothing is written after it. `status` 0: the run has finished, or can go on."""


class FolderRecord(Record):
    """Worker 0's: config.yaml, manifest.json, metrics.jsonl and summary.json in the run's folder.

    Args:
        world: number of workers.
        unit: what throughput counts, "tokens" or "samples".
        data: the fingerprint of the data, as JSON values.
        init_from: folder and digest of the weights that the run started from, for manifest.json.
    """

    def __init__(
        self,
        config: Config,
        world: int,
        unit: str,
        data: dict[str, Any],
        origin: Origin,
        console: Console,
        init_from: dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.folder, self._unit, self._console = run_folder(config), unit, console
        self.folder.mkdir(parents=True, exist_ok=True)
        values, known = plain(config, world), manifest(world, origin, data, init_from)
        self._steps = config.train.steps
        self._log_every = config.log.every
        """Steps between lines of the segment before or of this one, whichever is more."""
        then: dict[str, Any] = {}
        self._starts = 0
        """How many of the manifest's "resumed" are of earlier starts."""
        if begun(self.folder):
            kept = kept_manifest(self.folder)
            self._starts = len(kept.get("resumed", []))
            known = of_all_starts(kept, known)
            then = flat(kept_config(self.folder))
            every = then.get("log.every")
            self._log_every = max(self._log_every, every if isinstance(every, int) else 0)
        self._heads = {
            "config.yaml": yaml.safe_dump(values, sort_keys=False),
            "manifest.json": json.dumps(known, indent=1, default=str),
        }
        self._file: int | None = None
        """metrics.jsonl."""
        self._unwritten: list[str] = []
        """Lines for which the disk had no room."""
        self._trackings: list[Tracking] = []
        if mode(config.log.wandb) is not Wandb.disabled:
            self._trackings.append(WandB(config, values, origin.tags, console))
        if config.log.tensorboard:
            goes_on = then.get("log.tensorboard") is True
            self._trackings.append(TensorBoard(config, console, goes_on))
        self._summary: Summary | None = None

    def begin(self, step: int, before: Record | None = None) -> None:
        path = self.folder / "metrics.jsonl"
        lines, broken = _up_to(path, step)
        if step == self._steps and before is None:  # it is evaluated again
            lines = [one for one in lines if one["step"] < step or one.get("kind") != "eval"]
        # First: under a new configuration with more steps, a finished run is unfinished again.
        (self.folder / "summary.json").unlink(missing_ok=True)
        for name, text in self._heads.items():
            write_durably(self.folder / name, text)
        # A new file: a former first worker that counts as lost, but lives, writes to the old one.
        write_durably(path, "".join(json.dumps(line) + "\n" for line in lines))
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)
        for tracking in self._trackings:
            tracking.begin(step)
        told = {(line.get("kind"), line["step"]) for line in lines}
        if before is None:
            self._tell_missing(step, max((at for _, at in told), default=0), broken)
        if before is not None and before.fingerprint is not None:
            self.tell_fingerprint(before.fingerprint)
        for entry in before.recent if before else ():  # lost with the first worker
            if (entry.kind, entry.step) not in told:
                self.log(entry)

    def tell_fingerprint(self, fingerprint: Fingerprint) -> None:
        super().tell_fingerprint(fingerprint)
        path = self.folder / "manifest.json"
        known = {**json.loads(path.read_text()), "fingerprint": dict(fingerprint)}
        write_durably(path, json.dumps(known, indent=1))

    def tell_replicas(self, text: str) -> None:
        known = json.loads(self._heads["manifest.json"])
        earlier, own = known.get("resumed", [])[: self._starts], {"replicas": text}
        for changes in known.get("resumed", [])[self._starts :]:
            own = {**changes, **own}
        known["resumed"] = [*earlier, own]
        self._heads["manifest.json"] = json.dumps(known, indent=1)

    def _tell_missing(self, step: int, last: int, broken: int) -> None:
        """Say in a line what metrics.jsonl lacks up to a step, after its `last`."""
        found = [f"{broken} of its lines cannot be read"] if broken else []
        if last < step // self._log_every * self._log_every:
            found.append(f"the steps {last + 1} to {step} are missing")
        if found:
            text = f"metrics.jsonl is damaged: {', '.join(found)}; the run goes on without them"
            self._console.print_line(text)

    def log(self, entry: Entry) -> None:
        line, waiting = entry.line(self._unit), len(self._unwritten) > 0
        self._unwritten.append(json.dumps(line) + "\n")
        try:
            self._write()
        except OSError as error:
            if not waiting:
                why = f"metrics.jsonl cannot be written ({error.strerror})"
                text = f"step {entry.step}: {why}; its lines wait in memory until it can be"
                self._console.print_line(text)
        for tracking in self._trackings:
            tracking.log(line)

    def _write(self) -> None:
        """Add all lines that are not written yet, or none. Raises `OSError`."""
        assert self._file is not None, "the record has begun"
        before, left = os.fstat(self._file).st_size, "".join(self._unwritten).encode()
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            with contextlib.suppress(OSError):  # the error above is the one to tell
                os.ftruncate(self._file, before)
            raise
        self._unwritten.clear()

    def finish(self, summary: Summary) -> None:
        self._write()
        write_durably(self.folder / "summary.json", json.dumps(summary.as_json(), indent=1))
        self._summary = summary

    def close(self, status: int) -> None:
        for tracking in self._trackings:
            if self._summary is not None:  # now the trace, which W&B shows, is complete
                tracking.finish(self._summary)
            tracking.close(status)
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _up_to(path: Path, step: int) -> tuple[list[Line], int]:
    """The lines of metrics.jsonl up to a step, and the number of those that cannot be read. A last
    one that a crash has torn is not counted. Raises `ConfigError` where the file cannot be read."""
    lines, broken, content = [], 0, b""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise unreadable(path, error) from None
    for text in content.splitlines(keepends=True):
        if text.endswith(b"\n"):
            try:
                line = json.loads(text)
                if line["step"] <= step:
                    lines.append(line)
            except DAMAGE:
                broken += 1
    return lines, broken
