"""A training loop of one replica under a method, as a user of `co2` would write it."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import co2
from co2.config import Blocking, CommConfig
from co2.errors import WrongCall
from co2.methods import METHODS
from co2.methods.shared.compressed_adam import Compress, CompressedAdam
from tests.methods import problem
from tests.reference import REFERENCES
from tests.reference.replica import Replica

Case = tuple[str, dict[str, Any]]
"""A method and its settings."""

_OUTER = {"outer_lr": 0.8, "outer_momentum": 0.5}
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
    "noloco": {"tau": 3, **_OUTER, "pull": 0.6},
    "co2": {"tau": 3, **_OUTER, "gap_penalty": "gap_aware", "clip": 0.03},
    "co2_keep": {
        "tau": 3,
        "fragments": 1,
        "keep_local": 0.6,
        "outer_momentum": 0.6,
        "momentum_weight": 0.3,
    },
    "co2_released": {"tau": 3, **_OUTER, "gap_penalty": 1.7},
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


_CO2 = {"tau": 3, **_OUTER}
_GAPS = ("none", "gap_aware", "gap_aware_steady", "gap_aware_elementwise", 1.7)
_CLIPS: tuple[dict[str, Any], ...] = (
    {"clip": None},
    {"clip": 0.02, "clip_mode": "value"},
    {"clip": 0.1, "clip_mode": "norm"},
)
_OTHERS: dict[str, list[dict[str, Any]]] = {
    "co2_keep": [
        {"delay": 0},
        {"delay": 1},
        {"fragments": None},
        {"fragments": 2, "keep_local": 1.0},
        {"tau": 4, "fragments": 2, "delay": 0},
        {"fragments": 3, "delay": 3},  # all three are under way at a time
        {"tau": 4, "fragments": 4, "delay": 2},  # two of four, by two groups
        {"fragments": 2, "delay": 2},
        {"fragments": 2, "blocking_share": 0.4},
        {"tau": 5, "fragments": 4, "momentum_weight": 0.0},
    ],
    "streaming_diloco": [
        {"fragments": 1, "delay": 0, "mixing": 0.0},
        {"fragments": 2, "delay": 2, "mixing": 0.5},
        {"fragments": 3, "delay": 2, "mixing": 0.25},
        {"tau": 5, "fragments": 3, "delay": 1},
        {"tau": 5, "fragments": 2, "delay": None},
        {"fragments": 1, "delay": None},
        {"exchange": "int8", "fragments": 1},
        {"exchange": "int4", "fragments": 3, "delay": 2},
    ],
    "sparta": [{"share": 0.3, "delay": 0}, {"share": 0.3, "delay": 1}],
    "mt_dao": [{"first_moment_every": 6, "late_momentum": True}],
    "demo": [{"decay": 0.9, "top_k": top_k, "block": 64} for top_k in (1, 4, 99)],
    "onebit_adam": [{"compress": Compress.update}],
    "zero_one_adam": [
        {"compress": Compress.update},
        # refreshes at 0, 1, 3 and 7; exchanges at every other step to 10, and at 12
        {"freeze_step": 9, "kappa": 1, "double_every": 1},
    ],
}
"""By method: what else changes its way, beside or in place of its `SETTINGS`."""
_EARLY = tuple(name for name in SETTINGS if hasattr(METHODS[name].Config, "blocking_share"))
"""Methods that can wait in their first rounds."""

CASES: list[Case] = [*SETTINGS.items()]
CASES += [("co2", {**_CO2, "gap_penalty": gap, **clip}) for gap, clip in product(_GAPS, _CLIPS)]
CASES += [(name, {**SETTINGS[name], **own}) for name in _OTHERS for own in _OTHERS[name]]
CASES += [(name, {**SETTINGS[name], "blocking_share": 0.4}) for name in _EARLY]
CASES += [("co2", {**_CO2, "gap_penalty": gap, "blocking_share": 0.4}) for gap in _GAPS]
"""Every way of every method around an optimizer of any kind, no two of them alike."""

SHARDED: list[Case] = [
    ("co2", {**SETTINGS["co2"], "shard": True}),
    *(
        ("co2", {**_CO2, "gap_penalty": gap, **_CLIPS[(number + 2) % len(_CLIPS)], "shard": True})
        for number, gap in enumerate(_GAPS)
    ),
    ("co2", {**_CO2, "gap_penalty": "gap_aware", "blocking_share": 0.4, "shard": True}),
]
"""Every kind of gap, of clip and of beginning. Where state lies is nothing that a reference knows.
"""

WITH_MOMENTS: list[Case] = [
    *MOMENTS.items(),
    *(("co2_keep", {**MOMENTS["co2_keep"], "delay": delay}) for delay in (0, 1)),
    *((name, {**MOMENTS[name], "blocking_share": 0.4}) for name in ("co2", "co2_keep")),
]
"""These need an inner Adam."""

TELLING: list[Case] = [*SETTINGS.items(), SHARDED[0]]
"""One of each method."""


def inner(name: str, optimizer: str = "sgd") -> str:
    """The inner optimizer to test a method with, where `optimizer` would do for the others."""
    if name in NEEDS_SGD:
        return "decay"
    return "adamw" if name in (*ADAM, *NEEDS_ADAM) else optimizer


def inner_of(case: Case, optimizer: str = "sgd") -> str:
    return "adamw" if "average_moments" in case[1] else inner(case[0], optimizer)


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

    def train(self, steps: int) -> "Session":
        for _ in range(steps):
            self.step()
        return self

    def snapshot(self) -> Snapshot:
        return problem.snapshot(self.net)

    def shown(self) -> Snapshot:
        """In a consensus."""
        with self.method.consensus():
            return self.snapshot()

    def save(self) -> bytes:
        """Of model, optimizer and method."""
        file = io.BytesIO()
        torch.save([part.state_dict() for part in self.stateful], file)
        return file.getvalue()

    def load(self, saved: bytes, steps_done: int) -> None:
        for part, state in zip(self.stateful, torch.load(io.BytesIO(saved)), strict=True):
            part.load_state_dict(state)
        self.steps_done = steps_done

    @property
    def stateful(self) -> tuple[Any, ...]:
        return self.net, self.optimizer, self.method

    def state(self) -> tuple[Snapshot, dict[str, Any], dict[str, Any]]:
        """What a training ends with: weights, inner state, and the method's but clocks and what is
        in flight."""
        own = self.method.state_dict()
        untimed = {key: own[key] for key in own.keys() - {"mean", "means"}}
        untimed["values"].pop("clocks", None)
        return self.snapshot(), self.optimizer.state_dict(), untimed


def trained(name: str, rank: int = 0, steps: int = 7) -> Session:
    """A session in fp32 after a few steps: two rounds and one, so that something has arrived."""
    return Session(rank, name, SETTINGS[name], dtype=torch.float32).train(steps)


@contextmanager
def told(text: str, kind: type[Exception] = WrongCall) -> Iterator[None]:
    """One line with this text is raised."""
    with pytest.raises(kind, match=text) as caught:
        yield
    assert "\n" not in str(caught.value)


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


def drifted(
    rank: int,
    case: Case,
    sizes: Sequence[int] = (4, 7),
    steps: int = 15,
    comm: CommConfig | None = None,
) -> tuple[list[Tensor], Any]:
    """The weights after each step, as one vector, under gradients that do not depend on them; and
    the method."""
    name, settings = case
    model, optimizer = problem.build_drift(sizes)
    method = METHODS[name](comm=comm, **settings)
    method.prepare(model, optimizer, co2.Mesh.world())
    history = []
    for step in range(steps):
        problem.backward_drift(model, step, rank)
        method.step()
        history.append(torch.cat([weight.detach() for weight in model.parameters()]))
    method.flush()
    return history, method


def replicas_of(
    optimizer: str, world: int, dtype: torch.dtype = torch.float64, total: int = 15
) -> list[Replica]:
    """Replicas of `problem`, for a reference to train."""
    replicas = []
    for rank in range(world):
        net, own = problem.build(0, optimizer, dtype)

        def backward(model: torch.nn.Module, step: int, rank: int = rank) -> None:
            problem.backward(model, step, rank)

        replicas.append(Replica(net, own, backward, problem.set_lr, total))
    return replicas


def reference_of(case: Case, replicas: list[Replica]) -> Any:
    """The rounds of a method's reference."""
    name, settings = case
    known = {key: one.value if isinstance(one, Enum) else one for key, one in settings.items()}
    known.pop("shard", None)
    return REFERENCES[name](replicas, **known)


def simulate(
    case: Case, optimizer: str, world: int, dtype: torch.dtype = torch.float64, steps: int = 15
) -> list[list[Snapshot]]:
    """By replica of a reference: its state at the start of training and after each round."""
    replicas = replicas_of(optimizer, world, dtype)
    histories = [[problem.snapshot(replica.model)] for replica in replicas]
    rounds = reference_of(case, replicas)
    while replicas[0].steps_done < steps:
        next(rounds)
        for replica, history in zip(replicas, histories, strict=True):
            history.append(problem.snapshot(replica.model))
    return histories


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
