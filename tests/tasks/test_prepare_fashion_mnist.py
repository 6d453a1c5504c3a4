"""Fashion-MNIST packed from small files in its format: made, refused, checked, trained on."""

import gzip
import hashlib
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from co2.errors import ConfigError
from tasks.prepare import fashion_mnist as prepare
from tasks.prepare.__main__ import main
from tests.tasks.build import mesh
from tests.tasks.pictures import task

COUNTS = {"train": 80, "val": 30}


def idx(values: np.ndarray) -> bytes:
    """The format of MNIST's files: zeros, the type (8: uint8), the dimensions, the values."""
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes([0, 0, 8, values.ndim]) + sizes + values.tobytes()


@pytest.fixture
def values() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By part, images that are as bright as their label tells, and labels."""
    source, made = np.random.default_rng(0), {}
    for part, count in COUNTS.items():
        labels = source.permutation(np.arange(count, dtype=np.uint8) % 10)
        noise = source.integers(0, 9, (count, 28, 28), np.uint8)
        made[part] = (labels[:, None, None] * np.uint8(20) + noise, labels)
    return made


@pytest.fixture
def source(values: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The four files, whose checksums are taken for the published ones."""
    folder, known = tmp_path / "source", {}
    folder.mkdir()
    whole = hashlib.sha256()
    for part, arrays in values.items():
        files = []
        for (name, _), array in zip(prepare.SOURCES[part], arrays, strict=True):
            (folder / name).write_bytes(gzip.compress(idx(array)))
            files.append((name, hashlib.sha256(idx(array)).hexdigest()))
        known[part] = tuple(files)
        images, labels = arrays
        order = np.argsort(labels, kind="stable")
        whole.update(images[order].tobytes() + labels[order].astype(np.int64).tobytes())
    monkeypatch.setattr(prepare, "SOURCES", known)
    monkeypatch.setattr(prepare, "PACKED", whole.hexdigest())
    return folder


@pytest.fixture
def made(source: Path, tmp_path: Path) -> Path:
    assert main(["fashion_mnist", "--root", str(tmp_path / "root"), "--source", str(source)]) == 0
    return tmp_path / "root" / "fashion_mnist"


def test_every_image_keeps_its_label(capsys, made: Path, values: dict) -> None:
    assert f"train with: task=resnet50 data.path={made} " in capsys.readouterr().out
    assert [path.name for path in made.parent.iterdir()] == ["fashion_mnist"]
    own = task(path=made)
    own.setup(2)
    assert own.num_classes == 10 and own.fingerprint()["num_samples"] == COUNTS
    for part, (images, labels) in values.items():
        found, known = own._images.take(part, range(COUNTS[part]))
        order = np.argsort(labels, kind="stable")
        assert np.array_equal(found[:, 0], images[order])
        assert known.tolist() == labels[order].tolist()
    assert main(["fashion_mnist", "--root", str(made.parent), "--source", "nowhere"]) == 0


@pytest.mark.parametrize("name", ["resnet50", "vit"])
def test_both_tasks_train_on_it(made: Path, name: str) -> None:
    own = task(name, made, batch_size=16, flip=True)
    own.setup(1)
    for images, labels in islice(own.batches(mesh(), 0), 7):  # 5 an epoch
        assert images.shape == (16, 3, 28, 28) and images.dtype == torch.uint8
        assert (images.float().mean((1, 2, 3)) // 20).tolist() == labels.tolist()
    assert own.evaluate(own.model())["top1"] <= 1


def test_what_is_sound_and_what_is_not(made: Path, capsys) -> None:
    for look in ("--check", "--verify"):
        assert main(["fashion_mnist", look, str(made)]) == 0
    capsys.readouterr()
    bag = made / "val" / "8-bag.npy"
    np.save(bag, np.load(bag)[::-1])
    assert main(["fashion_mnist", "--check", str(made)]) == 1
    assert capsys.readouterr().out.startswith("pixels or labels differ from the published ones")
    bag.write_bytes(bag.read_bytes()[:-1])
    assert main(["fashion_mnist", "--verify", str(made)]) == 2
    assert f"--verify={made}: val/8-bag.npy cannot be read (" in capsys.readouterr().err
    bag.unlink()
    assert main(["fashion_mnist", "--check", str(made)]) == 1
    assert capsys.readouterr().out.startswith("val/8-bag.npy: missing\n")


def test_refused(source: Path, tmp_path: Path, capsys) -> None:
    def error() -> str:
        words = ["fashion_mnist", "--root", str(tmp_path / "root"), "--source", str(source)]
        assert main(words) == 2 and not (tmp_path / "root").exists()
        return capsys.readouterr().err

    file = source / "t10k-labels-idx1-ubyte.gz"
    content = file.read_bytes()
    file.write_bytes(gzip.compress(gzip.decompress(content)[:-1] + b"\x09\x09"))
    assert "t10k-labels-idx1-ubyte.gz is damaged or another file: the SHA-256" in error()
    file.write_bytes(content[:-9])
    assert "t10k-labels-idx1-ubyte.gz is damaged (" in error()
    file.unlink()
    hint = "holds no t10k-labels-idx1-ubyte.gz; apt-get install dataset-fashion-mnist has them"
    assert hint in error()


def test_stopped_it_leaves_nothing(source: Path, tmp_path: Path, monkeypatch) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    words = ["fashion_mnist", "--root", str(tmp_path / "root"), "--source", str(source)]
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", stopped)
        assert main(words) == 130 and not any((tmp_path / "root").iterdir())
    assert main(words) == 0


def test_a_missing_folder_says_what_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such folder; .* -m tasks.prepare fashion_mnist --r"):
        task(path=tmp_path / "fashion_mnist").setup(1)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 9, 9), np.float32), "train/b.npy holds float32 [4, 9, 9]; needs uint8 [im"),
        (np.zeros((4, 9), np.uint8), "train/b.npy holds uint8 [4, 9]; needs uint8"),
        (np.zeros((4, 9, 9, 4), np.uint8), "train/b.npy holds uint8 [4, 9, 9, 4]; needs uint8"),
        (np.zeros((0, 9, 9), np.uint8), "train/b.npy holds uint8 [0, 9, 9]; needs uint8"),
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
    with pytest.raises(ConfigError) as caught:
        task(path=tmp_path).setup(1)
    assert str(caught.value).startswith(f"data.path={tmp_path}: {message}")
