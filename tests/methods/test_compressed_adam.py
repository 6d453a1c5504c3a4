"""What 1-bit Adam and 0/1 Adam promise beyond what every method does."""

from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import co2
from co2.comm.compressed_mean import CompressedMean
from co2.config import CommConfig, CommDevice, Precision
from co2.errors import ConfigError
from co2.methods.onebit_adam import OneBitAdam
from co2.methods.shared.compressed_adam import Compress
from co2.methods.zero_one_adam import ZeroOneAdam, interval
from tests.methods import problem
from tests.methods.driver import ADAM, SETTINGS, Session, assert_same, trajectory
from tests.methods.test_resume import finish, load, save
from tests.reference.zero_one_adam import exchanges, refreshes
from tests.workers import Pool, replicas

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


def take_exact_means(means: list[Tensor]) -> Any:
    """Inside, nothing is compressed or masked, and `means` gets what would have been."""

    def exact(self: CompressedMean, vector: Tensor) -> None:
        dist.all_reduce(vector, op=dist.ReduceOp.AVG, group=self._mean.group)
        means.append(vector.clone())

    return patch.object(CompressedMean, "mean_", exact)


def without_decay(rank: int, settings: dict[str, Any]) -> tuple[Session, ZeroOneAdam]:
    session = Session(rank, "zero_one_adam", settings)
    assert isinstance(session.method, ZeroOneAdam)
    for group in session.optimizer.param_groups:
        group["weight_decay"] = 0.0
    return session, session.method


@replicas(3)
@pytest.mark.parametrize("compress", Compress)
def test_uncompressed_replicas_move_by_the_mean(rank: int, world: int, compress: Compress) -> None:
    """Every replica equals x_{t'} - u_mean / (sqrt v + eps) after an exchange."""
    settings = {**SETTINGS["zero_one_adam"], "compress": compress}
    session, method = without_decay(rank, settings)
    eps = session.optimizer.param_groups[0]["eps"]
    means: list[Tensor] = []
    start, apart = method.flat.copy(), 0
    with take_exact_means(means):
        for step in range(40):
            exchanged = len(means)
            session.step()
            now = method.flat.copy()
            if len(means) > exchanged:
                # Units of √v + ε, or of the momentum; an element without gradient has neither.
                unit = method.v.sqrt() + eps if compress is Compress.momentum else 1
                expected = torch.where(method.v > 0, start - means[-1] / unit, start)
                torch.testing.assert_close(now, expected, rtol=1e-12, atol=1e-12)
            if method.next_sync == step + method.interval:
                everybody = [torch.empty_like(now) for _ in range(world)]
                dist.all_gather(everybody, now)
                assert_same(everybody, [everybody[0]] * world)
                start = now
            else:
                apart += 1
    assert len(means) > 5 and apart > 20


@replicas(3)
def test_refreshed_and_exchanged_at_every_step_it_is_adam(rank: int) -> None:
    """Adam with averaged gradients, its m without bias correction, by hand."""
    session, method = without_decay(rank, {"freeze_step": 1000, "kappa": 1000, "max_interval": 1})
    (beta1, beta2), eps = (session.optimizer.param_groups[0][key] for key in ("betas", "eps"))
    x, means = method.flat.copy(), list[Tensor]()
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    shadow = Session(rank, "zero_one_adam", {})  # for its gradients, at the same weights
    with take_exact_means(means):
        for step in range(20):
            shadow.net.load_state_dict(session.net.state_dict())
            problem.backward(shadow.net, step, rank)
            assert isinstance(shadow.method, ZeroOneAdam)
            g = torch.empty_like(x)
            shadow.method.flat.gradients(out=g)
            shadow.optimizer.zero_grad()
            dist.all_reduce(g, op=dist.ReduceOp.AVG)
            session.step()
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            gamma = torch.cat(
                [
                    torch.full_like(part, session.optimizer.param_groups[group]["lr"]).flatten()
                    for part, group in zip(method.flat.params, method.flat.group_of, strict=True)
                ]
            )
            x = x - gamma * m / ((v / (1 - beta2 ** (step + 1))).sqrt() + eps)
            torch.testing.assert_close(method.flat.copy(), x, rtol=1e-9, atol=1e-9)
    assert means == []  # each step knows the exact mean of the gradients


def test_intervals_that_the_learning_rate_drives() -> None:
    def found(*shares: float, longest: int = 16) -> list[int]:
        return [interval(longest, share, 0, None) for share in shares]

    assert found(1, 0.51, 0.5, 0.26, 0.25, 0.1, 1 / 16, 1e-9, 0) == [1, 1, 2, 2, 4, 8, 16, 16, 16]
    assert found(1, 0.5, 0.25, 0, longest=3) == [1, 2, 3, 3]
    assert interval(16, 0.25, 7, 3) == 4  # a number of steps counts where there is one

    def rate(step: int) -> float:  # a warm-up, then a share of .9 a step
        return 0.25 * (step + 1) if step < 4 else 0.9 ** (step - 3)

    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=1.0)
    config = ZeroOneAdam.Config(freeze_step=4, max_interval=8)
    method = ZeroOneAdam(config)
    method.prepare(torch.nn.ParameterList([weight]), optimizer, co2.Mesh.world())
    steps = []
    for step in range(60):
        optimizer.param_groups[0]["lr"] = rate(step)
        weight.grad = torch.randn(3)
        due = method.next_sync
        method.step()
        if due == step:
            steps.append(step)
    method.flush()
    assert steps == [t for t in exchanges(4, None, 8, rate) if t < 60]
    assert steps[:6] == [0, 1, 2, 3, 4, 5] and steps[-1] - steps[-2] == 8


def masked(rank: int, world: int, name: str) -> None:
    """The element of a tensor whose gradients are a thousandth of the others' stays where it is
    under compressed updates, and is named."""
    generator = torch.Generator().manual_seed(rank)
    model = torch.nn.Module()
    model.one, model.other = (torch.nn.Parameter(torch.ones(9)) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    method = co2.METHODS[name](co2.METHODS[name].Config(freeze_step=4, mask_below=1e-4))
    method.prepare(model, optimizer, co2.Mesh.world())
    assert isinstance(method, OneBitAdam | ZeroOneAdam)
    notices: list[str] = []
    for step in range(12):
        for weight in model.parameters():
            weight.grad = torch.randn(9, generator=generator)
        model.one.grad[4] *= 1e-3
        method.step()
        notices += method.notices()
        if step == 4:
            after = model.one[4].item()
    assert model.one[4].item() == after and not model.one.eq(after).all()
    assert method.exchange.worker_error[4] == method.m[4] == 0
    [notice] = notices
    assert notice.startswith("variance frozen") and "0 of 18 elements have no gradient" in notice
    assert notice.endswith("1 have a variance below 0.0001 of their tensor's median: one (1)")


@pytest.mark.parametrize("name", ADAM)
def test_what_has_next_to_no_gradient_is_masked(workers: Pool, name: str) -> None:
    workers.run(masked, 2, name)


def sent(rank: int, world: int, name: str, settings: dict[str, Any]) -> tuple[list[float], int]:
    """Bytes in every step, an exact mean having 10^6 and a 1-bit mean 1; and the last interval."""
    session = Session(rank, name, settings)
    method = session.method
    assert isinstance(method, OneBitAdam | ZeroOneAdam)
    method.mean.bytes_per_mean = lambda: 1_000_000  # type: ignore[method-assign]
    method.exchange.bytes_per_mean = lambda: 1  # type: ignore[method-assign]
    totals = [0.0]
    for _ in range(40):
        session.step()
        totals.append(method.stats().bytes_sent)
    method.flush()
    stats = method.stats()
    assert stats.comm_s > 0 and stats.exposed_s > 0
    assert stats.own["rounds"] == sum(after > before for before, after in pairwise(totals))
    return [after - before for before, after in pairwise(totals)], int(stats.own.get("interval", 1))


def test_schedule_of_onebit_adam(workers: Pool) -> None:
    for found, lag in workers.run(sent, 2, "onebit_adam", {"freeze_step": 7}):
        assert found == [1e6] * 7 + [1] * 33
        assert lag == 1


@pytest.mark.parametrize("kappa", [1, 2, 3])
def test_schedule_of_zero_one_adam(workers: Pool, kappa: int) -> None:
    rest = {"double_every": 3, "max_interval": 8}
    due_v, due_u = refreshes(20, kappa), exchanges(20, **rest)
    expected = [1e6 if t in due_v else float(t in due_u) for t in range(40)]
    settings = {"freeze_step": 20, "kappa": kappa, **rest}
    for found, lag in workers.run(sent, 2, "zero_one_adam", settings):
        assert found == expected
        assert lag == 8


def test_known_schedules() -> None:
    assert refreshes(20, 2) == [0, 1, 2, 4, 6, 10, 14]
    assert refreshes(9, 1) == [0, 1, 3, 7]
    assert [t for t in exchanges(9, 1, 4) if t < 24] == [*range(10), 10, 12, 16, 20]
    assert [t for t in exchanges(4, 2, 4) if t < 24] == [0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 20]


RARE = {"freeze_step": 9, "kappa": 1, "double_every": 1, "max_interval": 4}
"""Refreshes at 0, 1, 3 and 7; exchanges at every other step to 10, and at 12."""


@replicas(3)
@pytest.mark.slow  # tests/methods/test_resume.py has both, on two replicas
@pytest.mark.parametrize(
    ("name", "settings"),
    [*((name, SETTINGS[name]) for name in ADAM), ("zero_one_adam", RARE)],
    ids=["onebit_adam", "zero_one_adam", "rare refreshes"],
)
def test_resume_at_every_step(rank: int, name: str, settings: dict[str, Any]) -> None:
    expected = finish(Session(rank, name, settings), STEPS)
    first = Session(rank, name, settings)
    for _ in range(1, STEPS):
        first.step()
        again = Session(rank, name, settings, seed=rank + 50)
        load(again, save(first))
        assert_same(finish(again, STEPS), expected)


def unseen(rank: int, world: int, name: str) -> None:
    """One weight never has a gradient; the rows of another are seen one by one, after the freeze
    also one that was not before."""
    generator = torch.Generator().manual_seed(rank)
    weights = [torch.nn.Parameter(torch.ones(size)) for size in ((5,), (3,), (4, 2))]
    optimizer = torch.optim.AdamW(weights, lr=0.1, weight_decay=0.0)
    method = co2.METHODS[name](co2.METHODS[name].Config(**SETTINGS[name]))
    method.prepare(torch.nn.ParameterList(weights), optimizer, co2.Mesh.world())
    assert isinstance(method, OneBitAdam | ZeroOneAdam)
    for step in range(STEPS):
        weights[0].grad = torch.randn(5, generator=generator)
        weights[0].grad[4] *= 1e-6  # seen, but as good as unseen beside the others
        weights[2].grad = torch.zeros(4, 2)
        row = step % 2 if step < 4 else step % 3
        weights[2].grad[row] = torch.randn(2, generator=generator)
        method.step()
    assert torch.equal(weights[1], torch.ones(3))
    assert torch.equal(weights[2][2:], torch.ones(2, 2))
    assert not weights[0].eq(1).any() and not weights[2][:2].eq(1).any()
    for weight in weights:
        assert weight.sub(1).abs().max() < 3  # no step is much longer than Adam's
    still = method.v == 0
    assert still.sum() == 3 + 4
    assert not method.exchange.worker_error[still].any()
    own = method.exchange._own
    assert not method.exchange.server_error[still[own]].any()
    if name == "onebit_adam":
        assert not method.m[still].any()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ADAM)
def test_what_has_no_gradient_until_the_freeze_stays(workers: Pool, name: str, world: int) -> None:
    """Its v is 0: a sign divided by epsilon alone would carry it away."""
    workers.run(unseen, world, name)


@replicas(2)
def test_a_learning_rate_of_0_leaves_replicas_alike(rank: int, world: int) -> None:
    """A learning rate of 0 in some steps, as of a warm-up that begins there."""
    session = Session(rank, "zero_one_adam", {**SETTINGS["zero_one_adam"], "kappa": 1})
    method = session.method
    assert isinstance(method, ZeroOneAdam)
    rates = problem.set_lr

    def paused(optimizer: torch.optim.Optimizer, step: int) -> None:
        rates(optimizer, step)
        for group in optimizer.param_groups[:2]:
            group["lr"] *= step not in (0, 2, 6)

    with patch.object(problem, "set_lr", paused):
        for step in range(STEPS):
            session.step()
            if method.next_sync == step + method.interval:
                for vector in (method.m, method.flat.copy()):
                    assert vector.isfinite().all()
                    everybody = [torch.empty_like(vector) for _ in range(world)]
                    dist.all_gather(everybody, vector)
                    assert_same(everybody, [everybody[0]] * world)


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
