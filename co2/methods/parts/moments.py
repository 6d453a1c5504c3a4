"""The mean over the replicas of the inner Adam's two moments, m and v.

Without it, every replica's m and v know its own gradients only. Blocking methods replace them:

    m^i ← mean_i m^i;  v^i ← mean_i v^i

Under an overlapped method the means arrive d steps late. Adam's moments are sums in which a step
keeps the share β1 (v: β2) of what was there, so β1^d of an m that was sent is still in today's m,
and only that share is replaced:

    m^i ← m^i + β1^d (mean_i m^i − m^i)_then;  v^i ← v^i + β2^d (mean_i v^i − v^i)_then ≥ 0

What it costs: a blocking method sends m and v through the communication buffer of its weights, one
after the other, and holds nothing more. An overlapped method needs a buffer for both, which is two
copies of the model; and because the mean overwrites what was sent, and no replica can tell its own
part from the mean, m^i and v^i of then are kept beside it, two more.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from torch.profiler import record_function

from co2.comm.background import BackgroundMean, new_mean
from co2.comm.collectives import local
from co2.comm.flat import Chunk, FlatParams
from co2.comm.mesh import Mesh
from co2.comm.phases import SNAPSHOT
from co2.config import CommConfig
from co2.errors import require
from co2.methods.base import QUORUM

_FIELDS = ("exp_avg", "exp_avg_sq")


def refused(key: str | None = None) -> dict[str, str]:
    """What cannot be combined with the mean of Adam's moments (`Method.refusals`).

    Args:
        key: the setting that asks for it; None: the method always takes it.
    """
    because = "" if key is None else f"{key}: "
    adam = f"{key or 'it'} averages Adam's moments; use adamw"
    return {
        "mesh.strategy=zero1": f"{because}each worker of a replica has a part of Adam's moments "
        "only; use ddp, zero2 or zero3",
        "optim.name=sgd": adam,
        "optim.name=muon": adam,
        QUORUM: f"{because}moments of unequal numbers of steps have no common mean",
    }


class Moment:
    """One of Adam's moments, seen as a flat vector beside that of the parameters.

    The moment of a parameter that has had no gradient yet counts as 0, and is not set.

    Args:
        flat: the parameters.
        optimizer: a plain Adam or AdamW.
        number: 0 for m, 1 for v.
    """

    def __init__(self, flat: FlatParams, optimizer: Optimizer, number: int) -> None:
        self.flat, self.optimizer, self.number = flat, optimizer, number
        self._chunks: list[Chunk] = []
        self._places: list[int] = []

    def beta(self, chunk: Chunk) -> float:
        """β1 or β2 of the chunk's parameter group."""
        return float(self.optimizer.param_groups[chunk.group]["betas"][self.number])

    def open(self) -> list[Chunk]:
        """Return the chunks, whose live values are the moment. Call it anew for every use: the
        optimizer makes its state in its first step, and loading a checkpoint replaces it."""
        live = [self._live(owner, part) for owner, part in self._params()]
        places = [tensor.data_ptr() for tensor in live]
        if places != self._places:
            self._chunks, self._places = self.flat.chunks_of(live), places
        return self._chunks

    def average(self, mean: BackgroundMean, divisor: "Moment | None" = None) -> None:
        """Set the moment to its mean over the replicas, through the buffer of `mean`. Blocking.

        Args:
            divisor: where this replica's values of that moment are 0, this one stays as it is.
        """
        with self.beside(divisor) as chunks:
            with record_function(SNAPSHOT):
                for chunk, _ in chunks:
                    chunk.of(mean.buffer).copy_(chunk.read())
            found = mean.mean_now()
            for chunk, other in chunks:
                values, means = chunk.read(), chunk.of(found).to(self.flat.dtype)
                if other is None:
                    # Not `means` itself: the buffer may change before a copy to a GPU is made.
                    chunk.write(values.copy_(means))
                else:
                    still = other.read() == 0
                    chunk.write(values.copy_(torch.where(still, values, means)))

    @contextmanager
    def beside(self, divisor: "Moment | None") -> Iterator[list[tuple[Chunk, Chunk | None]]]:
        """Context for synchronized access to the moment: its chunks, each with that of `divisor`,
        or None without one."""
        chunks = self.open()
        others: list[Chunk | None] = [None] * len(chunks) if divisor is None else [*divisor.open()]
        with ExitStack() as stack:
            for first in (chunks[0], others[0]):
                if first is not None:
                    stack.enter_context(first.transfer.round())
            yield list(zip(chunks, others, strict=True))

    def scratch_tensors(self) -> list[Tensor]:
        """One chunk, from the first use on."""
        return self._chunks[0].transfer.scratch_tensors() if self._chunks else []

    def _params(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.flat.owners, self.flat.params, strict=True))

    def _live(self, owner: Tensor, part: Tensor) -> Tensor:
        state = self.optimizer.state.get(owner, {})
        field = state.get(_FIELDS[self.number])
        return torch.zeros_like(part) if field is None else local(field)


class Moments:
    """Both moments, averaged at the end of each round of a blocking method.

    Args:
        flat: the parameters.
        optimizer: the inner optimizer.
        mean: the communication buffer of the weights, which is free once these are averaged.
        name: of the method, for error messages.
    Raises:
        ConfigError: the inner optimizer is not a plain Adam or AdamW.
    """

    def __init__(
        self, flat: FlatParams, optimizer: Optimizer, mean: BackgroundMean, name: str
    ) -> None:
        require_adam(optimizer, f"{name}.average_moments=true")
        self.flat, self.mean = flat, mean
        self.taken = [Moment(flat, optimizer, number) for number in range(len(_FIELDS))]

    def end_round(self, steps: int) -> None:
        """Average. Call it when the round's mean of the weights needs its buffer no more.

        Args:
            steps: inner steps so far.
        """
        for moment in self.taken:
            moment.average(self.mean)

    def arrive(self, steps: int) -> None:
        """Take in what is under way: here nothing ever is."""

    def state_tensors(self) -> dict[str, Tensor]:
        """Vectors that are held between steps, by name."""
        return {}

    def scratch_tensors(self) -> list[Tensor]:
        """A chunk of each moment."""
        return [tensor for moment in self.taken for tensor in moment.scratch_tensors()]

    def state_dict(self) -> dict[str, Any]:
        """Everything to go on from here, beside the tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""


class LateMoments(Moments):
    """Moments whose means arrive some steps later.

    Args:
        mesh, comm: of the replicas, and how vectors travel.
        numbers: which moments: 0 for m, 1 for v.
        divisor: where this replica's values of that moment are 0, the others stay as they are.
        every: fewest steps between two means.
        flat, optimizer, name: as in `Moments`.
    """

    def __init__(
        self,
        flat: FlatParams,
        optimizer: Optimizer,
        mesh: Mesh,
        comm: CommConfig,
        name: str,
        numbers: Sequence[int] = (0, 1),
        divisor: Moment | None = None,
        every: int = 1,
    ) -> None:
        mean = new_mean(len(numbers) * flat.numel, mesh, comm, flat.dtype, flat.device)
        super().__init__(flat, optimizer, mean, name)
        self.taken = [self.taken[number] for number in numbers]
        self.divisor, self.every = divisor, every
        self.sent = [flat.zeros() for _ in numbers]
        """m^i and v^i as they were when their means were started."""
        self.sent_at = 0
        """Inner steps when that was."""

    def end_round(self, steps: int) -> None:
        """Take in the mean that is under way, if `arrive` was not called before; start the next if
        it is due."""
        self.arrive(steps)
        if steps - self.sent_at < self.every:
            return
        buffers = self.mean.buffer.split(self.flat.numel)
        for moment, sent, buffer in zip(self.taken, self.sent, buffers, strict=True):
            with record_function(SNAPSHOT), moment.beside(None) as chunks:
                for chunk, _ in chunks:
                    chunk.of(sent).copy_(chunk.read())
                    chunk.of(buffer).copy_(chunk.of(sent))
        self.sent_at = steps
        self.mean.start()

    def arrive(self, steps: int) -> None:
        """Wait for the mean that is under way, and replace with it what has not decayed since."""
        found = self.mean.wait()
        if found is None:
            return
        delay = steps - self.sent_at
        means = found.split(self.flat.numel)
        for moment, sent, mean in zip(self.taken, self.sent, means, strict=True):
            with moment.beside(self.divisor) as chunks:
                for chunk, other in chunks:
                    own = chunk.of(sent).sub_(chunk.of(mean))
                    if other is not None:
                        own.masked_fill_(other.read() == 0, 0)
                    values = chunk.read().sub_(own, alpha=moment.beta(chunk) ** delay)
                    # v is what was sent, decayed, and squares since: below 0 by rounding only.
                    chunk.write(values.clamp_(min=0) if moment.number == 1 else values)

    def scratch_tensors(self) -> list[Tensor]:
        others = [] if self.divisor is None else self.divisor.scratch_tensors()
        return [*super().scratch_tensors(), *others]

    def state_tensors(self) -> dict[str, Tensor]:
        names = (f"sent_{'mv'[moment.number]}" for moment in self.taken)
        return {"moments_buffer": self.mean.buffer, **dict(zip(names, self.sent, strict=True))}

    def state_dict(self) -> dict[str, Any]:
        return {"moments_sent_at": self.sent_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sent_at = state["moments_sent_at"]


def require_adam(optimizer: Optimizer, needing: str) -> None:
    """Raise `ConfigError` unless the inner optimizer is a plain Adam or AdamW, which `needing`
    needs."""
    kind = type(optimizer)
    plain = kind in (Adam, AdamW) and not any(g["amsgrad"] for g in optimizer.param_groups)
    require(plain, "optim.name", kind.__name__, f"{needing} needs adamw, without amsgrad")
