"""One file over HTTP: resumed where it stopped, checked, and there only when it is whole."""

import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from pathlib import Path

from co2.errors import ConfigError
from tasks.progress import progress
from tasks.store import locked

_CHUNK = 1 << 20
_TIMEOUT_S = 60.0
_ATTEMPTS = 4
"""In a row that bring nothing, after which it gives up."""
_PAUSE_S = 2.0


class _Broken(Exception):
    """The network failed, or the server did; the message says how."""


def download(url: str, target: Path, checksum: str, otherwise: str) -> None:
    """Make `target` the file at `url`; nothing is done where it is there.

    What has arrived waits in `<target>.part`, and the next call asks for the rest of it (a Range
    request; a server that knows none sends all again). The checksum tells whether the parts make
    the file.

    Args:
        checksum: "sha1:…", "sha256:…" or "md5:…", of the whole file.
        otherwise: what to do where the download does not work; ends the error's line.
    Raises:
        ConfigError: the host cannot be reached, the server refuses, the connection breaks again
            and again, the file cannot be written, or its checksum is another (then it is removed).
    """
    part = target.with_name(target.name + ".part")
    try:
        with locked(target):
            if target.exists():
                return
            target.parent.mkdir(parents=True, exist_ok=True)
            _receive(url, part)
            _verify(part, checksum)
            os.replace(part, target)
    except _Broken as error:
        raise ConfigError("download", url, f"{error}; {otherwise}") from None
    except OSError as error:
        what = f"{error.filename or part}: {_reason(error)}"
        raise ConfigError("--root", target.parent, f"{what}; make room or choose another") from None


def _receive(url: str, part: Path) -> None:
    """Try until all of it has arrived, or nothing more does."""
    fruitless = 0
    while True:
        had, reason = _size(part), "the connection broke"
        try:
            if _fetch(url, part):
                return
        except _Broken as error:
            reason = str(error)
        fruitless = 0 if _size(part) > had else fruitless + 1
        if fruitless == _ATTEMPTS:
            there = f" (the first {_size(part):,} bytes are kept)" if _size(part) else ""
            raise _Broken(reason + there)
        time.sleep(_PAUSE_S)


def _fetch(url: str, part: Path) -> bool:
    """Append what one request brings. Returns whether the file is whole, as far as lengths tell."""
    had = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={had}-"} if had else {})
    try:
        answer = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code == 416 and had:  # nothing lies beyond what is there
            if error.headers.get("Content-Range") == f"bytes */{had}":
                return True
            part.unlink()
        raise _Broken(f"the server answers {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _Broken(f"cannot be reached ({_reason(error)})") from None
    with answer:
        resumed = answer.status == 206
        if resumed and not answer.headers.get("Content-Range", "").startswith(f"bytes {had}-"):
            raise _Broken("the server answers with another range than it was asked for")
        length, start = answer.headers.get("Content-Length"), had if resumed else 0
        total = start + int(length) if length else 0
        size = f", {total / 1e6:,.0f} MB" if total else ""
        with progress(f"downloading {url}{size}", total) as advance:
            advance(start)
            with part.open("ab" if resumed else "wb") as file:
                while chunk := _read(answer):
                    file.write(chunk)
                    advance(len(chunk))
    return length is None or _size(part) == total


def _read(answer: http.client.HTTPResponse) -> bytes:
    try:
        return answer.read(_CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise _Broken(f"the connection broke ({_reason(error)})") from None


def _verify(part: Path, checksum: str) -> None:
    kind, _, expected = checksum.partition(":")
    with part.open("rb") as file:
        found = hashlib.file_digest(file, kind).hexdigest()
    if found != expected:
        part.unlink()
        raise _Broken(f"what came has the {kind} {found}, not {expected}, and was removed")


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _reason(error: Exception) -> str:
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    text = getattr(inner, "strerror", None) or str(inner) or type(inner).__name__
    return str(text).splitlines()[0]
