"""Runs of the toy, by the command line or inside the pool's workers, and how to compare them.

A call of `python train.py` takes seconds of imports. What needs no process of its own runs
`train.APP.work` in the pool, which is the same code from the process group on. What needs one is
forked from a process that has imported everything (`cli`, `started`). A few tests start
interpreters of their own (`execute`), because their start is what is tested.
"""

import contextlib
import io
import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import train
from co2.app.compose import preflight
from co2.config import Config
from co2.errors import PREEMPTED, REFUSED, ConfigError
from co2.record.files import whole_lines
from co2.record.folder import run_folder
from co2.train.stop import StopVote
from recipes.runs.processes import running
from tasks.toy import Toy
from tests.server import Forked, environment, fork_program
from tests.workers import Pool

ROOT = Path(train.__file__).parent
TOY = ("task=toy", "log.wandb=disabled", "launch.backend=gloo")
STORY = ("method=co2", "co2.tau=3", "train.steps=60", "train.eval_every=10", "log.every=1")
"""A run that is told in full: from round 2 on a collective is in flight at every step."""

ANNOUNCED = "importing PyTorch takes some seconds\n"
"""What an interpreter of one's own says on stderr."""

SMALL: dict[str, tuple[str, ...]] = {
    "shapenet": ("shapenet.eval_samples=32", "shapenet.svm_samples=64"),
    "gpt2": ("gpt2.eval_samples=8", "gpt2.context=32"),
    "graph": ("graph.eval_samples=64", "graph.store=diskgnn", "graph.plan=4"),
    "moe": ("moe.eval_samples=8", "moe.context=32"),
    "roberta": ("roberta.eval_samples=8",),
    "glue": ("glue.eval_samples=8", "glue.name=adjoin"),
    "transnormer": ("transnormer.eval_samples=8", "transnormer.context=32"),
}
"""What makes some steps and an evaluation quick; the smoke recipe is the rest."""
ON_TEXT = ("gpt2", "moe", "roberta", "glue", "transnormer")
"""Tasks that train on a text; all others generate their data."""

LIMIT_S = 300
"""For a process that should take seconds; a busy machine may need minutes."""
LINGER_S = 60
"""For what a process has started."""

_TIMED = ("comm_s", "exposed_s", "exposed_share", "data_share", "tokens_per_s", "samples_per_s")
_TIMED += ("train_s", "tokens_per_s_per_gpu", "samples_per_s_per_gpu", "mfu")
"""Of a line of metrics.jsonl: what depends on time."""


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    status: int
    out: str
    err: str
    runs: Path

    @property
    def folder(self) -> Path:
        """The only run folder there is."""
        (folder,) = folders(self.runs)
        return folder


def tasks_at(scale: str) -> list[str]:
    """The tasks that have a recipe at this scale."""
    recipes = ROOT / "conf" / "task" / "scale"
    return [task for task in train.APP.tasks if (recipes / f"{task}_{scale}.yaml").exists()]


def small(task: str, root: Path, text: Path) -> tuple[str, ...]:
    """Overrides that make a few steps of the task quick."""
    own = (f"data.path={text}",) if task in ON_TEXT else ()
    return (f"task={task}", f"data.root={root}", *own, *SMALL.get(task, ()))


def command(*arguments: str, runs: Path, script: Path = ROOT / "train.py") -> list[str]:
    """The command line of a run. Flags come first, or Hydra does not read the rest."""
    flags = [argument for argument in arguments if argument.startswith("-")]
    others = [argument for argument in arguments if not argument.startswith("-")]
    return [sys.executable, str(script), *flags, *_completed(others, runs)]


def _completed(arguments: Sequence[str], runs: Path) -> list[str]:
    """With what every run here has: it is of the toy, unless it names a task."""
    other = any(argument.startswith("task=") for argument in arguments)
    return [*(TOY[1:] if other else TOY), f"runs={runs}", *arguments]


def cli(
    *arguments: str, runs: Path, script: Path = ROOT / "train.py", status: int | None = 0
) -> Run:
    """`python train.py …` in the parent of `runs`, to its end, without the seconds of imports. It
    must end with `status`; None: with any.

    The process is forked from one that has imported everything; see tests/server.py.
    """
    runs.parent.mkdir(parents=True, exist_ok=True)
    _, *words = command(*arguments, runs=runs, script=script)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = fork_program(words, runs.parent, environment(), out.fileno(), err.fileno())
        try:
            found = process.wait(LIMIT_S)
            until_all_have_ended(process)
        finally:
            kill_session(process)
        texts = [file.seek(0) or file.read().decode() for file in (out, err)]
    return _ended(Run(found, *texts, runs), status)


def _ended(run: Run, status: int | None) -> Run:
    assert status in (None, run.status), f"ended with {run.status}\n{run.out}\n{run.err}"
    return run


def workers(run: "Process") -> list[int]:
    """Processes of the workers that a run has now, in the order of their numbers: the children of
    that child of the run which forks them."""
    found = list(running())
    children = {one.pid for one in found if one.parent == run.pid}
    return sorted(one.pid for one in found if one.parent in children)


def execute(
    words: list[str], runs: Path, env: dict[str, str] | None = None, status: int | None = 0
) -> Run:
    """Any command, in the parent of `runs`, by an interpreter of its own; `status` as in `cli`."""
    runs.parent.mkdir(parents=True, exist_ok=True)
    given = {"cwd": runs.parent, "env": env or environment(), "timeout": LIMIT_S}
    ended = subprocess.run(words, capture_output=True, text=True, **given)
    return _ended(Run(ended.returncode, ended.stdout, ended.stderr, runs), status)


@contextlib.contextmanager
def started(
    *arguments: str, runs: Path, log: Path, interpreter: bool = False
) -> Iterator["Process"]:
    """`train.py`, still running, in a session of its own; afterwards nothing of it is left.

    Args:
        interpreter: start a new one, where its start is part of the test.
    """
    words = command(*arguments, runs=runs)
    process: Process
    if interpreter:
        process = in_a_session(words, runs.parent, log)
    else:
        with log.open("w") as file:
            out = file.fileno()
            process = fork_program(words[1:], runs.parent, environment(), out, out)
    try:
        yield process
    finally:
        kill_session(process)
        process.wait()


def in_a_session(words: list[str], place: Path, log: Path) -> subprocess.Popen:
    """Any command by an interpreter of its own, in a session of its own, still running."""
    with log.open("w") as file:
        given = {"cwd": place, "env": environment(), "stdout": file, "stderr": subprocess.STDOUT}
        return subprocess.Popen(words, start_new_session=True, **given)


def interrupted(
    *arguments: str,
    runs: Path,
    when: Callable[[Path], bool],
    act: Callable[["Process"], object],
    status: int | None,
    interpreter: bool = False,
) -> Run:
    """A run to which something is done: `act(process)`, once `when(folder)` holds. It is waited
    for, and must end with `status`; None: with any. All that it has printed is in `out`."""
    log, folder = runs.with_name("log"), folder_of(*arguments, runs=runs)
    with started(*arguments, runs=runs, log=log, interpreter=interpreter) as process:
        until(lambda: when(folder), process)
        act(process)
        found = process.wait(LIMIT_S)
    return _ended(Run(found, log.read_text(), "", runs), status)


def trained(step: int) -> Callable[[Path], bool]:
    """For `interrupted`: a line of metrics tells of this step."""
    return lambda folder: last_step(folder) >= step


def last_step(folder: Path) -> int:
    """That metrics.jsonl tells of; 0 where it tells of none."""
    lines = metrics(folder)
    return lines[-1]["step"] if lines else 0


def signalled(number: int) -> Callable[["Process"], object]:
    """For `interrupted`: train.py itself gets a signal."""
    return lambda process: os.kill(process.pid, number)


def workers_killed(process: "Process") -> None:
    """For `interrupted`: all workers are killed. Some may be gone, with a sibling."""
    for pid in workers(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def spied(folder: Path) -> dict[str, str]:
    """Variables that make every Python process started with them leave a line in `folder`."""
    folder.mkdir()
    line = "import os; open(os.environ['SPY'], 'a').write(f'{os.getpid()}\\n')\n"
    (folder / "sitecustomize.py").write_text(line)
    return {"PYTHONPATH": str(folder), "SPY": str(folder / "seen")}


def started_processes(folder: Path) -> int:
    """Python processes that were started with `spied(folder)`."""
    return len((folder / "seen").read_text().splitlines())


TRAPS = ("co2", "multiprocessing", "numpy", "tasks", "torch", "train")


def lay_traps(here: Path) -> None:
    """Modules with the names of others in a folder where a user stands. Nobody is to run them: they
    make a file `ran` there."""
    for name in TRAPS:
        (here / name).mkdir(parents=True)
        (here / name / "__init__.py").write_text(f"open({str(here / 'ran')!r}, 'a')")


@contextlib.contextmanager
def held_port() -> Iterator[str]:
    """A port for a server of another process. It stays bound here, so that nobody else gets it
    before that server, which binds it with SO_REUSEADDR as well."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield str(held.getsockname()[1])


Process = subprocess.Popen | Forked


def kill_session(process: Process) -> None:
    """SIGKILL to the process and to every worker that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def side_by_side(
    words: list[str], place: Path, environments: list[dict[str, str]], status: int = 0
) -> list[str]:
    """What the workers of a launcher print, a process for each of these environments. Their store
    gets a port. All must end with the status."""
    logs = [place / f"log_{rank}" for rank in range(len(environments))]
    tasks = []
    with held_port() as port:
        for own, log in zip(environments, logs, strict=True):
            with log.open("w") as file:
                env, out = environment(**own, MASTER_PORT=port), file.fileno()
                tasks.append(fork_program(words, place, env, out, out))
        try:
            statuses = [task.wait(LIMIT_S) for task in tasks]
        finally:
            for task in tasks:
                task.kill()
    texts = [log.read_text() for log in logs]
    assert statuses == [status] * len(environments), texts
    return texts


def as_tasks(words: list[str], place: Path, status: int = 0) -> list[str]:
    """What two tasks of srun print that run these words; see `side_by_side`."""
    shared = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}
    shared["MASTER_ADDR"] = "127.0.0.1"
    ranks = [{"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in ("0", "1")]
    return side_by_side(words, place, [shared | rank for rank in ranks], status)


def alive(session: int) -> bool:
    """Whether any process of the session still runs."""
    return any(one.session == session for one in running())


def until_all_have_ended(process: Process) -> None:
    """Wait for what it has started: Python's helpers end when they see that all others are gone."""
    deadline = time.monotonic() + LINGER_S
    while alive(process.pid):
        assert time.monotonic() < deadline, "a process outlives the run that started it"
        time.sleep(0.01)


def until(condition: Callable[[], bool], process: Process, limit_s: float = LIMIT_S) -> None:
    """Wait until the condition holds, which must be before the process ends."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, f"ended with status {process.returncode}"
        assert time.monotonic() < deadline, f"waited for {limit_s:g} s"
        time.sleep(0.01)


def configured(*arguments: str, runs: Path) -> Config:
    """The configuration that a command line makes. Raises `ConfigError`, as train.py would."""
    words = _completed(arguments, runs)
    (config,) = preflight(train.APP.conf, words, train.APP.validate)
    return config


def pooled(
    workers: Pool,
    world: int,
    *arguments: str,
    runs: Path,
    setup: Callable[..., AbstractContextManager] = contextlib.nullcontext,
    setup_arguments: tuple[Any, ...] = (),
    stop_at: int | None = None,
    fresh: bool = False,
    status: int | None = 0,
) -> Run:
    """A run in the pool's workers: the status of all of them and what they have printed.

    Args:
        setup: of a module; `setup(*setup_arguments)` is entered in every worker.
        stop_at: the step after which all are told to stop; its status is PREEMPTED.
        fresh: stands for resume=never.
        status: with which it must end; None: with any.
    """
    if stop_at is not None:
        setup, setup_arguments = stopped_after, (stop_at,)
    if setup is stopped_after:
        status = PREEMPTED
    resume = ("resume=never",) if fresh else ()
    config = configured(*arguments, *resume, f"launch.workers={world}", runs=runs)
    ended = workers.run(_work, world, config, setup, setup_arguments)
    assert len({status for status, _, _ in ended}) == 1, ended
    texts = ("".join(said) for said in list(zip(*ended, strict=True))[1:])
    return _ended(Run(ended[0][0], *texts, runs), status)


def _work(
    rank: int, world: int, config: Config, setup: Callable[..., Any], arguments: tuple
) -> tuple[int, str, str]:
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        with setup(*arguments):
            try:
                train.APP.work(config)
            except SystemExit as ended:
                status = ended.code if isinstance(ended.code, int) else 1
            except ConfigError as error:
                status = REFUSED
                print(f"error: {error}", file=sys.stderr)
            finally:
                torch.set_float32_matmul_precision("highest")  # a run on a GPU has changed it
    return status, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def stopped_after(step: int) -> Iterator[None]:
    """Setup: all workers find, after a step, that they are told to stop."""
    with patch.object(StopVote, "__call__", lambda _, done: done == step):
        yield


@contextlib.contextmanager
def with_losses(change: Callable[[Tensor, int], Tensor]) -> Iterator[None]:
    """Setup: `change(value, call)` takes the place of the toy's loss; calls are counted from 1."""
    original, calls = Toy.loss, itertools.count(1)

    def loss(task: Toy, *arguments: Any) -> Tensor:
        return change(original(task, *arguments), next(calls))

    with patch.object(Toy, "loss", loss):
        yield


def folders(runs: Path) -> list[Path]:
    """Every run folder under `runs`."""
    return sorted(path for path in runs.glob("*/*/*/*") if path.is_dir())


def folder_of(*arguments: str, runs: Path) -> Path:
    """Where a command line of the toy keeps its run."""
    return run_folder(configured(*arguments, runs=runs))


def metrics(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; of a run that may still write, the whole ones."""
    return [line for line in whole_lines(folder / "metrics.jsonl") if kind in (None, line["kind"])]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def saved_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints, ascending."""
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*"))


def story(folder: Path) -> list[dict[str, Any]]:
    """What a run's metrics tell apart from times; every step is told once."""
    lines = [
        {key: value for key, value in line.items() if key not in _TIMED} for line in metrics(folder)
    ]
    told = [(line["kind"], line["step"]) for line in lines]
    assert len(set(told)) == len(told), "a step is told twice"
    assert [step for _, step in told] == sorted(step for _, step in told)
    return lines


def weights(folder: Path) -> dict[str, Tensor]:
    """The final consensus."""
    return torch.load(folder / "model.pt", weights_only=True)


def assert_same_weights(one: Path, other: Path) -> None:
    """The weights in two run folders are the same bits, those of a moving average, too."""
    names = sorted(path.name for path in one.glob("*.pt"))
    assert "model.pt" in names and names == sorted(path.name for path in other.glob("*.pt"))
    for name in names:
        first, second = (torch.load(folder / name, weights_only=True) for folder in (one, other))
        assert first.keys() == second.keys()
        for key, value in first.items():
            assert value.dtype == second[key].dtype and torch.equal(value, second[key]), key


def assert_same_run(one: Path, other: Path) -> None:
    """Every loss, evaluation, learning rate and final weight is the same, bit for bit."""
    assert story(one) == story(other)
    assert_same_weights(one, other)
    first, second = summary(one), summary(other)
    assert first["final"] == second["final"] and first["steps"] == second["steps"]


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and time of change of every file below a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in files
    }


MARK = "executed"
"""Folder that a payload makes where it is run."""


class Payload:
    """An object whose pickle makes a folder when it is loaded without care."""

    def __init__(self, folder: Path) -> None:
        self.mark = folder / MARK

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.mark,)


def pickled(folder: Path) -> bytes:
    """A pickle that makes the mark in `folder`."""
    return pickle.dumps(Payload(folder))


def tagged(folder: Path) -> str:
    """A YAML value that makes the mark in `folder`."""
    return f"!!python/object/apply:os.mkdir [{folder / MARK}]"


def files(folder: Path) -> dict[str, bytes]:
    """Every file and folder below a folder; what is a link is not followed."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
        if not path.is_fifo()
    }


def refused(program: Callable[[list[str]], object], words: list[str]) -> str:
    """What a program says of a command line: one line after `error: `, with status 2."""
    out, err = io.StringIO(), io.StringIO()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", UserWarning)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = program(words)
            except SystemExit as ended:
                status = ended.code
    shown = [found for found in warned if issubclass(found.category, UserWarning)]
    assert shown == [], "which a person would see as well"
    assert status == REFUSED and out.getvalue() == "", (status, out.getvalue(), err.getvalue())
    (line,) = err.getvalue().splitlines()
    assert line.startswith("error: ") and line.isprintable()
    return line.removeprefix("error: ")
