"""The mean over the replicas of the inner Adam's two moments, m and v.

Without it, every replica's m and v know its own gradients only. Blocking methods replace them:

    m^i ← mean_i m^i;  v^i ← mean_i v^i

Under an overlapped method the means arrive d steps late. Adam's moments are sums in which a step
keeps the share β1 (v: β2) of what was there, so β1^d of an m that was sent is still in today's m,
and only that share is replaced:

    m^i ← m^i + β1^d (mean_i m^i − m^i)_then;  v^i ← v^i + β2^d (mean_i v^i − v^i)_then ≥ 0

Cost: a blocking method sends m and v through the communication buffer of its weights, one after the
other, and holds nothing more. An overlapped method needs a buffer for both, two copies of the
model. The mean overwrites it, so m^i and v^i as they were sent are kept too, two copies more.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from torch.profiler import record_function

from co2.comm.background_mean import BackgroundMean
from co2.comm.collectives import local
from co2.comm.flat import FlatParams
from co2.comm.phases import SNAPSHOT
from co2.comm.transfer import Chunk
from co2.errors import require
from co2.methods.base import QUORUM, Method

_FIELDS = ("exp_avg", "exp_avg_sq")


def refused(key: str | None = None) -> dict[str, str]:
    """Refusals (`Method.refusals`) of a method that averages Adam's moments, as the setting `key`
    asks; None: always."""
    because = "" if key is None else f"{key}: "
    adam = f"{key or 'it'} averages Adam's moments; use adamw"
    return {
        "mesh.strategy=zero1": f"{because}each worker of a replica has a part of Adam's moments "
        "only; use ddp, zero2 or zero3",
        "optim.name=sgd": adam,
        "optim.name=muon": adam,
        QUORUM: f"{because}moments of unequal numbers of steps have no common mean; use null",
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
        pairs = zip(self.flat.owners, self.flat.params, strict=True)
        live = [self._live(owner, part) for owner, part in pairs]
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

    def _live(self, owner: Tensor, part: Tensor) -> Tensor:
        field = self.optimizer.state.get(owner, {}).get(_FIELDS[self.number])
        return torch.zeros_like(part) if field is None else local(field)


class Moments:
    """Both moments, averaged at the end of each round of a blocking method.

    Args:
        mean: the communication buffer of the weights, which is free once these are averaged.
    Raises:
        ConfigError: the inner optimizer is not a plain Adam or AdamW.
    """

    def __init__(self, method: Method, flat: FlatParams, mean: BackgroundMean) -> None:
        require_adam(method, ".average_moments=true")
        self.flat, self.mean = flat, mean
        self.taken = [Moment(flat, method.optimizer, n) for n in range(len(_FIELDS))]

    def end_round(self, steps: int) -> None:
        """Average, after so many inner steps, when the round's mean of the weights needs its buffer
        no more."""
        for moment in self.taken:
            moment.average(self.mean)

    def arrive(self, steps: int) -> None:
        """Take in a pending mean. A blocking method has none."""

    def scratch_tensors(self) -> list[Tensor]:
        """A chunk of each moment."""
        return [tensor for moment in self.taken for tensor in moment.scratch_tensors()]


class LateMoments(Moments):
    """Moments whose means arrive some steps later.

    Args:
        numbers: which moments: 0 for m, 1 for v.
        divisor: where this replica's values of that moment are 0, the others stay as they are.
        every: fewest steps between two means.
    """

    def __init__(
        self,
        method: Method,
        flat: FlatParams,
        numbers: Sequence[int] = (0, 1),
        divisor: Moment | None = None,
        every: int = 1,
    ) -> None:
        super().__init__(method, flat, method.new_mean(flat, "moments_buffer", len(numbers)))
        self.taken = [self.taken[number] for number in numbers]
        self.divisor, self.every = divisor, every
        self.sent = [method.hold(f"sent_{'mv'[n]}", self.flat.zeros()) for n in numbers]
        """m^i and v^i as they were when their means were started."""
        self.sent_at = 0
        """Inner steps when these were started."""
        method.keep(self, "sent_at", prefix="moments.")

    def end_round(self, steps: int) -> None:
        """Take in a pending mean; start the next if it is due."""
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
        """Wait for a pending mean, and put it in place of what is left of the moments as sent."""
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


def require_adam(method: Method, setting: str = "") -> None:
    """Raise `ConfigError` unless the inner optimizer is a plain Adam or AdamW, which a setting of
    the method needs, or the method itself."""
    kind, groups = type(method.optimizer), method.optimizer.param_groups
    plain = kind in (Adam, AdamW) and not any(group["amsgrad"] for group in groups)
    hint = f"{method.registered_name()}{setting} needs adamw, without amsgrad"
    require(plain, "optim.name", kind.__name__, hint)
