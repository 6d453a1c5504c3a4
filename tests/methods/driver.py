"""A training loop of one replica under a method, as a user of `co2` would write it."""

from typing import Any

import torch
from torch import Tensor

import co2
from co2.config import Blocking, CommConfig
from co2.methods import METHODS
from co2.methods.shared.compressed_adam import CompressedAdam
from tests.methods import problem

SETTINGS: dict[str, dict[str, Any]] = {
    "allreduce": {},
    "local_sgd": {"tau": 3},
    "slowmo": {"tau": 3, "outer_lr": 0.9, "outer_momentum": 0.6},
    "diloco": {"tau": 3, "outer_lr": 0.7, "outer_momentum": 0.6},
    "overlap_local_sgd": {"tau": 3, "pull": 0.6, "outer_momentum": 0.7},
    "cocod_sgd": {"tau": 3},
    "streaming_diloco": {
        "tau": 3,
        "fragments": 2,
        "delay": 1,
        "mixing": 0.5,
        "outer_lr": 0.8,
        "outer_momentum": 0.4,
    },
    "eager_diloco": {"tau": 3, "outer_lr": 0.6, "outer_momentum": 0.5},
    "sparseloco": {"tau": 3, "density": 0.4, "outer_lr": 0.9, "error_decay": 0.8},
    "noloco": {"tau": 3, "outer_lr": 0.8, "outer_momentum": 0.5, "pull": 0.6},
    "co2": {
        "tau": 3,
        "outer_lr": 0.8,
        "outer_momentum": 0.5,
        "gap_penalty": "gap_aware",
        "clip": 0.05,
    },
    "co2_keep": {"tau": 3, "keep_local": 0.6, "outer_momentum": 0.6, "momentum_weight": 0.3},
    "co2_released": {"tau": 3, "outer_lr": 0.8, "outer_momentum": 0.5, "gap_penalty": 1.7},
    "acco": {},
    "sparta": {"share": 0.4, "delay": 3},
    "desloc": {"tau": 3, "first_moment_every": 2, "second_moment_every": 4},
    "mt_dao": {
        "tau": 3,
        "slow_beta": 0.8,
        "slow_weight": 0.6,
        "first_moment_every": 6,
        "second_moment_every": 4,
    },
    "demo": {"decay": 0.8, "top_k": 2, "block": 6},
    "onebit_adam": {"freeze_step": 4, "mask_below": 0.3},
    "zero_one_adam": {
        "freeze_step": 4,
        "kappa": 2,
        "double_every": 2,
        "max_interval": 4,
        "mask_below": 0.3,
    },
}
"""One telling configuration of every method."""

OVERLAPPED = tuple(name for name in SETTINGS if METHODS[name].blocking is Blocking.beyond_delay)
"""Methods that compute on while a collective is in flight."""

NEEDS_ADAM = ("desloc", "mt_dao")
"""Methods around an inner Adam, whose moments they average."""

MOMENTS: dict[str, dict[str, Any]] = {
    name: {**SETTINGS[name], "average_moments": True} for name in ("diloco", "co2", "co2_keep")
}
"""Methods around any inner optimizer that can average Adam's moments too."""

ROUNDS_OF = tuple(
    name for name, settings in SETTINGS.items() if "tau" in settings and name not in NEEDS_ADAM
)
"""Methods with rounds of τ steps around any inner optimizer."""

SPARSE = ("sparseloco",)
"""Those of them that send packed messages in place of a vector."""

PAIRED = ("noloco",)
"""Those of them that send a vector to one other replica, as it is."""

DENSE = tuple(name for name in ROUNDS_OF if name not in (*SPARSE, *PAIRED))
"""Those that send vectors, whose type and buckets can be chosen."""

FP32_ONLY = (*SPARSE, *PAIRED, "sparta")
"""Methods around any inner optimizer that refuse bf16 on the wire."""

ADAM = tuple(name for name in SETTINGS if issubclass(METHODS[name], CompressedAdam))
"""Methods that are an Adam: they take the place of the inner one, and refuse any other."""


NEEDS_SGD = ("demo",)
"""Methods that make the steps of an SGD without momentum theirs."""


def inner(name: str, optimizer: str = "sgd") -> str:
    """The inner optimizer to test a method with, where `optimizer` would do for the others."""
    if name in NEEDS_SGD:
        return "decay"
    return "adamw" if name in (*ADAM, *NEEDS_ADAM) else optimizer


def overrides(name: str) -> tuple[str, ...]:
    """`SETTINGS` of a method, and the inner optimizer that it needs, on the command line."""
    adam = ("optim.name=adamw",) if inner(name) == "adamw" else ()
    optimizer = () if inner(name) == "sgd" else (*METHODS[name].needs, *adam, "optim.lr=0.01")
    return (*optimizer, *(f"{name}.{key}={value}" for key, value in SETTINGS[name].items()))


Snapshot = dict[str, Tensor]


def parts(method: Any) -> list[Any]:
    """What has a flat vector and a mean of its own: the method, or each of its fragments."""
    return getattr(method, "fragments", [method])


class Session:
    """One replica of `problem` under a method. Ranks differ in initial weights and in data."""

    def __init__(
        self,
        rank: int,
        name: str,
        settings: dict[str, Any],
        optimizer: str | None = None,
        dtype: torch.dtype = torch.float64,
        seed: int | None = None,
        comm: CommConfig | None = None,
        scheduled: bool = True,
        total: int | None = None,
    ) -> None:
        self.rank, self.steps_done = rank, 0
        seed = rank if seed is None else seed
        self.net, self.optimizer = problem.build(seed, optimizer or inner(name), dtype)
        self.method = METHODS[name](METHODS[name].Config(**settings), comm)
        schedule = self.largest_lr if scheduled else None
        self.model = self.method.prepare(
            self.net, self.optimizer, co2.Mesh.world(), schedule, total_steps=total
        )

    def largest_lr(self, step: int) -> float:
        return max(problem.rates(self.optimizer, step))

    def step(self) -> None:
        problem.set_lr(self.optimizer, self.steps_done)
        problem.backward(self.model, self.steps_done, self.rank)
        self.method.step()
        self.optimizer.zero_grad()
        self.steps_done += 1

    def snapshot(self) -> Snapshot:
        return problem.snapshot(self.net)


def trajectory(
    rank: int,
    world: int,
    name: str,
    settings: dict[str, Any],
    optimizer: str | None = None,
    dtype: torch.dtype = torch.float64,
    steps: int = 15,
    comm: CommConfig | None = None,
) -> list[Snapshot]:
    """The replica after 0, 1, ..., `steps` steps."""
    session = Session(rank, name, settings, optimizer, dtype, comm=comm, total=steps)
    history = [session.snapshot()]
    for _ in range(steps):
        session.step()
        history.append(session.snapshot())
    session.method.flush()
    return history


def assert_same(a: Any, b: Any) -> None:
    """Bit for bit, through lists, dicts and tensors."""
    assert type(a) is type(b), f"{type(a)} and {type(b)}"
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), f"differ by {(a - b).abs().max()}"
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b
