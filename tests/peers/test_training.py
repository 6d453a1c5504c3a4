"""Peers do what their names say: held against our methods, closed forms, and a simulation. They
train the toy through train.py, stop, go on exactly, and leave nothing behind. What a peer cannot do
is one line, before any worker starts."""

import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import co2
from co2.errors import ConfigError
from co2.start import launch, placement
from co2_measure.lab.__main__ import main
from co2_measure.peers import PEERS, base, known_methods
from tests.cli.harness import (
    LIMIT_S,
    LINGER_S,
    alive,
    assert_same_run,
    configured,
    folders,
    metrics,
    pooled,
    started,
    stopped_after,
)
from tests.grids import grid
from tests.methods import problem
from tests.tasks.build import refusal
from tests.workers import Pool, replicas

KNOWN = known_methods()


# Arithmetic.


def trajectory(
    rank: int, name: str, settings: dict[str, Any], optimizer: str, dtype: torch.dtype
) -> list[dict[str, Tensor]]:
    """The replica after 0, 1, …, 15 steps. Ranks differ in initial weights and in data."""
    net, inner = problem.build(rank, optimizer, dtype)
    method = KNOWN[name](KNOWN[name].Config(**settings))
    model = method.prepare(net, inner, co2.Mesh.world())
    history = [problem.snapshot(net)]
    for step in range(15):
        problem.set_lr(inner, step)
        problem.backward(model, step, rank)
        method.step()
        inner.zero_grad()
        history.append(problem.snapshot(net))
    method.flush()
    return history


@replicas()
@pytest.mark.parametrize(
    ("world", "tau", "optimizer"),
    [*((world, 3, kind) for world in (2, 3) for kind in ("plain", "sgd", "adamw")), (2, 1, "sgd")],
)
def test_torch_post_local_sgd_is_local_sgd(rank: int, tau: int, optimizer: str) -> None:
    given = ({"tau": tau}, optimizer, torch.float64)
    theirs = trajectory(rank, "torch_post_local_sgd", *given)
    ours = trajectory(rank, "local_sgd", *given)
    torch.testing.assert_close(theirs, ours, rtol=1e-11, atol=1e-11)


@pytest.mark.skipif(find_spec("fairscale") is None, reason="needs the extra 'peers'")
@pytest.mark.parametrize("world", [2, 3])
@replicas()
def test_fairscale_slowmo_is_slowmo(rank: int) -> None:
    given = ({"tau": 3, "outer_lr": 0.9, "outer_momentum": 0.6}, "sgd", torch.float32)
    theirs = trajectory(rank, "fairscale_slowmo", *given)
    ours = trajectory(rank, "slowmo", *given)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


DILOCO: dict[str, Any] = {"tau": 4, "outer_lr": 0.7, "outer_momentum": 0.9}


def progress(
    rank: int, world: int, settings: dict[str, Any], gradient: float | None = None
) -> list[tuple[Tensor, Tensor]]:
    """(start − end) of every round on this replica, and what the next one starts from.

    SGD with rate 1/τ; gradients do not depend on the weights: `gradient`, or random ones.
    """
    name, tau = "torchft_diloco", settings["tau"]
    weight = nn.Parameter(torch.zeros(5))
    method = KNOWN[name](KNOWN[name].Config(**settings))
    method.prepare(nn.ParameterList([weight]), SGD([weight], lr=1 / tau), co2.Mesh.world())
    generator = torch.Generator().manual_seed(rank)
    rounds = []
    for _ in range(4):
        moved = torch.zeros(5)
        for _ in range(tau):
            given = torch.randn(5, generator=generator)
            weight.grad = given if gradient is None else torch.full((5,), gradient)
            moved += weight.grad / tau
            method.step()
        rounds.append((moved, weight.detach().clone()))
    method.flush()
    return rounds


def test_torchft_diloco_closed_form(workers: Pool) -> None:
    """Every replica moves by −1 a round."""
    pytest.importorskip("torchft")
    for rounds in workers.run(progress, 2, DILOCO, 1.0):
        starts = torch.stack([start[0] for _, start in rounds])
        torch.testing.assert_close(starts, torch.tensor([-1.33, -3.227, -5.6343, -8.50087]))


@pytest.mark.parametrize("beta", [0.9, 0.0])
def test_torchft_diloco_is_the_papers(workers: Pool, beta: float) -> None:
    """v = βv + d; x ← x − α(d + βv), for d the mean of what three replicas moved by."""
    pytest.importorskip("torchft")
    replicas = workers.run(progress, 3, {**DILOCO, "outer_momentum": beta})
    x = v = torch.zeros(5)
    for rounds in zip(*replicas, strict=True):
        d = torch.stack([moved for moved, _ in rounds]).mean(0)
        v = beta * v + d
        x = x - 0.7 * (d + beta * v)
        for _, start in rounds:
            torch.testing.assert_close(start, x)


# Training.

SHARES = {"torch_post_local_sgd": 1.0, "torchft_diloco": 1.0, "fairscale_slowmo": 1.25}
"""Bytes that one of two workers sends in a round, as a share of the model's."""


@pytest.fixture(params=PEERS)
def name(request: pytest.FixtureRequest) -> str:
    """Every peer whose package is installed."""
    pytest.importorskip(PEERS[request.param].package)
    return request.param


def test_trains(name: str, tmp_path: Path) -> None:
    words = (f"method={name}", f"{name}.tau=4", "train.steps=60", "log.every=1", "optim.lr=0.01")
    log = tmp_path / "log"
    with started(*words, runs=tmp_path / "runs", log=log) as process:
        assert process.wait(LIMIT_S) == 0, log.read_text()
        deadline = time.monotonic() + LINGER_S
        while alive(process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not alive(process.pid)
    (folder,) = folders(tmp_path / "runs")
    losses = [line["loss"] for line in metrics(folder, "train")]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    summary = json.loads((folder / "summary.json").read_text())
    payload = 4 * (16 * 32 + 32 + 2 * 32 + 32 * 4 + 4)
    assert summary["bytes_per_step"] == pytest.approx(SHARES[name] * payload / 4)
    assert 0 < summary["exposed_s"] == summary["comm_s"] < summary["wall_s"]
    assert summary["overlap"] == 0


@pytest.mark.parametrize("told_in", grid([7, 8], (7).__eq__), ids=["inside a round", "at its end"])
def test_goes_on_exactly(workers: Pool, tmp_path: Path, name: str, told_in: int) -> None:
    """Evaluations change nothing, and a run that was told to stop goes on to the last bit."""
    own = (f"method={name}", f"{name}.tau=4", "optim.name=adamw", "optim.lr=0.01")
    words = (*own, "train.steps=24", "train.eval_every=5", "log.every=1", "checkpoint.every=0")
    whole = pooled(workers, 2, *words, runs=tmp_path / "whole")
    assert whole.status == 0, whole.err
    told = {"setup": stopped_after, "setup_arguments": (told_in,)}
    stopped = pooled(workers, 2, *words, runs=tmp_path / "runs", **told)
    assert stopped.status == 75, stopped.err
    again = pooled(workers, 2, *words, runs=tmp_path / "runs")
    assert again.status == 0 and "resumed at step" in again.out
    assert_same_run(whole.folder, again.folder)


# Refusals.

MISSING = "needs the extra 'peers': pip install -e '.[peers]'"
FOREIGN = [name for name in PEERS if PEERS[name].package != "torch"]


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "find_spec", lambda name: name)


@pytest.mark.parametrize("name", FOREIGN)
def test_without_the_extra(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(base, "find_spec", lambda name: None)
    told = f"error: method={name}: {MISSING}\n"
    with pytest.raises(ConfigError) as caught:
        configured(f"method={name}", runs=tmp_path)
    assert launch.refuse(caught.value) == 2 and capsys.readouterr().err == told
    assert main(["--methods", f"none,{name}"]) == 2 and capsys.readouterr().err == told


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("launch.workers=1", "launch.workers=1: "),
        ("comm.dtype=bf16", "comm.dtype=bf16: "),
        ("{name}.tau=0", "{name}.tau=0: "),
        ("{name}.tua=3", "{name}.tua=3: unknown key; did you mean {name}.tau?"),
        ("+co2.tau=3", "co2.tau=3"),
    ],
)
def test_wrong_values(name: str, word: str, told: str, tmp_path: Path) -> None:
    given = f"method={name}", word.format(name=name)
    line = refusal(lambda: configured(*given, runs=tmp_path))
    assert line.startswith(told.format(name=name))


@pytest.mark.usefixtures("all_installed")
def test_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(placement.torch.cuda, "device_count", lambda: 2)
    word = "method=torch_post_local_sgd"
    with pytest.raises(ConfigError, match=r"launch.backend=auto: .* use launch.backend=gloo"):
        configured(word, "launch.backend=auto", runs=tmp_path)
    configured(word, "launch.backend=gloo", runs=tmp_path)


def test_wrong_fields() -> None:
    torchft, fairscale = (PEERS[name].Config for name in ("torchft_diloco", "fairscale_slowmo"))
    assert refusal(lambda: torchft(outer_lr=-1.0)).startswith("outer_lr=")
    line = refusal(lambda: fairscale(outer_lr=1.0, outer_momentum=0.0))
    assert line.startswith("outer_momentum=")
