"""LocalMethod: what the methods with τ local steps in a round have in common."""

from typing import Any

import torch
from torch import Tensor, nn

from co2.comm.background import BackgroundMean, new_mean
from co2.comm.flat import FlatParams
from co2.config import Blocking, CommConfig
from co2.errors import ConfigError, require, require_number
from co2.methods.base import ELASTIC, Method, MethodStats, synchronizing
from co2.methods.parts.auto_tau import AUTO, AutoTau
from co2.methods.parts.moments import LateMoments, Moments, refused


class LocalMethod(Method):
    """τ inner steps on every replica, then `end_round`. A subclass has

    - `Config`, a dataclass with `tau`, and for a method that always waits with `comm_share`;
    - `blocking`;
    - `init_outer_state()`, which makes the vectors that it holds, and `state_tensors()`, which
      names them beside the communication buffer;
    - `end_round()`, which does what the method's equations say;
    - `show_round_end()`, if it lets replicas go on from a point that misses the round just trained.

    Where `Config` has `average_moments` and it is true, the moments of the inner Adam are averaged
    at the end of each round too (parts/moments.py). A method that takes a mean in amid a round
    calls `moments.arrive` there.
    """

    def __init__(self, config: Any = None, comm: CommConfig | None = None) -> None:
        super().__init__(config, comm)
        self.round_began = 0
        """The value of `steps` when this round began."""
        self.moments: Moments | None = None
        """What averages the inner Adam's moments; None where they stay local."""

    def refusals(self) -> dict[str, str]:
        found = refused("average_moments=true") if self.averages_moments else {}
        if self.config.tau == AUTO:
            found[ELASTIC] = "tau=auto times rounds of the same replicas"
        return found

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
        self.means = [self.mean]
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
        late = LateMoments(self.flat, self.optimizer, self.mesh, self.comm, name)
        self.means.append(late.mean)
        return late

    def new_mean(self) -> BackgroundMean:
        """Make the communication buffer."""
        flat = self.flat
        return new_mean(flat.numel, self.mesh, self.comm, flat.dtype, flat.device)

    @property
    def tau(self) -> int:
        """Inner steps of the round under way; while one ends, of the next."""
        return self.config.tau if self.auto is None else self.auto.tau

    def step(self) -> None:
        super().step()
        self.inner_step()
        if self.auto is not None:
            self.auto.step_ends()
        if self.steps - self.round_began >= self.tau:  # more: resumed with a smaller τ
            self.round_began = self.steps
            if self.auto is not None:
                self.auto.round_ends(self.totals())
            with synchronizing():
                with self.flat.round():
                    self.end_round()
                if self.moments is not None:
                    self.moments.end_round(self.steps)
        if self.auto is not None:
            self.auto.step_begins()

    def inner_step(self) -> None:
        """Do one step of the inner optimizer. A method that changes it extends this."""
        self.optimizer.step()

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
        super().flush()
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

    def own_state(self) -> dict[str, Any]:
        moments = {} if self.moments is None else self.moments.state_dict()
        auto = None if self.auto is None else self.auto.state_dict()
        return {"round_began": self.round_began, "auto": auto, **moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.round_began = state["round_began"]
        if self.moments is not None:
            self.moments.load_state_dict(state)
        if self.auto is not None and state["auto"] is not None:
            self.auto.load_state_dict(state["auto"])

    def stats(self) -> MethodStats:
        chosen = {} if self.auto is None else {"tau": float(self.auto.tau)}
        return MethodStats.of(self.totals(), chosen)

    def notices(self) -> list[str]:
        return [] if self.auto is None else self.auto.take_notices()

    @property
    def round_steps(self) -> int:
        return self.tau

    def first_means(self) -> dict[str, int]:
        """Empty with tau=auto, whose rounds are not known yet."""
        return {} if self.auto is not None else {"weights": self.first_mean}

    @property
    def first_mean(self) -> int:
        """The step that takes in the first mean."""
        return self.tau if self.blocking is Blocking.always else 2 * self.tau


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
