"""Stopping and going on, at any step, is bit for bit the same as never having stopped. What
consensus shows there is the same too."""

import io
from typing import Any

import pytest
import torch

from co2.methods import METHODS
from tests.methods.driver import MOMENTS, SETTINGS, Session, Snapshot, assert_same, inner
from tests.workers import Pool

TAU = 3
STEPS = 4 * TAU
ELEMENTWISE = {**SETTINGS["co2"], "gap_penalty": "gap_aware_elementwise", "clip_mode": "norm"}
SHARDED = [{**fields, "shard": True} for fields in (SETTINGS["co2"], ELEMENTWISE)]
TWO_IN_FLIGHT = {**SETTINGS["streaming_diloco"], "delay": 2}
CASES = [*SETTINGS.items(), *(("co2", fields) for fields in (ELEMENTWISE, *SHARDED))]
QUANTIZED = [{**TWO_IN_FLIGHT, "exchange": kind} for kind in ("int8", "int4")]
CASES += MOMENTS.items()
EARLY = [name for name in SETTINGS if hasattr(METHODS[name].Config, "blocking_share")]
CASES += [(name, {**SETTINGS[name], "blocking_share": 0.5}) for name in EARLY]
CASES += [("co2", {**fields, "blocking_share": 0.5}) for fields in SHARDED]
CASES += [("co2_keep", {**MOMENTS["co2_keep"], "delay": 1, "blocking_share": 0.5})]
CASES += [("sparta", {"share": 0.4, "delay": delay}) for delay in (0, 2)]
LATE_MOMENTUM = {"first_moment_every": 6, "late_momentum": True}
CASES += [("mt_dao", {**SETTINGS["mt_dao"], **LATE_MOMENTUM})]
CASES += [("streaming_diloco", fields) for fields in (TWO_IN_FLIGHT, *QUANTIZED)]


def save(session: Session) -> bytes:
    state = {
        "net": session.net.state_dict(),
        "optimizer": session.optimizer.state_dict(),
        "method": session.method.state_dict(),
        "steps_done": session.steps_done,
    }
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def load(session: Session, saved: bytes) -> dict[str, Any]:
    state = torch.load(io.BytesIO(saved))
    session.net.load_state_dict(state["net"])
    session.optimizer.load_state_dict(state["optimizer"])
    session.method.load_state_dict(state["method"])
    session.steps_done = state["steps_done"]
    return state


def finish(session: Session, steps: int = STEPS) -> tuple[Snapshot, dict[str, Any], dict[str, Any]]:
    """Train until so many steps are done. The mean of weights, and all state but clocks."""
    while session.steps_done < steps:
        session.step()
    state = session.method.state_dict()
    untimed = {key: state[key] for key in state.keys() - {"mean", "means"}}
    untimed["values"].pop("clocks", None)
    return session.snapshot(), session.optimizer.state_dict(), untimed


def shown(session: Session) -> Snapshot:
    with session.method.consensus():
        return session.snapshot()


def stop_everywhere(rank: int, world: int, name: str, settings: dict[str, Any]) -> None:
    optimizer = inner(name, "adamw")
    expected = finish(Session(rank, name, settings, optimizer, total=STEPS))
    first = Session(rank, name, settings, optimizer, total=STEPS)
    saves = []
    for _ in range(3 * TAU):
        first.step()
        saves.append((save(first), shown(first)))
    assert_same(finish(first), expected)  # saving is no disturbance either, nor is looking
    for saved, seen in saves:
        # Another seed: whatever is not loaded shows.
        again = Session(rank, name, settings, optimizer, seed=rank + 50, total=STEPS)
        state = load(again, saved)
        assert_same(again.method.state_dict(), state["method"])
        assert_same(shown(again), seen)
        assert_same(finish(again), expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_resume_at_every_step(workers: Pool, case: tuple[str, dict[str, Any]]) -> None:
    workers.run(stop_everywhere, 2, *case)
