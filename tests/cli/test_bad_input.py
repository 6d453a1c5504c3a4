"""What cannot run is refused before anything starts: one line with key, value and hint."""

import functools
import os
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from co2.app.compose import composed, preflight
from co2.app.schema import PLAIN
from co2.errors import REFUSED, ConfigError
from co2.limits import choices, fits, limits, words
from co2.record.folder import run_folder
from co2.start import launch, placement
from tests.cli.harness import (
    ANNOUNCED,
    Run,
    cli,
    command,
    configured,
    contents,
    execute,
    folders,
    pooled,
    spied,
    started_processes,
)
from tests.engine.test_limits import FIELDS, SCHEMAS, edges
from tests.grids import first_of_each, grid, nonempty
from tests.server import environment
from tests.tasks.build import sampler
from tests.workers import Pool

COUNT = "must be a whole number, 1 or more"
WHOLE = "must be a whole number"
FINITE = "must be a finite number, 0 or more"
ZERO2 = "mesh.replica_size=2 mesh.strategy=zero2"
STREAMING = "method=streaming_diloco streaming_diloco"

# Command line; key=value that the line names; what it must say. What the types of single settings
# declare is not here: `test_a_value_beyond_what_is_declared` has all of them.
VALUES = [
    ("co2.tau=0", "co2.tau=0", COUNT),
    ("co2.tau=3 co2.tau=0", "co2.tau=0", COUNT),
    ("co2.tau", "co2.tau=", "is not key=value"),
    ("co2.tau=${nope}", "co2.tau=", "nope"),
    ("co2.tau=1e400", "co2.tau=inf", WHOLE),
    ("co2.tau=1000000000000000000000", "co2.tau=1000000000000000000000", "below 2⁶³"),
    ("co2.tau=${oc.env:PWD}", "co2.tau=/", COUNT),
    ("co2.tau=${oc.env:NOT_THERE_AT_ALL}", "co2.tau=", "NOT_THERE_AT_ALL"),
    ("co2.tau=${train.nope}", "co2.tau=", "train.nope"),
    ("co2.tau=${co2.tau}", "co2.tau=", "Recursive"),
    ("co2.tau=${", "co2.tau=${", "two pairs of quotes"),
    (f"{STREAMING}.delay=12", "streaming_diloco.delay=12", "below tau, which is 12"),
    (f"{STREAMING}.fragments=13", "streaming_diloco.fragments=13", "at most tau, which is 12"),
    (f"{STREAMING}.exchange=int8 comm.dtype=bf16", "comm.dtype=bf16", "use fp32"),
    ("method=desloc", "optim.name=sgd", "method=desloc: it averages Adam's moments; use adamw"),
    ("method=demo optim.name=adamw", "optim.name=adamw", "use sgd with optim.momentum=0"),
    (
        "method=demo optim.momentum=0.9",
        "optim.momentum=0.9",
        "method=demo: has a momentum of its own; use 0",
    ),
    ("method=mt_dao", "optim.name=sgd", "method=mt_dao: it averages Adam's moments; use adamw"),
    ("co2.average_moments=true", "optim.name=sgd", "method=co2: average_moments=true averages"),
    ("method=onebit_adam", "optim.name=sgd", "is a kind of Adam; use adamw"),
    ("method=zero_one_adam", "optim.name=sgd", "is a kind of Adam; use adamw"),
    ("method=onebit_adam optim.name=muon", "optim.name=muon", "is a kind of Adam; use adamw"),
    ("method=zero_one_adam optim.name=muon", "optim.name=muon", "is a kind of Adam; use adamw"),
    ("method=desloc optim.name=muon", "optim.name=muon", "adamw"),
    ("method=diloco diloco.average_moments=true optim.name=muon", "optim.name=muon", "adamw"),
    ("task=resnet50 optim.name=muon", "optim.name=muon", "no hidden matrix"),
    ("method=onebit_adam optim.name=adamw comm.dtype=bf16", "comm.dtype=bf16", "use fp32"),
    ("method=zero_one_adam optim.name=adamw comm.device=cpu", "comm.device=cpu", "use auto"),
    ("train.steps=9223372036854775808", "train.steps=9223372036854775808", "below 2⁶³"),
    ("train.batch_size=1", "train.batch_size=1", "at least 2"),
    ("co2.shard=true comm.dtype=bf16", "comm.dtype=bf16", "use fp32"),
    ("optim.decay_every=5", "optim.decay_every=5", "schedule=cosine has none; use null"),
    ("optim.schedule=exponential", "optim.decay_every=null", "needs a whole number of steps"),
    ("optim.milestones=[30]", "optim.milestones=[30]", "schedule=cosine has none; use []"),
    ("optim.schedule=step", "optim.milestones=[]", "needs rising steps"),
    ("optim.schedule=step optim.milestones=[60,30]", "optim.milestones=[60, 30]", "rising steps"),
    ("optim.schedule=step optim.milestones=[4,30]", "optim.milestones=[4, 30]", "in the warm-up"),
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
    ("tag=..", "tag=..", "folder name"),
    ("tag='a\x00b'", r"tag=a\x00b", "folder name"),
    (f"tag={'a' * 201}", "tag=aaa", "200 bytes"),
    ("tag='\x1b[2J'", r"tag=\x1b[2J", "folder name"),
    ("tag=${now:%S}", "tag=${now:%S}", "give a name"),
    ("tag=${oc.env:PWD}", "tag=/", "folder name"),
    ("runs=/dev/null/runs", "runs=/dev/null/runs", "cannot write /dev/null (Not a directory)"),
    ("runs=/proc/x", "runs=/proc/x", "cannot write /proc ("),
    ("runs=${now:%S}", "runs=${now:%S}", "give a name"),
    ("data.root=", "data.root=", "a folder"),
    ("task=resnet50 data.path=missing", "data.path=missing", "no such folder"),
    ("task=ade20k data.path=missing", "data.path=missing", "no such folder"),
    ("task=shapenet data.path=missing", "data.path=missing", "no such folder"),
    ("task=gpt2 data.path=/dev/zero", "data.path=/dev/zero", "a file or a folder"),
    ("runs=null", "runs=", ""),
    ("runs=", "runs=", ""),
    ("train=3", "train=3", "group of keys"),
    ("co2=3", "co2=3", "group of keys"),
    ("task=gpt2 gpt2.corpus=openwebtext", "gpt2.corpus=openwebtext", "tasks.prepare"),
    ("task=gpt2 data.path=missing.txt", "data.path=missing.txt", "no such file"),
    ("task=gpt2 data.path=", "data.path=", "a file or a folder"),
]
NAMES = [
    ("co2.tua=3", "co2.tua=3", "did you mean co2.tau?"),
    ("+co2.tua=3", "co2.tua=3", "did you mean co2.tau?"),
    ("++co2.tua=3", "co2.tua=3", "did you mean co2.tau?"),
    ("slowmo.tau=3 method=co2", "slowmo.tau=3", "there is no slowmo here; did you mean co2.tau?"),
    ("+slowmo.tau=3 method=co2", "slowmo.tau=3", "did you mean co2.tau?"),
    ("+slowmo={} method=co2", "slowmo={}", "unknown key"),
    ("gpt2.size=xl", "gpt2.size=xl", "there is no gpt2 here"),
    (
        "method=nope",
        "method=nope",
        "acco, allreduce, co2, co2_keep, co2_released, cocod_sgd, demo, desloc, diloco",
    ),
    ("method=slomo", "method=slomo", "did you mean slowmo?"),
    ("task=nope", "task=nope", "known: ade20k, glue, gpt2"),
    ("scale=nope", "scale=nope", "gpu, liu, paper, smoke"),
    ("scale=smok", "scale=smok", "did you mean smoke?"),
    ("scale=paper", "scale=paper", "it has smoke"),
    ("method=null", "method=", "allreduce, co2"),
    ("task=null", "task=", "ade20k, glue, gpt2"),
    ("scale=null", "scale=", "smoke"),
    ("tran.steps=3", "tran.steps=3", "did you mean train.steps?"),
    ("+tran.steps=3", "tran.steps=3", "did you mean train.steps?"),
    ("tran.stps=3", "tran.stps=3", "there is no tran here; did you mean train?"),
    ("steps=3", "steps=3", "did you mean train.steps?"),
    ("lr=3", "lr=3", "did you mean optim.lr?"),
    ("train.lr=3", "train.lr=3", "did you mean optim.lr?"),
    ("toy.nosuch=3", "toy.nosuch=3", "unknown key; known: toy.delay_s, toy.features"),
    ("method=acco acco.tau=3", "acco.tau=3", "acco has no keys"),
    ("nonsense=3", "nonsense=3", "train"),
    ("+nonsense=3", "nonsense=3", "train"),
    ("=3", "=3", ""),
    ("method=co2_keep co2_keep.kept=0.5", "co2_keep.kept=0.5", "new name: co2_keep.keep_local"),
    ("method=co2_keep +co2_keep.kept=0.5", "co2_keep.kept=0.5", "new name: co2_keep.keep_local"),
    (
        "method=co2_keep co2_keep.injection=0.1",
        "co2_keep.injection=0.1",
        "new name: co2_keep.momentum_weight",
    ),
    ("hydra/launcher=nope", "hydra/launcher=nope", "basic"),
    ("tuned=true", "tuned=true", "python -m recipes tune toy co2"),
    ("tuned=perhaps", "tuned=perhaps", "false, true"),
    ("task=../../etc/passwd", "task=../../etc/passwd", "known: ade20k"),
    ("method=../co2", "method=../co2", "did you mean co2?"),
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
    ("--config-dir=/tmp", "--config-dir=/tmp", "conf/ only"),
    ("--config-path=/tmp", "--config-path=/tmp", "conf/ only"),
    ("--config-name=mine", "--config-name=mine", "conf/ only"),
    ("--experimental-rerun=config.pickle", "--experimental-rerun=config.pickle", "conf/ only"),
    ("--multirun=3", "--multirun=3", "no such flag"),
    ("--nonsense", "--nonsense=", "no such flag"),
    # Without a key it would not be clear whose value holds, the recipe's or the dataclass's.
    ("~co2.tau", "co2.tau", ""),
    ("~co2", "co2", ""),
    ("~train", "train", ""),
    ("optim=null", "optim", ""),
]
SWEEPS = [
    ("co2.tau=1,3", "co2.tau=1,3", "-m"),
    ("-m co2.tau=1,3,0", "co2.tau=0", COUNT),
    ("-m co2.tau=range(2,-1,-1)", "co2.tau=0", COUNT),
    ("-m method=co2,nope", "method=nope", "known"),
    (
        "-m method=slowmo,co2 slowmo.tau=3",
        "slowmo.tau=3",
        "did you mean co2.tau?",
    ),
    ("-m optim.lr=0.1 train.steps=5,0 co2.tau=1,3", "train.steps=0", COUNT),
]


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, which must still be empty in the end."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(launch, "run", lambda *_: pytest.fail("workers were started"))
    yield here
    assert os.listdir(here) == []


def refusal(arguments: str) -> str:
    """The line that refuses a command line; `task=toy` goes before it."""
    given = arguments.split()
    flags = [word for word in given if word.startswith("-")]
    task = [] if any(word.startswith("task=") for word in given) else ["task=toy"]
    others = [word for word in given if not word.startswith("-")]
    with pytest.raises(ConfigError) as caught:
        preflight(train.APP.conf, [*flags, *task, *others], train.APP.check)
    return str(caught.value)


def assert_names(line: str, pair: str, hint: str) -> None:
    """One line: `key=value: hint`. A number may be spelt as a float."""
    assert line.isprintable()
    assert line.removeprefix("~").startswith(pair)
    assert line.partition(": ")[2] and hint in line.partition(": ")[2]


def key_and_hint(case: tuple[str, str, str]) -> tuple[str, str]:
    """What is checked: bad values of one key that get the same hint are of a kind."""
    _, pair, hint = case
    return pair.partition("=")[0], hint


BAD_VALUES = first_of_each(VALUES, lambda case: key_and_hint(case)[0])


@pytest.mark.parametrize(
    ("arguments", "pair", "hint"), [*BAD_VALUES, *first_of_each(NAMES + SWEEPS, key_and_hint)]
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


@pytest.mark.parametrize("case", ["empty file", "empty folder", "binary", "latin", "short"])
def test_text_that_cannot_be_used(tmp_path: Path, empty: Path, case: str) -> None:
    path = tmp_path / "text"
    mends = {"binary": "binary", "latin": "UTF-8", "short": "gpt2.context=64 needs 65"}
    if case == "empty folder":
        path.mkdir()
    else:
        data = {"binary": bytes(range(256)) * 40, "latin": "Gödel ".encode("latin-1") * 999}
        path.write_bytes(data.get(case, b"hello world" if case == "short" else b""))
    line = refusal(f"task=gpt2 data.path={path}")
    assert_names(line, f"data.path={path}", mends.get(case, "UTF-8 text"))


def test_short_text_says_what_would_do(tmp_path: Path, empty: Path) -> None:
    (tmp_path / "text").write_text("Three words only. " * 5)
    assert "gpt2.context=64 needs 65" in refusal(f"task=gpt2 data.path={tmp_path}/text")


def test_too_few_gpus(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert_names(refusal("launch.backend=nccl"), "launch.backend=nccl", "2 GPUs needed")


def test_nccl_does_not_carry_what_lies_on_the_host(empty: Path) -> None:
    line = refusal("launch.backend=nccl comm.device=cpu")
    assert_names(line, "launch.backend=nccl", "use auto")


def test_no_bf16(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "bf16_supported", lambda device: False)
    assert_names(refusal("train.precision=bf16"), "train.precision=bf16", "use fp32")


def test_the_workers_of_torchrun_count(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "600")
    assert_names(refusal("launch.workers=2"), "launch.workers=600", "use at most 512")


def test_only_worker_0_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ConfigError("co2.tau", 0, COUNT)
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("SLURM_PROCID", rank)
        monkeypatch.setenv("SLURM_NTASKS", "2")
        assert launch.refuse(error) == REFUSED == 2
        assert len(capsys.readouterr().err.splitlines()) == lines


def test_good_command_lines_pass(empty: Path) -> None:
    """What Hydra itself offers, and forms of overriding that need not be known here."""
    for arguments in (
        "co2.tau=3",
        "++co2.tau=3",
        "co2.gap_penalty=1.5",
        "co2.gap_penalty=2",
        "co2.clip=0",
        "data.root=2024",
        "tag=12",
        "co2.tau=${train.steps}",
        "hydra.sweep.dir=elsewhere",
        "-m co2.tau=1,3 optim.lr=0.1,0.2",
        "--cfg job",
    ):
        words = arguments.split()
        preflight(train.APP.conf, sorted(["task=toy", *words]), train.APP.check)


def test_flags_amid_the_overrides(empty: Path) -> None:
    """Hydra would not read the rest."""
    words = ["task=toy", "-m", "co2.tau=1,3"]
    with pytest.raises(ConfigError, match="flags such as -m stand before the overrides"):
        preflight(train.APP.conf, words, train.APP.check)


@pytest.mark.parametrize(
    ("arguments", "status", "out", "err"),
    [
        ("--cfg job task=toy method=slowmo", 0, "outer_momentum: 0.5", ""),
        ("--cfg job method=slomo", 2, "", "error: method=slomo: no such option; did you mean"),
        ("--cfg job co2.tua=3", 2, "", "error: configuration=: Could not override 'co2.tua'."),
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


@pytest.fixture(scope="module")
def mine(workers: Pool, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run, to collide with."""
    runs = tmp_path_factory.mktemp("mine") / "runs"
    return pooled(workers, 1, "tag=mine", "co2.tau=3", "train.steps=2", runs=runs)


class TestFolderOfAnotherConfiguration:
    @pytest.mark.parametrize(
        ("changed", "pair", "there"),
        [
            (
                "co2.tau=6",
                "co2.tau=6",
                "co2.tau=3",
            ),
            ("train.steps=9", "train.steps=9", "train.steps=2"),
            ("optim.lr=0.2", "optim.lr=0.2", "optim.lr=0.1"),
            ("toy.hidden=8", "toy.hidden=8", "toy.hidden=32"),
        ],
    )
    def test_is_refused(self, mine: Run, changed: str, pair: str, there: str) -> None:
        given = {"co2.tau": "3", "train.steps": "2", "launch.workers": "1"}
        key, _, value = changed.partition("=")
        words = [f"{name}={text}" for name, text in {**given, key: value}.items()]
        before = contents(mine.runs)
        with pytest.raises(ConfigError) as caught:
            configured("tag=mine", *words, runs=mine.runs)
        assert_names(str(caught.value), pair, there)
        assert "tag=" in str(caught.value) and "resume=never" in str(caught.value)
        assert contents(mine.runs) == before

    def test_of_another_version_is_refused(self, tmp_path: Path) -> None:
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

    def test_unless_training_is_the_same(self, mine: Run) -> None:
        same = ("tag=mine", "co2.tau=3", "train.steps=2", "launch.workers=1")
        for free in (
            "log.every=1",
            "checkpoint.every=3",
            "checkpoint.keep=9",
            "data.root=x",
            "data.workers=2",
        ):
            configured(*same, free, runs=mine.runs)

    def test_unless_it_is_moved_aside(self, mine: Run) -> None:
        configured(
            "tag=mine",
            "co2.tau=6",
            "launch.workers=1",
            "resume=never",
            runs=mine.runs,
        )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("co2.tau=0", "co2.tau=0: " + COUNT),
        pytest.param("-m co2.tau=1,3,0", "co2.tau=0: " + COUNT, marks=pytest.mark.slow),
        pytest.param(
            "task=gpt2 data.path=../short data.root=cache",
            "data.path=../short: ",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_refused_as_a_person_sees_it(tmp_path: Path, arguments: str, line: str) -> None:
    """Status 2, one line, no file anywhere, no further process."""
    home, here, spy = tmp_path / "home", tmp_path / "here", tmp_path / "spy"
    for folder in (home, here):
        folder.mkdir()
    (tmp_path / "short").write_text("Too little text. ")
    env = environment(HOME=str(home), **spied(spy))
    ended = execute(command(*arguments.split(), runs=here / "runs"), here / "runs", env)
    assert ended.status == 2
    assert ended.out == ""
    assert ended.err.startswith(ANNOUNCED + "error: " + line)
    assert len(ended.err.splitlines()) == 2, ended.err
    assert list(here.iterdir()) == list(home.iterdir()) == []
    assert started_processes(spy) == 1


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_damaged_file_is_one_line_whoever_meets_it(tmp_path: Path, ahead: int) -> None:
    """Found by worker 1 alone, while training: the line names it, and the status is 2."""
    from PIL import Image

    for part, count in (("train", 8), ("val", 1)):
        for name in ("a", "b"):
            folder = tmp_path / "tree" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (40, 40), (number * 30, 0, 99)).save(folder / f"{number}.jpg")
    arguments = ("task=resnet50", f"data.path={tmp_path / 'tree'}", "train.batch_size=2")
    arguments += ("method=local_sgd", "train.steps=4", f"data.workers={ahead}")
    config = configured(*arguments, runs=tmp_path / "runs")
    met = int(sampler(train.APP.make_task(config), 16, 2).indices(1, 1)[0])
    victim = tmp_path / "tree" / "train" / "ab"[met // 8] / f"{met % 8}.jpg"
    victim.write_bytes(victim.read_bytes()[:-100])
    run = cli(*arguments, runs=tmp_path / "runs")
    assert run.status == 2
    (error,) = run.err.splitlines()
    assert error.startswith("error: ") and str(victim.relative_to(tmp_path / "tree")) in error
    assert not folders(tmp_path / "runs")[0].joinpath("summary.json").exists()


def test_a_key_that_is_newer_than_the_folder(workers: Pool, tmp_path: Path) -> None:
    """An option that this version has added is no other run, unless it is used."""
    words = ("train.steps=2", "launch.workers=1")
    run = pooled(workers, 1, *words, runs=tmp_path)
    path = run.folder / "config.yaml"
    path.write_text("".join(s for s in path.read_text().splitlines(True) if "  dtype:" not in s))
    configured(*words, f"tag={run.folder.parent.name}", runs=tmp_path)
    with pytest.raises(ConfigError, match=r"^comm\.dtype=bf16: .* with comm\.dtype=fp32"):
        configured(*words, "comm.dtype=bf16", f"tag={run.folder.parent.name}", runs=tmp_path)
    text = "".join(s for s in path.read_text().splitlines(True) if "  features:" not in s)
    path.write_text(text)  # a key of the task's own
    configured(*words, f"tag={run.folder.parent.name}", runs=tmp_path)
    with pytest.raises(ConfigError, match=r"^toy\.features=8: .* with toy\.features=16"):
        configured(*words, "toy.features=8", f"tag={run.folder.parent.name}", runs=tmp_path)
