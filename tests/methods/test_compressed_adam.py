"""What 1-bit Adam and 0/1 Adam promise beyond what every method does."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import co2
from co2.config import CommConfig, CommDevice, Precision
from co2.errors import ConfigError
from co2.methods.onebit_adam import OneBitAdam
from co2.methods.zero_one_adam import ZeroOneAdam
from co2.onebit import OneBitMean
from tests.methods import problem
from tests.methods.driver import ADAM, SETTINGS, Session, assert_same, trajectory
from tests.methods.test_resume import finish, load, save
from tests.reference.zero_one_adam import exchanges, refreshes
from tests.workers import Pool

STEPS = 15


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_until_the_freeze_it_is_allreduce(
    workers: Pool, optimizer: str, dtype: torch.dtype
) -> None:
    """Bit for bit: means over two are exact."""
    ddp = workers.run(trajectory, 2, "allreduce", {}, optimizer, dtype)
    own = workers.run(trajectory, 2, "onebit_adam", {"freeze_step": STEPS}, optimizer, dtype)
    assert_same(own, ddp)


@pytest.mark.parametrize("freeze_step", [STEPS - 1, STEPS])
def test_the_freeze_step_is_the_last_exact_one(workers: Pool, freeze_step: int) -> None:
    ddp = workers.run(trajectory, 2, "allreduce", {}, "adamw")
    own = workers.run(trajectory, 2, "onebit_adam", {"freeze_step": freeze_step})
    assert_same(own[0][:STEPS], ddp[0][:STEPS])
    assert torch.equal(own[0][-1]["scale"], ddp[0][-1]["scale"]) == (freeze_step == STEPS)


def test_replicas_of_onebit_adam_stay_bit_for_bit_alike(workers: Pool) -> None:
    first, *others = workers.run(trajectory, 4, "onebit_adam", SETTINGS["onebit_adam"])
    names = [name for name, _ in problem.Net().named_parameters() if name != "unknown"]
    for other in others:
        for state, same in zip(other, first, strict=True):
            assert_same({n: state[n] for n in names}, {n: same[n] for n in names})


class Exact(OneBitMean):
    """Compression switched off; remembers the means."""

    def __init__(self, flat: Tensor) -> None:
        super().__init__(flat.numel(), co2.Mesh.world(), None, flat.dtype)
        self.means: list[Tensor] = []

    def mean_(self, vector: Tensor) -> None:
        dist.all_reduce(vector, op=dist.ReduceOp.AVG)
        self.means.append(vector.clone())


def uncompressed(rank: int, world: int) -> None:
    session = Session(rank, "zero_one_adam", SETTINGS["zero_one_adam"])
    method = session.method
    assert isinstance(method, ZeroOneAdam)
    for group in session.optimizer.param_groups:
        group["weight_decay"] = 0.0
    method.exchange = exact = Exact(method.u)
    start, eps, apart = method.flat.copy(), 1e-8, 0
    for step in range(40):
        session.step()
        now = method.flat.copy()
        if len(exact.means) > 0 and method.next_sync == step + method.interval:
            expected = start - exact.means[-1] / (method.v.sqrt() + eps)
            assert_same(now, expected)
            everybody = [torch.empty_like(now) for _ in range(world)]
            dist.all_gather(everybody, now)
            assert_same(everybody, [everybody[0]] * world)
            start = now
        else:
            apart += 1
    assert apart > 20


def test_uncompressed_replicas_move_by_the_mean(workers: Pool) -> None:
    """Every replica equals p_start - u_mean / (sqrt v + eps) after an exchange."""
    workers.run(uncompressed, 3)


def sent(rank: int, world: int, name: str, settings: dict[str, Any]) -> tuple[list[float], int]:
    """Bytes in every step; those of an exact and of a 1-bit mean are 10^6 apart."""
    session = Session(rank, name, settings)
    method = session.method
    assert isinstance(method, OneBitAdam | ZeroOneAdam)
    method.mean.bytes_per_mean = lambda: 1_000_000  # type: ignore[method-assign]
    method.exchange.bytes_per_mean = lambda: 1  # type: ignore[method-assign]
    totals = [0.0]
    for _ in range(40):
        session.step()
        totals.append(method.stats()["bytes"])
    method.flush()
    stats = method.stats()
    assert stats["comm_s"] > 0 and stats["exposed_s"] > 0
    return [after - before for before, after in pairwise(totals)], method.lag


def test_schedule_of_onebit_adam(workers: Pool) -> None:
    for found, lag in workers.run(sent, 2, "onebit_adam", {"freeze_step": 7}):
        assert found == [1e6] * 7 + [1] * 33
        assert lag == 1


@pytest.mark.parametrize("kappa", [1, 2, 3])
def test_schedule_of_zero_one_adam(workers: Pool, kappa: int) -> None:
    rest = {"double_every": 3, "max_interval": 8}
    due_v, due_u = refreshes(20, kappa), exchanges(20, **rest)
    expected = [1e6 * (t in due_v) + (t in due_u) for t in range(40)]
    settings = {"freeze_step": 20, "kappa": kappa, **rest}
    for found, lag in workers.run(sent, 2, "zero_one_adam", settings):
        assert found == expected
        assert lag == 8


def test_known_schedules() -> None:
    assert refreshes(20, 2) == [0, 1, 2, 4, 6, 10, 14]
    assert [t for t in exchanges(4, 2, 4) if t < 24] == [0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 20]


def stop_after_the_freeze(rank: int, world: int, name: str) -> None:
    expected = finish(Session(rank, name, SETTINGS[name]))
    first = Session(rank, name, SETTINGS[name])
    for step in range(1, STEPS):
        first.step()
        if step >= SETTINGS[name]["freeze_step"]:
            again = Session(rank, name, SETTINGS[name], seed=rank + 50)
            load(again, save(first))
            assert_same(finish(again), expected)


@pytest.mark.parametrize("name", ADAM)
def test_resume_at_every_step_after_the_freeze(workers: Pool, name: str) -> None:
    workers.run(stop_after_the_freeze, 3, name)


@pytest.mark.parametrize("name", ADAM)
def test_what_has_no_gradient_stays(name: str) -> None:
    """Its v is 0: a sign divided by epsilon alone would carry it away."""
    weights = [torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.AdamW(weights, lr=0.1, weight_decay=0.0)
    method = co2.METHODS[name](co2.METHODS[name].Config(**SETTINGS[name]))
    method.prepare(torch.nn.ParameterList(weights), optimizer, co2.Mesh.world())
    for _ in range(STEPS):
        weights[0].grad = torch.randn(5)
        method.step()
    assert torch.equal(weights[1], torch.ones(3))
    assert not torch.equal(weights[0], torch.ones(5))


@pytest.mark.parametrize("name", ADAM)
def test_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^optim.name=SGD: {name} needs adamw$"):
        Session(0, name, SETTINGS[name], "sgd")
    with pytest.raises(ConfigError, match=r"^comm.dtype=bf16: "):
        Session(0, name, SETTINGS[name], comm=CommConfig(dtype=Precision.bf16))
    with pytest.raises(ConfigError, match=r"^comm.device=cpu: .*; use auto$"):
        Session(0, name, SETTINGS[name], comm=CommConfig(device=CommDevice.cpu))
    weight = torch.nn.Parameter(torch.ones(3))
    for wrong in ({"amsgrad": True}, {"maximize": True}):
        optimizer = torch.optim.AdamW([weight], **wrong)
        model = torch.nn.ParameterList([weight])
        with pytest.raises(ConfigError, match="takes no amsgrad"):
            co2.METHODS[name]().prepare(model, optimizer, co2.Mesh.world())
