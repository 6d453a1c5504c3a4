"""What a training would wait for on this machine, under each method: measured in half a minute.

python -m co2 probe task=gpt2 launch.workers=4
torchrun --nproc-per-node 8 -m co2 probe task=gpt2 scale=paper

All workers train some steps of the run alone, and time collectives between them, of growing sizes.
From the seconds of a step and of a mean the simulator (co2_measure/simulate) works out how long
each method would wait. Nothing is written, and no method trains.
"""

import argparse
import math
import shutil
import statistics
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from co2.app.compose import command_line, key_of
from co2.arguments import Parser, number, whole
from co2.catalogue import CATALOGUE
from co2.comm.background_mean import BackgroundMean
from co2.comm.collectives import gathered, local
from co2.config import Blocking, Config, Resume, Wandb
from co2.errors import require
from co2.methods import METHODS
from co2.methods.local_sgd import LocalSGD
from co2.methods.shared.auto_tau import CHOICES, choose
from co2.methods.shared.rounds import WaitingRounds
from co2.record.provenance import UNKNOWN
from co2.record.table import Table
from co2.start import launch
from co2.start.identity import world_size
from co2.task import Task
from co2.train.build import build
from co2.train.loop import gradients
from co2.train.run import Run
from co2.train.session import Session
from co2_measure.simulate.methods import ENTRIES, LIMIT
from co2_measure.simulate.schedule import simulate

_SMALLEST, _GROWTH = 4096, 4
"""Bytes of the first collective, and how many times larger the next one is."""
_WARM_UP = 3
"""Steps that allocate and compile, and count for nothing."""
_ROUNDS = 48
"""So many are simulated: DES-LOC sends the moments in every third and sixth."""
FRAGMENTS = (12, 4)
"""Numbers of fragments that are considered. Means are a quarter of a round late either way; of 12
three are under way together, so that nobody waits for a single slow step."""
MORE_WAITING = 0.01
"""Share of the time that fragments may wait more than the whole model."""


@dataclass(frozen=True)
class Curve:
    """Seconds of a collective by the bytes that each worker gives to it, measured at some sizes,
    straight between them, and from the last two on."""

    sizes: Sequence[int]
    seconds: Sequence[float]

    def at(self, num_bytes: float) -> float:
        """Of so many bytes."""
        if num_bytes <= self.sizes[0] or len(self.sizes) == 1:
            return self.seconds[0]
        above = min(bisect_left(self.sizes, num_bytes), len(self.sizes) - 1)
        (begin, end), (low, high) = self.sizes[above - 1 :][:2], self.seconds[above - 1 :][:2]
        slope = max(0.0, (high - low) / (end - begin))
        return low + slope * (num_bytes - begin)


@dataclass(frozen=True)
class Measured:
    """What the workers have measured. It is the simulator's `Carrier`."""

    replicas: int
    step_s: float
    """Of the slowest worker's step, without communication."""
    beside_s: float
    """The same while a mean is under way."""
    vector_bytes: int
    """Of what a worker exchanges, in the type that travels."""
    mean: Curve
    gather: Curve
    slowed: float = 1.0
    """Factor on the seconds of a collective beside which steps are computed."""
    uneven: float = 0.0
    """Seconds that a worker waits for the slowest one, on average, where all wait for it at the end
    of a round: a share of those that the round's steps take."""

    def beside_steps(self) -> "Measured":
        """The same workers, with collectives as they are while steps are computed."""
        mean, gather = (
            Curve(curve.sizes, [self.slowed * seconds for seconds in curve.seconds])
            for curve in (self.mean, self.gather)
        )
        return replace(self, mean=mean, gather=gather, slowed=1.0)

    def whole_s(self, bucket_bytes: int) -> float:
        """Seconds of a mean of the whole vector, bucket after bucket."""
        buckets = math.ceil(self.vector_bytes / bucket_bytes)
        return buckets * self.mean.at(min(self.vector_bytes, bucket_bytes))

    def check(self, workers: int) -> None:
        """See `Carrier`. They are those who have measured."""

    def all_reduce_s(self, num_bytes: float, workers: int) -> float:
        """See `Carrier`. No part is quicker than its share of the largest that was measured: a link
        may let little pass at once, but not one part after the other."""
        return max(self.mean.at(num_bytes), self.mean.seconds[-1] * num_bytes / self.mean.sizes[-1])

    def all_gather_s(self, num_bytes: float, workers: int) -> float:
        """See `Carrier`."""
        return self.gather.at(num_bytes)


@dataclass(frozen=True)
class Forecast:
    """What a training would wait for under a method."""

    method: str
    tau: int | None
    """None for a method without rounds."""
    fragments: int
    """1 for a method without them."""
    share: float
    """Of the time in which it stands still."""
    hides: int | None
    """The smallest τ with which it waits for nothing, or for a tenth of the time if it always
    waits; None if no τ of `CHOICES` is enough, or it has none."""
    bytes_per_step: float
    """That a worker sends."""


def forecast(
    found: Measured, method: str, tau: int, bucket_bytes: int, fragments: int = 1
) -> Forecast:
    """Simulate a training by this method."""
    entry, config = CATALOGUE[method], METHODS[method].Config
    overlapped = entry.blocking is Blocking.beyond_delay
    if overlapped:
        found = found.beside_steps()
    comm_s = found.whole_s(bucket_bytes)
    if entry.exchange == "gather":
        comm_s = found.gather.at(entry.share * found.vector_bytes)
    comm_s *= statistics.mean(entry.vectors_in(n + 1, False) for n in range(_ROUNDS))
    length = tau if entry.rounds else 1
    # A step is slower as long as a mean is under way beside it.
    beside = min(1.0, comm_s / (length * found.step_s)) if overlapped else 0.0
    figures = simulate(
        method=method,
        workers=found.replicas,
        vector_bytes=found.vector_bytes,
        step_s=found.step_s + beside * (found.beside_s - found.step_s),
        network=found,
        steps=_ROUNDS * length,
        tau=tau,
        warmup_rounds=_ROUNDS,
        bucket_bytes=bucket_bytes,
        fragments=fragments,
        delay=_delay(length),
    )
    hides = None
    if entry.rounds:
        share = None if overlapped else getattr(config, "comm_share", WaitingRounds.comm_share)
        best = choose(found.beside_s if overlapped else found.step_s, comm_s, share)
        enough = choose(found.step_s, comm_s, share) < CHOICES[-1] or best < CHOICES[-1]
        hides = best if enough else None
    waits = figures.exposed_share
    if not overlapped:
        waits += found.uneven * (1 - waits)
    return Forecast(
        method,
        tau if entry.rounds else None,
        fragments,
        waits,
        hides,
        figures.bytes_per_step,
    )


def _delay(tau: int) -> int:
    """Steps that a fragment's mean has."""
    return -(-tau // 4)


def cut(method: str, fragments: int, tau: int) -> list[str]:
    """The overrides of so many fragments, where the method's defaults are others."""
    if fragments > 1:
        return [f"{method}.fragments={fragments}", f"{method}.delay={_delay(tau)}"]
    default = getattr(METHODS[method].Config(), "fragments", 1)
    return [] if default == 1 else [f"{method}.fragments=1", f"{method}.delay=null"]


def best_forecast(found: Measured, method: str, tau: int, bucket_bytes: int) -> Forecast:
    """The forecast with as many fragments as wait little longer than the whole model: each has its
    own latency, and a quarter of the round for its mean."""
    whole = forecast(found, method, tau, bucket_bytes)
    choices = FRAGMENTS if CATALOGUE[method].fragments else ()
    for fragments in (choice for choice in choices if choice <= tau):
        parted = forecast(found, method, tau, bucket_bytes, fragments)
        if parted.share <= whole.share + MORE_WAITING:
            return parted
    return whole


def measure(session: Session, seconds: float, step_s: float | None, tau: int) -> Measured:
    """Measure for about so many seconds. Collective of all workers.

    Args:
        step_s: seconds of a step that somebody knows; None: they are measured.
    """
    run = session.run
    mesh, comm = run.mesh, run.config.comm
    trained = [p for p in session.module.parameters() if p.requires_grad]
    numel = sum(local(param.detach()).numel() for param in trained)
    slowest, uneven = step_s or 0.0, 0.0
    if step_s is None:
        _steps_s(session, _WARM_UP)
        one_s = max(gathered(_steps_s(session, 1), run.control))
        # All make as many steps: the workers of a replica wait for each other in each.
        length = max(1, min(tau, int(seconds / 12 / one_s)))
        times = max(1, int(seconds / 4 / (length * one_s)))
        rounds = [gathered(_steps_s(session, length), run.control) for _ in range(times)]
        slowest = statistics.median(max(one) for one in rounds) / length
        uneven = statistics.median(1 - statistics.mean(one) / max(one) for one in rounds)
    most = min(numel * 4, max(_SMALLEST, int(comm.bucket_mb * 2**20)))
    mean = BackgroundMean(max(1, most // 4), mesh, comm, device=mesh.device)
    vector_bytes = numel * mean.buffer.element_size()

    def reduced(part: torch.Tensor) -> None:
        dist.all_reduce(part, group=mean.group)

    def received(part: torch.Tensor) -> None:
        into = part.new_empty(mesh.num_replicas * len(part))
        dist.all_gather_into_tensor(into, part, group=mean.group)

    means = _curve(session, mean, reduced, seconds / 4)
    gathers = _curve(session, mean, received, seconds / 8)
    found = Measured(
        mesh.num_replicas, slowest, slowest, vector_bytes, means, gathers, uneven=uneven
    )
    if step_s is None:
        found = _beside(session, mean, found, 3 / 8 * seconds)
    mean.close()
    return found


def _beside(session: Session, mean: BackgroundMean, found: Measured, seconds: float) -> Measured:
    """Measure for about so many seconds what steps and a mean cost each other. Collective."""
    alone_s, control = found.mean.seconds[-1], session.run.control
    steps = int(min(alone_s, seconds / 4) / found.step_s)
    if steps == 0 or found.replicas == 1:
        return found
    slower, slowed = [], []
    for _ in range(min(5, max(2, int(seconds / 2 / alone_s)))):
        # In turn, because a machine that others use is quick at one time and slow at another.
        steps_s = max(gathered(_steps_s(session, steps), control))
        before = mean.totals()
        mean.start()
        own_s = _steps_s(session, steps)
        mean.wait()
        session.catch_up()
        passed = mean.totals()
        slower.append(max(gathered(own_s, control)) / steps_s)
        # What was left when the steps had ended went on alone. Who joined last waited for nobody.
        comm_s = min(gathered(passed.comm_s - before.comm_s, control))
        left_s = min(gathered(passed.exposed_s - before.exposed_s, control))
        factor = (comm_s - left_s) / max(1e-9, alone_s - left_s)
        # Where next to nothing was sent beside the steps, nothing is known.
        slowed.append(factor if left_s < alone_s / 2 else 1.0)
    beside_s = found.step_s * max(1.0, statistics.median(slower))
    return replace(found, beside_s=beside_s, slowed=max(1.0, statistics.median(slowed)))


def _steps_s(session: Session, number: int) -> float:
    """Train alone for so many steps, and return the seconds that all of them took."""
    begun = time.perf_counter()
    for _ in range(number):
        _step(session)
    return time.perf_counter() - begun


def _step(session: Session) -> None:
    gradients(session)
    session.synchronize()
    session.optimizer.zero_grad(set_to_none=True)
    session.step += 1
    session.catch_up()


def _curve(
    session: Session,
    mean: BackgroundMean,
    collective: Callable[[torch.Tensor], None],
    seconds: float,
) -> Curve:
    """Time a collective of ever larger parts of the mean's buffer, as long as the next one may end
    in time."""
    run, width = session.run, mean.buffer.element_size()
    if mean.num_replicas == 1:
        return Curve([_SMALLEST], [0.0])
    sizes: list[int] = []
    found: list[float] = []
    size, left_s = min(_SMALLEST, mean.buffer.nbytes), seconds
    while True:
        part, times = mean.buffer[: size // width], []
        for repeat in range(4 if left_s > 0 else 2):
            run.barrier()
            session.catch_up()
            begun = time.perf_counter()
            collective(part)
            session.catch_up()
            # Who joins last waits for nobody.
            took = min(gathered(time.perf_counter() - begun, run.control))
            times += [took] if repeat else []  # the first connects
            left_s -= took
        sizes.append(size)
        found.append(statistics.median(times))
        following = min(size * _GROWTH, mean.buffer.nbytes)
        if following == size or _GROWTH * 2 * found[-1] > left_s:
            return Curve(sizes, found)
        size = following


def report(
    found: Measured,
    tau: int,
    bucket_bytes: int,
    overrides: Sequence[str],
    step_known: bool = False,
) -> str:
    """The forecasts of all methods that are simulated, as a text.

    Args:
        step_known: the seconds of a step were given, so that no steps were made.
    """
    ahead = [best_forecast(found, name, tau, bucket_bytes) for name in ENTRIES if name != LIMIT]
    ahead.sort(key=lambda one: one.share)
    rows = []
    for one in ahead:
        length = one.hides or one.tau
        own = []
        if length is not None:
            own = [
                f"{one.method}.tau={length}",
                *cut(one.method, min(one.fragments, length), length),
            ]
        rows.append(
            (
                one.method,
                "" if one.tau is None else one.tau,
                one.fragments if one.fragments > 1 else "",
                f"{one.share:.1%}",
                "" if one.tau is None else one.hides or f"above {CHOICES[-1]}",
                f"{one.bytes_per_step / 1e6:.3g}",
                f"{CATALOGUE[one.method].copies:g}",
                " ".join(["train.py", *overrides, f"method={one.method}", *own]),
            )
        )
    head = ("method", "τ", "fragments", "waits", "τ that hides", "MB a step", "copies", "command")
    whole_s = found.whole_s(bucket_bytes)
    measured = [
        f"a step: {found.step_s:.3g} s, and {found.beside_s / found.step_s - 1:.0%} more beside a "
        f"mean, which takes {found.slowed - 1:.0%} more beside steps",
        "at the end of a round a worker waits for the slowest one, on average "
        f"{found.uneven:.1%} of the time of its steps",
    ]
    given = [
        f"a step: {found.step_s:.3g} s, as given; what steps and a mean cost each other, and how "
        "workers differ, is not measured and counted as nothing"
    ]
    lines = [
        *(given if step_known else measured),
        f"a mean of {found.vector_bytes / 1e6:.3g} MB over {found.replicas} replicas: "
        f"{whole_s:.3g} s, {whole_s / found.step_s:.3g} steps; the smallest one "
        f"{found.mean.seconds[0] * 1e3:.3g} ms",
    ]
    others = ", ".join(name for name in CATALOGUE if name not in ENTRIES)
    last = f"not simulated: {others}; docs/results.md has what methods cost in steps"
    return "\n".join([*lines, "", Table(head, rows).markdown(), "", last])


def main(make: Callable[[Sequence[str]], Config], make_task: Callable[[Config], Task],
         argv: Sequence[str]) -> int:  # fmt: skip
    """The command line. Returns the exit status. Raises `ConfigError`."""
    options, words = _parser().parse_known_args(list(argv))
    line = command_line(words)
    flags = [*(["-m"] if line.sweep else []), *line.flags]
    require(not flags, "flag", " ".join(flags), "is of train.py; see --help")
    seconds = number("--seconds", options.seconds, 1.0)
    tau = whole("--tau", options.tau)
    step_s = None if options.step_s is None else number("--step-s", options.step_s, 1e-6)
    left_out = {"method", "runs", "tag", "resume"}
    overrides = [word for word in line.overrides if key_of(word) not in left_out]
    config = make([*overrides, "method=local_sgd", "resume=never", "tag=probe"])
    require(not config.launch.elastic, "launch.elastic", "true", "is not probed; use false")
    make_task(config).setup(world_size(config.launch))
    work = partial(_work, make_task, seconds, step_s, tau, tuple(overrides))
    return launch.run(work, config)


def _work(
    make_task: Callable[[Config], Task],
    seconds: float,
    step_s: float | None,
    tau: int,
    overrides: Sequence[str],
    config: Config,
) -> None:
    """What every worker does."""
    folder = Path(tempfile.mkdtemp(prefix="co2-probe-"))
    try:
        config = replace(
            config,
            runs=str(folder),
            resume=Resume.auto,
            log=replace(config.log, wandb=Wandb.disabled, tensorboard=False),
        )
        task = make_task(config)
        task.setup(world_size(config.launch))
        mesh = launch.mesh(config)
        alone = LocalSGD(LocalSGD.Config(tau=1_000_000_000), config.comm)
        run = Run.open(config, task, alone, mesh, UNKNOWN)
        with run, closing(build(run)) as session:
            found = measure(session, seconds, step_s, tau)
            alone.flush()
        if mesh.worker == 0:
            bucket = max(1, int(config.comm.bucket_mb * 2**20))
            print(report(found, tau, bucket, overrides, step_s is not None), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m co2 probe",
        usage="%(prog)s [OPTION ...] [OVERRIDE ...]",
        epilog="All other words are overrides of train.py, such as task=gpt2 launch.workers=4.",
        description=__doc__,
    )
    add = parser.add_argument
    add("--seconds", default="30", help="for which it measures, about; compiling comes before")
    add("--tau", default="12", help="steps of a round, for which waiting is told")
    add("--step-s", help="seconds of a step, where they are known")
    return parser
