"""ADE20K, Fashion-MNIST and ImageNet: what is unpacked, what is refused, what --check finds.

What holds for every data set is in test_prepare_contract.py.
"""

import gzip
import hashlib
import shutil
import socket
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from co2.errors import ConfigError
from tasks.ade20k.pairs import FOLDER
from tasks.prepare import ade20k as prepare
from tasks.prepare import imagenet
from tasks.prepare.__main__ import main
from tests.tasks import small_ade20k as small
from tests.tasks.build import mesh
from tests.tasks.pictures import task
from tests.tasks.small_sets import (
    CLASSES,
    CLOTHES,
    NUMBERS,
    TRUTH,
    clothes,
    idx,
    jpeg,
    of_ade20k,
    of_fashion_mnist,
    of_imagenet,
)
from tests.tasks.test_prepare_contract import disturbed, error, files


class TestADE20K:
    @pytest.fixture
    def archive(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        return of_ade20k(tmp_path, monkeypatch).files[0]

    @pytest.fixture
    def folder(self, archive: Path) -> Path:
        """What is in the archive."""
        return archive.parent / "made" / FOLDER

    def test_its_own_files_are_unpacked(self, archive: Path, folder: Path, tmp_path: Path) -> None:
        """Junk of a Mac is not, and the archive stays."""
        root = tmp_path / "root"
        assert main(["ade20k", "--root", str(root), "--archive", str(archive)]) == 0
        assert files(root / FOLDER) == {**files(folder), "objectInfo150.txt": b"wall\n"}
        assert archive.exists()
        assert main(["ade20k", "--root", str(root)]) == 0  # made already: nothing is downloaded

    @pytest.mark.parametrize(
        "name", ["../outside", f"{FOLDER}/../../outside", "/outside", "C:/outside"]
    )
    def test_names_that_lead_elsewhere(
        self, archive: Path, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        with zipfile.ZipFile(archive, "a") as file:
            file.writestr(name, "x")
        before = set(tmp_path.rglob("*"))
        assert main(["ade20k", "--root", str(tmp_path / "root"), "--archive", str(archive)]) == 2
        assert "leads elsewhere; it is not ADE20K's archive" in error(capfd)
        assert set(tmp_path.rglob("*")) == before

    def test_links_are_refused(
        self, archive: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        entry = zipfile.ZipInfo(f"{FOLDER}/images/link")
        entry.create_system, entry.external_attr = 3, 0o120777 << 16
        with zipfile.ZipFile(archive, "a") as file:
            file.writestr(entry, "/etc/passwd")
        assert main(["ade20k", "--root", str(tmp_path / "root"), "--archive", str(archive)]) == 2
        assert "leads elsewhere" in error(capfd)

    def test_archives_that_cannot_be_used(
        self, archive: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        content, middle = archive.read_bytes(), archive.stat().st_size // 2
        other, torn = tmp_path / "other.zip", tmp_path / "torn.zip"
        torn.write_bytes(content[:middle] + bytes(64) + content[middle + 64 :])
        with zipfile.ZipFile(other, "w") as file:
            file.writestr(f"{FOLDER}/images/training/a.jpg", "x")
        for path, says in [
            (tmp_path / "none.zip", "no such file; get it from http"),
            (torn, "is damaged, or no archive that can be unpacked"),
            (other, f"holds no file in {FOLDER}/images/validation"),
        ]:
            assert main(["ade20k", "--root", str(tmp_path / "root"), "--archive", str(path)]) == 2
            assert error(capfd).startswith(f"error: --archive={path}: {says}")
            assert not (tmp_path / "root" / FOLDER).exists()

    def test_check(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        def told(status: int) -> list[str]:
            assert main(["ade20k", "--check", str(folder)]) == status
            return capfd.readouterr().out.splitlines()

        (folder / "images" / "training" / "._ADE_train_00000001.jpg").write_bytes(b"macOS")
        assert told(0) == [f"{folder}: sound"]
        train = [small.image(folder, "training", number) for number in range(1, 5)]
        masks = [small.annotation(folder, "training", number) for number in range(1, 5)]
        train[0].write_bytes(train[0].read_bytes()[:-400])
        classes = np.array(Image.open(masks[1]))
        classes[3, 3] = 151
        Image.fromarray(classes).save(masks[1])
        Image.fromarray(np.zeros((9, 12), np.uint8)).save(masks[2])
        Image.new("RGB", (90, 33)).save(masks[3])
        lone = small.image(folder, "validation", 1)
        small.annotation(folder, "validation", 1).unlink()
        widow = small.annotation(folder, "validation", 2)
        small.image(folder, "validation", 2).unlink()
        found = told(1)
        assert found[:3] == [
            f"{folder}/images/validation: holds 2 images, not 3",
            f"{lone}: has no mask",
            f"{widow}: has no image",
        ]
        assert found[3].startswith(f"{train[0]}: cannot be read (")
        assert found[4] == f"{masks[1]}: has class 151; ADE20K's are 1 to 150, 0 is unlabelled"
        size = f"has 12×9 pixels, {train[2].name} 50×50; they must be alike"
        assert found[5] == f"{masks[2]}: {size}"
        assert found[6] == f"{masks[3]}: has 3 channels; a mask has one"
        assert found[7:] == [f"{folder}: 7 faults"]
        assert main(["ade20k", "--check", str(folder.parent)]) == 1
        no_folder = f"{folder.parent}/images/training: no such folder"
        assert no_folder in capfd.readouterr().out.splitlines()


class Server(ThreadingHTTPServer):
    """Answers with `content`, of which it sends no more than `sent` bytes, or with an error."""

    daemon_threads = True
    content, sent, status = b"", 1 << 30, 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{FOLDER}.zip"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.server.status != 200:
            self.send_error(self.server.status)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.server.content)))
        self.end_headers()
        self.wfile.write(self.server.content[: self.server.sent])


class TestDownload:
    @pytest.fixture
    def server(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
        """Of the archive of ADE20K, whose checksum is expected."""
        server = Server()
        server.content = of_ade20k(tmp_path, monkeypatch).files[0].read_bytes()
        monkeypatch.setattr(prepare, "URL", server.url)
        monkeypatch.setattr(prepare, "SHA1", "sha1:" + hashlib.sha1(server.content).hexdigest())
        yield server
        server.shutdown()
        server.server_close()

    def test_the_whole_way_over_http(self, server: Server, tmp_path: Path) -> None:
        root = tmp_path / "root"
        assert main(["ade20k", "--root", str(root)]) == 0
        assert files(root / FOLDER).items() >= files(tmp_path / "made" / FOLDER).items()
        assert [path.name for path in root.iterdir()] == [FOLDER]

    @pytest.mark.parametrize(
        ("fault", "says"),
        [
            ({"status": 404}, "404 Client Error: Not Found"),
            ({"sent": 5000}, "Connection broken"),
            ({"content": b"<html>log in first</html>"}, "SHA1 hash"),
        ],
        ids=str,
    )
    def test_one_that_fails(
        self,
        server: Server,
        tmp_path: Path,
        fault: dict[str, object],
        says: str,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        """It is one line, and nothing is left."""
        vars(server).update(fault)
        assert main(["ade20k", "--root", str(tmp_path / "root")]) == 2
        told = error(capfd)
        assert told.startswith(f"error: download={server.url}: ") and says in told
        assert told.endswith(f"(curl -C - -O {server.url}) and give --archive FILE")
        assert list((tmp_path / "root").iterdir()) == []

    def test_nobody_answers(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        with socket.socket() as held:  # bound, not listening
            held.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{held.getsockname()[1]}/{FOLDER}.zip"
            monkeypatch.setattr(prepare, "URL", url)
            assert main(["ade20k", "--root", str(tmp_path)]) == 2
        told = error(capfd)
        assert "Connection refused" in told and told.endswith("give --archive FILE")

    @pytest.mark.parametrize("at", [2, 3, 4])
    def test_a_full_disk(
        self, server: Server, tmp_path: Path, at: int, capfd: pytest.CaptureFixture[str]
    ) -> None:
        root = tmp_path / "root"
        assert disturbed(["ade20k", "--root", str(root)], root, at, "full")[0] == 2
        told = error(capfd)
        assert told.startswith(f"error: --root={root}: ")
        assert told.endswith("No space left on device; make room or choose another")


class TestFashionMNIST:
    @pytest.fixture
    def source(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        (tmp_path / "source").mkdir()
        return of_fashion_mnist(tmp_path / "source", monkeypatch).files[0].parent

    @pytest.fixture
    def made(self, source: Path, tmp_path: Path) -> Path:
        root = str(tmp_path / "root")
        assert main(["fashion_mnist", "--root", root, "--source", str(source)]) == 0
        return tmp_path / "root" / "fashion_mnist"

    @pytest.mark.parametrize("name", ["resnet50", "vit"])
    def test_every_image_keeps_its_label(self, made: Path, name: str) -> None:
        own = task(name, made, batch_size=16, flip=True, num_workers=1)
        assert own.num_classes == 10 and own.fingerprint()["num_samples"] == CLOTHES
        seen = []
        for images, labels in islice(own.batches(mesh(), 0), 5):  # an epoch
            assert images.shape == (16, 3, 28, 28)
            assert (images.float().mean((1, 2, 3)) // 20).tolist() == labels.tolist()
            seen += labels.tolist()
        assert sorted(seen) == sorted(clothes()["train"][1].tolist())

    def test_every_pixel_is_packed(self, made: Path) -> None:
        for part, (images, labels) in clothes().items():
            for label, file in enumerate(sorted((made / part).iterdir())):
                assert np.array_equal(np.load(file), images[labels == label])

    def test_what_is_sound_and_what_is_not(
        self, made: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        bag = made / "val" / "8-bag.npy"
        np.save(bag, np.load(bag)[::-1])
        assert main(["fashion_mnist", "--check", str(made)]) == 1
        differ = "pixels or labels differ from the published ones"
        assert capfd.readouterr().out.splitlines()[-2].startswith(differ)
        bag.unlink()
        assert main(["fashion_mnist", "--check", str(made)]) == 1
        assert capfd.readouterr().out.startswith("val/8-bag.npy: missing\n")

    def test_another_file(
        self, source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        file = source / "t10k-labels-idx1-ubyte.gz"
        content = bytearray(gzip.decompress(file.read_bytes()))
        content[-1] ^= 1
        file.write_bytes(gzip.compress(content))
        root = tmp_path / "root"
        assert main(["fashion_mnist", "--root", str(root), "--source", str(source)]) == 2
        assert f"{file.name} is damaged or another file: the SHA-256" in error(capfd)
        assert not root.exists()

    def test_the_format_of_the_files(self) -> None:
        """What the published files begin with."""
        assert idx(np.zeros((7, 2), np.uint8))[:12] == bytes([0, 0, 8, 2, 0, 0, 0, 7, 0, 0, 0, 2])


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


def test_the_thousand_classes_are_known() -> None:
    classes = imagenet._classes()
    assert len(classes) == 1000 and set(CLASSES) <= classes


class TestImageNet:
    @pytest.fixture
    def archives(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        folder = tmp_path / "archives"
        folder.mkdir()
        of_imagenet(folder, monkeypatch)
        return folder

    @pytest.fixture
    def command(self, archives: Path, tmp_path: Path) -> list[str]:
        return ["imagenet", "--archives", str(archives), "--root", str(tmp_path / "data")]

    def test_archives_become_a_tree(self, command: list[str], tmp_path: Path) -> None:
        expected = {
            f"train/{name}/{name}_{n}.JPEG": jpeg(10 * label + n)
            for label, name in enumerate(CLASSES)
            for n in range(4)
        }
        for number, truth in enumerate(TRUTH, start=1):
            name = f"ILSVRC2012_val_{number:08d}.JPEG"
            expected[f"val/{NUMBERS[truth]}/{name}"] = jpeg(100 + number)
        assert main(command) == 0
        assert files(tmp_path / "data" / "imagenet") == expected

    def test_archives_are_verified_once(
        self, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A run that goes on takes hours less."""
        assert disturbed(command, tmp_path / "data", 12, "stopped")[0] == 130
        sums = {part: (name, "another") for part, (name, _) in imagenet.ARCHIVES.items()}
        monkeypatch.setattr(imagenet, "ARCHIVES", sums)
        assert main(command) == 0

    def test_archives_that_cannot_be_used(
        self,
        archives: Path,
        command: list[str],
        tmp_path: Path,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        names = [name for name, _ in imagenet.ARCHIVES.values()]
        missing = f"--archives={tmp_path}: holds no ILSVRC2012_img_train.tar"
        for words, says in (
            ([], "--archives=: give the folder that"),
            (["--archives", "nowhere"], "--archives=nowhere: no such folder; give the folder that"),
            (["--archives", str(tmp_path)], missing),
        ):
            assert main(["imagenet", "--root", str(tmp_path / "data"), *words]) == 2
            line = error(capfd)
            assert line.startswith(f"error: {says}") and all(name in line for name in names)
            assert line.endswith("from https://image-net.org, after registration")
        train = archives / "ILSVRC2012_img_train.tar"
        train.write_bytes(train.read_bytes()[: train.stat().st_size // 2])
        assert main(command) == 2
        assert "ILSVRC2012_img_train.tar is damaged or another file" in error(capfd)
        assert main([*command, "--unverified"]) == 2
        assert "ILSVRC2012_img_train.tar is damaged (" in error(capfd)

    def test_check(
        self, command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert main(command) == 0
        folder = tmp_path / "data" / "imagenet"
        check = ["imagenet", "--check", str(folder)]
        cut = folder / "train" / CLASSES[0] / f"{CLASSES[0]}_1.JPEG"
        cut.write_bytes(cut.read_bytes()[:-50])
        assert main(check) == 0, "the beginning of every picture is sound"
        (folder / "train" / CLASSES[1] / f"{CLASSES[1]}_2.JPEG").write_text("no picture")
        shutil.rmtree(folder / "train" / CLASSES[2])
        (folder / "train" / "n00000001").mkdir()
        next((folder / "val" / CLASSES[0]).iterdir()).unlink()
        capfd.readouterr()
        assert main(check) == 1
        assert capfd.readouterr().out.splitlines() == [
            f"train/{CLASSES[2]}: missing",
            "train/n00000001: no class",
            f"train/{CLASSES[1]}/{CLASSES[1]}_2.JPEG is no picture (UnidentifiedImageError)",
            "train: 8 pictures instead of 12",
            f"val/{CLASSES[0]}: 1 pictures instead of 2",
            f"{folder}: 5 faults",
        ]
        shutil.rmtree(folder / "val")
        assert main(check) == 1
        assert "val: no such folder" in capfd.readouterr().out.splitlines()
