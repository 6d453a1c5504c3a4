"""Every collective that may be under way beside others has a process group of its own."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import co2
from co2.comm import collectives
from co2.comm.background_mean import BackgroundMean
from co2.methods import METHODS
from tests.cli.harness import pooled
from tests.grids import OF_A_KIND, grid
from tests.methods.driver import SETTINGS, inner
from tests.methods.problem import OPTIMIZERS
from tests.workers import Pool

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
        # DDP does not ask torch.distributed; it has the default group, which nobody else may use.
        means = 0 if name == "allreduce" else SETTINGS[name].get("fragments", 1)
        assert sorted(roles) == ["consensus", "control"] + ["training"] * means
        assert len(set(groups)) == len(groups)
        assert "default" not in groups


def crossed(rank: int, world: int) -> list[float]:
    """Two means and a consensus under way together, begun in another order on each worker."""
    mesh = co2.Mesh.world()
    means = [BackgroundMean(1000, mesh), BackgroundMean(1000, mesh)]
    group = mesh.new_group_across_replicas()
    order = (0, 1) if rank == 0 else (1, 0)
    for index in order:
        means[index].start(torch.full((1000,), 10.0 * index + rank))
    consensus = torch.full((1000,), 100.0 + rank)
    with collectives.averaged([consensus], group):
        seen = consensus.mean().item()
    found = [mean.wait() for mean in means]
    for mean in means:
        mean.close()
    return [seen, *(vector.mean().item() for vector in found if vector is not None)]


def test_means_under_way_together_do_not_mix(workers: Pool) -> None:
    assert workers.run(crossed, 2) == [[100.5, 0.5, 10.5]] * 2


def groups_of(rank: int, world: int, name: str) -> list[str]:
    """Of two methods side by side, as a user may have for two models."""
    names = []
    for _ in range(2):
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(3)) for _ in range(2)])
        method = METHODS[name]()
        method.prepare(model, OPTIMIZERS[inner(name)](model.parameters()), co2.Mesh.world())
        names += [mean.group.group_name for mean in method.means]
        names.append(method.group.group_name)
        method.flush()
    return names


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "allreduce"])
def test_each_mean_has_a_group_of_its_own(workers: Pool, name: str) -> None:
    for names in workers.run(groups_of, 2, name):
        assert len(names) >= 4 and len(set(names)) == len(names)


def calls_for_groups(rank: int, world: int) -> tuple[list[int], list[float]]:
    """Members of each group that this worker makes, and what it finds in two of them."""
    made = []
    original = dist.new_group

    def new_group(ranks: list[int], *arguments: Any, **others: Any) -> Any:
        made.append(len(ranks))
        return original(ranks, *arguments, **others)

    mesh = co2.Mesh.world(2)
    with patch.object(dist, "new_group", new_group):
        groups = [mesh.new_group_within_replica(), mesh.new_group_across_replicas()]
        mesh.new_group_of_workers()
    sums = []
    for group in groups:
        one = torch.tensor(float(rank))
        dist.all_reduce(one, group=group)
        sums.append(one.item())
    return made, sums


def test_a_worker_makes_its_own_groups_only(workers: Pool) -> None:
    """With a thousand workers it would take a while to make all the others' too."""
    found = workers.run(calls_for_groups, 4)
    assert [made for made, _ in found] == [[2, 2, 4]] * 4
    assert [sums for _, sums in found] == [[1, 2], [1, 4], [5, 2], [5, 4]]


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
