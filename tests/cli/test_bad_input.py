"""What cannot run is refused: bad settings, environments and command lines of the programs beside
train.py. One line with key, value and hint, before anything starts, and status 2."""

import errno
import functools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import co2.__main__
import recipes.__main__
import tasks.prepare.__main__
import train
from co2.app.compose import composed, preflight
from co2.app.schema import PLAIN
from co2.errors import REFUSED, ConfigError, from_outside
from co2.limits import choices, fits, limits, words
from co2.record import compare, timeline, wandb_sync
from co2.record.folder import run_folder
from co2.start import launch, placement
from co2.start.identity import identity
from co2_measure.lab import __main__ as lab
from co2_measure.lab import slow_network
from co2_measure.simulate import __main__ as simulate
from tests import server
from tests.cli.harness import (
    ANNOUNCED,
    LIMIT_S,
    Run,
    cli,
    command,
    configured,
    contents,
    execute,
    files,
    held_port,
    kill_session,
    pooled,
    refused,
    spied,
    started_processes,
    until,
)
from tests.engine.test_limits import FIELDS, SCHEMAS, edges
from tests.grids import grid, nonempty
from tests.server import environment, fork_program
from tests.tasks import pictures
from tests.tasks.build import sampler
from tests.workers import Pool

COUNT = "must be a whole number, 1 or more"
WHOLE = "must be a whole number"
ZERO2 = "mesh.replica_size=2 mesh.strategy=zero2"
KEEP = "method=co2_keep co2_keep"
STREAMING = "method=streaming_diloco streaming_diloco"
ADAM = "optim.name=adamw"
MOMENTS = "co2_keep.average_moments=true"

# Command line; key=value that the line names; what it must say. What the types of single settings
# declare is not here: `test_a_value_beyond_what_is_declared` has all of them.
VALUES = [
    ("co2.tau=0", "co2.tau=0", COUNT),
    ("co2.tau", "co2.tau=", "is not key=value"),
    ("co2.tau=${nope}", "co2.tau=", "nope"),
    ("co2.tau=1e400", "co2.tau=inf", WHOLE),
    ("co2.tau=1000000000000000000000", "co2.tau=1000000000000000000000", "below 2⁶³"),
    ("co2.tau=${oc.env:PWD}", "co2.tau=/", COUNT),
    ("co2.tau=${co2.tau}", "co2.tau=", "Recursive"),
    ("co2.tau=${", "co2.tau=${", "two pairs of quotes"),
    (f"{STREAMING}.delay=12", "streaming_diloco.delay=12", "below tau, which is 12"),
    (f"{STREAMING}.fragments=13", "streaming_diloco.fragments=13", "at most tau, which is 12"),
    (f"{KEEP}.fragments=13", "co2_keep.fragments=13", "at most tau, which is 12"),
    (f"{KEEP}.fragments=13 co2_keep.tau=auto", "co2_keep.fragments=13", "at most 12 with tau=auto"),
    (f"{KEEP}.fragments=2 {MOMENTS}", MOMENTS, "fragments is 2; use false, or 1"),
    (f"{STREAMING}.exchange=int8 comm.dtype=bf16", "comm.dtype=bf16", "use fp32"),
    ("method=desloc", "optim.name=sgd", "method=desloc: it averages Adam's moments; use adamw"),
    ("method=demo optim.name=adamw", "optim.name=adamw", "use sgd with optim.momentum=0"),
    ("method=demo optim.momentum=0.9", "optim.momentum=0.9", "method=demo: has a momentum of its"),
    ("co2.average_moments=true", "optim.name=sgd", "method=co2: average_moments=true averages"),
    ("method=onebit_adam", "optim.name=sgd", "is a kind of Adam; use adamw"),
    ("method=diloco diloco.average_moments=true optim.name=muon", "optim.name=muon", "adamw"),
    ("task=resnet50 optim.name=muon", "optim.name=muon", "no hidden matrix"),
    ("method=onebit_adam optim.name=adamw comm.dtype=bf16", "comm.dtype=bf16", "use fp32"),
    ("method=zero_one_adam optim.name=adamw comm.device=cpu", "comm.device=cpu", "use auto"),
    ("train.batch_size=1", "train.batch_size=1", "at least 2"),
    ("co2.shard=true comm.dtype=bf16", "comm.dtype=bf16", "use fp32"),
    ("optim.decay_every=5", "optim.decay_every=5", "schedule=cosine has none; use null"),
    ("optim.schedule=exponential", "optim.decay_every=null", "needs a whole number of steps"),
    ("optim.milestones=[30]", "optim.milestones=[30]", "schedule=cosine has none; use []"),
    ("optim.schedule=step", "optim.milestones=[]", "needs rising steps"),
    ("optim.schedule=step optim.milestones=[60,30]", "optim.milestones=[60, 30]", "rising steps"),
    ("optim.nesterov=true optim.momentum=0", "optim.", "momentum"),
    (f"{ZERO2} comm.device=cpu", "comm.device=cpu", "use auto"),
    ("launch.workers=600", "launch.workers=600", "use at most 512"),
    ("launch.workers=100", "train.batch_size=16", "use at most 5"),
    ("train.batch_size=1000", "train.batch_size=1000", "use at most 256"),
    ("comm.device=cpu method=allreduce", "comm.device=cpu", "use auto"),
    ("data.path=mine.txt", "data.path=mine.txt", "leave it null"),
    ("init_from=missing", "init_from=missing", "no such folder"),
    ("init_from=", "init_from=", "or null"),
    ("tag=a/b", "tag=a/b", "folder name"),
    (f"tag={'a' * 201}", "tag=aaa", "200 bytes"),
    ("tag='\x1b[2J'", r"tag=\x1b[2J", "folder name"),
    ("tag=${now:%S}", "tag=${now:%S}", "give a name"),
    ("runs=/dev/null/runs", "runs=/dev/null/runs", "cannot write /dev/null (Not a directory)"),
    ("runs=${now:%S}", "runs=${now:%S}", "give a name"),
    ("data.root=", "data.root=", "a folder"),
    ("task=resnet50 data.path=missing", "data.path=missing", "no such folder"),
    ("task=gpt2 data.path=/dev/zero", "data.path=/dev/zero", "a file or a folder"),
    ("runs=", "runs=", ""),
    ("train=3", "train=3", "group of keys"),
    ("task=gpt2 gpt2.corpus=openwebtext", "gpt2.corpus=openwebtext", "tasks.prepare"),
    ("task=gpt2 data.path=missing.txt", "data.path=missing.txt", "no such file"),
    ("task=gpt2 data.path=", "data.path=", "a file or a folder"),
]
PAIR = "mesh.replica_size=2"
EP = f"task=moe {PAIR} mesh.strategy=ep"
OF_SEVERAL_WORKERS = [
    (f"launch.workers=3 {PAIR}", PAIR, "must divide the 3 workers"),
    ("mesh.strategy=zero3", "mesh.strategy=zero3", "set mesh.replica_size to 2 or more"),
    (f"comm.device=cpu {PAIR}", "comm.device=cpu", "gradients inside a replica"),
    (f"method=allreduce comm.dtype=bf16 {ZERO2}", "comm.dtype=bf16", "mesh.strategy=zero2"),
    (f"method=torch_post_local_sgd {PAIR}", PAIR, "takes a worker for a replica"),
    *(
        (
            f"method={words} {PAIR} mesh.strategy={one}",
            f"mesh.strategy={one}",
            f"method={words[:4]}",
        )
        for words in (f"onebit_adam {ADAM}", f"zero_one_adam {ADAM}", "demo")
        for one in ("zero1", "zero2", "zero3")
    ),
    *(
        (f"optim.name=muon {PAIR} mesh.strategy={one}", f"mesh.strategy={one}", "whole matrices")
        for one in ("zero2", "zero3")
    ),
    *(
        (f"method={words} {ADAM} {PAIR} mesh.strategy=zero1", "mesh.strategy=zero1", "method=")
        for words in ("acco", "desloc", "mt_dao", "diloco diloco.average_moments=true")
    ),
    ("mesh.sync_batch_norm=true", "mesh.sync_batch_norm=true", "set mesh.replica_size to 2"),
    (f"mesh.sync_batch_norm=true {PAIR}", "mesh.sync_batch_norm=true", "on GPUs only"),
    (f"{PAIR} mesh.strategy=ep", "mesh.strategy=ep", "divides experts, and task=toy has none"),
    (f"{EP} mesh.replica_size=3 launch.workers=3", "mesh.replica_size=3", "must divide the 8 "),
    (f"{EP} moe.kernel=grouped", "moe.kernel=grouped", "needs all experts "),
    ("task=moe moe.kernel=fused", "moe.kernel=fused", "needs a CUDA "),
    (f"{EP} method=co2 co2.shard=true", "mesh.strategy=ep", "method=co2: "),
    (f"{EP} method=sparseloco", "mesh.strategy=ep", "method=sparseloco: its "),
    (f"{STREAMING}.exchange=int8 {ZERO2}", "mesh.strategy=zero2", "exchange=int8 "),
]
ELASTIC = "launch.elastic=true"
PAIRS = f"{ELASTIC} method=co2 launch.workers=4 {ZERO2}"
THREE = "launch.min_replicas=3"
ELASTIC_RUNS = [
    (f"{ELASTIC} method=allreduce", ELASTIC, "method=allreduce: has no rounds at whose end"),
    (f"{ELASTIC} method=sparseloco", ELASTIC, "what a replica has not sent yet"),
    (f"{ELASTIC} method=noloco", ELASTIC, "method=noloco: a pair's exchange does not recover"),
    (f"{ELASTIC} method=co2 co2.tau=auto", ELASTIC, "method=co2: tau=auto times rounds"),
    (f"{ELASTIC} method=co2 co2.shard=true", ELASTIC, "co2.shard=true leaves each replica"),
    (f"{ELASTIC} method=co2 {THREE}", THREE, "must be at most launch.workers, which is 2"),
    (f"{PAIRS} launch.workers=3", PAIR, "must divide the 3 workers"),
    (f"{PAIRS} launch.quorum=1", "launch.quorum=1", "several workers makes all its steps"),
    (f"{PAIRS} {THREE}", THREE, "at most launch.workers / mesh.replica_size, which is 2"),
    ("launch.quorum=2", "launch.quorum=2", "is for elastic runs; use null"),
    ("launch.restarts=2", "launch.restarts=2", "is for elastic runs; use 0"),
    (f"{ELASTIC} launch.quorum=3", "launch.quorum=3", "must be at most launch.workers, which is 2"),
    *(
        (f"{ELASTIC} launch.quorum=1 method={words}", "launch.quorum=1", reason)
        for words, reason in (
            ("allreduce", "does not support weighted averaging"),
            ("eager_diloco", "adds its own part, 1/G"),
            ("streaming_diloco", "its fragments meet amid the round"),
            ("co2_keep", "replica is behind; use null, or fragments=1"),
            ("noloco", "the mean of a pair does not support weighted averaging"),
            (f"desloc {ADAM}", "moments of unequal numbers of steps"),
            (
                f"diloco {ADAM} diloco.average_moments=true",
                "average_moments=true: moments of unequ",
            ),
        )
    ),
]
NAMES = [
    ("co2.tua=3", "co2.tua=3", "did you mean co2.tau?"),
    ("slowmo.tau=3 method=co2", "slowmo.tau=3", "there is no slowmo here; did you mean co2.tau?"),
    ("+slowmo={} method=co2", "slowmo={}", "unknown key"),
    ("gpt2.size=xl", "gpt2.size=xl", "there is no gpt2 here"),
    ("method=nope", "method=nope", "acco, allreduce, co2, co2_keep, co2_released, cocod_sgd, demo"),
    ("method=slomo", "method=slomo", "did you mean slowmo?"),
    ("scale=nope", "scale=nope", "did you mean node?"),
    ("scale=paper", "scale=paper", "it has smoke"),
    ("method=null", "method=", "allreduce, co2"),
    ("tran.steps=3", "tran.steps=3", "did you mean train.steps?"),
    ("tran.stps=3", "tran.stps=3", "there is no tran here; did you mean train?"),
    ("steps=3", "steps=3", "did you mean train.steps?"),
    ("train.lr=3", "train.lr=3", "did you mean optim.lr?"),
    ("toy.nosuch=3", "toy.nosuch=3", "unknown key; known: toy.delay_s, toy.features"),
    ("method=acco acco.tau=3", "acco.tau=3", "acco has no keys"),
    ("nonsense=3", "nonsense=3", "train"),
    ("=3", "=3", ""),
    ("hydra/launcher=nope", "hydra/launcher=nope", "basic"),
    ("tuned=true", "tuned=true", "python -m recipes tune toy co2"),
    ("task=../../etc/passwd", "task=../../etc/passwd", "known: ade20k"),
    ("tag=\udcff", "tag=", "no UTF-8 text"),
    ("a=b=c", "a=b=c", "two pairs of quotes"),
    ("tag=ü", "tag=ü", "two pairs of quotes: \"tag='ü'\""),
    ("tag=my run", "run=", "a value with a space stands in quotes: \"tag='my run'\""),
    ("runs=~/runs", "runs=~/runs", "write $HOME"),
    ("ü=3", "ü=3", "give key=value"),
    # What would have Hydra run code, or read a configuration or a pickle from elsewhere.
    ("+_target_=os.system", "_target_=os.system", "unknown key"),
    ("+co2._target_=os.system", "co2._target_=os.system", "unknown key"),
    ("hydra.launcher._target_=os.mkdir", "hydra.launcher._target_=os.mkdir", "names code"),
    ("-m hydra.sweeper={_target_:os.mkdir}", "hydra.sweeper={_target_", "names code"),
    ("+hydra.callbacks.x._target_=os.mkdir", "hydra.callbacks.x._target_=os", "launcher, sweeper"),
    ("hydra.searchpath=[file:///tmp]", "hydra.searchpath=[file:///tmp]", "launcher, sweeper"),
    ("hydra.mode=MULTIRUN", "hydra.mode=MULTIRUN", "launcher, sweeper"),
    ("+hydra/job_logging@hydra.x=stdout", "hydra/job_logging@hydra.x=stdout", "launcher, sweeper"),
    ("--config-path=/tmp", "--config-path=/tmp", "conf/ only"),
    ("--experimental-rerun=config.pickle", "--experimental-rerun=config.pickle", "conf/ only"),
    ("--multirun=3", "--multirun=3", "no such flag"),
    # Without a key it would not be clear whose value holds, the recipe's or the dataclass's.
    ("~co2.tau", "co2.tau", ""),
    ("optim=null", "optim", ""),
]
SWEEPS = [
    ("co2.tau=1,3", "co2.tau=1,3", "-m"),
    ("-m co2.tau=1,3,0", "co2.tau=0", COUNT),
    ("-m method=co2,nope", "method=nope", "known"),
    ("-m method=slowmo,co2 slowmo.tau=3", "slowmo.tau=3", "did you mean co2.tau?"),
    ("-m optim.lr=0.1 train.steps=5,0 co2.tau=1,3", "train.steps=0", COUNT),
]


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, which must still be empty in the end; no worker and no network is
    made."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(launch, "run", lambda *_: pytest.fail("workers were started"))
    for module in (lab, slow_network):
        monkeypatch.setattr(module, "check_root", lambda: pytest.fail("a network was begun"))
    monkeypatch.setattr(sys, "argv", ["program"])
    yield here
    assert os.listdir(here) == []


def refusal(arguments: str) -> str:
    """The line that refuses a command line; `task=toy` goes before it."""
    given = arguments.split()
    flags = [word for word in given if word.startswith("-")]
    others = [word for word in given if not word.startswith("-")]
    usual = [w for w in ("task=toy", "launch.backend=gloo") if w.partition("=")[0] not in arguments]
    with pytest.raises(ConfigError) as caught:
        preflight(train.APP.conf, [*flags, *usual, *others], train.APP.check)
    return str(caught.value)


def assert_names(line: str, pair: str, hint: str) -> None:
    """One line: `key=value: hint`. A number may be spelt as a float."""
    assert line.isprintable()
    assert line.removeprefix("~").startswith(pair)
    assert line.partition(": ")[2] and hint in line.partition(": ")[2]


@pytest.mark.parametrize(
    ("arguments", "pair", "hint"), [*VALUES, *OF_SEVERAL_WORKERS, *ELASTIC_RUNS, *NAMES, *SWEEPS]
)
def test_refused_in_one_line(empty: Path, arguments: str, pair: str, hint: str) -> None:
    assert_names(refusal(arguments), pair, hint)


SINGLE = [name for name in PLAIN if name not in ("task", "method", "scale")]
"""Keys outside groups, without those that choose them."""


def chosen(node: str) -> str:
    """What makes a group of keys one of the run's."""
    kinds = (("task", train.APP.tasks), ("method", train.APP.methods))
    return next((f"{kind}={node}" for kind, known in kinds if node in known), "")


def beyond(hint: Any) -> Iterator[Any]:
    """Values that no setting of this annotation takes: just outside its range, or of another type.
    Where a text is due, a bare number is one."""
    texts = any(kind is str for kind, _ in choices(hint))
    for value in (["a"], [["a"]], *(() if texts else ("typo", "7", True, 0.5, None, *edges(hint)))):
        if not fits(value, hint) and not isinstance(value, Enum):
            yield value


@functools.cache
def values_of(chosen: str) -> dict[str, Any]:
    """What a command line composes."""
    return composed(train.APP.conf, (chosen or "task=toy").split())


@pytest.mark.parametrize(("node", "name"), [*FIELDS, *(("", name) for name in SINGLE)])
def test_a_value_beyond_what_is_declared(empty: Path, node: str, name: str) -> None:
    """Whatever a command line gives: one line, with the key and what its type declares."""
    hint = limits(SCHEMAS[node])[name] if node else PLAIN[name]
    values, key = values_of(chosen(node)), f"{node}.{name}".strip(".")
    for value in nonempty(beyond(hint)):
        if key == "launch.workers" and value is None:  # stands for one on each GPU
            continue
        changed = {node: {**values[node], name: value}} if node else {name: value}
        with pytest.raises(ConfigError) as caught:
            train.APP.validate({**values, **changed}, [])
        assert_names(str(caught.value), f"{key}=", f"must be {words(hint)}")


@pytest.mark.parametrize("node", SCHEMAS)
@pytest.mark.parametrize("plus", grid(["", "+", "++"], "".__eq__))
def test_unknown_key_of_every_node(empty: Path, node: str, plus: str) -> None:
    names = limits(SCHEMAS[node])
    name = next(iter(names), "key")
    line = refusal(f"{chosen(node)} {plus}{node}.{name}x=1")
    hint = f"did you mean {node}.{name}?" if names else f"{node} has no keys"
    assert_names(line, f"{node}.{name}x=1", hint)


def test_too_few_gpus(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert_names(refusal("launch.backend=nccl"), "launch.backend=nccl", "2 GPUs needed")


def test_no_bf16(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "bf16_supported", lambda device: False)
    assert_names(refusal("train.precision=bf16"), "train.precision=bf16", "use fp32")


def test_only_worker_0_speaks(variables: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    error = ConfigError("co2.tau", 0, COUNT)
    for rank, lines in (("0", 1), ("1", 0)):
        variables(SLURM_PROCID=rank, SLURM_NTASKS="2")
        assert launch.refuse(error) == REFUSED == 2
        assert len(capsys.readouterr().err.splitlines()) == lines


def test_good_command_lines_pass(empty: Path) -> None:
    """What Hydra itself offers, and forms of overriding that need not be known here."""
    good = ("co2.tau=3", "++co2.tau=3", "co2.gap_penalty=1.5", "co2.gap_penalty=2", "co2.clip=0")
    good += ("data.root=2024", "tag=12", "co2.tau=${train.steps}", "hydra.sweep.dir=elsewhere")
    for arguments in (*good, "-m co2.tau=1,3 optim.lr=0.1,0.2", "--cfg job"):
        preflight(train.APP.conf, sorted(["task=toy", *arguments.split()]), train.APP.check)


@pytest.mark.parametrize(
    ("arguments", "status", "out", "err"),
    [
        ("--cfg job task=toy method=slowmo", 0, "outer_momentum: 0.5", ""),
        ("--cfg job co2.tua=3", 2, "", "error: configuration=: Could not override 'co2.tua'."),
        ("-m --cfg job co2.tau=1,3", 2, "", "error: --cfg=: shows one run; leave out -m"),
        ("--resolve task=toy", 2, "", "error: --resolve=: goes with --cfg job only"),
    ],
)
def test_what_hydra_answers_itself(
    empty: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    status: int,
    out: str,
    err: str,
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments.split()])
    assert train.APP.main(arguments.split()) == status
    printed = capsys.readouterr()
    assert out in printed.out and printed.err.startswith(err)
    assert len(printed.err.splitlines()) == bool(err)


MINE = ("tag=mine", "co2.tau=3", "train.steps=2", "launch.workers=1")


@pytest.fixture(scope="module")
def mine(workers: Pool, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run, to collide with."""
    return pooled(workers, 1, *MINE, runs=tmp_path_factory.mktemp("mine") / "runs")


@pytest.mark.parametrize(
    ("changed", "there"),
    [
        ("co2.tau=6", "co2.tau=3"),
        ("train.steps=9", "train.steps=2"),
        ("optim.lr=0.2", "optim.lr=0.1"),
        ("toy.hidden=8", "toy.hidden=32"),
    ],
)
def test_the_folder_of_another_configuration(mine: Run, changed: str, there: str) -> None:
    before = contents(mine.runs)
    with pytest.raises(ConfigError) as caught:
        configured(*MINE, changed, runs=mine.runs)
    assert_names(str(caught.value), changed, there)
    assert "tag=" in str(caught.value) and "resume=never" in str(caught.value)
    assert contents(mine.runs) == before


def test_the_folder_of_the_same_training(mine: Run) -> None:
    """Or one that is moved aside."""
    free = ("log.every=1", "checkpoint.every=3", "checkpoint.keep=9", "data.root=x")
    for more in (*free, "data.workers=2", "co2.tau=6 resume=never"):
        configured(*MINE, *more.split(), runs=mine.runs)


def test_the_folder_of_another_version(tmp_path: Path) -> None:
    """Its checkpoints cannot be read; a finished run and a fresh start need none of them."""
    runs = tmp_path / "runs"
    folder = run_folder(configured("method=co2", runs=runs))
    manifest = folder / "checkpoints" / "step_20" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    (folder / "config.yaml").write_text("{}")
    for text in ('{"step": 20, "world": 2}', '{"format": 1, "step": 20}'):
        manifest.write_text(text)
        with pytest.raises(ConfigError, match=r"another version .* resume=never"):
            configured("method=co2", runs=runs)
        configured("method=co2", "resume=never", runs=runs)
    manifest.write_text("torn")
    with pytest.raises(ConfigError, match="holds a run with"):  # of the empty configuration
        configured("method=co2", runs=runs)


def test_refused_as_a_person_sees_it(tmp_path: Path) -> None:
    """Status 2, one line, no file anywhere, no further process."""
    home, here, spy = tmp_path / "home", tmp_path / "here", tmp_path / "spy"
    for folder in (home, here):
        folder.mkdir()
    env = environment(HOME=str(home), **spied(spy))
    ended = execute(command("co2.tau=0", runs=here / "runs"), here / "runs", env, status=2)
    assert ended.out == "" and ended.err == f"{ANNOUNCED}error: co2.tau=0: {COUNT}, or auto\n"
    assert list(here.iterdir()) == list(home.iterdir()) == []
    assert started_processes(spy) == 1


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_damaged_file_is_one_line_whoever_meets_it(tmp_path: Path, ahead: int) -> None:
    """Found by worker 1 alone, while training: the line names it, and the status is 2."""
    tree = pictures.tree(tmp_path / "tree", train=8, val=1)
    arguments = ("task=resnet50", f"data.path={tree}", "train.batch_size=2", "train.steps=4")
    arguments += ("method=local_sgd", f"data.workers={ahead}")
    task = train.APP.make_task(configured(*arguments, runs=tmp_path / "runs"))
    found = sorted((tree / "train").glob("*/*"))
    victim = found[int(sampler(task, len(found), 2).indices(1, 1)[0])]
    victim.write_bytes(victim.read_bytes()[:-100])
    run = cli(*arguments, runs=tmp_path / "runs", status=2)
    (error,) = run.err.splitlines()
    assert error.startswith("error: ") and str(victim.relative_to(tree)) in error
    assert not (run.folder / "summary.json").exists()


def test_a_key_that_is_newer_than_the_folder(workers: Pool, tmp_path: Path) -> None:
    """An option that this version has added, of the suite or of the task, is no other run, unless
    it is used."""
    words = ("train.steps=2", "launch.workers=1")
    run = pooled(workers, 1, *words, runs=tmp_path)
    path, same = run.folder / "config.yaml", (*words, f"tag={run.folder.parent.name}")
    for key, other, there in (("comm.dtype", "bf16", "fp32"), ("toy.features", "8", "16")):
        lines, name = path.read_text().splitlines(keepends=True), key.partition(".")[2]
        path.write_text("".join(line for line in lines if f"  {name}:" not in line))
        configured(*same, runs=tmp_path)
        with pytest.raises(ConfigError, match=rf"^{key}={other}: .* with {key}={there}"):
            configured(*same, f"{key}={other}", runs=tmp_path)


NUMBER = "must be a whole number"
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}
SRUN = {**BATCH, "SLURM_STEP_ID": "0"}

# Variables beside those of a good start; what the line begins with; what it must say.
ENVIRONMENTS = [
    (TORCHRUN, "WORLD_SIZE", "two", NUMBER),
    (TORCHRUN, "WORLD_SIZE", "0", "1 or more"),
    (TORCHRUN, "RANK", "x", NUMBER),
    (TORCHRUN, "RANK", "2", "from 0 to 1"),
    (TORCHRUN, "LOCAL_RANK", "2", "from 0 to 1"),
    (TORCHRUN, "LOCAL_WORLD_SIZE", "3", "from 1 to 2"),
    (TORCHRUN, "MASTER_PORT", "99999", "from 0 to 65535"),
    (SRUN, "SLURM_NTASKS", "many", NUMBER),
    (SRUN, "SLURM_PROCID", "2", "from 0 to 1"),
    (SRUN, "SLURM_LOCALID", "x", "from 0 to 1"),
    (SRUN, "SLURM_JOB_ID", "x", NUMBER),
    (SRUN, "SLURM_STEP_ID", "x", NUMBER),
    (BATCH, "SLURM_NTASKS", "4", "srun has not started this process"),
]

RECIPES, LAB, SIMULATE = recipes.__main__.main, lab.main, simulate.main
PROGRAMS: list[tuple[str, Callable[..., object], str, str]] = [
    ("recipes", RECIPES, "nosuch", "invalid choice: 'nosuch' (choose from 'list', 'run'"),
    ("recipes", RECIPES, "run nosuch", "recipe=nosuch: no such recipe"),
    ("recipes", RECIPES, "run table2 --seeds x", "--seeds=x: must be whole numbers"),
    ("recipes", RECIPES, "run table2 --scale huge", "choose from 'smoke', 'gpu', 'node', 'paper'"),
    ("recipes", RECIPES, "run digits --scale paper", "--scale=paper: digits can be run at"),
    ("recipes", RECIPES, "run table2 --seed 3", "--seed=3: is of again alone"),
    ("recipes", RECIPES, "tune", "task=: name a task"),
    ("recipes", RECIPES, "tune nosuch", "task=nosuch: known: ade20k"),
    ("recipes", RECIPES, "tune gpt2 nosuch", "method=nosuch: known: acco"),
    ("recipes", RECIPES, "tune gpt2 co2 --trials 0", "--trials=0: must be 1 or more"),
    ("recipes", RECIPES, "tune gpt2 co2 --tau -2", "--tau=-2: must be 1 or more steps"),
    ("lab", LAB, "--workers 0", "--workers=0: " + NUMBER),
    ("lab", LAB, "--mbit -3", "--mbit=-3: must be Mbit/s above 0"),
    ("lab", LAB, "--methods nosuch", "--methods=nosuch: known: acco"),
    ("lab", LAB, "--repeats 0", "--repeats=0: " + NUMBER),
    ("lab", LAB, "--schedule 1:2", "--schedule=1:2: must be RATE@SECONDSs"),
    ("lab", LAB, "--slow-cpu 9:1", "--slow-cpu=9: workers are counted from 0 to 1"),
    ("lab", LAB, "--target-loss x", "--target-loss: invalid float value: 'x'"),
    ("lab", LAB, "--nosuch", "option=--nosuch: unknown"),
    ("simulate", SIMULATE, "--gpus 0", "--gpus=0: " + NUMBER),
    ("simulate", SIMULATE, "--gpus 64..8", "--gpus=64..8: must end at its start"),
    ("simulate", SIMULATE, "--link x", "--link=x"),
    ("simulate", SIMULATE, "--jitter nan", "--jitter=nan: must be a number of 0"),
    ("simulate", SIMULATE, "--rounds x\ny", r"--rounds=x\ny: " + NUMBER),
    ("compare", compare.main, "nowhere nowhere", "RUN=nowhere: has no config.yaml"),
    ("compare", compare.main, "nowhere", "the following arguments are required: RUN"),
    ("timeline", timeline.main, "nowhere", "nowhere"),
    ("timeline", timeline.main, "nowhere --rank x", "--rank: invalid int value: 'x'"),
    ("wandb-sync", wandb_sync.main, "--everything", "unrecognized arguments: --everything"),
    ("prepare", tasks.prepare.__main__.main, "nosuch", "invalid choice: 'nosuch'"),
    ("prepare", tasks.prepare.__main__.main, "ade20k --check nowhere", "--check=nowhere: no such"),
    ("co2", co2.__main__.main, "trian", "co2 trian: no such command; did you mean train?"),
]


@pytest.mark.parametrize(("good", "name", "value", "hint"), ENVIRONMENTS)
def test_environment(
    empty: Path, variables: Callable, good: dict[str, str], name: str, value: str, hint: str
) -> None:
    variables(**{**good, name: value})
    line = refused(train.APP.main, ["task=toy"])
    assert line.startswith(f"{name}={value.strip()}") and hint in line
    assert "unset" in line
    assert files(empty) == {}


def test_steps_of_a_job_do_not_meet() -> None:
    places = [identity({**SRUN, "SLURM_STEP_ID": step}) for step in ("0", "1", "2")]
    assert len({me.port for me in places if me is not None}) == 3


def test_a_worker_says_whom_it_waits_for(tmp_path: Path) -> None:
    path, tasks = tmp_path / "log", []
    _, *words = command("method=local_sgd", "train.steps=4", runs=tmp_path / "runs")
    with held_port() as port, path.open("w") as log:
        try:
            for rank in ("0", "1"):
                place = {**TORCHRUN, "RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
                out = log.fileno()
                tasks.append(fork_program(words, tmp_path, environment(**place), out, out))
                says = "waits for the others of 2 at"
                until(lambda says=says: says in path.read_text(), tasks[0])
            assert [task.wait(LIMIT_S) for task in tasks] == [0, 0]
        finally:
            for task in tasks:
                kill_session(task)


@pytest.mark.parametrize(("name", "program", "words", "says"), PROGRAMS)
def test_program(
    empty: Path, name: str, program: Callable[[list[str]], object], words: str, says: str
) -> None:
    assert says in refused(program, words.split(" "))
    assert files(empty) == {}


LONG = "x" * 300
"""No file can have this name: to look for it is an error, as it is in a folder that nobody may
enter (which root, who may run the tests, can)."""
UNUSABLE = [
    ("train", train.APP.main, "task=gpt2 tag=x data.path={}"),
    ("train", train.APP.main, "task=resnet50 tag=x resnet50.dataset=imagenet data.root={}"),
    ("train", train.APP.main, "task=toy tag=x init_from={}"),
    ("sample", train.APP.main, "sample {}"),
    ("timeline", timeline.main, "{}"),
    ("prepare", tasks.prepare.__main__.main, "imagenet --archives {}"),
]


@pytest.mark.parametrize(
    ("program", "words"),
    [pytest.param(main, words, id=f"{name} {words}") for name, main, words in UNUSABLE],
)
def test_a_file_that_cannot_be_looked_at(
    empty: Path, program: Callable[[list[str]], object], words: str
) -> None:
    line = refused(program, words.format(LONG).split(" "))
    assert line.startswith("file=") and line.endswith("File name too long; choose another")
    assert files(empty) == {}


FEW = ("method=local_sgd", "train.steps=4")


def complaint(run: Run) -> str:
    """The line that a run which has failed says on stderr."""
    assert run.status in (1, 2) and "Traceback" not in run.err, run.err
    (line,) = run.err.splitlines()
    return line


def with_more(tmp_path: Path, code: str) -> Path:
    """train.py, whose processes, and those of its workers, run this code first."""
    path = tmp_path / "more.py"
    run = 'if __name__ == "__main__":\n    sys.exit(train.APP.main(sys.argv[1:]))\n'
    path.write_text(f"import sys, train\n{code}\n{run}")
    return path


LITTLE_MEMORY = """
import ctypes, subprocess
assert ctypes.CDLL(None).unshare(0x20000) == 0  # mounts of its own
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", "/dev/shm"], check=True)
"""


def test_no_room_for_batches(tmp_path: Path) -> None:
    """Docker gives 64 MB, in which few batches of pictures have room."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make namespaces and mounts")
    words = (*FEW, "toy.features=8192", "train.batch_size=128", "data.workers=2")
    script = with_more(tmp_path, LITTLE_MEMORY)
    assert complaint(cli(*words, runs=tmp_path / "runs", script=script, status=None)) == (
        "error: data.workers=2: /dev/shm does not take a batch of 4.2 MB (No space left on device "
        "(28)), and each worker keeps 4 there; make it larger (docker run --shm-size=16g), or use "
        "data.workers=0"
    )


def test_no_such_interface(tmp_path: Path, variables: Callable) -> None:
    variables(GLOO_SOCKET_IFNAME="nosuch")
    line = complaint(cli(*FEW, runs=tmp_path / "runs", status=None))
    assert line.startswith("error: worker ") and "Unable to find address for: nosuch; " in line
    assert line.endswith("in GLOO_SOCKET_IFNAME, such as lo or eth0, or unset it")


def test_a_port_in_use(tmp_path: Path, variables: Callable) -> None:
    with (
        socket.create_server(("", 0)) as other,
        patch.object(server, "LAUNCHER_VARIABLES", frozenset()),
    ):
        variables(**TORCHRUN, MASTER_PORT=str(other.getsockname()[1]))
        line = complaint(cli(*FEW, runs=tmp_path / "runs", status=None))
    assert line.startswith("error: worker 0: port: ")
    assert line.endswith("EADDRINUSE; another process has this port; set another MASTER_PORT")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "me: Too many open files; raise their"),
        (MemoryError(), "me: MemoryError; use fewer"),
        (RuntimeError("CUDA out of memory. Tried to"), "me: CUDA out of memory; use a smaller"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (OSError("a bug"), None),
    ],
)
def test_what_the_machine_does(error: Exception, line: str | None) -> None:
    found = from_outside(error, "me")
    assert found == line if found is None or line is None else found.startswith(line)


LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))"
"""No file may have more than 8 KiB."""


@pytest.mark.parametrize("elastic", ["false", "true"])
def test_no_room_for_the_model(tmp_path: Path, elastic: str) -> None:
    """One line, whoever writes, and no file that is half there."""
    words = ("toy.hidden=256", "method=local_sgd", "train.steps=24", f"launch.elastic={elastic}")
    script = with_more(tmp_path, LIMITED)
    run = cli(*words, runs=tmp_path / "runs", script=script, status=2)
    (line,) = [line for line in run.err.splitlines() if "error" in line]
    assert line.startswith(f"error: {tmp_path}") and "model.pt: File too large" in line
    assert line.endswith("make room, and the same command goes on from the last checkpoint")
    assert "Traceback" not in run.err
    kept = {path.name for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    assert kept == {"config.yaml", "manifest.json", "metrics.jsonl"}


SLOW_NOTICES = """
import os, time
from co2.train import checkpoint
write = checkpoint.write_durably
def slowly(path, text):
    write(path, text)
    if path.name == "rank_1.json":
        time.sleep(1)
        os.close(os.open(path.parent, os.O_RDONLY))
checkpoint.write_durably = slowly
"""
"""The disk takes a second to confirm a name that worker 0 can read already."""


def test_a_notice_that_has_been_read_is_not_sent_again(tmp_path: Path) -> None:
    """Else it would make the folder anew that worker 0 has removed."""
    words = ("toy.hidden=256", "method=local_sgd", "train.steps=24", "checkpoint.every=8")
    script = with_more(tmp_path, SLOW_NOTICES + LIMITED)
    cli(*words, "launch.workers=2", runs=tmp_path / "runs", script=script, status=2)
    assert not list((tmp_path / "runs").rglob("rank_*.json"))
