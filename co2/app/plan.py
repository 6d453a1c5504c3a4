"""What a run would take, before it is queued.

python -m co2 plan task=transnormer scale=paper method=co2 --gpus 32 --gpu a100-80g --link 80gbps
python -m co2 plan task=gpt2 scale=paper              on the smallest number of GPUs that holds it

Memory and operations are counted on meta tensors (co2/train/estimate.py); communication
is simulated (co2_measure/simulate). Neither a GPU nor a public data set is needed.
"""

import argparse
import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

import torch

from co2.app.compose import command_line, key_of
from co2.arguments import Parser, number, whole
from co2.catalogue import CATALOGUE
from co2.config import Config, Precision
from co2.errors import ConfigError, require
from co2.gpus import GPUS, USABLE, known_gpu
from co2.methods import METHODS
from co2.start import placement
from co2.start.identity import is_first
from co2.task import Planned, Task
from co2.train.estimate import Holdings, Unknown, Work, holdings, work
from co2.train.within_replica import CUT
from co2_measure.simulate.methods import ALLREDUCE
from co2_measure.simulate.network import PROFILES, Network, parse_link
from co2_measure.simulate.schedule import Figures, simulate

_ROUNDS = 50
_LAUNCH_S = 3.8e-6
"""Of a small kernel among many, from one to the next: NVIDIA, "Getting Started with CUDA Graphs"
(2019), of a kernel that computes for 2.9 µs."""
Make = Callable[[Sequence[str]], Config]
"""Overrides → a checked run. Raises `ConfigError`."""
MakeTask = Callable[[Config], Task]


def usable_bytes(config: Config) -> int | None:
    """What tensors can fill of the memory of a worker's GPU; None where the GPU is not known."""
    device = placement.first_device(config)
    if device.type == "cuda":
        most = USABLE * torch.cuda.get_device_properties(device).total_memory
        return int(most / placement.workers_on_a_gpu(config))
    return None if config.launch.gpu is None else GPUS[config.launch.gpu].usable_bytes


@dataclass(frozen=True)
class Need:
    """What one worker of a run needs."""

    config: Config
    workers: int
    task: Task
    held: Holdings
    work: Work | None
    """None if the state between steps alone is more than the memory."""

    def fits(self, usable: int) -> bool:
        """Whether so many bytes are enough."""
        return self.work is not None and self.num_bytes <= usable

    @property
    def num_bytes(self) -> int:
        """At once, where it trains."""
        return self.held.device_bytes + (0 if self.work is None else self.work.beyond_bytes)

    @property
    def num_replicas(self) -> int:
        """Of the whole run."""
        return self.workers // self.config.mesh.replica_size

    @property
    def flops(self) -> int:
        """Floating-point operations in a step of all workers, where it fits."""
        assert self.work is not None
        return self.work.flops * self.config.train.accumulate * self.workers

    @property
    def again_flops(self) -> int:
        """Those that are computed a second time in it, where it fits."""
        assert self.work is not None
        return self.work.again_flops * self.config.train.accumulate * self.workers

    @property
    def global_batch(self) -> int:
        """Samples in one step of all workers."""
        return self.config.train.batch_size * self.config.train.accumulate * self.workers


class DoesNotFit(ConfigError):
    """A run that the memory of a GPU cannot hold."""

    settings: Sequence[str] = ()
    """Overrides with which it would fit; empty where none are known."""


class Planner:
    """Plans of a run, as it is and with other settings.

    Args:
        make, make_task: of the application.
        overrides: of the run.
        usable: bytes that tensors can fill of a GPU.
    """

    def __init__(
        self, make: Make, make_task: MakeTask, overrides: Sequence[str], usable: int
    ) -> None:
        self.make, self.make_task, self.usable = make, make_task, usable
        self.overrides = list(overrides)
        self._work: dict[tuple[object, ...], Work] = {}

    def config(self, workers: int, *more: str) -> Config:
        """The run on so many workers. Raises `ConfigError`."""
        # No folder is looked at, and no GPU is needed here.
        place = (f"launch.workers={workers}", "launch.backend=auto", "resume=never")
        return self.make([*self.overrides, *more, *place])

    def need(self, config: Config, workers: int) -> Need:
        """What a worker needs, without its micro-batch if the state alone is more than the memory.
        Raises `ConfigError`."""
        task = self.make_task(config)
        if not isinstance(task, Planned):
            hint = "its task does not say how large a micro-batch is (co2/task.py, Planned)"
            raise ConfigError("task", config.task, hint)
        if task.published() is None:
            task.setup(workers)
        held = holdings(task, config, workers)
        if held.device_bytes > self.usable:
            return Need(config, workers, task, held, None)
        train, mesh = config.train, config.mesh
        kinds = (train.batch_size, train.accumulate > 1, train.checkpoint_activations)
        key = (*kinds, mesh.strategy in CUT, mesh.replica_size > 1, workers > 1)
        if key not in self._work:
            averages = METHODS[config.method].averages_gradients
            self._work[key] = work(task, config, workers, averages)
        return Need(config, workers, task, held, self._work[key])

    def smallest(self) -> Need:
        """On the smallest number of GPUs that holds it, a power of two up to 1024. Raises
        `ConfigError` with what would fit on 64, where none does."""
        for power in range(11):
            need = self._tried(2**power, [])
            if need is not None and need.fits(self.usable):
                return need
        return self.fitting(64)

    def nearest(self, workers: int) -> int:
        """The largest number of GPUs up to this one among which the run's batch divides. Raises
        `ConfigError` where it divides among none of them."""
        for fewer in range(workers, 0, -1):
            try:
                self.config(fewer)
            except ConfigError as error:
                if error.key != "train.global_batch" or fewer == 1:
                    raise
            else:
                return fewer
        raise AssertionError("one GPU is the last")

    def fitting(self, workers: int) -> Need:
        """On so many GPUs. Raises `ConfigError` with what would fit, where this does not."""
        try:
            config = self.config(workers)
        except ConfigError as error:
            if error.key == "train.global_batch":
                with suppress(ConfigError):  # among no number of GPUs: the hint says enough
                    error.hint += f"; or on {self.nearest(workers)} GPUs (--nearest)"
            raise
        need = self.need(config, workers)
        if not need.fits(self.usable):
            raise self._refusal(need)
        return need

    def check(self, config: Config, workers: int) -> None:
        """Refuse a run that the GPU cannot hold. Where torch.compile may make it fit, which keeps
        less of a micro-batch than is counted, print a warning. Raises `ConfigError`."""
        if config.method not in METHODS or not isinstance(self.make_task(config), Planned):
            return
        try:
            need = self.need(config, workers)
        except Unknown:
            return
        if not need.fits(self.usable):
            error = self._refusal(need)
            if need.work is None or not config.train.compile:
                raise error
            if is_first():
                print(f"warning: {error}", file=sys.stderr, flush=True)

    def _refusal(self, need: Need) -> DoesNotFit:
        """What a run that does not fit is refused with."""
        advice = self._advice(need.config, need.workers)
        fits = f"this fits: {' '.join(advice)}" if advice else "no mesh.strategy makes it fit"
        parts = f"{gb(need.held.device_bytes)} between steps"
        if need.work is not None:
            parts += f", {gb(need.work.beyond_bytes)} more for a micro-batch"
        hint = f"needs more than the {gb(self.usable)} of a GPU: {parts}; {fits}"
        error = DoesNotFit("train.batch_size", need.config.train.batch_size, hint)
        error.settings = advice
        return error

    def _advice(self, config: Config, workers: int) -> list[str]:
        """The first settings that fit: a smaller micro-batch, activations computed again, and both
        on ever larger replicas."""
        meshes: list[list[str]] = [[]]
        if config.mesh.replica_size == 1:
            meshes += [
                [f"mesh.replica_size={2**power}", "mesh.strategy=zero2"]
                for power in range(1, workers.bit_length())
                if workers % 2**power == 0
            ]
        for mesh in meshes:
            ways = (mesh, [*mesh, "train.checkpoint_activations=true"])
            sizes = [self._largest(config, workers, words) for words in ways]
            if any(sizes):
                best = max(sizes)
                return [*ways[sizes.index(best)], *_batch(config, best)]
        return []

    def _largest(self, config: Config, workers: int, words: list[str]) -> int:
        """The largest micro-batch with which a run of these settings fits; 0 where none does."""
        size = config.train.batch_size
        sizes = [part for part in range(size, 0, -1) if size % part == 0]

        @cache
        def tried(part: int) -> Need | None:
            return self._tried(workers, [*words, *_batch(config, part)])

        def small_enough(part: int) -> bool:
            found = tried(part)
            return found is None or found.fits(self.usable)  # batch norm refuses 1

        first = bisect_left(sizes, True, key=small_enough)
        return sizes[first] if first < len(sizes) and tried(sizes[first]) is not None else 0

    def _tried(self, workers: int, words: list[str]) -> Need | None:
        try:
            return self.need(self.config(workers, *words), workers)
        except ConfigError:
            return None


def _batch(config: Config, size: int) -> list[str]:
    """A smaller micro-batch with the same global batch."""
    train = config.train
    if size == train.batch_size:
        return []
    if train.global_batch is not None:
        return [f"train.batch_size={size}"]
    more = train.accumulate * train.batch_size // size
    return [f"train.batch_size={size}", f"train.accumulate={more}"]


@dataclass(frozen=True)
class Place:
    """Where a run is planned to train."""

    gpu: str
    link: str
    server_size: int
    mfu: float | None
    """None: the task's own."""


@dataclass(frozen=True)
class Course:
    """How a planned run goes."""

    mfu: float
    compute_s: float
    """Of a step."""
    launch_s: float
    """In which a step at least launches its kernels."""
    load_s: float
    """In which the loading processes make its samples; 0 where that is next to no work."""
    own: Figures | None
    """Under the method; None where it is not simulated."""
    allreduce: Figures | None
    """None, as `own`, for one replica, which synchronizes with nobody."""
    days: float

    @property
    def alone_s(self) -> float:
        """Of a step without communication: all three are done beside each other."""
        return max(self.compute_s, self.launch_s, self.load_s)

    @property
    def bound_by(self) -> str:
        """What takes that long."""
        parts = {
            "computation": self.compute_s,
            "launches": self.launch_s,
            "loading": self.load_s,
        }
        return max(parts, key=parts.__getitem__)


def course(need: Need, place: Place) -> Course:
    """Simulate a run. Raises `ConfigError` where its replicas do not fill whole servers.

    A replica is one sender here: what its workers send together goes through the link of its
    server, and what they send to each other takes no time.
    """
    config, size = need.config, need.config.mesh.replica_size
    rounded = config.comm.dtype is Precision.bf16
    assert need.work is not None and isinstance(need.task, Planned)
    pace, batch = need.task.pace, config.train.batch_size * config.train.accumulate
    mfu = pace.mfu if place.mfu is None else place.mfu
    flops = need.flops + need.again_flops
    compute_s = flops / need.workers / (GPUS[place.gpu].peak_flops * mfu)
    launch_s = need.work.launches * config.train.accumulate * _LAUNCH_S
    load_s = 0.0
    if pace.samples_per_s is not None:
        load_s = batch / (pace.samples_per_s * max(1, config.data.workers))
    alone = Course(mfu, compute_s, launch_s, load_s, None, None, 0)
    link, senders = parse_link(place.link, "--link"), max(1, place.server_size // size)
    network = Network(link, senders, PROFILES["nvswitch"], "auto")

    def figures(method: str) -> Figures:
        entry = CATALOGUE[method]
        tau = need.held.round_steps if entry.rounds else 1
        averages = entry.average_moments and config.method_config.average_moments
        try:
            return simulate(
                method=method,
                workers=need.num_replicas,
                vector_bytes=need.held.local_bytes * size // (2 if rounded else 1),
                step_s=alone.alone_s,
                network=network,
                steps=_ROUNDS * tau,
                tau=tau,
                warmup_rounds=_ROUNDS,
                bucket_bytes=max(1, round(config.comm.bucket_mb * 2**20)),
                average_moments=averages,
                fragments=config.method_config.fragments if entry.fragments else 1,
                delay=config.method_config.delay if entry.fragments else None,
            )
        except ConfigError as error:
            raise ConfigError("--gpus", need.workers, error.hint) from None

    one = need.num_replicas == 1
    left_out = CATALOGUE[config.method].not_simulated
    own = None if one or left_out else figures(config.method)
    allreduce = None if one else figures(ALLREDUCE)
    step_s = alone.alone_s if own is None else own.step_s
    return replace(alone, own=own, allreduce=allreduce, days=step_s * config.train.steps / 86_400)


def lines(need: Need, place: Place, found: Course) -> list[tuple[str, str]]:
    """Name and value of every fact."""
    config, task, held = need.config, need.task, need.held
    train, mesh, memory, gpu = config.train, config.mesh, held.memory, GPUS[place.gpu]
    assert isinstance(task, Planned)
    published, samples = task.published(), need.global_batch * train.steps
    seen = f"{samples * task.units_per_sample:.3g} {task.unit}"
    if published is not None:
        seen += f", {samples / published.samples:.3g} epochs"
    copies = f"{memory.extra_bytes / max(1, held.local_bytes):.3g} model copies"
    again = "; computed again in the backward pass" if train.checkpoint_activations else ""
    compiled = "; torch.compile keeps less" if train.compile else ""

    def exposed(figures: Figures | None) -> str:
        if found.allreduce is None:
            return ""
        if figures is None:
            return f"not simulated: {CATALOGUE[config.method].not_simulated}"
        share = f"{figures.exposed_share:.1%} of the time (simulated)"
        return f"{figures.exposed_s:.3g} s a step, {share}"

    copied = held.saved_bytes / need.workers
    on_host = "a worker: a copy of what it saves"
    on_host += f", and {gb(memory.host_bytes)} of the method's state" if memory.host_bytes else ""
    saved = f"{gb(held.saved_bytes)} of all workers, {config.checkpoint.keep} kept"
    if config.checkpoint.every_s is not None:
        every_s = config.checkpoint.every_s
        saved += f", every {every_s:g} s: {held.saved_bytes / every_s / 1e9:.2g} GB/s"
    more = ""
    if found.own and found.allreduce:
        own, theirs = found.own.bytes_per_step, found.allreduce.bytes_per_step
        if own > theirs:
            more = f"each worker sends {gb(own)} a step, {own / theirs:.2g} times as much as "
            more += "allreduce, because it gathers a message of every replica"

    pace = task.pace
    source = f" ({pace.source})" if place.mfu is None else ""
    assert need.work is not None
    launches, loading = need.work.launches * train.accumulate, ""
    if pace.samples_per_s is not None:
        loading = (
            f"{found.load_s:.3g} s: {train.batch_size * train.accumulate} samples of a worker, "
        )
        loading += f"{pace.samples_per_s:g} a second from each of {config.data.workers} processes"

    def if_any(num_bytes: int, what: str) -> str:
        return f"{gb(num_bytes)}{what}" if num_bytes else ""

    facts = [
        ("run", f"{config.task} · {config.method} · scale={config.scale}"),
        ("GPUs", f"{need.workers} × {place.gpu}, servers of {place.server_size}, {place.link}"),
        ("replicas", f"{need.num_replicas} of {mesh.replica_size} ({mesh.strategy.value})"),
        ("parameters", f"{held.num_parameters:,}"),
        ("global batch", f"{need.global_batch:,} samples: {train.batch_size} in a micro-batch × "
         f"{train.accumulate} accumulated × {need.workers} workers"),
        ("training", f"{train.steps:,} steps: {seen}"),
        ("weights", gb(memory.parameter_bytes + memory.buffer_bytes)),
        ("gradients", gb(memory.gradient_bytes)),
        ("inner state", f"{gb(memory.inner_state_bytes)}, {config.optim.name.value}"),
        ("method's state", f"{gb(memory.extra_bytes + memory.scratch_bytes)}, {copies}"),
        ("moving average", if_any(memory.average_bytes, ", train.ema_decay")),
        ("gathered weights", if_any(held.gathered_bytes, ", within a step")),
        ("activations", f"{gb(need.num_bytes - held.device_bytes)}, of a micro-batch at its peak, "
         f"counted on meta tensors{again}{compiled}"),
        ("host's memory", f"{gb(copied + memory.host_bytes)} {on_host}"),
        ("memory of a GPU", f"{gb(need.num_bytes)} of {gb(gpu.usable_bytes)}: {USABLE:.0%} of "
         f"{gpu.memory_gib} GiB"),
        ("operations of a step", f"{need.flops:.3g} flop of all GPUs"
         + (f", {need.again_flops:.3g} more again" if need.again_flops else "")),
        ("computation of a step", f"{found.compute_s:.3g} s at MFU {found.mfu:g} of "
         f"{gpu.peak_flops / 1e12:g} Tflop/s{source}"),
        ("launches of a step", f"{found.launch_s:.3g} s at least, of {launches:,} kernels"
         + (" that torch.compile cannot join" if train.compile else "")),
        ("loading of a step", loading),
        ("synchronization", "" if found.allreduce else "none: there is one replica"),
        ("exposed, this method", exposed(found.own)),
        ("exposed, allreduce", exposed(found.allreduce)),
        ("time", f"{found.days:.3g} days, without evaluations and checkpoints; bound by "
         f"{found.bound_by}"),
        ("checkpoint", saved),
        ("warning", more),
        ("data", "not published" if published is None else f"{gb(published.num_bytes)} on disk"),
    ]  # fmt: skip
    return [(name, value) for name, value in facts if value]


def main(make: Make, make_task: MakeTask, argv: Sequence[str]) -> int:
    """The command line. Returns the exit status. Raises `ConfigError`."""
    flags = parser("python -m co2 plan", __doc__)
    nearest = "plan the nearest smaller number of GPUs where the batch does not divide"
    flags.add_argument("--nearest", action="store_true", help=nearest)
    options, overrides, place, workers = asked(flags, argv)
    planner = Planner(make, make_task, overrides, GPUS[place.gpu].usable_bytes)
    if options.nearest and workers is not None:
        workers = planner.nearest(workers)
    need = planner.smallest() if workers is None else planner.fitting(workers)
    facts = lines(need, place, course(need, place))
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"{name:{width}}  {value}")
    return 0


def asked(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, Sequence[str], Place, int | None]:
    """What a command line asks: its flags, the overrides of the run, the place and the number of
    GPUs, None for the smallest. Raises `ConfigError`."""
    options, words = parser.parse_known_args(list(argv))
    line = command_line(words)
    require(not line.flags, "flag", " ".join(line.flags), "is of train.py; see --help")
    key, gpu = _either("--gpu", options.gpu, "launch.gpu", line.overrides)
    known_gpu(key, gpu := gpu or "a100-80g")
    parse_link(options.link, "--link")
    servers = whole("--server-size", options.server_size)
    mfu = None if options.mfu is None else number("--mfu", options.mfu, 1e-9, 1.0)
    place = Place(gpu, options.link, servers, mfu)
    key, gpus = _either("--gpus", options.gpus, "launch.workers", line.overrides)
    return options, line.overrides, place, None if gpus is None else whole(key, gpus, 2**20)


def _either(
    flag: str, value: str | None, key: str, overrides: Sequence[str]
) -> tuple[str, str | None]:
    """A flag or the key that means the same: which one was given, and its value; None for neither.
    Raises `ConfigError` where they differ."""
    given = [word.partition("=")[2] for word in overrides if key_of(word) == key]
    if not given or given[-1] == "null":
        return flag, value
    require(value in (None, given[-1]), key, given[-1], f"{flag}={value} differs; give one of them")
    return key, given[-1]


def gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.4g} GB"


def parser(prog: str, description: str) -> argparse.ArgumentParser:
    """The flags of a plan."""
    parser = Parser(
        prog=prog,
        usage="%(prog)s [OPTION ...] [OVERRIDE ...]",
        epilog="All other words are overrides of train.py, such as task=gpt2 scale=paper.",
        description=description,
    )
    add = parser.add_argument
    fewest = "the smallest power of two that holds the run"
    add("--gpus", help=f"or launch.workers=GPUS; default: {fewest}")
    add("--gpu", help=f"or launch.gpu=GPU; default: a100-80g; {', '.join(GPUS)}")
    add("--link", default="80gbps-tcp", help="of a server: a rate such as 80gbps, or a profile")
    add("--server-size", default="8", help="GPUs that share a link to the others")
    known = "default: what a public program reaches with such a model, which the plan names"
    add("--mfu", help=f"share of the GPU's peak that is reached; {known}")
    return parser
