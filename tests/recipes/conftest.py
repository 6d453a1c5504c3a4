"""Folders of runs that were never made, and a working folder that is empty."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, which is empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_folder(
    folder: Path,
    summary: Mapping[str, Any] | None = None,
    lines: Iterable[Mapping[str, Any]] = (),
    commit: str = "c" * 40,
    **known: object,
) -> Path:
    """Write a run's folder as train.py leaves it.

    Args:
        summary: None where the run has not finished.
        lines: of metrics.jsonl.
        known: more of the manifest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    hardware = {"cpu": "a cpu", "cores": 2, "gpus": []}
    git = {"commit": commit, "dirty": commit.startswith("d")}
    manifest = {"git": git, "hardware": hardware, **known}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder
