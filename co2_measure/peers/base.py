"""Peer: what the adapters to other people's implementations have in common."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor, nn

from co2.comm.clocks import Stopwatch
from co2.config import Blocking
from co2.methods.base import Method, MethodStats


class Peer(Method):
    """A published implementation as a Method. It blocks, after every τ inner steps.

    exposed_s (co2/comm/clocks.py) is the time in the functions of `waits`. They block, so comm_s is
    the same. Bytes and model copies are computed by formula. A subclass sets `Config`, a dataclass
    with `tau`, `package`, `bytes_per_round` and `extra_copies`, which for a peer includes what it
    holds only while it synchronizes. It extends `set_up`, which makes the peer's own objects.
    """

    blocking = Blocking.always
    exposed_s = 0.0
    package: ClassVar[str]
    """The module that must be installed."""

    def advance(self) -> None:
        """Do one inner step, and whatever the peer does after it, if that is no hook of its."""
        self.inner_step()

    def waits(self) -> list[tuple[object, str]]:
        """The functions in which the peer waits for others, and for nothing else, each as a
        module or class and a name in it: by default PyTorch's blocking collectives."""
        return [(dist, name) for name in ("all_reduce", "reduce", "broadcast")]

    def bytes_per_round(self) -> float:
        """Bytes that one worker sends in one round."""
        raise NotImplementedError

    def set_up(self) -> nn.Module:
        self._clock = Stopwatch()
        self.keep(self, "exposed_s")
        return self.model

    def update(self) -> None:
        with ExitStack() as stack:
            for owner, name in self.waits():
                stack.enter_context(_timed(owner, name, self._clock))
            self.advance()
        self.exposed_s += sum(self._clock.take())
        self._as_trained("step").note_places()  # a peer may put weights elsewhere

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


@contextmanager
def _timed(owner: object, name: str, clock: Stopwatch) -> Iterator[None]:
    """Inside, each call of a function is a span of the clock."""
    original: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        clock.begin()
        try:
            return original(*args, **kwargs)
        finally:
            clock.end()

    with patch.object(owner, name, call):
        yield
