"""Goodput of a training whose nodes fail: closed forms, which drawn.py is held against.

Goodput is useful replica-steps per second, as a share of those of the same method on as many GPUs
of which none fails. Each of N nodes fails at random, once in M seconds on average (a Poisson
process), and its replicas are lost with it. Another node stands in after `repair_s`, and its
processes can train after another `restart_s`. Three ways to deal with that:

restart  All nodes start again from the last checkpoint. A failure during that makes all wait anew.
discard  The others drop the lost replicas at the end of the round, which is thrown away for all.
         This is what torchft says in the docstring of its LocalSGD; under AllReduce a round is a
         step, and this is the exclusion of replicas at every step.
elastic  The others drop the lost replicas at the end of the round and keep what they have done
         (docs/elastic.md). The mean that has failed is taken again.

Under the last two, computation goes on while a failure is being detected, all pause to regroup, and
a newcomer enters at the end of a round, when all wait until it has its state. Such a run saves no
checkpoints here, which it needs only where all nodes are lost at once; that is left out, as is the
change of a step's time with the number of nodes.
"""

import math
from dataclasses import dataclass

LLAMA_MTBF_HOURS = 54 * 24 * (16_384 / 8) / 419
"""Mean hours between failures of a node of 8 GPUs, 6,335: Llama 3 405B trained on 16,384 H100 with
419 unexpected interruptions in 54 days (Llama Team, arXiv 2407.21783, section 3.3.4)."""

WAYS = RESTART, DISCARD, ELASTIC = "restart", "discard", "elastic"
"""The ways to deal with a failure."""


@dataclass(frozen=True)
class Faults:
    """How often nodes fail, and how long what follows takes."""

    mtbf_s: float
    """M: mean seconds until a node fails."""
    repair_s: float = 0.0
    """From its detection until another node stands in: a spare's minutes, or a repair's hours."""
    restart_s: float = 0.0
    """From the start of processes until they can train."""
    detect_s: float = 0.0
    """From a failure until the others know of it."""
    regroup_s: float = 0.0
    """All stand still while process groups are made anew."""
    checkpoint_s: float = 1.0
    """δ: all stand still while a checkpoint is saved."""
    checkpoint_every_s: float | None = None
    """Seconds of training between two checkpoints; None for Daly's optimum."""

    @property
    def away_s(self) -> float:
        """From a failure until another node can train."""
        return self.detect_s + (self.repair_s + self.restart_s)

    def interval_s(self, nodes: int) -> float:
        """Seconds of training between two checkpoints of as many nodes."""
        if self.checkpoint_every_s is not None:
            return self.checkpoint_every_s
        return daly_s(self.checkpoint_s, self.mtbf_s / nodes)


@dataclass(frozen=True)
class Round:
    """A round, as the simulator of undisturbed trainings has it."""

    seconds: float
    """From one round's end to the next. Under AllReduce this is a step."""
    mean_s: float = 0.0
    """To take a mean again that has failed."""
    state_s: float = 0.0
    """To give a newcomer its state."""


def daly_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Seconds of training between two checkpoints at which least is lost.

    √(2δM)·(1 + ⅓√(δ/2M) + δ/18M) − δ, or M where δ ≥ 2M (Daly, Future Generation Computer Systems
    2006, equation 37). Its leading term √(2δM) is Young's (Communications of the ACM 1974).

    δ is the time that saving takes, and M the mean time between failures of all nodes together.
    """
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    root = math.sqrt(checkpoint_s / (2 * mtbf_s))
    young_s = math.sqrt(2 * checkpoint_s * mtbf_s)
    return young_s * (1 + root / 3 + root**2 / 9) - checkpoint_s


def goodput(way: str, faults: Faults, nodes: int, round_: Round) -> float:
    """Goodput of `nodes` nodes, by the closed form of this way."""
    if way == RESTART:
        return restart_goodput(faults, nodes)
    return rounds_goodput(way, faults, nodes, round_)


def restart_goodput(faults: Faults, nodes: int) -> float:
    """Goodput where every failure starts all nodes again from the last checkpoint.

    T seconds of training and their checkpoint take M·e^{R/M}·(e^{(T+δ)/M} − 1) seconds on average
    (Daly 2006), M being that of all nodes together and R the time until they train again. Nothing
    in it is approximated.
    """
    mtbf_s, interval_s = faults.mtbf_s / nodes, faults.interval_s(nodes)
    period = (interval_s + faults.checkpoint_s) / mtbf_s
    # The factors are turned over, so that none of them overflows.
    share = math.exp(-faults.away_s / mtbf_s - period) / -math.expm1(-period)
    return interval_s / mtbf_s * share


def rounds_goodput(way: str, faults: Faults, nodes: int, round_: Round) -> float:
    """Goodput where the others drop lost replicas at a round's end and let others in.

    A round lasts w seconds, pauses included. A node survives it with probability q = e^{−w/M}; else
    the round is lost for it, and k others on average until it is replaced. So the share of nodes
    that begin a round is a = 1/(1 + (1−q)·k). All are lost at the rate a·N/M. The goodput is a·q
    per round under `elastic`, and under `discard` a times the probability that nobody fails.

    Pauses lengthen w, which makes failures in a round more frequent, so w is found by iteration.
    Approximated: in every round as many nodes are there, and it lasts as long, as on average. So it
    is for many nodes, and failures that are rarer than the pauses are long.

    `nodes` are N, 2 or more: one alone has no others.
    """
    assert way in (DISCARD, ELASTIC) and nodes > 1
    round_s = open_s = round_.seconds
    for _ in range(100):
        fails = -math.expm1(-round_s / faults.mtbf_s)
        missed = _missed(faults, round_s)
        begin = 1 / (1 + fails * missed)
        rate = begin * nodes / faults.mtbf_s
        # Of what is lost in a round, the share min(1, missed) comes back at a later round's end.
        lost = -math.expm1(-rate * open_s)
        changed = -math.expm1(-rate * (open_s + min(1.0, missed) * round_s))
        again_s = round_.mean_s if way == ELASTIC else 0.0
        pauses_s = changed * faults.regroup_s + lost * (again_s + round_.state_s)
        open_s = round_.seconds + pauses_s
        round_s = open_s + _late_s(faults.detect_s, rate, open_s)
    kept = 1 - fails if way == ELASTIC else 1 - lost
    return begin * kept * round_.seconds / round_s


def _missed(faults: Faults, round_s: float) -> float:
    """Rounds that a node misses after the one in which it is lost, on average over the instants of
    that one.

    Another comes in at the first end of a round at which it can train. With back/round = n + f,
    where 0 < f ≤ 1, that is n + min(1, f + detect/round) rounds later: after a loss shortly before
    the end, all wait there for its detection. None, if it can train as soon as that.
    """
    back_s = faults.repair_s + faults.restart_s
    whole = math.ceil(back_s / round_s) - 1
    return whole + min(1.0, (back_s + faults.detect_s) / round_s - whole)


def _late_s(detect_s: float, rate: float, open_s: float) -> float:
    """Seconds from a round's end until all losses are detected, on average.

    The last loss before the end came s seconds before it with density rate·e^{−rate·s}. With x =
    detect − s seconds left, others may be lost in these, too; so all is detected after
    e^{rate·detect}·(1 − e^{−rate·x})/rate seconds, and on average over s, from 0 to the smaller of
    detect and open, after e^{rate·detect}·(1 − e^{−rate·s})/rate − s at that bound. For rare losses
    and detection within a round this is rate·detect²/2. `open_s` are the seconds before the round's
    end in which losses are not detected yet.
    """
    most_s = min(detect_s, open_s)
    more = math.exp(min(rate * detect_s, 700.0))  # finite, where nothing is done any more
    return more * -math.expm1(-rate * most_s) / rate - most_s
