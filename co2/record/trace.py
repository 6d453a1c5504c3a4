"""A Chrome trace of a few rounds, by torch.profiler: `trace=true`.

Beside PyTorch's own operators and collectives it holds the phases of a round and the ends of steps,
under the names in co2/comm/phases.py. chrome://tracing and ui.perfetto.dev open it; `python -m
co2.record.timeline RUN` draws it. A collective that a Python thread carries on a CPU
(BackgroundMean.run) is not in the trace; the wait for it is. Of a run on GPUs there is also what
the allocator did in these steps, rank_<n>_memory.pickle, which pytorch.org/memory_viz draws.
"""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from co2.comm.phases import STEP_END
from co2.comm.waiting import begin_recording, end_recording, leak

_WARM_UP_STEPS = 3
_ROUNDS = 3
_FEWEST_STEPS = 12
_MEMORY_EVENTS = 100_000
"""Allocations that a snapshot of the GPU's memory has at most, the newest."""


class Trace:
    """Records three rounds after two of warm-up, or what there is of them when training ends.

    Args:
        path: of this worker's file. None: nothing is recorded, with trace=false.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.first = self.last = self._steps = 0
        self._profile: profile | None = None

    def begin(self, round_steps: int) -> None:
        """Training begins, in rounds of so many steps."""
        self.first = max(2 * round_steps, _WARM_UP_STEPS)
        self.last = self.first + max(_ROUNDS * round_steps, _FEWEST_STEPS)

    def step(self) -> None:
        """A step of this process has ended."""
        self._steps += 1
        if self._steps == self.first:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_initialized():  # else this worker trains on the CPU
                activities.append(ProfilerActivity.CUDA)
                torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
            # Shapes and types show what a collective carries.
            self._profile = profile(activities=activities, record_shapes=True)
            begin_recording()
            self._profile.start()
        if self._profile is not None:
            with record_function(STEP_END):
                pass
        if self._steps == self.last:
            self.close()

    def close(self, wait: bool = True) -> None:
        """Nothing is recorded after it.

        Args:
            wait: for the collectives under way. A trace that may not wait for them is dropped.
        """
        if self._profile is None or self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if torch.cuda.is_initialized():
            memory = self.path.with_name(f"{self.path.stem}_memory.pickle")
            torch.cuda.memory._dump_snapshot(str(memory))
            torch.cuda.memory._record_memory_history(enabled=None)
        if end_recording(wait):
            self._profile.stop()
            self._profile.export_chrome_trace(str(self.path))
        else:
            self._profile.toggle_collection_dynamic(False, self._profile.activities)
            leak(self._profile)  # a collective may still write into its memory
        self._profile = None
