"""Downloads from a server of our own: broken off, resumed, wrong, refused, out of reach."""

import hashlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from co2.errors import ConfigError
from tasks.prepare import download as module
from tasks.prepare.download import download

CONTENT = np.random.default_rng(0).bytes(3_000_000)
SHA1 = "sha1:" + hashlib.sha1(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves CONTENT. Breaks each of the first `breaks` answers off after `piece` bytes."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ranges, self.lengths = True, True
        self.breaks, self.piece = 0, 1_000_000
        self.content, self.status = CONTENT, 200
        self.asked: list[str | None] = []
        """The Range header of each request."""
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/file.zip"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        asked = self.headers.get("Range")
        server.asked.append(asked)
        if server.status != 200:
            self.send_error(server.status)
            return
        start = int(asked[6:-1]) if asked and server.ranges else 0
        whole = len(server.content)
        if asked and server.ranges and start >= whole:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{whole}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = server.content[start:]
        if asked and server.ranges:
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{whole - 1}/{whole}")
        else:
            self.send_response(200)
        if server.lengths:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if server.breaks:
            server.breaks -= 1
            body = body[: server.piece]
        self.wfile.write(body)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)
    server = Server()
    yield server
    server.shutdown()
    server.server_close()


def fetch(server: Server, target: Path, checksum: str = SHA1) -> None:
    download(server.url, target, checksum, "give --archive FILE")


@pytest.mark.parametrize("kind", ["sha1", "sha256", "md5"])
def test_a_file_comes_whole_and_is_not_fetched_twice(
    server: Server, tmp_path: Path, kind: str
) -> None:
    target = tmp_path / "new" / "file.zip"
    for _ in range(2):
        fetch(server, target, f"{kind}:{hashlib.new(kind, CONTENT).hexdigest()}")
    assert target.read_bytes() == CONTENT
    assert server.asked == [None]
    assert list(target.parent.iterdir()) == [target]


def test_a_broken_connection_is_taken_up(server: Server, tmp_path: Path) -> None:
    server.breaks = 2
    fetch(server, tmp_path / "file.zip")
    assert (tmp_path / "file.zip").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=1000000-", "bytes=2000000-"]


def test_a_later_call_goes_on(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.zip.part").write_bytes(CONTENT[:1_234_567])
    fetch(server, tmp_path / "file.zip")
    assert (tmp_path / "file.zip").read_bytes() == CONTENT
    assert server.asked == ["bytes=1234567-"]


def test_all_had_arrived_before_it_was_stopped(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.zip.part").write_bytes(CONTENT)
    fetch(server, tmp_path / "file.zip")
    assert (tmp_path / "file.zip").read_bytes() == CONTENT
    assert server.asked == ["bytes=3000000-"]


def test_more_had_arrived_than_there_is(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.zip.part").write_bytes(CONTENT + b"more")
    fetch(server, tmp_path / "file.zip")
    assert (tmp_path / "file.zip").read_bytes() == CONTENT
    assert server.asked == ["bytes=3000004-", None]


def test_a_server_without_ranges_sends_all_again(server: Server, tmp_path: Path) -> None:
    server.ranges, server.breaks = False, 1
    fetch(server, tmp_path / "file.zip")
    assert (tmp_path / "file.zip").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=1000000-"]


def test_a_server_that_gives_no_length(server: Server, tmp_path: Path) -> None:
    server.lengths = False
    fetch(server, tmp_path / "file.zip")
    assert (tmp_path / "file.zip").read_bytes() == CONTENT


def test_it_gives_up_and_keeps_what_there_is(server: Server, tmp_path: Path) -> None:
    server.breaks, server.piece = 100, 0
    (tmp_path / "file.zip.part").write_bytes(CONTENT[:1000])
    with pytest.raises(ConfigError, match=r"connection broke.*first 1,000 bytes.*--archive FILE"):
        fetch(server, tmp_path / "file.zip")
    assert (tmp_path / "file.zip.part").read_bytes() == CONTENT[:1000]
    assert len(server.asked) == 4
    server.breaks = 0
    fetch(server, tmp_path / "file.zip")
    assert (tmp_path / "file.zip").read_bytes() == CONTENT


def test_another_checksum(server: Server, tmp_path: Path) -> None:
    server.content = b"<html>log in first</html>"
    with pytest.raises(ConfigError, match=rf"has the sha1 \w+, not {SHA1[5:]}, and was removed"):
        fetch(server, tmp_path / "file.zip")
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_another_file_does_no_harm(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.zip.part").write_bytes(b"something else")
    with pytest.raises(ConfigError, match="was removed"):
        fetch(server, tmp_path / "file.zip")
    fetch(server, tmp_path / "file.zip")
    assert (tmp_path / "file.zip").read_bytes() == CONTENT


def test_the_server_refuses(server: Server, tmp_path: Path) -> None:
    server.status = 404
    with pytest.raises(ConfigError) as caught:
        fetch(server, tmp_path / "file.zip")
    says = f"download={server.url}: the server answers 404 Not Found; give --archive FILE"
    assert str(caught.value) == says


def test_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)
    with socket.socket() as held:  # bound, not listening
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}/file.zip"
        with pytest.raises(ConfigError) as caught:
            download(url, tmp_path / "file.zip", SHA1, "give --archive FILE")
    says = f"download={url}: cannot be reached (Connection refused); give --archive FILE"
    assert str(caught.value) == says


def test_a_host_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unknown)
    monkeypatch.setattr(module.urllib.request, "getproxies", dict)
    with pytest.raises(ConfigError, match=r"cannot be reached \(Name or service not known\)"):
        download("http://nowhere.invalid/f", tmp_path / "f", SHA1, "give --archive FILE")


def test_a_folder_that_cannot_be_written(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^--root=.*make room or choose another"):
        fetch(server, tmp_path / "file" / "file.zip")
