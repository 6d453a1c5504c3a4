"""How the workers of a run start: who they are, where they are placed, and what is said where they
cannot."""

import ast
import errno
import multiprocessing
import os
import pty
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import co2.__main__
import train
from co2 import program
from co2.app.compose import preflight
from co2.app.plan import usable_bytes
from co2.config import Config, LaunchConfig
from co2.errors import PREEMPTED, ConfigError
from co2.gpus import ON_ONE_MACHINE, USABLE
from co2.randomness import random_states
from co2.record.provenance import UNKNOWN, manifest
from co2.start import launch, placement, processes
from co2.start.identity import Identity, first_host, identity, is_first, world_size
from tests.cli.harness import (
    ANNOUNCED,
    LIMIT_S,
    ROOT,
    STORY,
    TOY,
    command,
    configured,
    execute,
    folder_of,
    kill_session,
    last_step,
    lay_traps,
    saved_steps,
    until,
)
from tests.server import Forked, environment, fork_program

RUNS = "import atexit, os, signal, sys\nfrom co2 import program\n"


def bare(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    """A Python that has the suite, and nothing that it needs."""
    env = environment(PYTHONPATH=str(options.pop("path", "")))
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    command = [sys.executable, "-S", *words]
    return subprocess.run(command, cwd=ROOT, env=env, text=True, timeout=LIMIT_S, **given)


@pytest.mark.parametrize(
    "words",
    ["train.py --help", "-m co2.lab", "-m co2.simulate", "-m recipes list", "-m tasks.prepare x"],
)
def test_a_python_without_packages(words: str) -> None:
    ended = bare(*words.split())
    assert ended.returncode == 2 and ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ") and f" is missing in {sys.executable}; " in line
    assert "install" in line


@pytest.mark.parametrize(
    "name", ["train.py", "co2/__init__.py", "co2/__main__.py", "co2/program.py"]
)
def test_an_old_python_comes_so_far(name: str) -> None:
    ast.parse((ROOT / name).read_text(), feature_version=(3, 7))


def test_something_is_printed_before_the_long_imports(tmp_path: Path) -> None:
    for package in ("torch", "hydra"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit(7)")
    ended = bare("train.py", "task=toy", path=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "", ANNOUNCED)


@pytest.fixture
def traps(tmp_path: Path) -> Iterator[Path]:
    """A folder where a user may stand, as the run `spawned` does: see tests/cli/test_runs.py."""
    here = tmp_path / "here"
    lay_traps(here)
    yield here
    assert not (here / "ran").exists(), "a module of the current folder was run"


def test_a_script_of_ones_own_has_its_modules(traps: Path, tmp_path: Path) -> None:
    """And the replicas that `co2.run` starts have them; not its current folder's."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "helper.py").write_text("def train(mesh):\n    return mesh.replica")
    line = "import co2, helper; print(co2.run(helper.train, replicas=2, device='cpu'))"
    (own / "script.py").write_text(line)
    ended = execute([sys.executable, str(own / "script.py")], traps / "runs")
    assert ended.out == "[0, 1]\n"


def test_what_a_program_starts_looks_elsewhere(traps: Path) -> None:
    """And finds the suite, wherever it stands: the laboratory and the recipes start train.py."""
    code = "import os; os.chdir(sys.argv[1])\nwith program.starting('__main__', False): pass\n"
    code += "line = 'import co2.errors, multiprocessing'\n"
    code += "os.execv(sys.executable, [sys.executable, '-S', '-c', line])"
    ended = bare("-c", RUNS + code, str(traps))
    assert ended.returncode == 0, ended.stderr


CTRL_C = "os.kill(os.getpid(), signal.SIGINT)"


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (f"with program.starting('__main__', slow=False):\n    {CTRL_C}", -signal.SIGINT),
        (f"program.run(lambda: {CTRL_C})", 130),
        (f"atexit.register(lambda: {CTRL_C})\nprogram.run(lambda: {CTRL_C})", -signal.SIGINT),
    ],
)
def test_ctrl_c(script: str, status: int) -> None:
    """Among the imports, in the work, and again while it ends."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background
    try:
        ended = bare("-c", RUNS + script)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, "", "")


@pytest.mark.parametrize("pair", [os.pipe, pty.openpty])
def test_nobody_reads(pair: Callable[[], tuple[int, int]]) -> None:
    reader, out = pair()
    os.close(reader)
    script = "program.run(lambda: [print('x' * 99) for _ in range(999)] and 0)"
    ended = bare("-c", RUNS + script, stdout=out)
    os.close(out)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_full_disk() -> None:
    """Training goes on; other programs exist for what they print."""
    script = "program.keep_output(training={})\nprint('x' * 9999)"
    with open("/dev/full", "w") as out:
        assert bare("-c", RUNS + script.format(True), stdout=out).returncode == 0
        assert bare("-c", RUNS + script.format(False), stdout=out).returncode != 0


def test_an_encoding_without_greek() -> None:
    script = "os.environ['PYTHONIOENCODING'] = 'ascii'\nif not sys.argv[1:]:\n"
    script += "    os.execv(sys.executable, [sys.executable, '-S', '-c', sys.orig_argv[3], 'x'])\n"
    ended = bare("-c", RUNS + script + "program.run(lambda: print('Λ') or 0)")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "\\u039b\n", "")


def test_a_line_is_written_at_once() -> None:
    """Lines of two workers do not run together, even without buffers (-u)."""
    reader, writer = socket.socketpair(type=socket.SOCK_SEQPACKET)  # keeps writes apart
    with reader, writer:
        bare("-u", "-c", RUNS + "program.run(lambda: print('a', 'b') or 0)", stdout=writer)
        assert reader.recv(99) == b"a b\n"


def test_a_closed_terminal(tmp_path: Path) -> None:
    """It takes away what is printed to, sends SIGHUP to all processes, and the run saves."""
    arguments, runs = (*STORY, "toy.delay_s=0.03", "checkpoint.every=0"), tmp_path / "runs"
    folder = folder_of(*arguments, runs=runs)
    master, slave = pty.openpty()
    words = command(*arguments, runs=runs)[1:]
    process: Forked = fork_program(words, tmp_path, environment(), slave, slave)
    os.close(slave)
    try:
        until(lambda: last_step(folder) >= 10, process)
        os.close(master)
        os.killpg(process.pid, signal.SIGHUP)
        assert process.wait(LIMIT_S) == PREEMPTED
    finally:
        kill_session(process)
    (step,) = saved_steps(folder)
    assert 10 <= step < 60 and last_step(folder) == step


def test_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert signal.SIGHUP in processes.stop_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert processes.stop_signals() == (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    finally:
        signal.signal(signal.SIGHUP, before)


LATE = """
import os, subprocess
from co2.start.processes import Workers, stop_signals
with Workers(stop_signals()) as workers:
    os.environ["GLOO_SOCKET_IFNAME"] = "chosen"
    workers.start(0, subprocess.check_call, ["sh", "-c", 'test "$GLOO_SOCKET_IFNAME" = chosen'])
    print(workers.wait(60))
"""


def test_workers_have_what_is_chosen_before_the_first_starts() -> None:
    """As the network of a run on several machines is, once its store is reached."""
    call = [sys.executable, "-c", LATE]
    ended = subprocess.run(call, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert ended.stdout == "{0: 0}\n", ended.stderr


def test_torchrun_ends_with_the_reason(
    tmp_path: Path, variables: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever worker is the first to end; one of them prints the line."""
    failures = {}
    for rank in range(2):
        path = tmp_path / f"{rank}.json"
        variables(RANK=str(rank), WORLD_SIZE="2", TORCHELASTIC_ERROR_FILE=str(path))
        with patch.object(launch, "_PEER_S", 0.0):
            assert train.APP.main(["task=toy", "co2.tua=3"]) == 2
        failures[rank] = ProcessFailure(rank, 99, 2, str(path))
    reason = "error: co2.tua=3: unknown key; did you mean co2.tau?"
    assert capsys.readouterr().err == reason + "\n"
    report = str(ChildFailedError("train.py", failures))
    assert report.count(f"  traceback : {reason}\n") == 2


def test_workers_that_torchrun_does_not_start(
    tmp_path: Path, variables: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    variables(RANK="0", WORLD_SIZE="1")
    words = [*TOY, "method=local_sgd", f"runs={tmp_path}"]
    said = "launch.workers=2 is ignored: torchrun or srun has started 1\n"
    for more, expected in ((["launch.workers=2"], said), (["launch.workers=1"], ""), ([], "")):
        with patch.object(launch, "run", return_value=1):
            assert train.APP.main([*words, *more]) == 1
        assert capsys.readouterr().err == expected


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for main in (train.APP.main, co2.__main__.main):
        assert main(["--version"]) == 0
        assert capsys.readouterr().out == f"{project['name']} {project['version']}\n"


def to_try_next(*arguments: str, runs: Path) -> list[str]:
    """The words of the command that a finished run shows: one that can be given."""
    given = ["task=toy", "launch.backend=gloo", f"runs={runs}", *arguments]
    found = train.APP.next_command(configured(*given[1:], runs=runs), given)
    assert found is not None
    python, script, *words = shlex.split(found)
    if script == "-m":
        assert words[:2] == ["co2", "train"]
        words = words[2:]
    assert python == program.python() and preflight(train.APP.conf, words, train.APP.validate)
    return words


def test_what_to_try_next(tmp_path: Path) -> None:
    """Another method with the same settings, so that the comparison is fair."""
    runs = tmp_path / "my runs"
    own = ("method=co2", "co2.tau=3", "tag=mine", "resume=never")
    words = to_try_next(*own, "train.steps=40", "optim.lr=0.2", runs=runs)
    same = ["task=toy", "launch.backend=gloo", f"runs={runs}", "train.steps=40", "optim.lr=0.2"]
    assert words == [*same, "method=allreduce"], "the baseline"
    words = to_try_next("method=allreduce", "train.steps=60", runs=tmp_path)
    assert words[0] == "-m" and words[-3:] == ["train.steps=60", "method=co2", words[-1]]


BOTH = "cpu:gloo,cuda:nccl"


@pytest.fixture
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    return request.param


@pytest.mark.parametrize(
    ("backend", "device", "gpus", "workers", "placed"),
    [
        ("auto", "auto", 0, 2, ["cpu gloo", "cpu gloo"]),
        ("auto", "auto", 3, 2, [f"cuda:0 {BOTH}", f"cuda:1 {BOTH}"]),
        ("auto", "auto", 1, 4, [f"cuda:0 {BOTH}"] * 4),
        ("auto", "auto", 2, 3, [f"cuda:0 {BOTH}", f"cuda:1 {BOTH}", f"cuda:0 {BOTH}"]),
        ("gloo", "cpu", 2, 2, ["cpu gloo", "cpu gloo"]),
        ("auto", "cpu", 0, 2, ["cpu gloo", "cpu gloo"]),
        ("auto", "cpu", 1, 3, ["cuda:0 gloo", "cuda:0 gloo", "cuda:0 gloo"]),
        ("auto", "cpu", 2, 3, ["cuda:0 gloo", "cuda:1 gloo", "cuda:0 gloo"]),
    ],
    indirect=["gpus"],
)
def test_placement(
    tmp_path: Path, backend: str, device: str, gpus: int, workers: int, placed: list[str]
) -> None:
    words = (f"launch.backend={backend}", f"launch.workers={workers}", f"comm.device={device}")
    config = configured(*words, runs=tmp_path)
    found = [placement.place_of(config, rank, workers) for rank in range(workers)]
    assert [f"{device} {backend}" for device, backend in found] == placed


@pytest.mark.parametrize("gpus", [1], indirect=True)
def test_workers_share_the_gpus_of_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, capsys: pytest.CaptureFixture
) -> None:
    words = ("task=resnet50", "scale=gpu", "launch.backend=auto", "launch.workers=4")
    config = configured(*words, runs=tmp_path)
    monkeypatch.setattr(launch, "_start", lambda worker, config: 3)
    assert launch.run(stop, config) == 3
    assert capsys.readouterr().err == (
        "launch.workers=4: sharing one GPU, through NCCL's sockets; comm.device=cpu goes through "
        "gloo and the host's memory\n"
    )
    for key in ("comm.device=cpu", "launch.backend=gloo"):
        assert launch.run(stop, configured(*words, key, runs=tmp_path)) == 3
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("gpus", [2], indirect=True)
def test_nccl_takes_workers_that_share_a_gpu_for_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: Callable, gpus: int
) -> None:
    """It refuses a second one of the same machine."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    for name in ("NCCL_HOSTID", *ON_ONE_MACHINE):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    for workers in (2, 3):
        variables(NCCL_NET="mine", LOCAL_RANK="1", LOCAL_WORLD_SIZE=str(workers))
        words = ("launch.backend=auto", f"launch.workers={workers}")
        assert launch.mesh(configured(*words, runs=tmp_path)).device == torch.device("cuda", 1)
        assert ("NCCL_HOSTID" in os.environ) == (workers > gpus)
    assert str(os.getpid()) in os.environ["NCCL_HOSTID"]
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo" and os.environ["NCCL_NET"] == "mine"


@pytest.mark.parametrize("gpus", [1, 2], indirect=True)
def test_memory_is_shared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    one = SimpleNamespace(total_memory=3 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: one)
    config = configured("launch.backend=auto", "launch.workers=3", runs=tmp_path)
    sharing = 3 if gpus == 1 else 2
    assert usable_bytes(config) == pytest.approx(USABLE * (3 << 30) / sharing, abs=1)


@pytest.mark.parametrize("gpus", [1], indirect=True)
@pytest.mark.parametrize("where", ["elastic", "two machines"])
def test_workers_that_cannot_share_train_on_the_cpu_at_smoke_scale_only(
    tmp_path: Path, variables: Callable, gpus: int, where: str, capsys: pytest.CaptureFixture
) -> None:
    words = ["launch.backend=auto", "launch.workers=2", "log.wandb=disabled"]
    if where == "elastic":
        words += ["method=co2", "launch.elastic=true"]
    else:
        variables(RANK="0", WORLD_SIZE="4", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")
    with pytest.raises(ConfigError) as refused:
        configured("task=resnet50", "scale=gpu", *words, runs=tmp_path)
    line = str(refused.value)
    assert line.startswith("launch.workers=2: 2 GPUs needed, 1 here; use 1, or comm.device=cpu")
    configured("task=resnet50", "scale=gpu", *words, "comm.device=cpu", runs=tmp_path)
    small = configured(*words, runs=tmp_path)
    assert placement.place_of(small, 1, 2) == (torch.device("cpu"), "gloo")
    if where == "elastic":
        with patch.object(launch.elastic, "launch", return_value=3):
            assert launch.run(stop, small) == 3
        told = "launch.workers=2: training on the CPU; 2 GPUs needed, 1 here; use 1,"
        assert capsys.readouterr().err.startswith(told)


def stop(config: Config) -> None:
    raise SystemExit(3)


@pytest.mark.parametrize("gpus", [2], indirect=True)
def test_who_starts_the_workers_takes_no_gpus_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    """A context of CUDA takes hundreds of megabytes, which only a worker needs."""

    def init() -> None:
        raise AssertionError("CUDA is initialized")

    monkeypatch.setattr(torch.cuda, "_lazy_init", init)
    monkeypatch.setattr(torch._C, "_cuda_init", init)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", init)
    words = ("launch.backend=auto", "launch.workers=2", "train.precision=bf16")
    config = configured("task=moe", *words, "moe.kernel=fused", runs=tmp_path)
    assert placement.first_device(config).type == "cuda"
    assert random_states().keys() == {"python", "numpy", "torch"}
    assert manifest(2, UNKNOWN, {})["hardware"]["gpus"] == []


def test_the_fork_server_starts_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries ask `torch.cuda.is_available()` as they are imported."""
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    processes.context()
    assert torch.cuda._nvml_based_avail()


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
TORCHRUN |= {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
SLURM |= {"SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_JOB_ID": "1234567"}
SLURM |= {"SLURM_STEP_NODELIST": "gpu[03-04]"}
BY_TORCHRUN = Identity(5, 8, 1, 4, "head", 1234)


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        ({"RANK": "0"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),
        ({"SLURM_PROCID": "0"}, None),
        (TORCHRUN, BY_TORCHRUN),
        (SLURM | TORCHRUN, BY_TORCHRUN),  # torchrun inside of srun
        (SLURM, Identity(5, 8, 1, 4, "gpu03", 20000 + 1234567 % 12000)),
    ],
)
def test_identity(variables: dict[str, str], found: Identity | None) -> None:
    assert identity(variables) == found


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[03-07,12],cpu1", "gpu03"),
        ("gpu[12]", "gpu12"),
        ("head", "head"),
        ("rack-2-n[001-004]", "rack-2-n001"),
        ("127.0.0.1", "127.0.0.1"),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_world_size(variables: Callable) -> None:
    assert world_size(LaunchConfig(workers=3)) == 3
    variables(**SLURM)
    assert world_size(LaunchConfig(workers=3)) == 8
    assert not is_first()
    variables(SLURM_PROCID="0")
    assert is_first()


def test_sockets_have_short_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)
    long = tmp_path / ("x" * 99)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    processes.place_sockets()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(connection.arbitrary_address("AF_UNIX"))
    assert tempfile.gettempdir() == str(long), "other files go where they went"


def test_no_place_for_sockets(variables: Callable) -> None:
    variables(TMPDIR="/full")
    nowhere = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")
    says = r"^TMPDIR=/full: no socket can be made there \(No usabl"
    with patch.object(tempfile, "gettempdir", side_effect=nowhere):
        with pytest.raises(ConfigError, match=says):
            processes.place_sockets()
