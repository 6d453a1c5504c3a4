"""Data that cannot be used: refused in one line, at the start or when training meets them."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import EpsImagePlugin, Image

import train
from co2.errors import ConfigError
from co2.program import python
from co2.start import launch
from tasks.text import store
from tests.cli.harness import TOY, configured
from tests.cli.refused import MARK, Payload, files, pickled, refused
from tests.grids import first_of_each, grid
from tests.tasks import pictures, small_ade20k, small_glue, test_shapenet
from tests.tasks.build import mesh

Spoil = Callable[[Path], object]
BATCH = "train.batch_size=2"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, in which no worker is started. A payload and PostScript's interpreter
    would leave their mark here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "run", lambda *_: pytest.fail("workers were started"))
    return tmp_path


def meta(**changes: Any) -> Spoil:
    """Other entries in meta.json of a store."""

    def spoil(folder: Path) -> None:
        path = folder / "meta.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return spoil


def of_parts(**changes: Any) -> Spoil:
    return meta(parts={part: {"tokens": 300, **changes} for part in store.PARTS})


STORES: dict[str, Spoil] = {
    "gone": shutil.rmtree,
    "no part": lambda folder: (folder / "val.bin").unlink(),
    "cut": lambda folder: os.truncate(folder / "train.bin", 99),
    "meta.json that is torn": lambda folder: (folder / "meta.json").write_text('{"format": 1,'),
    "meta.json that is a list": lambda folder: (folder / "meta.json").write_text("[]"),
    "meta.json that is deep": lambda folder: (folder / "meta.json").write_text("[" * 100_000),
    "meta.json that is a pickle": lambda f: (f / "meta.json").write_bytes(pickled(f.parent)),
    "objects for numbers": meta(dtype="object"),
    "floats for numbers": meta(dtype="float16"),
    "a type that is none": meta(dtype=["uint16"]),
    "a file elsewhere": meta(files=["../secret"]),
    "another format": meta(format=99),
    "no number of tokens": of_parts(tokens="300"),
    "fewer tokens than none": of_parts(tokens=-300),
    "more tokens than there are": of_parts(tokens=10**12),
}


@pytest.mark.parametrize(
    "kind", grid(STORES, ("gone", "cut", "meta.json that is a pickle").__contains__)
)
def test_prepared_text(here: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    (here / "secret").write_text("no token")
    folder = here / "root" / "openwebtext"
    tokens = np.arange(300, dtype=np.uint16)
    store.create(folder, {part: [tokens] for part in store.PARTS}, 300, 0, {})
    words = ["task=gpt2", "gpt2.corpus=openwebtext", "data.root=root", "gpt2.vocab_size=300", BATCH]
    train.APP.prepare_data(configured(*words, runs=here / "runs"))
    STORES[kind](folder)
    before = files(here)
    line = refused(train.APP.main, [*TOY[1:], *words, f"runs={here / 'runs'}"], capsys)
    where = "gpt2.corpus=openwebtext: no sound root/openwebtext"
    assert line.startswith(f"{where}; make it: {python()} -m tasks.prepare")
    assert files(here) == before and MARK not in before


def a_class(folder: Path) -> None:
    (folder / "val" / "other").mkdir()


def no_pictures(folder: Path) -> None:
    for path in (folder / "train" / "red").iterdir():
        path.rename(path.with_suffix(".txt"))


def no_classes(folder: Path) -> None:
    for part in ("train", "val"):
        shutil.rmtree(folder / part)
        (folder / part).mkdir()


TREES: dict[str, tuple[Spoil, str]] = {
    "gone": (shutil.rmtree, "no such folder"),
    "no part": (lambda folder: shutil.rmtree(folder / "val"), "has no folder val"),
    "no classes": (no_classes, "train holds no folder"),
    "a class in one part": (a_class, "train has no folder other"),
    "a class without pictures": (no_pictures, "train/red holds no picture"),
    "too few": (lambda folder: [shutil.rmtree(p) for p in folder.glob("*/[!r]*")], "use at most"),
}


@pytest.mark.parametrize("kind", grid(TREES, "no part".__eq__))
def test_folder_of_pictures(here: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    spoil, says = TREES[kind]
    spoil(pictures.tree(here / "tree", train=3, val=1))
    before = files(here)
    words = [*TOY[1:], "task=resnet50", "data.path=tree", BATCH, f"runs={here / 'runs'}"]
    assert says in refused(train.APP.main, words, capsys)
    assert files(here) == before


def test_a_single_class_is_told_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = pictures.tree(tmp_path / "tree", train=3, val=1)
    words = ("task=resnet50", f"data.path={folder}", BATCH, "train.steps=1", "launch.workers=1")
    warning = "warning: the data hold one class, so an accuracy of 1.0 means nothing"
    for runs in ("several", "one"):
        train.APP.work(configured(*words, "log.wandb=disabled", runs=tmp_path / runs))
        lines = capsys.readouterr().out.splitlines()
        assert lines.index(warning) == 0 if runs == "one" else warning not in lines
        for other in folder.glob("*/[!r]*"):
            shutil.rmtree(other)


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


PICTURES: dict[str, Callable[[Path], bytes]] = {
    "empty": lambda here: b"",
    "a text": lambda here: b"no picture",
    "a pickle": pickled,
    "PostScript": postscript,
    "a bomb": bomb,
}


@pytest.mark.parametrize("kind", grid(PICTURES, ("a pickle", "PostScript").__contains__))
def test_a_picture(here: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Met in training: one line that names it."""
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # it is looked for again
    monkeypatch.setenv("PATH", f"{here / 'bin'}{os.pathsep}{os.environ['PATH']}")
    folder, data = pictures.tree(here / "tree", train=3, val=1), PICTURES[kind](here)
    for path in (folder / "train").glob("*/*"):
        path.write_bytes(data)
    line = met("task=resnet50", "data.path=tree", BATCH, runs=here / "runs")
    assert line.startswith("data.path=tree: train/") and "replace or remove it" in line
    assert not (here / MARK).exists()


def test_postscript_would_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the test above would prove nothing."""
    monkeypatch.setenv("PATH", f"{here / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    (here / "a.jpg").write_bytes(postscript(here))
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        Image.open(here / "a.jpg").load()
    assert (here / MARK).exists()


def met(*words: str, runs: Path) -> str:
    """What a task says of its first batch."""
    task = train.APP.make_task(configured(*words, runs=runs))
    task.setup(1)
    with pytest.raises(ConfigError) as caught:
        next(iter(task.batches(mesh(), 0)))
    assert str(caught.value).isprintable()
    return str(caught.value)


def mask(values: np.ndarray, kind: str = "PNG") -> bytes:
    data = io.BytesIO()
    Image.fromarray(values).save(data, kind)
    return data.getvalue()


FLAT = np.zeros((40, 60))
MASKS: dict[str, tuple[bytes, str]] = {
    "a label out of range": (mask((FLAT + 151).astype(np.uint8)), "has class 151"),
    "a label of 16 bits": (mask((FLAT + 40_000).astype(np.uint16)), "has class 40000"),
    "a negative label": (mask((FLAT - 5).astype(np.int32), "TIFF"), "has class -5"),
    "NaN": (mask((FLAT * np.nan).astype(np.float32), "TIFF"), "holds float32 values"),
    "colours": (mask(np.zeros((40, 60, 3), np.uint8)), "has 3 channels"),
    "another size": (mask(np.zeros((4, 6), np.uint8)), "they must be alike"),
    "cut": (mask(np.zeros((40, 60), np.uint8))[:-30], "cannot be read"),
    "empty": (b"", "cannot be read"),
}


@pytest.mark.parametrize("kind", grid(MASKS, ("a label out of range", "cut").__contains__))
def test_mask(here: Path, kind: str) -> None:
    data, says = MASKS[kind]
    small_ade20k.write(here / "scenes")
    for number, size in enumerate(small_ade20k.SIZES["training"], 1):
        small_ade20k.annotation(here / "scenes", "training", number).write_bytes(data)
        small = Image.new("RGB", size[::-1] if kind == "another size" else (60, 40))
        small.save(small_ade20k.image(here / "scenes", "training", number))
    line = met("task=ade20k", "data.path=scenes", BATCH, runs=here / "runs")
    assert line.startswith("data.path=scenes: scenes/annotations/training/ADE_") and says in line


def weights(change: Callable[[dict[str, Any], Path], object]) -> Spoil:
    """Weights of a backbone in a file."""

    def spoil(path: Path) -> None:
        import timm

        found = timm.create_model("resnet10t", num_classes=0).state_dict()
        torch.save(change(found, path.parent) or found, path)

    return spoil


BACKBONES: dict[str, tuple[Spoil, str]] = {
    "gone": (lambda path: None, "no such file"),
    "a pickle": (lambda path: path.write_bytes(pickled(path.parent)), "is not a state dict"),
    "a payload": (weights(lambda w, here: w.update(more=Payload(here))), "is not a state dict"),
    "a number": (weights(lambda w, _: w.update(more=3)), "more is no weight"),
    "NaN": (weights(lambda w, _: w["bn1.weight"].fill_(float("nan")) is None), "is not finite"),
    "another shape": (weights(lambda w, _: w.update({"bn1.weight": torch.ones(3)})), "shape [3]"),
    "one is missing": (weights(lambda w, _: w.pop("bn1.weight") is None), "it lacks bn1.weight"),
}


@pytest.mark.parametrize("kind", grid(BACKBONES, ("a payload", "NaN").__contains__))
def test_backbone(here: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    spoil, says = BACKBONES[kind]
    spoil(here / "weights.pth")
    words = ["task=ade20k", "ade20k.backbone=resnet10t", "ade20k.weights=weights.pth"]
    line = refused(train.APP.main, [*TOY[1:], *words, f"runs={here / 'runs'}"], capsys)
    assert line.startswith("ade20k.weights=weights.pth: ") and says in line
    assert not (here / MARK).exists() and not (here / "runs").exists()


def saved(cloud: object) -> Spoil:
    return lambda path: np.save(path, cloud, allow_pickle=True)


def header(text: str) -> Spoil:
    """An .npy file with this header."""
    data = text.encode().ljust(118) + b"\n"
    return lambda path: path.write_bytes(
        b"\x93NUMPY\x01\x00" + len(data).to_bytes(2, "little") + data
    )


CLOUDS: dict[str, tuple[Spoil, str]] = {
    "NaN": (saved(np.full((1100, 3), np.nan)), "holds NaN or infinity"),
    "infinity": (saved(np.full((1100, 3), np.inf)), "holds NaN or infinity"),
    "too few points": (saved(np.ones((3, 3))), "holds 3 points"),
    "two columns": (saved(np.ones((1100, 2))), "has the shape"),
    "texts": (saved(np.full((1100, 3), "a")), "one array of numbers"),
    "objects": (lambda p: saved(np.array([Payload(p.parents[1])]))(p), "Object arrays"),
    "a pickle": (lambda path: path.write_bytes(pickled(path.parents[1])), "is not an .npy file"),
    "a header with code": (header("__import__('os').mkdir('executed')"), "is not an .npy file"),
    "a header of 100 TB": (
        header("{'descr': '<f8', 'fortran_order': False, 'shape': (5000000000000, 3), }"),
        "is not an .npy file",
    ),
}


@pytest.mark.parametrize("kind", grid(CLOUDS, ("NaN", "objects").__contains__))
def test_cloud(here: Path, kind: str) -> None:
    spoil, says = CLOUDS[kind]
    test_shapenet.write(here / "clouds", points=1100)
    for path in (here / "clouds" / "shapenet_pc").iterdir():
        spoil(path)
    line = met("task=shapenet", "data.path=clouds", BATCH, runs=here / "runs")
    assert line.startswith("data.path=clouds/shapenet_pc/0269") and says in line
    assert not list(here.rglob(MARK))


def column(name: str, values: Any) -> Callable[[pa.Table], pa.Table]:
    return lambda t: t.set_column(t.column_names.index(name), name, pa.array(values(len(t))))


TABLES: dict[str, tuple[str, Callable[[pa.Table], pa.Table | bytes], str]] = {
    "a label out of range": ("rte", column("label", lambda n: [2] * n), "not from 0 to 1"),
    "a negative label": ("rte", column("label", lambda n: [-1] * n), "not from 0 to 1"),
    "labels that are texts": ("rte", column("label", lambda n: ["yes"] * n), "no numbers"),
    "half a label": ("rte", column("label", lambda n: [0.5] * n), "not whole ones"),
    "NaN": ("stsb", column("label", lambda n: [float("nan")] * n), "not from 0 to 5"),
    "infinity": ("stsb", column("label", lambda n: [float("inf")] * n), "not from 0 to 5"),
    "numbers for texts": ("rte", column("sentence1", lambda n: [7] * n), "not texts, in sentence1"),
    "nothing for texts": ("rte", column("sentence1", lambda n: [None] * n), "empty fields"),
    "no labels": ("rte", lambda t: t.drop_columns("label"), "has no column label"),
    "no rows": ("rte", lambda t: t.slice(0, 0), "has no rows"),
    "a text": ("rte", lambda t: b"no table", "cannot be read"),
}


@pytest.mark.parametrize("kind", first_of_each(TABLES, lambda kind: TABLES[kind][2]))
def test_table(here: Path, kind: str) -> None:
    from tasks.glue.glue_tables import BadTable, read_split

    name, change, says = TABLES[kind]
    (folder := here / name).mkdir()
    made = change(small_glue.table(name, "train"))
    path = folder / "train-00000-of-00001.parquet"
    if isinstance(made, bytes):
        path.write_bytes(made)
    else:
        pq.write_table(made, path)
    with pytest.raises(BadTable) as caught:
        read_split(folder, name, "train")
    assert str(folder) in str(caught.value) and says in str(caught.value)
    assert "\n" not in str(caught.value)
