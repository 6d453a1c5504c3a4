"""consensus() shows the mean of the weights as training left them, and leaves no trace."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed
from torch import Tensor

import co2
from co2.comm import collectives
from co2.config import CommConfig
from co2.methods.shared.auto_tau import AUTO, START
from tests.grids import OF_A_KIND, grid
from tests.methods import problem
from tests.methods.collectives import SlowNetwork
from tests.methods.driver import (
    MOMENTS,
    OVERLAPPED,
    SETTINGS,
    Session,
    Snapshot,
    assert_same,
    inner,
    trajectory,
)
from tests.methods.late_stream import HOST, late, no_gpu_needed
from tests.methods.test_bf16_wire import BF16
from tests.methods.test_equals_reference import replicas_of
from tests.reference import REFERENCES
from tests.workers import Pool, replicas

TAU = 3
ROUNDS = 3
STEPS = ROUNDS * TAU
SHARDED = {**SETTINGS["co2"], "shard": True}
CASES: list[tuple[str, dict[str, Any]]] = [
    *SETTINGS.items(),
    ("co2", SHARDED),
    *(("co2_keep", {**SETTINGS["co2_keep"], "delay": delay}) for delay in (0, 1)),
]
RESTARTS = [
    *((name, SETTINGS[name]) for name in ("co2", "co2_keep", "overlap_local_sgd")),
    ("co2", SHARDED),
    ("co2_keep", {**SETTINGS["co2_keep"], "delay": 1}),
]
"""Those whose rounds start from a point that misses the one before."""
WAITS = ("co2", "co2_keep")
"""Methods whose consensus right after a round's end waits for what was started there."""


def is_telling(case: tuple[str, dict[str, Any]]) -> bool:
    return case[0] in OF_A_KIND or case in RESTARTS


class Raised(Exception):
    pass


Looked = tuple[Snapshot, Snapshot, Snapshot]
"""Before, inside and after a consensus."""


def looked_at(
    rank: int,
    world: int,
    name: str,
    settings: dict[str, Any],
    optimizer: str | None = None,
    comm: CommConfig | None = None,
) -> list[Looked]:
    """At the start and after each step."""
    session = Session(rank, name, settings, optimizer, comm=comm)
    history = []
    for step in range(STEPS + 1):
        if step:
            session.step()
        before = session.snapshot()
        with session.method.consensus():
            inside = session.snapshot()
        history.append((before, inside, session.snapshot()))
    session.method.flush()
    return history


def mean_of(runs: list[list[Looked]], step: int) -> Snapshot:
    """The replicas' mean of what they held after a step; of integers, the first replica's."""
    befores = [run[step][0] for run in runs]
    return {
        key: torch.stack([before[key] for before in befores]).mean(dim=0)
        if value.is_floating_point()
        else value
        for key, value in befores[0].items()
    }


def shown_by_reference(
    name: str, settings: dict[str, Any], optimizer: str, world: int
) -> dict[int, Tensor]:
    """After which steps consensus shows something else than the mean of what the replicas hold, and
    what, as one vector."""
    replicas = replicas_of(optimizer, world, torch.float64)
    plain = {key: value for key, value in settings.items() if key != "shard"}
    rounds = REFERENCES[name](replicas, **plain)
    shown = {}
    while replicas[0].steps_done < STEPS:
        found = next(rounds)
        if found is not None:
            shown[replicas[0].steps_done] = found
    return shown


def expected_of(
    runs: list[list[Looked]], name: str, settings: dict[str, Any], optimizer: str
) -> list[Snapshot]:
    """What a consensus shows at the start and after each step."""
    shown = shown_by_reference(name, settings, optimizer, len(runs))
    expected = [mean_of(runs, step) for step in range(STEPS + 1)]
    [replica] = replicas_of(optimizer, 1, torch.float64)
    for step, vector in shown.items():
        replica.set_weights(vector)
        known = {id(weight) for weight in replica.trainable()}
        parameters = replica.model.named_parameters(remove_duplicate=False)
        own = {key: weight.detach().clone() for key, weight in parameters if id(weight) in known}
        expected[step] = {**expected[step], **own}
    return expected


def check(
    workers: Pool,
    case: tuple[str, dict[str, Any]],
    world: int,
    optimizer: str | None = None,
) -> None:
    name, settings = case
    runs = workers.run(looked_at, world, *case, optimizer)
    undisturbed = workers.run(trajectory, world, *case, optimizer, torch.float64, STEPS)
    expected = expected_of(runs, name, settings, optimizer or inner(name))
    for rank, run in enumerate(runs):
        assert_same([before for before, _, _ in run], undisturbed[rank])
        assert_same([after for _, _, after in run], undisturbed[rank])
        for step, (before, inside, _) in enumerate(run):
            assert torch.equal(inside["seen"], before["seen"])
            for key, value in inside.items():
                if value.is_floating_point():
                    where = f"step {step}, {key}: "
                    torch.testing.assert_close(
                        value, expected[step][key], rtol=1e-12, atol=1e-12,
                        msg=lambda text, where=where: where + text,
                    )  # fmt: skip
    before, inside, _ = runs[1][STEPS - 1]  # where the replicas differ, or nothing is shown
    alike = name in ("allreduce", "acco", "demo", "onebit_adam")
    for key in ("norm.running_mean", "drift", *([] if alike else ["scale"])):
        assert not torch.equal(inside[key], before[key])


@pytest.mark.parametrize("case", grid(CASES, is_telling, one=True), ids=str)
def test_consensus(workers: Pool, case: tuple[str, dict[str, Any]]) -> None:
    check(workers, case, 3)


@pytest.mark.parametrize("case", grid(CASES, RESTARTS.__contains__, one=True), ids=str)
def test_consensus_of_two(workers: Pool, case: tuple[str, dict[str, Any]]) -> None:
    check(workers, case, 2)


@pytest.mark.parametrize("case", MOMENTS.items(), ids=str)
def test_consensus_beside_averaged_moments(workers: Pool, case: tuple[str, dict[str, Any]]) -> None:
    check(workers, case, 2, "adamw")


@pytest.mark.parametrize("case", RESTARTS, ids=str)
def test_what_was_trained_is_not_what_replicas_go_on_from(
    workers: Pool, case: tuple[str, dict[str, Any]]
) -> None:
    """Were it alike on this problem, the tests above could not tell them apart."""
    runs = workers.run(looked_at, 2, *case)
    for step in range(2 * TAU, STEPS + 1, TAU):
        _, inside, _ = runs[0][step]
        assert (inside["scale"] - mean_of(runs, step)["scale"]).abs() > 1e-4


@pytest.mark.parametrize("case", RESTARTS, ids=str)
def test_a_single_replica_shows_where_its_round_ended(
    workers: Pool, case: tuple[str, dict[str, Any]]
) -> None:
    [run] = workers.run(looked_at, 1, *case)
    for step, expected in enumerate(expected_of([run], *case, "sgd")):
        torch.testing.assert_close(run[step][1], expected, rtol=1e-12, atol=1e-12)


def over_a_wire(rank: int, world: int, case: tuple[str, dict[str, Any]], comm: CommConfig) -> Any:
    with no_gpu_needed(late):
        return looked_at(rank, world, *case), looked_at(rank, world, *case, comm=comm)


PLAIN = [case for case in RESTARTS if "shard" not in case[1]]


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_vectors_in_the_memory_of_the_host(workers: Pool, case: tuple[str, dict[str, Any]]) -> None:
    for usual, staged in workers.run(over_a_wire, 2, case, HOST):
        assert_same(staged, usual)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_bf16_on_the_wire(workers: Pool, case: tuple[str, dict[str, Any]]) -> None:
    """What is shown is off by the share that the wire's rounding has of the way made."""
    for usual, rounded in workers.run(over_a_wire, 2, case, BF16):
        start = usual[0][1]["leave.weight"]
        for step in range(TAU, STEPS + 1, TAU):
            exact, found = (run[step][1]["leave.weight"] for run in (usual, rounded))
            assert (found - exact).norm() < 0.02 * (exact - start).norm()


@replicas(2)
def test_tau_auto(rank: int) -> None:
    """The first round lasts `START` steps, each of which moves replica i by −(i + 1)."""
    model, optimizer = problem.build_drift([5, 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    method = co2.CO2(co2.CO2.Config(tau=AUTO))
    method.prepare(model, optimizer, co2.Mesh.world())
    starts = [weight.detach().clone() for weight in model.parameters()]
    for _ in range(START):
        for weight in model.parameters():
            weight.grad = torch.full_like(weight, rank + 1)
        method.step()
    assert_same([weight.detach() for weight in model.parameters()], starts)
    with method.consensus():
        for weight, start in zip(model.parameters(), starts, strict=True):
            torch.testing.assert_close(weight.detach(), start - 1.5 * START)
    method.flush()


def out_of_reach(rank: int, world: int, name: str) -> tuple[list, list]:
    """As seen under a group that takes the tensors where they lie, and under one that does not."""
    usual = looked_at(rank, world, name, SETTINGS[name])
    with (
        patch.object(collectives, "carries", lambda group, tensor: False),
        patch.object(torch.Tensor, "cpu", lambda tensor: tensor.clone()),
    ):
        return usual, looked_at(rank, world, name, SETTINGS[name])


@pytest.mark.parametrize("name", ["local_sgd"])
def test_a_group_that_cannot_reach_a_gpu_gets_a_copy(workers: Pool, name: str) -> None:
    """And what it makes of the copy comes back: in the broadcast at the start, and in the mean."""
    for usual, copied in workers.run(out_of_reach, 2, name):
        assert_same(copied, usual)


@replicas(2)
def test_gloo_is_for_the_memory_of_the_host() -> None:
    group = co2.Mesh.world().new_group_across_replicas()
    gpu, host = SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)
    assert not collectives.carries(group, gpu)  # type: ignore[arg-type]
    assert collectives.carries(group, host)  # type: ignore[arg-type]
    assert collectives.carries(None, gpu)  # type: ignore[arg-type]
    with patch("torch.distributed.get_backend_config", lambda group: "cpu:gloo,cuda:nccl"):
        assert collectives.carries(group, gpu)  # type: ignore[arg-type]
    torch.distributed.barrier(group)  # who leaves early breaks what the other still connects


@replicas(2)
@pytest.mark.parametrize("name", ["co2", "allreduce"])
def test_an_error_inside_is_no_harm(rank: int, name: str) -> None:
    session = Session(rank, name, SETTINGS[name])
    for _ in range(TAU + 1):
        session.step()
    before = session.snapshot()
    with pytest.raises(Raised), session.method.consensus():
        raise Raised
    assert_same(session.snapshot(), before)


@replicas(2)
@pytest.mark.parametrize("name", OVERLAPPED)
def test_amid_a_round_consensus_does_not_wait_and_flush_does(rank: int, name: str) -> None:
    session = Session(rank, name, SETTINGS[name])
    with SlowNetwork(lambda n: TAU) as network:
        for _ in range(2 * TAU + 1):
            session.step()
        assert not network.works[-1].is_completed()
        with session.method.consensus():
            pass
        assert not network.works[-1].is_completed(), "the consensus waited for it"
        before = session.snapshot()
        session.method.flush()
        assert all(work.is_completed() for work in network.works)
        assert_same(session.snapshot(), before)
        session.method.flush()


@replicas(2)
@pytest.mark.parametrize("name", [name for name in OVERLAPPED if "fragments" not in SETTINGS[name]])
def test_what_is_waited_for_stays_due(rank: int, name: str) -> None:
    """Right after a round's end, and once more after training has ended."""
    session = Session(rank, name, SETTINGS[name])
    with SlowNetwork(lambda n: TAU) as network:
        for _ in range(2 * TAU):
            session.step()
        with session.method.consensus():
            shown = session.snapshot()
        assert network.works[-1].is_completed() == (name in WAITS), "it waits where it has to"
        launched = len(network.works)
        assert session.method.state_dict()["means"][0]["in_flight"], "the result is still due"
        session.method.flush()
        with session.method.consensus():
            assert_same(session.snapshot(), shown)
        assert len(network.works) == launched, "nothing was started for it"


@replicas(2)
def test_the_last_weights_are_there_after_flush(rank: int) -> None:
    session = Session(rank, "co2", SHARDED)
    for _ in range(2 * TAU):
        session.step()
    with session.method.consensus():
        shown = session.snapshot()
    assert session.method.mean.in_flight
    session.method.flush()
    with session.method.consensus():
        assert_same(session.snapshot(), shown)
