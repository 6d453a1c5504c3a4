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
from co2.methods.onebit_adam import OneBitAdam
from co2.methods.shared.compressed_adam import Compress
from co2.methods.zero_one_adam import ZeroOneAdam, interval
from tests.methods import problem
from tests.methods.driver import ADAM, SETTINGS, Case, Session, assert_same, trajectory
from tests.reference.zero_one_adam import exchanges, refreshes
from tests.workers import everybody, replicas

STEPS = 15


@replicas(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_until_the_freeze_it_is_allreduce(
    rank: int, world: int, optimizer: str, dtype: torch.dtype
) -> None:
    """Bit for bit: means over two are exact."""
    ddp = trajectory(rank, world, "allreduce", {}, optimizer, dtype)
    for freeze_step in (STEPS - 1, STEPS):
        settings = {"freeze_step": freeze_step}
        own = trajectory(rank, world, "onebit_adam", settings, optimizer, dtype)
        assert_same(own[: freeze_step + 1], ddp[: freeze_step + 1])
        assert torch.equal(own[-1]["scale"], ddp[-1]["scale"]) == (freeze_step == STEPS)


@replicas(4)
def test_replicas_of_onebit_adam_stay_bit_for_bit_alike(rank: int, world: int) -> None:
    names = [name for name, _ in problem.Net().named_parameters() if name != "unknown"]
    history = trajectory(rank, world, "onebit_adam", SETTINGS["onebit_adam"])
    first, *others = everybody([[state[name] for name in names] for state in history])
    assert_same(others, [first] * 3)


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
                assert_same(everybody(now), [now] * world)
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


@replicas(2)
@pytest.mark.parametrize("name", ADAM)
def test_what_has_next_to_no_gradient_is_masked(rank: int, name: str) -> None:
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


def sent(rank: int, case: Case) -> tuple[list[float], int]:
    """Bytes in every step, an exact mean having 10^6 and a 1-bit mean 1; and the last interval."""
    session = Session(rank, *case)
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


@replicas(2)
def test_schedule_of_onebit_adam(rank: int) -> None:
    assert sent(rank, ("onebit_adam", {"freeze_step": 7})) == ([1e6] * 7 + [1] * 33, 1)


@replicas(2)
@pytest.mark.parametrize("kappa", [1, 2, 3])
def test_schedule_of_zero_one_adam(rank: int, kappa: int) -> None:
    rest = {"double_every": 3, "max_interval": 8}
    due_v, due_u = refreshes(20, kappa), exchanges(20, **rest)
    expected = [1e6 if t in due_v else float(t in due_u) for t in range(40)]
    found = sent(rank, ("zero_one_adam", {"freeze_step": 20, "kappa": kappa, **rest}))
    assert found == (expected, 8)


def test_known_schedules() -> None:
    assert refreshes(20, 2) == [0, 1, 2, 4, 6, 10, 14]
    assert refreshes(9, 1) == [0, 1, 3, 7]
    assert [t for t in exchanges(9, 1, 4) if t < 24] == [*range(10), 10, 12, 16, 20]
    assert [t for t in exchanges(4, 2, 4) if t < 24] == [0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 20]


@replicas()
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ADAM)
def test_what_has_no_gradient_until_the_freeze_stays(rank: int, world: int, name: str) -> None:
    """Its v is 0: a sign divided by epsilon alone would carry it away. One weight never has a
    gradient; the rows of another are seen one by one, after the freeze also one that was not
    before."""
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
                    assert_same(everybody(vector), [vector] * world)
