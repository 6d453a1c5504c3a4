"""Data sets of `python -m tasks.prepare`: what is written, what is refused, what --check finds; and
--verify, which decodes every sample of data of one's own, too.

What holds for every data set is in test_prepare_contract.py; graphs have test_prepare_graph.py.
"""

import hashlib
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from PIL import Image

from tasks.ade20k.pairs import FOLDER
from tasks.glue.glue_tables import GLUE_TASKS, read_split
from tasks.prepare import ade20k, imagenet
from tasks.prepare.__main__ import main
from tasks.prepare.documents import validates
from tasks.text.store import open_store
from tests.tasks import small_glue
from tests.tasks import small_sets as small
from tests.tasks.build import documents, mesh, refusal
from tests.tasks.conftest import Refused
from tests.tasks.pictures import task, tree
from tests.tasks.small_sets import CLASSES, LISTS, ROBERTA_FIRST, Given, byte_tokenizer, clouds
from tests.tasks.test_prepare_contract import command, cut, disturbed, files, prepared

Spoil = Callable[[Path], object]


def of(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", names)


def painted(*shape: int, level: int = 1) -> Spoil:
    return lambda path: Image.fromarray(np.full(shape, level, np.uint8)).save(path)


def saved(cloud: np.ndarray) -> Spoil:
    return lambda path: np.save(path, cloud)


def more_lines(path: Path) -> None:
    path.write_text(f"{path.read_text()}\nno cloud\n01-t1.npy\n")


def without_labels(path: Path) -> None:
    pq.write_table(pq.read_table(path).drop_columns(["label"]), path)


def without_a_row(path: Path) -> None:
    pq.write_table(pq.read_table(path).slice(1), path)


def another_token(path: Path) -> None:
    tokens = np.memmap(path, np.uint16, mode="r+")
    tokens[3] = 65_000
    tokens.flush()


_, OTHER, THIRD = CLASSES
JPEG = f"train/{OTHER}/{OTHER}_2.JPEG"
IMAGE, MASK = "images/{0}/ADE_{1}_0000000{2}.jpg", "annotations/{0}/ADE_{1}_0000000{2}.png"
MASKS = [MASK.format("training", "train", n) for n in range(5)]
LONE, WIDOW = MASK.format("validation", "val", 1), IMAGE.format("validation", "val", 2)
CLOUD, NAMES = "shapenet_pc/00-t0.npy", "ShapeNet-55/test.txt"
NO_NUMBERS = np.full((1024, 3), np.nan)
PUBLISHED = "pixels or labels differ from the published ones"
FAULTS: list[tuple[str, str, Spoil, str]] = [
    ("ade20k", WIDOW, Path.unlink, "2.png: has no image"),
    ("ade20k", LONE, Path.unlink, "1.jpg: has no mask"),
    ("ade20k", MASKS[2], painted(64, 48, level=151), "has class 151; ADE20K's are 1 to 150, 0 is"),
    ("ade20k", MASKS[3], painted(9, 12), "3.png: has 12×9 pixels, ADE_train_00000003.jpg 50×50"),
    ("fashion_mnist", "val/8-bag.npy", lambda path: np.save(path, np.load(path)[::-1]), PUBLISHED),
    ("glue", "cola/train-00000-of-00001.parquet", without_labels, "train has no column label"),
    ("glue", "cola/train-00000-of-00001.parquet", without_a_row, "train has 39 rows, not 40"),
    ("imagenet", f"train/{THIRD}", shutil.rmtree, f"train/{THIRD}: missing"),
    ("imagenet", "train/n00000001", Path.mkdir, "train/n00000001: no class"),
    ("imagenet", JPEG, Path.unlink, "train: 11 pictures instead of 12"),
    ("openwebtext", "val.bin", another_token, "holds token 65000, the vocabulary ends at "),
    ("shapenet", CLOUD, saved(NO_NUMBERS), "holds NaN or infinity"),
    ("shapenet", CLOUD, saved(np.eye(1000, 3)), "holds 1000 points, 1024 are needed"),
    ("shapenet", NAMES, more_lines, "line 3 is not CATEGORY-MODEL.npy: no cloud"),
    ("shapenet", NAMES, more_lines, "01-t1.npy: is named 2 times"),
]


@pytest.mark.parametrize(("name", "place", "spoil", "says"), FAULTS)
def test_check_names_what_is_wrong(
    given: Given,
    tmp_path: Path,
    place: str,
    spoil: Spoil,
    says: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = prepared(given, tmp_path / "root")
    spoil(folder / place)
    capfd.readouterr()
    assert main([given.options[0], "--check", str(folder)]) == 1
    *lines, closing = capfd.readouterr().out.splitlines()
    assert any(says in line for line in lines), lines
    assert closing == f"{folder}: {len(lines)} faults"


REFUSED: list[tuple[str, list[str], str]] = [
    ("ade20k", ["--archive", "one.zip"], f"holds no file in {FOLDER}/images/validation"),
    ("openwebtext", ["--tokenizer", "bare.json"], "has no <|endoftext|>"),
    ("openwebtext", ["--val-share", "0"], "--val-share=0.0"),
    ("shapenet", ["--archive", "bare.zip"], "train.txt is not in the archive; give --lists"),
    ("shapenet", ["--archive", "short.zip"], "1 clouds of train.txt are not in it, such as 00-t0"),
    ("wikibooks", ["--sentences", "other"], 'has no column "text", only title'),
    ("wikibooks", ["--tokenizer", "no_mask.json"], "has no <mask>; take RoBERTa's"),
    ("wikibooks", ["--tokenizer", "shuffled.json"], "has <s> as 1, not 0; take RoBERTa's"),
    ("wikibooks", ["--shards", "1000"], "hold 72 documents"),
]


@pytest.mark.parametrize(("name", "extra", "says"), REFUSED)
def test_refused_in_one_line(
    given: Given,
    tmp_path: Path,
    extra: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    refused: Refused,
) -> None:
    monkeypatch.chdir(tmp_path)
    byte_tokenizer(Path("bare.json"), [], [])
    byte_tokenizer(Path("no_mask.json"), ROBERTA_FIRST, ["<other>"])
    byte_tokenizer(Path("shuffled.json"), ["<pad>", "<s>", "</s>", "<unk>"], ["<mask>"])
    Path("other").mkdir()
    Path("other", "rows.jsonl").write_text('{"title": "x"}\n')
    small.zipped(Path("one.zip"), [(f"{FOLDER}/images/training/a.jpg", b"x")])
    small.zipped(Path("bare.zip"), clouds().items())
    small.zipped(Path("short.zip"), [*list(clouds().items())[1:], *LISTS.items()])
    assert says in refused([*given.options, *extra, "--root", "root"])
    assert not Path("root", given.made).exists()


@of("ade20k")
@pytest.mark.parametrize(
    "place", ["../outside", f"{FOLDER}/../../outside", "/outside", "C:/outside", "a link"]
)
def test_what_leads_elsewhere(given: Given, tmp_path: Path, place: str, refused: Refused) -> None:
    entry = zipfile.ZipInfo(place)
    if place == "a link":
        entry.filename = f"{FOLDER}/images/link"
        entry.create_system, entry.external_attr = 3, 0o120777 << 16
    with zipfile.ZipFile(given.files[0], "a") as file:
        file.writestr(entry, "/etc/passwd")
    before = set(tmp_path.rglob("*"))
    line = refused(command(given, tmp_path / "root"))
    assert "leads elsewhere; it is not ADE20K's archive" in line
    assert set(tmp_path.rglob("*")) == before


class Handler(SimpleHTTPRequestHandler):
    """Answers with the file of a folder, to whoever asks for the archive of ADE20K."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served(given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The archive of ADE20K, whose checksum is expected, where a server finds it."""
    archive = tmp_path / f"{FOLDER}.zip"
    archive.write_bytes(given.files[0].read_bytes())
    sha1 = hashlib.sha1(archive.read_bytes()).hexdigest()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=tmp_path)) as server:
        url = f"http://127.0.0.1:{server.server_port}/{archive.name}"
        monkeypatch.setattr(ade20k, "URL", url)
        monkeypatch.setattr(ade20k, "SHA1", f"sha1:{sha1}")
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield archive
        server.shutdown()


@of("ade20k")
def test_the_whole_way_over_http(
    given: Given, served: Path, tmp_path: Path, refused: Refused
) -> None:
    """One that fails is one line, and nothing is left."""
    root, content = tmp_path / "root", served.read_bytes()

    def failed() -> str:
        line = refused(["ade20k", "--root", str(root)])
        assert line.startswith(f"error: download={ade20k.URL}: ")
        assert line.endswith(f"(curl -C - -O {ade20k.URL}) and give --archive FILE")
        assert list(root.iterdir()) == []
        return line

    served.write_bytes(b"<html>log in first</html>")
    assert "SHA1 hash" in failed()
    served.unlink()
    assert "404 Client Error: " in failed()
    served.write_bytes(content)
    assert disturbed(["ade20k", "--root", str(root)], root, 2, "full")[0] == 2
    assert main(["ade20k", "--root", str(root)]) == 0
    made = files(given.files[0].parent / "made" / FOLDER)
    assert files(root / FOLDER) == {**made, "objectInfo150.txt": b"wall\n"}, "without a Mac's junk"
    assert [path.name for path in root.iterdir()] == [FOLDER]


@of("fashion_mnist")
def test_every_image_keeps_its_label(given: Given, tmp_path: Path) -> None:
    made = prepared(given, tmp_path / "root")
    own = task("resnet50", made, batch_size=16, flip=True, num_workers=1)
    assert own.num_classes == 10 and own.fingerprint()["num_samples"] == small.CLOTHES
    seen = []
    for images, labels in islice(own.batches(mesh(), 0), 5):  # an epoch
        assert images.shape == (16, 3, 28, 28)
        assert (images.float().mean((1, 2, 3)) // 20).tolist() == labels.tolist()
        seen += labels.tolist()
    assert sorted(seen) == sorted(small.clothes()["train"][1].tolist())


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 9, 8), np.uint8), "train/b.npy holds uint8 [4, 9, 8]; others are of 9 × 9"),
        (np.array([{}]), "train/b.npy cannot be read (Object arrays cannot be loaded"),
        (None, "train has no file b.npy, which val has; both need the same classes"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path: Path, array: np.ndarray | None, message: str) -> None:
    for part in ("train", "val"):
        (tmp_path / part).mkdir()
        for name in "ab":
            np.save(tmp_path / part / f"{name}.npy", np.zeros((4, 9, 9), np.uint8))
    file = tmp_path / "train" / "b.npy"
    file.unlink()
    if array is not None:
        np.save(file, array)
    line = refusal(lambda: task(path=tmp_path).setup(1))
    assert line.startswith(f"data.path={tmp_path}: {message}")


@of("imagenet")
def test_archives_become_a_tree(
    given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are verified once: a run that goes on takes hours less."""
    root = tmp_path / "root"
    assert disturbed(command(given, root), root, 12, "stopped")[0] == 130
    sums = {part: (name, "another") for part, (name, _) in imagenet.ARCHIVES.items()}
    monkeypatch.setattr(imagenet, "ARCHIVES", sums)
    expected = {
        f"train/{name}/{name}_{n}.JPEG": small.jpeg(10 * label + n)
        for label, name in enumerate(CLASSES)
        for n in range(4)
    }
    for number, truth in enumerate(small.TRUTH, start=1):
        name = f"ILSVRC2012_val_{number:08d}.JPEG"
        expected[f"val/{small.NUMBERS[truth]}/{name}"] = small.jpeg(100 + number)
    assert files(prepared(given, root)) == expected


@of("imagenet")
def test_archives_may_be_unverified(given: Given, tmp_path: Path, refused: Refused) -> None:
    cut(given.files[0])
    words = command(given, tmp_path / "root")
    for extra, says in (([], "is damaged or another file"), (["--unverified"], "is damaged (")):
        assert f"ILSVRC2012_img_train.tar {says}" in refused([*words, *extra])


@pytest.mark.parametrize("as_saved", [False, True])
def test_all_tasks_of_glue_are_written(tmp_path: Path, as_saved: bool) -> None:
    source, root = small_glue.write(tmp_path / "source", saved=as_saved), tmp_path / "root"
    assert main(["glue", "--root", str(root), "--source", str(source)]) == 0
    assert sorted(path.name for path in (root / "glue").iterdir()) == sorted(GLUE_TASKS)
    for name, table in GLUE_TASKS.items():
        found = {path.name for path in (root / "glue" / name).iterdir()}
        assert found == {f"{split}-00000-of-00001.parquet" for split in table.rows}
        for split in table.rows:
            expected = small_glue.table(name, split).select([*table.columns, "label"])
            assert read_split(root / "glue" / name, name, split).equals(expected)


@of("shapenet")
def test_a_tar_and_lists_beside_it(given: Given, tmp_path: Path) -> None:
    archive = small.rolled(tmp_path / "clouds.tar.gz", clouds().items())
    lists = tmp_path / "lists"
    lists.mkdir()
    for place, content in LISTS.items():
        (lists / Path(place).name).write_bytes(content)
    words = ["--archive", str(archive), "--lists", str(lists)]
    assert main([*command(given, tmp_path / "root"), *words]) == 0
    found = (tmp_path / "root" / "shapenet55" / "shapenet_pc").iterdir()
    expected = {Path(place).name: content for place, content in clouds().items()}
    assert {path.name: path.read_bytes() for path in found} == expected


@of("shapenet")
def test_nothing_lands_elsewhere(given: Given, tmp_path: Path) -> None:
    """Whatever the names in an archive, only their last part counts, and only of two kinds."""
    (archive,) = given.files
    evil = {"../../evil.npy": small.npy(1), "/abs/evil2.npy": small.npy(2), "a/run.sh": b"x"}
    evil["train.txt"] = b"x"
    small.zipped(archive, (clouds() | LISTS | evil).items())
    folder = prepared(given, tmp_path / "in" / "data")
    made = files(tmp_path)
    inside = {name for name in made if (tmp_path / name).is_relative_to(folder)}
    assert made.keys() - inside == {str(archive.relative_to(tmp_path))}
    assert {"evil.npy", "evil2.npy"} <= {Path(name).name for name in inside}
    assert not any("run.sh" in name for name in inside)


def verified(capfd: pytest.CaptureFixture[str], status: int, name: str, path: Path) -> list[str]:
    """The lines that it prints."""
    capfd.readouterr()
    assert main([name, "--verify", str(path)]) == status
    found = capfd.readouterr()
    assert status != 2 or not found.out
    return (found.err if status == 2 else found.out).splitlines()


def test_every_picture_is_verified(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of classes that ImageNet does not have. Every fault is a line, however many there are."""
    folder = tree(tmp_path / "own", train=30)
    assert verified(capfd, 0, "imagenet", folder) == [f"{folder}: sound"]
    cut(folder / "val" / "red" / "val_3.JPEG")
    names = ("blue sky", "red")
    others = [path for name in names for path in (folder / "train" / name).iterdir()]
    for path in others:
        path.write_text("none")
    *lines, last, closing = verified(capfd, 1, "imagenet", folder)
    assert lines == sorted(f"{path.relative_to(folder)} is no picture" for path in others)
    assert last.startswith("val/red/val_3.JPEG is damaged (")
    assert closing == f"{folder}: 61 faults"
    (folder / "val" / "red").rename(tmp_path / "red")
    (line,) = verified(capfd, 2, "imagenet", folder)
    assert line.startswith(f"error: --verify={folder}: val has no folder red, which train has")


def test_any_number_of_samples_is_sound(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Data of one's own have as many as they have."""
    own = small.shapenet55(tmp_path / "clouds", train=2, test=1, points=1024)
    pictures = small.scenes(tmp_path / "scenes")
    tables = small_glue.write(tmp_path / "glue")
    for name, folder in (("shapenet", own), ("ade20k", pictures), ("glue", tables)):
        assert verified(capfd, 0, name, folder) == [f"{folder}: sound"]


def test_texts_are_verified(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "good.txt").write_text("Grüße")
    assert verified(capfd, 0, "openwebtext", folder) == [f"{folder}: sound"]
    (folder / "old.txt").write_bytes("Grüße".encode("latin-1"))
    (folder / "binary.txt").write_bytes(b"a\0b")
    binary, old, closing = verified(capfd, 1, "openwebtext", folder)
    assert binary.startswith(f"{folder}: binary.txt is no UTF-8 text (a NUL byte at 1")
    assert old.startswith(f"{folder}: old.txt is no UTF-8 text (byte 2")
    assert closing == f"{folder}: 2 faults"
    (folder / "train.bin").write_bytes(b"\0\0")
    as_a_store, *_ = verified(capfd, 1, "openwebtext", folder)
    assert as_a_store == f"{folder}/meta.json: is missing"


JOINED = ["\n".join(small.SENTENCES[start : start + 10]) for start in range(0, 95, 10)]


@pytest.mark.parametrize(
    ("name", "share", "whole"),
    [("openwebtext", 0.1, small.DOCUMENTS), ("wikibooks", 0.2, [*small.ARTICLES, *JOINED])],
)
def test_documents_come_out_as_they_went_in(
    given: Given, tmp_path: Path, share: float, whole: list[str]
) -> None:
    """Each in one part; blank ones are left out. Although some spell special tokens out, no text
    becomes one."""
    store = open_store(prepared(given, tmp_path / "root"))
    expected: dict[str, list[str]] = {"train": [], "val": []}
    for index, text in enumerate(whole):
        if text.strip():
            expected["val" if validates(index, share) else "train"].append(text)
    assert {part: documents(store, part) for part in expected} == expected
    assert min(map(len, expected.values())) >= 4 and JOINED[-1].count("\n") == 4
    if given.made == "wikibooks":
        special = {0, 1, 3, store.meta["vocab_size"] - 1}
        assert not any(set(np.unique(store.tokens(part))) & special for part in expected)


@of("wikibooks")
def test_the_number_of_shards_changes_nothing(given: Given, tmp_path: Path) -> None:
    made = []
    for shards in ("1", "6"):
        assert main([*command(given, tmp_path / shards), "--shards", shards]) == 0
        made.append(files(tmp_path / shards / given.made))
    assert all(made[0][file] == made[1][file] for file in ("train.bin", "val.bin"))


@of("wikibooks")
def test_what_was_begun_is_gone_on_with_as_it_was(
    given: Given, tmp_path: Path, refused: Refused, capfd: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    words = command(given, root)
    assert disturbed(words, root, 20, "stopped")[0] == 130
    line = refused([*words, "--shards", "7"])
    assert "was made with num_shards=6; keep to it or delete it" in line
    assert main(words) == 0
    assert main([*words, "--val-share", "0.3"]) == 2
    at = words.index("--sentences")
    assert main([*words[:at], *words[at + 2 :]]) == 2
    assert "--sentences=[]: " in capfd.readouterr().err


def test_the_hub_is_asked_by_name_and_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def hub(name: str, configuration: str | None, split: str) -> Dataset:
        asked.append((name, configuration, split))
        return Dataset.from_dict({"text": [f"{name} {number}" for number in range(40)]})

    monkeypatch.setattr("datasets.load_dataset", hub)
    tokenizer = byte_tokenizer(tmp_path / "tokenizer.json", ROBERTA_FIRST, ["<mask>"])
    short = ["wikibooks", "--tokenizer", str(tokenizer), "--shards", "2", "--val-share", "0.3"]
    assert main([*short, "--root", str(tmp_path)]) == 0
    assert asked == [
        ("wikimedia/wikipedia", "20231101.en", "train"),
        ("bookcorpus/bookcorpus", None, "train"),
    ]
    store = open_store(tmp_path / "wikibooks")
    assert store.meta["num_documents"] == 41  # 40 articles, 40 sentences in one


@of("openwebtext")
def test_other_files_in_the_way_are_kept(given: Given, tmp_path: Path, refused: Refused) -> None:
    """That is told at once, not after hours."""
    mine = tmp_path / "openwebtext" / "raw.tar"
    mine.parent.mkdir()
    mine.write_text("my download")
    assert "is in the way" in refused(command(given, tmp_path))
    assert mine.read_text() == "my download"
    assert not (tmp_path / "openwebtext.shards").exists()


def test_about_the_given_share_validates() -> None:
    share = np.mean([validates(n, 0.05) for n in range(20_000)])
    assert 0.04 < share < 0.06
    assert not any(validates(n, 0.0) for n in range(100))
