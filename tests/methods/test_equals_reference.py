"""Every method follows its single-process simulation, on 1 to 4 replicas.

Every case runs on three replicas, where a mean has to be rounded. What one replica does
differently, or four, no setting of a method changes: one case of each method runs there, and with
another inner optimizer on two, where `make test-slow` has all cases.
"""

from enum import Enum
from itertools import product
from typing import Any

import pytest
import torch

from co2.methods import METHODS
from co2.methods.shared.compressed_adam import Compress
from tests.grids import OF_A_KIND, grid
from tests.methods import problem
from tests.methods.driver import ADAM, MOMENTS, SETTINGS, Snapshot, inner, trajectory
from tests.reference import REFERENCES
from tests.reference.replica import Replica
from tests.workers import Pool

ROUNDS = 5
STEPS = ROUNDS * problem.TAU
CO2 = {"tau": problem.TAU, "outer_lr": 0.8, "outer_momentum": 0.5}
GAPS = ("none", "gap_aware", "gap_aware_steady", "gap_aware_elementwise", 1.7)
CLIPS: tuple[dict[str, Any], ...] = (
    {"clip": None},
    {"clip": 0.02, "clip_mode": "value"},
    {"clip": 0.1, "clip_mode": "norm"},
)
STREAMING: tuple[dict[str, Any], ...] = (
    {"fragments": 1, "delay": 0, "mixing": 0.0},
    {"fragments": 2, "delay": 2, "mixing": 0.5},
    {"fragments": 3, "delay": 2, "mixing": 0.25},
    {"tau": 5, "fragments": 3, "delay": 1},
    {"exchange": "int8", "fragments": 1},
    {"exchange": "int4", "fragments": 3, "delay": 2},
)
CASES = [(name, settings) for name, settings in SETTINGS.items() if name not in ("co2", "co2_keep")]
CASES += [("co2", {**CO2, "gap_penalty": gap, **clip}) for gap, clip in product(GAPS, CLIPS)]
EARLY = tuple(name for name in SETTINGS if hasattr(METHODS[name].Config, "blocking_share"))
"""Methods that can wait in their first rounds."""
CASES += [(name, {**SETTINGS[name], "blocking_share": 0.4}) for name in EARLY]
CASES += [("co2", {**CO2, "gap_penalty": gap, "blocking_share": 0.2}) for gap in GAPS]
SHARDED = [(name, {**settings, "shard": True}) for name, settings in CASES if name == "co2"]
"""Where state lies is nothing that a simulation knows."""
DELAYS = (None, 0, 1)
CASES += [("co2_keep", {**SETTINGS["co2_keep"], "delay": delay}) for delay in DELAYS]
CASES += [("streaming_diloco", {**SETTINGS["streaming_diloco"], **own}) for own in STREAMING]
CASES += [("sparta", {"share": 0.3, "delay": delay}) for delay in (0, 1)]
LATE_MOMENTUM = {"first_moment_every": 6, "late_momentum": True}
CASES += [("mt_dao", {**SETTINGS["mt_dao"], **LATE_MOMENTUM})]
CASES += [("demo", {"decay": 0.9, "top_k": top_k, "block": 64}) for top_k in (1, 4, 99)]
CASES += [(name, {**SETTINGS[name], "compress": Compress.update}) for name in ADAM]
WITH_MOMENTS = [
    *MOMENTS.items(),
    *(("co2_keep", {**MOMENTS["co2_keep"], "delay": d}) for d in (0, 1)),
    *((name, {**MOMENTS[name], "blocking_share": 0.4}) for name in ("co2", "co2_keep")),
]
"""These need an inner Adam."""


def replicas_of(optimizer: str, world: int, dtype: torch.dtype) -> list[Replica]:
    """Replicas of `problem`, for a reference to train."""
    replicas = []
    for rank in range(world):
        net, inner = problem.build(0, optimizer, dtype)

        def backward(model: torch.nn.Module, step: int, rank: int = rank) -> None:
            problem.backward(model, step, rank)

        replicas.append(Replica(net, inner, backward, problem.set_lr, STEPS))
    return replicas


def simulate(
    name: str, settings: dict[str, Any], optimizer: str, world: int, dtype: torch.dtype
) -> list[list[Snapshot]]:
    """By replica: its state at the start of training and after each round."""
    replicas = replicas_of(optimizer, world, dtype)
    histories = [[problem.snapshot(replica.model)] for replica in replicas]
    rounds = REFERENCES[name](replicas, **settings)
    while replicas[0].steps_done < ROUNDS * problem.TAU:
        next(rounds)
        for replica, history in zip(replicas, histories, strict=True):
            history.append(problem.snapshot(replica.model))
    return histories


def compare(
    workers: Pool,
    case: tuple[str, dict[str, Any]],
    optimizer: str,
    world: int,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """Hold the method on `world` workers against its reference."""
    measured = workers.run(trajectory, world, *case, optimizer, dtype, STEPS)
    assert_follows(measured, case, optimizer, dtype, tolerance)


def assert_follows(
    measured: list[list[Snapshot]],
    case: tuple[str, dict[str, Any]],
    optimizer: str,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """Hold histories, one of each replica, against the method's reference."""
    name, settings = case
    plain = {key: v.value if isinstance(v, Enum) else v for key, v in settings.items()}
    known = {key: value for key, value in plain.items() if key != "shard"}
    expected = simulate(name, known, optimizer, len(measured), dtype)
    for history, simulated in zip(measured, expected, strict=True):
        per_round = STEPS // (len(simulated) - 1)
        for index, (now, then) in enumerate(zip(history[::per_round], simulated, strict=True)):
            torch.testing.assert_close(
                now,
                then,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda text, index=index: f"after round {index}: {text}",
            )


TELLING = [next(case for case in CASES if case[0] == name) for name in SETTINGS] + SHARDED[:1]
ON_WORLDS = [(case, 3) for case in CASES + SHARDED]
ON_WORLDS += [(case, world) for case in TELLING for world in (1, 4)]
LESS_TELLING = [
    case for n, case in enumerate(SHARDED) if n % len(CLIPS) != n // len(CLIPS) % len(CLIPS)
]
"""Every kind of gap and every kind of clip is among the others."""


def is_telling(one: tuple[tuple[str, dict[str, Any]], int]) -> bool:
    case, world = one
    return case not in LESS_TELLING if world == 3 else case[0] in OF_A_KIND


@pytest.mark.parametrize(("case", "world"), grid(ON_WORLDS, is_telling), ids=str)
def test_equals_reference(workers: Pool, case: tuple[str, dict[str, Any]], world: int) -> None:
    compare(workers, case, inner(case[0]), world, torch.float64, 1e-12)


@pytest.mark.parametrize(
    "case",
    grid(
        CASES + SHARDED + WITH_MOMENTS,
        lambda case: case in WITH_MOMENTS or (case in TELLING and case[0] in OF_A_KIND),
        one=True,
    ),
    ids=str,
)
def test_equals_reference_with_adamw(workers: Pool, case: tuple[str, dict[str, Any]]) -> None:
    compare(workers, case, inner(case[0], "adamw"), 2, torch.float64, 1e-12)


@pytest.mark.parametrize("world", grid([1, 3], (3).__eq__))
@pytest.mark.parametrize("case", WITH_MOMENTS, ids=str)
def test_averaged_moments_on_other_worlds(
    workers: Pool, case: tuple[str, dict[str, Any]], world: int
) -> None:
    compare(workers, case, "adamw", world, torch.float64, 1e-12)


@pytest.mark.parametrize("name", grid(SETTINGS, OF_A_KIND.__contains__))
def test_equals_reference_in_fp32(workers: Pool, name: str) -> None:
    compare(workers, (name, SETTINGS[name]), inner(name), 2, torch.float32, 1e-4)


def test_equals_reference_in_fp32_sharded(workers: Pool) -> None:
    compare(workers, ("co2", {**SETTINGS["co2"], "shard": True}), "sgd", 3, torch.float32, 1e-4)


@pytest.mark.parametrize("optimizer", grid(["sgd", "adamw"], "adamw".__eq__))
def test_every_choice_shows(optimizer: str) -> None:
    """Were two configurations alike on this problem, the test above could not tell them apart."""
    ends = []
    for name, settings in CASES + (WITH_MOMENTS if optimizer == "adamw" else []):
        replicas = simulate(name, settings, inner(name, optimizer), 2, torch.float64)
        ends.append(
            torch.cat([replicas[0][-1][key].reshape(-1) for key in ("scale", "leave.bias")])
        )
    for i, j in product(range(len(ends)), repeat=2):
        assert i == j or (ends[i] - ends[j]).abs().max() > 1e-5, (i, j)
