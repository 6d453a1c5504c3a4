"""Tracking: shows a run in another program, such as W&B or TensorBoard, while it trains."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from co2.config import Config
from co2.errors import first_line
from co2.record.console import Console
from co2.record.files import whole_lines
from co2.record.folder import run_folder
from co2.record.metrics import Line, Summary


class Tracking(ABC):
    """Receives every line of metrics.jsonl.

    Its errors end no training: the first is printed in one line, and the run goes on without it.

    Args:
        console: prints that line.
    """

    name: ClassVar[str]

    def __init__(self, config: Config, console: Console) -> None:
        self._config, self._folder, self._console = config, run_folder(config), console
        self._on, self._has_begun, self._step = False, False, 0

    def begin(self, step: int) -> None:
        """Start a segment; metrics.jsonl ends at `step`."""
        self._step, self._on = step, True
        self._send(lambda: None)

    def log(self, line: Line) -> None:
        """A line has been written to metrics.jsonl."""
        self._send(lambda: self._log(line))

    def finish(self, summary: Summary) -> None:
        """Show the final figures."""
        self._send(lambda: self._finish(summary))

    def close(self, status: int) -> None:
        """The segment is over. `status` 0: the run has finished, or can go on."""
        self._send(lambda: self._close(status))
        self._on = False

    def _send(self, action: Callable[[], None]) -> None:
        if not self._on:
            return
        try:
            self._attempt(action)
        except Exception as error:  # whatever it is, it is not worth a training
            self._on = False
            reason = f"{type(error).__name__}: {first_line(error)}"
            self._console.print_line(f"{self.name}: {reason}; the run goes on without it")

    def _attempt(self, action: Callable[[], None]) -> None:
        if not self._has_begun:
            self._begin()
            self._has_begun = True
        action()

    def _lines(self) -> list[Line]:
        """All of metrics.jsonl."""
        return whole_lines(self._folder / "metrics.jsonl")

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def _log(self, line: Line) -> None: ...

    @abstractmethod
    def _finish(self, summary: Summary) -> None: ...

    @abstractmethod
    def _close(self, status: int) -> None: ...
