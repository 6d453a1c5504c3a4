"""ShapeNet-55 out of an archive: unpacked safely, gone on with, checked, trained on."""

import io
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from tasks.prepare import shapenet as prepare
from tasks.prepare.__main__ import main
from tasks.shapenet import modelnet40 as layout
from tasks.shapenet.shapenet import Shapes
from tests.tasks.build import mesh
from tests.tasks.test_shapenet import modelnet40, ready

NAMES = {"train": [f"0{n % 2}-t{n}.npy" for n in range(6)], "test": ["00-v0.npy", "01-v1.npy"]}


def npy(seed: int, points: int = 1024) -> bytes:
    file = io.BytesIO()
    np.save(file, np.random.default_rng(seed).normal(size=(points, 3)).astype(np.float32))
    return file.getvalue()


def members() -> dict[str, bytes]:
    names = [name for part in NAMES.values() for name in part]
    return {f"ShapeNet55/shapenet_pc/{name}": npy(n) for n, name in enumerate(names)}


LISTS = {f"x/ShapeNet-55/{part}.txt": "\n".join(names).encode() for part, names in NAMES.items()}


def zipped(path: Path, held: Iterable[tuple[str, bytes]]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as pack:
        for name, content in held:
            pack.writestr(name, content)
    return path


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return zipped(tmp_path / "clouds.zip", (members() | LISTS).items())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if ShapeNet-55 had six training clouds."""
    monkeypatch.setattr(prepare, "NUM_CLOUDS", {"train": 6, "test": 2})
    monkeypatch.setattr(prepare, "NUM_CATEGORIES", 2)


def run(root: Path, *arguments: object) -> int:
    return main(["shapenet", "--root", str(root), *map(str, arguments)])


def test_a_zip_with_lists(tmp_path: Path, archive: Path, small: None, capsys) -> None:
    root = tmp_path / "data"
    assert run(root, "--archive", archive) == 0
    assert "6 train, 2 test clouds; train with: task=shapenet" in capsys.readouterr().out
    assert [path.name for path in root.iterdir()] == ["shapenet55"]
    assert run(root) == 0  # made already
    capsys.readouterr()
    assert run(root, "--check", root / "shapenet55") == 0
    assert capsys.readouterr().out.endswith("shapenet55: sound\n")
    task = ready(root=root, shapes=Shapes.shapenet55, points=1024)
    assert next(task.batches(mesh(), 0))[0].shape == (4, 1024, 3)


@pytest.mark.parametrize("kind", ["w", "w:gz"])
def test_a_tar_and_lists_beside_it(tmp_path: Path, small: None, kind: str) -> None:
    with tarfile.open(tmp_path / "clouds.tar", kind) as roll:
        for name, content in members().items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            roll.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("shapenet_pc/00-link.npy")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        roll.addfile(link)
    lists = tmp_path / "lists"
    lists.mkdir()
    for name, content in LISTS.items():
        (lists / Path(name).name).write_bytes(content)
    root = tmp_path / "data"
    assert run(root, "--archive", tmp_path / "clouds.tar", "--lists", lists) == 0
    made = {
        path.name: path.read_bytes() for path in (root / "shapenet55" / "shapenet_pc").iterdir()
    }
    assert made == {Path(name).name: content for name, content in members().items()}


def test_nothing_lands_elsewhere(tmp_path: Path, small: None) -> None:
    """Whatever the names in an archive, only their last part counts, and only of two kinds."""
    evil = {"../../evil.npy": npy(1), "/abs/evil2.npy": npy(2), "a/run.sh": b"x", "train.txt": b"x"}
    archive = zipped(tmp_path / "evil.zip", (members() | LISTS | evil).items())
    root = tmp_path / "in" / "data"
    assert run(root, "--archive", archive) == 0
    made = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    pc = "in/data/shapenet55/shapenet_pc"
    assert {f"{pc}/evil.npy", f"{pc}/evil2.npy"} <= made
    assert not any("run.sh" in name for name in made)
    assert {name for name in made if not name.startswith("in/data/shapenet55/")} == {"evil.zip"}


def test_a_stopped_run_goes_on(
    tmp_path: Path, archive: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, copied = prepare.shutil.copyfileobj, []

    def stopping(source, target) -> None:
        copied.append(Path(target.name).stem)
        if len(copied) == 4:
            target.write(b"half")
            raise KeyboardInterrupt
        copy(source, target)

    monkeypatch.setattr(prepare.shutil, "copyfileobj", stopping)
    root = tmp_path / "data"
    assert run(root, "--archive", archive) == 130
    assert not (root / "shapenet55").exists()
    assert run(root, "--archive", archive) == 0
    assert len(copied) == 4 + 7  # eight clouds and two lists: three were there, one was torn
    for name, content in members().items():
        assert (root / "shapenet55" / "shapenet_pc" / Path(name).name).read_bytes() == content
    assert not list(root.rglob("*.tmp"))


def test_refused_in_one_line(tmp_path: Path, archive: Path, capsys) -> None:
    text = tmp_path / "text.zip"
    text.write_text("no archive")
    bare = zipped(tmp_path / "bare.zip", members().items())
    empty = zipped(tmp_path / "empty.zip", LISTS.items())
    short = zipped(tmp_path / "short.zip", [*list(members().items())[1:], *LISTS.items()])
    torn = tmp_path / "torn.tar.gz"
    with tarfile.open(torn, "w:gz") as roll:
        roll.add(archive)
    torn.write_bytes(torn.read_bytes()[:-9000])
    for number, (arguments, says) in enumerate(
        [
            ([], "shapenet.org"),
            (["--archive", tmp_path / "none.zip"], "no such file"),
            (["--archive", text], "cannot be unpacked"),
            (["--archive", torn], "cannot be unpacked"),
            (["--archive", empty], "holds no .npy file"),
            (["--archive", bare], "ShapeNet-55/train.txt is not in the archive; give --lists"),
            (["--archive", bare, "--lists", tmp_path], "hold train.txt; give Point-BERT's"),
            (["--archive", short], "1 clouds of train.txt are not in it, such as 00-t0.npy"),
        ]
    ):
        root = tmp_path / f"root{number}"
        assert run(root, *arguments) == 2
        told = capsys.readouterr().err.splitlines()
        assert len(told) == 1 and told[0].startswith("error: --") and says in told[0], told
        assert not (root / "shapenet55").exists()


def test_check_names_what_is_wrong(tmp_path: Path, archive: Path, small: None, capsys) -> None:
    root = tmp_path / "data"
    assert run(root, "--archive", archive) == 0
    folder = root / "shapenet55"
    clouds = folder / "shapenet_pc"
    np.save(clouds / "00-t0.npy", np.full((1024, 3), np.nan))
    (clouds / "01-t1.npy").write_bytes(npy(0, points=1000))
    (clouds / "00-t2.npy").unlink()
    with (folder / "ShapeNet-55" / "test.txt").open("a") as file:
        file.write("\nno cloud\n01-t1.npy\n")
    capsys.readouterr()
    assert run(root, "--check", folder) == 1
    told = capsys.readouterr().out
    for line in (
        f"{folder}/ShapeNet-55/test.txt: line 3 is not CATEGORY-MODEL.npy: no cloud",
        f"{folder}/ShapeNet-55/test.txt: names 3 clouds, ShapeNet-55 has 2",
        "01-t1.npy: is named 2 times",
        f"{clouds}/00-t0.npy: holds NaN or infinity",
        f"{clouds}/01-t1.npy: holds 1000 points, 1024 are needed",
        f"{clouds}/00-t2.npy: is missing",
        f"{folder}: 6 faults",
    ):
        assert line in told.splitlines(), line
    (folder / "ShapeNet-55" / "train.txt").unlink()
    assert run(root, "--check", folder) == 1
    assert "train.txt: is missing" in capsys.readouterr().out


def test_help(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["shapenet", "--help"])
    told = capsys.readouterr().out
    assert "shapenet.org" in told and "DATASET.md" in told and "--archive FILE" in told


def test_check_of_modelnet40(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    there = modelnet40(tmp_path / "there", points=1024)
    monkeypatch.setattr(layout, "NUM_CLOUDS", {"train": 12, "test": 6})
    monkeypatch.setattr(layout, "NUM_CATEGORIES", 2)
    assert run(tmp_path, "--check", there) == 0
    (there / "flat" / "flat_00000.txt").write_text("1,2,3\n")
    monkeypatch.setattr(layout, "NUM_CLOUDS", {"train": 13, "test": 6})
    capsys.readouterr()
    assert run(tmp_path, "--check", there) == 1
    said = capsys.readouterr().out
    assert "names 12 clouds, ModelNet40 has 13" in said
    assert "flat_00000.txt: holds 1 points, 1024 are needed" in said
    (there / "flat" / "flat_00000.txt").unlink()
    assert run(tmp_path, "--check", there) == 1
    assert "is missing" in capsys.readouterr().out
