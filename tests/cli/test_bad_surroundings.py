"""Bad environments, and bad command lines of the programs beside train.py: one line, status 2."""

import errno
import multiprocessing
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path

import pytest
import torch

import co2.__main__
import recipes.__main__
import tasks.prepare.__main__
import train
from co2.app.compose import sweep_job
from co2.errors import ConfigError, from_outside, unusable
from co2.record import compare, timeline, wandb_sync
from co2.start import launch, processes
from co2.start.identity import identity
from co2_measure.lab import __main__ as lab
from co2_measure.lab import slow_network
from co2_measure.simulate import __main__ as simulate
from tests import server
from tests.cli.harness import (
    ANNOUNCED,
    LIMIT_S,
    Run,
    cli,
    command,
    execute,
    held_port,
    kill_session,
    until,
)
from tests.cli.refused import files, refused
from tests.grids import first_of_each
from tests.server import environment, fork_program

NUMBER = "must be a whole number"
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}
SRUN = {**BATCH, "SLURM_STEP_ID": "0"}

# Variables beside those of a good start; what the line begins with; what it must say.
ENVIRONMENTS = [
    (TORCHRUN, "WORLD_SIZE", "two", NUMBER),
    (TORCHRUN, "WORLD_SIZE", "", NUMBER),
    (TORCHRUN, "WORLD_SIZE", "0", "1 or more"),
    (TORCHRUN, "WORLD_SIZE", "-1", NUMBER),
    (TORCHRUN, "WORLD_SIZE", "1.5", NUMBER),
    (TORCHRUN, "RANK", "x", NUMBER),
    (TORCHRUN, "RANK", "2", "from 0 to 1"),
    (TORCHRUN, "RANK", "-1", "from 0 to 1"),
    (TORCHRUN, "LOCAL_RANK", "2", "from 0 to 1"),
    (TORCHRUN, "LOCAL_WORLD_SIZE", "3", "from 1 to 2"),
    (TORCHRUN, "LOCAL_WORLD_SIZE", "0", "from 1 to 2"),
    (TORCHRUN, "MASTER_PORT", "99999", "from 0 to 65535"),
    (TORCHRUN, "MASTER_PORT", "http\n", NUMBER),
    (SRUN, "SLURM_NTASKS", "many", NUMBER),
    (SRUN, "SLURM_PROCID", "2", "from 0 to 1"),
    (SRUN, "SLURM_LOCALID", "x", "from 0 to 1"),
    (SRUN, "SLURM_JOB_ID", "x", NUMBER),
    (SRUN, "SLURM_STEP_ID", "x", NUMBER),
    (BATCH, "SLURM_NTASKS", "4", "srun has not started this process"),
]

RECIPES, LAB, SIMULATE = recipes.__main__.main, lab.main, simulate.main
PROGRAMS: list[tuple[str, Callable[..., object], str, str]] = [
    ("recipes", RECIPES, "nosuch", "invalid choice: 'nosuch' (choose from 'list', 'run'"),
    ("recipes", RECIPES, "run nosuch", "recipe=nosuch: no such recipe"),
    ("recipes", RECIPES, "run tabel2", "did you mean table2?"),
    ("recipes", RECIPES, "run table2 --seeds x", "--seeds=x: must be whole numbers"),
    ("recipes", RECIPES, "run table2 --seeds -1", "--seeds=-1: must be whole numbers"),
    ("recipes", RECIPES, "run table2 --seeds 1,,2", "--seeds=: must be whole numbers"),
    ("recipes", RECIPES, "run table2 --seeds", "--seeds: expected one argument"),
    ("recipes", RECIPES, "run table2 --scale huge", "choose from 'smoke', 'gpu', 'paper'"),
    ("recipes", RECIPES, "run digits --scale paper", "--scale=paper: digits can be run at"),
    ("recipes", RECIPES, "run table2 --launcher moon", "choose from 'local', 'slurm'"),
    ("recipes", RECIPES, "run table2 --seed 3", "--seed=3: is of again alone"),
    ("recipes", RECIPES, "collect nosuch", "recipe=nosuch: no such recipe"),
    ("recipes", RECIPES, "tune", "task=: name a task"),
    ("recipes", RECIPES, "tune nosuch", "task=nosuch: known: ade20k"),
    ("recipes", RECIPES, "tune gpt2 nosuch", "method=nosuch: known: acco"),
    ("recipes", RECIPES, "tune gpt2 co2 --trials 0", "--trials=0: must be 1 or more"),
    ("recipes", RECIPES, "tune gpt2 co2 --trials x", "--trials: invalid int value: 'x'"),
    ("recipes", RECIPES, "tune gpt2 co2 --tau -2", "--tau=-2: must be 1 or more steps"),
    ("lab", LAB, "--workers 0", "--workers=0: " + NUMBER),
    ("lab", LAB, "--workers two", "--workers=two: " + NUMBER),
    ("lab", LAB, "--mbit -3", "--mbit=-3: must be Mbit/s above 0"),
    ("lab", LAB, "--mbit nan", "--mbit=nan: must be Mbit/s above 0"),
    ("lab", LAB, "--methods nosuch", "--methods=nosuch: known: acco"),
    ("lab", LAB, "--repeats 0", "--repeats=0: " + NUMBER),
    ("lab", LAB, "--schedule 1:2", "--schedule=1:2: must be RATE@SECONDSs"),
    ("lab", LAB, "--slow-cpu 9:1", "--slow-cpu=9: workers are counted from 0 to 1"),
    ("lab", LAB, "--target-loss x", "--target-loss: invalid float value: 'x'"),
    ("lab", LAB, "--nosuch", "option=--nosuch: unknown"),
    ("lab", LAB, "nonsense", "option=nonsense: unknown"),
    ("simulate", SIMULATE, "--gpus 0", "--gpus=0: " + NUMBER),
    ("simulate", SIMULATE, "--gpus 64..8", "--gpus=64..8: must end at its start"),
    ("simulate", SIMULATE, "--method nosuch", "--method=nosuch"),
    ("simulate", SIMULATE, "--link x", "--link=x"),
    ("simulate", SIMULATE, "--jitter nan", "--jitter=nan: must be a number of 0"),
    ("simulate", SIMULATE, "--tau 0", "--tau=0: " + NUMBER),
    ("simulate", SIMULATE, "--rounds x\ny", r"--rounds=x\ny: " + NUMBER),
    ("compare", compare.main, "nowhere nowhere", "RUN=nowhere: has no config.yaml"),
    ("compare", compare.main, "nowhere", "the following arguments are required: RUN"),
    ("timeline", timeline.main, "nowhere", "nowhere"),
    ("timeline", timeline.main, "nowhere --rank x", "--rank: invalid int value: 'x'"),
    ("wandb-sync", wandb_sync.main, "--everything", "unrecognized arguments: --everything"),
    ("prepare", tasks.prepare.__main__.main, "nosuch", "invalid choice: 'nosuch'"),
    ("prepare", tasks.prepare.__main__.main, "ade20k --check nowhere", "--check=nowhere: no such"),
    ("co2", co2.__main__.main, "trian", "co2 trian: no such command; did you mean train?"),
]


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, in which nobody may write; and no worker and no network is made."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(launch, "run", lambda *_: pytest.fail("workers were started"))
    for module in (lab, slow_network):
        monkeypatch.setattr(module, "check_root", lambda: pytest.fail("a network was begun"))
    monkeypatch.setattr(sys, "argv", ["program"])
    return here


@pytest.mark.parametrize(
    ("good", "name", "value", "hint"),
    first_of_each(ENVIRONMENTS, lambda case: (case[1], case[3] == NUMBER)),
)
def test_environment(
    empty: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    good: dict[str, str],
    name: str,
    value: str,
    hint: str,
) -> None:
    for key, text in {**good, name: value}.items():
        monkeypatch.setenv(key, text)
    line = refused(train.APP.main, ["task=toy"], capsys)
    assert line.startswith(f"{name}={value.strip()}") and hint in line
    assert "unset" in line
    assert files(empty) == {}


def test_good_environments_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    for good in (TORCHRUN, SRUN):
        me = identity(good)
        assert me is not None and (me.rank, me.world, me.local_world) == (0, 2, 2)
    assert identity({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None


def test_steps_of_a_job_do_not_meet() -> None:
    places = [identity({**SRUN, "SLURM_STEP_ID": step}) for step in ("0", "1", "2")]
    assert len({me.port for me in places if me is not None}) == 3


def test_a_worker_says_whom_it_waits_for(tmp_path: Path) -> None:
    with held_port() as port, (tmp_path / "log").open("w") as log:
        tasks = []
        try:
            for rank in ("0", "1"):
                env = environment(
                    **{**TORCHRUN, "RANK": rank, "LOCAL_RANK": rank}, MASTER_PORT=port
                )
                _, *words = command("method=local_sgd", "train.steps=4", runs=tmp_path / "runs")
                tasks.append(fork_program(words, tmp_path, env, log.fileno(), log.fileno()))
                until(
                    lambda: "waits for the others of 2 at" in (tmp_path / "log").read_text(),
                    tasks[0],
                )
            assert [task.wait(LIMIT_S) for task in tasks] == [0, 0]
        finally:
            for task in tasks:
                kill_session(task)


def test_nccl_without_enough_gpus(
    empty: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for count in (0, 1):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        line = refused(train.APP.main, ["task=toy", "launch.backend=nccl"], capsys)
        assert line == f"launch.backend=nccl: 2 GPUs needed, {count} here"
    assert files(empty) == {}


@pytest.mark.parametrize(
    ("name", "program", "words", "says"),
    first_of_each(PROGRAMS, lambda case: (case[0], case[3].partition(":")[0])),
)
def test_program(
    empty: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    program: Callable[[list[str]], object],
    words: str,
    says: str,
) -> None:
    assert says in refused(program, words.split(" "), capsys)
    assert files(empty) == {}


LONG = "x" * 300
"""No file can have this name: to look for it is an error, as it is in a folder that nobody may
enter (which root, who may run the tests, can)."""
UNUSABLE = [
    ("train", train.APP.main, "task=gpt2 tag=x data.path={}"),
    ("train", train.APP.main, "task=resnet50 tag=x data.path={}"),
    ("train", train.APP.main, "task=resnet50 tag=x resnet50.dataset=imagenet data.root={}"),
    ("train", train.APP.main, "task=ade20k tag=x data.path={}"),
    ("train", train.APP.main, "task=shapenet tag=x data.path={}"),
    ("train", train.APP.main, "task=toy tag=x init_from={}"),
    ("train", train.APP.main, "-m task=toy tag=x,y init_from={}"),
    ("sample", train.APP.main, "sample {}"),
    ("timeline", timeline.main, "{}"),
    ("prepare", tasks.prepare.__main__.main, "imagenet --archives {}"),
    ("prepare", tasks.prepare.__main__.main, "ade20k --root {}"),
    ("prepare", tasks.prepare.__main__.main, "glue --check {}"),
]


@pytest.mark.parametrize(
    ("program", "words"),
    [pytest.param(main, words, id=f"{name} {words}") for name, main, words in UNUSABLE],
)
def test_a_file_that_cannot_be_looked_at(
    empty: Path,
    capsys: pytest.CaptureFixture[str],
    program: Callable[[list[str]], object],
    words: str,
) -> None:
    line = refused(program, words.format(LONG).split(" "), capsys)
    assert line.startswith("file=") and line.endswith("File name too long; choose another")
    assert files(empty) == {}


def test_somebody_elses_file() -> None:
    with pytest.raises(FileNotFoundError):
        unusable(FileNotFoundError("a bug"))
    error = unusable(PermissionError(13, "Permission denied", "/home/ann/data"))
    mend = "choose another, or ask its owner for access"
    assert str(error) == f"file=/home/ann/data: Permission denied; {mend}"


def test_a_picture_that_cannot_be_written(
    empty: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 0, "dur": 1}
    monkeypatch.setattr(timeline, "read", lambda *_: timeline.timeline([event]))
    line = refused(timeline.main, [".", "--out", f"{__file__}/no.png"], capsys)
    assert line == f"file={__file__}: File exists; choose another"


@pytest.mark.parametrize("index", ["2", "-1", "x", "", "1e9"])
def test_job_of_a_sweep(index: str) -> None:
    with pytest.raises(ConfigError, match=r"^SLURM_ARRAY_TASK_ID=.* has the jobs 0 to 1"):
        sweep_job(index, ["co2.tau=1,2"])


FEW = ("method=local_sgd", "train.steps=4")


def in_namespaces(kinds: str, setup: str, *words: str, runs: Path) -> Run:
    """A run of the toy by an interpreter of its own, in new namespaces that root has set up."""
    outer = ["unshare", f"-r{kinds}", "sh", "-c", f'{setup} && exec "$@"', "sh"]
    if subprocess.run([*outer, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make namespaces and mounts")
    return execute([*outer, *command(*words, runs=runs)], runs)


def complaints(run: Run) -> list[str]:
    """The lines that a run which has failed says on stderr."""
    assert run.status in (1, 2) and "Traceback" not in run.err, run.err
    return run.err.removeprefix(ANNOUNCED).splitlines()


def test_no_room_for_batches(tmp_path: Path) -> None:
    """Docker gives 64 MB, in which few batches of pictures have room."""
    words = (*FEW, "toy.features=8192", "train.batch_size=128")
    small = "mount -t tmpfs -o size=2m none /dev/shm"
    run = in_namespaces("m", small, *words, "data.workers=2", runs=tmp_path / "runs")
    (line,) = complaints(run)
    assert line == (
        "error: data.workers=2: /dev/shm does not take a batch of 4.2 MB (No space left on device "
        "(28)), and each worker keeps 4 there; make it larger (docker run --shm-size=16g), or use "
        "data.workers=0"
    )


def test_sockets_have_short_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)
    long = tmp_path / ("x" * 99)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    processes.place_sockets()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(connection.arbitrary_address("AF_UNIX"))
    assert tempfile.gettempdir() == str(long), "other files go where they went"


def test_no_place_for_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setenv("TMPDIR", "/full")
    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with pytest.raises(ConfigError, match=r"^TMPDIR=/full: no socket can be made there \(No usabl"):
        processes.place_sockets()


@pytest.mark.parametrize("elastic", ["false", "true"])
def test_no_such_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elastic: str) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch")
    line, *more = complaints(cli(f"launch.elastic={elastic}", *FEW, runs=tmp_path / "runs"))
    assert line.startswith("error: worker ") and "Unable to find address for: nosuch; " in line
    assert line.endswith("in GLOO_SOCKET_IFNAME, such as lo or eth0, or unset it")
    assert len(more) == (elastic == "true"), more


def test_a_port_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as other:
        for name, value in {**TORCHRUN, "MASTER_PORT": str(other.getsockname()[1])}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(server, "LAUNCHER_VARIABLES", frozenset())
        (line,) = complaints(cli(*FEW, runs=tmp_path / "runs"))
    assert line.startswith("error: worker 0: port: ")
    assert line.endswith("EADDRINUSE; another process has this port; set another MASTER_PORT")


def test_too_few_open_files(
    empty: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))
    line = refused(train.APP.main, ["task=toy"], capsys)
    assert line == "ulimit -n=20: 2 workers need 72 open files: ulimit -n 65536"


def test_no_loopback(
    empty: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(*_: object) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    line = refused(train.APP.main, ["task=toy"], capsys)
    assert line.startswith("network=127.0.0.1: Network is unreachable; workers of this machine")


def test_nobody_can_be_told_of_a_finished_run(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        _, *words = command(*FEW, "launch.workers=1", runs=tmp_path / "runs")
        process = fork_program(words, tmp_path, environment(), full.fileno(), full.fileno())
        assert process.wait(LIMIT_S) == 0


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "me: Too many open files; raise their"),
        (OSError(errno.EIO, "Input/output error", "a/b"), "a/b: Input/output error"),
        (RuntimeError("can't start new thread"), "me: can't start new thread; raise the limit"),
        (MemoryError(), "me: MemoryError; use fewer"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), "me: DataLoader"),
        (RuntimeError("CUDA out of memory. Tried to"), "me: CUDA out of memory; use a smaller"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (OSError("a bug"), None),
    ],
)
def test_what_the_machine_does(error: Exception, line: str | None) -> None:
    found = from_outside(error, "me")
    assert found == line if found is None or line is None else found.startswith(line)


LIMITED = """
import resource, sys, train
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
if __name__ == "__main__":
    sys.exit(train.APP.main(sys.argv[1:]))
"""
"""train.py, for which no file may have more than 8 KiB."""


@pytest.mark.parametrize("elastic", ["false", "true"])
def test_no_room_for_the_model(tmp_path: Path, elastic: str) -> None:
    """One line, whoever writes, and no file that is half there."""
    words = ("toy.hidden=256", "method=local_sgd", "train.steps=24", f"launch.elastic={elastic}")
    limited = tmp_path / "limited.py"
    limited.write_text(LIMITED)
    run = cli(*words, runs=tmp_path / "runs", script=limited)
    assert run.status == 2
    (line,) = [line for line in run.err.splitlines() if "error" in line]
    assert line.startswith(f"error: {tmp_path}") and "model.pt: File too large" in line
    assert line.endswith("make room, and the same command goes on from the last checkpoint")
    assert "Traceback" not in run.err
    kept = {path.name for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    assert kept == {"config.yaml", "manifest.json", "metrics.jsonl"}


SLOW_NOTICES = """
import os, time
from co2.train import checkpoint
write = checkpoint.write_durably
def slowly(path, text):
    write(path, text)
    if path.name == "rank_1.json":
        time.sleep(1)
        os.close(os.open(path.parent, os.O_RDONLY))
checkpoint.write_durably = slowly
"""
"""The disk takes a second to confirm a name that worker 0 can read already."""


def test_a_notice_that_has_been_read_is_not_sent_again(tmp_path: Path) -> None:
    """Else it would make the folder anew that worker 0 has removed."""
    words = ("toy.hidden=256", "method=local_sgd", "train.steps=24", "checkpoint.every=8")
    limited = tmp_path / "limited.py"
    limited.write_text(SLOW_NOTICES + LIMITED)
    assert cli(*words, "launch.workers=2", runs=tmp_path / "runs", script=limited).status == 2
    assert not list((tmp_path / "runs").rglob("rank_*.json"))
