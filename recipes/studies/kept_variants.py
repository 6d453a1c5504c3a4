"""What was tried for `co2_keep`: variants of one outer step, simulated in one process.

    python -m recipes run kept_variants                    one process, no communication

Cost: 63 simulations of 2,400 steps of the small ViT each, half a minute on one core: 35 minutes.
Expected: a mean that arrives after 3 steps in place of 12 brings the loss near that of blocking
local SGD, and keeping half of the progress made meanwhile does far better than all or nothing.

Four replicas of the ViT of task=vit take turns and nothing is sent, so that a variant is a few
lines here and not a method. What won became co2/methods/co2_keep.py; docs/co2_keep.md gives the
reasons.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor, nn

from co2.comm.mesh import Mesh
from co2.config import Config
from co2.task import Task
from co2.train.schedule import learning_rate
from recipes.recipe import Recipe, Row
from recipes.runs.cells import APP, composed_config
from recipes.runs.functions import FunctionCell, FunctionColumn
from tasks import TASKS


@dataclass(frozen=True)
class Variant:
    """What happens when the mean δ of the last round arrives.

    A replica has made progress q since that round's end, and progress p in that round; c is the
    consensus, x the replica's weights, u the momentum of the means.
    """

    delay: int = 12
    """Steps until the mean arrives."""
    kept: float = 1.0
    """Share of the own progress since: x ← c + kept · q + …"""
    momentum: float = 0.0
    momentum_weight: float = 0.0
    """u ← momentum · u + δ, c ← c + outer_lr · δ + momentum_weight · u."""
    outer_lr: float = 1.0
    """Factor of δ in c."""
    expected: float = 0.0
    """… + expected · δ, as if the others progressed as they did in the round before."""
    returned: float = 0.0
    """… + returned · (p − δ), a share of the own deviation, which local steps may have undone."""
    eager: bool = False
    """Whether Eager DiLoCo's estimate, δ + (q − p)/G, replaces kept · q."""
    moments: bool = False
    """Whether the inner optimizer's moments are averaged too.

    When the mean arrives, each replica adds what its own moments lacked of it at the end of the
    round, multiplied by what β leaves of that after `delay` steps.
    """


VARIANTS = {
    "local SGD (blocking)": Variant(delay=0),
    "local SGD, and the moments averaged": Variant(delay=0, moments=True),
    "DiLoCo α 1, β 0.4 (blocking)": Variant(delay=0, momentum=0.4, momentum_weight=0.4),
    "CoCoD-SGD: all kept": Variant(),
    "kept 0.75": Variant(kept=0.75),
    "kept 0.5": Variant(kept=0.5),
    "kept 0.25": Variant(kept=0.25),
    "none kept": Variant(kept=0.0),
    "all kept, β 0.9, w 0.3": Variant(momentum=0.9, momentum_weight=0.3),
    "all kept, β 0.5, w 0.2": Variant(momentum=0.5, momentum_weight=0.2),
    "kept 0.5, β 0.5, w 0.2": Variant(kept=0.5, momentum=0.5, momentum_weight=0.2),
    "kept 0.5, outer rate 0.8": Variant(kept=0.5, outer_lr=0.8),
    "kept 0.5, the rest expected": Variant(kept=0.5, expected=0.5),
    "all kept, half the deviation returned": Variant(returned=0.5),
    "Eager DiLoCo's estimate": Variant(eager=True),
    "delay 3, all kept": Variant(delay=3),
    "delay 3, kept 0.5": Variant(delay=3, kept=0.5),
    "delay 3, kept 0.25": Variant(delay=3, kept=0.25),
    "delay 3, kept 0.5, β 0.5, w 0.2": Variant(
        delay=3, kept=0.5, momentum=0.5, momentum_weight=0.2
    ),
    "delay 3, kept 0.5, and the moments averaged": Variant(delay=3, kept=0.5, moments=True),
    "delay 6, kept 0.5": Variant(delay=6, kept=0.5),
}
TAU, REPLICAS, STEPS = 12, 4, 600
MOMENTS = {"exp_avg": 0, "exp_avg_sq": 1}
"""AdamW's moments, and the index of the β that each decays with."""
Moments = dict[tuple[str, int], Tensor]
"""Moments by name and by the number of the parameter."""


class Replica:
    """Model, optimizer and data of one replica; its trained weights are read as one vector."""

    def __init__(self, config: Config, task: Task, number: int) -> None:
        self.config, self.task = config, task
        self.model = task.model()
        self.optimizer = task.optimizer(self.model)
        mesh = Mesh(number, REPLICAS, torch.device("cpu"))
        self.batches = task.batches(mesh, 0)
        self.params = [p for p in self.model.parameters() if p.requires_grad]

    def weights(self) -> Tensor:
        """A copy of the trained weights."""
        return nn.utils.parameters_to_vector(self.params).detach()

    def set_weights(self, flat: Tensor) -> None:
        """Replace the trained weights."""
        nn.utils.vector_to_parameters(flat, self.params)

    def moments(self) -> Moments:
        """The optimizer's own tensors, not copies."""
        states = [self.optimizer.state[param] for param in self.params]
        return {(name, n): state[name] for n, state in enumerate(states) for name in MOMENTS}

    def train(self, first: int, count: int) -> None:
        """Train `count` steps from the step with index `first` on."""
        knobs = self.config.train
        for step in range(first, first + count):
            share = learning_rate(step, self.config.optim, knobs.steps)
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * share
            self.task.loss(self.model, next(self.batches)).backward()
            if knobs.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.params, knobs.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()


@dataclass
class Simulation:
    """Training of all replicas under one variant, in turn."""

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
        own: list[Tensor] = []  # p of every replica in the round before
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
        """Whether all steps are trained."""
        return self.step >= self.config.train.steps

    def weights(self) -> list[Tensor]:
        """The weights of every replica."""
        return [replica.weights() for replica in self.replicas]

    def train(self, steps: int) -> None:
        """Train every replica for `steps` steps, or as many as are left."""
        steps = min(steps, self.config.train.steps - self.step)
        for replica in self.replicas:
            replica.train(self.step, steps)
        self.step += steps

    def arrive(
        self, center: Tensor, u: Tensor, own: list[Tensor], q: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The mean of the last round arrives: `own` holds every replica's p, `q` its q.

        Returns:
            The new consensus and momentum.
        """
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
        """What each replica's moments lack of the replicas' mean."""
        own = [replica.moments() for replica in self.replicas]
        means = {key: torch.stack([same[key] for same in own]).mean(0) for key in own[0]}
        return [{key: means[key] - same[key] for key in same} for same in own]

    def add_moments(self, missed: list[Moments]) -> None:
        """Add what the moments lacked a delay ago, decayed since."""
        for replica, parts in zip(self.replicas, missed, strict=True):
            betas = replica.optimizer.param_groups[0]["betas"]
            for (name, number), moment in replica.moments().items():
                left = betas[MOMENTS[name]] ** self.variant.delay
                moment.add_(parts[name, number], alpha=left)


def variant_of(cell: FunctionCell) -> Variant:
    """The variant that a cell's settings name; what they do not name has its default."""
    given = cell.settings
    names = {item.name for item in fields(Variant)} & given.keys()
    return Variant(**{name: given[name] for name in names})


def config(steps: int, seed: int) -> Config:
    """The configuration of the replicas' training."""
    overrides = (f"train.steps={steps}", "train.batch_size=16", f"train.seed={seed}")
    words = ("task=vit", "method=local_sgd", f"launch.workers={REPLICAS}", *overrides)
    return composed_config(words)


def train_all(cells: Sequence[FunctionCell]) -> None:
    """Simulate these cells one after the other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are too small for more
    try:
        for number, cell in enumerate(cells, start=1):
            steps = cell.settings["steps"]
            loss = Simulation(config(steps, cell.seed), variant_of(cell)).run()
            cell.finish({"loss": loss}, REPLICAS, steps)
            words = " ".join(cell.overrides)
            print(f"{number} of {len(cells)}: {words}, seed {cell.seed}: {loss:.4f}", flush=True)
    finally:
        torch.set_num_threads(threads)


def _row(name: str, variant: Variant) -> Row:
    """A row whose overrides are what the variant changes."""
    changed = {
        item.name: getattr(variant, item.name)
        for item in fields(Variant)
        if getattr(variant, item.name) != item.default
    }
    words = [f"{key}={str(value).lower()}" for key, value in changed.items()]
    return Row(name, tuple(words) or ("delay=12",))


RECIPE = Recipe(
    name="kept_variants",
    title="Variants of kept progress, simulated",
    text=f"Validation loss of task=vit at smoke scale after {STEPS} steps of {REPLICAS} replicas, "
    f"batches of 16, τ = {TAU}; a delay of {TAU} steps where the name tells no other. One process "
    "simulates all replicas. It is early in the training, where methods differ most.",
    rows=tuple(_row(name, variant) for name, variant in VARIANTS.items()),
    columns=(
        FunctionColumn(
            "ViT",
            (f"steps={STEPS}",),
            "final.loss",
            lower=True,
            digits=3,
            curve=False,
            train=train_all,
            version=TASKS["vit"].version,
        ),
    ),
    scales=("smoke",),
)
