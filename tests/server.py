"""A process that has imported torch and the suite once, and forks other processes from itself.

A new interpreter needs three to five seconds of CPU time for these imports, which is more than most
tests take. The pool's workers (tests/workers.py) and the programs of the end-to-end tests
(tests/cli/harness.py) are therefore forked from one server, which lives as long as the session. A
forked program runs `train.py` as the command line would: its arguments, environment, folder, output
and session are its own, and the exit status is the interpreter's. Only the fork server of its local
workers is forked, too, where the launcher would start one that imports everything again.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import multiprocessing.context
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
PRELOADED = [
    "torch._dynamo",  # imported by every optimizer at its first use
    "torch.nn.parallel",
    "torch.distributed.checkpoint",
    "torch.distributed.launcher.api",
    "tests.cli.harness",  # train.py and all that it imports
]
"""Modules that the server imports; what is appended before its start counts too."""
TASK_LIBRARIES = (
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.roberta.modeling_roberta",
    "timm",
    "sklearn.svm",
)
"""What only the tasks with real models need: about four more seconds."""
LAUNCHER_VARIABLES = frozenset(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
)
_SHARED = "TESTS_SERVER"
_LARGEST_REQUEST = 1 << 20


def environment(**more: str) -> dict[str, str]:
    """This process's environment, as if no launcher had started it, with `more`."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in LAUNCHER_VARIABLES and not key.startswith(("SLURM_", "WANDB_"))
    }
    # A single worker would use every core, which makes tiny models crawl on a busy machine. A
    # narrow console would fold the paths that tests look for.
    # The server of forked processes must not start CUDA, as a library that it imports would.
    own = {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    return {**kept, **own, **more}


class Forked:
    """A process that the server has forked, with the methods of `subprocess.Popen` used here."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._replies = connection.makefile("r")
        self.pid = int(self._replies.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs."""
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self._read_status()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0.0)
            self._read_status()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _read_status(self) -> None:
        line = self._replies.readline()
        assert line, "the server of forked processes is gone"
        self.returncode = int(line)
        self._replies.close()
        self._connection.close()


class Server:
    """The client's side.

    Args:
        pid: the server's process.
        address: of its socket.
        own: what ends with this process, if the server is its own.
    """

    def __init__(self, pid: int, address: str, *own: object) -> None:
        self._pid, self._address, self._own = pid, address, own

    @classmethod
    def start(cls, modules: Iterable[str]) -> "Server":
        """A server of one's own. It ends when this process closes its pipe or dies."""
        folder = tempfile.TemporaryDirectory()
        address = f"{folder.name}/socket"
        process = subprocess.Popen(
            [sys.executable, __file__, address, *modules],
            cwd=ROOT,
            env=environment(JE_ARROW_MALLOC_CONF="background_thread:false"),
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the tests, which then close the pipe
        )
        return cls(process.pid, address, process, folder)

    def share(self) -> None:
        """Have the processes that this one starts use this server as well."""
        os.environ[_SHARED] = f"{self._pid}:{self._address}"

    @classmethod
    def shared(cls) -> "Server | None":
        """The server of the process that has started this one."""
        pid, _, address = os.environ.get(_SHARED, "").partition(":")
        return cls(int(pid), address) if pid else None

    def fork(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> Forked:
        """Send a request (see `_answer`) with open files; return the new process."""
        from recipes.runs.processes import is_running  # not above: this file is a program, too

        connection = socket.socket(socket.AF_UNIX)
        while True:
            try:
                connection.connect(self._address)
                break
            except (FileNotFoundError, ConnectionRefusedError):
                assert is_running(self._pid), "the server of forked processes has failed"
                time.sleep(0.01)
        message = json.dumps(request).encode()
        assert len(message) < _LARGEST_REQUEST
        socket.send_fds(connection, [message], list(descriptors))
        connection.shutdown(socket.SHUT_WR)
        return Forked(connection)


@functools.cache
def server() -> Server:
    """The server of this session, started at its first use unless it is shared."""
    return Server.shared() or Server.start(PRELOADED)


def fork_function(name: str, *descriptors: int) -> Forked:
    """A process that calls `name`, as module:function, with the descriptors of open files."""
    return server().fork({"function": name}, descriptors)


def fork_program(
    words: Sequence[str], cwd: Path, env: Mapping[str, str], out: int, err: int
) -> Forked:
    """A process that runs a script of Python as `python script arguments` would.

    Args:
        words: the script and its arguments.
        cwd, env: its working folder and its whole environment.
        out, err: descriptors of the open files that its output goes to.
    """
    request = {"program": list(words), "cwd": str(cwd), "env": dict(env)}
    return server().fork(request, [out, err])


def _serve(address: str) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for every request, and tell the client its process id and exit status.

    Returns:
        The request and its open files, in the forked process alone. The server never returns.
    """
    waker, wake = os.pipe()
    for descriptor in (waker, wake):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    clients: dict[int, socket.socket] = {}
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    while True:
        ready, _, _ = select.select([listener, waker, sys.stdin], [], [])
        if sys.stdin in ready:
            os._exit(0)
        if waker in ready:
            os.read(waker, 4096)
        for pid, status in _ended():
            client = clients.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                client.sendall(f"{status}\n".encode())
            client.close()
        if listener in ready:
            client, _ = listener.accept()
            message, descriptors, _, _ = socket.recv_fds(client, _LARGEST_REQUEST, 4)
            while part := client.recv(_LARGEST_REQUEST):
                message += part
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGHUP, signal.SIG_DFL)  # not as under nohup
                os.setsid()  # before the client knows the process, and may kill its session
                client.sendall(f"{os.getpid()}\n".encode())
                for other in (client, listener, *clients.values()):
                    other.close()
                os.close(waker)
                os.close(wake)
                return json.loads(message), descriptors
            for descriptor in descriptors:
                os.close(descriptor)
            clients[pid] = client


def _ended() -> Iterable[tuple[int, int]]:
    """Process ids and exit statuses of the children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found[0], os.waitstatus_to_exitcode(found[1])


def _share_media_folder(folder: str) -> None:
    """W&B, which timm imports, makes a folder for what it is about to log as it is imported, and
    removes it as the process ends. Forked processes would take it from each other: they share one
    that lasts as long as the server."""
    private = sys.modules.get("wandb.sdk.data_types._private")
    if private is not None:
        atexit.unregister(private.MEDIA_TMP.cleanup)
        private.MEDIA_TMP.cleanup()
        private.MEDIA_TMP.name = folder


def _answer(request: dict[str, Any], descriptors: list[int]) -> None:
    """What a forked process does: a function of a module, or a program."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    if "function" in request:
        module, _, name = request["function"].partition(":")
        getattr(importlib.import_module(module), name)(*descriptors)
        return
    for target, descriptor in enumerate(descriptors, start=1):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    _serve_forks()
    script, *_ = sys.argv = request["program"]
    sys.path[0] = str(Path(script).parent)
    # Not by runpy: its frames have no file, and for each of them torch's launcher, which asks many
    # times who called it, looks through all modules. That took a second of every run.
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    code = compile(Path(script).read_bytes(), script, "exec")
    contexts = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    contexts["spawn"] = contexts["forkserver"]
    _end(functools.partial(exec, code, main.__dict__))


def _serve_forks() -> None:
    """Start the fork server that the launcher will ask for, by a fork: it has imported everything.

    It is forked now, because the launcher's store has threads. What is forked from a process with
    threads hangs where one of them held a lock, such as that of C++'s exceptions.
    """
    from co2.start import processes  # imported long ago; the server itself starts without it

    server = forkserver._forkserver  # type: ignore[attr-defined]
    address = connection.arbitrary_address("AF_UNIX")
    alive, until_closed = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        pid = os.fork()
        if pid == 0:
            os.close(until_closed)
            # The launcher starts its own with these blocked, until workers train.
            signal.pthread_sigmask(signal.SIG_BLOCK, processes.STOP_SIGNALS)
            with contextlib.suppress(SystemExit):  # its end, when the program has ended
                forkserver.main(listener.fileno(), alive, [])
            os._exit(0)
    os.close(alive)
    server._forkserver_address, server._forkserver_pid = address, pid
    server._forkserver_alive_fd = until_closed
    # What tracks semaphores is an interpreter, which would take longer to start than most tests.
    resource_tracker._resource_tracker._fd = os.open(os.devnull, os.O_WRONLY)


def _end(program: Callable[[], object]) -> NoReturn:
    """Run a program and end as the interpreter would, but for taking all its modules apart: to
    touch each object that was imported takes a second."""
    status: str | int | None = 1
    try:
        program()
        status = 0
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    if isinstance(status, str):
        print(status, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


if __name__ == "__main__":
    _, address, *modules = sys.argv
    sys.path[0] = str(ROOT)
    for module in modules:
        importlib.import_module(module)
    _share_media_folder(os.path.dirname(address))
    # A lock that another thread holds at the fork is held for ever in the forked process. pyarrow's
    # allocator has such a thread, unless its environment says otherwise.
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
    gc.collect()
    gc.freeze()  # the collector of a forked process need not touch, and so copy, these pages
    _answer(*_serve(address))
