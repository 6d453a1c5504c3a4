"""Quorum: a replica that is slower than the others makes fewer steps of a round (launch.quorum=K).

    t_i      median seconds of replica i's own steps in a round: samples, forward and backward pass
    t_K      the K-th smallest of them
    m_i = τ                                where t_i ≤ 1.2 t_K
    m_i = max(1, ⌊τ t_K / t_i⌋)            for a slower one

A replica makes the first m_i steps of a round and skips the others: it draws no samples, and
its inner optimizer, which has no gradients then, does nothing. So it is in time for the mean, in
which it weighs m_i, as a learner in Decoupled DiLoCo (arXiv 2604.21428) weighs what it has
processed. Everything else happens at the same steps as on the other replicas.

A newcomer makes no step in what is left of the round in which it comes, because its state is under
way to it then: the others train on, and its part in their mean weighs nothing. That is so in every
elastic run of a method whose means can be weighted.

Each replica tells its t_i with its part of a mean, and finds all of them in the decision about that
mean (co2/elastic/members.py). All have learnt the same decisions when a round ends, so that they
give the same m_i to the next: an overlapped method learns how long round t took at the end of round
t + 1.
"""

import contextlib
import statistics
from collections.abc import Iterator, Sequence

import torch

from co2.comm.clocks import Stopwatch, stopwatch
from co2.elastic.members import Members
from co2.record.metrics import Shares

TOLERANCE = 0.2
"""How much slower than the K-th fastest a replica may be before its steps are cut."""


def steps_of(paces: Sequence[float], quorum: int, round_steps: int) -> list[int]:
    """How many steps of a round each replica makes: m_i.

    Args:
        paces: seconds that each needs for a step.
        quorum: K; with fewer replicas the slowest of them counts.
        round_steps: τ.
    """
    reference = sorted(paces)[min(quorum, len(paces)) - 1]
    return [
        round_steps
        if pace <= (1 + TOLERANCE) * reference
        else max(1, int(round_steps * reference / pace))
        for pace in paces
    ]


class Quorum:
    """Who makes which steps.

    Args:
        size: K; None: all make all steps.
        round_steps: τ.
        members: those who agree; None where replicas do not come and go.
        device: where this replica computes.
        weighted: whether replicas may make unequal numbers of steps: then newcomers begin with
            none.
    """

    def __init__(
        self,
        size: int | None,
        round_steps: int,
        members: Members | None,
        device: torch.device,
        weighted: bool,
    ) -> None:
        self.round_steps, self._size = round_steps, size
        self._members, self._weighted = members, weighted
        self._clock = stopwatch(device)

    def makes(self, step: int) -> bool:
        """Whether this replica makes the step with this index."""
        return self._members is None or self._due(self._members, self._members.me, step)

    def making(self, step: int, num_workers: int) -> int:
        """How many of all workers make the step with this index."""
        members = self._members
        if members is None:
            return num_workers
        return sum(self._due(members, one, step) for one in members.ids)

    def timed(self) -> contextlib.AbstractContextManager[None]:
        """Around all that this replica does for a step before it may have to wait for others."""
        return contextlib.nullcontext() if self._size is None else _span(self._clock)

    def report_pace(self, step: int) -> None:
        """Before the synchronization of a step: at a round's end, report the pace of that round."""
        spans = self._clock.take() if self._ends_round(step) else []
        if spans and self._members is not None:
            self._members.measured(statistics.median(spans))

    def share_out(self, step: int) -> Shares | None:
        """After the synchronization of a step: at a round's end, share out the next round by what
        is known. Returns what has changed for those that are measured, if anything has."""
        members = self._members
        if members is None or not self._ends_round(step):
            return None
        before = self.state_dict()
        if self._size is None or not members.paces:
            self.load_state_dict([made or self.round_steps for made in before])
            return None
        found = steps_of(members.paces, self._size, self.round_steps)
        now = dict(zip(members.ids, found, strict=True))
        self.load_state_dict(found)
        if found == before:
            return None
        full = self.round_steps
        moved = [(one, then, now[one]) for one, then in zip(members.ids, before, strict=True)]
        return Shares(
            step + 1,
            full,
            now,
            fewer=tuple(one for one, then, made in moved if made < full == then),
            again=tuple(one for one, then, made in moved if then < full == made),
        )

    def regroup(self) -> None:
        """Replicas have come or gone. Those that are left go on as before; newcomers make no more
        step in this round, and all until their pace is known."""
        members = self._members
        if members is not None:
            came = members.joined if self._weighted else ()
            pairs = zip(members.ids, self.state_dict(), strict=True)
            self.load_state_dict([0 if one in came else made for one, made in pairs])

    def state_dict(self) -> list[int]:
        """How many steps each replica makes in the round under way, in the order of ranks."""
        members = self._members
        if members is None:
            return []
        return [members.steps.get(one, self.round_steps) for one in members.ids]

    def load_state_dict(self, steps: Sequence[int]) -> None:
        """Go on from what `state_dict` returned. More replicas than then go on as the first."""
        members = self._members
        if members is None or not steps:
            return
        found = {
            one: steps[rank if rank < len(steps) else 0] for rank, one in enumerate(members.ids)
        }
        alike = set(found.values()) in ({self.round_steps}, {0})
        members.share_out({} if alike else found)

    def _ends_round(self, step: int) -> bool:
        return (step + 1) % self.round_steps == 0

    def _due(self, members: Members, one: int, step: int) -> bool:
        return step % self.round_steps < members.steps.get(one, self.round_steps)


@contextlib.contextmanager
def _span(clock: Stopwatch) -> Iterator[None]:
    clock.begin()
    yield
    clock.end()
