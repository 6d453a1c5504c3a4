"""TensorBoard: the figures of metrics.jsonl as event files, in `tensorboard/` of a run's folder.

    tensorboard --logdir results/runs

Each segment of a run is one more file. It has TensorBoard drop the steps of earlier files that are
trained again, so that every step is shown once.
"""

from importlib.util import find_spec

from co2.config import Config
from co2.errors import extra, require
from co2.record.console import Console
from co2.record.metrics import Line, Summary, figures
from co2.record.tracking import Tracking


def check(config: Config) -> None:
    """Raise `ConfigError` where the run wants TensorBoard's files and the package is missing."""
    there = not config.log.tensorboard or find_spec("tensorboard") is not None
    require(there, "log.tensorboard", "true", extra("tensorboard"))


class TensorBoard(Tracking):
    """Writes a run's event files.

    Args:
        goes_on: whether the segment before has written event files. If not, this one begins with
            all lines of metrics.jsonl.
    """

    name = "TensorBoard"

    def __init__(self, config: Config, console: Console, goes_on: bool) -> None:
        super().__init__(config, console)
        self._goes_on = goes_on

    def _begin(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        first = self._step + 1 if self._goes_on else 0
        # TensorBoard drops steps from `purge_step` on of earlier files.
        self._writer = SummaryWriter(self._folder / "tensorboard", purge_step=first)
        for line in self._lines():
            if line["step"] >= first:
                self._add(line)
        self._writer.flush()

    def _log(self, line: Line) -> None:
        self._add(line)
        self._writer.flush()  # like metrics.jsonl, complete when the process is killed

    def _add(self, line: Line) -> None:
        for name, value in figures(line).items():
            if value is not None:
                self._writer.add_scalar(name, value, line["step"])

    def _finish(self, summary: Summary) -> None:
        """Lines are all that is shown."""

    def _close(self, status: int) -> None:
        self._writer.close()
