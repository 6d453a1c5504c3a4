"""`python -m tasks.prepare NAME --verify PATH`: every sample is decoded, also of data of one's own.

What a run would meet hours later, because it reads samples as it needs them, is told before.
"""

from pathlib import Path

import numpy as np
import pytest

from tasks.prepare import samples
from tasks.prepare.__main__ import main
from tests.tasks import small_ade20k, small_glue
from tests.tasks.pictures import tree


def told(capsys: pytest.CaptureFixture[str], status: int, name: str, path: Path) -> list[str]:
    """The lines that it prints."""
    capsys.readouterr()
    assert main([name, "--verify", str(path)]) == status
    found = capsys.readouterr()
    assert status != 2 or not found.out
    return (found.err if status == 2 else found.out).splitlines()


def test_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of classes that ImageNet does not have. Every fault is a line, however many there are."""
    folder = tree(tmp_path / "own", train=30)
    assert told(capsys, 0, "imagenet", folder) == [f"{folder}: sound"]
    cut = folder / "val" / "red" / "val_3.JPEG"
    cut.write_bytes(cut.read_bytes()[:-50])
    others = [path for name in ("blue sky", "red") for path in (folder / "train" / name).iterdir()]
    for path in others:
        path.write_text("none")
    *lines, last, closing = told(capsys, 1, "imagenet", folder)
    assert lines == sorted(f"{path.relative_to(folder)} is no picture" for path in others)
    assert last.startswith("val/red/val_3.JPEG is damaged (")
    assert closing == f"{folder}: 61 faults"

    (folder / "val" / "red").rename(tmp_path / "red")
    (line,) = told(capsys, 2, "imagenet", folder)
    assert line.startswith(f"error: --verify={folder}: val has no folder red, which train has")
    (line,) = told(capsys, 2, "imagenet", tmp_path / "none")
    assert line.endswith("none: no such file or folder")


def test_scenes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = small_ade20k.write(tmp_path / "own")
    assert told(capsys, 0, "ade20k", folder) == [f"{folder}: sound"], "of any number of images"
    mask = small_ade20k.annotation(folder, "validation", 2)
    mask.write_bytes(mask.read_bytes()[:-40])
    line, closing = told(capsys, 1, "ade20k", folder)
    assert line.startswith(f"{mask}: cannot be read (") and closing == f"{folder}: 1 faults"
    mask.unlink()
    assert "is missing, the mask of" in told(capsys, 2, "ade20k", folder)[0]


def test_clouds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, names = tmp_path / "own", {"train": ["0-a.npy", "1-b.npy"], "test": ["0-c.npy"]}
    for place in ("shapenet_pc", "ShapeNet-55"):
        (folder / place).mkdir(parents=True)
    for part, files in names.items():
        (folder / "ShapeNet-55" / f"{part}.txt").write_text("\n".join(files))
        for name in files:
            points = np.random.default_rng(0).normal(size=(1024, 3))
            np.save(folder / "shapenet_pc" / name, points)
    assert told(capsys, 0, "shapenet", folder) == [f"{folder}: sound"], "of any number of clouds"
    np.save(folder / "shapenet_pc" / "0-c.npy", np.full((1024, 3), np.nan))
    line, _ = told(capsys, 1, "shapenet", folder)
    assert line == f"{folder}/shapenet_pc/0-c.npy: holds NaN or infinity"
    (folder / "ShapeNet-55" / "test.txt").unlink()
    assert "test.txt: is missing" in told(capsys, 2, "shapenet", folder)[0]


@pytest.mark.parametrize("name", ["openwebtext", "wikibooks"])
def test_texts(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "good.txt").write_text("Grüße")
    assert told(capsys, 0, name, folder) == [f"{folder}: sound"]
    (folder / "old.txt").write_bytes("Grüße".encode("latin-1"))
    (folder / "binary.txt").write_bytes(b"a\0b")
    binary, old, closing = told(capsys, 1, name, folder)
    assert binary.startswith(f"{folder}: binary.txt is no UTF-8 text (a NUL byte at 1")
    assert old.startswith(f"{folder}: old.txt is no UTF-8 text (byte 2")
    assert closing == f"{folder}: 2 faults"
    (folder / "train.bin").write_bytes(b"\0\0")
    assert told(capsys, 1, name, folder)[0] == f"{folder}/meta.json: is missing", "it is a store"


def test_glue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = small_glue.write(tmp_path / "glue")
    assert told(capsys, 0, "glue", folder) == [f"{folder}: sound"], "of any number of rows"
    file, *_ = (folder / "rte").glob("validation*")
    file.write_bytes(file.read_bytes()[:-100])
    line, _ = told(capsys, 1, "glue", folder)
    assert line.startswith(f"{folder / 'rte'}: validation cannot be read (")


def test_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = ("--set", "generated", "--nodes", "200", "--features", "4", "--classes", "4")
    assert main(["graph", "--root", str(tmp_path), *drawn]) == 0
    folder = tmp_path / "graphs" / "generated"
    assert told(capsys, 0, "graph", folder) == [f"{folder}: sound"]
    with (folder / "features.bin").open("r+b") as file:
        file.write(b"\1\2\3\4")
    line, _ = told(capsys, 1, "graph", folder)
    assert line == f"{folder}/features.bin: its checksum is not that of graph.json"


def test_faults_come_in_the_order_of_the_samples() -> None:
    every = samples._AT_ONCE * 3 + 5
    found = samples.broken("", every, lambda number: str(number) if number % 7 == 0 else None)
    assert list(found) == [str(number) for number in range(0, every, 7)]


def test_ctrl_c_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(samples, "ThreadPoolExecutor", stopped)
    folder = tree(tmp_path / "own")
    capsys.readouterr()
    assert main(["imagenet", "--verify", str(folder)]) == 130
    assert capsys.readouterr().err == "stopped; the same command begins again\n"
