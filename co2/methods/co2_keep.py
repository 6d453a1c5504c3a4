"""CO2 with kept progress: our own, unpublished. Overlapped for `delay` steps, at most a round.

    at the end of round t, on every replica i:
        p^i_t = the sum of i's own steps in round t;  start the mean δ_t = mean_i p^i_t
    `delay` steps later, q^i being the sum of i's own steps since:
        δ_t arrives;  u_t = β u_{t−1} + δ_t;  c_{t+1} = c_t + δ_t + w u_t          c: the center
        x^i ← c_{t+1} + κ q^i

τ → `tau`, delay → `delay`, κ → `keep_local`, β → `outer_momentum`, w → `momentum_weight`.
c is equal on all replicas, bit for bit. p^i counts every step, also those whose effect on x^i was
cut by κ, so that no progress is lost. With a delay of τ, κ = 1 and w = 0 is CoCoD-SGD, and
κ = w = 0 is CO2 with β = 0 and Λ = 1. A delay of 0 blocks: it is local SGD for w = 0, and DiLoCo
with α = 1 for w = β. It is that of the first rounds with `blocking_share`. Right after a round's
end the consensus is c + mean_i p^i_t: all that is known and all that was trained. The mean of the
x^i lacks what κ has cut.

With `fragments` P the vector of all weights is cut into P fragments of near equal length, between
rows of tensors (flat.py): if tensors stayed whole, the one with the embedding would take the link
for longer than its share of a round. All of the above holds for each by itself. The round of
fragment f is round(f τ/P) steps behind that of fragment 0, and its first one is shorter, but for
fragment 0's. Without a `delay` its mean arrives as the next fragment's is sent: the same bytes are
under way all the time, but one fragment at a time, and each mean is τ/P steps late instead of τ. A
`delay` above τ/P has several under way together, so that nobody waits for a single slow step. Where
an arrival and a start fall on one step, the arrival is first. The consensus is then at every step
the sum of c, of the δ in flight, which is waited for and stays in flight, and of the mean of the
steps since that was sent. Streaming DiLoCo (arXiv 2501.18512) has fragments, a delay, and a mixing
of local and outer weights; it loses a share of the steps made under way, where here κ says how many
show, and all of them count.

Why κ is below 1: in a direction of such high curvature that `delay` steps undo a deviation from the
optimum, q^i holds the same correction that the mean brings. With a delay of τ a replica's own
deviation is then multiplied by −κ from round to round, and that of the replicas' mean by (1 − κ)^½:
the former does not die out for κ = 1, the latter not for κ = 0, as in CO2. Both shrink fastest
together at κ = 0.62. A delay of few steps undoes little, and κ may be 1. docs/co2_keep.md tells
what else was tried.
As in every method here the pseudo-gradient −p travels, and `momentum` holds −u.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from co2.errors import require
from co2.limits import Amount, Count, Decay, Share, Steps
from co2.methods.base import QUORUM, synchronizing
from co2.methods.shared.auto_tau import AUTO, START
from co2.methods.shared.fragments import Fragment, offset
from co2.methods.shared.local_method import LocalMethod
from co2.methods.shared.rounds import AveragesMoments, LateRounds

FRAGMENTS = 12
"""P, unless told otherwise: what won in the searches on GPT-2 and RoBERTa, out of 1, 4 and 12."""


class CO2Keep(LocalMethod):
    may_change = frozenset({"tau", "keep_local", "outer_momentum", "blocking_share"})

    @dataclass
    class Config(AveragesMoments, LateRounds):
        fragments: Count | None = None
        """P, at most τ: parts of near equal length that are sent one after the other; null: 12, or
        τ if that is less, or 1 with `average_moments`. Of a sharded model each worker cuts its
        shard, so that results depend on the sharding."""
        delay: Steps | None = None
        """Inner steps that a collective may take without anybody waiting, at most τ; null: τ/P,
        until the next fragment is sent."""
        keep_local: Share = 0.5
        """κ: the share of the progress made while the mean was under way that is kept."""
        outer_momentum: Decay = 0.9
        """β, the outer momentum."""
        momentum_weight: Amount = 0.1
        """w, the weight of the means' momentum; with 0 there is none, which saves a copy of the
        model."""

        def __post_init__(self) -> None:
            super().__post_init__()
            tau = START if self.tau == AUTO else int(self.tau)
            if self.fragments is None:
                self.fragments = 1 if self.average_moments else min(FRAGMENTS, tau)
            named = f"{tau} with tau=auto" if self.tau == AUTO else f"tau, which is {tau}"
            require(self.fragments <= tau, "fragments", self.fragments, f"must be at most {named}")
            if self.delay is not None:
                require(self.tau != AUTO, "delay", self.delay, "must be null with tau=auto")
                hint = f"must be at most tau, which is {self.tau}; or null"
                require(self.delay <= tau, "delay", self.delay, hint)
            hint = f"averages whole rounds, and fragments is {self.fragments}; use false, or 1"
            good = not self.average_moments or self.fragments == 1
            require(good, "average_moments", "true", hint)

    def refusals(self) -> dict[str, str]:
        found = super().refusals()
        if self.config.fragments > 1:
            behind = "its fragments meet amid the round, when a slow replica is behind"
            found[QUORUM] = f"{behind}; use null, or fragments=1"
        return found

    def make_vectors(self) -> None:
        number, groups = self.config.fragments, self.num_groups()
        self.fragments: list[Kept] = []
        for index in range(number):
            prefix, part = ("", None) if number == 1 else (f"{index}.", (index, number))
            beside = None if index < groups else self.fragments[index - groups].mean
            self.fragments.append(Kept(self, prefix, part=part, beside=beside))
        # Of the whole model with P = 1, which alone has moments to average.
        self.flat, self.mean = self.fragments[0].flat, self.fragments[0].mean

    def num_groups(self) -> int:
        """The fewest process groups, given out in turn, of which each has one fragment under way
        at a time."""
        number, delay = self.config.fragments, self.config.delay
        if delay is None:
            return 1
        sent = [offset(index, int(self.config.tau), number) for index in range(2 * number)]
        return next(
            groups
            for groups in range(1, number + 1)
            if number % groups == 0
            and all(sent[index + groups] - sent[index] >= delay for index in range(number))
        )

    def init_outer_state(self) -> None:
        for fragment in self.fragments:
            fragment.init_outer_state()

    @property
    def least_tau(self) -> int:
        return self.config.fragments

    @contextmanager
    def live(self) -> Iterator[None]:
        with ExitStack() as rounds:
            for fragment in self.fragments:
                rounds.enter_context(fragment.flat.round())
            yield

    def places(self) -> "list[tuple[Kept, int, int]]":
        """Each fragment, and after which steps of a round, modulo τ, it is sent and its mean is
        due. A delay of 0 is not due there, but at once."""
        tau, number, delay = self.tau, self.config.fragments, self.config.delay
        sent = [offset(index, tau, number) for index in range(number + 1)]
        due = sent[1:] if delay is None else [begin + delay for begin in sent[:-1]]
        times = zip(self.fragments, sent[:-1], due, strict=True)
        return [(fragment, begin, end % tau) for fragment, begin, end in times]

    def end_round(self) -> None:
        self.exchange(0)

    def amid_round(self) -> None:
        place, places = self.steps - self.round_began, self.places()
        if place > 0 and any(place in times for _, *times in places):
            with synchronizing(), self.live():
                self.exchange(place)
        if self.config.delay == 0 or self.waits:
            sent = [one for one, begin, _ in places if begin == place and one.mean.in_flight]
            if sent:
                with synchronizing(), self.live():
                    self.arrive(sent)

    def exchange(self, place: int) -> None:
        """Take in what is due after so many steps of the round, then send what is to be sent."""
        places = self.places()
        # What is sent must have arrived, also if τ has changed since it was sent.
        self.arrive([one for one, *times in places if place in times])
        for fragment, begin, _ in places:
            if begin == place:
                fragment.send()

    def arrive(self, fragments: "list[Kept]") -> None:
        """Take in their means, if these are under way."""
        for fragment in fragments:
            fragment.arrive()
        if self.moments is not None:
            self.moments.arrive(self.steps)

    def show_trained(self) -> None:
        if self.config.fragments == 1:
            super().show_trained()
            return
        with torch.no_grad(), self.live():
            self.show_round_end()

    def show_round_end(self) -> None:
        for fragment in self.fragments:
            fragment.show()

    def scratch_tensors(self) -> list[Tensor]:
        others = [one.flat.transfer.scratch_tensors() for one in self.fragments[1:]]
        return [*super().scratch_tensors(), *chain.from_iterable(others)]

    def first_means(self) -> dict[str, int]:
        if self.auto is not None:
            return {}
        found, share = {}, self.blocking_share * (self.total_steps or 0)
        for index, (_, begin, end) in enumerate(self.places()):
            sent = begin or self.tau
            at_once = self.config.delay == 0 or sent <= share
            late = 0 if at_once else (end - begin) % self.tau or self.tau
            found["weights" if len(self.fragments) == 1 else f"fragment {index}"] = sent + late
        return found


class Kept(Fragment):
    """A fragment with a center of its own; with P = 1 the whole model.

    Its progress counts from `start`: start − x is minus the sum of its own steps since it was sent.
    """

    def init_outer_state(self) -> None:
        self.config: CO2Keep.Config = self.method.config
        self.start = self.hold("start", self.flat.copy())
        self.center = self.hold("center", self.flat.copy(), replicated=True)
        self.momentum: Tensor | None = None
        if self.config.momentum_weight > 0:
            self.momentum = self.hold("momentum", self.flat.zeros(), replicated=True)

    def send(self) -> None:
        """Start the mean δ of the own steps since the last one."""
        for chunk in self.flat.chunks:
            start, buffer = chunk.of(self.start), chunk.of(self.mean.buffer)
            x = chunk.read()
            torch.sub(start, x, out=buffer)  # −p^i
            start.copy_(x)
        self.mean.start()

    def arrive(self) -> None:
        """Take δ, if it is under way: move the center by it, and the replica to the center."""
        beta, w = self.config.outer_momentum, self.config.momentum_weight
        mean = self.mean.wait()
        for chunk in self.flat.chunks if mean is not None else ():
            d, center = chunk.of(self.mean.buffer), chunk.of(self.center)
            start = chunk.of(self.start)
            center.sub_(d)
            if self.momentum is not None:
                center.sub_(chunk.of(self.momentum).mul_(beta).add_(d), alpha=w)
            x = chunk.read()
            start.sub_(x)  # −q^i
            torch.sub(center, start, alpha=self.config.keep_local, out=x)
            chunk.write(x)
            start.add_(x)  # so that start − x is still −q^i

    def show(self) -> None:
        """Show c + δ + q^i. Waits for δ, unless it is in c already."""
        if self.mean.in_flight:
            self.mean.peek()
        for chunk in self.flat.chunks:
            x = chunk.read()
            torch.sub(x, chunk.of(self.start), out=x).add_(chunk.of(self.center))  # c + q^i
            chunk.write(x.sub_(chunk.of(self.mean.buffer)) if self.mean.in_flight else x)
