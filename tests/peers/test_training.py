"""Peers train the toy through train.py, stop, go on exactly, and leave nothing behind."""

import json
import time
from pathlib import Path

import pytest

from co2_measure.peers import PEERS
from tests.cli.harness import (
    LIMIT_S,
    LINGER_S,
    alive,
    assert_same_run,
    folders,
    metrics,
    pooled,
    started,
    stopped_after,
)
from tests.grids import grid
from tests.peers.sessions import exposed_by_the_clock
from tests.workers import Pool

SHARES = {"torch_post_local_sgd": 1.0, "torchft_diloco": 1.0, "fairscale_slowmo": 1.25}
"""Bytes that one of two workers sends in a round, as a share of the model's."""


@pytest.fixture(params=PEERS)
def name(request: pytest.FixtureRequest) -> str:
    """Every peer whose package is installed."""
    pytest.importorskip(PEERS[request.param].package)
    return request.param


def test_trains(name: str, tmp_path: Path) -> None:
    words = (f"method={name}", f"{name}.tau=4", "train.steps=60", "log.every=1", "optim.lr=0.01")
    log = tmp_path / "log"
    with started(*words, runs=tmp_path / "runs", log=log) as process:
        assert process.wait(LIMIT_S) == 0, log.read_text()
        deadline = time.monotonic() + LINGER_S
        while alive(process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not alive(process.pid)
    (folder,) = folders(tmp_path / "runs")
    losses = [line["loss"] for line in metrics(folder, "train")]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    summary = json.loads((folder / "summary.json").read_text())
    payload = 4 * (16 * 32 + 32 + 2 * 32 + 32 * 4 + 4)
    assert summary["bytes_per_step"] == pytest.approx(SHARES[name] * payload / 4)
    assert 0 < summary["exposed_s"] == summary["comm_s"] < summary["wall_s"]
    assert summary["overlap"] == 0


def test_waiting_is_exposed_and_copies_are_not(workers: Pool) -> None:
    assert workers.run(exposed_by_the_clock, 2) == [10.0, 10.0]


@pytest.mark.parametrize(
    "told_in",
    grid([7, 8], (7).__eq__),
    ids=["inside a round", "at its end"],
)
def test_goes_on_exactly(workers: Pool, tmp_path: Path, name: str, told_in: int) -> None:
    """Evaluations change nothing, and a run that was told to stop goes on to the last bit."""
    words = (
        f"method={name}",
        f"{name}.tau=4",
        "optim.name=adamw",
        "optim.lr=0.01",
        "train.steps=24",
        "train.eval_every=5",
        "log.every=1",
        "checkpoint.every=0",
    )
    whole = pooled(workers, 2, *words, runs=tmp_path / "whole")
    assert whole.status == 0, whole.err
    told = {"setup": stopped_after, "setup_arguments": (told_in,)}
    stopped = pooled(workers, 2, *words, runs=tmp_path / "runs", **told)
    assert stopped.status == 75, stopped.err
    again = pooled(workers, 2, *words, runs=tmp_path / "runs")
    assert again.status == 0 and "resumed at step" in again.out
    assert_same_run(whole.folder, again.folder)
