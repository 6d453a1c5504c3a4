"""Download of one file over HTTP, which is resumed, verified, and appears only when complete."""

import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from pathlib import Path

from co2.errors import ConfigError
from co2.whole import locked
from tasks.shared.progress import progress

_CHUNK = 1 << 20
_TIMEOUT_S = 60.0
_ATTEMPTS = 4
"""Number of attempts in a row that bring no data, after which the download fails."""
_PAUSE_S = 2.0


class _Broken(Exception):
    """The network or the server failed; the message says how."""


def download(url: str, target: Path, checksum: str, otherwise: str) -> None:
    """Download `url` to `target`, unless that file exists.

    Data that has arrived is kept in `<target>.part`, and the next call requests the rest (with a
    Range request; a server that does not support it sends the whole file again). The checksum
    verifies the complete file.

    Args:
        url: address of the file.
        target: path of the file.
        checksum: "sha1:…", "sha256:…" or "md5:…" of the whole file.
        otherwise: what to do where the download fails; the end of the error's line.
    Raises:
        ConfigError: the host cannot be reached, the server refuses, the connection breaks
            repeatedly, the file cannot be written, or its checksum differs (then it is removed).
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
    """Request the file until it is complete, or `_ATTEMPTS` requests in a row bring nothing."""
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
    """Append the answer to one request. Returns whether the file is complete, by its length."""
    had = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={had}-"} if had else {})
    try:
        answer = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code == 416 and had:  # the server has no data beyond what is there
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
