"""What a run would take, before it is queued.

python -m co2 plan task=transnormer scale=paper method=co2 --gpus 64 --gpu a100-80g --link 80gbps
python -m co2 plan task=gpt2 scale=paper              on the smallest number of GPUs that holds it
python -m co2 plan --all --gpus 64 --out results/plan.md        the CO2 paper's tasks, as a table

Memory and operations are counted on tensors without numbers (co2/train/shapes.py); communication is
simulated (co2/simulate). Neither a GPU nor a public data set is needed.
"""

import argparse
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from co2.app.compose import command_line
from co2.arguments import Parser, number, whole
from co2.config import Config, Precision
from co2.errors import ConfigError, require, unusable
from co2.gpus import GPUS, USABLE, known_gpu
from co2.methods import METHODS
from co2.simulate.methods import ALLREDUCE, LEFT_OUT, NO_ROUNDS
from co2.simulate.network import PROFILES, Network, parse_link
from co2.simulate.schedule import Figures, simulate
from co2.task import Planned, Task
from co2.train import launch
from co2.train.replica import CUT
from co2.train.shapes import Holdings, Unknown, Work, holdings, work

PAPER_TASKS = ("resnet50", "vit", "ade20k", "shapenet", "gpt2", "transnormer", "roberta")
"""What the CO2 paper trains."""
MOST_GPUS, SUGGESTED_GPUS = 1024, 64
"""Tried where `--gpus` is left out; and of what is suggested where no number of them will do."""
_ROUNDS = 50
_DAY = 86_400.0

Make = Callable[[Sequence[str]], Config]
"""Overrides → a checked run. Raises `ConfigError`."""


def global_batch(config: Config, workers: int) -> int:
    """Samples in one step of all workers."""
    return config.train.batch_size * config.train.accumulate * workers


def usable_bytes(config: Config) -> int | None:
    """What tensors can fill of the memory of a worker's GPU; None where the GPU is not known."""
    device = launch.first_device(config)
    if device.type == "cuda":
        return int(USABLE * torch.cuda.get_device_properties(device).total_memory)
    return None if config.launch.gpu is None else GPUS[config.launch.gpu].usable_bytes


@dataclass(frozen=True)
class Need:
    """What one worker of a run needs."""

    config: Config
    workers: int
    task: Task
    held: Holdings
    work: Work | None
    """None where what is held between steps is too much already."""

    def fits(self, usable: int) -> bool:
        """Whether so many bytes are enough."""
        return self.work is not None and self.num_bytes <= usable

    @property
    def num_bytes(self) -> int:
        """At once, where it trains."""
        return self.held.device_bytes + (0 if self.work is None else self.work.beyond_bytes)

    @property
    def flops(self) -> int:
        """Floating-point operations in a step of all workers, where it fits."""
        assert self.work is not None
        return self.work.flops * self.config.train.accumulate * self.workers


class DoesNotFit(ConfigError):
    """A run that the memory of a GPU cannot hold.

    Args:
        settings: overrides with which it would; empty where none are known.
    """

    def __init__(self, key: str, value: object, hint: str, settings: list[str]) -> None:
        super().__init__(key, value, hint)
        self.settings = settings


class Planner:
    """Plans of a run, as it is and with other settings.

    Args:
        make: of the application.
        make_task: of the application.
        overrides: of the run.
        usable: bytes that tensors can fill of a GPU.
    """

    def __init__(
        self,
        make: Make,
        make_task: Callable[[Config], Task],
        overrides: Sequence[str],
        usable: int,
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
        """What a worker needs. A micro-batch is left out where the memory is too small without.
        Raises `ConfigError`."""
        task = self._task(config, workers)
        held = holdings(task, config, workers)
        fits = held.device_bytes <= self.usable
        return Need(config, workers, task, held, self._of(task, config, workers) if fits else None)

    def smallest(self) -> Need:
        """On the smallest number of GPUs that holds it, a power of two times
        mesh.replica_size. Raises `ConfigError`."""
        refused: ConfigError | None = None
        workers, found = 1, None
        while workers <= MOST_GPUS and found is None:
            try:
                config = self.config(workers)
                need = self.need(config, workers)
                found = need if need.fits(self.usable) else None
            except ConfigError as error:
                refused = error
            workers *= 2
        if found is not None:
            return found
        try:
            config = self.config(SUGGESTED_GPUS)
        except ConfigError:
            raise refused or AssertionError from None
        raise self.refusal(self.need(config, SUGGESTED_GPUS))

    def fitting(self, workers: int) -> Need:
        """On so many GPUs. Raises `ConfigError` with what would fit, where this does not."""
        need = self.need(self.config(workers), workers)
        if not need.fits(self.usable):
            raise self.refusal(need)
        return need

    def check(self, config: Config, workers: int) -> str:
        """Refuse a run that the GPU cannot hold. Returns a warning where it may be so: what
        torch.compile keeps of a micro-batch is less than what is counted. Raises `ConfigError`."""
        if config.method not in METHODS or not isinstance(self.make_task(config), Planned):
            return ""
        try:
            need = self.need(config, workers)
        except Unknown:
            return ""
        if need.fits(self.usable):
            return ""
        error = self.refusal(need)
        if need.work is None or not config.train.compile:
            raise error
        return f"warning: {error}"

    def refusal(self, need: Need) -> DoesNotFit:
        """What a run that does not fit is refused with."""
        advice = self._advice(need)
        fits = f"this fits: {' '.join(advice)}" if advice else "no mesh.strategy makes it fit"
        parts = f"{_gb(need.held.device_bytes)} between steps"
        if need.work is not None:
            parts += f", {_gb(need.work.beyond_bytes)} more for a micro-batch"
        hint = f"needs more than the {_gb(self.usable)} of a GPU: {parts}; {fits}"
        return DoesNotFit("train.batch_size", need.config.train.batch_size, hint, advice)

    def _advice(self, need: Need) -> list[str]:
        """The first settings that fit: a smaller micro-batch, activations computed again, and both
        on ever larger replicas."""
        config, workers = need.config, need.workers
        meshes: list[list[str]] = [[]]
        if config.mesh.replica_size == 1:
            sizes = (2**power for power in range(1, workers.bit_length()))
            meshes += [
                [f"mesh.replica_size={size}", "mesh.strategy=zero2"]
                for size in sizes
                if workers % size == 0
            ]
        for mesh in meshes:
            for words in self._smaller(need.config, workers, mesh):
                found = self._tried(workers, words)
                if found is not None and found.fits(self.usable):
                    return words
        return []

    def _smaller(self, config: Config, workers: int, mesh: list[str]) -> Iterator[list[str]]:
        """Settings that may fit: the largest micro-batch first, and activations computed again
        where it fits with that alone."""
        again, size = "train.checkpoint_activations=true", config.train.batch_size
        sizes = [part for part in range(size, 0, -1) if size % part == 0]

        def tried(words: list[str], part: int) -> Need | None:
            return self._tried(workers, [*words, *_batch(config, part)])

        ways = ([*mesh, again], mesh)
        while sizes and (smallest := tried(ways[0], sizes[-1])) is None:
            sizes.pop()  # batch norm needs two
        if not sizes or smallest is None or not smallest.fits(self.usable):
            return
        ends = [(words, tried(words, size), tried(words, sizes[-1])) for words in ways]
        for part in sizes:
            # What a micro-batch takes is a line in its samples.
            share = (part - sizes[-1]) / max(1, size - sizes[-1])
            for words, most, least in reversed(ends):
                if most is None or least is None:
                    continue
                more = most.num_bytes - least.num_bytes
                if least.num_bytes + share * more <= self.usable:
                    yield [*words, *_batch(config, part)]

    def _tried(self, workers: int, words: list[str]) -> Need | None:
        try:
            return self.need(self.config(workers, *words), workers)
        except ConfigError:
            return None

    def _task(self, config: Config, workers: int) -> Task:
        task = self.make_task(config)
        hint = "its task does not say how large a micro-batch is (co2/task.py, Planned)"
        require(isinstance(task, Planned), "task", config.task, hint)
        assert isinstance(task, Planned)
        if task.published() is None:
            task.setup(workers)
        return task

    def _of(self, task: Task, config: Config, workers: int) -> Work:
        averages = METHODS[config.method].averages_gradients
        train, mesh = config.train, config.mesh
        kinds = (train.batch_size, train.accumulate > 1, train.checkpoint_activations)
        key = (*kinds, mesh.strategy in CUT, mesh.replica_size > 1, workers > 1)
        if key not in self._work:
            self._work[key] = work(task, config, workers, averages)
        return self._work[key]


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
    mfu: float


@dataclass(frozen=True)
class Course:
    """How a planned run goes."""

    compute_s: float
    """Of a step."""
    own: Figures | None
    """Under the method; None where it is not simulated."""
    allreduce: Figures
    steps: int

    @property
    def days(self) -> float:
        step_s = self.compute_s if self.own is None else self.own.step_s
        return step_s * self.steps / _DAY


def course(need: Need, place: Place) -> Course:
    """Simulate a run. Raises `ConfigError` where its replicas do not fill whole servers.

    A replica is one sender here: what its workers send together goes through the link of its
    server, and what they send to each other takes no time.
    """
    config, size = need.config, need.config.mesh.replica_size
    rounded = config.comm.dtype is Precision.bf16
    peak_flops = GPUS[place.gpu].peak_flops
    compute_s = need.flops / need.workers / (peak_flops * place.mfu)
    network = Network(
        parse_link(place.link, "--link"),
        max(1, place.server_size // size),
        PROFILES["nvswitch"],
        "auto",
    )

    def figures(method: str) -> Figures:
        tau = 1 if method in NO_ROUNDS else need.held.round_steps
        try:
            return simulate(
                method=method,
                workers=need.workers // size,
                vector_bytes=need.held.local_bytes * size // (2 if rounded else 1),
                step_s=compute_s,
                network=network,
                steps=_ROUNDS * tau,
                tau=tau,
                warmup_rounds=_ROUNDS,
                bucket_bytes=max(1, round(config.comm.bucket_mb * 2**20)),
                average_moments=getattr(config.method_config, "average_moments", False),
            )
        except ConfigError as error:
            raise ConfigError("--gpus", need.workers, error.hint) from None

    own = None if config.method in LEFT_OUT else figures(config.method)
    return Course(compute_s, own, figures(ALLREDUCE), config.train.steps)


def lines(need: Need, place: Place, found: Course) -> list[tuple[str, str]]:
    """Name and value of every fact."""
    config, task, held = need.config, need.task, need.held
    train, memory, gpu = config.train, held.memory, GPUS[place.gpu]
    batch = global_batch(config, need.workers)
    units = batch * train.steps * task.units_per_sample
    assert isinstance(task, Planned)
    published = task.published()
    seen = f"{units:.3g} {task.unit}"
    if published is not None:
        seen += f", {batch * train.steps / published.samples:.3g} epochs"
    copies = f"{held.memory.extra_bytes / max(1, held.local_bytes):.3g} model copies"
    again = "; computed again in the backward pass" if train.checkpoint_activations else ""
    compiled = "; torch.compile keeps less" if train.compile else ""
    facts = [
        ("run", f"{config.task} · {config.method} · scale={config.scale}"),
        ("GPUs", f"{need.workers} × {place.gpu}, servers of {place.server_size}, {place.link}"),
        (
            "replicas",
            f"{need.workers // config.mesh.replica_size} of {config.mesh.replica_size}"
            f" ({config.mesh.strategy.value})",
        ),
        ("parameters", f"{held.num_parameters:,}"),
        (
            "global batch",
            f"{batch:,} samples: {train.batch_size} in a micro-batch × "
            f"{train.accumulate} accumulated × {need.workers} workers",
        ),
        ("training", f"{train.steps:,} steps: {seen}"),
        ("weights", _gb(memory.parameter_bytes + memory.buffer_bytes)),
        ("gradients", _gb(memory.gradient_bytes)),
        ("inner state", f"{_gb(memory.inner_state_bytes)}, {config.optim.name.value}"),
        ("method's state", f"{_gb(memory.extra_bytes + memory.scratch_bytes)}, {copies}"),
        (
            "activations",
            f"{_gb(need.num_bytes - held.device_bytes)}, of a micro-batch at its peak, counted on "
            f"tensors without numbers{again}{compiled}",
        ),
        (
            "memory of a GPU",
            f"{_gb(need.num_bytes)} of {_gb(gpu.usable_bytes)}: {USABLE:.0%} of "
            f"{gpu.memory_gib} GiB",
        ),
    ]
    if memory.average_bytes:
        facts.insert(-2, ("moving average", f"{_gb(memory.average_bytes)}, train.ema_decay"))
    if held.gathered_bytes:
        facts.insert(-2, ("gathered weights", f"{_gb(held.gathered_bytes)}, within a step"))
    if memory.host_bytes:
        facts.insert(
            -1, ("host's memory", f"{_gb(memory.host_bytes)} a worker: the method's state")
        )
    facts += [
        ("operations of a step", f"{need.flops:.3g} flop of all GPUs"),
        ("computation of a step", f"{found.compute_s:.3g} s at MFU {place.mfu:g} of "
         f"{gpu.peak_flops / 1e12:g} Tflop/s"),
        ("exposed, this method", _exposed(config.method, found.own)),
        ("exposed, allreduce", _exposed(ALLREDUCE, found.allreduce)),
        ("time", f"{found.days:.3g} days, without evaluations and checkpoints"),
        ("checkpoint", f"{_gb(held.saved_bytes)} of all workers, {config.checkpoint.keep} kept"),
        ("data", "not published" if published is None else f"{_gb(published.num_bytes)} on disk"),
    ]  # fmt: skip
    return facts


def _exposed(method: str, figures: Figures | None) -> str:
    if figures is None:
        return f"not simulated: {LEFT_OUT[method]}"
    return f"{figures.exposed_s:.3g} s a step, {figures.exposed_share:.1%} of the time (simulated)"


def main(make: Make, make_task: Callable[[Config], Task], argv: Sequence[str]) -> int:
    """The command line. Returns the exit status."""
    options, words = _parser().parse_known_args(list(argv))
    try:
        gpu = known_gpu("--gpu", options.gpu)
        parse_link(options.link, "--link")
        place = Place(
            options.gpu,
            options.link,
            whole("--server-size", options.server_size),
            number("--mfu", options.mfu, 1e-9, 1.0),
        )
        gpus = None if options.gpus is None else whole("--gpus", options.gpus, 2**20)
        line = command_line(words)
        require(not line.flags, "flag", " ".join(line.flags), "is of train.py; see --help")
        overrides = list(line.overrides)

        def planned(words: Sequence[str], gpus: int | None = gpus) -> Need:
            planner = Planner(make, make_task, words, gpu.usable_bytes)
            return planner.smallest() if gpus is None else planner.fitting(gpus)

        def divided(words: Sequence[str]) -> Need:
            """On half of the GPUs, or a quarter, where the batch does not divide among all."""
            number = gpus
            while True:
                try:
                    return planned(words, number)
                except ConfigError as error:
                    if number in (None, 1) or error.key != "train.global_batch":
                        raise
                number = (number or 1) // 2

        require(options.all or not options.out, "--out", options.out, "is of --all alone")
        if options.all:
            text = table(divided, overrides, place)
            print(text, end="")
            if options.out:
                command = shlex.join(["python", "-m", "co2", "plan", *argv])
                Path(options.out).write_text(_page(command, place, text), encoding="utf-8")
            return 0
        need = planned(overrides)
        facts = lines(need, place, course(need, place))
    except ConfigError as error:
        return launch.refuse(error)
    except OSError as error:
        return launch.refuse(unusable(error))
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"{name:{width}}  {value}")
    return 0


def table(planned: Callable[[Sequence[str]], Need], overrides: Sequence[str], place: Place) -> str:
    """The CO2 paper's tasks at its scale, in Markdown."""
    head = ("task", "parameters", "GPUs", "global batch", "steps", "memory of a GPU", "flop a step",
            "exposed", "exposed, allreduce", "days", "checkpoint")  # fmt: skip
    rows = [head, ("---",) * len(head)]
    for task in PAPER_TASKS:
        words, settings = [f"task={task}", "scale=paper", *overrides], []
        try:
            try:
                need = planned(words)
            except DoesNotFit as error:
                if not error.settings:
                    raise
                settings = error.settings
                need = planned([*words, *settings])
            found = course(need, place)
        except ConfigError as error:
            rows.append((task, str(error), *[""] * (len(head) - 2)))
            continue
        train = need.config.train
        rows.append(
            (
                " ".join([task, *settings]),
                f"{need.held.num_parameters / 1e6:,.0f} M",
                str(need.workers),
                f"{global_batch(need.config, need.workers):,}",
                f"{train.steps:,}",
                _gb(need.num_bytes),
                f"{need.flops:.3g}",
                "–" if found.own is None else f"{found.own.exposed_share:.1%}",
                f"{found.allreduce.exposed_share:.1%}",
                f"{found.days:.3g}",
                _gb(need.held.saved_bytes),
            )
        )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _page(command: str, place: Place, text: str) -> str:
    """The table with what it rests on."""
    return f"""# What the published recipes would take

Worked out and simulated, not measured: `{command}`. On {place.gpu} at MFU {place.mfu:g}, servers of
{place.server_size} with a link of {place.link}. Settings beside a task are those with which it
fits. Where a batch does not divide among all GPUs, it is planned for half of them, or a quarter.
Exposed is the share of the time that GPUs wait for the network.

{text}"""


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.4g} GB"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m co2 plan",
        usage="%(prog)s [OPTION ...] [OVERRIDE ...]",
        epilog="All other words are overrides of train.py, such as task=gpt2 scale=paper.",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpus", help="default: the smallest power of two that holds the run")
    parser.add_argument("--gpu", default="a100-80g", help=", ".join(GPUS))
    parser.add_argument(
        "--link", default="80gbps-tcp", help="of a server: a rate such as 80gbps, or a profile"
    )
    parser.add_argument("--server-size", default="8", help="GPUs that share a link to the others")
    parser.add_argument("--mfu", default="0.4", help="share of the GPU's peak that is reached")
    parser.add_argument("--all", action="store_true", help="the CO2 paper's tasks, scale=paper")
    parser.add_argument("--out", metavar="FILE", help="of --all: the table in Markdown")
    return parser
