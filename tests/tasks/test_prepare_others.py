"""GLUE and ShapeNet-55: what is written, what is refused, what --check finds; and --verify, which
decodes every sample of data of one's own, too.

What holds for every data set is in test_prepare_contract.py.
"""

import io
import tarfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tasks.glue.glue_tables import GLUE_TASKS, read_split
from tasks.prepare import samples
from tasks.prepare.__main__ import main
from tasks.shapenet import modelnet40 as layout
from tests.tasks import small_ade20k, small_clouds, small_glue
from tests.tasks.pictures import tree
from tests.tasks.small_clouds import modelnet40
from tests.tasks.small_sets import LISTS, clouds, npy, of_shapenet, zipped
from tests.tasks.test_prepare_contract import error


class TestGLUE:
    @pytest.mark.parametrize("saved", [False, True])
    def test_all_tasks_are_written(self, tmp_path: Path, saved: bool) -> None:
        source, root = small_glue.write(tmp_path / "source", saved=saved), tmp_path / "root"
        assert main(["glue", "--root", str(root), "--source", str(source)]) == 0
        assert sorted(path.name for path in (root / "glue").iterdir()) == sorted(GLUE_TASKS)
        for name, task in GLUE_TASKS.items():
            found = {path.name for path in (root / "glue" / name).iterdir()}
            assert found == {f"{split}-00000-of-00001.parquet" for split in task.rows}
            for split in task.rows:
                expected = small_glue.table(name, split).select([*task.columns, "label"])
                assert read_split(root / "glue" / name, name, split).equals(expected)

    def test_the_hub_is_out_of_reach(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        def unreachable(*_: object, **__: object) -> str:
            raise OSError("no network\nand more")

        monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
        assert main(["glue", "--root", str(tmp_path)]) == 2
        says = "error: --source=nyu-mll/glue: cannot be loaded (OSError: no network)"
        assert error(capfd).startswith(says)

    def test_a_place_that_is_taken_is_told_before_the_work(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        (tmp_path / "glue").write_text("a file")
        assert main(["glue", "--root", str(tmp_path), "--source", "no/where"]) == 2
        says = f"error: --root={tmp_path}: cannot write {tmp_path / 'glue'} (Not a"
        assert error(capfd).startswith(says)

    def test_from_the_hub(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The client returns the folder of its snapshot, which is the repository's tree."""
        source, asked = small_glue.write(tmp_path / "source"), []

        def snapshot(name: str, repo_type: str, allow_patterns: str) -> str:
            asked.append((name, repo_type, allow_patterns))
            return str(source)

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
        assert main(["glue", "--root", str(tmp_path / "root")]) == 0
        assert asked == [("nyu-mll/glue", "dataset", f"{name}/*.parquet") for name in GLUE_TASKS]

    def test_check(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        folder = small_glue.write(tmp_path / "glue")
        (folder / "wnli").rename(tmp_path / "away")
        file = folder / "cola" / "train-00000-of-00002.parquet"
        pq.write_table(pq.read_table(file).drop_columns(["label"]), file)
        (file.parent / "train-00001-of-00002.parquet").unlink()
        assert main(["glue", "--check", str(folder)]) == 1
        lines = capfd.readouterr().out.splitlines()
        assert f"{folder / 'wnli'}: no such folder" in lines
        assert f"{folder / 'cola'}: train has no column label" in lines
        assert f"{folder / 'mnli'}: validation_matched has 13 rows, not 9815" in lines


def run(root: Path, *arguments: object) -> int:
    return main(["shapenet", "--root", str(root), *map(str, arguments)])


class TestShapeNet:
    @pytest.fixture
    def archive(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        return of_shapenet(tmp_path, monkeypatch).files[0]

    @pytest.mark.parametrize("kind", ["w", "w:gz"])
    def test_a_tar_and_lists_beside_it(self, tmp_path: Path, archive: Path, kind: str) -> None:
        with tarfile.open(tmp_path / "clouds.tar", kind) as roll:
            for name, content in clouds().items():
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
        found = (root / "shapenet55" / "shapenet_pc").iterdir()
        expected = {Path(name).name: content for name, content in clouds().items()}
        assert {path.name: path.read_bytes() for path in found} == expected

    def test_nothing_lands_elsewhere(self, tmp_path: Path, archive: Path) -> None:
        """Whatever the names in an archive, only their last part counts, and only of two kinds."""
        evil = {"../../evil.npy": npy(1), "/abs/evil2.npy": npy(2), "a/run.sh": b"x"}
        evil["train.txt"] = b"x"
        zipped(archive, (clouds() | LISTS | evil).items())
        root = tmp_path / "in" / "data"
        assert run(root, "--archive", archive) == 0
        made = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
        pc = "in/data/shapenet55/shapenet_pc"
        assert {f"{pc}/evil.npy", f"{pc}/evil2.npy"} <= made
        assert not any("run.sh" in name for name in made)
        outside = {name for name in made if not name.startswith("in/data/shapenet55/")}
        assert outside == {archive.name}

    def test_refused_in_one_line(
        self, tmp_path: Path, archive: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        text = tmp_path / "text.zip"
        text.write_text("no archive")
        bare = zipped(tmp_path / "bare.zip", clouds().items())
        empty = zipped(tmp_path / "empty.zip", LISTS.items())
        short = zipped(tmp_path / "short.zip", [*list(clouds().items())[1:], *LISTS.items()])
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
            told = error(capfd)
            assert told.startswith("error: --") and says in told
            assert not (root / "shapenet55").exists()

    def test_check_names_what_is_wrong(
        self, tmp_path: Path, archive: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        root = tmp_path / "data"
        assert run(root, "--archive", archive) == 0
        folder = root / "shapenet55"
        there = folder / "shapenet_pc"
        np.save(there / "00-t0.npy", np.full((1024, 3), np.nan))
        (there / "01-t1.npy").write_bytes(npy(0, points=1000))
        (there / "00-t2.npy").unlink()
        with (folder / "ShapeNet-55" / "test.txt").open("a") as file:
            file.write("\nno cloud\n01-t1.npy\n")
        capfd.readouterr()
        assert run(root, "--check", folder) == 1
        told = capfd.readouterr().out
        for line in (
            f"{folder}/ShapeNet-55/test.txt: line 3 is not CATEGORY-MODEL.npy: no cloud",
            f"{folder}/ShapeNet-55/test.txt: names 3 clouds, ShapeNet-55 has 2",
            "01-t1.npy: is named 2 times",
            f"{there}/00-t0.npy: holds NaN or infinity",
            f"{there}/01-t1.npy: holds 1000 points, 1024 are needed",
            f"{there}/00-t2.npy: is missing",
            f"{folder}: 6 faults",
        ):
            assert line in told.splitlines(), line
        (folder / "ShapeNet-55" / "train.txt").unlink()
        assert run(root, "--check", folder) == 1
        assert "train.txt: is missing" in capfd.readouterr().out

    def test_check_of_modelnet40(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        there = modelnet40(tmp_path / "there", points=1024)
        monkeypatch.setattr(layout, "NUM_CLOUDS", {"train": 12, "test": 6})
        monkeypatch.setattr(layout, "NUM_CATEGORIES", 2)
        assert run(tmp_path, "--check", there) == 0
        (there / "flat" / "flat_00000.txt").write_text("1,2,3\n")
        monkeypatch.setattr(layout, "NUM_CLOUDS", {"train": 13, "test": 6})
        capfd.readouterr()
        assert run(tmp_path, "--check", there) == 1
        said = capfd.readouterr().out
        assert "names 12 clouds, ModelNet40 has 13" in said
        assert "flat_00000.txt: holds 1 points, 1024 are needed" in said
        (there / "flat" / "flat_00000.txt").unlink()
        assert run(tmp_path, "--check", there) == 1
        assert "is missing" in capfd.readouterr().out


def told(capsys: pytest.CaptureFixture[str], status: int, name: str, path: Path) -> list[str]:
    """The lines that it prints."""
    capsys.readouterr()
    assert main([name, "--verify", str(path)]) == status
    found = capsys.readouterr()
    assert status != 2 or not found.out
    return (found.err if status == 2 else found.out).splitlines()


class TestVerify:
    def test_pictures(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Of classes that ImageNet does not have. Every fault is a line, however many there are."""
        folder = tree(tmp_path / "own", train=30)
        assert told(capsys, 0, "imagenet", folder) == [f"{folder}: sound"]
        cut = folder / "val" / "red" / "val_3.JPEG"
        cut.write_bytes(cut.read_bytes()[:-50])
        names = ("blue sky", "red")
        others = [path for name in names for path in (folder / "train" / name).iterdir()]
        for path in others:
            path.write_text("none")
        *lines, last, closing = told(capsys, 1, "imagenet", folder)
        assert lines == sorted(f"{path.relative_to(folder)} is no picture" for path in others)
        assert last.startswith("val/red/val_3.JPEG is damaged (")
        assert closing == f"{folder}: 61 faults"

        (folder / "val" / "red").rename(tmp_path / "red")
        (line,) = told(capsys, 2, "imagenet", folder)
        assert line.startswith(f"error: --verify={folder}: val has no folder red, which train has")

    def test_scenes(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = small_ade20k.write(tmp_path / "own")
        assert told(capsys, 0, "ade20k", folder) == [f"{folder}: sound"], "of any number of images"
        small_ade20k.annotation(folder, "validation", 2).unlink()
        assert "is missing, the mask of" in told(capsys, 2, "ade20k", folder)[0]

    def test_clouds(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = small_clouds.write(tmp_path / "own", train=2, test=1, points=1024)
        assert told(capsys, 0, "shapenet", folder) == [f"{folder}: sound"], "of any number"
        broken = folder / "shapenet_pc" / "02690156-test0-a.npy"
        np.save(broken, np.full((1024, 3), np.nan))
        line, _ = told(capsys, 1, "shapenet", folder)
        assert line == f"{broken}: holds NaN or infinity"
        (folder / "ShapeNet-55" / "test.txt").unlink()
        assert "test.txt: is missing" in told(capsys, 2, "shapenet", folder)[0]

    @pytest.mark.parametrize("name", ["openwebtext", "wikibooks"])
    def test_texts(self, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        assert told(capsys, 1, name, folder)[0] == f"{folder}/meta.json: is missing", "a store"

    def test_tables_of_any_number_of_rows(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = small_glue.write(tmp_path / "glue")
        assert told(capsys, 0, "glue", folder) == [f"{folder}: sound"]

    def test_faults_come_in_the_order_of_the_samples(self) -> None:
        every = samples._AT_ONCE * 3 + 5
        found = samples.broken("", every, lambda number: str(number) if number % 7 == 0 else None)
        assert list(found) == [str(number) for number in range(0, every, 7)]

    def test_ctrl_c_begins_again(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def stopped(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(samples, "ThreadPoolExecutor", stopped)
        folder = tree(tmp_path / "own")
        capsys.readouterr()
        assert main(["imagenet", "--verify", str(folder)]) == 130
        assert capsys.readouterr().err == "stopped; the same command begins again\n"
