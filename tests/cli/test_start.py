"""How programs start, print and end: with the wrong Python, after Ctrl-C, and where nobody reads.

Most are interpreters without site-packages (`-S`), which start in a moment and find no package.
"""

import ast
import os
import pty
import shlex
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import co2.__main__
import train
from co2 import program
from co2.app.compose import preflight
from co2.errors import PREEMPTED, ConfigError
from co2.start import launch, processes
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
    folders,
    kill_session,
    saved_steps,
    until,
)
from tests.cli.test_resume import last_step
from tests.server import Forked, environment, fork_program

RUNS = "import atexit, os, signal, sys\nfrom co2 import program\n"


def bare(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    """A Python that has the suite, and nothing that it needs."""
    env = environment(PYTHONPATH=str(options.pop("path", "")))
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    command = [sys.executable, "-S", *words]
    return subprocess.run(command, cwd=ROOT, env=env, text=True, timeout=LIMIT_S, **given)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(
    "words",
    [
        "train.py --help",
        "-m co2.lab",
        "-m co2.simulate",
        "-m recipes list",
        "-m tasks.prepare imagenet",
    ],
)
def test_a_python_without_packages(words: str) -> None:
    ended = bare(*words.split())
    assert ended.returncode == 2 and ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ") and f" is missing in {sys.executable}; " in line
    assert "install" in line


def test_help_needs_no_package() -> None:
    assert "usage: co2" in bare("-m", "co2", "--help").stdout


def test_the_python_that_has_the_packages_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setattr(program, "_ROOT", tmp_path)
    monkeypatch.setattr(program, "safe_path", lambda: None)  # for this process's own children
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for folder, name in ((tmp_path, ".venv/bin/python"), (elsewhere, str(python))):
        monkeypatch.chdir(folder)
        with pytest.raises(SystemExit, match="2"), program.starting("__main__"):
            raise ModuleNotFoundError(name="hydra.core")
        line = f"error: hydra is missing in {sys.executable}; use {name}\n"
        assert capsys.readouterr().err == line
    with pytest.raises(ModuleNotFoundError), program.starting("__main__"):
        raise ModuleNotFoundError(name="co2.nothing")  # a bug


def test_an_old_python(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 8, 18))
    monkeypatch.setattr(program, "safe_path", lambda: None)
    with pytest.raises(SystemExit, match="2"), program.starting("__main__"):
        pytest.fail("goes on")
    assert "this is Python 3.8, and 3.11 or newer is needed" in capsys.readouterr().err


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
    """A folder where a user may stand: modules with the names of others, which nobody is to run."""
    here = tmp_path / "here"
    for name in ("co2", "multiprocessing", "numpy", "tasks", "torch", "train"):
        (here / name).mkdir(parents=True)
        (here / name / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a')")
    yield here
    assert not (tmp_path / "ran").exists(), "a module of the current folder was run"


def test_what_lies_where_the_user_stands_is_not_run(traps: Path) -> None:
    words = ("method=local_sgd", "train.steps=4", "data.workers=1")
    ended = execute(command(*TOY, *words, runs=traps / "runs"), traps / "runs")
    assert ended.status == 0, ended.err
    assert "Traceback" not in ended.err  # of Python's helpers


def test_a_script_of_ones_own_has_its_modules(traps: Path, tmp_path: Path) -> None:
    """And the replicas that `co2.run` starts have them; not its current folder's."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "helper.py").write_text("def train(mesh):\n    return mesh.replica")
    line = "import co2, helper; print(co2.run(helper.train, replicas=2, device='cpu'))"
    (own / "script.py").write_text(line)
    ended = execute([sys.executable, str(own / "script.py")], traps / "runs")
    assert (ended.status, ended.out) == (0, "[0, 1]\n"), ended.err


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


@contextmanager
def closed_pipe() -> Iterator[int]:
    """The end of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@contextmanager
def closed_terminal() -> Iterator[int]:
    master, slave = pty.openpty()
    os.close(master)
    yield slave
    os.close(slave)


@pytest.mark.parametrize("closed", [closed_pipe, closed_terminal])
def test_nobody_reads(closed) -> None:  # type: ignore[no-untyped-def]
    with closed() as out:
        script = "program.run(lambda: [print('x' * 99) for _ in range(999)] and 0)"
        ended = bare("-c", RUNS + script, stdout=out)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_help_that_nobody_reads(tmp_path: Path) -> None:
    with closed_pipe() as out, (tmp_path / "err").open("w") as err:
        words = [str(ROOT / "train.py"), "--help"]
        process = fork_program(words, tmp_path, environment(), out, err.fileno())
        assert process.wait(LIMIT_S) == 0
    assert (tmp_path / "err").read_text() == ""


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever worker is the first to end; one of them prints the line."""
    failures = {}
    monkeypatch.setattr(launch, "_PEER_S", 0.0)
    for rank in range(2):
        path = tmp_path / f"{rank}.json"
        given = {"RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_ERROR_FILE": str(path)}
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        assert train.APP.main(["task=toy", "co2.tua=3"]) == 2
        failures[rank] = ProcessFailure(rank, 99, 2, str(path))
    reason = "error: co2.tua=3: unknown key; did you mean co2.tau?"
    assert capsys.readouterr().err == reason + "\n"
    report = str(ChildFailedError("train.py", failures))
    assert report.count(f"  traceback : {reason}\n") == 2


def test_workers_that_torchrun_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "run", lambda *_: 1)
    words = [*TOY, "method=local_sgd", f"runs={tmp_path}"]
    said = "launch.workers=2 is ignored: torchrun or srun has started 1\n"
    for more, expected in ((["launch.workers=2"], said), (["launch.workers=1"], ""), ([], "")):
        assert train.APP.main([*words, *more]) == 1
        assert capsys.readouterr().err == expected


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for main in (train.APP.main, co2.__main__.main):
        assert main(["--version"]) == 0
        assert capsys.readouterr().out == f"{project['name']} {project['version']}\n"


@pytest.mark.parametrize("words", ["tag=Größe", "tag=my run", "tag=my Größe", "tag=a{b$"])
def test_the_quotes_that_a_refusal_names(words: str) -> None:
    given = ["task=toy", *words.split()]
    with pytest.raises(ConfigError) as refused:
        preflight(train.APP.conf, given, lambda v, _: v["tag"])
    *_, named = refused.value.hint.partition(": ")
    (word,) = shlex.split(named)
    found = preflight(train.APP.conf, ["task=toy", word], lambda v, _: v["tag"])
    assert found == [words.removeprefix("tag=")]


class TestWhatToTryNext:
    """Another method with the same settings, so that the comparison is fair."""

    def words(self, *arguments: str, runs: Path) -> list[str]:
        given = ["task=toy", "launch.backend=gloo", f"runs={runs}", *arguments]
        found = train.APP.next_command(configured(*given[1:], runs=runs), given)
        assert found is not None
        python, script, *words = shlex.split(found)
        if script == "-m":
            assert words[:2] == ["co2", "train"]
            words = words[2:]
        assert python == program.python()
        assert preflight(train.APP.conf, words, train.APP.validate)
        return words

    def test_the_baseline(self, tmp_path: Path) -> None:
        runs = tmp_path / "my runs"
        own = ("method=co2", "co2.tau=3", "tag=mine", "resume=never")
        words = self.words(*own, "train.steps=40", "optim.lr=0.2", runs=runs)
        same = ["task=toy", "launch.backend=gloo", f"runs={runs}", "train.steps=40", "optim.lr=0.2"]
        assert words == [*same, "method=allreduce"]

    def test_what_it_refuses_is_left_out(self, tmp_path: Path) -> None:
        words = self.words("method=co2", "comm.device=cpu", "train.steps=40", runs=tmp_path)
        assert "comm.device=cpu" not in words and "train.steps=40" in words

    def test_after_the_baseline(self, tmp_path: Path) -> None:
        words = self.words("method=allreduce", "train.steps=60", runs=tmp_path)
        assert words[0] == "-m" and words[-3:] == ["train.steps=60", "method=co2", words[-1]]

    def test_it_runs_in_this_python(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for folder, script in ((ROOT, "train.py"), (tmp_path, "-m co2 train")):
            monkeypatch.chdir(folder)
            config = configured("method=co2", runs=tmp_path / "runs")
            found = train.APP.next_command(config, ["task=toy"])
            assert found == f"{program.python()} {script} task=toy method=allreduce"
        monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
        assert program.python() == "bin/python"
        assert not folders(tmp_path / "runs")
