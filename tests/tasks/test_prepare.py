"""The shards of openwebtext, on a small data set: killed, resumed, joined, trained on."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tasks.prepare import documents as prepare
from tasks.prepare.__main__ import main
from tasks.text.causal import CorpusName
from tasks.text.store import open_store
from tests.tasks.build import gpt2, mesh
from tests.tasks.conftest import story

NUM_DOCUMENTS = 120


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return [f"{n} {story(60, seed=n)}<|endoftext|>" for n in range(NUM_DOCUMENTS)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, documents: list[str]) -> Path:
    from datasets import Dataset

    folder = tmp_path_factory.mktemp("source")
    Dataset.from_dict({"text": documents}).save_to_disk(str(folder / "saved"))
    return folder / "saved"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tasks.text.text import learn_tokenizer

    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    learn_tokenizer([story(5000)], 300).save(str(path))
    return path


@pytest.fixture
def command(source: Path, tokenizer: Path) -> list[str]:
    given = ["openwebtext", "--source", str(source), "--tokenizer", str(tokenizer)]
    return [*given, "--shards", "6", "--val-share", "0.1"]


def test_documents_come_out_as_they_went_in(
    tmp_path: Path, command: list[str], documents: list[str], tokenizer: Path, capsys
) -> None:
    assert main([*command, "--root", str(tmp_path)]) == 0
    assert "train with: task=gpt2 gpt2.corpus=openwebtext" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["openwebtext"]
    store = open_store(tmp_path / "openwebtext")
    words = Tokenizer.from_file(str(tokenizer))
    found = {}
    for part in ("train", "val"):
        tokens = np.asarray(store.tokens(part))
        ends = np.flatnonzero(tokens == store.meta["separator"])
        spans = zip([0, *(ends + 1)], ends, strict=False)
        found[part] = [words.decode(tokens[start:end].tolist()) for start, end in spans]
    validating = [prepare.validates(n, 0.1) for n in range(NUM_DOCUMENTS)]
    assert found["val"] == [d for d, v in zip(documents, validating, strict=True) if v]
    assert found["train"] == [d for d, v in zip(documents, validating, strict=True) if not v]
    assert 4 <= len(found["val"]) <= 24

    task = gpt2(tmp_path, corpus=CorpusName.openwebtext, context=32)
    task.setup(1)
    assert next(task.batches(mesh(), 0)).shape == (4, 33)
    assert words.get_vocab_size() < 300
    assert task.model().transformer.wte.num_embeddings == 384, "padded to a multiple of 128"
    assert task.fingerprint()["data"] == "openwebtext"


KILLED = """
import os, signal, sys
from tasks.text import store
from tasks.prepare.__main__ import main
write, calls = store._write_text, 0
def deadly(path, text):
    global calls
    calls += 1
    if calls == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, text)
store._write_text = deadly
main(sys.argv[1:])
"""


def test_a_killed_run_goes_on_at_the_first_missing_shard(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    root = tmp_path / "killed"
    process = [sys.executable, "-c", KILLED, *command, "--root", str(root)]
    assert subprocess.run(process, capture_output=True).returncode == -signal.SIGKILL
    work = root / "openwebtext.shards"
    assert {path.name for path in work.glob("0*")} == {"00000", "00001"}
    assert len(list(work.glob(".00002.*"))) == 1  # torn, and never taken for a shard
    assert not (root / "openwebtext").exists()

    assert main([*command, "--root", str(root), "--shards", "7"]) == 2
    assert "was made with num_shards=6; keep to it or delete it" in capsys.readouterr().err

    made, shard = [], prepare._shard
    monkeypatch.setattr(prepare, "_shard", lambda f, *a: made.append(f.name) or shard(f, *a))
    assert main([*command, "--root", str(root)]) == 0
    assert made == ["00002", "00003", "00004", "00005"]
    assert not work.exists()

    whole = tmp_path / "whole"
    assert main([*command, "--root", str(whole), "--shards", "1"]) == 0
    for name in ("train.bin", "val.bin"):
        files = [folder / "openwebtext" / name for folder in (root, whole)]
        assert files[0].read_bytes() == files[1].read_bytes()

    made.clear()
    assert main([*command, "--root", str(root)]) == 0  # made already
    assert made == []
    assert main([*command, "--root", str(root), "--val-share", "0.2"]) == 2


def test_wrong_values_are_refused_in_one_line(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "damaged").mkdir()
    no_separator = tmp_path / "tokenizer.json"
    Tokenizer.from_str('{"model": {"type": "BPE", "vocab": {}, "merges": []}}').save(
        str(no_separator)
    )
    damaged = Path(shutil.copy(command[4], tmp_path / "damaged" / "tokenizer.json"))
    (damaged.parent / "config.json").write_text("[")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "rows.jsonl").write_text('{"title": "x"}\n')
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "root"
    for extra, says in [
        (["--source", str(tmp_path / "nowhere")], "--source="),
        (["--source", str(tmp_path / "other")], 'has no column "text", only title'),
        (["--tokenizer", str(no_separator)], "has no <|endoftext|>"),
        (["--tokenizer", str(tmp_path / "other" / "rows.jsonl")], "cannot be loaded"),
        (["--tokenizer", str(damaged)], "config.json cannot be read"),
        (["--tokenizer", "none/tokenizer.json"], "no such file; take GPT-2's, from openai-comm"),
        (["--shards", "0"], "--shards=0: must be 1 or more"),
        (["--shards", "121"], "hold 120 documents"),
        (["--val-share", "0"], "--val-share=0.0"),
    ]:
        assert main([*command, "--root", str(root), *extra]) == 2
        told = capsys.readouterr().err.splitlines()
        errors = [line for line in told if line and "examples/s" not in line]  # datasets' bar
        assert len(errors) == 1 and errors[0].startswith("error: --") and says in errors[0]
        assert not root.exists()


def test_a_hub_out_of_reach(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def unreachable(*args, **kwargs):
        raise ConnectionError("Name or service not known\nand many more lines")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", unreachable)
    monkeypatch.setattr("datasets.load_dataset", unreachable)
    for key in ("--tokenizer", "--source"):
        assert main([*command, "--root", str(tmp_path), key, "some/where"]) == 2
        error = capsys.readouterr().err.strip()
        assert error.startswith(f"error: {key}=some/where: cannot be loaded (ConnectionError: Name")
        assert "\n" not in error


def test_a_root_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    for name in ("load_tokenizer", "load_rows"):
        monkeypatch.setattr(prepare, name, lambda *_: pytest.fail("data were loaded first"))
    (tmp_path / "root").write_text("a file")
    assert main([*command, "--root", str(tmp_path / "root")]) == 2
    error = capsys.readouterr().err.strip()
    root = tmp_path / "root"
    assert error == f"error: --root={root}: cannot write {root} (Not a directory); choose another"


def test_other_files_in_the_way_are_kept(tmp_path: Path, command: list[str], capsys) -> None:
    mine = tmp_path / "openwebtext" / "raw.tar"
    mine.parent.mkdir()
    mine.write_text("my download")
    assert main([*command, "--root", str(tmp_path)]) == 2
    assert "is in the way" in capsys.readouterr().err
    assert mine.read_text() == "my download"
    assert not (tmp_path / "openwebtext.shards").exists()  # told at once, not after hours


def test_about_the_given_share_validates() -> None:
    share = np.mean([prepare.validates(n, 0.05) for n in range(20_000)])
    assert 0.04 < share < 0.06
    assert not any(prepare.validates(n, 0.0) for n in range(100))


def test_help(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["openwebtext", "--help"])
    assert caught.value.code == 0
    told = capsys.readouterr().out
    assert "goes on" in told and "--source FOLDER --tokenizer FILE" in told


def test_check_names_what_is_wrong(tmp_path: Path, command: list[str], capsys) -> None:
    assert main([*command, "--root", str(tmp_path)]) == 0
    folder = tmp_path / "openwebtext"
    capsys.readouterr()
    assert main(["openwebtext", "--check", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}: sound\n"

    tokens = np.memmap(folder / "val.bin", np.uint16, mode="r+")
    tokens[3] = 65_000
    tokens.flush()
    assert main(["openwebtext", "--check", str(folder)]) == 1
    checksum, token, closing = capsys.readouterr().out.splitlines()
    assert checksum.startswith(f"{folder}/val.bin: its checksum")
    assert token.startswith(f"{folder}/val.bin: holds token 65000, the vocabulary ends at ")
    assert closing == f"{folder}: 2 faults"

    (folder / "val.bin").unlink()
    assert main(["openwebtext", "--check", str(folder)]) == 1
    assert capsys.readouterr().out.startswith(f"{folder}/val.bin: is missing\n")
    assert main(["openwebtext", "--check", str(tmp_path / "none")]) == 2
