"""Replicas of many trainings as the rows of one matrix: model, inner step and outer steps.

A model is one vector, (n,). The weights of all replicas are (rows, n), so that a layer is one
batched product, AdamW is one kernel, and a mean over replicas is a sum of rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tasks.shared.randomness import initial_std

BETAS, WEIGHT_DECAY, CLIP_NORM = (0.9, 0.95), 0.1, 1.0
"""As in conf/task/scale/gpt2_smoke.yaml."""


@dataclass(frozen=True)
class Decoder:
    """GPT-2 whose norms have no scale, without biases, with the embedding as its head."""

    vocab: int
    context: int
    width: int
    layers: int
    heads: int

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of the matrices: tokens, positions; for each layer qkv, out, up and down."""
        d = self.width
        layer = [(d, 3 * d), (d, d), (d, 4 * d), (4 * d, d)]
        return [(self.vocab, d), (self.context, d), *layer * self.layers]

    @property
    def sizes(self) -> list[int]:
        return [rows * columns for rows, columns in self.shapes]

    def start(self, seed: int) -> Tensor:
        """Initial weights, (n,), normal; what adds to the residual is smaller, as in GPT-2."""
        generator = torch.Generator().manual_seed(seed)
        std = initial_std(self.width)
        stds = [std, std, *[std, std / (2 * self.layers) ** 0.5] * 2 * self.layers]
        parts = [
            torch.randn(size, generator=generator) * std
            for size, std in zip(self.sizes, stds, strict=True)
        ]
        return torch.cat(parts)

    def losses(self, weights: Tensor, windows: Tensor) -> Tensor:
        """Mean next-token cross-entropy of each row in nats, (rows,); on a GPU in bf16.

        Args:
            weights: (rows, n).
            windows: token ids, int64 (rows, batch, context + 1).
        """
        rows, batch, _ = windows.shape
        first = self.vocab * torch.arange(rows, device=weights.device)[:, None, None]
        # A graph of kernels must not keep casts from one step to the next.
        with torch.autocast("cuda", torch.bfloat16, weights.is_cuda, cache_enabled=False):
            cast = weights.bfloat16() if weights.is_cuda else weights
            tokens, positions, *layers = (
                part.view(rows, *shape)
                for part, shape in zip(cast.split(self.sizes, dim=1), self.shapes, strict=True)
            )
            embedded = F.embedding(windows[..., :-1] + first, tokens.flatten(0, 1))
            x = (embedded + positions[:, None]).flatten(1, 2).to(weights.dtype)
            for place in range(0, len(layers), 4):
                qkv, out, up, down = layers[place : place + 4]
                x = x + self._attention(self._norm(x) @ qkv, batch) @ out
                x = x + F.gelu(self._norm(x) @ up, approximate="tanh") @ down
            logits = (self._norm(x) @ tokens.mT).flatten(0, 1)
            losses = F.cross_entropy(logits, windows[..., 1:].flatten(), reduction="none")
        return losses.view(rows, -1).mean(1)

    def _norm(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.width,))

    def _attention(self, qkv: Tensor, batch: int) -> Tensor:
        """From (rows, batch · context, 3 · width) to (rows, batch · context, width)."""
        heads = qkv.view(len(qkv) * batch, self.context, 3, self.heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return found.transpose(1, 2).reshape(len(qkv), -1, self.width)


class Replicas:
    """Configurations with equally many replicas, all from the same weights, and their AdamW.

    Args:
        start: (n,).
        lr: a scalar that the caller fills before each step.
    """

    def __init__(
        self, model: Decoder, start: Tensor, configurations: int, replicas: int, lr: Tensor
    ) -> None:
        self.model, self.configurations, self.replicas = model, configurations, replicas
        self.weights = start.repeat(configurations * replicas, 1).requires_grad_()
        self.optimizer = torch.optim.AdamW(
            [self.weights],
            lr=lr,
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
            fused=True,
            capturable=start.is_cuda,
        )
        # AdamW would make them in its first step, too late for `tensors`.
        self.optimizer.state[self.weights] = {
            "step": torch.zeros((), device=start.device),
            "exp_avg": torch.zeros_like(self.weights),
            "exp_avg_sq": torch.zeros_like(self.weights),
        }

    def tensors(self) -> list[Tensor]:
        """All that a step changes."""
        return [self.weights.detach(), *self.optimizer.state[self.weights].values()]

    def by_configuration(self) -> Tensor:
        """The weights, (configurations, replicas, n)."""
        return self.weights.detach().view(self.configurations, self.replicas, -1)

    def step(self, windows: Tensor) -> None:
        """One inner step. Each configuration divides the windows, (batch, context + 1), evenly
        among its replicas; each replica clips its own gradient."""
        parts = windows.view(self.replicas, -1, windows.shape[1])
        losses = self.model.losses(self.weights, parts.repeat(self.configurations, 1, 1))
        (gradient,) = torch.autograd.grad(losses.sum(), self.weights)
        norms = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
        self.weights.grad = gradient.mul_((CLIP_NORM / (norms + 1e-6)).clamp(max=1))
        self.optimizer.step()


def recorded(step: Callable[[], None], tensors: list[Tensor]) -> Callable[[], None]:
    """The same step as one CUDA graph, which spares the launch of each kernel; on a CPU as it is.

    Args:
        tensors: all that the step changes. They are left as they were.
    """
    if not tensors[0].is_cuda:
        return step
    kept = [tensor.clone() for tensor in tensors]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # libraries set themselves up, which no graph can hold
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    restore(tensors, kept)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def restore(tensors: list[Tensor], kept: list[Tensor]) -> None:
    for tensor, value in zip(tensors, kept, strict=True):
        tensor.copy_(value)


class Outer(Protocol):
    """A method's outer state, as it is between two rounds. Nothing changes it in place."""

    def end_round(self, ends: Tensor, waits: bool) -> tuple["Outer", Tensor, Tensor]:
        """The end of a round.

        Args:
            ends: the weights of the replicas, (replicas, n).
            waits: whether the round's mean is waited for (`blocking_share`).
        Returns:
            the next state; what the replicas go on from, (replicas, n), or (n,) for all;
            the consensus right after the round, (n,).
        """
        ...


@dataclass(frozen=True)
class LocalSGD:
    """co2/methods/local_sgd.py; with one replica, which has the whole batch, AllReduce."""

    def end_round(self, ends: Tensor, waits: bool) -> tuple[Outer, Tensor, Tensor]:
        mean = ends.mean(0)
        return self, mean, mean


@dataclass(frozen=True)
class CO2:
    """co2/methods/co2.py with gap_aware_steady, without a clip."""

    anchor: Tensor
    momentum: Tensor
    displacement: Tensor
    """Root of the mean square of the last outer step, (); 0 unless its d was late."""
    average: Tensor
    """Moving average of the displacements, (), before its bias is corrected."""
    count: int = 0
    """Displacements in the average."""
    in_flight: Tensor | None = None
    """d of the last round, (n,); None if it was waited for."""
    outer_lr: float = 1.0
    outer_momentum: float = 0.2

    def end_round(self, ends: Tensor, waits: bool) -> tuple[Outer, Tensor, Tensor]:
        d = self.anchor - ends.mean(0)
        still = torch.zeros_like(self.displacement)
        if waits:
            m = self.outer_momentum * self.momentum + d
            x = self.anchor - self.outer_lr * m
            return replace(self, anchor=x, momentum=m, in_flight=None, displacement=still), x, x
        if self.in_flight is None:
            return replace(self, in_flight=d, displacement=still), self.anchor, self.anchor - d
        average, count = 0.9 * self.average + 0.1 * self.displacement, self.count + 1
        scale = average / (1 - 0.9**count)
        gap = torch.where(scale > 0, 1 + self.displacement / scale, 1.0)
        m = self.outer_momentum * self.momentum + self.in_flight / gap
        step = self.outer_lr * m
        after = replace(
            self,
            anchor=self.anchor - step,
            momentum=m,
            in_flight=d,
            displacement=step.square().mean().sqrt(),
            average=average,
            count=count,
        )
        return after, after.anchor, self.anchor - d


@dataclass(frozen=True)
class CO2Keep:
    """co2/methods/co2_keep.py with a delay of τ."""

    center: Tensor
    momentum: Tensor
    starts: Tensor
    """What the replicas went on from, (replicas, n) or (n,)."""
    in_flight: Tensor | None = None
    """δ of the last round, (n,); None if it was waited for."""
    keep_local: float = 0.75
    momentum_weight: float = 0.15
    outer_momentum: float = 0.9

    def end_round(self, ends: Tensor, waits: bool) -> tuple[Outer, Tensor, Tensor]:
        progress = ends - self.starts
        delta = progress.mean(0)
        if waits:
            after = self._arrive(delta)
            return replace(after, starts=after.center), after.center, after.center
        if self.in_flight is None:
            after, x = self, ends.clone()
        else:
            after = self._arrive(self.in_flight)
            x = after.center + self.keep_local * progress
        return replace(after, starts=x, in_flight=delta), x, after.center + delta

    def _arrive(self, delta: Tensor) -> "CO2Keep":
        u = self.outer_momentum * self.momentum + delta
        center = self.center + delta + self.momentum_weight * u
        return replace(self, center=center, momentum=u, in_flight=None)


OUTER: dict[str, Callable[[Tensor], Outer]] = {
    "allreduce": lambda start: LocalSGD(),
    "local_sgd": lambda start: LocalSGD(),
    "co2": lambda start: CO2(start, 0 * start, start.new_zeros(()), start.new_zeros(())),
    "co2_keep": lambda start: CO2Keep(start, 0 * start, start),
}
"""A method's state before its first round, of weights (n,)."""
