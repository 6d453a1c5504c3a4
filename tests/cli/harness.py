"""Runs of the toy, by the command line or inside the pool's workers, and how to compare them.

A call of `python train.py` takes seconds of imports. What needs no process of its own runs
`train.APP.work` in the pool, which is the same code from the process group on. What needs one is
forked from a process that has imported everything (`cli`, `started`). A few tests start
interpreters of their own (`execute`), because their start is what is tested.
"""

import contextlib
import io
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

import pytest
import torch
from torch import Tensor

import train
from co2.app.compose import preflight
from co2.config import Config
from co2.errors import REFUSED, ConfigError
from co2.record.files import whole_lines
from co2.record.folder import run_folder
from co2.train.stop import StopVote
from recipes.runs.processes import running
from tests.server import Forked, environment, fork_program
from tests.workers import Pool

ROOT = Path(train.__file__).parent
TOY = ("task=toy", "log.wandb=disabled", "launch.backend=gloo")
STORY = (
    "method=co2",
    "co2.tau=3",
    "train.steps=60",
    "train.eval_every=10",
    "log.every=1",
)
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
"""For what a process has started: Python's helpers end when they see that all others are gone."""

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


def cli(*arguments: str, runs: Path, script: Path = ROOT / "train.py") -> Run:
    """`python train.py …` in the parent of `runs`, to its end, without the seconds of imports.

    The process is forked from one that has imported everything; see tests/server.py.
    """
    runs.parent.mkdir(parents=True, exist_ok=True)
    _, *words = command(*arguments, runs=runs, script=script)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = fork_program(words, runs.parent, environment(), out.fileno(), err.fileno())
        try:
            status = process.wait(LIMIT_S)
            deadline = time.monotonic() + LINGER_S
            while alive(process.pid):
                assert time.monotonic() < deadline, "a process outlives the run that started it"
                time.sleep(0.01)
        finally:
            kill_session(process)
        texts = [file.seek(0) or file.read().decode() for file in (out, err)]
    return Run(status, *texts, runs)


def workers(run: "Process") -> list[int]:
    """Processes of the workers that a run has now, in the order of their numbers: the children of
    that child of the run which forks them."""
    found = list(running())
    children = {one.pid for one in found if one.parent == run.pid}
    return sorted(one.pid for one in found if one.parent in children)


def execute(words: list[str], runs: Path, env: dict[str, str] | None = None) -> Run:
    """Any command, in the parent of `runs`, by an interpreter of its own."""
    runs.parent.mkdir(parents=True, exist_ok=True)
    ended = subprocess.run(
        words,
        cwd=runs.parent,
        env=env or environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return Run(ended.returncode, ended.stdout, ended.stderr, runs)


@contextlib.contextmanager
def started(
    *arguments: str, runs: Path, log: Path, interpreter: bool = False
) -> Iterator["Process"]:
    """The same, still running, in a session of its own; afterwards nothing of it is left.

    Args:
        interpreter: start a new one, where its start is part of the test.
    """
    words, env = command(*arguments, runs=runs), environment()
    process: Process
    with log.open("w") as file:
        if interpreter:
            process = subprocess.Popen(
                words,
                cwd=runs.parent,
                env=env,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        else:
            process = fork_program(words[1:], runs.parent, env, file.fileno(), file.fileno())
    try:
        yield process
    finally:
        kill_session(process)
        process.wait()


def spied(folder: Path) -> dict[str, str]:
    """Variables that make every Python process started with them leave a line in `folder`."""
    folder.mkdir()
    line = "import os; open(os.environ['SPY'], 'a').write(f'{os.getpid()}\\n')\n"
    (folder / "sitecustomize.py").write_text(line)
    return {"PYTHONPATH": str(folder), "SPY": str(folder / "seen")}


def started_processes(folder: Path) -> int:
    """Python processes that were started with `spied(folder)`."""
    return len((folder / "seen").read_text().splitlines())


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


def side_by_side(words: list[str], place: Path, environments: list[dict[str, str]]) -> list[str]:
    """What the workers of a launcher print, a process for each of these environments. Their store
    gets a port. All must end well."""
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
    assert statuses == [0] * len(environments), texts
    return texts


def alive(session: int) -> bool:
    """Whether any process of the session still runs."""
    return any(one.session == session for one in running())


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
    fresh: bool = False,
) -> Run:
    """A run in the pool's workers: worker 0's status and what all have printed.

    `setup(*setup_arguments)`, of a module, is entered in every worker; `fresh` stands for
    resume=never.
    """
    resume = ("resume=never",) if fresh else ()
    config = configured(*arguments, *resume, f"launch.workers={world}", runs=runs)
    ended = workers.run(_work, world, config, setup, setup_arguments)
    assert len({status for status, _, _ in ended}) == 1, ended
    return Run(ended[0][0], "".join(o for _, o, _ in ended), "".join(e for *_, e in ended), runs)


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


def folders(runs: Path) -> list[Path]:
    """Every run folder under `runs`."""
    return sorted(path for path in runs.glob("*/*/*/*") if path.is_dir())


def folder_of(*arguments: str, runs: Path) -> Path:
    """Where a command line of the toy keeps its run."""
    return run_folder(configured(*arguments, runs=runs))


def metrics(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; of a run that may still write, the whole ones."""
    return [line for line in whole_lines(folder / "metrics.jsonl") if kind in (None, line["kind"])]


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
    """model.pt of two run folders holds the same bits."""
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype, name
        assert torch.equal(value, second[name]), name


def assert_same_run(one: Path, other: Path) -> None:
    """Every loss, evaluation, learning rate and final weight is the same, bit for bit."""
    assert story(one) == story(other)
    assert_same_weights(one, other)
    first, second = (json.loads((folder / "summary.json").read_text()) for folder in (one, other))
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


def refused(
    program: Callable[[list[str]], object], words: list[str], capsys: pytest.CaptureFixture[str]
) -> str:
    """What a program says of a command line: one line after `error: `, with status 2."""
    capsys.readouterr()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", UserWarning)
        try:
            status = program(words)
        except SystemExit as ended:
            status = ended.code
    shown = [found for found in warned if issubclass(found.category, UserWarning)]
    assert shown == [], "which a person would see as well"
    printed = capsys.readouterr()
    assert status == REFUSED, printed
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ") and line.isprintable()
    return line.removeprefix("error: ")
