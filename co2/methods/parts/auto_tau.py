"""`tau=auto`: the length of a round, chosen by measurement and agreed by all replicas.

A round is long enough when its τ steps hide the collective with a tenth to spare; for a blocking
method, when the collective takes no more than a given share of the round. The step's time is that
of the slowest replica. The collective's is that of the replica which joined last: for the others
it includes waiting for that one. Nobody waits for the agreement: it is asked for at the end of one
round and read at the end of the next.
"""

import statistics
from typing import Any

import torch
import torch.distributed as dist

from co2.comm.clocks import CommTotals, stopwatch
from co2.comm.mesh import Mesh

AUTO = "auto"
CHOICES = (1, 3, 6, 12, 24, 48, 96, 192)
"""The paper's search space."""
START = 12
"""While nothing is measured yet."""
WINDOW = 3
"""Rounds that one measurement lasts. The round before the first is not measured."""
PATIENCE = 2
"""Measurements in a row that must find too much exposed before τ rises."""
MOST_EXPOSED = 0.05
_SPARE = 1.1


def choose(step_s: float, comm_s: float, most_share: float | None = None) -> int:
    """The smallest τ of `CHOICES` that is long enough; the largest where none is.

    Args:
        step_s: seconds of one inner step.
        comm_s: seconds of one collective, alone.
        most_share: of a blocking method's round, for the collective; None: it shall be hidden.
    """
    enough = (tau for tau in CHOICES if _is_enough(tau, step_s, comm_s, most_share))
    return next(enough, CHOICES[-1])


def _is_enough(tau: int, step_s: float, comm_s: float, most_share: float | None) -> bool:
    if most_share is None:
        return _SPARE * comm_s <= tau * step_s
    return comm_s <= most_share * (comm_s + tau * step_s)


class AutoTau:
    """τ over a training. Call `step_ends` and `step_begins` around each step's synchronization,
    and `round_ends` at the end of each round.

    τ is chosen after the first measurement. It rises later if `PATIENCE` measurements in a row
    find more than `MOST_EXPOSED` of the time exposed (for a blocking method: that much above its
    share) and a longer round would hint it; it never falls, so it cannot swing.

    Args:
        mesh: of the workers, who all make this object together.
        most_share: as in `choose`.
    """

    def __init__(self, mesh: Mesh, most_share: float | None = None) -> None:
        self.tau, self.most_share = START, most_share
        self._notices: list[str] = []
        self._group = mesh.new_group_of_workers("gloo")
        self._stopwatch = stopwatch(mesh.device)
        self._chosen, self._strikes, self._rounds = False, 0, 0
        self._steps: list[float] = []
        self._before = (0.0, 0.0)
        self._asked: torch.Tensor | None = None
        self._work: dist.Work | None = None

    def step_begins(self) -> None:
        self._stopwatch.begin()

    def step_ends(self) -> None:
        self._stopwatch.end()

    def round_ends(self, totals: CommTotals) -> int:
        """Return τ of the round that begins.

        Args:
            totals: of all rounds so far.
        """
        self._steps += self._stopwatch.take()
        if self._asked is not None:
            self._decide(*self._answer())
        now = (totals.comm_s, totals.exposed_s)
        if self._rounds == WINDOW:
            self._ask(self.measured(now))
        if self._rounds in (0, WINDOW):
            self._rounds, self._before, self._steps = 0, now, []
        self._rounds += 1
        return self.tau

    def measured(self, now: tuple[float, float]) -> tuple[float, float, float]:
        """Seconds of a step, seconds of a collective, exposed share, by this replica's clocks.

        A median, because evaluations and checkpoints fall between two steps too.
        """
        step_s = statistics.median(self._steps) if self._steps else 0.0
        comm_s, exposed_s = (a - b for a, b in zip(now, self._before, strict=True))
        computed_s = step_s * len(self._steps)
        return step_s, comm_s / WINDOW, exposed_s / max(exposed_s + computed_s, 1e-9)

    def take_notices(self) -> list[str]:
        """What was decided since the last call and why, a line each."""
        notices, self._notices = self._notices, []
        return notices

    def _ask(self, figures: tuple[float, float, float]) -> None:
        step_s, comm_s, exposed = figures
        # The longest step, the shortest collective; what all replicas expose is the network's
        # doing, while a single one may be waiting for another.
        self._asked = torch.tensor([-step_s, comm_s, exposed], dtype=torch.float64)
        if self._group is not None:
            self._work = dist.all_reduce(
                self._asked, op=dist.ReduceOp.MIN, group=self._group, async_op=True
            )

    def _answer(self) -> tuple[float, float, float]:
        self._arrive()
        assert self._asked is not None
        minus_step_s, comm_s, exposed = self._asked.tolist()
        self._asked = None
        return -minus_step_s, comm_s, exposed

    def _arrive(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _decide(self, step_s: float, comm_s: float, exposed: float) -> None:
        best = choose(step_s, comm_s, self.most_share)
        first, self._chosen = not self._chosen, True
        if not first:
            bound = MOST_EXPOSED + (self.most_share or 0.0)
            self._strikes = self._strikes + 1 if exposed > bound else 0
            if self._strikes < PATIENCE or best <= self.tau:
                return
        self._notices.append(_reason(self.tau, best, step_s, comm_s, exposed, self.most_share))
        self.tau, self._strikes, self._rounds = best, 0, 0

    def close(self) -> None:
        """Wait for what was asked, before the process group goes."""
        self._arrive()
        self._group = None

    def state_dict(self) -> dict[str, Any]:
        """Everything to decide the same from the same measurements."""
        self._arrive()
        return {
            "tau": self.tau,
            "chosen": self._chosen,
            "strikes": self._strikes,
            "rounds": self._rounds,
            "steps": self._steps + self._stopwatch.take(),
            "before": list(self._before),
            "asked": self._asked,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tau, self._chosen = state["tau"], state["chosen"]
        self._strikes, self._rounds = state["strikes"], state["rounds"]
        self._steps, self._asked = list(state["steps"]), state["asked"]
        comm_s, exposed_s = state["before"]
        self._before = (comm_s, exposed_s)


def _reason(
    old: int, new: int, step_s: float, comm_s: float, exposed: float, most_share: float | None
) -> str:
    """One line for a person."""
    goal = "hide it, with 10 % to spare"
    if most_share is not None:
        goal = f"keep it at {most_share:.0%} of the time or less"
    verb = "" if _is_enough(new, step_s, comm_s, most_share) else "cannot "
    return (
        f"tau {old} → {new}: a step takes {step_s:.3g} s, a mean {comm_s:.3g} s, "
        f"{exposed:.1%} was exposed; {new} steps {verb}{goal}"
    )
