"""`tau=auto`: the length of a round is measured, and all replicas agree on it.

A round is long enough if its τ steps hide the collective with 10 % to spare; for a blocking method,
if the collective takes no more than a given share of the round. The time of a step is that of the
slowest replica. The time of a collective is that of the replica which joined last, because for the
others it includes waiting for that one. Nobody waits for the agreement: it is started at the end of
one round and read at the end of the next.
"""

import statistics
from typing import Any

import torch
import torch.distributed as dist

from co2.comm.clocks import CommTotals, stopwatch
from co2.comm.mesh import Mesh
from co2.comm.waiting import note_recorded

AUTO = "auto"
CHOICES = (1, 3, 6, 12, 24, 48, 96, 192)
"""The paper's search space."""
START = 12
"""τ until it has been measured."""
WINDOW = 3
"""Rounds that one measurement lasts. The very first round of a training is not measured."""
PATIENCE = 2
"""Measurements in a row that must find too much time exposed before τ rises."""
MOST_EXPOSED = 0.05
"""The largest exposed share of the time at which τ does not rise."""
_SPARE = 1.1
"""The τ steps of a round must take this many times as long as the collective that they hide."""


def choose(step_s: float, comm_s: float, most_share: float | None = None, least: int = 1) -> int:
    """Return the smallest τ of `CHOICES`, and not below `least`, that is long enough for a step and
    a collective of so many seconds; the largest if none is. Of a blocking method's round the
    collective may take `most_share`; None: it is to be hidden."""
    taken = (tau for tau in CHOICES if tau >= least)
    enough = (tau for tau in taken if _is_enough(tau, step_s, comm_s, most_share))
    return next(enough, CHOICES[-1])


def _is_enough(tau: int, step_s: float, comm_s: float, most_share: float | None) -> bool:
    if most_share is None:
        return _SPARE * comm_s <= tau * step_s
    return comm_s <= most_share * (comm_s + tau * step_s)


class AutoTau:
    """Chooses τ during a training. Stop its `stopwatch` for the synchronization of each step, and
    call `round_ends` at the end of each round.

    τ is chosen after the first measurement. It rises later if `PATIENCE` measurements in a row find
    more than `MOST_EXPOSED` of the time exposed (for a blocking method, that much more than its
    share) and a longer round would help. It never falls, so it cannot oscillate.

    Args:
        mesh: the workers, which must all make this object together.
        most_share, least: as in `choose`.
    """

    def __init__(self, mesh: Mesh, most_share: float | None = None, least: int = 1) -> None:
        self.tau, self.most_share, self.least = START, most_share, least
        self._notices: list[str] = []
        self._group = mesh.new_group_of_workers("gloo")
        self.stopwatch = stopwatch(mesh.device)
        self._chosen, self._strikes, self._rounds = False, 0, 0
        self._steps: list[float] = []
        self._before = (0.0, 0.0)
        self._agreement: torch.Tensor | None = None
        """What the replicas are agreeing on, or None."""
        self._work: dist.Work | None = None

    def round_ends(self, totals: CommTotals) -> int:
        """Return τ of the round that begins, after rounds of so much communication."""
        self._steps += self.stopwatch.take()
        if self._agreement is not None:
            self._arrive()
            minus_step_s, comm_s, exposed = self._agreement.tolist()
            self._agreement = None
            self._decide(-minus_step_s, comm_s, exposed)
        now = (totals.comm_s, totals.exposed_s)
        if self._rounds == WINDOW:
            self._start_agreement(*self.measured(now))
        if self._rounds in (0, WINDOW):
            self._rounds, self._before, self._steps = 0, now, []
        self._rounds += 1
        return self.tau

    def measured(self, now: tuple[float, float]) -> tuple[float, float, float]:
        """Return the seconds of a step, the seconds of a collective and the exposed share, as this
        replica has measured them.

        The step is a median, because some steps are interrupted by an evaluation or a checkpoint.
        """
        step_s = statistics.median(self._steps) if self._steps else 0.0
        comm_s, exposed_s = (a - b for a, b in zip(now, self._before, strict=True))
        computed_s = step_s * len(self._steps)
        return step_s, comm_s / WINDOW, exposed_s / max(exposed_s + computed_s, 1e-9)

    def take_notices(self) -> list[str]:
        """What was decided since the last call and why, a line each."""
        notices, self._notices = self._notices, []
        return notices

    def _start_agreement(self, step_s: float, comm_s: float, exposed: float) -> None:
        # The minimum over the replicas finds the longest step, the shortest collective, and the
        # exposed share that all replicas have at least, which is due to the network: a single
        # replica may also have waited for another.
        self._agreement = torch.tensor([-step_s, comm_s, exposed], dtype=torch.float64)
        if self._group is not None:
            work = dist.all_reduce(
                self._agreement, op=dist.ReduceOp.MIN, group=self._group, async_op=True
            )
            self._work = note_recorded(work, self._group)

    def _arrive(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _decide(self, step_s: float, comm_s: float, exposed: float) -> None:
        share = self.most_share
        best = choose(step_s, comm_s, share, self.least)
        first, self._chosen = not self._chosen, True
        if not first:
            self._strikes = self._strikes + 1 if exposed > MOST_EXPOSED + (share or 0.0) else 0
            if self._strikes < PATIENCE or best <= self.tau:
                return
        goal = "hide it, with 10 % to spare"
        if share is not None:
            goal = f"keep it at {share:.0%} of the time or less"
        verb = "" if _is_enough(best, step_s, comm_s, share) else "cannot "
        self._notices.append(
            f"tau {self.tau} → {best}: a step takes {step_s:.3g} s, a mean {comm_s:.3g} s, "
            f"{exposed:.1%} was exposed; {best} steps {verb}{goal}"
        )
        self.tau, self._strikes, self._rounds = best, 0, 0

    def close(self) -> None:
        """Wait for the agreement under way, before the process group is destroyed."""
        self._arrive()
        self._group = None

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to decide the same from the same measurements."""
        self._arrive()
        return {
            "tau": self.tau,
            "chosen": self._chosen,
            "strikes": self._strikes,
            "rounds": self._rounds,
            "steps": self._steps + self.stopwatch.take(),
            "before": list(self._before),
            "agreement": self._agreement,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tau, self._chosen = state["tau"], state["chosen"]
        self._strikes, self._rounds = state["strikes"], state["rounds"]
        self._steps, self._agreement = list(state["steps"]), state["agreement"]
        comm_s, exposed_s = state["before"]
        self._before = (comm_s, exposed_s)
