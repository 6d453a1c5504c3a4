"""Real, slow links on one machine: a network namespace for each worker, joined by a bridge.

    worker 0 ── eth0 ═ veth ═ port0 ┐
    worker 1 ── eth0 ═ veth ═ port1 ┼ bridge, in a namespace of its own
    …                               ┘

Both ends of every link are shaped by a token bucket (`tc … tbf`), so a worker's rate holds for what
it sends and for what it receives. Addresses, interfaces and the bridge exist inside the namespaces
only. The namespaces' names hold the process id of their owner: what a killed owner has left behind
is removed by the next `SlowNetwork`.
"""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path

from co2.errors import ConfigError, require

PREFIX = "co2lab"
_OWNER = re.compile(rf"{PREFIX}-(\d+)")
_SUBNET = "10.99.0"
_BRIDGE, _APART = "bridge", "apart"
"""What joins the workers, and those who are cut off from them."""
_BUCKET_S = 0.005
"""Seconds' worth of traffic that may pass at once; a shaper that wakes a few hundred times a second
needs as much."""
_LEAST_BUCKET = 80_000
"""The smallest bucket in bytes. TCP makes packets of up to 64 KiB. With a smaller bucket the kernel
would cut each into 45, which costs five times the processor's time and is a network card's work."""
_QUEUE_S = 0.1
"""Seconds' worth of traffic that may wait in a link before packets are dropped."""
_CGROUPS = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000
"""Microseconds over which the kernel counts a worker's use of the processor."""


def check_root() -> None:
    """Raise `ConfigError` where no link can be shaped: not root, no iproute2, or a kernel without
    network namespaces or tbf."""
    require(os.geteuid() == 0, "user", os.geteuid(), "network namespaces need root; use sudo")
    for tool in ("ip", "tc"):
        hint = "is missing; install iproute2 (Debian: apt install iproute2)"
        require(shutil.which(tool) is not None, "program", tool, hint)
    probe = f"{PREFIX}-{os.getpid()}-probe"
    with _refusing("ip", "this system makes no network namespace ({})"):
        _run("ip", "netns", "add", probe)
    try:
        with _refusing("tc", "this kernel has no token bucket, sch_tbf ({})"):
            _inside(probe, "ip", "link", "set", "lo", "up")
            _inside(probe, "tc", *_shaper("lo", 10.0))
    finally:
        _run("ip", "netns", "del", probe)


class SlowNetwork:
    """Workers on shaped links, as a context manager: all that it made is gone afterwards.

    Args:
        mbit: for each worker the rate of its link in Mbit/s, in each direction; None for no limit.
        cpus: for some workers the number of cores that they may use, as in {1: 0.5}; the others
            share all cores freely.
        cores: each worker's own cores, by their numbers; by default all run on all.

    Raises:
        ConfigError: on entering, when the network cannot be built on this machine.
    """

    def __init__(
        self,
        mbit: Sequence[float | None],
        cpus: Mapping[int, float] | None = None,
        cores: Sequence[Set[int]] = (),
    ) -> None:
        self.mbit, self.cpus, self.cores = mbit, cpus or {}, cores
        self._name = f"{PREFIX}-{os.getpid()}"
        self._switch = f"{self._name}-switch"
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "SlowNetwork":
        remove_leftovers()
        try:
            with _refusing("ip", "failed: {}"):
                self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def address(self, worker: int) -> str:
        """The IP address of the worker's only interface, eth0."""
        return f"{_SUBNET}.{worker + 1}"

    def start(
        self, worker: int, command: Sequence[str], env: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        """Run a command as this worker. It is killed when this process or the network ends."""
        own = self.cores[worker] if self.cores else os.sched_getaffinity(0)
        process = subprocess.Popen(
            ["ip", "netns", "exec", f"{self._name}-w{worker}", *command],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=partial(_prepare_child, own),
        )
        self._processes.append(process)
        if worker in self.cpus:
            for group in _groups(f"{self._name}-w{worker}"):
                (group / "cgroup.procs").write_text(str(process.pid))
        return process

    def shape(self, worker: int, mbit: float | None) -> None:
        """Change the rate of a worker's link to `mbit` Mbit/s, None for no limit, at any time."""
        for place, device in ((f"{self._name}-w{worker}", "eth0"), (self._switch, f"port{worker}")):
            if mbit is None:
                _inside(place, "tc", "qdisc", "del", "dev", device, "root", check=False)
            else:
                _inside(place, "tc", *_shaper(device, mbit))

    def partition(self, workers: Iterable[int]) -> None:
        """Cut these workers off from all others, but not from one another."""
        self._plug(workers, _APART)

    def heal(self, workers: Iterable[int]) -> None:
        """Mend the links that `partition` has cut."""
        self._plug(workers, _BRIDGE)

    def _plug(self, workers: Iterable[int], bridge: str) -> None:
        for worker in workers:
            _inside(self._switch, "ip", "link", "set", f"port{worker}", "master", bridge)

    def _build(self) -> None:
        switch = self._switch
        _run("ip", "netns", "add", switch)
        for bridge in (_BRIDGE, _APART):
            _inside(switch, "ip", "link", "add", bridge, "type", "bridge")
            _inside(switch, "ip", "link", "set", bridge, "up")
        for worker, mbit in enumerate(self.mbit):
            place, port = f"{self._name}-w{worker}", f"port{worker}"
            _run("ip", "netns", "add", place)
            _inside(place, "ip", "link", "set", "lo", "up")
            ends = ("peer", "name", "eth0", "netns", place)
            _inside(switch, "ip", "link", "add", port, "type", "veth", *ends)
            _inside(switch, "ip", "link", "set", port, "master", _BRIDGE, "up")
            _inside(place, "ip", "addr", "add", f"{self.address(worker)}/24", "dev", "eth0")
            _inside(place, "ip", "link", "set", "eth0", "up")
            if mbit is not None:
                self.shape(worker, mbit)
        for worker, cores in self.cpus.items():
            _limit_cpu(f"{self._name}-w{worker}", cores)

    def _remove(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        _remove_named(self._name)


def remove_leftovers() -> list[str]:
    """Remove what owners that have been killed left behind; return their names."""
    names = [*_namespaces(), *(path.name for path in _groups(f"{PREFIX}-*"))]
    found = {match[0]: match[1] for name in names if (match := _OWNER.match(name))}
    owners = [owner for owner, pid in found.items() if not Path("/proc", pid).exists()]
    for owner in owners:
        _remove_named(owner)
    return sorted(owners)


def _remove_named(owner: str) -> None:
    for name in _namespaces():
        if name.startswith(f"{owner}-"):
            for pid in _run("ip", "netns", "pids", name, check=False).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _run("ip", "netns", "del", name, check=False)
    for group in _groups(f"{owner}-*"):
        # Where a process in it has not gone yet, the next start removes it.
        with contextlib.suppress(OSError):
            group.rmdir()


def _namespaces() -> list[str]:
    lines = _run("ip", "netns", "list", check=False).splitlines()
    return [line.split()[0] for line in lines if line.strip()]


def _groups(pattern: str) -> Iterator[Path]:
    """Our control groups of the cpu controller, which version 1 keeps in a tree of its own."""
    for root in (_CGROUPS, _CGROUPS / "cpu"):
        yield from root.glob(pattern)


def _limit_cpu(name: str, cores: float) -> None:
    """Make a control group whose members share `cores` cores. Raises `ConfigError` where this
    machine has no cpu controller that can be used."""
    quota = int(cores * _PERIOD_US)
    try:
        if (_CGROUPS / "cgroup.controllers").exists():
            group = _CGROUPS / name
            (_CGROUPS / "cgroup.subtree_control").write_text("+cpu")
            group.mkdir()
            (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        else:
            group = _CGROUPS / "cpu" / name
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
    except OSError as error:
        hint = f"no cpu control group can be made here ({error.strerror})"
        raise ConfigError("--slow-cpu", cores, hint) from None


def _shaper(device: str, mbit: float) -> list[str]:
    bytes_per_s = mbit * 1e6 / 8
    burst = max(_LEAST_BUCKET, int(bytes_per_s * _BUCKET_S))
    limit = burst + max(64_000, int(bytes_per_s * _QUEUE_S))
    rate = ["rate", f"{int(mbit * 1e6)}bit", "burst", f"{burst}", "limit", f"{limit}"]
    return ["qdisc", "replace", "dev", device, "root", "tbf", *rate]


def _inside(namespace: str, *command: str, check: bool = True) -> str:
    return _run("ip", "netns", "exec", namespace, *command, check=check)


def _run(*command: str, check: bool = True) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=check).stdout


@contextlib.contextmanager
def _refusing(program: str, hint: str) -> Iterator[None]:
    """Make the failure of a command a `ConfigError` of this program. `{}` in the hint stands for
    the last line of what it said."""
    try:
        yield
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines()
        said = lines[-1] if lines else f"status {error.returncode}"
        raise ConfigError("program", program, hint.format(said)) from None


def _prepare_child(cores: Set[int]) -> None:
    """In the child: keep to these cores, and ask the kernel for a SIGKILL when its parent ends."""
    os.sched_setaffinity(0, cores)
    pdeathsig = 1
    ctypes.CDLL(None).prctl(pdeathsig, signal.SIGKILL)
