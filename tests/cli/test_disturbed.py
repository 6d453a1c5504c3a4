"""Runs that are stopped, killed, fail and go on, by a script drawn at random, end as undisturbed
ones do, bit for bit.

A seed is a script, which a failed test prints; `pytest "tests/cli/test_disturbed.py::test_toy[7]"`
plays it again.
"""

import json
import random
import re
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from co2.errors import PREEMPTED, ConfigError
from co2.methods import METHODS
from co2.train.checkpoint import MANIFEST
from tests.cli import disturbed
from tests.cli.disturbed import NOTHING, Disturbance
from tests.cli.harness import (
    SMALL,
    Run,
    assert_same_run,
    cli,
    configured,
    folder_of,
    pooled,
    saved_steps,
    small,
    summary,
)
from tests.cli.test_checkpoint import DAMAGES, damage, part
from tests.grids import OF_A_KIND, grid
from tests.methods.driver import overrides
from tests.workers import Pool, WorkerError

CHOICES = [(f"method={name}", *overrides(name)) for name in METHODS]
CHOICES += [
    (f"method={name}", f"{name}.tau=3", *own.split())
    for name, own in (
        ("co2", "co2.gap_penalty=gap_aware_elementwise co2.clip=0.1"),
        ("co2", "co2.shard=true"),
        ("co2_keep", "co2_keep.average_moments=true"),
        ("mt_dao", "mt_dao.first_moment_every=6 mt_dao.late_momentum=true"),
        ("streaming_diloco", "streaming_diloco.delay=2 streaming_diloco.exchange=int4"),
    )
]
"""Of methods: those that differ in what a checkpoint must carry over."""
SEEDS = range(8 * len(CHOICES))
QUICK = range(len(CHOICES))
KILLED_IN = ("loss", "evaluate", "write", "fsync", "rename", "summary")
MUON = ("optim.name=muon", "optim.lr=0.02")
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Segment:
    """One start of the run, and what happens to its folder afterwards."""

    disturbance: Disturbance
    words: tuple[str, ...] = ()
    """What may differ between starts."""
    damage: str = ""
    """How the newest of several checkpoints is damaged."""
    victim: int = 0
    """The worker whose file it is."""
    torn: bool = False
    """Whether the lines of metrics end in the midst of one, and tell of steps that were lost."""


@dataclass(frozen=True)
class Script:
    """A run and its segments."""

    words: tuple[str, ...]
    world: int
    replica_size: int
    task: str
    noisy: bool
    """Whether losses draw random numbers, as dropout does."""
    ahead: bool
    """Whether batches are made one step ahead, as on a GPU; never in the undisturbed run."""
    segments: tuple[Segment, ...]

    def __str__(self) -> str:
        return f"{' '.join(self.words)} on {self.world} workers"


def drawn(seed: int, runs: Path, task: str = "toy", own: tuple[str, ...] = ()) -> Script:
    """The script of a seed. What cannot be combined is drawn again.

    Args:
        own: words that make the task quick.
    """
    draw = random.Random(seed)
    while True:
        script = _drawn(draw, task, (*own, *CHOICES[seed % len(CHOICES)]))
        try:
            configured(*script.words, f"launch.workers={script.world}", runs=runs)
        except ConfigError:
            continue
        return script


def _drawn(draw: random.Random, task: str, choice: tuple[str, ...]) -> Script:
    world, evaluated = draw.choice((1, 2, 2, 3, 3, 4)), draw.randint(2, 5)
    steps = draw.randint(10, 16) if task == "toy" else 8
    words = (
        *(f"task={task}", "tag=script", f"train.steps={steps}", f"train.eval_every={evaluated}"),
        *("log.every=1", f"train.accumulate={draw.choice((1, 1, 2))}", "train.batch_size=4"),
        *draw.choice((("optim.name=adamw", "optim.lr=0.01"), ("optim.name=sgd",), MUON)),
        *choice,  # which may name another optimizer
        *draw.choice(((), (), ("train.ema_decay=0.9",), ("train.clip_norm=1",))),
        *draw.choice(((), (), (), ("comm.dtype=bf16",))),
    )
    replica_size = {1: 1, 2: draw.choice((1, 1, 2)), 3: draw.choice((1, 3)), 4: 2}[world]
    if replica_size > 1:
        words += (f"mesh.replica_size={replica_size}", f"mesh.strategy={draw.choice(STRATEGIES)}")
    segments = list(_segments(draw, world))
    if draw.random() < 0.3:
        few = evaluated * (draw.randint(1, 2) if 2 * evaluated < steps else 1)
        words += ("optim.schedule=constant", f"optim.warmup_steps={draw.randint(0, few)}")
        segments.insert(0, Segment(NOTHING, (f"train.steps={few}", "checkpoint.every=2")))
    noisy, ahead = draw.random() < 0.5, draw.random() < 0.3 and task == "toy"
    return Script(words, world, replica_size, task, noisy, ahead, tuple(segments))


def _segments(draw: random.Random, world: int) -> Iterator[Segment]:
    for _ in range(draw.randint(2, 4)):
        what = draw.choice(("stop", "stop", "kill", "kill", "fail", "full"))
        places = {"kill": KILLED_IN, "fail": ("loss",)}
        yield Segment(
            Disturbance(
                what,
                draw.choice(places.get(what, ("step",))),
                draw.randint(1, 9),
                draw.randrange(world),
            ),
            (
                f"checkpoint.every={draw.choice((0, 1, 2, 3, 5))}",
                f"checkpoint.every_s={draw.choice(('null', 0.001, 0.05))}",
                f"checkpoint.keep={draw.choice((1, 2, 3))}",
            ),
            draw.choice(("", "", *DAMAGES)),
            draw.randrange(world),
            draw.random() < 0.3,
        )


def start(script: Script, segment: Segment, workers: Pool, runs: Path, ahead: bool = False) -> Run:
    setting = segment.disturbance.setting(script.task, script.noisy, ahead)
    setting |= {"runs": runs, "status": None if segment.disturbance != NOTHING else 0}
    return pooled(workers, script.world, *script.words, *segment.words, **setting)


def played(script: Script, workers: Pool, runs: Path) -> Run:
    """The run after all segments, and a last start that nothing disturbs. Each start goes on from
    the newest checkpoint that is whole."""
    folder = folder_of(*script.words, f"launch.workers={script.world}", runs=runs)
    spoilt: set[tuple[int, int]] = set()
    for segment in (*script.segments, Segment(NOTHING)):
        whole, what = whole_steps(folder, spoilt), segment.disturbance.what
        print(segment, "goes on from", whole[-1:])
        try:
            run = start(script, segment, workers, runs, script.ahead)
        except WorkerError as error:
            if {"kill": "died", "fail": "of the test"}[what] not in str(error):
                raise
        else:
            assert run.status in ((0, 1) if what == "full" else (0, PREEMPTED)), run.err
            assert resumed_at(run.out) == whole[-1:]
            assert ("stopped and saved" in run.out) == (run.status == PREEMPTED)
            if what == "full":
                assert set(whole_steps(folder, spoilt)) <= set(whole), "there is no room"
            if run.status == 0 and what != "none":  # the disturbance has come too late
                return run
        spoil(folder, segment, spoilt, script.replica_size)
    return run


def spoil(folder: Path, segment: Segment, spoilt: set[tuple[int, int]], replica_size: int) -> None:
    """What happens to a run's files between two starts. `spoilt`: identities of checkpoints that
    are damaged; a start that is killed early leaves them where they are."""
    whole = whole_steps(folder, spoilt)
    if segment.damage and len(whole) > 1:
        newest = folder / "checkpoints" / f"step_{whole[-1]}"
        damage(newest, segment.damage, part(*divmod(segment.victim, replica_size)))
        spoilt.add(identity(newest))
    if segment.torn and whole:
        lost = {"kind": "train", "step": whole[-1] + 1, "loss": 1.0}
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(f'{json.dumps(lost)}\n{{"kind": "train", "st')


def whole_steps(folder: Path, spoilt: set[tuple[int, int]]) -> list[int]:
    """Steps of checkpoints that are sound. Who is killed while it removes an old one leaves part
    of it."""
    places = {step: folder / "checkpoints" / f"step_{step}" for step in saved_steps(folder)}
    sound = {step: path for step, path in places.items() if identity(path) not in spoilt}
    return [step for step, path in sound.items() if has_all_files(path)]


def has_all_files(path: Path) -> bool:
    if not (path / MANIFEST).exists():
        return False
    return all(
        (path / name).exists() for name in json.loads((path / MANIFEST).read_text())["sha256"]
    )


def identity(path: Path) -> tuple[int, int]:
    return path.stat().st_ino, path.stat().st_mtime_ns


def resumed_at(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"^resumed at step (\d+)", text, re.MULTILINE)]


def assert_undisturbed(script: Script, workers: Pool, tmp_path: Path) -> None:
    print(script)
    whole = start(script, Segment(NOTHING), workers, tmp_path / "whole")
    run = played(script, workers, tmp_path / "parts")
    assert_same_run(whole.folder, run.folder)
    one, other = summary(whole.folder), summary(run.folder)
    assert one["bytes_per_step"] == other["bytes_per_step"], "totals go on, too"


def is_telling(seed: int) -> bool:
    """One of each kind of method; every method resumes in tests/methods/test_contract.py."""
    method = CHOICES[seed % len(CHOICES)][0].removeprefix("method=")
    return seed in QUICK and method in OF_A_KIND


@pytest.mark.parametrize("seed", grid(SEEDS, is_telling))
def test_toy(workers: Pool, tmp_path: Path, seed: int) -> None:
    assert_undisturbed(drawn(seed, tmp_path), workers, tmp_path)


def test_the_scripts_hold_everything(tmp_path: Path) -> None:
    """What is refused is drawn again, so a refusal too many would leave something out."""
    scripts = [drawn(seed, tmp_path) for seed in QUICK]
    disturbances = [one.disturbance for script in scripts for one in script.segments]
    assert {one.what for one in disturbances} == {"none", "stop", "kill", "fail", "full"}
    assert {one.place for one in disturbances} == {"step", *KILLED_IN}
    assert {script.world for script in scripts} == {1, 2, 3, 4}
    assert {script.ahead for script in scripts} == {script.noisy for script in scripts} == {0, 1}
    assert {*DAMAGES} <= {one.damage for script in scripts for one in script.segments}
    words = {word for script in scripts for word in script.words}
    assert {f"method={name}" for name in METHODS} <= words
    assert {"train.ema_decay=0.9", "train.accumulate=2", "optim.name=muon"} <= words
    assert {"mesh.strategy=zero1", "mesh.strategy=zero2", "optim.schedule=constant"} <= words


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("task", SMALL)
def test_other_tasks(
    workers: Pool, tmp_path: Path, root: Path, text: Path, task: str, seed: int
) -> None:
    script = drawn(5 * list(SMALL).index(task) + 7 * seed, tmp_path, task, small(task, root, text))
    assert_undisturbed(script, workers, tmp_path)


AT_THE_END = Script(
    ("tag=script", "train.steps=4", "train.eval_every=4", "checkpoint.every=4", "log.every=1"),
    world=2,
    replica_size=1,
    task="toy",
    noisy=False,
    ahead=False,
    segments=(Segment(Disturbance("kill", "summary")),),
)
"""The last evaluation was told twice, which stood before the summary, and was made again."""
CROSSED = Script(
    ("tag=script", "method=co2", "co2.tau=3", "train.steps=9", "train.eval_every=3", "log.every=1"),
    world=2,
    replica_size=1,
    task="toy",
    noisy=True,
    ahead=True,
    segments=(
        Segment(Disturbance("stop", count=5), ("checkpoint.every=2",), damage="flipped", victim=1),
        Segment(Disturbance("full", count=2, worker=1), ("checkpoint.every=1",)),
    ),
)
"""A stop amid a round, whose checkpoint is lost on one worker alone, and then no room."""


@pytest.mark.parametrize("script", [AT_THE_END, CROSSED])
def test_what_once_failed(workers: Pool, tmp_path: Path, script: Script) -> None:
    assert_undisturbed(script, workers, tmp_path)


def by_itself(
    arguments: tuple[str, ...], disturbance: Disturbance, runs: Path, world: int, status: int
) -> Run:
    """A run with processes of its own."""
    words = (*arguments, f"launch.workers={world}")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DISTURBANCE", json.dumps(asdict(disturbance)))
        return cli(*words, runs=runs, script=Path(disturbed.__file__), status=status)


def elastic_method(draw: random.Random, runs: Path) -> tuple[str, ...]:
    while True:
        choice = draw.choice(CHOICES)
        try:
            configured(*choice, "launch.elastic=true", runs=runs)
        except ConfigError:
            continue
        return choice


@pytest.mark.parametrize("seed", grid(range(12), (3,).__contains__))
def test_other_numbers_of_workers(tmp_path: Path, seed: int) -> None:
    """An elastic run goes on with fewer or more, and between two changes it is killed."""
    draw = random.Random(seed)
    words = ("tag=script", "launch.elastic=true", "train.steps=12", "train.eval_every=4")
    words += ("log.every=1", "train.batch_size=4", *elastic_method(draw, tmp_path))
    changes = list(zip(draw.sample((1, 2, 3), 2), (draw.randint(3, 8), 12), strict=True))
    folders = []
    for kind in ("whole", "parts"):
        runs, begun = tmp_path / kind, 0
        for world, end in changes:
            if kind == "parts":
                place = draw.choice(("loss", "write", "fsync"))
                kill = Disturbance("kill", place, draw.randint(1, 2), everybody=True)
                killed = (*words, "checkpoint.every=1"), kill, runs, world, -signal.SIGKILL
                begun = max([begun, *saved_steps(by_itself(*killed).folder)])
            stop, status = Disturbance("stop", count=end - begun), 0 if end == 12 else PREEMPTED
            run = by_itself(words, stop, runs, world, status)
            begun = end
        folders.append(run.folder)
    assert_same_run(*folders)
