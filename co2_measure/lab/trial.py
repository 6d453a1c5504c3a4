"""What the laboratory measures: trials, and the conditions under which they run."""

import os
from dataclasses import dataclass
from pathlib import Path

LIMIT = "none"
"""The method that never communicates, the limit of all others. It is local SGD with a round that
never ends."""


@dataclass(frozen=True)
class Trial:
    """One training by `workers` workers, on links of `mbit` Mbit/s, under one method."""

    workers: int
    mbit: float | None
    """Rate of every link in Mbit/s, in each direction; None for links without a limit."""
    method: str
    repeat: int
    """Counted from 0. Repeats are the same training again, since it is time that is measured."""

    @property
    def rate(self) -> str:
        """The rate as a word."""
        return rate_name(self.mbit)

    def __str__(self) -> str:
        return f"{self.workers} workers, {self.rate} Mbit/s, {self.method}, repeat {self.repeat}"


@dataclass(frozen=True)
class Change:
    """All links get another rate some time after the first step."""

    seconds: float
    mbit: float | None
    """The new rate in Mbit/s; None for no limit."""
    only_rate: str | None = None
    """Only trials that begin at this rate change; None for all trials."""

    def __str__(self) -> str:
        before = "" if self.only_rate is None else f"{self.only_rate}:"
        return f"{before}{rate_name(self.mbit)}@{self.seconds:g}s"


@dataclass(frozen=True)
class Conditions:
    """What makes the links and the processors uneven, the same for every trial of a table."""

    schedule: tuple[Change, ...] = ()
    slow_links: tuple[tuple[int, float], ...] = ()
    """(worker, Mbit/s) of each worker whose link differs from the trial's rate."""
    slow_cpus: tuple[tuple[int, float], ...] = ()
    """(worker, cores) of each worker that may use only so many cores, fractions included."""
    pin: bool = True
    """Whether every worker keeps to cores of its own, where there is one for each."""

    def cores(self, trial: Trial) -> list[set[int]]:
        """Each worker's own cores, as many for all; empty where workers share all cores.

        They do where they are more than the cores, or where one is to have more than one core.
        """
        known = sorted(os.sched_getaffinity(0))
        each = len(known) // trial.workers
        if not self.pin or each == 0 or any(cores > 1 for _, cores in self.slow_cpus):
            return []
        return [set(known[at * each :][:each]) for at in range(trial.workers)]

    def rates(self, trial: Trial) -> list[float | None]:
        """Each worker's link rate in Mbit/s at the start of the trial; None for no limit."""
        slow = dict(self.slow_links)
        return [slow.get(worker, trial.mbit) for worker in range(trial.workers)]

    def changes(self, trial: Trial) -> list[Change]:
        """The changes of rate that this trial sees, in the order of time."""
        own = [change for change in self.schedule if change.only_rate in (None, trial.rate)]
        return sorted(own, key=lambda change: change.seconds)


def trial_folder(trial: Trial, conditions: Conditions, runs: Path) -> Path:
    """Where the trial's run lies under `runs`, so that a finished trial is found again."""
    words = [str(change).replace(":", "to") for change in conditions.schedule]
    words += [f"link{worker}:{rate:g}" for worker, rate in conditions.slow_links]
    words += [f"cpu{worker}:{cores:g}" for worker, cores in conditions.slow_cpus]
    pinned = "-pinned" if conditions.cores(trial) else ""
    folder = f"{trial.workers}x{trial.rate}-{trial.repeat}{pinned}"
    return runs.absolute() / ("-".join(words) or "even") / folder


def rate_name(mbit: float | None) -> str:
    """A rate in Mbit/s as a word, `unlimited` for None."""
    return "unlimited" if mbit is None else f"{mbit:g}"
