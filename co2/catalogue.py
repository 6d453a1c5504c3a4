"""The catalogue of methods: what is known of each without importing it, at its default settings.

The registry, the simulator, the planner and the tables of docs/methods.md read it. Neither it nor
the simulator needs torch.
"""

from dataclasses import dataclass
from typing import Literal

from co2.config import Blocking


@dataclass(frozen=True)
class Entry:
    """What is known of a method."""

    class_name: str
    """Its class, in the file co2/methods/<method>.py."""
    averages: str
    """What is averaged, in a few words for the table of docs/methods.md."""
    blocking: Blocking
    """What the computation of a replica waits for. The class has it from here."""
    copies: float
    """Model copies that each replica holds beyond parameters, gradients and inner state."""
    cut_copies: int = 0
    """Further copies, of which each of G replicas holds 1/G."""
    rounds: bool = True
    """Whether it exchanges once in a round of τ steps; else at every step."""
    exchange: Literal["mean", "gather", "pairs"] = "mean"
    """A mean over all replicas; messages that all gather; a mean of random pairs."""
    share: float = 1.0
    """Bytes of what is exchanged, as a share of an fp32 vector as large as the weights."""
    further: tuple[int, ...] = ()
    """Rounds between two means of each vector that is averaged beside the weights."""
    average_moments: bool = False
    """Whether it has this setting, with which two further vectors are averaged in every round."""
    fragments: bool = False
    """Whether it has this setting: parts of the model that are exchanged one after the other."""
    elastic: bool = True
    """Whether replicas can come and go at a round's end; if not, `refusals` tells why."""
    not_simulated: str = ""
    """Why not; empty: it is simulated."""

    @property
    def any_number(self) -> bool:
        """Whether a run goes on with another number of workers: no replica holds what only the same
        one can go on from, such as what its messages have left out. Under AllReduce all are equal
        at every step, so they need no round's end for it."""
        return self.elastic or self.class_name == "AllReduce"

    def vectors_in(self, number: int, average_moments: bool = False) -> int:
        """How many vectors are exchanged in round `number`, counted from 1."""
        further = (1, 1) if average_moments and self.average_moments else self.further
        return 1 + sum(number % period == 0 for period in further)


CATALOGUE = {
    "allreduce": Entry(
        "AllReduce", "gradients, at every step",
        Blocking.always, copies=0, rounds=False, elastic=False,
    ),
    "local_sgd": Entry("LocalSGD", "weights", Blocking.always, copies=2),
    "slowmo": Entry("SlowMo", "weights, with outer momentum", Blocking.always, copies=3),
    "diloco": Entry(
        "DiLoCo", "weights, with outer Nesterov momentum",
        Blocking.always, copies=3, average_moments=True,
    ),
    "noloco": Entry(
        "NoLoCo", "weights of random pairs, with outer momentum",
        Blocking.always, copies=4, exchange="pairs", elastic=False,
        not_simulated="each replica waits for one other, which chance draws, and not for all",
    ),
    "overlap_local_sgd": Entry(
        "OverlapLocalSGD", "weights, one round late, with an anchor",
        Blocking.beyond_delay, copies=3,
    ),
    "cocod_sgd": Entry("CoCoDSGD", "weights, one round late", Blocking.beyond_delay, copies=3),
    "streaming_diloco": Entry(
        "StreamingDiLoCo", "as DiLoCo, in parts; also int8 or int4",
        Blocking.beyond_delay, copies=3, fragments=True,
        not_simulated="each fragment of its model has rounds of its own",
    ),
    "eager_diloco": Entry(
        "EagerDiLoCo", "as DiLoCo, one round late", Blocking.beyond_delay, copies=4,
    ),
    # Of 4,096 elements it sends 82, at 14 bits each, and 32 bits more.
    "sparseloco": Entry(
        "SparseLoCo", "the largest 2 % of the pseudo-gradients", Blocking.always, copies=3,
        exchange="gather", share=(82 * 14 + 32) / (4096 * 32), elastic=False,
    ),
    "co2": Entry(
        "CO2", "weights, one round late, with outer momentum and gap penalty",
        Blocking.beyond_delay, copies=3, average_moments=True,
    ),
    "co2_keep": Entry(
        "CO2Keep", "weights, `delay` steps late",
        Blocking.beyond_delay, copies=4, average_moments=True, fragments=True,
    ),
    "co2_released": Entry("CO2Released", "weights, with outer momentum", Blocking.always, copies=3),
    "acco": Entry(
        "ACCO", "gradients, one step late",
        Blocking.beyond_delay, copies=2, rounds=False, elastic=False,
    ),
    "sparta": Entry(
        "SPARTA", "0.5 % of the weights, at every step",
        Blocking.beyond_delay, copies=0.02, rounds=False, share=1 / 200, elastic=False,
        not_simulated="its exchanges, of a few weights, follow `delay` and no rounds",
    ),
    "desloc": Entry(
        "DESLOC", "weights; more rarely Adam's moments", Blocking.always, copies=2, further=(3, 6),
    ),
    "mt_dao": Entry(
        "MTDAO", "weights, v and a slow momentum", Blocking.always, copies=2, further=(1, 1),
    ),
    "demo": Entry(
        "DeMo", "a momentum's largest waves, at every step",
        Blocking.always, copies=1, rounds=False, exchange="gather", share=1 / 85,
        elastic=False,
        not_simulated="what it sends depends on the shapes of the model's tensors",
    ),
    "onebit_adam": Entry(
        "OneBitAdam", "Adam's momentum, at every step, one bit an element",
        Blocking.always, copies=4.25, cut_copies=1,
        rounds=False, share=1 / 32, elastic=False,
        not_simulated="what it sends shrinks when its variance is frozen, in the midst of training",
    ),
    "zero_one_adam": Entry(
        "ZeroOneAdam", "progress, every 1 to 16 steps, one bit an element",
        Blocking.always, copies=6.25, cut_copies=1,
        rounds=False, share=1 / 32, elastic=False,
        not_simulated="how often it sends, and how much, changes in the course of training",
    ),
}  # fmt: skip
"""By the name of `method=`."""
