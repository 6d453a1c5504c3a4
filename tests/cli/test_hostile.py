"""Runs, checkpoints, weights and configurations that are damaged, or made by whoever means harm.

Nothing in them is run, no file elsewhere is read, written or removed, and what is said of them is
one line.
"""

import ast
import contextlib
import hashlib
import io
import json
import os
import pickle
import shutil
import subprocess
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import EpsImagePlugin, Image
from safetensors import SafetensorError
from safetensors.torch import save

import train
from co2.config import Config
from co2.errors import ConfigError
from co2.program import python
from co2.record.folder import plain, run_folder
from co2.start import launch
from co2.train import state_file
from co2.train.checkpoint import MANIFEST
from tasks.text import store
from tests.cli.harness import MARK, TOY, Payload, configured, files, pickled, refused, tagged
from tests.cli.test_checkpoint import DAMAGES, assert_state, checkpoints, damage, part, state
from tests.tasks import pictures, test_shapenet
from tests.tasks.build import mesh

Spoil = Callable[[Path], object]
DEEP = "[" * 100_000
"""JSON that exhausts the reader's stack."""


def manifest(**changes: Any) -> Spoil:
    """Other values in a checkpoint's manifest."""

    def spoil(folder: Path) -> None:
        path = folder / MANIFEST
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return spoil


def whole_manifest(text: str) -> Spoil:
    return lambda folder: (folder / MANIFEST).write_text(text)


def of_worker(make: Callable[[Path], bytes], summed: bool = True) -> Spoil:
    """Another file of worker 0, and its checksum in the manifest."""

    def spoil(folder: Path) -> None:
        data = make(folder)
        (folder / part()).write_bytes(data)
        if summed:
            manifest(sha256={part(): hashlib.sha256(data).hexdigest()})(folder)

    return spoil


def of_torch(make: Callable[[Path], object]) -> Callable[[Path], bytes]:
    """The file that torch.save makes of an object."""

    def data(folder: Path) -> bytes:
        torch.save(make(folder), path := folder / "made")
        return path.read_bytes()

    return data


def says(values: str) -> Spoil:
    """A file of safetensors with these values in its head, in place of JSON."""
    return of_worker(lambda folder: save({"a": torch.zeros(3)}, {"co2": values}))


def also_named(name: str) -> Spoil:
    """A further file in the manifest: one that is elsewhere, with its own checksum."""

    def spoil(folder: Path) -> None:
        sums = json.loads((folder / MANIFEST).read_text())["sha256"]
        place = name.replace("ROOT", str(folder.parents[1]))
        digest = hashlib.sha256((folder.parents[1] / "secret").read_bytes()).hexdigest()
        manifest(sha256={**sums, place: digest})(folder)

    return spoil


def linked(name: str) -> Spoil:
    """A file of the checkpoint lies elsewhere, behind a link, and is sound."""

    def spoil(folder: Path) -> None:
        shutil.copy(folder / name, target := folder.parents[1] / "elsewhere")
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return spoil


def folder_linked(folder: Path) -> None:
    folder.rename(target := folder.parents[1] / "moved")
    folder.symlink_to(target)


def a_pipe(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)


def of_here(folder: Path) -> Path:
    """Where a payload in a checkpoint leaves its mark."""
    return folder.parents[1]


CHECKPOINTS: dict[str, tuple[Spoil, str]] = {
    "torch.save of a payload": (of_worker(of_torch(lambda f: Payload(of_here(f)))), "be read"),
    "a bare pickle": (of_worker(lambda f: pickled(of_here(f))), "cannot be read"),
    "no JSON": (says("{'step': 2}"), "cannot be read (JSONDecodeError"),
    "deep JSON": (says(DEEP), "cannot be read (RecursionError"),
    "no state": (says("[1, 2]"), "holds no state"),
    "a tensor that is not there": (says('{"b": {"$tensor": "b"}}'), "cannot be read (KeyError"),
    "a tensor without a name": (says('{"b": {"$tensor": [1]}}'), "cannot be read (TypeError"),
    "a file by a link": (linked(part()), "lies elsewhere"),
    "a manifest by a link": (linked(MANIFEST), "lies elsewhere"),
    "a folder by a link": (folder_linked, "lies elsewhere"),
    "a manifest that is a pipe": (a_pipe, "is no file"),
    "step": (manifest(step=9), "it is of step 9"),
    "world": (manifest(world=7), "saved by 7 workers"),
    "world with a line end": (manifest(world="1\nerror"), r"saved by 1\nerror workers"),
    "no checksums": (manifest(sha256=None), MANIFEST),
    "another's checksums": (manifest(sha256={part(1): "0"}), part()),
    "a name with ..": (also_named("../../secret"), "lies elsewhere"),
    "an absolute name": (also_named("ROOT/secret"), "lies elsewhere"),
    "a name with NUL": (manifest(sha256={part(): "0", "a\0b": "0"}), MANIFEST),
    "a list": (whole_manifest("[]"), MANIFEST),
    "a deep list": (whole_manifest(DEEP), MANIFEST),
    **{kind: (partial(damage, kind=kind), "") for kind in DAMAGES},
    "no UTF-8": (lambda folder: (folder / MANIFEST).write_bytes(b"\xff\xfe{"), MANIFEST),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpoint(tmp_path: Path, kind: str) -> None:
    """It is said in one line and set aside, and the one before is used."""
    spoil, says = CHECKPOINTS[kind]
    (tmp_path / "secret").write_text("not a checkpoint's")
    lines: list[str] = []
    saver = checkpoints(tmp_path / "checkpoints", lines=lines)
    for step in (1, 2):
        assert saver.save(step, state(step))
    spoil(tmp_path / "checkpoints" / "step_2")
    before = {n: d for n, d in files(tmp_path).items() if not n.startswith("checkpoints")}
    assert_state(saver.load(), 1)
    (line,) = lines
    assert line.startswith("checkpoint step_2 is damaged (") and says in line
    assert line.isprintable()
    assert saver.steps() == [1]
    for step in (2, 3, 4):  # what was set aside goes, too, and no good one in its place
        assert saver.save(step, state(step))
        assert_state(saver.load(), step)
        assert saver.steps() == [step, step - 1]
    assert len(lines) == 1
    assert {n: d for n, d in files(tmp_path).items() if not n.startswith("checkpoints")} == before
    assert not (tmp_path / MARK).exists()


def test_another_workers_file_is_read_with_as_much_care(tmp_path: Path) -> None:
    """Of the same replica: its file may hold what this worker does not."""
    saved = {"co2": json.dumps({"weight": {"$tensor": "weight"}})}
    (tmp_path / "own").write_bytes(save({}, saved))
    (tmp_path / "other").write_bytes(save({"weight": torch.arange(3.0)}, {}))
    found = state_file.read([tmp_path / "own"], [[tmp_path / "other"]])
    assert torch.equal(found["weight"], torch.arange(3.0))
    (tmp_path / "other").write_bytes(of_torch(lambda _: Payload(tmp_path))(tmp_path))
    with pytest.raises(SafetensorError):
        state_file.read([tmp_path / "own"], [[tmp_path / "other"]])
    assert not (tmp_path / MARK).exists()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, in which no worker is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "run", lambda *_: pytest.fail("workers were started"))
    return tmp_path


def test_the_payloads_work(tmp_path: Path) -> None:
    """Or the tests below would prove nothing: who loads them without care runs them."""
    pickle.loads(pickled(tmp_path))
    assert (tmp_path / MARK).exists()
    (tmp_path / MARK).rmdir()
    yaml.load(tagged(tmp_path), yaml.UnsafeLoader)
    assert (tmp_path / MARK).exists()


def begun(folder: Path, config: Config) -> Path:
    """A run's folder, as far as a start looks at it."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(plain(config, 2)))
    (folder / "manifest.json").write_text('{"data": {}}')
    return folder


@pytest.fixture
def run(here: Path) -> Path:
    config = configured("method=co2", runs=here / "runs")
    return begun(run_folder(config), config)


def text(name: str, make: Callable[[Path], str] | str) -> Spoil:
    """Another text in a file of the run's folder."""

    def spoil(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(make if isinstance(make, str) else make(Path.cwd()))

    return spoil


DAMAGED = "config.yaml is damaged"
IN_A_VALUE = text("config.yaml", lambda here: f"train:\n  steps: {tagged(here)}")
RUNS: dict[str, tuple[Spoil, str]] = {
    "config with code": (text("config.yaml", tagged), DAMAGED),
    "config with code in a value": (IN_A_VALUE, DAMAGED),
    "config of another run": (text("config.yaml", "co2: {tau: 99}"), "holds a run with"),
    "summary that is torn": (text("summary.json", '{"title": '), "summary.json is damaged"),
}


@pytest.mark.parametrize("kind", RUNS)
def test_run_folder(run: Path, kind: str) -> None:
    spoil, says = RUNS[kind]
    spoil(run)
    here = Path.cwd()
    before = files(here)
    words = [*TOY, "method=co2", f"runs={here / 'runs'}"]
    assert says in refused(train.APP.main, words)
    assert files(here) == before and MARK not in before


@pytest.fixture
def start(here: Path) -> Path:
    """A finished run of the toy, as far as `init_from` looks at it."""
    config = configured("method=co2", runs=here / "runs")
    folder = begun(here / "start", config)
    torch.save(train.APP.make_task(config).model().state_dict(), folder / "model.pt")
    (folder / "summary.json").write_text("{}")
    return folder


def model(change: Callable[[dict[str, Any], Path], object]) -> Spoil:
    """Other weights."""

    def spoil(folder: Path) -> None:
        weights = torch.load(folder / "model.pt", weights_only=True)
        torch.save(change(weights, folder.parent) or weights, folder / "model.pt")

    return spoil


def first(weights: dict[str, Any], value: float | None = None) -> str:
    """The name of the first weight, which gets a value in one place."""
    name = next(iter(weights))
    if value is not None:
        weights[name].view(-1)[-1] = value
    return name


UNREAD = "model.pt cannot be read"
STARTS: dict[str, tuple[Spoil, str]] = {
    "no folder": (shutil.rmtree, "no such folder"),
    "no finished run": (lambda f: (f / "summary.json").unlink(), "no summary.json"),
    "no weights": (lambda f: (f / "model.pt").unlink(), "no model.pt"),
    "a payload amid the weights": (model(lambda w, here: w.update(more=Payload(here))), UNREAD),
    "a bare pickle": (lambda f: (f / "model.pt").write_bytes(pickled(f.parent)), UNREAD),
    "a list": (model(lambda w, _: list(w.values())), "holds no weights by name"),
    "NaN": (model(lambda w, _: first(w, float("nan")) and None), "is not finite"),
    "another shape": (
        model(lambda w, _: w.update({first(w): torch.zeros(3, 3, 3)})),
        "has the shape (3, 3, 3) there",
    ),
    "one is missing": (model(lambda w, _: w.pop(first(w)) is None or w), "the shape none there"),
    "one too many": (model(lambda w, _: w.update(more=torch.zeros(2))), "and none here"),
    "config with code": (text("config.yaml", tagged), "missing or damaged"),
    "config of another task": (text("config.yaml", "task: gpt2"), "is a run of task=gpt2"),
    "manifest without data": (text("manifest.json", "{}"), "missing or damaged"),
}


@pytest.mark.parametrize("kind", STARTS)
def test_init_from(start: Path, kind: str) -> None:
    spoil, says = STARTS[kind]
    spoil(start)
    before = files(start.parent)
    words = [*TOY, "method=co2", f"runs={start.parent / 'runs'}", f"init_from={start}"]
    line = refused(train.APP.main, words)
    assert line.startswith(f"init_from={start}: ") and says in line
    assert files(start.parent) == before and MARK not in before


def test_init_from_a_sound_run(start: Path) -> None:
    config = configured("method=co2", f"init_from={start}", runs=start.parent / "runs")
    train.APP.prepare_data(config)


TUNED, SMOKE = "tuned/toy/co2.yaml", "task/scale/toy_smoke.yaml"
CONFIGURATIONS: list[tuple[str, Callable[[Path], str], str]] = [
    (SMOKE, lambda here: f"toy: {tagged(here)}", "smoke.yaml, line"),
    (TUNED, tagged, "co2.yaml, line 1"),
    (
        TUNED,
        lambda _: "co2: {outer_lr: '${oc.env:HOME}'}",
        "co2.outer_lr=${oc.env:HOME}: must be a finite number",
    ),
    (
        TUNED,
        lambda here: f"co2: {{_target_: os.mkdir, _args_: ['{here / MARK}']}}",
        "co2._target_=os.mkdir",
    ),
    (SMOKE, lambda _: "# @package _global_\ntoy: {_target_: os.mkdir}", "toy._target_=os.mkdir"),
]


@pytest.mark.parametrize(("name", "make", "says"), CONFIGURATIONS)
def test_configuration(here: Path, name: str, make: Callable[[Path], str], says: str) -> None:
    """With code, an interpolation, or a target."""
    conf = shutil.copytree(train.APP.conf, here / "conf")
    (conf / name).parent.mkdir(exist_ok=True)
    (conf / name).write_text(make(here))
    before = files(here)
    app = replace(train.APP, conf=conf)
    words = ["task=toy", "method=co2", *(["tuned=true"] if name.startswith("tuned") else [])]
    assert says in refused(app.main, words)
    assert files(here) == before and MARK not in before


def postscript(here: Path) -> bytes:
    """A picture that PIL hands to the program `gs`, which is ours here."""
    program = here / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nmkdir -p {here / MARK}\n")
    program.chmod(0o755)
    head = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 40\n%%EndComments\n"
    return (head + "showpage\n%%EOF\n").encode()


def bomb(here: Path) -> bytes:
    """A small file of 40,000 × 40,000 pixels."""
    data = io.BytesIO()
    Image.new("1", (8, 8)).save(data, "PNG")
    whole = bytearray(data.getvalue())
    whole[16:24] = (40_000).to_bytes(4, "big") * 2
    whole[29:33] = zlib.crc32(whole[12:29]).to_bytes(4, "big")
    return bytes(whole)


@pytest.fixture
def interpreter(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where PIL looks for PostScript's interpreter."""
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # it is looked for again
    monkeypatch.setenv("PATH", f"{here / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return here


def met(*words: str, runs: Path) -> str:
    """What a task says of its first batch."""
    task = train.APP.make_task(configured(*words, "train.batch_size=2", runs=runs))
    task.setup(1)
    with pytest.raises(ConfigError) as caught:
        next(iter(task.batches(mesh(), 0)))
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.parametrize("make", [pickled, postscript, bomb])
def test_a_picture(interpreter: Path, make: Callable[[Path], bytes]) -> None:
    """Met in training: one line that names it. What else is bad in data: tests/tasks."""
    folder, data = pictures.tree(interpreter / "tree", train=3, val=1), make(interpreter)
    for path in (folder / "train").glob("*/*"):
        path.write_bytes(data)
    line = met("task=resnet50", "data.path=tree", runs=interpreter / "runs")
    assert line.startswith("data.path=tree: train/") and "replace or remove it" in line
    assert not (interpreter / MARK).exists()


def test_postscript_would_run(interpreter: Path) -> None:
    """Or the test above would prove nothing."""
    (interpreter / "a.jpg").write_bytes(postscript(interpreter))
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        Image.open(interpreter / "a.jpg").load()
    assert (interpreter / MARK).exists()


def test_a_cloud(here: Path) -> None:
    test_shapenet.write(here / "clouds", points=1100)
    for path in (here / "clouds" / "shapenet_pc").iterdir():
        np.save(path, np.array([Payload(here)]), allow_pickle=True)
    line = met("task=shapenet", "data.path=clouds", runs=here / "runs")
    assert line.startswith("data.path=clouds/shapenet_pc/0269") and "Object arrays" in line
    assert not (here / MARK).exists()


def test_weights_of_a_backbone(here: Path) -> None:
    import timm

    found = timm.create_model("resnet10t", num_classes=0).state_dict()
    torch.save({**found, "more": Payload(here)}, here / "weights.pth")
    words = ["task=ade20k", "ade20k.backbone=resnet10t", "ade20k.weights=weights.pth"]
    line = refused(train.APP.main, [*TOY[1:], *words, f"runs={here / 'runs'}"])
    assert line.startswith("ade20k.weights=weights.pth: ") and "is not a state dict" in line
    assert not (here / MARK).exists() and not (here / "runs").exists()


def meta(**changes: Any) -> Spoil:
    """Other entries in meta.json of a store of tokens."""

    def spoil(folder: Path) -> None:
        path = folder / "meta.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return spoil


STORES: dict[str, Spoil] = {
    "gone": shutil.rmtree,
    "cut": lambda folder: os.truncate(folder / "train.bin", 99),
    "meta.json that is deep": text("meta.json", DEEP),
    "meta.json that is a pickle": lambda f: (f / "meta.json").write_bytes(pickled(f.parents[1])),
    "objects for numbers": meta(dtype="object"),
    "a file elsewhere": meta(files=["../secret"]),
    "fewer tokens than none": meta(parts={part: {"tokens": -300} for part in store.PARTS}),
    "more than there are": meta(parts={part: {"tokens": 10**12} for part in store.PARTS}),
}


@pytest.mark.parametrize("kind", STORES)
def test_prepared_text(here: Path, kind: str) -> None:
    (here / "secret").write_text("no token")
    folder = here / "root" / "openwebtext"
    tokens = np.arange(300, dtype=np.uint16)
    store.create(folder, {part: [tokens] for part in store.PARTS}, 300, 0, {})
    words = ["task=gpt2", "gpt2.corpus=openwebtext", "data.root=root", "gpt2.vocab_size=300"]
    words.append("train.batch_size=2")
    train.APP.prepare_data(configured(*words, runs=here / "runs"))
    STORES[kind](folder)
    before = files(here)
    line = refused(train.APP.main, [*TOY[1:], *words, f"runs={here / 'runs'}"])
    where = "gpt2.corpus=openwebtext: no sound root/openwebtext"
    assert line.startswith(f"{where}; make it: {python()} -m tasks.prepare")
    assert files(here) == before and MARK not in before


ROOT = Path(train.__file__).parent
SOURCES = [
    ROOT / "train.py",
    *(p for d in ("co2", "tasks", "recipes") for p in (ROOT / d).rglob("*.py")),
]

# Module and function; the argument that makes it safe, or None where nothing does.
LOADERS: dict[str, tuple[str, object] | None] = {
    "torch.load": ("weights_only", True),
    "timm.models.load_state_dict": ("weights_only", True),
    "numpy.load": ("allow_pickle", False),
    **dict.fromkeys(
        (
            *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads"),
            *("shelve.open", "dill.load", "dill.loads", "joblib.load", "cloudpickle.load"),
            *("cloudpickle.loads", "pandas.read_pickle", "torch.jit.load"),
            *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"),
            *("eval", "exec", "__import__", "runpy.run_path", "os.system", "os.popen"),
            *("hydra.utils.instantiate", "hydra.utils.call"),
            "torch.distributed.checkpoint.FileSystemReader",
        ),
        None,
    ),
}


def names(tree: ast.AST) -> dict[str, str]:
    """What a name in a module stands for: `np` → `numpy`, `load` → `torch.load`."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                found[alias.asname or whole] = whole
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def dotted(node: ast.AST, known: dict[str, str]) -> str:
    """The full name of what an expression names; empty where it names nothing."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value, known)
        return f"{inner}.{node.attr}" if inner else ""
    return known.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def unsafe(source: str) -> Iterator[str]:
    """The loaders that a module names, apart from calls with the argument that makes them safe."""
    tree = ast.parse(source)
    known, safe = names(tree), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (need := LOADERS.get(dotted(node.func, known))):
            given = {k.arg: k.value for k in node.keywords}
            value = given.get(need[0])
            if isinstance(value, ast.Constant) and value.value is need[1]:
                safe.add(node.func)
        # Whatever is given to torch.load through ** is not seen here, and so not safe.
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and node not in safe:
            name = dotted(node, known)
            if name in LOADERS:
                yield name


def test_no_file_is_loaded_without_care() -> None:
    assert len(SOURCES) > 150
    found = {(p.relative_to(ROOT).as_posix(), n) for p in SOURCES for n in unsafe(p.read_text())}
    assert found == set()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\ntorch.load(path)", "torch.load"),
        ("import torch\ntorch.load(path, **options)", "torch.load"),
        ("from torch import load as read\nread(path)", "torch.load"),
        ("import torch\nreader = torch.load", "torch.load"),
        ("import numpy as np\nnp.load(path, allow_pickle=True)", "numpy.load"),
        ("from pickle import loads\nloads(data)", "pickle.loads"),
        ("import yaml\nyaml.load(text, yaml.Loader)", "yaml.load"),
        ("eval(text)", "eval"),
        ("import torch\ntorch.load(path, map_location='cpu', weights_only=True)", ""),
        ("import numpy as np\nnp.load(path, allow_pickle=False)", ""),
        ("import yaml\nyaml.safe_load(text)", ""),
        ("model.eval()", ""),
    ],
)
def test_what_would_be_found(source: str, name: str) -> None:
    assert list(unsafe(source)) == ([name] if name else [])
