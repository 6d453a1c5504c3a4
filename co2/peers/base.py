"""Peer: what the adapters to other people's implementations have in common."""

import time
from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor, nn

from co2.config import Blocking, CommConfig
from co2.methods.base import Method, MethodStats


class Peer(Method):
    """A published implementation as a Method. It blocks, after every τ inner steps.

    From outside one cannot see what a peer does in its call, so exposed_s is all the time between
    the inner optimizer's last step of a round and the next round: waiting for the others, copying,
    the collectives, the outer step. (Our own methods count waiting alone.) comm_s is the same.
    Bytes and model copies are computed by formula. A subclass sets `Config`, a dataclass with
    `tau`, `package`, `bytes_per_round` and `extra_copies`, which for a peer includes what it holds
    only while it synchronizes. It extends `set_up`, which makes the peer's own objects.
    """

    blocking = Blocking.always
    package: ClassVar[str]
    """The module that must be installed."""

    def __init__(self, config: Any = None, comm: CommConfig | None = None) -> None:
        super().__init__(config, comm)
        self.exposed_s = 0.0
        self._inner_step_ended = 0.0

    def advance(self) -> None:
        """Do one inner step, and whatever the peer does after it, if that is no hook of its."""
        self.optimizer.step()

    def bytes_per_round(self) -> float:
        """Bytes that one worker sends in one round."""
        raise NotImplementedError

    def set_up(self) -> nn.Module:
        self.optimizer.register_step_post_hook(self._start_clock)  # before the peer's own hooks
        return self.model

    def step(self) -> None:
        super().step()
        self.advance()
        if self.steps % self.config.tau == 0:
            self.exposed_s += time.perf_counter() - self._inner_step_ended

    def own_state(self) -> dict[str, Any]:
        return {**super().own_state(), "exposed_s": self.exposed_s}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.exposed_s = state["exposed_s"]

    def stats(self) -> MethodStats:
        sent = self.bytes_per_round() * (self.steps // self.config.tau)
        return MethodStats(self.exposed_s, self.exposed_s, sent)

    def first_means(self) -> dict[str, int]:
        return {"weights": self.config.tau}

    @property
    def round_steps(self) -> int:
        return self.config.tau

    @property
    def extra_bytes(self) -> int:
        return round(self.extra_copies * self.copy_bytes)

    def ring_bytes(self, parameters: Iterable[Tensor]) -> float:
        """Bytes that one worker sends when a ring reduces these: 2(G−1)/G of theirs."""
        payload = sum(parameter.nbytes for parameter in parameters)
        return 2 * (self.mesh.num_replicas - 1) * payload / self.mesh.num_replicas

    def _start_clock(self, *_: object) -> None:
        self._inner_step_ended = time.perf_counter()
