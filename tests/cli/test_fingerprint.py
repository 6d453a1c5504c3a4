"""What a run trains on and with: equal where it is, and another where anything of it is."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from co2.methods.co2 import CO2
from co2.record import fingerprint
from co2.record.fingerprint import digest
from co2.record.provenance import of_run
from tasks.shared import sampling
from tasks.toy import Toy
from tests.cli.harness import assert_same_run, pooled, stopped_after
from tests.workers import Pool

SHORT = ("train.steps=4", "train.eval_every=4", "checkpoint.every=0")


def told(workers: Pool, runs: Path, *words: str, world: int = 2, **setup: Any) -> dict[str, Any]:
    """The fingerprint of a run."""
    run = pooled(workers, world, *SHORT, *words, runs=runs, fresh=True, **setup)
    assert run.status == 0, run.err
    known = json.loads((run.folder / "manifest.json").read_text())["fingerprint"]
    return {key: round(value, 5) if key == "loss" else value for key, value in known.items()}


@contextlib.contextmanager
def another_order() -> Iterator[None]:
    """Setup: the samples come in another order from the second batch on."""
    indices = sampling.Sampler.indices

    def other(self: sampling.Sampler, draw: int, worker: int) -> Any:
        own = indices(self, draw, worker)
        return own[::-1].copy() if draw == 1 and worker == 1 else own

    with patch.object(sampling.Sampler, "indices", other):
        yield


@contextlib.contextmanager
def other_weights() -> Iterator[None]:
    model = Toy.model

    def other(self: Toy) -> torch.nn.Module:
        made = model(self)
        torch.nn.init.zeros_(made[3].bias)
        return made

    with patch.object(Toy, "model", other):
        yield


@contextlib.contextmanager
def raised() -> Iterator[None]:
    with patch.object(Toy, "version", 2), patch.object(CO2, "version", 3):
        yield


def test_it_changes_with_what_a_run_trains_on_and_with(workers: Pool, tmp_path: Path) -> None:
    """And with nothing else: method, rate and a micro-batch's place in a step do not count."""
    first = told(workers, tmp_path / "runs", "method=co2")
    assert first.keys() == {"data", "weights", "task", "method", "loss"}
    assert first["task"] == Toy.version and first["method"] == CO2.version
    same = told(workers, tmp_path / "others", "method=allreduce", "optim.lr=0.01")
    assert same == first

    def differ(*words: str, **setup: Any) -> set[str]:
        place = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        now = told(workers, place, "method=co2", *words, **setup)
        return {key for key in first if now[key] != first[key]}

    assert differ("train.seed=1") == {"data", "weights", "loss"}
    assert differ(world=1) == {"data", "loss"}
    assert differ(setup=another_order) == {"data"}
    assert differ(setup=other_weights) == {"weights", "loss"}
    assert differ(setup=raised) == {"task", "method"}


def test_a_resumed_run_keeps_it(workers: Pool, tmp_path: Path) -> None:
    """And to tell it moves no batch and no generator: a run stopped before goes on exactly."""
    words = ("method=co2", "co2.tau=3", "train.steps=8", "log.every=1")
    whole = pooled(workers, 2, *words, runs=tmp_path / "whole")
    for step in (1, 3):
        runs = tmp_path / f"stopped_{step}"
        pooled(workers, 2, *words, runs=runs, setup=stopped_after, setup_arguments=(step,))
        again = pooled(workers, 2, *words, runs=runs)
        assert_same_run(again.folder, whole.folder)
        kept, first = of_run(again.folder), of_run(whole.folder)
        assert kept["fingerprint"] == ("" if step == 1 else first["fingerprint"])
        assert fingerprint.parts(first["fingerprint"])["method"] == "1"
        assert kept["torch"] == torch.__version__.partition("+")[0]


@pytest.mark.parametrize("size", [1, 7, 5000])
def test_the_last_bits_of_a_float_do_not_count(size: int) -> None:
    """Processors round them differently; whatever is larger counts, and every bit of integers."""
    floats = torch.randn(size, generator=torch.Generator().manual_seed(size))
    same = floats * (1 + 2e-7 * torch.randn(size))
    assert digest((floats,)) == digest([same]) != digest(-floats)
    assert digest(floats) != digest(floats * 1.02)
    assert size == 1 or digest(floats) != digest(floats.flip(0))
    whole = torch.arange(size)
    assert digest({"a": whole}) != digest({"a": whole + 1})
    assert digest(torch.zeros(0)) == digest(torch.zeros(0))
