"""The laboratory: links have the rates they were given, and nothing of it is left behind."""

import csv
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from co2.errors import ConfigError
from co2.lab import measure as lab
from co2.lab import report as lab_report
from co2.lab import slow_network as netns
from co2.lab.slow_network import PREFIX, Network, check_root, remove_leftovers

ROOT = Path(lab.TRAIN).parent


def able() -> bool:
    try:
        check_root()
    except ConfigError:
        return False
    return True


needs_root = pytest.mark.skipif(not able(), reason="needs root, iproute2 and sch_tbf")

TOY = (
    "task=toy",
    "train.steps=12",
    "train.batch_size=4",
    "log.every=1",
    "checkpoint.every=0",
    "log.wandb=disabled",
)


def traces(pid: int) -> list[str]:
    """Namespaces and control groups of one owner that still exist."""
    names = [*netns._namespaces(), *(path.name for path in netns._groups(f"{PREFIX}-*"))]
    return [name for name in names if name.startswith(f"{PREFIX}-{pid}-")]


SERVER = """
import socket
server = socket.create_server(("10.99.0.1", 5000))
link, _ = server.accept()
while link.recv(1 << 20):
    pass
link.close()
"""
CLIENT = """
import socket, sys, time
for _ in range(100):
    try:
        link = socket.create_connection(("10.99.0.1", 5000)); break
    except OSError:
        time.sleep(0.05)
total, data = int(sys.argv[1]), bytes(1 << 14)
link.sendall(bytes(200_000))  # what the buckets let through at once
began = time.monotonic()
for _ in range(total // len(data)):
    link.sendall(data)
link.shutdown(1)
link.recv(1)
print(time.monotonic() - began)
"""


@needs_root
@pytest.mark.parametrize("slow", [0, 1], ids=["receiver", "sender"])
def test_a_link_has_its_rate_in_both_directions(slow: int) -> None:
    mbit = 40.0
    rates = [None, None]
    rates[slow] = mbit  # type: ignore[call-overload]
    total = 3_000_000
    with Network(rates) as network:
        server = network.start(0, [sys.executable, "-c", SERVER], os.environ)
        client = network.start(1, [sys.executable, "-c", CLIENT, str(total)], os.environ)
        seconds = float(client.communicate()[0])
        server.communicate()
        assert 0.8 < total * 8 / 1e6 / seconds / mbit < 1.1
        network.shape(slow, None)
        server = network.start(0, [sys.executable, "-c", SERVER], os.environ)
        client = network.start(1, [sys.executable, "-c", CLIENT, str(total)], os.environ)
        assert float(client.communicate()[0]) < seconds / 3
    assert not traces(os.getpid())


@needs_root
def test_nothing_is_left_after_an_error() -> None:
    with suppress(ZeroDivisionError), Network([10.0, None], {1: 0.5}) as network:
        idle = network.start(1, ["sleep", "1000"], os.environ)
        assert len(traces(os.getpid())) >= 4
        raise ZeroDivisionError
    assert idle.poll() is not None
    assert not traces(os.getpid())


KILLED = """
import os, sys, time
from co2.lab.slow_network import Network
with Network([10.0], {0: 0.5}) as network:
    process = network.start(0, ["sleep", "1000"], os.environ)
    print(process.pid, flush=True)
    time.sleep(1000)
"""


@needs_root
def test_a_killed_owner_leaves_no_process_and_its_names_go_at_the_next_start() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", KILLED], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    worker = int(owner.stdout.readline())
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{worker}").exists() and _state(worker) != "Z":
        assert time.monotonic() < deadline, "its worker lives on"
        time.sleep(0.02)
    assert traces(owner.pid)
    assert f"{PREFIX}-{owner.pid}" in remove_leftovers()
    assert not traces(owner.pid)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


@needs_root
def test_half_a_core() -> None:
    spin = "import time; t = time.process_time()\nwhile time.process_time() - t < 0.6: pass"
    with Network([None, None], {1: 0.25}) as network:
        began = time.monotonic()
        network.start(1, [sys.executable, "-c", spin], os.environ).communicate()
        assert time.monotonic() - began > 0.6 / 0.25 * 0.7


@needs_root
def test_a_table(tmp_path: Path) -> None:
    """Two methods and the limit on a slow link; again, from the trainings that are there."""
    arguments = ["--mbit", "2", "--methods", "allreduce,co2,none", "--target-loss", "9"]
    arguments += ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out"), *TOY]
    arguments += ["toy.hidden=4000", "co2.tau=4"]  # for co2 alone
    assert lab.main(arguments) == 0
    with (tmp_path / "out/cells.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert rows.keys() == {"allreduce", "co2", "none"}
    payload = 4 * (16 * 4000 + 3 * 4000 + 4 * 4000 + 4)
    assert float(rows["allreduce"]["bytes_per_step"]) == payload
    assert float(rows["none"]["bytes_per_step"]) == 0
    # Of what DDP sends each step over 2 Mbit/s nothing can be hidden behind so small a model.
    wire_s = payload * 8 / 2e6
    assert 0.8 * wire_s < float(rows["allreduce"]["comm_s"]) / 12 < 2 * wire_s
    assert float(rows["allreduce"]["throughput"]) < 0.3 * float(rows["none"]["throughput"])
    assert (tmp_path / "out/throughput.png").stat().st_size > 1000
    table = (tmp_path / "out/table.md").read_text()
    assert "| 2 | 2 | co2 |" in table and "Hardware: " in table
    first = (tmp_path / "out/cells.csv").read_text()
    began = time.monotonic()
    assert lab.main(arguments) == 0
    assert time.monotonic() - began < 3, "finished trainings are not made again"
    assert (tmp_path / "out/cells.csv").read_text() == first
    assert not traces(os.getpid())


@needs_root
def test_a_failing_worker_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["--mbit", "100", "--methods", "co2", "--runs", str(tmp_path), *TOY]
    assert lab.main([*arguments, "toy.samples=3"]) == 1
    error = capsys.readouterr().err.strip()
    assert "\n" not in error and "train.batch_size=4" in error
    assert not traces(os.getpid())


@needs_root
def test_a_link_that_gets_slower(tmp_path: Path) -> None:
    """Steps before the change are quick, those after it wait for the wire."""
    words = ["--schedule", "unlimited:1@1s", "--schedule", "20:500@0s"]
    _, conditions = lab.plan(lab._parser().parse_args(words))
    cell = lab.Cell(2, None, "allreduce", 0)
    words = [*TOY, "toy.hidden=2000", "toy.delay_s=0.1", "train.steps=16"]
    summary = lab.train(cell, conditions, tmp_path, words)
    lines = lab_lines(Path(summary["folder"]))
    early, late = lines[2]["comm_s"], lines[-1]["comm_s"]
    assert late > 5 * early and late > 0.5 * 4 * 23 * 2000 * 8 / 1e6


def lab_lines(folder: Path) -> list[dict]:
    import json

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == "train"]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("--mbit 0", "--mbit=0"),
        ("--mbit 20,-5", "--mbit=-5"),
        ("--mbit nan", "--mbit=nan"),
        ("--methods co2,alreduce", "--methods=alreduce: did you mean allreduce?"),
        ("--workers 0", "--workers=0"),
        ("--workers two", "--workers=two"),
        ("--workers 2,100000", "--workers=100000"),
        ("--repeats 0", "--repeats=0"),
        ("--schedule 20", "--schedule=20: must be RATE@SECONDSs"),
        ("--schedule 100:20", "--schedule=100:20: must be RATE@SECONDSs"),
        ("--schedule 50:20@3s", "--schedule=50:20@3s: no cell has 50"),
        ("--schedule 0:20@3s", "--schedule=0"),
        ("--schedule 0@3s", "--schedule=0"),
        ("--slow-link 2:10", "--slow-link=2"),
        ("--slow-link 1", "--slow-link=1"),
        ("--slow-cpu 1:0", "--slow-cpu=1:0"),
        ("--fast", "option=--fast"),
    ],
)
def test_wrong_values(words: str, key: str, capsys: pytest.CaptureFixture) -> None:
    assert lab.main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {key}") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("uid", "missing", "told"),
    [(1000, None, "need root"), (0, "tc", "install iproute2")],
)
def test_a_machine_that_cannot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, uid, missing, told
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    found = netns.shutil.which
    monkeypatch.setattr(
        netns.shutil, "which", lambda name: found("sh") if name != missing else None
    )
    assert lab.main(["--mbit", "20"]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_shares_are_taken_within_a_repeat() -> None:
    def row(method: str, repeat: int, throughput: float, mbit: str = "20") -> dict:
        given = {"workers": 2, "mbit": mbit, "method": method, "repeat": repeat}
        return {**given, "throughput": throughput}

    rows = [row("none", 0, 100), row("co2", 0, 90), row("none", 1, 50), row("co2", 1, 50)]
    shares = lab_report.shares_of_limit([rows[1], rows[3]], rows)
    assert shares == [0.9, 1.0]
    assert lab_report.shares_of_limit([row("co2", 0, 1, "5")], rows) == []
