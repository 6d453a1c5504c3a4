"""The collectives themselves: blocking ones carry all tensors of a type as one vector, and each
that may be under way beside others has a process group of its own."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import co2
from co2.comm import collectives
from co2.comm.background_mean import BackgroundMean
from co2.comm.flat import FlatParams
from co2.methods import METHODS
from tests.cli.harness import pooled
from tests.grids import OF_A_KIND, grid
from tests.methods.driver import SETTINGS, Session, assert_same, inner
from tests.methods.network import Recorder
from tests.methods.problem import OPTIMIZERS
from tests.workers import Pool, replicas

# One vector.


@replicas(2)
@pytest.mark.parametrize(("name", "vectors"), [("allreduce", 12), ("local_sgd", 1), ("diloco", 2)])
def test_a_consensus_amid_a_round_is_one_all_reduce(rank: int, name: str, vectors: int) -> None:
    """Of weights and of buffers. Before it call and number of steps are gathered, and checksums of
    what must be equal."""
    session = Session(rank, name, SETTINGS[name]).train(4)
    with Recorder() as recorder:
        session.shown()
    net = session.net
    weights = sum(p.numel() for p in net.parameters() if p.requires_grad)
    buffers = sum(b.numel() for b in net.buffers() if b.is_floating_point())
    gathered = [("all_gather_into_tensor", 2 * 2, "torch.int64")]
    if vectors:
        gathered.append(("all_gather_into_tensor", 2 * vectors, "torch.int64"))
    mean = ("all_reduce", weights + buffers, "torch.float64")
    assert [tuple(call[1:4]) for call in recorder.log] == [*gathered, mean]


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


@replicas(2)
@pytest.mark.parametrize(("most", "calls"), [(1 << 20, 3), (100, 6), (1, 8)])
def test_what_travels_together_is_what_would_alone(rank: int, most: int, calls: int) -> None:
    alone = [tensor.contiguous() for tensor in awkward(rank)]
    for tensor in alone:
        if tensor.numel():
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    group = co2.Mesh.world().new_group_across_replicas()
    tensors = awkward(rank)
    with patch.object(collectives, "_FLAT_BYTES", most), Recorder() as recorder:
        with collectives.averaged(tensors, group):
            assert_same([tensor.contiguous() for tensor in tensors], alone)
    assert_same(tensors, awkward(rank))
    assert [one.stride() for one in tensors] == [one.stride() for one in awkward(rank)]
    assert len(recorder.log) == calls


@replicas(3)
def test_all_start_with_the_first_ones_tensors(rank: int) -> None:
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
    first = [*awkward(0), torch.tensor(10), torch.tensor([True, False]), torch.zeros(3)]
    assert_same([tensor.detach() for tensor in (*model.buffers(), *model.parameters())], first)


@replicas(2)
def test_a_group_that_cannot_reach_a_gpu_gets_a_copy(rank: int, world: int) -> None:
    """And what it makes of the copy comes back: in the broadcast at the start, and in the mean."""
    shown = []
    for reaches in (True, False):
        with (
            patch.object(collectives, "carries", lambda group, tensor, reaches=reaches: reaches),
            patch.object(torch.Tensor, "cpu", lambda tensor: tensor.clone()),
        ):
            session = Session(rank, "local_sgd", SETTINGS["local_sgd"])
            shown.append([session.snapshot(), session.train(4).shown(), session.snapshot()])
    assert_same(*shown)


@replicas(2)
def test_gloo_is_for_the_memory_of_the_host() -> None:
    group = co2.Mesh.world().new_group_across_replicas()
    gpu, host = SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)
    assert not collectives.carries(group, gpu)  # type: ignore[arg-type]
    assert collectives.carries(group, host)  # type: ignore[arg-type]
    assert collectives.carries(None, gpu)  # type: ignore[arg-type]
    with patch("torch.distributed.get_backend_config", lambda group: "cpu:gloo,cuda:nccl"):
        assert collectives.carries(group, gpu)  # type: ignore[arg-type]
    dist.barrier(group)  # who leaves early breaks what the other still connects


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


# Groups.

ROLES = {
    "runners": "training",
    "background_mean": "training",
    "pair_mean": "training",
    "collectives": "consensus",
}
"""What the collectives of a file of co2/comm are for. Those of co2/train are for control."""
WATCHED = (
    "all_reduce",
    "all_gather_into_tensor",
    "broadcast",
    "barrier",
    "all_gather_object",
    "broadcast_object_list",
)


@contextmanager
def watched(log: Path) -> Iterator[None]:
    """Setup of a run: every collective leaves its role and its group in a file."""

    def logged(original: Any) -> Any:
        def call(*arguments: Any, group: Any = None, **others: Any) -> Any:
            frame = sys._getframe(1)
            while frame.f_code.co_qualname.startswith(("gathered", "as_one", "until_cut")):
                assert frame.f_back is not None
                frame = frame.f_back  # whoever gathers
            code = frame.f_code
            file = Path(code.co_filename)
            room = file.parent.name
            evaluates = code.co_qualname.startswith("add_up")  # when nothing else is under way
            if room in ("comm", "train") and not evaluates:
                role = ROLES[file.stem] if room == "comm" else "control"
                name = "default" if group in (None, dist.group.WORLD) else group.group_name
                with (log / f"rank{dist.get_rank()}").open("a") as lines:
                    lines.write(f"{role} {name}\n")
            return original(*arguments, group=group, **others)

        return call

    with patch.multiple(dist, **{name: logged(getattr(dist, name)) for name in WATCHED}):
        yield


@pytest.mark.parametrize("name", grid(SETTINGS, OF_A_KIND.__contains__))
def test_no_group_has_two_roles(workers: Pool, tmp_path: Path, name: str) -> None:
    run = pooled(
        workers,
        2,
        f"method={name}",
        *(f"{name}.{key}={value}" for key, value in SETTINGS[name].items()),
        *(("optim.momentum=0",) if name == "demo" else ()),
        f"optim.name={'adamw' if inner(name) == 'adamw' else 'sgd'}",
        "train.steps=12",
        "train.eval_every=4",
        "checkpoint.every=4",
        runs=tmp_path / "runs",
        setup=watched,
        setup_arguments=(tmp_path,),
    )
    assert run.status == 0, run.err
    for rank in range(2):
        lines = {
            tuple(line.split()) for line in (tmp_path / f"rank{rank}").read_text().splitlines()
        }
        roles = [role for role, _ in lines]
        groups = [group for _, group in lines]
        # DDP does not ask torch.distributed; it has the default group while gradients are computed.
        means = 0 if name == "allreduce" else SETTINGS[name].get("fragments", 1)
        assert sorted(roles) == ["consensus", "control"] + ["training"] * means
        assert len(set(groups)) == len(groups)
        # Control has PyTorch's own, between two steps: who trains waits for it.
        assert [role for role, group in lines if group == "default"] == ["control"]


@replicas(2)
def test_means_under_way_together_do_not_mix(rank: int) -> None:
    """Two means and a consensus, begun in another order on each worker."""
    mesh = co2.Mesh.world()
    means = [BackgroundMean(1000, mesh), BackgroundMean(1000, mesh)]
    group = mesh.new_group_across_replicas()
    for index in (0, 1) if rank == 0 else (1, 0):
        means[index].start(torch.full((1000,), 10.0 * index + rank))
    consensus = torch.full((1000,), 100.0 + rank)
    with collectives.averaged([consensus], group):
        assert consensus.mean() == 100.5
    assert [mean.wait().mean() for mean in means] == [0.5, 10.5]  # type: ignore[union-attr]
    for mean in means:
        mean.close()


@replicas(2)
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "allreduce"])
def test_each_mean_has_a_group_of_its_own(name: str) -> None:
    """Of two methods side by side, too, as a user may have for two models."""
    names = []
    for _ in range(2):
        model = nn.ParameterList([nn.Parameter(torch.zeros(3)) for _ in range(2)])
        method = METHODS[name]()
        method.prepare(model, OPTIMIZERS[inner(name)](model.parameters()), co2.Mesh.world())
        names += [mean.group.group_name for mean in method.means]
        names.append(method.group.group_name)
        method.flush()
    assert len(names) >= 4 and len(set(names)) == len(names)


@replicas(4)
def test_a_worker_makes_its_own_groups_only(rank: int) -> None:
    """With a thousand workers it would take a while to make all the others' too."""
    made = []
    original = dist.new_group

    def new_group(ranks: list[int], *arguments: Any, **others: Any) -> Any:
        made.append(len(ranks))
        return original(ranks, *arguments, **others)

    mesh = co2.Mesh.world(2)
    with patch.object(dist, "new_group", new_group):
        groups = [mesh.new_group_within_replica(), mesh.new_group_across_replicas()]
        mesh.new_group_of_workers()
    assert made == [2, 2, 4]
    sums = []
    for group in groups:
        one = torch.tensor(float(rank))
        dist.all_reduce(one, group=group)
        sums.append(one.item())
    assert sums == [[1, 2], [1, 4], [5, 2], [5, 4]][rank]


@pytest.mark.parametrize(
    ("config", "gpus", "kind"),
    [
        ("cpu:gloo,cuda:nccl", True, "cuda"),  # named so, or made without a name
        ("cuda:nccl", True, "cuda"),
        ("cpu:gloo,cuda:nccl", False, "cpu"),
        ("cpu:gloo", True, "cpu"),
        ("cpu:gloo,cuda:gloo", True, "cpu"),  # "gloo"
        ("cpu:nccl,cuda:gloo", True, "cpu"),
        ("cpu:gloo,cuda:ucc", True, "cuda"),
    ],
)
def test_the_mesh_is_where_the_process_group_reaches(config: str, gpus: bool, kind: str) -> None:
    with (
        patch.multiple(
            dist,
            is_initialized=lambda: True,
            get_backend_config=lambda: config,
            get_rank=lambda: 0,
            get_world_size=lambda: 2,
        ),
        patch.multiple(torch.cuda, is_available=lambda: gpus, current_device=lambda: 0),
    ):
        assert co2.Mesh.world().device.type == kind
