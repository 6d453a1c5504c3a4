"""ADE20K prepared from a small archive: unpacked, resumed, refused, looked through."""

import errno
import hashlib
import socket
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tasks.ade20k.pairs import FOLDER
from tasks.prepare import ade20k as prepare
from tasks.prepare.__main__ import main
from tests.tasks import small_ade20k as small


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small.write(tmp_path / "made" / FOLDER)


@pytest.fixture
def archive(folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "archive.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(f"{FOLDER}/", "")
        file.writestr(f"{FOLDER}/objectInfo150.txt", "wall\n")
        file.writestr("__MACOSX/._junk", "junk")
        for part in sorted(folder.rglob("*.*")):
            file.write(part, f"{FOLDER}/{part.relative_to(folder)}")
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_an_archive_is_unpacked(archive: Path, folder: Path, tmp_path: Path, capsys) -> None:
    root = tmp_path / "root"
    assert main(["ade20k", "--root", str(root), "--archive", str(archive)]) == 0
    assert "train with: task=ade20k ade20k.source=ade20k" in capsys.readouterr().out
    assert [path.name for path in root.iterdir()] == [FOLDER]
    assert files(root / FOLDER) == {**files(folder), "objectInfo150.txt": b"wall\n"}
    assert archive.exists()
    assert main(["ade20k", "--root", str(root)]) == 0  # made already: nothing is downloaded


def test_it_goes_on_where_it_was_stopped(
    archive: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, written = tmp_path / "root", []
    copy = prepare.shutil.copyfileobj

    def stopped(source, target) -> None:
        written.append(target.name)
        if len(written) == 5:
            target.write(b"torn")
            raise KeyboardInterrupt
        copy(source, target)

    monkeypatch.setattr(prepare.shutil, "copyfileobj", stopped)
    assert main(["ade20k", "--root", str(root), "--archive", str(archive)]) == 130
    assert not (root / FOLDER).exists()
    assert main(["ade20k", "--root", str(root), "--archive", str(archive)]) == 0
    assert files(root / FOLDER).items() >= files(folder).items()
    again = written[5:]
    assert again[0] == written[4] and not set(again) & set(written[:4])


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


@pytest.fixture
def server(archive: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Of the archive, whose checksum is expected."""
    server = Server()
    server.content = archive.read_bytes()
    monkeypatch.setattr(prepare, "URL", server.url)
    monkeypatch.setattr(prepare, "SHA1", "sha1:" + hashlib.sha1(server.content).hexdigest())
    yield server
    server.shutdown()
    server.server_close()


def test_the_whole_way_over_http(server: Server, folder: Path, tmp_path: Path) -> None:
    assert main(["ade20k", "--root", str(tmp_path / "root")]) == 0
    assert files(tmp_path / "root" / FOLDER).items() >= files(folder).items()
    assert [path.name for path in (tmp_path / "root").iterdir()] == [FOLDER]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"status": 404}, "404 Client Error: Not Found"),
        ({"sent": 5000}, "Connection broken"),
        ({"content": b"<html>log in first</html>"}, "SHA1 hash"),
    ],
    ids=str,
)
def test_a_download_that_fails(
    server: Server, tmp_path: Path, fault: dict, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is one line, and nothing is left."""
    vars(server).update(fault)
    assert main(["ade20k", "--root", str(tmp_path / "root")]) == 2
    *_, told = capfd.readouterr().err.splitlines()
    assert told.startswith(f"error: download={server.url}: ") and says in told
    assert told.endswith(f"(curl -C - -O {server.url}) and give --archive FILE")
    assert list((tmp_path / "root").iterdir()) == []


def test_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    with socket.socket() as held:  # bound, not listening
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}/{FOLDER}.zip"
        monkeypatch.setattr(prepare, "URL", url)
        assert main(["ade20k", "--root", str(tmp_path)]) == 2
    *_, told = capfd.readouterr().err.splitlines()
    assert "Connection refused" in told and told.endswith("give --archive FILE")


def test_no_room_for_the_archive(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    import pooch

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", full)
    assert main(["ade20k", "--root", str(tmp_path / "root")]) == 2
    *_, told = capfd.readouterr().err.splitlines()
    assert told.startswith(f"error: --root={tmp_path / 'root'}: ")
    assert told.endswith("No space left on device; make room or choose another")
    assert list((tmp_path / "root").iterdir()) == []


def test_a_folder_that_cannot_be_written(server: Server, tmp_path: Path, capfd) -> None:
    (tmp_path / "file").write_text("")
    assert main(["ade20k", "--root", str(tmp_path / "file" / "root")]) == 2
    *_, told = capfd.readouterr().err.splitlines()
    assert told.startswith("error: --root=") and told.endswith("make room or choose another")


@pytest.mark.parametrize(
    "name", ["../outside", f"{FOLDER}/../../outside", "/outside", "C:/outside"]
)
def test_names_that_lead_elsewhere(archive: Path, tmp_path: Path, name: str, capsys) -> None:
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr(name, "x")
    before = set(tmp_path.rglob("*"))
    assert main(["ade20k", "--root", str(tmp_path / "root"), "--archive", str(archive)]) == 2
    assert "leads elsewhere; it is not ADE20K's archive" in capsys.readouterr().err
    assert set(tmp_path.rglob("*")) == before


def test_links_are_refused(archive: Path, tmp_path: Path, capsys) -> None:
    entry = zipfile.ZipInfo(f"{FOLDER}/images/link")
    entry.create_system, entry.external_attr = 3, 0o120777 << 16
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr(entry, "/etc/passwd")
    assert main(["ade20k", "--root", str(tmp_path / "root"), "--archive", str(archive)]) == 2
    assert "leads elsewhere" in capsys.readouterr().err


def test_archives_that_cannot_be_used(archive: Path, tmp_path: Path, capsys) -> None:
    content = archive.read_bytes()
    cut, other, torn = (tmp_path / name for name in ("cut.zip", "other.zip", "torn.zip"))
    cut.write_bytes(content[: len(content) // 2])
    middle = len(content) // 2
    torn.write_bytes(content[:middle] + bytes(64) + content[middle + 64 :])
    with zipfile.ZipFile(other, "w") as file:
        file.writestr(f"{FOLDER}/images/training/a.jpg", "x")
    for path, says in [
        (tmp_path / "none.zip", "no such file; get it from http"),
        (cut, "is damaged, or no archive that can be unpacked"),
        (torn, "is damaged, or no archive that can be unpacked"),
        (other, f"holds no file in {FOLDER}/images/validation"),
    ]:
        assert main(["ade20k", "--root", str(tmp_path / "root"), "--archive", str(path)]) == 2
        told = capsys.readouterr().err.splitlines()
        assert len(told) == 1 and told[0].startswith(f"error: --archive={path}: {says}")
        assert not (tmp_path / "root" / FOLDER).exists()


def test_check(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def told(status: int) -> list[str]:
        assert main(["ade20k", "--check", str(folder)]) == status
        return capsys.readouterr().out.splitlines()

    counts = {split: len(sizes) for split, sizes in small.SIZES.items()}
    assert [line for line in told(1) if "images, not" in line] == [
        f"{folder}/images/training: holds 4 images, not 20210",
        f"{folder}/images/validation: holds 3 images, not 2000",
    ]
    monkeypatch.setattr(prepare, "SPLITS", counts)
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
    assert found[5] == f"{masks[2]}: has 12×9 pixels, {train[2].name} 50×50; they must be alike"
    assert found[6] == f"{masks[3]}: has 3 channels; a mask has one"
    assert found[7:] == [f"{folder}: 7 faults"]


def test_check_of_a_folder_that_is_something_else(tmp_path: Path, capsys) -> None:
    assert main(["ade20k", "--check", str(tmp_path)]) == 1
    assert f"{tmp_path}/images/training: no such folder" in capsys.readouterr().out
    assert main(["ade20k", "--check", str(tmp_path / "none")]) == 2
