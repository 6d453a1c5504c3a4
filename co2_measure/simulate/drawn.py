"""Goodput by drawing failures one after the other: what failures.py has closed forms for.

Nothing is averaged here. Time runs from one failure, return or end of a round to the next; the
rounds between them, in which nothing happens, are passed over at once.
"""

import heapq
import math

import numpy as np

from co2_measure.simulate.failures import ELASTIC, RESTART, Faults, Round

SETTLED = 3.0
"""As many absences of a lost node pass before anything is counted, because at the start all nodes
are there."""


def drawn_goodput(
    way: str, faults: Faults, nodes: int, round_: Round, failures: int, seed: int = 0
) -> float:
    """Goodput of a training over at least as many failures. What is lost has a relative error of
    about 1/√failures."""
    random = np.random.default_rng(seed)
    if way == RESTART:
        return _restarted(faults, nodes, failures, random)
    return _Rounds(way, faults, nodes, round_, random).goodput(failures)


def _restarted(faults: Faults, nodes: int, failures: int, random: np.random.Generator) -> float:
    """From each failure to the next: a time of standing still, then whole checkpoints count."""
    gaps = random.exponential(faults.mtbf_s / nodes, failures)
    interval_s = faults.interval_s(nodes)
    trained = np.maximum(0.0, gaps - faults.away_s)
    saved = np.floor(trained / (interval_s + faults.checkpoint_s))
    return float(interval_s * saved.sum() / gaps.sum())


class _Rounds:
    """Nodes that come and go at the ends of rounds."""

    def __init__(
        self, way: str, faults: Faults, nodes: int, round_: Round, random: np.random.Generator
    ) -> None:
        self.way, self.faults, self.nodes, self.round = way, faults, nodes, round_
        self.random = random
        self.active = nodes
        self.now = 0.0
        """When the next round begins, in seconds from the start."""
        self.back: list[float] = []
        """When each lost node could come back, the soonest first."""
        self.fails_s = self._next(0.0)
        """From `now` until the next of the active nodes fails: exact, however rare that is."""

    def goodput(self, failures: int) -> float:
        """Rounds of a node that count, per round of all nodes without a failure."""
        while self.now < SETTLED * self.faults.away_s:
            self._undisturbed()
            self._disturbed()
        began = self.now
        counted = failed = 0
        while failed < failures:
            counted += self._undisturbed()
            kept, lost = self._disturbed()
            counted, failed = counted + kept, failed + lost
        return counted * self.round.seconds / (self.nodes * (self.now - began))

    def _undisturbed(self) -> int:
        """Pass over the rounds in which nobody fails, and after which nobody comes. Returns how
        many a node has made, summed over the nodes."""
        until = min([self.fails_s, *(instant - self.now for instant in self.back[:1])])
        rounds = max(0, math.floor(until / self.round.seconds))
        self._pass(rounds * self.round.seconds)
        return rounds * self.active

    def _disturbed(self) -> tuple[int, int]:
        """One round to its end. Returns the nodes whose work in it counts, and how many failed."""
        lost = 0
        known = self.round.seconds
        while self.fails_s < known:  # since the last round's end
            lost += 1
            self.active -= 1
            heapq.heappush(self.back, self.now + self.fails_s + self.faults.away_s)
            known = max(known, self.fails_s + self.faults.detect_s)
            self.fails_s = self._next(self.fails_s)
        kept = self.active if self.way == ELASTIC or not lost else 0
        come = False
        while self.back and self.back[0] <= self.now + known:
            heapq.heappop(self.back)
            self.active += 1
            come = True
        if come:  # what is drawn has no memory: the later instant may be drawn anew
            self.fails_s = self._next(known)
        again_s = self.round.mean_s if lost and self.way == ELASTIC else 0.0
        pause_s = self.faults.regroup_s if lost or come else 0.0
        self._pass(known + (pause_s + again_s + (self.round.state_s if come else 0.0)))
        return kept, lost

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        self.fails_s -= seconds

    def _next(self, since: float) -> float:
        if self.active == 0:
            return math.inf
        return since + self.random.exponential(self.faults.mtbf_s / self.active)
