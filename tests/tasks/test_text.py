"""Text: which files validate and what is refused; tokenizer, cache and windows."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from co2.errors import ConfigError
from tasks.shared.corpus import embedded_corpus, user_corpus
from tasks.text import store as stores
from tasks.text import text as texts
from tasks.text.store import PARTS, Store, open_store
from tasks.text.text import (
    Window,
    encoded,
    learn_tokenizer,
    num_windows,
    pieces,
    prepared,
    token_bytes,
    unigram_entropy,
    windows,
)
from tests.tasks.build import gpt2
from tests.tasks.conftest import story


def test_embedded_files_are_split_into_disjoint_parts() -> None:
    corpus = embedded_corpus("gpt2.corpus")
    validation = corpus.validation_files
    assert list(corpus.files) == sorted(set(corpus.files))
    assert validation < set(corpus.files)
    assert not any("tests" in Path(name).parts for name in corpus.files)
    sizes = {name: (corpus.folder / name).stat().st_size for name in corpus.files}
    share = sum(sizes[name] for name in validation) / sum(sizes.values())
    assert 0.03 < share < 0.07
    train, val = (list(corpus.documents(part)) for part in ("train", "val"))
    assert (len(train), len(val)) == (len(corpus.files) - len(validation), len(validation))
    assert not set(train) & set(val)


def test_folder_is_read_in_sorted_order_without_hidden_and_empty_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/y.md", ".git/config", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name * 40)
    (tmp_path / "empty.txt").touch()
    corpus = user_corpus(str(tmp_path))
    assert corpus.files == ("a/y.md", "a/z.txt", "b.txt")
    # Few files: the end of each validates, and nothing is lost.
    train, val = (list(corpus.documents(part)) for part in ("train", "val"))
    assert [a + b for a, b in zip(train, val, strict=True)] == [n * 40 for n in corpus.files]
    assert all(0.94 < len(a) / len(a + b) < 0.97 for a, b in zip(train, val, strict=True))


def test_many_files_are_split_as_wholes(tmp_path: Path) -> None:
    texts = {f"{number:02}.txt": f"text {number}" for number in range(60)}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    corpus = user_corpus(str(tmp_path))
    train, val = (set(corpus.documents(part)) for part in ("train", "val"))
    assert len(val) == 3 and not train & val and train | val == set(texts.values())


def test_sha256_sees_names_contents_and_borders(tmp_path: Path) -> None:
    def digest(**files: str) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        return user_corpus(str(folder)).sha256

    base = digest(a="one", b="two")
    assert digest(a="one", b="two") == base
    assert base not in {
        digest(a="one", b="twx"),
        digest(a="one", c="two"),
        digest(a="onet", b="wo"),
    }


PICTURE = b"\x89PNG\r\n\x1a\n\xff\xff" * 50


@pytest.mark.parametrize(
    ("name", "files", "says"),
    [
        ("nowhere", {}, "no such file or folder"),
        ("text.txt", {"text.txt": b""}, "the file is empty"),
        (".", {}, "the folder holds no text"),
        (".", {"text.txt": b""}, "the folder holds no text"),
        ("text.txt", {"text.txt": b" \n\t" * 5000}, "holds no text"),
        ("text.txt", {"text.txt": b"text\0text" * 500}, "NUL byte at 4"),
        ("text.txt", {"text.txt": "straße".encode("latin-1")}, "no UTF-8 text (byte 4"),
        (".", {"a.txt": story(5000).encode(), "b.png": PICTURE}, "b.png is no UTF-8 text"),
        ("pipe", {}, "must be a file or a folder"),
        ("text.txt", {"text.txt": b"few words"}, "one window of gpt2.context=64 needs 65"),
        ("text.txt", {"text.txt": story(300).encode()}, "the validation part holds"),
    ],
)
def test_bad_data_are_refused_in_one_line_before_anything_is_written(
    tmp_path: Path, name: str, files: dict[str, bytes], says: str
) -> None:
    folder, root = tmp_path / "given", tmp_path / "root"
    folder.mkdir()
    for own, content in files.items():
        (folder / own).write_bytes(content)
    if name == "pipe":
        os.mkfifo(folder / name)
    path = folder / name
    with pytest.raises(ConfigError) as caught:
        gpt2(root, path, context=64, vocab_size=300).setup(1)
    line = str(caught.value)
    assert caught.value.key == "data.path"
    assert line.startswith(f"data.path={path}: ") and says in line and "\n" not in line
    assert not root.exists()


def test_an_empty_path_is_not_the_current_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data\.path=: must be a file or a folder, or null"):
        user_corpus("")


def of(context: int) -> Window:
    """As gpt2 asks for it."""
    return Window("gpt2.context", context, context + 1)


def documents(store: Store, part: str) -> list[str]:
    """What the tokens say: cut at the separator, decoded with the store's own tokenizer."""
    tokenizer = Tokenizer.from_file(str(store.folder / "tokenizer.json"))
    tokens = np.asarray(store.tokens(part))
    ends = np.flatnonzero(tokens == store.meta["separator"])
    assert ends[-1] == len(tokens) - 1
    starts = [0, *(ends + 1)]
    spans = zip(starts, ends, strict=False)
    return [tokenizer.decode(tokens[start:end].tolist()) for start, end in spans]


def test_tokens_decode_to_the_text(tmp_path: Path) -> None:
    given = {f"{n}.txt": story(500, seed=n) + "<|endoftext|>\r\n\t end" for n in range(25)}
    folder = tmp_path / "given"
    folder.mkdir()
    for name, text in given.items():
        (folder / name).write_bytes(text.encode())
    corpus = user_corpus(str(folder))
    store = prepared(corpus, 300, of(16), tmp_path / "root")
    for part in PARTS:
        names = [n for n in corpus.files if (n in corpus.validation_files) == (part == "val")]
        assert documents(store, part) == [given[name] for name in names]
        assert store.meta["parts"][part]["documents"] == len(names)
    assert store.meta["num_files"] == 25 and store.meta["sha256"] == corpus.sha256


def test_the_bytes_of_tokens_are_those_of_the_text(tmp_path: Path) -> None:
    """Those of non-ASCII letters, too; separators count only where a text spells them out."""
    given = [story(300, seed=n) + "<|endoftext|> Ω" for n in range(25)]
    folder = tmp_path / "given"
    folder.mkdir()
    for n, text in enumerate(given):
        (folder / f"{n}.txt").write_bytes(text.encode())
    store = prepared(user_corpus(str(folder)), 300, of(16), tmp_path / "root")
    lengths = token_bytes(store)
    assert lengths is not None and lengths[store.meta["separator"]] == 0
    whole = sum(int(lengths[store.tokens(part)].sum()) for part in PARTS)
    assert whole == sum(len(text.encode()) for text in given)
    bare = stores.create(tmp_path / "s", {part: [np.array([1])] for part in PARTS}, 257, 0, {})
    assert token_bytes(bare) is None


def test_long_texts_are_cut_without_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    text = story(400) + "x" * 300
    cut = list(pieces(text, 64))
    assert "".join(cut) == text and max(map(len, cut)) <= 64 and len(cut) > 30
    assert all(piece.endswith("\n") for piece in cut[:10])
    monkeypatch.setattr(texts, "_PIECE", 64)
    monkeypatch.setattr(pieces, "__defaults__", (64,))
    tokenizer = learn_tokenizer([text], 300)
    tokens = np.concatenate(list(encoded([text, "next"], tokenizer, np.uint16)))
    end = tokenizer.token_to_id("<|endoftext|>")
    (first, last) = np.flatnonzero(tokens == end)
    assert tokenizer.decode(tokens[:first].tolist()) == text
    assert tokenizer.decode(tokens[first + 1 : last].tolist()) == "next"


def test_the_tokenizer_is_deterministic_and_no_larger_than_asked() -> None:
    first, again = (learn_tokenizer([story(5000)], 320) for _ in range(2))
    assert first.to_str() == again.to_str()
    assert 257 < first.get_vocab_size() <= 320


def test_windows_predict_every_token_but_the_first_once() -> None:
    tokens = np.arange(100, 123, dtype=np.uint16)
    count = num_windows(len(tokens), 5)
    found = windows(tokens, np.arange(count), 5)
    assert count == 4 and found.shape == (4, 6) and found.dtype.is_signed
    assert found[:, 1:].flatten().tolist() == list(range(101, 121))
    assert found[:, :-1].flatten().tolist() == list(range(100, 120))
    assert num_windows(6, 5) == 1 and num_windows(5, 5) == 0


def test_windows_without_overlap_hold_every_token_once() -> None:
    tokens = np.arange(100, 120, dtype=np.uint16)
    count = num_windows(len(tokens), 5, overlap=0)
    found = windows(tokens, np.arange(count), 5, overlap=0)
    assert found.flatten().tolist() == list(range(100, 120))
    assert num_windows(19, 5, overlap=0) == 3


def test_unigram_entropy() -> None:
    assert unigram_entropy(np.array([0, 1, 2, 3] * 5, np.uint16)) == pytest.approx(math.log(4))
    assert unigram_entropy(np.array([7] * 9, np.uint16)) == 0
    three_to_one = 0.75 * math.log(4 / 3) + 0.25 * math.log(4)
    assert unigram_entropy(np.array([9, 9, 9, 2], np.uint16)) == pytest.approx(three_to_one)


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    parts = {part: [np.array([65535, 70000, 1], np.uint32)] for part in PARTS}
    store = stores.create(tmp_path / "s", parts, 70001, 1, {})
    assert store.tokens("val").tolist() == [65535, 70000, 1]
    assert stores.token_dtype(65535) is np.uint16


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def cut_short(folder: Path) -> None:
    with (folder / "train.bin").open("r+b") as file:
        file.truncate(1000)


def half_a_meta(folder: Path) -> None:
    text = (folder / "meta.json").read_text()
    (folder / "meta.json").write_text(text[: len(text) // 2])


def old_format(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "format": 0}))


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def no_validation(folder: Path) -> None:
    (folder / "val.bin").unlink()


@pytest.mark.parametrize(
    "damage", [cut_short, half_a_meta, old_format, no_tokenizer, no_validation]
)
def test_a_damaged_cache_is_made_again(tmp_path: Path, text_file: Path, damage) -> None:
    corpus = user_corpus(str(text_file))
    folder = prepared(corpus, 300, of(16), tmp_path).folder
    sound = contents(folder)
    damage(folder)
    assert open_store(folder) is None
    assert prepared(corpus, 300, of(16), tmp_path).folder == folder
    assert contents(folder) == sound
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_sound_cache_is_only_opened(
    tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = user_corpus(str(text_file))
    folder = prepared(corpus, 300, of(16), tmp_path).folder
    monkeypatch.setattr(texts, "learn_tokenizer", None)
    monkeypatch.setattr(texts, "create", None)
    monkeypatch.setattr(type(corpus), "text", None)
    assert prepared(user_corpus(str(text_file)), 300, of(16), tmp_path).folder == folder
    with pytest.raises(ConfigError, match=r"gpt2\.context=100000 needs 100001"):
        prepared(user_corpus(str(text_file)), 300, of(100_000), tmp_path)


def test_other_text_and_other_vocabulary_have_caches_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(story(3000))
    folders = {
        prepared(user_corpus(str(path)), size, of(16), tmp_path).folder for size in (300, 310)
    }
    path.write_text(story(3000, seed=1))
    folders.add(prepared(user_corpus(str(path)), 300, of(16), tmp_path).folder)
    assert len(folders) == 3


def test_a_second_writer_leaves_the_first_one_s_store(tmp_path: Path) -> None:
    """Two machines on one file system: the lock does not reach, the rename decides."""

    def parts(value: int) -> dict:
        return {part: [np.full(5, value)] for part in PARTS}

    stores.create(tmp_path / "s", parts(1), 300, 0, {})
    kept = stores.create(tmp_path / "s", parts(2), 300, 0, {})
    assert kept.tokens("train").tolist() == [1] * 5
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_what_is_not_ours_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError):
        stores.create(tmp_path / "s", {part: [np.ones(5)] for part in PARTS}, 300, 0, {})
    assert (tmp_path / "s" / "thesis.tex").read_text() == "years of work"


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def breaks():
        yield np.ones(5)
        raise RuntimeError("the text ends here")

    with pytest.raises(RuntimeError, match="ends here"):
        stores.create(tmp_path / "s", {"train": breaks(), "val": []}, 300, 0, {})
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "learn_tokenizer", lambda *_: pytest.fail("it was encoded first"))
    (tmp_path / "root").write_text("a file")
    with pytest.raises(ConfigError, match=r"^data\.root=.*cannot write") as caught:
        prepared(user_corpus(str(text_file)), 300, of(16), tmp_path / "root")
    assert "\n" not in str(caught.value)


PREPARE = """
import sys
from pathlib import Path
from tasks.shared import progress
from tasks.shared.corpus import user_corpus
from tasks.text.text import Window, prepared
progress._LONG = 0  # so that the little text here is worth a line
window = Window("gpt2.context", 16, 17)
store = prepared(user_corpus(sys.argv[1]), 300, window, Path(sys.argv[2]))
print(store.count("train"))
"""


def test_two_processes_at_once(tmp_path: Path, text_file: Path) -> None:
    command = [sys.executable, "-c", PREPARE, str(text_file), str(tmp_path)]
    pipe = subprocess.PIPE
    both = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] != ""
    told = "".join(errors for _, errors in outputs)
    assert told.count("learning a vocabulary") == 1  # the other one waited for it
    (folder,) = (tmp_path / "text").iterdir()
    assert open_store(folder) is not None
