"""How vectors travel changes nothing, or as little as rounding: in buckets, in bf16 over the wire,
and to and from the host's memory (comm.device=cpu), whenever the copies happen."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import co2
from co2.comm.background_mean import BackgroundMean
from co2.comm.flat import FlatParams
from co2.comm.transfer import Staged
from co2.config import CommConfig, CommDevice, Precision
from co2.methods import METHODS
from tests.grids import OF_A_KIND, grid
from tests.methods import problem
from tests.methods.driver import (
    DENSE,
    MOMENTS,
    SETTINGS,
    SPARSE,
    Case,
    Session,
    assert_same,
    drifted,
    inner_of,
    parts,
    trajectory,
)
from tests.methods.network import (
    HOST,
    LateStream,
    Recorder,
    at_once,
    at_random,
    late,
    no_gpu_needed,
)
from tests.workers import everybody, replicas

BF16 = CommConfig(dtype=Precision.bf16)


# Buckets bound the size of a collective: every element is reduced.

ITEM = 8
"""Bytes of a double."""
LAYOUTS = [([6, 6, 6], 10), ([20], 10), ([7, 3, 7, 3], 8), ([5], 1), ([3, 4], 7), ([3, 4], 100)]
"""Sizes of the parameters, and elements of a bucket."""
ROUNDS = 4


def comm(bucket: int) -> co2.CommConfig:
    return co2.CommConfig(bucket_mb=bucket * ITEM / 2**20)


def recorded(
    rank: int, name: str, sizes: Sequence[int], comm: co2.CommConfig | None
) -> tuple[list[Tensor], list[int]]:
    """The weights after each step, and the elements of every collective."""
    with Recorder() as recorder:
        history, _ = drifted(rank, (name, SETTINGS[name]), sizes, 3 * ROUNDS, comm)
    return history, [numel for _, call, numel, *_ in recorder.log if call == "all_reduce"]


@replicas(2)
@pytest.mark.parametrize("name", grid(DENSE, OF_A_KIND.__contains__))
def test_buckets_change_nothing(rank: int, name: str) -> None:
    fragments = SETTINGS[name].get("fragments", 1)  # a layer each at least; here all are of one
    for sizes, bucket in (layout for layout in LAYOUTS if len(layout[0]) >= fragments):
        expected, one = recorded(rank, name, sizes, None)
        history, numels = recorded(rank, name, sizes, comm(bucket))
        assert_same(history, expected)
        assert one == [sum(sizes[part::fragments]) for part in range(fragments)] * ROUNDS
        assert max(numels) <= bucket
        assert sum(numels) == sum(sizes) * ROUNDS


@replicas()
@pytest.mark.parametrize("world", [1, 2, 4])
def test_background_mean(rank: int, world: int) -> None:
    for sizes, bucket in LAYOUTS:
        numel = sum(sizes)
        mean = BackgroundMean(numel, co2.Mesh.world(), comm(bucket), torch.float64, "cpu")
        assert mean.wait() is None, "nothing was started"
        assert not mean.in_flight
        base = torch.arange(numel, dtype=torch.float64) + 1
        for scale in (1.0, -3.0):
            vector = scale * base * (rank + 1)
            mean.start(vector)
            assert mean.in_flight
            vector.zero_()  # it was copied
            assert_same(mean.wait(), scale * base * (world + 1) / 2)
            assert not mean.in_flight
            assert mean.wait() is None, "it arrives once"
        mean.buffer.copy_(base * (rank + 1))
        mean.start()
        assert_same(mean.wait(), base * (world + 1) / 2)


# bf16 on the wire: what travels is rounded, the outer state is not.


@replicas(2)
def test_the_mean_of_two_is_rounded_twice(rank: int) -> None:
    """Each vector once, their sum once; halving is exact."""
    a, b = (torch.randn(1000, generator=torch.Generator().manual_seed(n)) for n in range(2))
    mean = BackgroundMean(1000, co2.Mesh.world(), BF16)
    mean.start(b if rank else a)
    found = mean.wait()
    assert found is not None and found.dtype == torch.bfloat16
    exact = (a.bfloat16().float() + b.bfloat16().float()).bfloat16().float() / 2
    assert_same(found.float(), exact)
    mean.close()


def difference(rank: int, name: str, rounds: int) -> Tensor:
    """Between the weights of two replicas after many rounds, in each of which they move as in the
    last, by numbers that bf16 cannot hold."""
    model, optimizer = problem.build_drift([3])
    method = METHODS[name](METHODS[name].Config(tau=1), BF16)
    method.prepare(model, optimizer, co2.Mesh.world())
    [weight] = model.parameters()
    for _ in range(rounds):
        weight.grad = torch.full_like(weight, 1 / 3 + rank / 7)
        method.step()
    method.flush()
    first, second = everybody(weight.detach())
    return first - second


@replicas(2)
@pytest.mark.parametrize("name", ["cocod_sgd", "eager_diloco", "co2_keep"])
def test_own_part_is_taken_back_as_it_was_added(rank: int, name: str) -> None:
    """A rounding that stayed would add up: replicas that move steadily would part steadily."""
    few, many = (difference(rank, name, rounds) for rounds in (200, 300))
    assert few.abs().min() > 0.05
    torch.testing.assert_close(many, few, rtol=1e-6, atol=0)


RESTARTS: list[Case] = [
    *((name, SETTINGS[name]) for name in ("co2", "co2_keep", "overlap_local_sgd")),
    ("co2_keep", {**SETTINGS["co2_keep"], "delay": 1}),
]
"""Methods whose consensus at a round's end is not the mean of the live weights."""


def shown_at_ends(rank: int, case: Case, comm: CommConfig | None) -> list[dict[str, Tensor]]:
    session = Session(rank, *case, comm=comm)
    return [session.shown(), *(session.train(3).shown() for _ in range(3))]


@replicas(2)
@pytest.mark.parametrize("case", RESTARTS, ids=str)
def test_consensus_over_the_wire(rank: int, case: Case) -> None:
    """Over bf16 it is off by the share that the wire's rounding has of the way made."""
    with no_gpu_needed(late):
        usual, rounded, staged = (shown_at_ends(rank, case, comm) for comm in (None, BF16, HOST))
    assert_same(staged, usual)
    start, *exact = (one["leave.weight"] for one in usual)
    for found, expected in zip(rounded[1:], exact, strict=True):
        way = (expected - start).norm()
        assert (found["leave.weight"] - expected).norm() < 0.02 * way
    assert not torch.equal(rounded[-1]["leave.weight"], exact[-1])


# Copies to and from the host's memory.

PACES = {"late": late, "at once": at_once, **{f"seed {n}": at_random(n) for n in range(3)}}


COPIED: list[tuple[Case, int]] = [
    *((("co2", SETTINGS["co2"]), world) for world in (1, 3)),
    *(((name, SETTINGS[name]), 2) for name in ("co2_keep", *SPARSE)),
    (("co2_keep", MOMENTS["co2_keep"]), 2),
    (("desloc", SETTINGS["desloc"]), 2),
    (("mt_dao", {**SETTINGS["mt_dao"], "first_moment_every": 3, "late_momentum": True}), 2),
    (("streaming_diloco", {**SETTINGS["streaming_diloco"], "exchange": "int4"}), 2),
]


@replicas()
@pytest.mark.parametrize(("case", "world"), COPIED, ids=str)
def test_copies_may_be_late_or_early(rank: int, world: int, case: Case) -> None:
    arguments = (rank, world, *case, inner_of(case), torch.float64, 10)
    with no_gpu_needed(late):  # for its chunks: a norm's rounding depends on them
        expected = trajectory(*arguments)
    for pace in PACES.values():
        with no_gpu_needed(pace):
            assert_same(trajectory(*arguments, comm=HOST), expected)


@replicas(2)
@pytest.mark.parametrize("name", ["co2", "streaming_diloco"])
def test_resume(rank: int, name: str) -> None:
    def new(seed: int = rank, comm: CommConfig | None = HOST) -> Session:
        return Session(rank, name, SETTINGS[name], "adamw", seed=seed, comm=comm)

    with no_gpu_needed(late):
        expected = new(comm=None).train(12).state()
        session = new().train(7)
        assert all(isinstance(part.flat.transfer, Staged) for part in parts(session.method))
        again = new(rank + 50)
        again.load(session.save(), 7)
        assert_same(again.train(5).state(), expected)


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


def test_the_next_chunk_comes_while_the_host_works(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = LateStream(late)
    flat, _ = flat_of(stream, monkeypatch)
    with flat.round():
        for chunk in flat.chunks:
            chunk.read()
            assert len(stream.queue) == (chunk is not flat.chunks[-1])


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


def test_what_is_read_and_written_in_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a chunk that was fetched ahead. Where a round fails, the computation waits for what
    was written before, and nobody reads weights outside."""
    stream = LateStream(late)
    flat, model = flat_of(stream, monkeypatch)
    (chunk, second, *_) = flat.chunks
    vector = flat.copy().fill_(1)
    with flat.round():
        chunk.read()  # and the second is fetched ahead
        second.write(second.of(vector))
        assert second.read().eq(1).all(), "what was written is what is read"

    def fail() -> None:
        with flat.round():
            flat.write(vector)
            raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        fail()
    assert joined(model).eq(1).all() and not stream.queue
    for call in (chunk.read, lambda: chunk.write(torch.zeros(chunk.numel))):
        with pytest.raises(AssertionError, match="only inside"):
            call()
    with flat.round():
        chunk.read()
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(7)
    with flat.round():
        assert second.read().eq(7).all(), "a fetch is not kept for the next round"
