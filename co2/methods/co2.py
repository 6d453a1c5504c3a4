"""CO2 (Sun et al., ICLR 2024, arXiv 2401.16265). Fully overlapped.

    at the end of round t, on every replica i:
        1  wait for d_{t−1} = mean_i (x_{t−1,0} − x^i_{t−1,τ})     none at t = 0: m_0 = 0
        2  Λ_t, the staleness gap                                  (outer_step.py, GapPenalty)
        3  start the mean of x_{t,0} − x^i_{t,τ}
        4  m_t = clip(β m_{t−1} + d_{t−1}/Λ_t, φ)                  (outer_step.py, Momentum)
        5  x_{t+1,0} = x_{t,0} − α m_t                             every replica goes on from here

τ → `tau`, α → `outer_lr`, β → `outer_momentum`, Λ → `gap_penalty`, φ → `clip`.
The default gap, `gap_aware_steady`, is ours, not the paper's. The paper's follows the inner rate;
`gap_aware` is our reading of it, made exact after Gap-Aware (arXiv 1909.10802). The released code
has 1. See GapPenalty. Step 4 runs before step 3, because d_{t−1} lies in the only communication
buffer; neither step reads what the other writes.

With `blocking_share` the first rounds wait: they start the mean of d_t first, m_t takes in d_t
itself with Λ_t = 1, and nothing is late. In the first round after them nothing arrives, and
x_{t+1,0} = x_{t,0}.

x_{t+1,0} misses round t. So right after its end the consensus is mean_i x^i_{t,τ} = x_{t,0} − d_t,
which is x_{t+1,0} + α m_t − d_t: d_t is waited for and stays in flight.

`shard` keeps 1/G of the outer state on each replica: ShardedOuterStep has the same trajectory.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.profiler import record_function

from co2.comm.background_mean import BackgroundMean
from co2.comm.cuts import Part
from co2.comm.phases import SNAPSHOT
from co2.limits import Amount, Decay, Positive
from co2.methods.base import BF16, ELASTIC, HOST
from co2.methods.shared.local_method import LocalMethod
from co2.methods.shared.outer_shard import OuterShard
from co2.methods.shared.outer_step import GapKind, GapPenalty, Momentum
from co2.methods.shared.rounds import AveragesMoments, LateRounds, Tau


class CO2(LocalMethod):
    may_change = frozenset({"tau", "outer_momentum", "clip", "clip_mode", "blocking_share"})
    shard: OuterShard | None = None
    """This replica's part of the outer state; None where each replica has all of it."""

    @dataclass
    class Config(AveragesMoments, LateRounds):
        tau: Tau = 12
        """Inner steps of a round; auto: chosen by measurement (auto_tau.py). The paper tries 1, 3,
        6, 12, 24, …, 192."""
        outer_lr: Amount = 1.0
        """α, the outer learning rate."""
        outer_momentum: Decay = 0.2
        """β, the outer momentum. The paper does not say. GPT-2 at smoke scale (τ = 12, one seed)
        did worse with 0.5."""
        gap_penalty: GapKind | Positive = "gap_aware_steady"
        """Λ: gap_aware_steady (ours), gap_aware (after the paper), gap_aware_elementwise, none, or
        a constant."""
        clip: Amount | None = None
        """φ, the bound of the outer momentum; null for none."""
        clip_mode: Literal["value", "norm"] = "value"
        """value: every element to [−φ, φ]; norm: the whole vector to norm φ."""
        shard: bool = False
        """Anchor and momentum are sharded over the G replicas: 1 + 2/G model copies, not 3."""

    def refusals(self) -> dict[str, str]:
        found = super().refusals()
        if self.config.shard:
            found |= {
                ELASTIC: "co2.shard=true leaves each replica a part of the outer state; use false",
                "mesh.strategy=ep": "co2.shard=true cuts experts as it does weights; use false",
                BF16: "with co2.shard=true weights travel, and bf16 loses their changes; use fp32",
                HOST: "with co2.shard=true weights and buffer share one memory; use auto",
            }
        return found

    def make_mean(self) -> BackgroundMean:
        if not self.config.shard:
            return super().make_mean()
        self.shard = OuterShard(self.flat, self.mesh, self.comm)
        return self.send_by(self.shard.mean)

    def init_outer_state(self) -> None:
        config, vectors = self.config, self.shard or self.flat
        if self.shard is not None:
            self.flat.copy_to(self.mean.buffer)
            self.mean.mark_arrived()  # x_{1,0} = x_{0,0}
        self.gap = GapPenalty(config.gap_penalty, vectors)
        self.momentum = Momentum(vectors, config.outer_momentum, config.clip, config.clip_mode)
        self.moved = False
        """Whether the replicas were moved on, by −α m, as the newest pseudo-gradient was sent."""
        self._watches = True
        """Whether the warning about stability is still to come."""
        alike = self.shard is None  # else each replica has another part
        self.anchor = self.hold("anchor", vectors.copy(), replicated=alike)
        self.hold("momentum", self.momentum.vector, replicated=alike)
        self.keep(self, "_watches", "moved")
        self.keep(self.momentum, "norm", "clipped", prefix="momentum.")
        self.keep(self.gap, "ema", "value", "count", "largest_lr", prefix="gap.")
        self.sharded = None if self.shard is None else ShardedOuterStep(self, self.shard)

    def end_round(self) -> None:
        waits, lr = self.waits, self.highest_lr()
        if self.sharded is not None:
            self.sharded.end_round(waits, lr)
        else:
            self.gap.observe_lr(lr)
            arrived, alpha = self.mean.wait(), self.config.outer_lr  # 1
            if arrived is not None:
                self.gap.update(self.momentum.norm, lr, alpha if self.moved else 0.0)  # 2
                self.momentum.step(partial(Part.of, vector=arrived), self.gap)  # 4
            self.moved = arrived is not None
            shift = alpha if self.moved else 0.0
            with record_function(SNAPSHOT):
                # One pass: the anchor is in cache, and between GPU and host copies go both ways.
                for chunk in self.flat.chunks:
                    anchor = chunk.of(self.anchor)
                    torch.sub(anchor, chunk.read(), out=chunk.of(self.mean.buffer))  # 3
                    anchor.sub_(chunk.of(self.momentum.vector), alpha=shift)  # 5
                    chunk.write(anchor)
            self.mean.start()
            if waits:
                self._take_in_at_once()
        if not waits:
            self.watch_stability(lr)

    def _take_in_at_once(self) -> None:
        """Wait for what was just sent, and go on from a point that misses nothing."""
        mean = self.mean.wait()
        assert mean is not None
        self.gap.not_late()
        self.momentum.step(partial(Part.of, vector=mean), self.gap)
        self.moved = False
        for chunk in self.flat.chunks:
            anchor, momentum = chunk.of(self.anchor), chunk.of(self.momentum.vector)
            chunk.write(anchor.sub_(momentum, alpha=self.config.outer_lr))

    def watch_stability(self, lr: float) -> None:
        """Warn, once, when the outer step at a rate of γ_t is not stable in every direction
        (docs/choosing.md)."""
        beta, alpha = self.config.outer_momentum, self.config.outer_lr
        gap = self.gap.usual(lr)
        if self._watches and beta + alpha / gap >= 1:
            self._watches = False
            self._notices.append(
                f"outer_momentum + outer_lr/Λ is now {beta:g} + {alpha:g}/{gap:.2f}, not below 1: "
                "steep directions do not settle; gap_penalty=gap_aware_steady keeps Λ near 2"
            )

    def show_round_end(self) -> None:
        """Show x_{t,0} − d_t, once d_t is there. Without shards nothing is sent for it."""
        if self.sharded is not None:
            self.sharded.show_round_end()
            return
        if not self.mean.in_flight:  # the round waited: x_{t+1,0} misses nothing
            return
        self.mean.peek()
        shift = self.config.outer_lr if self.moved else 0.0
        for chunk in self.flat.chunks:
            x, momentum = chunk.of(self.anchor), chunk.of(self.momentum.vector)
            trained = torch.add(x, momentum, alpha=shift, out=chunk.read())
            chunk.write(trained.sub_(chunk.of(self.mean.buffer)))

    def next_highest_lr(self) -> float:
        """γ_{t+1} as a round ends, or γ_t without a schedule, which is exact for constant rates."""
        if self.schedule is None:
            return self.highest_lr()
        return self.schedule(self.steps + self.tau - 1)

    def scratch_tensors(self) -> list[Tensor]:
        shard = [] if self.shard is None else self.shard.scratch_tensors()
        return [*super().scratch_tensors(), *self.gap.scratch_tensors(), *shard]

    def figures(self) -> dict[str, float]:
        """`gap` is Λ, `clipped` the share of the momentum's elements that the clip changed; both
        of the round that ended last."""
        newest = self.newest_figures() if self.sharded is None else self.sharded.settled
        gap, clipped = newest.tolist()
        return {**super().figures(), "gap": gap, "clipped": clipped}

    def newest_figures(self) -> Tensor:
        """Λ and the clipped share, (2,), of the newest outer step."""
        return torch.stack((self.gap.value, self.momentum.clipped))


class ShardedOuterStep:
    """The outer step of one shard on each replica. Parameters travel, and the whole outer step runs
    in the background: the buffer comes back with what every replica goes on from.

        at the end of round t, on every replica i:
            1  wait for x_{t+1,0}                               in the buffer; x_{1,0} = x_{0,0}
            2  swap: live ← x_{t+1,0}, buffer ← x^i_{t,τ}
            3  start, on 1/G of the vector, to be done when round t+1 ends:
                 mean_i x^i_{t,τ}                                                reduce-scatter
                 d_t = x_{t,0} − mean_i x^i_{t,τ};   x_{t+1,0} = x_{t,0} − α m_t
                 m_{t+1} = clip(β m_t + d_t/Λ_{t+1}, φ)       its norm is summed over the shards
                 x_{t+2,0} = x_{t+1,0} − α m_{t+1}                               all-gather

    The anchor lags: between rounds it is what the round before started from, because d_t needs it,
    and it is moved by the m_t that is still held, to the same bits that were sent. So this
    replica's own shard of the buffer need not hold what it has sent: until the round ends it holds
    its part of mean_i x^i_{t,τ}, which a consensus shows, and step 1 puts the sent bits back.
    Λ_{t+1} is due before γ_{t+1} has come, so the schedule has to tell it.

    A round that waits does the same at once, from the x_{t,0} that its replicas have trained from:
    the anchor is moved by m_{t−1} before d_t is taken. So is it in the first round that does not
    wait, whose replicas also have trained from there.
    """

    def __init__(self, method: CO2, shard: OuterShard) -> None:
        self.method, self.shard = method, shard
        self.flat, self.mean, self.anchor = method.flat, method.mean, method.anchor
        self.gap, self.momentum, self.alpha = method.gap, method.momentum, method.config.outer_lr
        self.settled = method.newest_figures()
        """Λ and the clipped share, (2,), of the newest outer step that a round's end waited for:
        the step in the background changes the figures at any time."""
        method.keep(self, "settled")

    def end_round(self, waits: bool, lr: float) -> None:
        method = self.method
        self.mean.wait()  # 1
        for chunk in self.shard.chunks:
            self._next_start(chunk)
        self.settled = method.newest_figures()
        self.flat.swap(self.mean.buffer)  # 2
        ahead = method.next_highest_lr()
        self.gap.observe_lr(lr)  # not before the step in the background is done
        self.gap.observe_lr(ahead)
        moved, method.moved = method.moved, not waits
        self.mean.run(lambda: self.outer_step(ahead, moved, late=not waits))  # 3
        if waits:
            self.mean.wait()
            self.settled = method.newest_figures()
            for chunk in self.shard.chunks:
                self._next_start(chunk)
            self.flat.write(self.mean.buffer)
            self.mean.mark_arrived()  # x_{t+1,0}, as at the start

    @torch.no_grad()
    def outer_step(self, lr: float, moved: bool, late: bool) -> None:
        """Step 3, with γ_{t+1} = `lr`. In the background: nothing else touches the outer state."""
        self.shard.reduce_scatter()
        if late:
            self.gap.update(self.momentum.norm, lr, self.alpha if moved else 0.0)
        else:
            self.gap.not_late()
        self.momentum.step(lambda chunk: self._pseudo_gradient(chunk, moved), self.gap)
        for chunk in self.shard.chunks:
            mean = self.shard.scratch.copy_(chunk.of(self.shard.own))
            self._next_start(chunk)
            self.shard.all_gather(chunk)
            chunk.of(self.shard.own).copy_(mean)

    def _pseudo_gradient(self, chunk: Part, moved: bool) -> Tensor:
        """Return d_t of a chunk, and move the anchor on, by the momentum as it is before its step.
        In scratch that the next call overwrites."""
        anchor, mean = chunk.of(self.anchor), chunk.of(self.shard.own)
        momentum, alpha = chunk.of(self.momentum.vector), self.alpha
        if moved:
            d = torch.sub(anchor, mean, out=self.shard.scratch)
            anchor.sub_(momentum, alpha=alpha)
            return d
        return torch.sub(anchor.sub_(momentum, alpha=alpha), mean, out=self.shard.scratch)

    def _next_start(self, chunk: Part) -> None:
        """Put what all replicas go on from into this replica's shard of the buffer."""
        anchor, momentum = chunk.of(self.anchor), chunk.of(self.momentum.vector)
        out = chunk.of(self.shard.own)
        torch.sub(anchor, momentum, alpha=self.alpha, out=out)

    def show_round_end(self) -> None:
        """Show mean_i x^i_{t,τ}, once the outer step is done, unless the round waited."""
        if not self.method.moved:
            return
        self.mean.peek()
        self.flat.write(self.shard.gathered(self.method.group))
