"""GLUE prepared from folders in both layouts: written, gone on with, refused, looked through."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tasks.glue.glue_tables import GLUE_TASKS, read_split
from tasks.prepare import glue as prepare
from tasks.prepare.__main__ import main
from tests.tasks import small_glue


@pytest.mark.parametrize("saved", [False, True])
def test_all_tasks_are_written(tmp_path: Path, saved: bool, capsys: pytest.CaptureFixture) -> None:
    source, root = small_glue.write(tmp_path / "source", saved=saved), tmp_path / "root"
    words = ["glue", "--root", str(root), "--source", str(source)]
    assert main(words) == 0
    assert "9 tasks; train with: task=glue glue.name=rte" in capsys.readouterr().out
    assert sorted(path.name for path in (root / "glue").iterdir()) == sorted(GLUE_TASKS)
    for name, task in GLUE_TASKS.items():
        files = {path.name for path in (root / "glue" / name).iterdir()}
        assert files == {f"{split}-00000-of-00001.parquet" for split in task.rows}
        for split in task.rows:
            expected = small_glue.table(name, split).select([*task.columns, "label"])
            assert read_split(root / "glue" / name, name, split).equals(expected)


def test_it_goes_on_with_the_next_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, root = small_glue.write(tmp_path / "source"), tmp_path / "root"
    words = ["glue", "--root", str(root), "--source", str(source)]
    write = prepare._write

    def stopped(folder: Path, splits: dict) -> None:
        if folder.name == "stsb":
            raise KeyboardInterrupt
        write(folder, splits)

    monkeypatch.setattr(prepare, "_write", stopped)
    assert main(words) == 130
    there = {path.name: path.stat().st_mtime_ns for path in (root / "glue").iterdir()}
    assert set(there) == {"cola", "sst2", "mrpc", "qqp"}
    monkeypatch.undo()
    assert main(words) == 0
    after = {path.name: path.stat().st_mtime_ns for path in (root / "glue").iterdir()}
    assert after.keys() == GLUE_TASKS.keys() and there.items() <= after.items()


def test_a_root_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(prepare, "_splits", lambda *_: pytest.fail("data were loaded first"))
    (tmp_path / "glue").write_text("a file")
    assert main(["glue", "--root", str(tmp_path)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"error: --root={tmp_path}: cannot write {tmp_path / 'glue'} (Not a")


def test_a_source_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = small_glue.write(tmp_path / "source", ("cola",))
    assert main(["glue", "--root", str(tmp_path / "root"), "--source", str(source)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(
        f"error: --source={source}: {source / 'sst2'}: has no split train; give a "
    )


def test_the_hub_is_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise OSError("no network\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    assert main(["glue", "--root", str(tmp_path)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: --source=nyu-mll/glue: cannot be loaded (OSError: no network)")


def test_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client returns the folder of its snapshot, which is the repository's tree."""
    source, asked = small_glue.write(tmp_path / "source"), []

    def snapshot(name: str, repo_type: str, allow_patterns: str) -> str:
        asked.append((name, repo_type, allow_patterns))
        return str(source)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert main(["glue", "--root", str(tmp_path / "root")]) == 0
    assert asked == [("nyu-mll/glue", "dataset", f"{name}/*.parquet") for name in GLUE_TASKS]


def test_check(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = small_glue.write(tmp_path / "glue")
    (folder / "wnli").rename(tmp_path / "away")
    file = folder / "cola" / "train-00000-of-00002.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["label"]), file)
    (file.parent / "train-00001-of-00002.parquet").unlink()
    assert main(["glue", "--check", str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"{folder / 'wnli'}: no such folder" in lines
    assert f"{folder / 'cola'}: train has no column label" in lines
    assert f"{folder / 'mnli'}: validation_matched has 13 rows, not 9815" in lines


def test_a_sound_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = small_glue.write(tmp_path / "glue")
    for task in GLUE_TASKS.values():
        for split in task.rows:
            monkeypatch.setitem(task.rows, split, small_glue.ROWS[split])
    assert main(["glue", "--check", str(folder)]) == 0
