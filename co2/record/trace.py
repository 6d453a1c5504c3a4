"""A Chrome trace of a few rounds, by torch.profiler: `trace=true`.

Beside PyTorch's own operators and collectives it holds the phases of a round, under the names
below. chrome://tracing and ui.perfetto.dev open it; `python -m co2.record.timeline RUN` draws it.
What a thread of ours carries on a CPU (background.py, `run`) is not in it; the wait for it is.
"""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_WARM_UP_STEPS = 3
_ROUNDS = 3
_FEWEST_STEPS = 12


class Trace:
    """Records some rounds after two of warm-up, or what there is of them when training ends.

    Args:
        path: of this worker's file.
        tau: steps of a round; 1 where a method has none.
    """

    def __init__(self, path: Path, tau: int) -> None:
        self.path = path
        self.begin = max(2 * tau, _WARM_UP_STEPS)
        self.end = self.begin + max(_ROUNDS * tau, _FEWEST_STEPS)
        self._steps = 0
        self._profile: profile | None = None

    def step(self) -> None:
        """After every step of this process."""
        self._steps += 1
        if self._steps == self.begin:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            # Shapes and types tell what a collective carries.
            self._profile = profile(activities=activities, record_shapes=True)
            self._profile.start()
        elif self._steps == self.end:
            self.close()

    def close(self) -> None:
        """Write what has been recorded; nothing is recorded after it."""
        if self._profile is not None:
            self._profile.stop()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self.path))
            self._profile = None
