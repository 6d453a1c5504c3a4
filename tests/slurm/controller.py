"""A SLURM of one's own: munged, slurmctld and two slurmd, in a private folder, on private ports."""

import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cli.harness import ROOT
from tests.server import environment

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "setpriv")
SEARCHED = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
"""Debian keeps daemons where only root's PATH leads."""

NODES = ("127.0.0.1", "127.0.0.2")
"""Names under which their workers can be reached."""

LIMIT_S = 120
"""For a state that a job should reach within seconds."""

_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}

# Fewer plugins work in more places: no cgroups, no binding, as many CPUs as the tests want.
_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={place}/munge.socket
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool.%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.%n.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
SlurmdParameters=config_overrides
ReturnToService=0
MpiDefault=none
JobRequeue=1
KillWait=10
MinJobAge=600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=ALL Default=YES MaxTime=60 DefaultTime=60 PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL MaxTime=60 PriorityTier=9 PreemptMode=OFF
"""
_NODE = "NodeName={name} NodeHostname={host} NodeAddr={name} Port={port} CPUs=2 RealMemory=1000\n"


def missing() -> list[str]:
    """What of SLURM is not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=SEARCHED) is None]


class Slurm:
    """A running controller with two nodes of 2 CPUs and two partitions, `low` and `high`; jobs of
    `high` preempt those of `low`.

    Args:
        place: a folder of its own, whose path is short: it holds a socket.
    """

    def __init__(self, place: Path) -> None:
        self.place, self.conf = place, place / "slurm.conf"
        self.env = environment(
            SLURM_CONF=str(self.conf),
            # Jobs find this Python as `python`.
            PATH=os.pathsep.join((str(Path(sys.executable).parent), SEARCHED)),
        )

    def sbatch(self, *words: str, log: Path) -> "Job":
        """Submit from the repository's root; what the job says is added to `log`."""
        number = self.call("sbatch", "--parsable", f"--output={log}", *words)
        return Job(self, number, log)

    def call(self, *words: str) -> str:
        """Any command of SLURM; what it says."""
        ended = subprocess.run(
            words, cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert ended.returncode == 0, f"{' '.join(words)}: {ended.stderr}"
        return ended.stdout.strip()

    def logs(self) -> str:
        """The last lines of what its daemons wrote."""
        paths = sorted(self.place.glob("slurm*.log"))
        return "\n".join("\n".join(path.read_text().splitlines()[-20:]) for path in paths)


@dataclass(frozen=True)
class Job:
    """A job, by its number; `12_3` is one task of an array."""

    slurm: Slurm
    number: str
    log: Path

    @property
    def shown(self) -> dict[str, str]:
        """What the controller knows of it, e.g. JobState, ExitCode, Restarts."""
        text = self.slurm.call("scontrol", "show", "job", "--oneliner", self.number)
        return dict(re.findall(r"(\w+)=(\S+)", text))

    @property
    def said(self) -> str:
        """Its output until now."""
        return self.log.read_text() if self.log.exists() else ""

    def end(self) -> str:
        """Wait for it; the state that it ends with."""
        self.until(lambda: self.shown["JobState"] in _ENDED)
        return self.shown["JobState"]

    def waits_for_start(self, restarts: int) -> bool:
        """Whether it has been put back so many times, and is in the queue. A moment before it is
        counted it is there already."""
        shown = self.shown
        return shown["JobState"] == "PENDING" and shown["Restarts"] == str(restarts)

    def until(self, condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Wait until the condition holds."""
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline:
                told = (f"waited for {limit_s:g} s: {self.shown}", self.said, self.slurm.logs())
                raise AssertionError("\n".join(told))
            time.sleep(0.2)

    def start_now(self) -> None:
        """Do not wait two minutes until the credential of its last start has expired."""
        self.until(lambda: not self.processes() and not self.steps())
        time.sleep(1.1)  # the node takes no credential made in the second of the last one's end
        self.slurm.call("scontrol", "update", f"jobid={self.number}", "starttime=now")

    def tell(self, name: str) -> None:
        """Send a signal to its tasks."""
        self.slurm.call("scancel", f"--signal={name}", self.number)

    def cancel(self) -> None:
        self.slurm.call("scancel", self.number)

    def processes(self) -> list[int]:
        """Every process of the job that there still is."""
        return _processes(f"SLURM_JOB_ID={self.shown['JobId']}", f"SLURM_CONF={self.slurm.conf}")

    def steps(self) -> list[int]:
        """The daemons that hold its steps, which end last of all."""
        title = f"slurmstepd: [{self.shown['JobId']}.".encode()
        return _pids("cmdline", lambda words: words[0].startswith(title))

    def tasks(self) -> dict[str, int]:
        """The process of each task, by its rank, once it runs train.py."""
        found = {}
        for pid in self.processes():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
                if command[1] == b"train.py":
                    rank = next(v for v in variables if v.startswith("SLURM_PROCID="))
                    found[rank.partition("=")[2]] = pid
        return found


@contextlib.contextmanager
def running(place: Path) -> Iterator[Slurm]:
    """Start it, and end all of it, jobs too, whatever happens."""
    slurm = Slurm(place)
    host, (port, *ports) = socket.gethostname(), _free_ports(1 + len(NODES))
    # Its own port is the number of its first job too: a job's workers meet at a port made from the
    # job's number, and another controller's jobs may run beside.
    conf = _CONF.format(host=host, user=getpass.getuser(), place=place, port=port)
    for name, its_port in zip(NODES, ports, strict=True):
        conf += _NODE.format(name=name, host=host, port=its_port)
    slurm.conf.write_text(conf)
    (place / "state").mkdir()
    (place / "munge.key").write_bytes(os.urandom(128))
    (place / "munge.key").chmod(0o400)
    files = {f"{name}-file": place / f"munge.{name}" for name in ("key", "log", "pid", "seed")}
    files["socket"] = place / "munge.socket"
    idle = ("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N")
    daemons: list[tuple[list[str], Callable[[], bool]]] = [
        (
            ["munged", "--foreground", "--force", *(f"--{k}={v}" for k, v in files.items())],
            files["socket"].exists,
        ),
        (["slurmctld", "-D", "-c"], lambda: "UP" in _said(slurm, "scontrol", "ping")),
        *((["slurmd", "-D", "-N", n], lambda n=n: n in _said(slurm, *idle)) for n in NODES),
    ]
    started: list[subprocess.Popen] = []
    try:
        for words, condition in daemons:
            started.append(_start(slurm, words, place / f"{len(started)}.out"))
            _await(condition, started[-1], place)
        yield slurm
    finally:
        for process in reversed(started):
            process.kill()
            process.wait()
        for pid in _processes(f"SLURM_CONF={slurm.conf}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in probes]


def _start(slurm: Slurm, words: list[str], log: Path) -> subprocess.Popen:
    # Not even a killed test leaves a daemon behind.
    words = ["setpriv", "--pdeathsig", "KILL", *words]
    with log.open("w") as out:
        return subprocess.Popen(words, env=slurm.env, stdout=out, stderr=subprocess.STDOUT)


def _said(slurm: Slurm, *words: str) -> str:
    """What a command says, even where it fails."""
    return subprocess.run(words, env=slurm.env, capture_output=True, text=True).stdout


def _await(condition: Callable[[], bool], process: subprocess.Popen, place: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            said = "\n".join(path.read_text() for path in place.glob("*.out"))
            raise AssertionError(f"{process.args} did not start: {said}")
        time.sleep(0.1)


def _processes(*variables: str) -> list[int]:
    """Every process that has these in its environment: daemons, steps and tasks."""
    wanted = {variable.encode() for variable in variables}
    return _pids("environ", lambda words: wanted <= set(words))


def _pids(file: str, wanted: Callable[[list[bytes]], bool]) -> list[int]:
    """Every process whose file in /proc has the words that are wanted."""
    found = []
    for path in Path("/proc").glob(f"[0-9]*/{file}"):
        with contextlib.suppress(OSError):
            if wanted(path.read_bytes().split(b"\0")):
                found.append(int(path.parent.name))
    return found
