"""Peers in the laboratory, and their bytes against the network device's counter."""

import csv
import os
from pathlib import Path

import pytest

import co2
from co2_measure.lab.__main__ import main
from co2_measure.peers import PEERS, check_installed
from tests.counted_bytes import measured_and_counted
from tests.counted_bytes import needs_root as namespace
from tests.engine.test_lab import TOY, needs_root, traces
from tests.grids import grid


def installed() -> list[str]:
    return [name for name in PEERS if lab_takes(name)]


def lab_takes(name: str) -> bool:
    try:
        check_installed(name)
    except co2.ConfigError:
        return False
    return True


@needs_root
@pytest.mark.slow  # trainings of every peer, which want the extra `peers`
def test_a_table_of_peers(tmp_path: Path) -> None:
    """Each in namespaces of its own: all find each other, train, and end."""
    methods = ["local_sgd", *installed(), "none"]
    arguments = ["--mbit", "20", "--methods", ",".join(methods), *TOY, "toy.hidden=4000"]
    arguments += [f"{name}.tau=4" for name in PEERS]  # each for that peer alone
    places = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    assert main([*arguments, "local_sgd.tau=4", *places]) == 0
    with (tmp_path / "out/cells.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert list(rows) == methods
    payload = 4 * (16 * 4000 + 3 * 4000 + 4 * 4000 + 4)
    for name in installed():
        # Three rounds: what travels takes its time on the wire, and is waited for.
        assert float(rows[name]["bytes_per_step"]) >= payload / 4
        assert float(rows[name]["exposed_s"]) > 0.8 * 3 * payload * 8 / 20e6
        assert float(rows[name]["overlap"]) == 0
    assert float(rows["none"]["bytes_per_step"]) == 0
    ours, theirs = rows["local_sgd"], rows["torch_post_local_sgd"]
    assert ours["bytes_per_step"] == theirs["bytes_per_step"]
    assert float(ours["loss"]) == pytest.approx(float(theirs["loss"]), rel=1e-4)
    assert not traces(os.getpid())


@namespace
@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("world", grid([2, 3], (3).__eq__))
def test_bytes_are_what_the_network_device_counts(tmp_path: Path, name: str, world: int) -> None:
    """In a namespace where nothing else speaks: the formula is within 3 % of the count."""
    pytest.importorskip(PEERS[name].package)
    measured, counted = measured_and_counted(tmp_path, world, name)
    assert measured > 1_000_000 and counted == pytest.approx(measured, rel=0.03)
