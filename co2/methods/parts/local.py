"""LocalMethod: what the methods with τ local steps in a round have in common."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from co2.comm.background import BackgroundMean
from co2.comm.clocks import CommTotals
from co2.comm.flat import FlatParams
from co2.config import Blocking, CommConfig
from co2.errors import ConfigError, require, require_number
from co2.methods.base import Method, MethodStats
from co2.methods.parts.auto_tau import AUTO, AutoTau
from co2.methods.parts.moments import NEEDS_ADAM, ZERO1, LateMoments, Moments


class LocalMethod(Method):
    """τ inner steps on every replica, then `end_round`. A subclass has

    - `Config`, a dataclass with `tau`, and for a method that always waits with `comm_share`;
    - `blocking`;
    - `init_outer_state()`, which makes the vectors that it holds, and `state_tensors()`, which
      names them beside the communication buffer;
    - `end_round()`, which must be idempotent up to the wait for the mean;
    - `show_round_end()`, if it lets replicas go on from a point that misses the round just trained.

    Where `Config` has `average_moments` and it is true, the moments of the inner Adam are averaged
    at the end of each round too (parts/moments.py). A method that takes a mean in amid a round
    calls `moments.arrive` there.
    """

    refused_quorum = None

    def __init__(self, config: Any = None, comm: CommConfig | None = None) -> None:
        super().__init__(config, comm)
        self.round_began = 0
        """The value of `steps` when this round began."""
        self.moments: Moments | None = None
        """What averages the inner Adam's moments; None where they stay local."""
        if self.averages_moments:
            reason = f"average_moments=true: {ZERO1}"
            self.refused_strategies = {**self.refused_strategies, "zero1": reason}
            reason = f"average_moments=true {NEEDS_ADAM}"
            self.refused_optimizers = dict.fromkeys(("sgd", "muon"), reason)
            reason = "moments of unequal numbers of steps have no common mean"
            self.refused_quorum = f"average_moments=true: {reason}"
        auto = self.config.tau == AUTO
        self.refused_elastic = "tau=auto times rounds of the same replicas" if auto else None

    @property
    def averages_moments(self) -> bool:
        """Whether the configuration asks for the mean of the inner moments."""
        return bool(getattr(self.config, "average_moments", False))

    def init_outer_state(self) -> None:
        """Make the vectors that the method holds. `flat` and `mean` exist already."""
        raise NotImplementedError

    def end_round(self) -> None:
        """Do what the method's equations say for the end of a round."""
        raise NotImplementedError

    def show_round_end(self) -> None:
        """Right after `end_round`: set the live weights to those that training left. See
        `Method.show_trained`; by default they are that already."""

    @property
    def round_just_ended(self) -> bool:
        """Whether the last step was a round's last one, and the next begins a round."""
        return 0 < self.round_began == self.steps

    def show_trained(self) -> None:
        if self.round_just_ended:
            with torch.no_grad(), self.flat.round():
                self.show_round_end()

    def set_up(self) -> nn.Module:
        self.flat = FlatParams(self.optimizer, self.comm.device, mesh=self.mesh)
        self.mean = self.new_mean()
        self.auto: AutoTau | None = None
        if self.config.tau == AUTO:
            blocking = self.blocking is Blocking.always
            self.auto = AutoTau(self.mesh, self.config.comm_share if blocking else None)
        if self.averages_moments:
            self.moments = self._new_moments()
        self.init_outer_state()
        return self.model

    def _new_moments(self) -> Moments:
        name = self.registered_name()
        if self.blocking is Blocking.always:
            return Moments(self.flat, self.optimizer, self.mean, name)
        return LateMoments(self.flat, self.optimizer, self.mesh, self.comm, name)

    def new_mean(self) -> BackgroundMean:
        """Make the communication buffer."""
        flat = self.flat
        return BackgroundMean(
            flat.numel, self.mesh, self.comm, dtype=flat.dtype, device=flat.device
        )

    @property
    def tau(self) -> int:
        """Inner steps of the round under way; while one ends, of the next."""
        return self.config.tau if self.auto is None else self.auto.tau

    def step(self) -> None:
        super().step()
        self.optimizer.step()
        if self.auto is not None:
            self.auto.step_ends()
        if self.steps - self.round_began >= self.tau:  # more: resumed with a smaller τ
            self.round_began = self.steps
            if self.auto is not None:
                self.auto.round_ends(self.totals())
            self._due = [lambda: self.with_weights(self.end_round)]
            if self.moments is not None:
                self._due.append(self.average_moments)
        self.go_on()
        if self.auto is not None:
            self.auto.step_begins()

    def with_weights(self, act: Callable[[], None]) -> None:
        """Do what reads or writes live weights."""
        with self.flat.round():
            act()

    def means(self) -> list[BackgroundMean]:
        late = self.moments is not None and self.moments.mean is not self.mean
        return [self.mean, *([self.moments.mean] if self.moments is not None and late else [])]

    def average_moments(self) -> None:
        """As a round ends, when the weights are done: average the inner moments, or start to."""
        if self.moments is not None:
            self.moments.end_round(self.steps)

    def lr(self, group: int) -> float:
        """γ_t: the inner learning rate of a parameter group at the round's last inner step. Raises
        `ConfigError` where the optimizer does not tell it."""
        rate = self.optimizer.param_groups[group].get("lr")
        if rate is None:
            kind = type(self.optimizer).__name__
            hint = f"the outer step needs the learning rate; give {kind} one"
            raise ConfigError("lr", rate, hint)
        return float(rate)

    def flush(self) -> None:
        self.mean.close()
        if self.moments is not None:
            self.moments.close()
        if self.auto is not None:
            self.auto.close()

    def state_tensors(self) -> dict[str, Tensor]:
        own = {} if self.moments is None else self.moments.state_tensors()
        return {"buffer": self.mean.buffer, **own}

    def scratch_tensors(self) -> list[Tensor]:
        own = [] if self.moments is None else self.moments.scratch_tensors()
        return [*self.flat.transfer.scratch_tensors(), *own]

    def saved_tensors(self) -> dict[str, Tensor]:
        """All but the buffers, which means save, and only while a collective is in flight."""
        tensors = self.state_tensors()
        for name in ("buffer", "moments_buffer"):
            tensors.pop(name, None)
        return tensors

    def state_dict(self) -> dict[str, Any]:
        mean = self.mean.state_dict()  # first: what it waits for may still change the tensors
        moments = {} if self.moments is None else self.moments.state_dict()
        auto = None if self.auto is None else self.auto.state_dict()
        own = {"round_began": self.round_began, "mean": mean, "auto": auto}
        return {**super().state_dict(), **own, **moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.round_began = state["round_began"]
        self.mean.load_state_dict(state["mean"])
        if self.moments is not None:
            self.moments.load_state_dict(state)
        if self.auto is not None and state["auto"] is not None:
            self.auto.load_state_dict(state["auto"])

    def stats(self) -> MethodStats:
        chosen = {} if self.auto is None else {"tau": float(self.auto.tau)}
        return MethodStats.of(self.totals(), chosen)

    def totals(self) -> CommTotals:
        """Totals of all that this worker has sent."""
        totals = self.mean.totals()
        return totals if self.moments is None else totals + self.moments.totals()

    def notices(self) -> list[str]:
        return [] if self.auto is None else self.auto.take_notices()

    @property
    def round_steps(self) -> int:
        return self.tau

    def first_means(self) -> dict[str, int]:
        """Empty with tau=auto, whose rounds are not known yet."""
        return {} if self.auto is not None else {"weights": self.max_skew_steps}

    @property
    def rounds_apart(self) -> int:
        """Rounds by which one replica may run ahead of another: the one under way, and the next
        where means have a whole round to arrive."""
        return 1 if self.blocking is Blocking.always else 2

    @property
    def max_skew_steps(self) -> int:
        return self.rounds_apart * self.tau


def check_tau(tau: int | str) -> None:
    """Raise `ConfigError` unless τ is a whole number of 1 or more, or auto."""
    whole = isinstance(tau, int) and not isinstance(tau, bool) and tau >= 1
    require(whole or tau == AUTO, "tau", tau, "must be a whole number, 1 or more, or auto")


def check_comm_share(share: float) -> None:
    """Raise `ConfigError` unless 0 < share < 1."""
    require(0 < share < 1, "comm_share", share, "must be above 0 and below 1")


def check_outer(outer_lr: float, outer_momentum: float) -> None:
    """Raise `ConfigError` unless α ≥ 0 is finite and 0 ≤ β < 1."""
    require_number("outer_lr", outer_lr, 0.0, "must be a finite number, 0 or more")
    check_share("outer_momentum", outer_momentum)


def check_share(key: str, value: float) -> None:
    """Raise `ConfigError` unless the value lies in [0, 1)."""
    require(0 <= value < 1, key, value, "must be at least 0 and below 1")
