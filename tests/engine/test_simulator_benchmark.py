"""The benchmark that holds the simulator against the laboratory."""

import pytest

from benchmarks.simulator import PAYLOAD_SHARE, points
from co2_measure.simulate.methods import SIMULATED
from co2_measure.simulate.network import Link, Network
from co2_measure.simulate.schedule import simulate

STEPS, STEP_S, VECTOR_BYTES = 60, 0.1, 4_000_000


def cell(method: str, mbit: str, workers: int = 2, slower: float = 1.0) -> dict[str, str]:
    """What the laboratory would write if the simulator were right: the first step is not timed."""
    rate = 1e12 if mbit == "unlimited" else float(mbit) * 1e6
    found = simulate(
        method=method,
        workers=workers,
        vector_bytes=VECTOR_BYTES,
        step_s=STEP_S,
        network=Network(Link(rate, efficiency=PAYLOAD_SHARE)),
        steps=STEPS,
        tau=12,
    )
    first_s = found.step_s if method == "allreduce" else STEP_S
    train_s = (found.step_s * STEPS - first_s) * slower
    return {
        "workers": str(workers),
        "mbit": mbit,
        "method": method,
        "throughput": str(workers * 8 * (STEPS - 1) / train_s),
        "train_s": str(train_s),
        "steps": str(STEPS),
        "bytes_per_step": str(found.bytes_per_step),
    }


def test_a_right_simulator_has_no_error() -> None:
    cells = [
        cell(method, mbit, workers)
        for workers in (2, 3, 4)
        for mbit in ("5", "50", "unlimited")
        for method in SIMULATED
    ]
    found = points(cells, tau=12)
    assert len(found) == 3 * 2 * (len(SIMULATED) - 1)
    for point in found:
        assert point.error == pytest.approx(0, abs=1e-6), point


def test_an_error_shows() -> None:
    cells = [cell("none", "50"), cell("allreduce", "50"), cell("co2", "50", slower=1.1)]
    errors = {point.method: point.error for point in points(cells, tau=12)}
    assert errors["co2"] == pytest.approx(0.1) and errors["allreduce"] == pytest.approx(0, abs=1e-6)


def test_a_method_that_is_not_simulated_is_left_out() -> None:
    cells = [cell("none", "50"), cell("allreduce", "50")]
    cells.append({**cells[1], "method": "torchft_diloco"})
    assert [point.method for point in points(cells, tau=12)] == ["allreduce"]
