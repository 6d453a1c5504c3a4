"""Blocking collectives carry all tensors of a type as one vector; gradients move as one, too."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import co2
from co2.comm import collectives
from co2.comm.flat import FlatParams
from tests.methods import problem
from tests.methods.collectives import Recorder
from tests.methods.driver import SETTINGS, Session, assert_same
from tests.workers import Pool


def collectives_of(rank: int, world: int, name: str) -> list[tuple[str, int, str]]:
    """Those of a consensus amid a round."""
    session = Session(rank, name, SETTINGS[name])
    for _ in range(4):
        session.step()
    with Recorder() as recorder, session.method.consensus():
        pass
    session.method.flush()
    return [(kind, numel, dtype) for _, kind, numel, dtype, _ in recorder.log]


@pytest.mark.parametrize(("name", "vectors"), [("allreduce", 12), ("local_sgd", 1), ("diloco", 2)])
def test_a_consensus_is_one_all_reduce(workers: Pool, name: str, vectors: int) -> None:
    """Of weights and of buffers. Before it call and number of steps are gathered, and checksums of
    what must be equal."""
    net, _ = problem.build(0, "sgd")
    weights = sum(p.numel() for p in net.parameters() if p.requires_grad)
    buffers = sum(b.numel() for b in net.buffers() if b.is_floating_point())
    gathered = [("all_gather_into_tensor", 2 * 2, "torch.int64")]
    if vectors:
        gathered.append(("all_gather_into_tensor", 2 * vectors, "torch.int64"))
    mean = ("all_reduce", weights + buffers, "torch.float64")
    assert workers.run(collectives_of, 2, name) == [[*gathered, mean]] * 2


def awkward(rank: int) -> list[Tensor]:
    """Tensors of several types and layouts, which differ by rank."""
    generator = torch.Generator().manual_seed(rank)

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return [
        drawn(3, 2),
        drawn(5, dtype=torch.float64),
        drawn(),
        drawn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        drawn(0),
        drawn(7, dtype=torch.bfloat16),
        drawn(4, 6).t(),
        drawn(1000),
        drawn(0, dtype=torch.float16),
        drawn(3, dtype=torch.float64),
    ]


def averaged_one_by_one(rank: int, world: int) -> list[Tensor]:
    tensors = [tensor.contiguous() for tensor in awkward(rank)]
    for tensor in tensors:
        if tensor.numel():
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    return tensors


def averaged_together(rank: int, world: int, most: int) -> tuple[list[Tensor], int]:
    group = co2.Mesh.world().new_group_across_replicas()
    tensors = awkward(rank)
    with patch.object(collectives, "_FLAT_BYTES", most), Recorder() as recorder:
        with collectives.averaged(tensors, group):
            inside = [tensor.clone() for tensor in tensors]
    assert_same(tensors, awkward(rank))
    assert [one.stride() for one in tensors] == [one.stride() for one in awkward(rank)]
    return inside, len(recorder.log)


@pytest.mark.parametrize(("most", "calls"), [(1 << 20, 3), (100, 6), (1, 8)])
def test_what_travels_together_is_what_would_alone(workers: Pool, most: int, calls: int) -> None:
    expected = workers.run(averaged_one_by_one, 2)
    for rank, (found, counted) in enumerate(workers.run(averaged_together, 2, most)):
        assert_same(found, expected[rank])
        assert counted == calls


def replicated(rank: int, world: int) -> list[Tensor]:
    group = co2.Mesh.world().new_group_across_replicas()
    model = nn.Module()
    for number, tensor in enumerate(awkward(rank)):
        model.register_buffer(f"float{number}", tensor)
    model.register_buffer("count", torch.tensor(10 + rank))
    model.register_buffer("flags", torch.tensor([rank == 0, rank == 1]))
    model.weight = nn.Parameter(torch.full((3,), float(rank)))
    with Recorder() as recorder:
        collectives.replicate(model, group)
    assert len(recorder.log) == 5  # one for each type
    return [tensor.detach() for tensor in (*model.buffers(), *model.parameters())]


def test_all_start_with_the_first_ones_tensors(workers: Pool) -> None:
    first = [*awkward(0), torch.tensor(10), torch.tensor([True, False]), torch.zeros(3)]
    for found in workers.run(replicated, 3):
        assert_same(found, first)


def held(dtype: torch.dtype) -> tuple[FlatParams, list[nn.Parameter]]:
    shapes = [(3, 2), (), (2, 3, 4, 5), (0,), (7,)]
    params = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    params[2].data = params[2].data.contiguous(memory_format=torch.channels_last)
    return FlatParams(torch.optim.SGD(params, lr=0.1)), params


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("without", [(), (1, 4), (0, 1, 2, 3, 4)])
def test_gradients(dtype: torch.dtype, without: tuple[int, ...]) -> None:
    flat, params = held(dtype)
    grads: list[Any] = []
    for number, param in enumerate(params):
        param.grad = None if number in without else torch.randn_like(param)
        grads.append(torch.zeros_like(param) if param.grad is None else param.grad.clone())
    expected = torch.cat([grad.reshape(-1).float() for grad in grads])
    out = torch.full((flat.numel,), 9.0)
    flat.gradients(out)
    assert torch.equal(out, expected)
    flat.gradients(out, add=True)
    assert torch.equal(out, expected + expected)
    rounded = torch.empty(flat.numel, dtype=torch.bfloat16)
    flat.gradients(rounded)
    assert torch.equal(rounded, expected.bfloat16())
    flat.set_gradients(out)
    for param, grad in zip(params, grads, strict=True):
        assert param.grad is not None and param.grad.dtype == dtype
        assert torch.equal(param.grad, (grad.float() * 2).to(dtype))
