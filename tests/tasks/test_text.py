"""Text: which files validate and what is refused; tokenizer, cache and windows."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from co2.errors import ConfigError
from tasks.shared.corpus import embedded_corpus, user_corpus
from tasks.text import store as stores
from tasks.text import text as texts
from tasks.text.store import PARTS, open_store
from tasks.text.text import Window, num_windows, prepared, windows
from tests.cli.harness import contents
from tests.tasks.build import documents, gpt2, refusal
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
    """Of few files the end of each validates, of many some files, and nothing is lost."""
    for name in ("b.txt", "a/z.txt", "a/y.md", ".git/config", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name * 40)
    (tmp_path / "empty.txt").touch()
    corpus = user_corpus(str(tmp_path))
    assert corpus.files == ("a/y.md", "a/z.txt", "b.txt")
    train, val = (list(corpus.documents(part)) for part in ("train", "val"))
    assert [a + b for a, b in zip(train, val, strict=True)] == [n * 40 for n in corpus.files]
    assert all(0.94 < len(a) / len(a + b) < 0.97 for a, b in zip(train, val, strict=True))
    for number in range(57):
        (tmp_path / f"{number:02}.txt").write_text(f"text {number}")
    train, val = (set(user_corpus(str(tmp_path)).documents(part)) for part in ("train", "val"))
    assert len(val) == 3 and not train & val and len(train | val) == 60


PICTURE = b"\x89PNG\r\n\x1a\n\xff\xff" * 50


@pytest.mark.parametrize(
    ("name", "files", "says"),
    [
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
    line = refusal(lambda: gpt2(root, path, context=64, vocab_size=300).setup(1))
    assert line.startswith(f"data.path={path}: ") and says in line
    assert not root.exists()


def of(context: int) -> Window:
    """As gpt2 asks for it."""
    return Window("gpt2.context", context, context + 1)


def test_tokens_decode_to_the_text(tmp_path: Path) -> None:
    """And have its bytes: those of non-ASCII letters, too; separators count only where a text
    spells them out."""
    given = {f"{n}.txt": story(500, seed=n) + "<|endoftext|>\r\n\t Ω" for n in range(25)}
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
    lengths = texts.token_bytes(store)
    assert lengths is not None and lengths[store.meta["separator"]] == 0
    whole = sum(int(lengths[store.tokens(part)].sum()) for part in PARTS)
    assert whole == sum(len(text.encode()) for text in given.values())
    large = {part: [np.array([70_000])] for part in PARTS}
    bare = stores.create(tmp_path / "s", large, 70001, 0, {})
    assert texts.token_bytes(bare) is None
    assert bare.tokens("val").tolist() == [70_000], "a large vocabulary takes four bytes"


def test_long_texts_are_cut_without_loss() -> None:
    text = story(400) + "x" * 300
    cut = list(texts.pieces(text, 64))
    assert "".join(cut) == text and max(map(len, cut)) <= 64 and len(cut) > 30
    assert all(piece.endswith("\n") for piece in cut[:10])


def test_windows_predict_every_token_but_the_first_once() -> None:
    """Without overlap they hold every token once."""
    tokens = np.arange(100, 123, dtype=np.uint16)
    count = num_windows(len(tokens), 5)
    found = windows(tokens, np.arange(count), 5)
    assert count == 4 and found.shape == (4, 6) and found.dtype.is_signed
    assert found[:, 1:].flatten().tolist() == list(range(101, 121))
    assert found[:, :-1].flatten().tolist() == list(range(100, 120))
    apart = windows(tokens, np.arange(4), 5, overlap=0)
    assert apart.flatten().tolist() == list(range(100, 120))
    assert [num_windows(length, 5) for length in (5, 6)] == [0, 1]
    assert [num_windows(length, 5, overlap=0) for length in (19, 20)] == [3, 4]


def changed_meta(change: Callable[[str], str]) -> Callable[[Path], object]:
    return lambda folder: (folder / "meta.json").write_text(
        change((folder / "meta.json").read_text())
    )


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut short": lambda folder: os.truncate(folder / "train.bin", 1000),
    "half a meta.json": changed_meta(lambda text: text[: len(text) // 2]),
    "an old format": changed_meta(lambda text: json.dumps({**json.loads(text), "format": 0})),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "no validation": lambda folder: (folder / "val.bin").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_made_again(tmp_path: Path, damage: str) -> None:
    """And a sound one is only opened."""
    (tmp_path / "a.txt").write_text(story(3000))
    corpus, root = user_corpus(str(tmp_path / "a.txt")), tmp_path / "root"
    folder = prepared(corpus, 300, of(16), root).folder
    sound = contents(folder)
    assert prepared(corpus, 300, of(16), root).folder == folder
    assert contents(folder) == sound
    DAMAGE[damage](folder)
    assert open_store(folder) is None
    assert prepared(corpus, 300, of(16), root).folder == folder
    again = contents(folder)
    assert all(again.pop(name)[0] == data for name, (data, _) in sound.items()) and not again
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    with pytest.raises(ConfigError, match=r"gpt2\.context=100000 needs 100001"):
        prepared(corpus, 300, of(100_000), root)


def test_other_text_and_other_vocabulary_have_caches_of_their_own(tmp_path: Path) -> None:
    """So have other names and other borders of files."""
    path = tmp_path / "a.txt"
    path.write_text(story(3000))
    corpus = user_corpus(str(path))
    folders = {prepared(corpus, size, of(16), tmp_path).folder for size in (300, 310)}
    path.write_text(story(3000, seed=1))
    folders.add(prepared(user_corpus(str(path)), 300, of(16), tmp_path).folder)
    assert len(folders) == 3
    sums = set()
    for words in ("a=one b=two", "a=one c=two", "a=onet b=wo"):
        folder = tmp_path / words
        folder.mkdir()
        for name, text in (word.split("=") for word in words.split()):
            (folder / name).write_text(text)
        sums.add(user_corpus(str(folder)).sha256)
    assert len(sums) == 3


def test_a_second_writer_leaves_the_first_one_s_store(tmp_path: Path) -> None:
    """Two machines on one file system: the lock does not reach, the rename decides. What is not
    ours is not replaced either."""

    def parts(value: int) -> dict:
        return {part: [np.full(5, value)] for part in PARTS}

    stores.create(tmp_path / "s", parts(1), 300, 0, {})
    kept = stores.create(tmp_path / "s", parts(2), 300, 0, {})
    assert kept.tokens("train").tolist() == [1] * 5
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError):
        stores.create(tmp_path / "t", parts(1), 300, 0, {})
    assert (tmp_path / "t" / "thesis.tex").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s", "t"]
