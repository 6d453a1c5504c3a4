"""comm.device=cpu: the same trajectory, whenever the copies to and from the GPU happen."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import co2
from co2.comm.background_mean import BackgroundMean
from co2.comm.flat import FlatParams
from co2.comm.transfer import Direct, Staged
from co2.config import CommConfig, CommDevice
from co2.errors import ConfigError
from co2.methods import METHODS
from co2.train import meters
from tests.grids import grid
from tests.methods.driver import (
    MOMENTS,
    ROUNDS_OF,
    SETTINGS,
    SPARSE,
    Session,
    assert_same,
    parts,
    trajectory,
)
from tests.methods.late_stream import HOST, LateStream, at_once, at_random, late, no_gpu_needed
from tests.methods.test_resume import finish, load, save
from tests.workers import Pool, replicas

PACES = {"late": late, "at once": at_once, **{f"seed {n}": at_random(n) for n in range(3)}}


def whenever(rank: int, world: int, name: str, settings: dict[str, Any]) -> None:
    with no_gpu_needed(late):  # for its chunks: a norm's rounding depends on them
        expected = trajectory(rank, world, name, settings)
    for pace in PACES.values():
        with no_gpu_needed(pace):
            assert_same(trajectory(rank, world, name, settings, comm=HOST), expected)


OTHER_WORLDS = [(name, world) for name in ("co2", "streaming_diloco") for world in (1, 3)]
"""How many replicas there are changes nothing of the copies."""


@pytest.mark.parametrize(
    ("name", "world"),
    grid(
        [*((name, 2) for name in ROUNDS_OF), *OTHER_WORLDS],
        lambda case: case in OTHER_WORLDS[:2] or case[0] in ("co2_keep", "desloc", *SPARSE),
    ),
)
def test_copies_may_be_late_or_early(workers: Pool, name: str, world: int) -> None:
    workers.run(whenever, world, name, SETTINGS[name])


LATE_MOMENTUM = {**SETTINGS["mt_dao"], "first_moment_every": 3, "late_momentum": True}
MOMENTS_HERE = [*MOMENTS.items(), ("desloc", SETTINGS["desloc"]), ("mt_dao", LATE_MOMENTUM)]


@replicas(2)
@pytest.mark.parametrize(
    ("name", "settings"), grid(MOMENTS_HERE, lambda case: case[0] not in ("diloco", "co2"))
)
def test_copies_of_moments_may_be_late_or_early(
    rank: int, world: int, name: str, settings: dict[str, Any]
) -> None:
    with no_gpu_needed(late):
        expected = trajectory(rank, world, name, settings, "adamw")
    for pace in PACES.values():
        with no_gpu_needed(pace):
            assert_same(trajectory(rank, world, name, settings, "adamw", comm=HOST), expected)


def test_copies_may_be_late_or_early_when_quantized(workers: Pool) -> None:
    settings = {**SETTINGS["streaming_diloco"], "exchange": "int4"}
    workers.run(whenever, 2, "streaming_diloco", settings)


@replicas(2)
@pytest.mark.parametrize("name", grid(ROUNDS_OF, ("co2",).__contains__))
def test_resume(rank: int, name: str) -> None:
    with no_gpu_needed(late):
        expected = finish(Session(rank, name, SETTINGS[name], "adamw"))
        session = Session(rank, name, SETTINGS[name], "adamw", comm=HOST)
        assert all(isinstance(part.flat.transfer, Staged) for part in parts(session.method))
        for _ in range(7):
            session.step()
        again = Session(rank, name, SETTINGS[name], "adamw", seed=rank + 50, comm=HOST)
        load(again, save(session))
        assert_same(finish(again), expected)


def flat_of(stream: LateStream, monkeypatch: pytest.MonkeyPatch) -> tuple[FlatParams, nn.Module]:
    """Weights in chunks of 4 and a last one of 1; one weight is channels-last."""
    monkeypatch.setattr("co2.comm.flat.side_stream", lambda device: stream)
    monkeypatch.setitem(co2.comm.flat._CHUNK, "cpu", 4)
    wide = torch.randn(1, 2, 2, 1).contiguous(memory_format=torch.channels_last)
    weights = [torch.randn(5), torch.randn(2, 3), torch.randn(()), wide, torch.randn(1)]
    model = nn.ParameterList([nn.Parameter(weight) for weight in weights])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return FlatParams(optimizer, CommDevice.cpu), model


def joined(model: nn.Module) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


@pytest.mark.parametrize("pace", [late, at_once])
def test_out_and_back(monkeypatch: pytest.MonkeyPatch, pace) -> None:
    flat, model = flat_of(LateStream(pace), monkeypatch)
    before = joined(model)
    vector = flat.copy()
    assert torch.equal(vector, before)
    with flat.round():
        for chunk in flat.chunks:
            values = chunk.read()
            assert torch.equal(values, chunk.of(before))
            values.add_(1)
            chunk.write(values)
    assert torch.equal(joined(model), before + 1)
    with flat.round():
        vector.mul_(2)
        flat.write(vector)
    assert torch.equal(joined(model), 2 * before)


def test_the_next_chunk_comes_while_the_host_works(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = LateStream(late)
    flat, _ = flat_of(stream, monkeypatch)
    with flat.round():
        for chunk in flat.chunks:
            chunk.read()
            assert len(stream.queue) == (chunk is not flat.chunks[-1])


def test_what_was_written_is_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a chunk that was fetched ahead."""
    flat, _ = flat_of(LateStream(late), monkeypatch)
    ones = flat.zeros().add_(1)
    first, second, *_ = flat.chunks
    with flat.round():
        first.read()
        second.write(second.of(ones))
        assert second.read().eq(1).all()
        first.write(first.of(ones))
        assert first.read().eq(1).all()


def test_a_fetch_is_not_kept_for_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    flat, model = flat_of(LateStream(late), monkeypatch)
    with flat.round():
        flat.chunks[0].read()
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(7)
    with flat.round():
        assert flat.chunks[1].read().eq(7).all()


def test_a_vector_may_change_in_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the GPU has not come to the write when the host has come to the next round."""
    stream = LateStream(late, computes_late=True)
    flat, model = flat_of(stream, monkeypatch)
    vector = flat.copy().fill_(1)
    with flat.round():
        flat.write(vector)
    assert stream.queue, "nothing is under way"
    with flat.round():
        vector.fill_(2)
        stream.go_on(len(stream.queue))
        assert joined(model).eq(1).all()


def test_only_inside_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    flat, _ = flat_of(LateStream(late), monkeypatch)
    (chunk, *_) = flat.chunks
    with pytest.raises(AssertionError, match="only inside"):
        chunk.read()
    with pytest.raises(AssertionError, match="only inside"):
        chunk.write(torch.zeros(chunk.numel))


def test_a_round_that_fails_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The computation waits for what was written before, and nobody reads weights outside."""
    stream = LateStream(late)
    flat, model = flat_of(stream, monkeypatch)
    (chunk, *_) = flat.chunks
    vector = flat.copy().fill_(1)

    def fail() -> None:
        with flat.round():
            flat.write(vector)
            raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        fail()
    assert joined(model).eq(1).all() and not stream.queue
    with pytest.raises(AssertionError, match="only inside"):
        chunk.read()


def test_the_fake_sees_no_later_than_it_has_waited() -> None:
    """Of what was computed since, nothing; of what it wrote itself, all."""
    stream = LateStream(late)
    live, vector = torch.zeros(3), stream.empty(3, torch.float32)
    stream.copy([vector], [live]).synchronize()
    live.fill_(1)
    stream.copy([vector], [live]).synchronize()
    assert vector.eq(0).all()
    stream.after_compute()
    stream.copy([vector], [live]).synchronize()
    assert vector.eq(1).all()


@pytest.mark.parametrize("name", ROUNDS_OF)
def test_beside_a_model_on_the_cpu_nothing_changes(name: str) -> None:
    session = Session(0, name, SETTINGS[name], comm=HOST)
    assert all(isinstance(part.flat.transfer, Direct) for part in parts(session.method))
    plain = trajectory(0, 1, name, SETTINGS[name])
    assert_same(trajectory(0, 1, name, SETTINGS[name], comm=HOST), plain)


def test_allreduce_has_nothing_to_keep() -> None:
    with pytest.raises(ConfigError, match=r"^comm.device=cpu: .*DDP.*use auto$"):
        METHODS["allreduce"](None, HOST)


class OnAGpu:
    """A method as the ledger sees it when the model is on a GPU: this test's model is not."""

    extra_bytes, scratch_bytes = 120, 80
    state_device = torch.device("meta")


def test_the_ledger_tells_host_from_gpu() -> None:
    weight = nn.Parameter(torch.zeros(10))
    model, optimizer = nn.ParameterList([weight]), torch.optim.SGD([weight])
    found = meters.ledger(model, optimizer, OnAGpu())  # type: ignore[arg-type]
    assert (found.extra_bytes, found.scratch_bytes) == (0, 0)
    assert found.host_bytes == 3 * 4 * 10 + 80
    OnAGpu.state_device = torch.device("cpu")
    found = meters.ledger(model, optimizer, OnAGpu())  # type: ignore[arg-type]
    assert (found.extra_bytes, found.scratch_bytes, found.host_bytes) == (120, 80, 0)


def made(rank: int, world: int) -> list[str | None]:
    """Backends of the process groups, for vectors on the host beside models here and on a GPU."""
    backends = []
    for device in ("cpu", "cuda"):
        mesh = co2.Mesh(rank, world, torch.device(device))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                co2.Mesh,
                "new_group_across_replicas",
                lambda self, backend=None: backends.append(backend),
            )
            BackgroundMean(10, mesh, CommConfig())
    return backends


def test_gloo_carries_what_lies_on_the_host(workers: Pool) -> None:
    """Also where the process group's default for a model on a GPU is another."""
    assert workers.run(made, 2) == [[None, "gloo"]] * 2
