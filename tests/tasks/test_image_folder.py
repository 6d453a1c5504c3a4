"""Folders of pictures: listed in order, read right, and what is wrong with them in one line."""

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder as Reference

from co2.errors import ConfigError
from tasks.shared.pictures import BadImage, decode
from tasks.vision.image_folder import ImageFolder
from tests.tasks.pictures import COLOURS, picture, tree


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tree(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "tree"))


def opened(folder: Path) -> ImageFolder:
    return ImageFolder(folder, "data.path", "tree")


def test_pictures_and_labels_are_those_of_torchvision(copy: Path) -> None:
    deeper = copy / "train" / "red" / "a" / "b"
    deeper.mkdir(parents=True)
    picture((1, 2, 3), (30, 20), 0).save(deeper / "x.png")
    (copy / "train" / "red" / "boxes.txt").write_text("passed by")
    (copy / "train" / "readme.txt").write_text("passed by")
    (copy / "val" / ".hidden").mkdir()
    (copy / "val" / "red" / ".x.jpg").write_text("passed by")
    images = opened(copy)
    assert images.classes == sorted(COLOURS) and images.num_classes == 3
    assert {part: list(counts) for part, counts in images.counts.items()} == {
        "train": [8, 9, 8],
        "val": [5, 5, 5],
    }
    reference = Reference(str(copy / "train"))
    found = {}
    for index in range(25):
        name, label = images.path("train", index)
        read, same = images.read("train", index)
        assert same == label
        found[str(copy / name)] = label
        expected = np.array(Image.open(copy / name).convert("RGB"))
        assert read.dtype == torch.uint8 and np.array_equal(read.permute(1, 2, 0), expected)
    assert found == dict(reference.imgs)
    order = [images.path("train", index)[0] for index in range(25)]
    assert [images.path("train", n)[1] for n in range(25)] == [0] * 8 + [1] * 9 + [2] * 8
    assert order[8:17] == sorted(order[8:17])


def test_names_alone_are_fingerprinted(copy: Path) -> None:
    before = opened(copy).facts()
    assert opened(copy).facts() == before
    os.rename(copy / "val" / "red" / "val_0.JPEG", copy / "val" / "red" / "other.JPEG")
    assert opened(copy).facts()["names_sha256"] != before["names_sha256"]


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("RGB", "JPEG"),
        ("L", "JPEG"),
        ("CMYK", "JPEG"),
        ("RGB", "PNG"),
        ("P", "PNG"),
        ("RGBA", "PNG"),
        ("L", "BMP"),
        ("RGB", "WEBP"),
    ],
)
def test_every_kind_of_picture_is_rgb(tmp_path: Path, mode: str, kind: str) -> None:
    file = tmp_path / "picture.jpg"  # whatever its name says: ImageNet has a PNG among its JPEGs
    picture((200, 100, 50), (31, 17), 0).convert(mode).save(file, kind)
    expected = np.array(Image.open(file).convert("RGB"))
    assert np.array_equal(decode(file).permute(1, 2, 0), expected)


def jpeg() -> bytes:
    data = io.BytesIO()
    picture((9, 99, 199), (64, 48), 0).save(data, "JPEG")
    return data.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is no picture"),
        (b"no picture at all", "is no picture"),
        (jpeg()[:-40], "is damaged (image file is truncated"),
        (jpeg()[:-2], "is damaged (image file is truncated"),
        (b"\x89PNG\r\n\x1a\n" + bytes(20), "is no picture"),
    ],
)
def test_bad_pictures(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "x.jpg").write_bytes(data)
    with pytest.raises(BadImage) as caught:
        decode(tmp_path / "x.jpg")
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_a_bad_picture_is_named_when_it_is_met(copy: Path) -> None:
    file = copy / "train" / "élan" / "train_3.JPEG"
    file.write_bytes(file.read_bytes()[:-60])
    images = opened(copy)
    with pytest.raises(ConfigError) as caught:
        images.read("train", 16 + 3)
    start = "data.path=tree: train/élan/train_3.JPEG is damaged (image file is trunc"
    assert str(caught.value).startswith(start)
    file.unlink()
    with pytest.raises(ConfigError, match=r"train_3.JPEG cannot be read \(No such file"):
        images.read("train", 16 + 3)


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (lambda t: shutil.rmtree(t), "no such folder"),
        (lambda t: shutil.rmtree(t / "val"), "has no folder val; a folder of pictures needs"),
        (lambda t: emptied(t / "train"), "train holds no folder; a folder of pictures needs"),
        (lambda t: shutil.rmtree(t / "val" / "red"), "val has no folder red, which train has"),
        (lambda t: (t / "val" / "new").mkdir(), "train has no folder new, which val has"),
        (lambda t: emptied(t / "train" / "red"), "train/red holds no picture (.jpg, .jpeg"),
    ],
)
def test_a_tree_that_does_not_fit(copy: Path, spoil: Callable[[Path], None], line: str) -> None:
    spoil(copy)
    with pytest.raises(ConfigError) as caught:
        opened(copy)
    assert str(caught.value).startswith(f"data.path=tree: {line}")
    assert "\n" not in str(caught.value)
