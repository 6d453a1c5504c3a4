"""Is what a late mean costs, in steps, a constant factor as trainings grow?

Replicas of several configurations train as one batched model on one GPU, without a launcher and
without communication (batched.py). The learning rate warms up and stays; branches leave this trunk
for trainings of different lengths, and decay in the last fifth of their steps. With
`blocking_share` the trunk waits in every round, and the branch of a training leaves it where its
share of waiting rounds ends.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks import report
from benchmarks.batched import OUTER, Decoder, Replicas, recorded, restore
from co2.config import DataConfig, Validation
from recipes.tables.equal_steps import falling, log_rounds_to
from tasks.shared.sampling import validation_samples
from tasks.text.text import Window, num_windows, opened, windows

DECAY = 0.2
EVAL_WINDOWS = 64
"""Validation windows at once."""


@dataclass(frozen=True)
class Configuration:
    method: str
    replicas: int
    share: float
    """blocking_share."""


@dataclass(frozen=True)
class Settings:
    """By default 4.8 × 10⁵ inner steps of 1.9 M parameters on 2,048 tokens: 1.1 × 10¹⁶ operations,
    and 3.4 × 10⁶ steps of one replica's AdamW and clipping: 3 × 10¹⁴ bytes."""

    width: int = 192
    layers: int = 4
    heads: int = 4
    vocab: int = 512
    context: int = 64
    batch: int = 32
    """Windows of a step, of all replicas together."""
    rounds: tuple[int, ...] = (100, 300, 1000, 2000)
    tau: int = 12
    replicas: tuple[int, ...] = (1, 4, 16)
    shares: tuple[float, ...] = (0.0, 0.1)
    lr: float = 2e-3
    warmup_steps: int = 150
    eval_samples: int = 1024
    seed: int = 0

    def model(self) -> Decoder:
        return Decoder(self.vocab, self.context, self.width, self.layers, self.heads)

    def configurations(self, share: float) -> list[Configuration]:
        """Those that differ: one replica's local_sgd is allreduce, and both always wait."""
        late = [Configuration(m, r, share) for m in ("co2", "co2_keep") for r in self.replicas]
        if share > 0:
            return late
        local = [Configuration("local_sgd", r, 0.0) for r in self.replicas if r > 1]
        return [Configuration("allreduce", 1, 0.0), *local, *late]

    def decay_from(self, total: int) -> int:
        """The round in which a training of so many rounds begins to decay."""
        return int((1 - DECAY) * total)

    def fork(self, total: int, share: float) -> int:
        """The round before which its branch leaves the trunk."""
        return int(share * total) if share > 0 else self.decay_from(total)

    def work(self, share: float) -> int:
        """Rounds that the configurations with this share train, branches and all."""
        forks = [self.fork(total, share) for total in self.rounds]
        return len(self.configurations(share)) * (max(forks) + sum(self.rounds) - sum(forks))

    def learning_rate(self, step: int, total: int | None) -> float:
        """Of the step with this index, in a training of `total` rounds; None: in the trunk."""
        rate = self.lr * min(1.0, (step + 1) / self.warmup_steps)
        if total is None:
            return rate
        end, begin = total * self.tau, self.decay_from(total) * self.tau
        return rate * min(1.0, (end - step) / (end - begin))


SMOKE = Settings(
    width=16,
    layers=1,
    heads=2,
    context=16,
    batch=16,
    rounds=(2, 4, 6),
    shares=(0.0, 0.4),
    lr=1e-2,
    warmup_steps=10,
    eval_samples=64,
)


class Clock:
    """Shows the time left, and ends the work when there is none.

    Args:
        work: rounds of all configurations.
    """

    EVERY_S = 10.0

    def __init__(self, minutes: float, work: int) -> None:
        self.began, self.shown = time.monotonic(), 0.0
        self.limit_s, self.work, self.done = 60 * minutes, work, 0

    def advance(self, rounds: int) -> None:
        """Raises `TimeoutError` when the limit has passed."""
        self.done += rounds
        used = time.monotonic() - self.began
        if used > self.limit_s:
            raise TimeoutError
        if used > self.shown + self.EVERY_S:
            self.shown = used
            left = used * (self.work / self.done - 1)
            print(f"{self.done / self.work:.1%} in {used:.0f} s, {left:.0f} s left", flush=True)


class Trainings:
    """Configurations that train side by side, on the same windows and with the same rates.

    Args:
        text: training tokens, int64 (count,), on the device that trains.
        start: initial weights, (n,), there too; their type is that of weights and moments.
    """

    def __init__(
        self,
        settings: Settings,
        configurations: Sequence[Configuration],
        text: Tensor,
        start: Tensor,
    ) -> None:
        self.settings, self.text, self.model = settings, text, settings.model()
        device = text.device
        self.lr = torch.zeros((), dtype=start.dtype, device=device)
        self.groups: list[tuple[list[Configuration], Replicas]] = []
        for count in dict.fromkeys(one.replicas for one in configurations):
            own = [one for one in configurations if one.replicas == count]
            self.groups.append((own, Replicas(self.model, start, len(own), count, self.lr)))
        self.outer = {one: OUTER[one.method](start) for one in configurations}
        self.consensus = dict.fromkeys(configurations, start)
        self.within = torch.arange(settings.context + 1, device=device)
        generator = torch.Generator().manual_seed(settings.seed)
        size = (max(settings.rounds) * settings.tau, settings.batch)
        starts = torch.randint(len(text) - settings.context, size, generator=generator)
        self.starts = starts.to(device)
        self.windows = torch.zeros_like(self.starts[0, :, None] + self.within)
        self.inner_step = recorded(self._inner_step, self.tensors())

    def _inner_step(self) -> None:
        for _, replicas in self.groups:
            replicas.step(self.windows)

    def tensors(self) -> list[Tensor]:
        return [tensor for _, replicas in self.groups for tensor in replicas.tensors()]

    def train(self, rounds: range, total: int | None, waits: bool, clock: Clock) -> None:
        """Train these rounds of a training of `total` rounds, or of the trunk."""
        tau = self.settings.tau
        for number in rounds:
            for step in range(number * tau, (number + 1) * tau):
                self.lr.fill_(self.settings.learning_rate(step, total))
                self.windows.copy_(self.text[self.starts[step, :, None] + self.within])
                self.inner_step()
            for own, replicas in self.groups:
                for one, ends in zip(own, replicas.by_configuration(), strict=True):
                    self.outer[one], x, self.consensus[one] = self.outer[one].end_round(ends, waits)
                    ends.copy_(x)
            if self.text.is_cuda:
                torch.cuda.synchronize()
            clock.advance(len(self.outer))

    @contextmanager
    def branch(self) -> Iterator[None]:
        """Be as now again at the end."""
        kept, outer = [tensor.clone() for tensor in self.tensors()], dict(self.outer)
        yield
        restore(self.tensors(), kept)
        self.outer = outer

    @torch.no_grad()
    def evaluate(self, validation: Tensor) -> dict[Configuration, float]:
        """The consensus's mean loss in nats on windows, (samples, context + 1)."""
        weights = torch.stack(list(self.consensus.values()))
        sums = torch.zeros(len(weights), dtype=torch.float64, device=weights.device)
        for part in validation.split(EVAL_WINDOWS):
            sums += len(part) * self.model.losses(weights, part.expand(len(weights), -1, -1))
        return dict(zip(self.consensus, (sums / len(validation)).tolist(), strict=True))


Losses = dict[tuple[Configuration, int], float]
"""Validation loss by configuration and rounds."""


def measure(
    settings: Settings, text: Tensor, validation: Tensor, start: Tensor, clock: Clock
) -> Losses:
    """Train all configurations, or those branches that end in time."""
    found: Losses = {}
    try:
        for share in settings.shares:
            trainings = Trainings(settings, settings.configurations(share), text, start)
            at = 0
            for total in settings.rounds:
                fork = settings.fork(total, share)
                trainings.train(range(at, fork), None, share > 0, clock)
                at = fork
                with trainings.branch():
                    trainings.train(range(fork, total), total, False, clock)
                    for one, loss in trainings.evaluate(validation).items():
                        found[one, total] = loss
    except TimeoutError:
        print("the time is over; the table holds the branches that are done", flush=True)
    return found


def table(settings: Settings, losses: Losses) -> tuple[list[str], list[list[str]]]:
    """Head and rows: losses and equal-steps factors of every configuration."""
    allreduce = {
        total: losses[one, total]
        for one in settings.configurations(0.0)[:1]
        for total in settings.rounds
        if (one, total) in losses
    }

    def loss(one: Configuration, total: int) -> str:
        return f"{losses[one, total]:.4f}" if (one, total) in losses else "not run"

    def factor(one: Configuration, total: int) -> str:
        if (one, total) not in losses:
            return "not run"
        found = log_rounds_to(losses[one, total], falling(allreduce))
        if found is None:
            return "—"
        needed, extrapolated = found
        return f"{'≈ ' if extrapolated else ''}{np.exp(np.log(total) - needed):.3g}"

    rows = [
        [
            one.method,
            str(one.replicas),
            f"{one.share:g}",
            *(loss(one, n) for n in settings.rounds),
            *(factor(one, n) for n in settings.rounds),
        ]
        for share in settings.shares
        for one in settings.configurations(share)
    ]
    head = ["method", "replicas", "blocking_share"]
    head += [f"loss, {n:,} rounds" for n in settings.rounds]
    return head + [f"x, {n:,} rounds" for n in settings.rounds], rows


def embedded_text(settings: Settings) -> tuple[Tensor, Tensor]:
    """Tokens to train on, int64 (count,), and validation windows, (samples, context + 1): those
    of task=gpt2 at smoke scale."""
    context = settings.context
    window = Window("context", context, context + 1)
    store = opened(DataConfig(), "corpus", "embedded", settings.vocab, window)
    available = num_windows(store.count("val"), context)
    samples = validation_samples(available, settings.eval_samples, Validation.report)
    text = torch.from_numpy(store.tokens("train").astype(np.int64))
    return text, windows(store.tokens("val"), samples, context)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="then the rest is left out")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU, in a minute")
    for name in ("width", "layers", "batch"):
        parser.add_argument(f"--{name}", type=int, help=f"default: {getattr(Settings, name)}")
    parser.add_argument("--lr", type=float, help=f"default: {Settings.lr}")
    parser.add_argument("--rounds", type=int, nargs="+", help="of each training")
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args(words)
    if not (torch.cuda.is_available() or args.smoke):
        sys.exit("no CUDA device here; --smoke tries the same with a tiny model")
    names = {field.name for field in fields(Settings)}
    given = {key: value for key, value in vars(args).items() if key in names and value is not None}
    settings = replace(SMOKE if args.smoke else Settings(), **given)
    settings = replace(settings, rounds=tuple(sorted(set(settings.rounds))))
    if settings.batch % max(settings.replicas) or settings.width % settings.heads:
        parser.error("--batch must be a multiple of 16 replicas, --width of 4 heads")
    device = "cpu" if args.smoke else "cuda"
    text, validation = (tensor.to(device) for tensor in embedded_text(settings))
    start = settings.model().start(settings.seed).to(device)
    work = sum(map(settings.work, settings.shares))
    step_tokens = settings.batch * settings.context
    flops = 6.0 * len(start) * step_tokens * settings.tau * work
    print(f"{flops:.2g} operations; at 60 TFLOP/s {flops / 60e12:.0f} s", flush=True)
    clock = Clock(args.minutes, work)
    losses = measure(settings, text, validation, start, clock)
    report.write(
        args.out / f"replicas_on_one_gpu{'_smoke' if args.smoke else ''}.md",
        "Steps that a late mean costs, as trainings grow",
        f"A GPT of {len(start) / 1e6:.1f} M parameters on the embedded text, τ = {settings.tau}, "
        f"{step_tokens:,} tokens a step of all replicas together, one seed; "
        f"AdamW at a rate of {settings.lr:g} for all, {settings.warmup_steps} steps of warm-up, "
        f"then constant, and linearly to 0 in the last {DECAY:.0%}. Loss: the consensus's on "
        f"{len(validation):,} validation windows of {settings.context} tokens, in nats. x: steps, "
        "over those of AllReduce to the same loss, by interpolation between its own trainings, "
        "linear in loss against log(steps); with ≈ extrapolated from the two nearest; — where "
        "AllReduce's loss does not fall. The constant part is shared by trainings of all lengths; "
        "with blocking_share only its waiting rounds are, so that each training has its own share. "
        f"{time.monotonic() - clock.began:.0f} s.",
        *table(settings, losses),
    )


if __name__ == "__main__":
    main()
