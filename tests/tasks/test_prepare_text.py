"""Documents as token stores, openwebtext and wikibooks: what is written, and what is refused.

What holds for every data set is in test_prepare_contract.py.
"""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tasks.prepare import documents
from tasks.prepare.__main__ import main
from tasks.text.store import Store, open_store
from tests.tasks.small_sets import (
    ARTICLES,
    DOCUMENTS,
    GIVEN,
    ROBERTA_FIRST,
    SENTENCES,
    Given,
    byte_tokenizer,
)
from tests.tasks.test_prepare_contract import disturbed

both = pytest.mark.parametrize("name", ["openwebtext", "wikibooks"])


@pytest.fixture
def given(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Given:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "given").mkdir()
    return GIVEN[name](tmp_path / "given", monkeypatch)


@pytest.fixture
def command(given: Given) -> list[str]:
    return given.options


def texts(store: Store, part: str) -> list[str]:
    words = Tokenizer.from_file(str(store.folder / "tokenizer.json"))
    tokens = np.asarray(store.tokens(part))
    ends = np.flatnonzero(tokens == store.meta["separator"])
    assert ends[-1] == len(tokens) - 1
    spans = zip([0, *(ends + 1)], ends, strict=False)
    return [words.decode(tokens[start:end].tolist()) for start, end in spans]


JOINED = ["\n".join(SENTENCES[start : start + 10]) for start in range(0, 95, 10)]


@pytest.mark.parametrize(
    ("name", "share", "whole"),
    [("openwebtext", 0.1, DOCUMENTS), ("wikibooks", 0.2, [*ARTICLES, *JOINED])],
)
def test_documents_come_out_as_they_went_in(
    tmp_path: Path, command: list[str], share: float, whole: list[str]
) -> None:
    """Each in one part; blank ones are left out."""
    assert main([*command, "--root", str(tmp_path)]) == 0
    store = open_store(tmp_path / command[0])
    assert store is not None
    expected: dict[str, list[str]] = {"train": [], "val": []}
    for index, text in enumerate(whole):
        if text.strip():
            expected["val" if documents.validates(index, share) else "train"].append(text)
    assert {part: texts(store, part) for part in expected} == expected
    assert min(map(len, expected.values())) >= 4 and JOINED[-1].count("\n") == 4


@pytest.mark.parametrize("name", ["wikibooks"])
def test_no_text_becomes_a_special_token(tmp_path: Path, command: list[str]) -> None:
    """Although the articles spell some of them out."""
    assert main([*command, "--root", str(tmp_path)]) == 0
    store = open_store(tmp_path / "wikibooks")
    assert store is not None
    for part in ("train", "val"):
        assert not set(np.unique(store.tokens(part))) & {0, 1, 3, store.meta["vocab_size"] - 1}


@both
def test_the_number_of_shards_changes_nothing(tmp_path: Path, command: list[str]) -> None:
    roots = [tmp_path / shards for shards in ("1", "6")]
    for root in roots:
        assert main([*command, "--root", str(root), "--shards", root.name]) == 0
    for file in ("train.bin", "val.bin"):
        one, other = (root / command[0] / file for root in roots)
        assert one.read_bytes() == other.read_bytes()


@both
def test_what_was_begun_is_gone_on_with_as_it_was(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    words = [*command, "--root", str(root)]
    assert disturbed(words, root, 20, "stopped")[0] == 130
    capsys.readouterr()
    assert main([*words, "--shards", "7"]) == 2
    assert "was made with num_shards=6; keep to it or delete it" in capsys.readouterr().err
    assert main(words) == 0
    assert main([*words, "--val-share", "0.3"]) == 2
    if command[0] == "wikibooks":
        at = command.index("--sentences")
        assert main([*command[:at], *command[at + 2 :], "--root", str(root)]) == 2
        assert "--sentences=[]: " in capsys.readouterr().err


def refused(words: list[str], root: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that says why."""
    assert main([*words, "--root", str(root)]) == 2
    told = capsys.readouterr().err.splitlines()
    (line,) = [line for line in told if line.startswith("error: --")]
    assert told[-1] == line and not root.exists()
    return line


@pytest.mark.parametrize("name", ["openwebtext"])
def test_wrong_values_of_openwebtext(
    tmp_path: Path,
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    no_separator = byte_tokenizer(tmp_path / "tokenizer.json", [], [])
    (tmp_path / "damaged").mkdir()
    at = command.index("--tokenizer") + 1
    damaged = Path(shutil.copy(command[at], tmp_path / "damaged" / "tokenizer.json"))
    (damaged.parent / "config.json").write_text("[")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "rows.jsonl").write_text('{"title": "x"}\n')
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
        assert says in refused([*command, *extra], tmp_path / "root", capsys)


@pytest.mark.parametrize("name", ["wikibooks"])
def test_wrong_values_of_wikibooks(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    no_mask = byte_tokenizer(tmp_path / "no_mask.json", ROBERTA_FIRST, ["<other>"])
    first = ["<pad>", "<s>", "</s>", "<unk>"]
    shuffled = byte_tokenizer(tmp_path / "shuffled.json", first, ["<mask>"])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "rows.jsonl").write_text('{"title": "x"}\n')
    other = ["--sentences", str(tmp_path / "other")]
    for extra, says in [
        (other, '--sentences=.*has no column "text", only title'),
        (["--source", str(tmp_path / "nowhere")], "--source=.*nowhere: cannot be loaded"),
        (["--tokenizer", str(no_mask)], "has no <mask>; take RoBERTa's"),
        (["--tokenizer", str(shuffled)], "has <s> as 1, not 0; take RoBERTa's"),
        (["--shards", "1000"], "hold 72 documents"),
    ]:
        assert re.search(says, refused([*command, *extra], tmp_path / "root", capsys))


@pytest.mark.parametrize("name", ["openwebtext"])
def test_a_hub_out_of_reach(
    tmp_path: Path,
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def unreachable(*args: object, **kwargs: object) -> None:
        raise ConnectionError("Name or service not known\nand many more lines")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", unreachable)
    monkeypatch.setattr("datasets.load_dataset", unreachable)
    for key in ("--tokenizer", "--source"):
        line = refused([*command, key, "some/where"], tmp_path / "root", capsys)
        assert line.startswith(f"error: {key}=some/where: cannot be loaded (ConnectionError: Name")


def test_the_hub_is_asked_by_name_and_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import Dataset

    asked = []

    def hub(name: str, configuration: str | None, split: str) -> Dataset:
        asked.append((name, configuration, split))
        return Dataset.from_dict({"text": [f"{name} {number}" for number in range(40)]})

    monkeypatch.setattr("datasets.load_dataset", hub)
    tokenizer = byte_tokenizer(tmp_path / "tokenizer.json", ROBERTA_FIRST, ["<mask>"])
    short = ["wikibooks", "--root", str(tmp_path), "--tokenizer", str(tokenizer)]
    assert main([*short, "--shards", "2", "--val-share", "0.3"]) == 0
    assert asked == [
        ("wikimedia/wikipedia", "20231101.en", "train"),
        ("bookcorpus/bookcorpus", None, "train"),
    ]
    store = open_store(tmp_path / "wikibooks")
    assert store is not None
    assert store.meta["num_documents"] == 41  # 40 articles, 40 sentences in one


@pytest.mark.parametrize("name", ["openwebtext"])
def test_other_files_in_the_way_are_kept(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "openwebtext" / "raw.tar"
    mine.parent.mkdir()
    mine.write_text("my download")
    assert main([*command, "--root", str(tmp_path)]) == 2
    assert "is in the way" in capsys.readouterr().err
    assert mine.read_text() == "my download"
    assert not (tmp_path / "openwebtext.shards").exists()  # told at once, not after hours


def test_about_the_given_share_validates() -> None:
    share = np.mean([documents.validates(n, 0.05) for n in range(20_000)])
    assert 0.04 < share < 0.06
    assert not any(documents.validates(n, 0.0) for n in range(100))


@pytest.mark.parametrize("name", ["openwebtext"])
def test_check_names_what_is_wrong(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--root", str(tmp_path)]) == 0
    folder = tmp_path / "openwebtext"
    capsys.readouterr()
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
