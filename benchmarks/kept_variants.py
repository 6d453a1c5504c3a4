"""What was tried for `co2_keep`: variants of one outer step, simulated in one process.

G replicas of the ViT of task=vit take turns; nothing is sent, so a variant is a few lines here and
not a method. What won became co2/methods/co2_keep.py; docs/co2_keep.md says why.
"""

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import report
from co2.comm.mesh import Mesh
from co2.config import Config
from co2.train.loop import learning_rate
from recipes.cells import Cell
from train import APP


@dataclass(frozen=True)
class Variant:
    """What happens when the mean of the last round arrives; q is the progress made since."""

    delay: int = 12
    """Steps until it arrives."""
    kept: float = 1.0
    """x ← c + kept · q + …"""
    momentum: float = 0.0
    momentum_weight: float = 0.0
    """c ← c + δ + momentum_weight · u, u ← momentum · u + δ."""
    outer_lr: float = 1.0
    """Of δ in c."""
    expected: float = 0.0
    """… + expected · δ: q of the others is taken to be what they did in the round before."""
    returned: float = 0.0
    """… + returned · (p − δ): some of the own deviation, which local steps may have undone."""
    eager: bool = False
    """Eager DiLoCo's estimate in place of q: δ + (q − p)/G."""
    moments: bool = False
    """The inner optimizer's moments are averaged too: what a replica's own at the end of the round
    missed of their mean is added when it arrives, as far as it had not been forgotten by then."""


VARIANTS = {
    "local SGD (blocking)": Variant(delay=0),
    "local SGD, and the moments averaged": Variant(delay=0, moments=True),
    "DiLoCo α 1, β .4 (blocking)": Variant(delay=0, momentum=0.4, momentum_weight=0.4),
    "CoCoD-SGD: all kept": Variant(),
    "kept .75": Variant(kept=0.75),
    "kept .5": Variant(kept=0.5),
    "kept .25": Variant(kept=0.25),
    "none kept": Variant(kept=0.0),
    "all kept, β .9, w .3": Variant(momentum=0.9, momentum_weight=0.3),
    "all kept, β .5, w .2": Variant(momentum=0.5, momentum_weight=0.2),
    "kept .5, β .5, w .2": Variant(kept=0.5, momentum=0.5, momentum_weight=0.2),
    "kept .5, outer rate .8": Variant(kept=0.5, outer_lr=0.8),
    "kept .5, the rest expected": Variant(kept=0.5, expected=0.5),
    "all kept, half the deviation returned": Variant(returned=0.5),
    "Eager DiLoCo's estimate": Variant(eager=True),
    "delay 3, all kept": Variant(delay=3),
    "delay 3, kept .5": Variant(delay=3, kept=0.5),
    "delay 3, kept .25": Variant(delay=3, kept=0.25),
    "delay 3, kept .5, β .5, w .2": Variant(delay=3, kept=0.5, momentum=0.5, momentum_weight=0.2),
    "delay 3, kept .5, and the moments averaged": Variant(delay=3, kept=0.5, moments=True),
    "delay 6, kept .5": Variant(delay=6, kept=0.5),
}
TAU, REPLICAS = 12, 4
MOMENTS = {"exp_avg": 0, "exp_avg_sq": 1}
"""Of AdamW, and which of its β forgets them."""
Moments = dict[tuple[str, int], Tensor]


class Replica:
    """Model, optimizer and data of one, its trained weights as one vector."""

    def __init__(self, config: Config, task: object, number: int) -> None:
        self.config, self.task = config, task
        self.model = task.model()  # type: ignore[attr-defined]
        self.optimizer = task.optimizer(self.model)  # type: ignore[attr-defined]
        mesh = Mesh(number, REPLICAS, torch.device("cpu"))
        self.batches = task.batches(mesh, 0)  # type: ignore[attr-defined]
        self.params = [p for p in self.model.parameters() if p.requires_grad]

    def weights(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.params).detach()

    def set_weights(self, flat: Tensor) -> None:
        nn.utils.vector_to_parameters(flat, self.params)

    def moments(self) -> Moments:
        """The live tensors, by name and by the weight's place."""
        states = [self.optimizer.state[param] for param in self.params]
        return {(name, n): state[name] for n, state in enumerate(states) for name in MOMENTS}

    def train(self, first: int, count: int) -> None:
        knobs = self.config.train
        for step in range(first, first + count):
            share = learning_rate(step, self.config.optim, knobs.steps)
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * share
            self.task.loss(self.model, next(self.batches)).backward()  # type: ignore[attr-defined]
            if knobs.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.params, knobs.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()


@dataclass
class Simulation:
    config: Config
    variant: Variant
    step: int = 0
    replicas: list[Replica] = field(default_factory=list)

    def run(self) -> float:
        """The validation loss of the replicas' mean after the last step."""
        task = APP.make_task(self.config)
        task.setup(REPLICAS)
        self.replicas = [Replica(self.config, task, number) for number in range(REPLICAS)]
        center, u = self.weights()[0], torch.zeros(())
        own: list[Tensor] = []  # p^i of the round before
        missed: list[Moments] = []
        while not self.done:
            was = self.weights()
            self.train(self.variant.delay if own else 0)
            q = [now - then for now, then in zip(self.weights(), was, strict=True)]
            if own and not self.done:
                center, u = self.arrive(center, u, own, q)
                if missed:
                    self.add_moments(missed)
            rest = self.weights()
            self.train(TAU - self.variant.delay if own else TAU)
            moved = [now - then for now, then in zip(self.weights(), rest, strict=True)]
            own = [a + b for a, b in zip(q, moved, strict=True)]
            missed = self.missed_moments() if self.variant.moments else []
        self.replicas[0].set_weights(torch.stack(self.weights()).mean(0))
        with torch.no_grad():
            return task.evaluate(self.replicas[0].model)["loss"]

    @property
    def done(self) -> bool:
        return self.step >= self.config.train.steps

    def weights(self) -> list[Tensor]:
        return [replica.weights() for replica in self.replicas]

    def train(self, steps: int) -> None:
        steps = min(steps, self.config.train.steps - self.step)
        for replica in self.replicas:
            replica.train(self.step, steps)
        self.step += steps

    def arrive(
        self, center: Tensor, u: Tensor, own: list[Tensor], q: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        v, delta = self.variant, torch.stack(own).mean(0)
        u = v.momentum * u + delta
        center = center + v.outer_lr * delta + v.momentum_weight * u
        for replica, progress, last in zip(self.replicas, q, own, strict=True):
            estimate = v.kept * progress
            if v.eager:
                estimate = delta + (progress - last) / REPLICAS
            estimate = estimate + v.expected * delta + v.returned * (last - delta)
            replica.set_weights(center + estimate)
        return center, u

    def missed_moments(self) -> list[Moments]:
        """Of every replica: its trained weights' moments, taken from the replicas' mean."""
        own = [replica.moments() for replica in self.replicas]
        means = {key: torch.stack([same[key] for same in own]).mean(0) for key in own[0]}
        return [{key: means[key] - same[key] for key in same} for same in own]

    def add_moments(self, missed: list[Moments]) -> None:
        for replica, parts in zip(self.replicas, missed, strict=True):
            betas = replica.optimizer.param_groups[0]["betas"]
            for (name, number), moment in replica.moments().items():
                left = betas[MOMENTS[name]] ** self.variant.delay
                moment.add_(parts[name, number], alpha=left)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--runs", type=Path, default=Path("results/runs/kept_variants.json"))
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    torch.set_num_threads(1)  # the models are too small for more
    losses: dict[str, float] = json.loads(args.runs.read_text()) if args.runs.exists() else {}
    for seed in args.seeds.split(","):
        for name, variant in VARIANTS.items():
            key = f"{args.steps} {seed} {variant}"
            if key not in losses:
                losses[key] = Simulation(config(args.steps, seed), variant).run()
                print(f"seed {seed}, {name}: {losses[key]:.4f}", flush=True)
                args.runs.parent.mkdir(parents=True, exist_ok=True)
                args.runs.write_text(json.dumps(losses, indent=1))
    seeds = args.seeds.split(",")
    report.write(
        args.out / "kept_variants.md",
        "Variants of kept progress, simulated",
        f"Validation loss of task=vit at smoke scale after {args.steps} steps of {REPLICAS} "
        f"replicas, batches of 16, τ = {TAU}; a delay of {TAU} where none is named. Mean ± "
        f"standard deviation over the seeds, {len(seeds)}. A simulation in one process; early in a "
        "training, where methods differ most.",
        ["variant", "validation loss"],
        [
            [name, report.mean([losses[f"{args.steps} {s} {v}"] for s in seeds], form=".3f")]
            for name, v in VARIANTS.items()
        ],
    )


def config(steps: int, seed: str) -> Config:
    overrides = (f"train.steps={steps}", "train.batch_size=16", f"train.seed={seed}")
    return Cell(("task=vit", "method=local_sgd", f"launch.workers={REPLICAS}", *overrides)).config()


if __name__ == "__main__":
    main()
