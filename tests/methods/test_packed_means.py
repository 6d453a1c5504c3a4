"""Packed means: with error feedback, of signs and small integers (compressed_mean.py), and of the
few largest elements (sparse_mean.py), on which SparseLoCo rests. Closed forms, what is kept, how it
is packed, and what it puts on the wire; and Triton's kernels for them, which make the same bits in
its interpreter, and few launches."""

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, adam

import co2
from benchmarks.launches import ROUNDS, gpt2, of_gpt2
from co2.comm import codec, dct_mean, sparse_mean
from co2.comm.background_mean import BackgroundMean
from co2.comm.codec import BITS, Codec, Scales
from co2.comm.compressed_mean import CompressedMean
from co2.comm.sparse_mean import SparseMean, add_in_order, largest, num_messages
from tests.grids import grid
from tests.methods.driver import assert_same
from tests.methods.interpreted import Case, results
from tests.methods.network import Recorder
from tests.reference.blocking import few
from tests.reference.two_stages import TwoStages
from tests.server import ROOT, environment
from tests.workers import Pool, everybody, replicas


def vectors(numel: int, step: int, world: int, dtype: torch.dtype) -> list[Tensor]:
    """Of all workers."""
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randn(world, numel, generator=generator, dtype=torch.float64)
    return list((drawn + 0.3).to(dtype))


def bytes_sent(packed: CompressedMean | SparseMean, mean: BackgroundMean, world: int) -> int:
    """Of one mean, as it counts itself, which is what it hands to others in collectives."""
    sent: list[int] = []

    def counted(collective: Any, to: float) -> Any:
        def call(output: Tensor, given: Tensor, **kwargs: Any) -> Any:
            sent.append(int(given.nbytes * to))
            return collective(output, given, **kwargs)

        return call

    to_all = counted(dist.all_to_all_single, (world - 1) / world)
    gather = counted(dist.all_gather_into_tensor, world - 1)
    with patch.multiple(dist, all_to_all_single=to_all, all_gather_into_tensor=gather):
        packed.start(mean.buffer.normal_())
        mean.wait()
    totals = mean.totals()
    assert totals.comm_s > 0 and totals.exposed_s > 0
    assert sum(sent) == totals.bytes_sent
    mean.close()
    return int(totals.bytes_sent)


# Signs and small integers.

KINDS = tuple(BITS)
BITS = {"sign": 1, "int4": 4, "int8": 8}


@pytest.mark.parametrize(
    ("kind", "x", "packed"),
    [
        ("sign", [1.0, -1, 1, 1, -1, -1, -1, 1, -1, 1], [0b10001101, 0b10]),
        ("int4", [7.0, -7, 1], [0x0E, 0x08]),
        ("int8", [127.0, -127, 1], [254, 0, 128]),
    ],
)
def test_layout_of_a_message(kind: str, x: list[float], packed: list[int]) -> None:
    assert encoded(torch.tensor(x), kind)[0].tolist() == packed


def encoded(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The codes of x, and C(x)."""
    bits = BITS[kind]
    codec = Codec(bits, [len(x)], len(x), x)
    scales = Scales(bits, [len(x)], x).of(x)
    packed = torch.empty(1, codec.row_bytes, dtype=torch.uint8)
    error, found = torch.empty_like(x), torch.empty_like(x)
    codec.encode(x, scales, None, packed, error)
    codec.decode(packed, scales, None, found)
    assert_same(error, x - found)
    return packed[0], found


@pytest.mark.parametrize(
    ("kind", "x", "expected"),
    [
        ("sign", [0.0, -0.0, -2.0, 4.0, 4.0], [2.683282, 2.683282, -2.683282, 2.683282, 2.683282]),
        ("sign", [0.0, 0.0], [0.0, 0.0]),
        ("int4", [7.0, -3.4, 3.4, -7.0, 0.4], [7, -3, 3, -7, 0]),
        ("int4", [-1.75, 0.2, 0.0], [-1.75, 0.25, 0]),
        ("int8", [-127.0, 63.7, 0.3], [-127, 64, 0]),
        ("int8", [0.0, 0.0], [0.0, 0.0]),
        ("int8", [1e-45, -1e-45], [0.0, 0.0]),  # a scale of 0 divides nothing
        ("int4", [1e-44, -1e-44], [1e-44, -1e-44]),  # 7 times the least of all numbers
    ],
)
def test_known_values(kind: str, x: list[float], expected: list[float]) -> None:
    assert encoded(torch.tensor(x), kind)[1].tolist() == pytest.approx(expected, rel=1e-6)


def compressed_mean(
    sizes: list[int], kind: str, dtype: torch.dtype = torch.float64, masked: bool = False
) -> CompressedMean:
    mesh = co2.Mesh.world()
    mean = BackgroundMean(sum(sizes), mesh, dtype=dtype)
    return CompressedMean(sizes, mesh, mean, BITS[kind], masked)


@replicas(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_closed_form(rank: int, dtype: torch.dtype) -> None:
    """Scales sqrt 3 and 1 from the workers, 1 and 1 from the servers."""
    mean = compressed_mean([4], "sign", dtype)
    vector = torch.tensor([[1, -1, 3, 1], [1, 1, -1, 1]], dtype=dtype)[rank]
    mean.mean_(vector)
    assert vector.tolist() == pytest.approx([1, -1, 1, 1], abs=1e-6)
    own = ([-0.732051, 0.732051, 1.267949, -0.732051], [0.0, 0.0, 0.0, 0.0])[rank]
    assert mean.worker_error.tolist() == pytest.approx(own, abs=1e-6)
    servers = ([0.366025, 0.633975], [-0.633975, 0.366025])[rank]
    assert mean.server_error.tolist() == pytest.approx(servers, abs=1e-6)


def support_at(step: int, numel: int) -> Tensor:
    """Grows, as v does."""
    return (torch.arange(numel) % 3 < 1 + step).double()


def compressed_history(
    rank: int, world: int, sizes: list[int], kind: str, steps: int, dtype: torch.dtype, some: bool
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """By step: the mean, this worker's error and its server's error."""
    mean, numel, found = compressed_mean(sizes, kind, dtype, some), sum(sizes), []
    for step in range(steps):
        vector = vectors(numel, step, world, dtype)[rank]
        if some:
            mean.set_mask(support_at(step, numel))
        mean.mean_(vector)
        found.append((vector, mean.worker_error.clone(), mean.server_error.clone()))
    return found


COMPRESSED = ([1], [2, 3], [29], [64, 0, 1], [64, 8, 3, 24, 40, 16], [7, 500, 1, 493])
"""Also none that is a multiple of 8 G, servers that own nothing, tensors without elements, and some
that are packed with others."""


@pytest.mark.parametrize("sizes", COMPRESSED, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", grid([1, 2, 3, 4], (1, 3).__contains__))
def test_equals_two_stages_in_one_place(
    workers: Pool, world: int, kind: str, sizes: list[int]
) -> None:
    numel = sum(sizes)
    some = kind == "sign" and numel > 4
    runs = workers.run(compressed_history, world, sizes, kind, 5, torch.float64, some)
    reference = TwoStages(world, torch.zeros(numel, dtype=torch.float64), sizes, kind)
    for step in range(5):
        alive = support_at(step, numel) != 0 if some else None
        expected = reference.mean(vectors(numel, step, world, torch.float64), alive)
        for rank, run in enumerate(runs):
            assert_same(run[step][0], runs[0][step][0])
            found = run[step]
            errors = (reference.worker_errors[rank], reference.server_errors[rank])
            torch.testing.assert_close(found, (expected, *errors), rtol=1e-12, atol=1e-12)


@replicas(3)
@pytest.mark.parametrize("kind", [*KINDS, "sparse"])
def test_nothing_is_lost(rank: int, world: int, kind: str) -> None:
    """Over 40 steps what went in is what came out and what the errors hold."""
    sizes = [5000, 9] if kind == "sparse" else [20, 9]
    numel, dtype = sum(sizes), torch.float32
    packed: Any = (
        sparse_mean_of(sizes, 0.05, 1.0, dtype)
        if kind == "sparse"
        else compressed_mean(sizes, kind, dtype)
    )
    went_in, came_out = (torch.zeros(numel, dtype=torch.float64) for _ in range(2))
    for step in range(40):
        given = vectors(numel, step, world, dtype)
        went_in += torch.stack(given).double().mean(dim=0)
        packed.mean_(given[rank])
        came_out += given[rank]
    errors = [packed.error] if kind == "sparse" else [packed.worker_error, packed.server_error]
    of_workers, *of_servers = (everybody(error.double()) for error in errors)
    held = torch.stack(of_workers).mean(dim=0)
    for chunks in of_servers:
        held += torch.cat(chunks)
    torch.testing.assert_close(came_out + held, went_in, rtol=0, atol=1e-3)
    assert held.norm() < 0.6 * went_in.norm()  # else feedback would not feed back


@replicas(3)
def test_pieces_change_no_mean(rank: int, world: int) -> None:
    arguments = (rank, world, [5 * 4096 + 3, 8192], 0.1, torch.float64, 3)
    whole = sparse_history(*arguments)
    with patch.object(sparse_mean, "_PIECE", 8192):
        assert_same(sparse_history(*arguments), whole)
    for kind in KINDS:
        arguments = (rank, world, [70, 31], kind, 3, torch.float64, kind == "sign")
        whole = compressed_history(*arguments)
        with patch.object(codec, "_PIECE", 16):
            cut = compressed_history(*arguments)
        torch.testing.assert_close(cut, whole, rtol=1e-12, atol=1e-12)


MANY = [900, 30] * 50 + [100_000, 7] + [900, 30] * 50
"""Of 202 tensors, all with a scale; one is in every chunk."""


@replicas()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", grid([2, 3, 4], (3).__eq__))
def test_bytes_are_codes_and_scales(world: int, kind: str) -> None:
    share, mesh = BITS[kind] / 32, co2.Mesh.world()
    for sizes in ([1_000_000], MANY):
        mean = BackgroundMean(sum(sizes), mesh)
        packed = CompressedMean(sizes, mesh, mean, BITS[kind])
        sent, exact = bytes_sent(packed, mean, world), mean.bytes_per_mean()
        scales = 2 * (world - 1) * 4 * 102  # in the row of a chunk with half of them
        rounding = 2 * (world - 1) * 4  # to whole scales
        more = scales + rounding if sizes is MANY else 0
        assert exact * share <= sent <= 1.05 * exact * share + more


# The few largest elements.


@pytest.mark.parametrize("kept", [1, 2, 3, 82, 4096])
def test_a_message_brings_every_index_and_sign(kept: int) -> None:
    """Of one magnitude, so that rounding loses nothing."""
    generator = torch.Generator().manual_seed(kept)
    where = torch.randperm(4096, generator=generator)[:kept]
    vector = torch.zeros(4096)
    vector[where] = torch.randint(2, (kept,), generator=generator) * 4.0 - 2
    mean, found = sparse_mean_of([4096], kept / 4096, 0.0, torch.float32), vector.clone()
    mean.mean_(found)
    assert_same(found, vector)
    assert not mean.error.any()
    assert len(mean.messages()["sent"]) == 4 + kept + -(-kept // 4) * 3 + (kept + -(-kept // 4)) % 2


@pytest.mark.parametrize("kept", [1, 5, 29, 30])
def test_the_largest_are_those_of_a_stable_sort(kept: int) -> None:
    """With many ties."""
    sizes = torch.randint(6, (50, 30), generator=torch.Generator().manual_seed(kept)).double()
    order = sizes.sort(dim=1, descending=True, stable=True).indices[:, :kept]
    expected = torch.zeros(50, 30, dtype=torch.bool).scatter_(1, order, True)
    for most in (kept, 30):
        taken, found = largest(sizes.clone(), torch.full((50, 1), kept), most)
        assert_same(taken, expected)
        assert_same(found, sizes.sort(dim=1, descending=True).values[:, :most])
    odd = torch.tensor([[1.0, torch.nan, 3.0], [torch.inf, 2.0, torch.nan], [torch.nan] * 3])
    taken, _ = largest(odd, torch.full((3, 1), 2), 2)
    assert [row.nonzero().flatten().tolist() for row in taken] == [[1, 2], [0, 2], [0, 1]]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([8.0, -6.0, 1.0, -3.0], [7, -7, 2, -2]),
        ([5.0], [5]),
        ([-3.0, 3.0, 3.0], [-3, 3, 3]),
        ([0.0, 0.0, -0.0], [0, 0, 0]),
        ([0.0, 4.0, 0.0, -4.0], [0, 4, 0, -4]),  # what has not moved is not moved
        ([1.001953125], [1.0]),  # bf16 has no number between 1 and 1.0078125
        ([1e-30, -3e-30], [1e-30, -3e-30]),
    ],
)
def test_two_magnitudes(values: list[float], expected: list[float]) -> None:
    found = torch.tensor([*values, *(2 * value for value in values)])
    sparse_mean_of([len(values)] * 2, 1.0, 0.0, torch.float32).mean_(found)
    first, second = found.split(len(values))
    torch.testing.assert_close(first, torch.tensor(expected).float(), rtol=0.004, atol=0)
    torch.testing.assert_close(second, 2 * first, rtol=0.004, atol=0)


def sparse_mean_of(
    sizes: Sequence[int], density: float, decay: float, dtype: torch.dtype
) -> SparseMean:
    mesh = co2.Mesh.world()
    mean = BackgroundMean(sum(sizes), mesh, dtype=dtype)
    return SparseMean(sizes, mesh, mean, density, decay)


def sparse_history(
    rank: int, world: int, sizes: list[int], density: float, dtype: torch.dtype, steps: int
) -> list[tuple[Tensor, Tensor]]:
    """By step: the mean, and this replica's error."""
    mean, found = sparse_mean_of(sizes, density, 0.5, dtype), []
    for step in range(steps):
        vector = vectors(sum(sizes), step, world, dtype)[rank]
        mean.mean_(vector)
        found.append((vector, mean.error.clone()))
    return found


SPARSE = ([1], [7, 500, 0, 1], [4096], [4095, 4097], [3 * 4096 + 5, 2, 9000])
"""Also tensors without elements, and last chunks of one element."""


@pytest.mark.parametrize("sizes", SPARSE, ids=str)
@pytest.mark.parametrize("density", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("world", grid([1, 3], (3).__eq__))
def test_equals_what_is_written_in_one_place(
    workers: Pool, world: int, density: float, sizes: list[int]
) -> None:
    runs = workers.run(sparse_history, world, sizes, density, torch.float64, 4)
    errors = [torch.zeros(sum(sizes), dtype=torch.float64)] * world
    for step in range(4):
        sent = []
        for rank, vector in enumerate(vectors(sum(sizes), step, world, torch.float64)):
            corrected = 0.5 * errors[rank] + vector
            sent.append(few(corrected, sizes, density))
            errors[rank] = corrected - sent[rank]
            torch.testing.assert_close(runs[rank][step][1], errors[rank], rtol=1e-12, atol=1e-12)
        for run in runs:
            assert_same(run[step][0], runs[0][step][0])
        expected = torch.stack(sent).mean(dim=0)
        torch.testing.assert_close(runs[0][step][0], expected, rtol=1e-12, atol=1e-12)


@replicas()
@pytest.mark.parametrize("density", grid([0.01, 0.02, 0.03], (0.02).__eq__))
@pytest.mark.parametrize("sizes", [[1_000_000], [64 * 192, 192, 64 * 64, 64] * 20], ids=["1", "80"])
@pytest.mark.parametrize("world", [2, 3])
def test_bytes_are_14_bits_a_value_and_32_a_chunk(
    world: int, sizes: list[int], density: float
) -> None:
    """But for what rounding to whole bytes adds, which shows in small tensors."""
    bits, mesh = 0, co2.Mesh.world()
    for size in sizes:
        for begin in range(0, size, 4096):
            bits += 14 * max(1, round(density * min(4096, size - begin))) + 32
    mean = BackgroundMean(sum(sizes), mesh)
    packed = SparseMean(sizes, mesh, mean, density, 0.95)
    assert 1 <= bytes_sent(packed, mean, world) / ((world - 1) * bits / 8) <= 1.05


# Many replicas send several messages, one after the other: what is received takes no more memory
# than the vector, and the mean is that of one message.

SHAPES = [(50, 100), (9000,), (3,), (64, 64), (40, 300)]


def drawn(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def sparse_twice(rank: int) -> list[Tensor]:
    """The means of two rounds and what is left over."""
    vectors = [torch.cat([part.flatten() for part in drawn(rank, step)]) for step in range(2)]
    sizes = [part.numel() for part in drawn(rank, 0)]
    mean = sparse_mean_of(sizes, 0.1, 0.9, torch.float64)
    for vector in vectors:
        mean.mean_(vector)
    return [*vectors, mean.error]


def waves_twice(rank: int) -> list[Tensor]:
    """Weights after two steps of DeMo, and its momentum, as a sum for each wave."""
    weights = [nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in SHAPES]
    kind = co2.METHODS["demo"]
    method = kind(kind.Config(top_k=3, block=4))
    method.prepare(nn.ParameterList(weights), SGD(weights, lr=0.1), co2.Mesh.world())
    for step in range(2):
        for weight, gradient in zip(weights, drawn(rank, step), strict=True):
            weight.grad = gradient
        method.step()
    method.flush()
    return [weight.detach() for weight in weights]


@replicas(3)
@pytest.mark.parametrize("act", [sparse_twice, waves_twice])
def test_several_messages_are_one(rank: int, act: Callable[[int], list[Tensor]]) -> None:
    found, counts = [], []
    for several in (1, 4):
        with (
            patch.multiple(sparse_mean, _PIECE=2 * 4096, num_messages=lambda *_, n=several: n),
            patch.multiple(dct_mean, _LEAST=100, num_messages=lambda *_, n=several: n),
            Recorder() as recorder,
        ):
            found.append(act(rank))
        counts.append(sum(call[1] == "all_gather_into_tensor" for call in recorder.log))
    assert_same(*found)
    assert counts[1] >= counts[0] + 2 * 2, counts


def test_as_many_as_the_memory_of_the_vector_asks_for() -> None:
    most = 1 << 30
    found = [num_messages(share * most, most) for share in (0.0, 0.99, 1.0, 1.01, 9.5)]
    assert found == [1, 1, 1, 2, 10] and num_messages(1e6, 1000) == 1


def test_of_one_place_the_values_are_added_in_their_order() -> None:
    """1 + 2⁻⁵³ + 2⁻⁵³ is 1 in fp64, and more in another order."""
    out, tiny = torch.zeros(2, dtype=torch.float64), 2.0**-53
    values = torch.tensor([1.0, tiny, tiny, tiny, tiny, 1.0], dtype=torch.float64)
    add_in_order(out, torch.tensor([0, 0, 0, 1, 1, 1]), values)
    assert out.tolist() == [1.0, 1 + 2 * tiny]


@pytest.fixture
def no_inner_steps() -> Iterator[None]:
    """On meta tensors AdamW's own, of which no launch is counted, take ten times what is tested."""
    with patch.object(adam, "adam", lambda *_, **__: None):
        yield


@pytest.mark.usefixtures("no_inner_steps")
@pytest.mark.parametrize("name", ["demo", "sparseloco"])
def test_512_replicas_take_little_more_than_eight(name: str) -> None:
    """Of GPT-2 small: two words a parameter at most, and some launches for each message."""
    few, many = of_gpt2(name, 8), of_gpt2(name, 512)
    assert many.words <= few.words + 2
    assert many.collectives <= 12 and len(many.log) <= 2 * len(few.log) + 20 * many.collectives


# Kernels.

KERNELS = {
    "signs": Case("sign", [5, 1, 64, 1500]),
    "masked signs": Case("sign", [7, 500, 1, 493], masked=True),
    "signs in rows": Case("sign", [10, 1, 2, 13, 13, 9], rows=4),
    "signs in fp64": Case("sign", [3, 40], dtype=torch.float64),
    "int4": Case("int4", [5, 1, 64, 1500]),
    "int4 in rows": Case("int4", [10, 3, 13, 13, 9], rows=4),
    "int8": Case("int8", [700, 1, 1500]),
    "int8 in fp64": Case("int8", [3, 40], dtype=torch.float64),
    "one element": Case("int8", [1]),
    "sparse": Case("sparse", [4096 + 300, 1, 77]),
    "sparse, small tensors": Case("sparse", [7, 500, 1, 493], density=0.1),
    "all of it": Case("sparse", [300, 9], density=1.0),
    "sparse in fp64": Case("sparse", [400, 1], dtype=torch.float64),
    "what is no number": Case("sparse", [500], poisoned=True),
}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[Tensor]]:
    """Results of all cases. One process makes them, because it takes seconds to start."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.methods.interpreted"]
    cases, env = pickle.dumps([*KERNELS.values()]), environment(TRITON_INTERPRET="1")
    run = subprocess.run(
        command, input=cases, stdout=subprocess.PIPE, cwd=ROOT, env=env, check=True, timeout=600
    )
    return dict(zip(KERNELS, pickle.loads(run.stdout), strict=True))


@pytest.mark.parametrize("name", KERNELS)
def test_same_bits(interpreted: dict[str, list[Tensor]], name: str) -> None:
    assert_same(interpreted[name], results(KERNELS[name]))


@pytest.mark.usefixtures("no_inner_steps")
@pytest.mark.parametrize("name", [name for name in ROUNDS if name != "demo"])  # some a tensor
def test_a_round_of_gpt2_takes_under_60_launches(name: str) -> None:
    """Where moments arrive late they are an exchange of their own, beside that of the weights; so
    is each fragment."""
    exchanges = {"co2, moments": 2, "co2_keep, 12 fragments": 12}.get(name, 1)
    assert 0 < len(of_gpt2(name).log) < 60 * exchanges
    sizes = [param.numel() for param in gpt2().parameters()]
    assert (len(sizes), sum(sizes)) == (148, 124_439_808)


PACK = {"STEPS": 8, "BYTES": 128}
COMPILED: dict[str, tuple[dict[str, str], dict[str, int]]] = {
    "_encode": ({"out": "*u8"}, {"MASKED": True, "BITS": 1, **PACK}),
    "_decode": ({"packed": "*u8"}, {"MASKED": True, "BITS": 1, **PACK}),
    "_add": ({"packed": "*u8"}, {"BITS": 4, **PACK}),
    "_choose": ({"kept": "*i64", "numbers": "*i64"}, {"COLUMNS": 4096, "NUMBER_BITS": 31}),
    "_spread": (
        {"lower": "*u8", "upper": "*u8", "magnitudes": "*fp32", "kept": "*i64"},
        {"SIGN": -1, "SLOTS": 128},
    ),
}
"""The types of a kernel's pointers, but for those of `POINTERS`, and its constants."""
INTEGERS = dict.fromkeys(("starts", "widths", "firsts"), "*i64")
FLOATS = dict.fromkeys(("x", "scales", "out", "error", "magnitudes"), "*fp32")
POINTERS = {**INTEGERS, **FLOATS, "mask": "*i1"}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_for_gpus(name: str) -> None:
    """Without one; and no product and sum are rounded together, which would be other bits."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from co2.comm import kernels

    kernel = getattr(kernels, name)
    own, constants = COMPILED[name]
    types = {**POINTERS, **own, **dict.fromkeys(constants, "constexpr")}
    signature = {argument: types.get(argument, "i32") for argument in kernel.arg_names}
    compiled = triton.compile(
        ASTSource(kernel, signature, constants),
        target=GPUTarget("cuda", 90, 32),
        options={"enable_fp_fusion": False},
    )
    assert compiled.asm["cubin"]
    assert "fma." not in compiled.asm["ptx"]
