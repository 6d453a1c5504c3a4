"""ImageNet's archives, in miniature: unpacked, killed, gone on with, looked through."""

import hashlib
import io
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from tasks.prepare import imagenet
from tasks.prepare.__main__ import main
from tests.tasks.pictures import picture, task

CLASSES = ["n01440764", "n01443537", "n01484850"]
TRUTH = [3, 1, 2, 1, 3, 2]
"""Of the validation pictures: numbers of the classes, which are not in the order of the names."""
NUMBERS = {3: CLASSES[0], 1: CLASSES[1], 2: CLASSES[2]}


def jpeg(seed: int) -> bytes:
    data = io.BytesIO()
    picture((100, 100, 100), (24, 20), seed).save(data, "JPEG")
    return data.getvalue()


def archive(file: Path, contents: dict[str, bytes]) -> Path:
    with tarfile.open(file, "w:gz" if file.suffix == ".gz" else "w") as out:
        for name, data in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    return file


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The three archives, and sums that fit them."""
    folder = tmp_path_factory.mktemp("archives")
    inner = {}
    for label, name in enumerate(CLASSES):
        pictures = {f"{name}_{n}.JPEG": jpeg(10 * label + n) for n in range(4)}
        inner[f"{name}.tar"] = archive(folder / "inner.tar", pictures).read_bytes()
    (folder / "inner.tar").unlink()
    archive(folder / "ILSVRC2012_img_train.tar", inner)
    val = {f"ILSVRC2012_val_{n:08d}.JPEG": jpeg(100 + n) for n in range(1, 7)}
    archive(folder / "ILSVRC2012_img_val.tar", val)
    kind = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("gloss", "O")]
    kind.append(("num_children", "O"))
    rows = [(n, name, "words", "gloss", 0) for n, name in NUMBERS.items()]
    rows.append((1001, "n00001740", "entity", "above them all", 2))
    meta = io.BytesIO()
    savemat(meta, {"synsets": np.array(rows, dtype=kind)})
    top = "ILSVRC2012_devkit_t12/data"
    truth = "".join(f"{n}\n" for n in TRUTH).encode()
    kit = {f"{top}/meta.mat": meta.getvalue()}
    kit[f"{top}/ILSVRC2012_validation_ground_truth.txt"] = truth
    archive(folder / "ILSVRC2012_devkit_t12.tar.gz", kit)
    return folder


@pytest.fixture
def archives(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = Path(shutil.copytree(made, tmp_path / "archives"))
    sums = {
        part: (name, hashlib.md5((made / name).read_bytes()).hexdigest())
        for part, (name, _) in imagenet.ARCHIVES.items()
    }
    monkeypatch.setattr(imagenet, "ARCHIVES", sums)
    return folder


def command(archives: Path, root: Path) -> list[str]:
    return ["imagenet", "--archives", str(archives), "--root", str(root)]


def tree(root: Path) -> dict[str, bytes]:
    folder = root / "imagenet"
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def expected() -> dict[str, bytes]:
    files = {
        f"train/{name}/{name}_{n}.JPEG": jpeg(10 * label + n)
        for label, name in enumerate(CLASSES)
        for n in range(4)
    }
    for number, truth in enumerate(TRUTH, start=1):
        files[f"val/{NUMBERS[truth]}/ILSVRC2012_val_{number:08d}.JPEG"] = jpeg(100 + number)
    return files


def test_archives_become_a_tree(archives: Path, tmp_path: Path, capsys) -> None:
    root = tmp_path / "data"
    assert main(command(archives, root)) == 0
    assert "train with: task=resnet50 resnet50.dataset=imagenet" in capsys.readouterr().out
    assert tree(root) == expected()
    assert [path.name for path in root.iterdir()] == ["imagenet"]
    own = task(path=root / "imagenet")
    own.setup(1)
    assert own.fingerprint()["num_samples"] == {"train": 12, "val": 6}
    shutil.rmtree(archives)
    assert main(command(archives, root)) == 0  # made already


KILLED = """
import os, signal, sys
from pathlib import Path
from tasks.prepare import imagenet

imagenet.ARCHIVES = {sums}
write, left = imagenet._write, {after}
def dying(archive, member, folder):
    global left
    left -= 1
    if left == 0:
        (folder / Path(member.name).name).write_bytes(b"half of it")
        os.kill(os.getpid(), signal.SIGKILL)
    write(archive, member, folder)
imagenet._write = dying
imagenet.prepare(Path(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.mark.parametrize("after", [6, pytest.param(15, marks=pytest.mark.slow)])
def test_a_killed_run_is_gone_on_with(
    archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Killed in the second class, and among the validation pictures."""
    root = tmp_path / "data"
    code = KILLED.format(sums=imagenet.ARCHIVES, after=after)
    died = subprocess.run([sys.executable, "-c", code, str(root), str(archives)])
    assert died.returncode == -signal.SIGKILL
    assert not (root / "imagenet").exists()
    written, write = [], imagenet._write
    monkeypatch.setattr(
        imagenet, "_write", lambda a, m, f: (written.append(m.name), write(a, m, f))
    )
    sums = {part: (name, "another") for part, (name, _) in imagenet.ARCHIVES.items()}
    monkeypatch.setattr(imagenet, "ARCHIVES", sums)  # verified before: not once more
    assert main(command(archives, root)) == 0
    assert tree(root) == expected()
    assert sum(name.startswith("n") for name in written) == {6: 8, 15: 0}[after]


def test_archives_that_cannot_be_used(
    archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    root = tmp_path / "data"
    names = [name for name, _ in imagenet.ARCHIVES.values()]
    for words, says in (
        ([], "--archives=: give the folder that"),
        (["--archives", "nowhere"], "--archives=nowhere: no such folder; give the folder that"),
        (
            ["--archives", str(tmp_path)],
            f"--archives={tmp_path}: holds no ILSVRC2012_img_train.tar",
        ),
    ):
        assert main(["imagenet", "--root", str(root), *words]) == 2
        line = capsys.readouterr().err.strip()
        assert line.startswith(f"error: {says}") and all(name in line for name in names)
        assert line.endswith("from https://image-net.org, after registration")
    train = archives / "ILSVRC2012_img_train.tar"
    whole = train.read_bytes()
    train.unlink()
    assert main(command(archives, root)) == 2
    assert "holds no ILSVRC2012_img_train.tar; get it from" in capsys.readouterr().err
    assert not root.exists()
    train.write_bytes(whole[: len(whole) // 2])
    assert main(command(archives, root)) == 2
    assert "ILSVRC2012_img_train.tar is damaged or another file" in capsys.readouterr().err
    assert main([*command(archives, root), "--unverified"]) == 2
    error = capsys.readouterr().err
    assert "ILSVRC2012_img_train.tar is damaged (" in error and error.count("\n") == 1
    train.write_bytes(whole)
    assert main(command(archives, root)) == 0
    assert tree(root) == expected()


def test_check(archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(imagenet, "_classes", lambda: set(CLASSES))
    monkeypatch.setattr(imagenet, "VAL_OF_CLASS", 2)
    monkeypatch.setattr(imagenet, "NUM_TRAIN", 12)
    root = tmp_path / "data"
    assert main(command(archives, root)) == 0
    folder = root / "imagenet"
    check, verify = (["imagenet", what, str(folder)] for what in ("--check", "--verify"))
    assert main(check) == main(verify) == 0
    cut = folder / "train" / CLASSES[0] / f"{CLASSES[0]}_1.JPEG"
    cut.write_bytes(cut.read_bytes()[:-50])
    assert main(check) == 0  # the beginning of every picture is sound
    capsys.readouterr()
    assert main(verify) == 1
    told = capsys.readouterr().out
    assert told.startswith(
        f"train/{CLASSES[0]}/{CLASSES[0]}_1.JPEG is damaged (image file is trunc"
    )
    assert told.endswith(f"{folder}: 1 faults\n")

    (folder / "train" / CLASSES[1] / f"{CLASSES[1]}_2.JPEG").write_text("no picture")
    shutil.rmtree(folder / "train" / CLASSES[2])
    (folder / "train" / "n00000001").mkdir()
    next((folder / "val" / CLASSES[0]).iterdir()).unlink()
    assert main(check) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"train/{CLASSES[2]}: missing",
        "train/n00000001: no class",
        f"train/{CLASSES[1]}/{CLASSES[1]}_2.JPEG is no picture (UnidentifiedImageError)",
        "train: 8 pictures instead of 12",
        f"val/{CLASSES[0]}: 1 pictures instead of 2",
        f"{folder}: 5 faults",
    ]
    shutil.rmtree(folder / "val")
    capsys.readouterr()
    assert main(check) == 1
    assert "val: no such folder" in capsys.readouterr().out.splitlines()


def test_the_thousand_classes_are_known() -> None:
    classes = imagenet._classes()
    assert len(classes) == 1000 and set(CLASSES) <= classes
