"""Which files validate, and what is refused."""

import os
from pathlib import Path

import pytest

from co2.errors import ConfigError
from tasks.shared.corpus import embedded_corpus, user_corpus
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


def a_file(folder: Path, content: bytes, name: str = "text.txt") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def missing(folder: Path) -> Path:
    return folder / "nowhere"


def empty_file(folder: Path) -> Path:
    return a_file(folder, b"")


def empty_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


def folder_of_nothing(folder: Path) -> Path:
    return a_file(folder, b"").parent


def blank(folder: Path) -> Path:
    return a_file(folder, b" \n\t" * 5000)


def nul_bytes(folder: Path) -> Path:
    return a_file(folder, b"text\0text" * 500)


def latin_1(folder: Path) -> Path:
    return a_file(folder, ("straße " * 500).encode("latin-1"))


def picture_among_texts(folder: Path) -> Path:
    a_file(folder, story(5000).encode())
    a_file(folder, b"\x89PNG\r\n\x1a\n\xff\xff" * 50, "pictures/cat.png")
    return folder


def a_pipe(folder: Path) -> Path:
    folder.mkdir()
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def short(folder: Path) -> Path:
    return a_file(folder, b"only a few words")


def short_validation(folder: Path) -> Path:
    return a_file(folder, story(300).encode())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (missing, "no such file or folder"),
        (empty_file, "the file is empty"),
        (empty_folder, "the folder holds no text"),
        (folder_of_nothing, "the folder holds no text"),
        (blank, "holds no text"),
        (nul_bytes, "NUL byte at 4"),
        (latin_1, "no UTF-8 text (byte 4"),
        (picture_among_texts, "pictures/cat.png is no UTF-8 text"),
        (a_pipe, "must be a file or a folder"),
        (short, "one window of gpt2.context=64 needs 65"),
        (short_validation, "the validation part holds"),
    ],
)
def test_bad_data_are_refused_in_one_line_before_anything_is_written(
    tmp_path: Path, make, says: str
) -> None:
    root, path = tmp_path / "root", make(tmp_path / "given")
    with pytest.raises(ConfigError) as caught:
        gpt2(root, path, context=64, vocab_size=300).setup(1)
    line = str(caught.value)
    assert caught.value.key == "data.path"
    assert line.startswith(f"data.path={path}: ") and says in line and "\n" not in line
    assert not root.exists()


def test_an_empty_path_is_not_the_current_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data\.path=: must be a file or a folder, or null"):
        user_corpus("")
