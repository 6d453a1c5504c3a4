"""LocalMethod and BlockingMethod: what methods with τ local steps in a round have in common."""

import sys
from bisect import bisect_right
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from co2.comm.background_mean import BackgroundMean
from co2.comm.flat import FlatParams
from co2.comm.transfer import Chunk
from co2.config import Blocking
from co2.errors import require
from co2.methods.base import ELASTIC, QUORUM, Method, synchronizing
from co2.methods.shared.auto_tau import AUTO, AutoTau
from co2.methods.shared.moments import LateMoments, Moments, refused
from co2.methods.shared.rounds import AveragesMoments, LateRounds, UnequalRounds, round_ends


class LocalMethod(Method):
    """τ inner steps on every replica, then `end_round`. A subclass has

    - `Config`, which has `tau`, as the classes of shared/rounds.py do;
    - `blocking`, unless it is in the catalogue;
    - `init_outer_state()`, which makes the vectors that it holds (`hold`);
    - `end_round()`, which does what the method's equations say;
    - `show_round_end()`, if it lets replicas go on from a point that misses the round just trained.

    - `amid_round()`, if anything is due after other steps.

    Where `Config` is `AveragesMoments` and asks for it, the moments of the inner Adam are averaged
    at the end of each round too (moments.py). A method whose means arrive amid a round calls
    `moments.arrive` there.

    Where `Config` is a `LateRounds`, rounds that end in the `blocking_share` of the training wait:
    each takes in its own mean at its end. No mean arrives at the end of the first round after the
    share.
    """

    round_began = 0
    """The value of `steps` when this round began."""
    moments: Moments | None = None
    """What averages the inner Adam's moments; None where they stay local."""

    def refusals(self) -> dict[str, str]:
        found = refused("average_moments=true") if self.averages_moments else {}
        if self.config.tau == AUTO:
            found[ELASTIC] = "tau=auto times rounds of the same replicas; give a number"
        if self.tau_power > 0:
            found[ELASTIC] = found[QUORUM] = "tau_power makes rounds of unequal length; use 0"
        return found

    @property
    def tau_power(self) -> float:
        """p, by which rounds differ in length (rounds.py)."""
        return self.config.tau_power if isinstance(self.config, UnequalRounds) else 0.0

    @property
    def blocking_share(self) -> float:
        """The first share of the training, whose rounds wait for their means."""
        return self.config.blocking_share if isinstance(self.config, LateRounds) else 0.0

    @property
    def least_tau(self) -> int:
        """The smallest τ that tau=auto may choose."""
        return 1

    @property
    def averages_moments(self) -> bool:
        """Whether the configuration asks for the mean of the inner moments."""
        return isinstance(self.config, AveragesMoments) and self.config.average_moments

    def init_outer_state(self) -> None:
        """Make the vectors that the method holds. `flat` and `mean` exist already."""
        raise NotImplementedError

    def end_round(self) -> None:
        """Do what the method's equations say for the end of a round."""
        raise NotImplementedError

    def show_round_end(self) -> None:
        """Right after `end_round`: set the live weights to those that training left. See
        `Method.show_trained`; by default they are that already."""

    def amid_round(self) -> None:
        """Called after every step, and after `end_round` where the step has ended a round."""

    @property
    def waits(self) -> bool:
        """Whether the ending round waits for its own mean, although the method overlaps."""
        share = self.blocking_share
        if share in (0, 1) or self.total_steps is None:
            return share == 1
        return self.steps <= share * self.total_steps

    def show_trained(self) -> None:
        at_round_boundary = 0 < self.round_began == self.steps
        if at_round_boundary:
            with torch.no_grad(), self.live():
                self.show_round_end()

    def set_up(self) -> nn.Module:
        self.keep(self, "round_began")
        self.make_vectors()
        self.round_ends = self._round_ends()
        self.auto: AutoTau | None = None
        if self.config.tau == AUTO:
            blocking = self.blocking is Blocking.always
            self.auto = AutoTau(
                self.mesh, self.config.comm_share if blocking else None, self.least_tau
            )
            self.keep(self, "auto")
        if self.averages_moments:
            blocks = self.blocking is Blocking.always
            self.moments = (
                Moments(self, self.flat, self.mean) if blocks else LateMoments(self, self.flat)
            )
        self.init_outer_state()
        return self.model

    def check_state(self, state: dict[str, Any]) -> None:
        super().check_state(state)
        then = state["config"]["tau"]
        hint = f"the state was saved with {then}, and knows nothing that was measured; give that"
        good = self.config.tau != AUTO or then == AUTO
        require(good, f"{self.registered_name()}.tau", AUTO, hint)

    def _round_ends(self) -> list[int]:
        """The steps after which rounds end, where they differ in length; else none."""
        if self.tau_power == 0:
            return []
        known = self.schedule is not None and self.total_steps is not None
        hint = "needs the learning rate of every step; give prepare schedule and total_steps, or 0"
        require(known, f"{self.registered_name()}.tau_power", self.tau_power, hint)
        assert self.schedule is not None and self.total_steps is not None
        return round_ends(self.schedule, self.total_steps, self.config.tau, self.tau_power)

    def make_vectors(self) -> None:
        """Make `flat` and `mean`."""
        self.flat = FlatParams(self.optimizer, self.comm.device, mesh=self.mesh)
        self.mean = self.make_mean()

    def live(self) -> AbstractContextManager[None]:
        """Context for synchronized access to the live parameters."""
        return self.flat.round()

    def make_mean(self) -> BackgroundMean:
        """Make the communication buffer."""
        return self.new_mean(self.flat)

    @property
    def tau(self) -> int:
        """Inner steps of the round under way; while one ends, of the next."""
        if self.tau_power > 0:
            coming = bisect_right(self.round_ends, self.round_began)
            last = coming == len(self.round_ends)  # what is left makes no whole round
            return sys.maxsize if last else self.round_ends[coming] - self.round_began
        return self.config.tau if self.auto is None else self.auto.tau

    def update(self) -> None:
        self.inner_step()
        if self.auto is not None:
            self.auto.stopwatch.end()
        if self.steps - self.round_began >= self.tau:  # more: resumed with a smaller τ
            self.round_began = self.steps
            if self.auto is not None:
                self.auto.round_ends(self.totals())
            with synchronizing():
                with self.live():
                    self.end_round()
                if self.moments is not None:
                    self.moments.end_round(self.steps)
                    if self.waits:
                        self.moments.arrive(self.steps)
        self.amid_round()
        if self.auto is not None:
            self.auto.stopwatch.begin()

    def flush(self) -> None:
        super().flush()
        if self.auto is not None:
            self.auto.close()

    def scratch_tensors(self) -> list[Tensor]:
        own = [] if self.moments is None else self.moments.scratch_tensors()
        return [*self.flat.transfer.scratch_tensors(), *own]

    def figures(self) -> dict[str, float]:
        return {} if self.auto is None else {"tau": float(self.auto.tau)}

    def notices(self) -> list[str]:
        return [*super().notices(), *([] if self.auto is None else self.auto.take_notices())]

    @property
    def round_steps(self) -> int:
        return self.config.tau if self.tau_power > 0 else self.tau

    def first_means(self) -> dict[str, int]:
        """Empty with tau=auto, whose rounds are not known yet."""
        return {} if self.auto is not None else {"weights": self.first_mean}

    @property
    def first_mean(self) -> int:
        """The step that takes in the first mean."""
        share = self.blocking_share * (self.total_steps or 0)
        at_once = self.blocking is Blocking.always or self.tau <= share
        return self.tau if at_once else 2 * self.tau


class BlockingMethod(LocalMethod):
    """τ inner steps from x_{t,0}, and then d_t = mean_i (x_{t,0} − x^i_{t,τ}), for which all wait.

    A subclass has `blocking = Blocking.always`, unless it is in the catalogue, `Config`, derived
    from `WaitingRounds`, and `outer_step`, which makes x_{t+1,0}. All replicas hold the same
    x_{t,0}, `anchor`, which is the consensus right after a round's end.
    """

    def init_outer_state(self) -> None:
        self.anchor = self.hold("anchor", self.flat.copy(), replicated=True)

    def mean_now(self) -> Tensor:
        """Return d_t of what lies in `mean.buffer`, once it has come."""
        return self.mean.mean_now()

    def outer_step(self, chunk: Chunk, x: Tensor, d: Tensor) -> None:
        """Set x, which is x_{t,0}, to x_{t+1,0}, for the elements of one chunk of d_t."""
        raise NotImplementedError

    def end_round(self) -> None:
        self.flat.displacement(self.anchor, out=self.mean.buffer)
        mean = self.mean_now()
        for chunk in self.flat.chunks:
            x = chunk.of(self.anchor)
            self.outer_step(chunk, x, chunk.of(mean))
            chunk.write(x)
