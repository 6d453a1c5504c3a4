"""Peers in the laboratory, and their bytes against the network device's counter."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

import co2
from co2.lab.__main__ import main
from co2.peers import PEERS, check_installed
from tests.engine.test_lab import TOY, needs_root, traces


def installed() -> list[str]:
    return [name for name in PEERS if lab_takes(name)]


def lab_takes(name: str) -> bool:
    try:
        check_installed(name)
    except co2.ConfigError:
        return False
    return True


@needs_root
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


PROGRAM = """
import sys, torch, torch.distributed as dist, co2
from co2.peers import PEERS, check_installed
from pathlib import Path

def sent():
    line = next(l for l in Path("/proc/net/dev").read_text().splitlines() if "lo:" in l)
    return int(line.split(":")[1].split()[8])

rank, world, name, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", rank=rank, world_size=world, init_method="file://" + store)
net = torch.nn.Linear(1000, 1333)
method = PEERS[name]()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = method.prepare(net, optimizer, co2.Mesh.world())
batch = torch.ones(2, 1000)
dist.barrier(); before = sent(); dist.barrier()
for _ in range(12):
    model(batch).mean().backward(); method.step(); optimizer.zero_grad()
dist.barrier()
after = sent()
if rank == 0:
    print("MEASURED", after - before, world * method.stats().bytes_sent)
method.flush()
dist.destroy_process_group()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace of its own needs root")
@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("world", [2, 3])
def test_bytes_are_what_the_network_device_counts(tmp_path: Path, name: str, world: int) -> None:
    """In a namespace where nothing else speaks: the formula is within 3 % of the count."""
    pytest.importorskip(PEERS[name].package)
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        pytest.skip("this system lets root make no network namespace")
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    ranks = " & ".join(
        f"{sys.executable} {script} {rank} {world} {name} {tmp_path / 'store'}"
        for rank in range(world)
    )
    root = str(Path(co2.__file__).parents[1])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = ["unshare", "--net", "sh", "-c", f"ip link set lo up && ({ranks} & wait)"]
    run = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    line = next((line for line in run.stdout.splitlines() if "MEASURED" in line), None)
    assert line, run.stderr
    measured, counted = (float(word) for word in line.split()[1:])
    assert counted == pytest.approx(measured, rel=0.03)
