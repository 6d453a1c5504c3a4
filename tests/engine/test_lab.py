"""The laboratory: links have the rates they were given, and nothing of it is left behind.

Two trials are real trainings. The others start a small program in place of train.py, which imports
no torch and so costs no processor time, with the same command line, environment and files.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from co2.config import Validation
from co2.errors import ConfigError
from co2.record.table import read_csv
from co2_measure.lab import report, slow_network, training
from co2_measure.lab.__main__ import _parser, main
from co2_measure.lab.measurement import Measurement, write_csv
from co2_measure.lab.plan import plan
from co2_measure.lab.slow_network import PREFIX, SlowNetwork, check_root, remove_leftovers
from co2_measure.lab.training import train, trial_overrides
from co2_measure.lab.trial import Change, Conditions, Trial, trial_folder
from recipes.runs.cells import composed_config
from recipes.runs.processes import is_running

ROOT = Path(training.TRAIN).parent


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
    groups = slow_network._groups(f"{PREFIX}-*")
    names = [*slow_network._namespaces(), *(path.name for path in groups)]
    return [name for name in names if name.startswith(f"{PREFIX}-{pid}-")]


def shaped_bytes_per_s(network: SlowNetwork, worker: int) -> list[int]:
    """What the kernel's shapers at the two ends of a link let through; none where none are."""
    ends = [(f"{network._name}-w{worker}", "eth0"), (network._switch, f"port{worker}")]
    show = ("tc", "-json", "qdisc", "show", "dev")
    found = [json.loads(slow_network._inside(place, *show, device)) for place, device in ends]
    return [one["options"]["rate"] for kinds in found for one in kinds if one["kind"] == "tbf"]


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
for _ in range(6000):
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
    """A busy machine makes a transfer longer and never shorter, so only haste is refused by the
    clock; that the link is no slower than its rate is read from the kernel's shapers."""
    mbit = 40.0
    rates: list[float | None] = [None, None]
    rates[slow] = mbit
    total = 2_000_000
    with SlowNetwork(rates) as network:
        seconds = transfer(network, total)
        assert total * 8 / 1e6 / seconds / mbit < 1.1
        assert shaped_bytes_per_s(network, slow) == [mbit * 1e6 / 8] * 2
        assert shaped_bytes_per_s(network, 1 - slow) == []
        network.shape(slow, None)
        assert shaped_bytes_per_s(network, slow) == []
    assert not traces(os.getpid())


def transfer(network: SlowNetwork, total: int) -> float:
    """Seconds until `total` bytes have gone from worker 1 to worker 0."""
    server = network.start(0, [sys.executable, "-c", SERVER], os.environ)
    client = network.start(1, [sys.executable, "-c", CLIENT, str(total)], os.environ)
    seconds = float(client.communicate()[0])
    server.communicate()
    return seconds


ASK = """
import socket, sys
link = socket.socket()
link.settimeout(1)
print(link.connect_ex((sys.argv[1], 5000)) != 11)  # whether anybody has answered, if only with no
"""


@needs_root
def test_some_are_cut_off_from_others_but_not_from_one_another() -> None:
    with SlowNetwork([None] * 4) as network:

        def reaches(one: int, other: int) -> bool:
            words = [sys.executable, "-c", ASK, network.address(other)]
            return network.start(one, words, os.environ).communicate()[0].strip() == "True"

        assert reaches(0, 1)
        network.partition([1, 2])
        assert not reaches(0, 1) and not reaches(2, 3) and reaches(1, 2) and reaches(0, 3)
        network.heal([1, 2])
        assert reaches(0, 1)


@needs_root
def test_nothing_is_left_after_an_error() -> None:
    with suppress(ZeroDivisionError), SlowNetwork([10.0, None], {1: 0.5}) as network:
        idle = network.start(1, ["sleep", "1000"], os.environ)
        assert len(traces(os.getpid())) >= 4
        raise ZeroDivisionError
    assert idle.poll() is not None
    assert not traces(os.getpid())


KILLED = """
import os, sys, time
from co2_measure.lab.slow_network import SlowNetwork
with SlowNetwork([10.0], {0: 0.5}) as network:
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
    deadline = time.monotonic() + 300
    while is_running(worker):
        assert time.monotonic() < deadline, "its worker lives on"
        time.sleep(0.02)
    assert traces(owner.pid)
    assert f"{PREFIX}-{owner.pid}" in remove_leftovers()
    assert not traces(owner.pid)


def cores_of(pid: int) -> float:
    """How many cores the kernel gives to the laboratory's control group of this process."""
    groups = slow_network._groups(f"{PREFIX}-*")
    (group,) = (g for g in groups if str(pid) in (g / "cgroup.procs").read_text().split())
    if (group / "cpu.max").exists():
        quota, period = (group / "cpu.max").read_text().split()
    else:
        quota, period = ((group / f"cpu.cfs_{word}_us").read_text() for word in ("quota", "period"))
    return int(quota) / int(period)


@needs_root
def test_a_quarter_of_a_core_of_its_own() -> None:
    """A busy machine makes the time longer and never shorter, so the limit itself is read too."""
    spin = (
        "import os, time; began = time.monotonic(); used = time.process_time()\n"
        "while time.process_time() - used < 0.3: pass\n"
        "print(time.monotonic() - began, *os.sched_getaffinity(0))"
    )
    all_cores = os.sched_getaffinity(0)
    core = min(all_cores)
    with SlowNetwork([None, None], {1: 0.25}, [all_cores, {core}]) as network:
        process = network.start(1, [sys.executable, "-c", spin], os.environ)
        assert cores_of(process.pid) == 0.25
        seconds, *cores = process.communicate()[0].split()
    assert float(seconds) > 0.3 / 0.25 * 0.7 and cores == [str(core)]


def test_each_worker_has_cores_of_its_own_where_there_are_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 3, 6, 7})
    two, six = (Trial(workers, 20.0, "co2", 0) for workers in (2, 6))
    even, slower = Conditions(), Conditions(slow_cpus=((1, 0.5),))
    assert even.cores(two) == slower.cores(two) == [{0, 2}, {3, 6}], "as many for each"
    assert even.cores(six) == [] and Conditions(pin=False).cores(two) == []
    assert Conditions(slow_cpus=((1, 2.0),)).cores(two) == [], "it may have two cores"
    assert plan(_parser().parse_args(["--no-pin"]))[1] == Conditions(pin=False)
    assert plan(_parser().parse_args([]))[1].pin


@needs_root
def test_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method and the limit, trained on a slow link; then the same from the trials kept."""
    runs = tmp_path / "runs"
    arguments = ["--mbit", "4", "--methods", "allreduce,none", "--target-loss", "9"]
    arguments += ["--runs", str(runs), "--out", str(tmp_path / "out"), *TOY]
    arguments += ["toy.hidden=4000", "train.steps=6", "co2.tau=4"]  # the last for co2 alone
    assert main(arguments) == 0
    rows = {row["method"]: row for row in read_csv(tmp_path / "out/cells.csv")}
    assert rows.keys() == {"allreduce", "none"}
    payload = 4 * (16 * 4000 + 3 * 4000 + 4 * 4000 + 4)
    assert float(rows["allreduce"]["bytes_per_step"]) == payload
    assert float(rows["none"]["bytes_per_step"]) == 0
    # Of what DDP sends each step over 4 Mbit/s nothing can be hidden behind so small a model.
    assert float(rows["allreduce"]["comm_s"]) / 6 > 0.8 * payload * 8 / 4e6
    assert float(rows["allreduce"]["throughput"]) < 0.3 * float(rows["none"]["throughput"])
    assert (tmp_path / "out/throughput.svg").stat().st_size > 1000
    table = (tmp_path / "out/table.md").read_text()
    assert "| 2 | 4 | allreduce |" in table and "Hardware: " in table
    for method in rows:
        trial = Trial(2, 4.0, method, 0)
        assert training._has_begun(trial_folder(trial, Conditions(), runs), trial)
    first = (tmp_path / "out/cells.csv").read_text()
    monkeypatch.delattr(training, "SlowNetwork")
    assert main(arguments) == 0, "finished trials are not run again"
    assert (tmp_path / "out/cells.csv").read_text() == first
    assert not traces(os.getpid())


FAILING = """
import os, sys, time
if "{case}" == "refused" and os.environ["RANK"] == "0":
    time.sleep(0.5)  # the message may come after another worker's end
    print("a line before\\nerror: train.batch_size=4: too large\\na line after")
    sys.exit(2)
if "{case}" == "without":
    sys.exit()
if os.environ["RANK"] == "1":
    print("Traceback\\nOSError: no disk\\n")
    sys.exit(3)
time.sleep(1000)
"""


@needs_root
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("refused", "train.batch_size=4: too large"),
        ("crashed", "worker 1: OSError: no disk"),
        ("without", "ended without a summary.json"),
    ],
)
def test_a_failing_worker_is_one_line(
    case: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    in_place_of_train(FAILING.format(case=case), tmp_path, monkeypatch)
    assert main(["--mbit", "100", "--methods", "co2", "--runs", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: 2 workers, 100 Mbit/s, co2, repeat 0: ")
    assert reason in error and error.count("\n") == 1
    assert not traces(os.getpid())


SENDING = """
import json, os, socket, sys, time
from pathlib import Path
words = dict(word.split("=", 1) for word in sys.argv[1:])
if os.environ["RANK"] == "0":
    with socket.create_server(("", 5000)) as server:
        link, _ = server.accept()
    while link.recv(250_000, socket.MSG_WAITALL):
        link.sendall(b".")
    sys.exit()

def step():
    began = time.monotonic()
    link.sendall(bytes(250_000))
    link.recv(1)
    return time.monotonic() - began

def connected():
    for _ in range(15_000):
        try:
            return socket.create_connection((os.environ["MASTER_ADDR"], 5000))
        except OSError:
            time.sleep(0.02)

link = connected()
folder = Path(words["runs"], "task", words["method"], words["tag"], "seed0")
folder.mkdir(parents=True)
step()
time.sleep(0.5)  # a change that does not wait for the first figures would come now
(folder / "metrics.jsonl").write_text("{}")
seconds, deadline = 0.0, time.monotonic() + 300
while seconds < 0.25 and time.monotonic() < deadline:
    seconds = step()
(folder / "summary.json").write_text(json.dumps({"seconds": seconds}))
"""


@needs_root
def test_a_link_that_gets_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All links change once the first figures are written; then each step waits for the wire."""
    in_place_of_train(SENDING, tmp_path, monkeypatch)
    words = ["--mbit", "unlimited,20", "--schedule", "unlimited:4@0.2s", "--schedule", "20:500@0s"]
    _, conditions = plan(_parser().parse_args(words))
    shape, changes = SlowNetwork.shape, []

    def record(self: SlowNetwork, worker: int, mbit: float | None) -> None:
        changes.append((worker, mbit, len(list(tmp_path.rglob("metrics.jsonl")))))
        shape(self, worker, mbit)

    monkeypatch.setattr(SlowNetwork, "shape", record)
    summary = train(Trial(2, None, "allreduce", 0), conditions, tmp_path)
    assert changes == [(0, 4, 1), (1, 4, 1)]
    # On a busy machine some of it may pass before the links change.
    assert summary["seconds"] > 0.5 * (250_000 - slow_network._LEAST_BUCKET) * 8 / 4e6


def in_place_of_train(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = folder / "program.py"
    script.write_text(program)
    monkeypatch.setattr(training, "TRAIN", script)


def test_the_laboratory_trains_the_model_that_it_always_did() -> None:
    """Conf's GPT-2 may change; two measurements must not mean two models."""
    config = composed_config(tuple(trial_overrides("co2", ["co2.tau=4", "+co2_keep.delay=3"])))
    assert config.method_config.tau == 4, "the command line's come last, without another method's"
    limit = composed_config(tuple(trial_overrides("none")))
    assert (limit.method, limit.method_config.tau) == ("local_sgd", 10**9)
    task = config.task_config
    assert (task.size.value, task.context, task.vocab_size) == ("smoke", 128, 4096)
    train, optim = config.train, config.optim
    assert (train.batch_size, train.clip_norm) == (8, 1.0)
    assert (optim.lr, optim.weight_decay) == (2e-3, 0.1)
    assert (optim.warmup_steps, optim.min_lr_ratio) == (60, 0.1)
    assert config.data.validation is Validation.all


def test_folders_of_trials_are_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changed names would lose every measurement that has been taken. Those with cores of their own
    are new, and have names of their own."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    trial = Trial(2, 100.0, "co2", 1)
    shared = Conditions(pin=False)
    assert trial_folder(trial, shared, tmp_path) == tmp_path / "even" / "2x100-1"
    assert trial_folder(trial, Conditions(), tmp_path) == tmp_path / "even" / "2x100-1-pinned"
    words = "--no-pin --mbit 100,unlimited --schedule 100:20@10s --schedule unlimited@2.5s"
    words += " --slow-link 1:0.5 --slow-cpu 0:0.25"
    trials, conditions = plan(_parser().parse_args(words.split()))
    folder = trial_folder(replace(trials[-1]), conditions, tmp_path)
    name = "100to20@10s-unlimited@2.5s-link1:0.5-cpu0:0.25"
    assert folder == tmp_path / name / "2xunlimited-0"


def test_conditions_of_a_trial() -> None:
    early, late, other = Change(1, 5), Change(3, None, "100"), Change(2, 7, "20")
    conditions = Conditions((late, other, early), slow_links=((1, 0.5),))
    trial = Trial(3, 100.0, "co2", 0)
    assert conditions.rates(trial) == [100, 0.5, 100]
    assert conditions.changes(trial) == [early, late]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("--mbit 20,-5", "--mbit=-5"),
        ("--mbit nan", "--mbit=nan"),
        ("--methods co2,alreduce", "--methods=alreduce: did you mean allreduce?"),
        ("--workers two", "--workers=two"),
        ("--workers 2,100000", "--workers=100000"),
        ("--schedule 20", "--schedule=20: must be RATE@SECONDSs"),
        ("--schedule 50:20@3s", "--schedule=50:20@3s: no trial has links of 50"),
        ("--schedule 0:20@3s", "--schedule=0"),
        ("--slow-link 2:10", "--slow-link=2"),
        ("--slow-cpu 1:0", "--slow-cpu=1:0"),
        ("--fast", "option=--fast"),
    ],
)
def test_wrong_values(words: str, key: str, capsys: pytest.CaptureFixture) -> None:
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {key}") and error.count("\n") == 1


def measured(method: str, repeat: int, throughput: float, mbit: str = "20") -> Measurement:
    """Figures of a trial of which only these matter."""
    share, seconds, sent, loss = (0.25, 0.5, 2.5e6, 3.0)
    return Measurement(
        *(2, mbit, method, repeat, throughput, share, None, seconds, seconds, sent),
        *(9.0, 60, loss, "abc1234", "a cpu, 2 cores"),
    )


def test_shares_are_taken_within_a_repeat() -> None:
    rows = [measured("none", 0, 100), measured("co2", 0, 90)]
    rows += [measured("none", 1, 50), measured("co2", 1, 50)]
    shares = report.shares_of_limit([rows[1], rows[3]], rows)
    assert shares == [0.9, 1.0]
    assert report.shares_of_limit([measured("co2", 0, 1, "5")], rows) == []


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("results/**/cells.csv")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_the_committed_measurements_have_these_columns(path: Path, tmp_path: Path) -> None:
    names = list(read_csv(path)[0])
    write_csv([measured("co2", 0, 1)], tmp_path / "new.csv", with_target="target_s" in names)
    assert list(read_csv(tmp_path / "new.csv")[0]) == names
