"""Wikipedia and BookCorpus, on small data sets in their layout: parquet, rows of sentences."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tasks import RoBERTa
from tasks.prepare import documents as shared
from tasks.prepare import wikibooks
from tasks.prepare.__main__ import main
from tasks.text.roberta import CorpusName
from tasks.text.store import Store, open_store
from tests.tasks.build import mesh
from tests.tasks.conftest import story
from tests.tasks.test_roberta import roberta

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]


def a_tokenizer(path: Path, first: list[str] = SPECIAL, last: str = "<mask>") -> Path:
    """A byte-level BPE whose special tokens stand where RoBERTa's do."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    learned = pre_tokenizers.ByteLevel.alphabet()
    words = {word: number for number, word in enumerate([*first, *sorted(learned), last])}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in [*first, last]])
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture(scope="module")
def articles() -> list[str]:
    texts = [f"{n} {story(60, seed=n)}</s><mask>" for n in range(60)]
    return [*texts[:20], "", " \n", *texts[20:]]


@pytest.fixture(scope="module")
def sentences() -> list[str]:
    return [f"sentence {n} of a book ." for n in range(95)]


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, articles: list[str], sentences: list[str]
) -> tuple[Path, Path]:
    """Wikipedia as two parquet files with more columns; the books as JSON lines."""
    from datasets import Dataset

    folder = tmp_path_factory.mktemp("source")
    (folder / "wikipedia").mkdir()
    (folder / "books").mkdir()
    for number, rows in enumerate((articles[:30], articles[30:])):
        data = Dataset.from_dict({"id": [str(n) for n in range(len(rows))], "text": rows})
        data.to_parquet(str(folder / "wikipedia" / f"train-{number:05d}-of-00002.parquet"))
    lines = [json.dumps({"text": sentence}) for sentence in sentences]
    (folder / "books" / "books.jsonl").write_text("\n".join(lines))
    return folder / "wikipedia", folder / "books"


@pytest.fixture
def command(
    folders: tuple[Path, Path], tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(wikibooks, "JOINED", 10)
    wikipedia, books = map(str, folders)
    given = ["wikibooks", "--source", wikipedia, "--sentences", books]
    return [*given, "--tokenizer", str(tokenizer), "--shards", "6", "--val-share", "0.2"]


def texts(store: Store, part: str) -> list[str]:
    words = Tokenizer.from_file(str(store.folder / "tokenizer.json"))
    tokens = np.asarray(store.tokens(part))
    ends = np.flatnonzero(tokens == 2)
    assert ends[-1] == len(tokens) - 1
    spans = zip([0, *(ends + 1)], ends, strict=False)
    return [words.decode(tokens[start:end].tolist()) for start, end in spans]


def test_documents_come_out_as_they_went_in(
    tmp_path: Path, command: list[str], articles: list[str], sentences: list[str], capsys
) -> None:
    root = tmp_path / "root"
    assert main([*command, "--root", str(root)]) == 0
    assert "train with: task=roberta roberta.corpus=wikibooks" in capsys.readouterr().out
    assert [path.name for path in root.iterdir()] == ["wikibooks"]
    store = open_store(root / "wikibooks")
    joined = ["\n".join(sentences[start : start + 10]) for start in range(0, 95, 10)]
    expected: dict[str, list[str]] = {"train": [], "val": []}
    for index, text in enumerate([*articles, *joined]):
        if text.strip():  # blank ones are left out
            expected["val" if shared.validates(index, 0.2) else "train"].append(text)
    assert {part: texts(store, part) for part in expected} == expected
    assert min(map(len, expected.values())) > 5 and joined[-1].count("\n") == 4
    for part in expected:
        assert not set(np.unique(store.tokens(part))) & {0, 1, 3, store.meta["vocab_size"] - 1}
    assert main(["wikibooks", "--check", str(root / "wikibooks")]) == 0

    task: RoBERTa = roberta(root, corpus=CorpusName.wikibooks, context=34)
    task.setup(1)
    assert next(task.batches(mesh(), 0))[0].shape == (4, 34)


KILLED = """
import os, signal, sys
from tasks.text import store
from tasks.prepare import wikibooks
from tasks.prepare.__main__ import main
wikibooks.JOINED = 10
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


def test_a_killed_run_goes_on(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    root = tmp_path / "killed"
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    process = [sys.executable, "-c", KILLED, *command, "--root", str(root)]
    assert subprocess.run(process, capture_output=True).returncode == -signal.SIGKILL
    assert {path.name for path in (root / "wikibooks.shards").glob("0*")} == {"00000", "00001"}

    other = command[: command.index("--sentences")] + command[command.index("--sentences") + 2 :]
    assert main([*other, "--root", str(root)]) == 2
    assert "--sentences=[]: " in capsys.readouterr().err

    made, shard = [], shared._shard
    monkeypatch.setattr(shared, "_shard", lambda f, *a: made.append(f.name) or shard(f, *a))
    assert main([*command, "--root", str(root)]) == 0
    assert made == ["00002", "00003", "00004", "00005"]
    whole = tmp_path / "whole"
    assert main([*command, "--root", str(whole), "--shards", "1"]) == 0
    for name in ("train.bin", "val.bin"):
        files = [folder / "wikibooks" / name for folder in (root, whole)]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_wrong_values_are_refused_in_one_line(
    tmp_path: Path, command: list[str], folders: tuple[Path, Path], capsys
) -> None:
    no_mask = a_tokenizer(tmp_path / "no_mask.json", last="<other>")
    shuffled = a_tokenizer(tmp_path / "shuffled.json", first=["<pad>", "<s>", "</s>", "<unk>"])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "rows.jsonl").write_text('{"title": "x"}\n')
    root = tmp_path / "root"
    for extra, says in [
        (
            ["--sentences", str(tmp_path / "other")],
            '--sentences=.*has no column "text", only title',
        ),
        (["--source", str(tmp_path / "nowhere")], "--source=.*nowhere: cannot be loaded"),
        (["--tokenizer", str(no_mask)], "has no <mask>; take RoBERTa's"),
        (["--tokenizer", str(shuffled)], "has <s> as 1, not 0; take RoBERTa's"),
        (["--shards", "1000"], "hold 72 documents"),
    ]:
        assert main([*command, "--root", str(root), *extra]) == 2
        told = capsys.readouterr().err.splitlines()
        errors = [line for line in told if line.startswith("error: ")]
        assert len(errors) == 1, told
        assert re.search(says, errors[0]), errors
        assert not root.exists()


def test_the_hub_is_asked_by_name_and_configuration(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    from datasets import Dataset

    asked = []

    def hub(name: str, configuration: str | None, split: str) -> Dataset:
        asked.append((name, configuration, split))
        return Dataset.from_dict({"text": [f"{name} {number}" for number in range(40)]})

    monkeypatch.setattr("datasets.load_dataset", hub)
    short = ["wikibooks", "--root", str(tmp_path), "--tokenizer", str(tokenizer)]
    assert main([*short, "--shards", "2", "--val-share", "0.3"]) == 0
    assert asked == [
        ("wikimedia/wikipedia", "20231101.en", "train"),
        ("bookcorpus/bookcorpus", None, "train"),
    ]
    store = open_store(tmp_path / "wikibooks")
    assert store.meta["num_documents"] == 41  # 40 articles, 40 sentences in one
