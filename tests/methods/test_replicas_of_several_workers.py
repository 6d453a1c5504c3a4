"""Replicas of two workers train as replicas of one do, on the same samples.

The problem has sizes that two workers cannot share evenly, and one that leaves a worker with
nothing. No batch norm, so that two workers with half a batch each train as one with the whole."""

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import co2
from co2.comm.collectives import local
from co2.config import CommConfig, MeshConfig, Precision, Strategy
from co2.methods import METHODS
from co2.methods.base import MethodStats
from co2.train import state_file, within_replica
from co2.train.expert_parallel import clip
from co2.train.meters import ledger
from co2.train.state_file import REPLICA, HostCopy, split
from co2.train.within_replica import (
    Replica,
    ReplicaState,
    accumulating,
    blocks,
    checkpoint_activations,
    gathered_as,
    local_optimizer,
    own_buffers,
    whole_weights,
)
from tasks.moe.experts import Experts
from tests.engine.test_memory import storages
from tests.grids import grid
from tests.methods import driver
from tests.methods.driver import assert_same
from tests.workers import everybody, replicas

DENSE = tuple(strategy for strategy in Strategy if strategy is not Strategy.ep)
"""Strategies of models without experts."""
SAMPLES = 4
"""Of one worker in one step."""
RATES = (0.3, 0.6, 0.9, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, own) for name, own in driver.SETTINGS.items() if name not in driver.ADAM},
    "co2 by norm": ("co2", {**driver.SETTINGS["co2"], "clip": 0.1, "clip_mode": "norm"}),
    "co2 by element": (
        "co2",
        {"tau": 3, "outer_momentum": 0.5, "gap_penalty": "gap_aware_elementwise"},
    ),
    "co2 in parts": driver.SHARDED[0],
    "sparta of all": ("sparta", {"share": 1.0, "delay": 1}),
    "demo": ("demo", {"top_k": 4, "block": 4}),
    "co2_keep with moments": ("co2_keep", {"tau": 3, "delay": 1, "average_moments": True}),
}
"""Adams of their own refuse all but ddp."""
NEED_ADAM = ("desloc", "mt_dao", "co2_keep with moments")

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda groups: SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "plain": lambda groups: SGD(groups, lr=0.1),
    "adamw": lambda groups: AdamW(groups, lr=0.02, weight_decay=0.1),
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.dropout = nn.Dropout(0.0)
        self.register_buffer("drift", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.drift.mul_(0.5).add_(x.mean())
        return x + torch.tanh(self.dropout(self.linear(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 7, experts: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(5, width)
        self.experts = Experts(width, 5, 4, 2, None, True, (0.5, 0.5), 0.0) if experts else None
        self.h = nn.ModuleList(Block(width) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1) + torch.randn(1) / 10)  # one worker has none of it
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.leave = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x)) + self.frozen
        for block in self.h:
            x = block(x)
        x = x if self.experts is None else x + self.experts(x)
        return self.scale * self.leave(x)


class Tiny(nn.Module):
    """Of which one worker of two has nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.h, self.leave = nn.ModuleList(), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(x)


class Worker:
    """One worker of a replica under a method. Ranks differ in initial weights and in data."""

    def __init__(
        self,
        rank: int,
        kind: str,
        strategy: Strategy,
        size: int,
        optimizer: str = "sgd",
        dtype: torch.dtype = torch.float64,
        accumulate: int = 1,
        recompute: bool = False,
        clip_norm: float | None = None,
        dropout: float = 0.0,
        width: int = 7,
        tiny: bool = False,
        experts: bool = False,
    ) -> None:
        name, settings = SETTINGS[kind]
        self.mesh = co2.Mesh.world(size)
        self.accumulate, self.clip_norm, self.steps = accumulate, clip_norm, 0
        torch.manual_seed(rank)
        self.net: Any = (Tiny() if tiny else Net(width, experts)).to(dtype)
        for block in self.net.h:
            block.dropout.p = dropout
        if recompute:
            checkpoint_activations(self.net)
        self.method = METHODS[name](METHODS[name].Config(**settings), CommConfig())
        self.replica = Replica(
            MeshConfig(size, strategy), self.mesh, self.method.averages_gradients
        )
        self.replica.shard(self.net)
        weights = dict(self.net.named_parameters())
        groups = [
            {"params": [p for n, p in weights.items() if n.startswith("h.")]},
            {"params": [p for n, p in weights.items() if not n.startswith("h.")]},
        ]
        self.optimizer = self.replica.optimizer(OPTIMIZERS[optimizer](groups))
        prepared = self.method.prepare(
            self.net, self.optimizer, self.mesh, schedule=lambda step: max(self.rates(step))
        )
        self.model = self.replica.wrap(prepared, CommConfig())

    def rates(self, step: int) -> tuple[float, float]:
        peak = 0.1 if "nesterov" in self.optimizer.param_groups[0] else 0.02
        factor = RATES[min(step, len(RATES) - 1)]
        return peak * factor, 0.3 * peak

    def step(self, halves: int = 1, zero_grad: bool = True) -> float:
        """Train on this worker's samples, or on those that `halves` workers would have had."""
        for group, rate in zip(self.optimizer.param_groups, self.rates(self.steps), strict=True):
            group["lr"] = rate
        first = self.mesh.worker * halves
        data = [samples(self.steps, first + part) for part in range(halves)]
        x, y = (torch.cat(parts).to(self.net.leave.bias.dtype) for parts in zip(*data, strict=True))
        loss = 0.0
        pieces = zip(x.chunk(self.accumulate), y.chunk(self.accumulate), strict=True)
        for micro, (inputs, targets) in enumerate(pieces):
            with accumulating(self.model, last=micro == self.accumulate - 1):
                part = (self.model(inputs) - targets).square().mean() / self.accumulate
                part.backward()
            loss += part.item()
        if self.clip_norm is not None:
            clip(self.net, self.clip_norm, self.replica.experts)
        self.method.step()
        if zero_grad:
            self.optimizer.zero_grad()
        self.steps += 1
        return loss

    def whole(self) -> dict[str, Tensor]:
        """Parameters of the replica, copied."""
        buffers = dict(self.net.named_buffers())
        weights = whole_weights(self.net, self.replica.experts)
        return {n: v.detach().clone() for n, v in weights.items() if n not in buffers}


def samples(step: int, worker: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + worker)
    x = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    return x, torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)


STEPS = 9
"""Three rounds: what the first sends is applied in the second and penalized in the third."""
WHOLE = ("sparseloco", "sparta", "demo")
"""Kinds that need whole tensors on every worker, or draw other elements of parts."""
ALL_STRATEGIES = ("allreduce", "streaming_diloco", "co2", "co2 in parts")
"""Kinds that hold flat vectors, buckets or fragments each in a way of its own."""
Whole = dict[str, Tensor]
History = tuple[list[Whole], list[MethodStats], list[Whole]]


def trajectory(
    rank: int, kind: str, strategy: Strategy, size: int, halves: int, options: dict
) -> History:
    """Weights after every step, the method's figures, and three consensuses, of which the middle
    one is at a round's end."""
    worker = Worker(rank, kind, strategy, size, **options)
    history, figures, consensuses = [worker.whole()], [], []
    for step in range(STEPS):
        worker.step(halves)
        history.append(worker.whole())
        figures.append(worker.method.stats())
        if step in (4, 5, 7):
            x = torch.ones(1, 5, dtype=torch.float64)
            with worker.method.consensus(), torch.no_grad():
                buffers = {name: b.clone() for name, b in worker.net.named_buffers()}
                consensuses.append({**worker.whole(), **buffers, "out": worker.net(x).detach()})
    worker.method.flush()
    return history, figures, consensuses


def trajectories(
    rank: int, world: int, kind: str, strategies: list[Strategy], size: int, halves: int, options
) -> list[History]:
    return [trajectory(rank, kind, s, size, halves, options) for s in strategies]


def assert_close(one: Whole, other: Whole, where: str) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-9, atol=1e-11, msg=where + name)


def compare(
    workers, kind: str, strategies: Iterable[Strategy] = DENSE, replicas: int = 2, **options
):
    """Strategies against replicas of one worker with twice the samples."""
    strategies = list(strategies)
    plain = {"recompute": False, "accumulate": 1}
    expected = workers.run(trajectories, replicas, kind, [Strategy.ddp], 1, 2, {**options, **plain})
    found = workers.run(trajectories, 2 * replicas, kind, strategies, 2, 1, options)
    moved = expected[0][0][0]
    assert not torch.equal(moved[0]["leave.weight"], moved[-1]["leave.weight"])
    for rank, ways in enumerate(found):
        ((weights, figures, consensuses),) = expected[rank // 2]
        for strategy, (own, own_stats, seen) in zip(strategies, ways, strict=True):
            for step, (a, b) in enumerate(zip(own, weights, strict=True)):
                assert_close(a, b, f"{strategy.name}, rank {rank}, after step {step}: ")
            for a, b in zip(seen, consensuses, strict=True):
                if "accumulate" in options:  # whose buffers see two batches a step
                    a, b = ({n: v for n, v in c.items() if "drift" not in n} for c in (a, b))
                assert_close(a, b, f"{strategy.name}, rank {rank}, consensus: ")
            for a, b in zip(own_stats, figures, strict=True):
                assert a.own == pytest.approx(b.own, rel=1e-9)
    return expected, found


def strategies_of(kind: str) -> list[Strategy]:
    """Kinds that share one way take turns: one strategy with whole weights, one with parts."""
    if kind in ALL_STRATEGIES:
        return list(DENSE)
    if kind in (*NEED_ADAM, "acco"):  # refuse zero1
        return [Strategy.ddp, Strategy.zero2, Strategy.zero3]
    if list(SETTINGS).index(kind) % 2:
        return [Strategy.ddp, Strategy.zero3]
    return [Strategy.zero1, Strategy.zero2]


@pytest.mark.parametrize("kind", [kind for kind in SETTINGS if kind not in WHOLE])
def test_two_replicas_of_two_workers(workers, kind):
    strategies = strategies_of(kind)
    optimizer = "adamw" if kind in NEED_ADAM else "sgd"
    expected, found = compare(workers, kind, strategies, optimizer=optimizer)
    ((_, figures, _),) = expected[0]
    if kind == "co2":
        assert any(0 < line.own["clipped"] < 1 for line in figures) and figures[-1].own["gap"] > 1
    if kind == "co2 by norm":
        assert any(line.own["clipped"] == 1 for line in figures)
    cut = {Strategy.zero2, Strategy.zero3} & set(strategies)
    assert cut
    for strategy in cut if kind != "allreduce" else ():
        sent = [ways[strategies.index(strategy)][1][-1].bytes_sent for ways in found]
        whole = figures[-1].bytes_sent
        assert sent[0] == sent[2] and sent[1] == sent[3], "counterparts send alike"
        assert sent[0] + sent[1] == pytest.approx(whole, rel=0.02)
        assert max(sent) < 0.6 * whole


@pytest.mark.parametrize("kind", [kind for kind in SETTINGS if kind not in WHOLE])
def test_workers_of_a_replica_count_as_one(workers, kind):
    compare(workers, kind, [Strategy.ddp], optimizer="adamw" if kind in NEED_ADAM else "sgd")


IN_PARTS: dict[str, Any] = {"optimizer": "adamw", "accumulate": 2}
CLIPPED: dict[str, Any] = {"optimizer": "adamw", "recompute": True, "clip_norm": 0.5}
CUT, EXPERTS = (Strategy.zero2, Strategy.zero3), (Strategy.ep,)
OTHERS: list[tuple[str, tuple[Strategy, ...], dict[str, Any]]] = [
    ("sparseloco", (Strategy.ddp, Strategy.zero1), {}),
    ("sparta", (Strategy.ddp, Strategy.zero1), {}),
    ("demo", (Strategy.ddp,), {"optimizer": "plain"}),  # refuses zero1
    ("co2", DENSE, {"replicas": 1}),
    ("co2", EXPERTS, {"replicas": 1, "experts": True}),
    *(("co2", EXPERTS, {"experts": True, **more}) for more in (IN_PARTS, CLIPPED)),
    ("co2", (Strategy.ddp, *CUT), IN_PARTS),
    ("co2", (Strategy.zero1, *CUT), CLIPPED),
    *((kind, EXPERTS, {"experts": True}) for kind in ("allreduce", "co2 by norm")),
    ("co2_keep with moments", EXPERTS, {"experts": True, "optimizer": "adamw"}),
    # A worker may hold nothing at all.
    ("streaming_diloco", CUT, {"tiny": True}),
    ("co2 in parts", CUT, {"tiny": True}),
]


@pytest.mark.parametrize(("kind", "strategies", "options"), OTHERS, ids=str)
def test_trains_as_replicas_of_one_worker(workers, kind, strategies, options):
    compare(workers, kind, strategies, **options)


@replicas(4)
def test_gradients_of_experts_travel_between_counterparts(rank: int) -> None:
    """Those of the others in a ring of four, half of the experts' in one of two."""
    worker = Worker(rank, "allreduce", Strategy.ep, 2, experts=True)
    worker.step()
    sizes = {name: p.numel() * 8 for name, p in worker.net.named_parameters() if p.requires_grad}
    experts = sum(sizes[name] for name in worker.replica.experts.names)
    dense = sum(sizes.values()) - experts
    assert worker.method.bytes_per_step() == 3 * dense // 2 + experts
    assert worker.method.stats().comm_s > 0


def test_a_weight_of_two_names_is_no_buffer() -> None:
    module = torch.nn.Module()
    module.first = torch.nn.Linear(2, 2, bias=False)
    module.second = torch.nn.Linear(2, 2, bias=False)
    module.second.weight = module.first.weight
    module.register_buffer("mean", torch.ones(1))
    assert own_buffers(module).keys() == {"mean"}


@replicas(4)
def test_a_worker_may_hold_nothing_of_a_weight(rank: int) -> None:
    worker = Worker(rank, "co2", Strategy.zero3, 2)
    worker.step()
    held = {name: local(p.detach()).numel() for name, p in worker.net.named_parameters()}
    assert held["scale"] == (1, 0, 1, 0)[rank]
    assert held["leave.bias"] == (2, 1, 2, 1)[rank]
    first, second, *_ = everybody(worker.method.flat.numel)
    assert first > second > 0


@replicas(4)
@pytest.mark.parametrize("strategy", Strategy, ids=lambda strategy: strategy.name)
@pytest.mark.parametrize("optimizer", grid(["plain", "sgd", "adamw"], ("adamw",).__contains__))
def test_a_replica_is_saved_and_read(
    rank: int, tmp_path: Path, strategy: Strategy, optimizer: str
) -> None:
    """Weights and inner state go into one replica's files, and into another one of its kind."""
    experts = strategy is Strategy.ep
    saved = Worker(rank, "co2", strategy, 2, optimizer, experts=experts)
    for _ in range(2):
        saved.step()
    path = tmp_path / f"replica_{saved.mesh.replica}"
    path.mkdir(exist_ok=True)
    state = ReplicaState(saved.net, saved.optimizer, saved.replica).state()
    own = split({REPLICA: state, "model": own_buffers(saved.net)}, saved.mesh.rank_in_replica)
    state_file.write(path / f"{rank}.safetensors", own, HostCopy().take(own.tensors))
    dist.barrier()
    others = sorted(path.iterdir())
    found = state_file.read([others[saved.mesh.rank_in_replica]], [[one] for one in others])
    read = Worker(rank + 7, "co2", strategy, 2, optimizer, experts=experts)
    ReplicaState(read.net, read.optimizer, read.replica).load(found[REPLICA])
    assert_same(held(read), held(saved))
    assert len(held(saved)[1]) > 0 or optimizer == "plain"
    assert_same(found["model"], dict(saved.net.named_buffers()))
    # PyTorch's own tool sees the whole replica, whoever has saved what of it.
    weights = saved.whole()
    model = {"model": {name: torch.zeros_like(value) for name, value in weights.items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no group
        dcp.load(model, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
    assert_same(model["model"], weights)


def held(worker: Worker) -> tuple[Whole, dict]:
    """What a worker holds of its weights, and of its inner state."""
    weights = {name: local(p.detach()) for name, p in worker.net.named_parameters()}
    inner = local_optimizer(worker.optimizer).state_dict()["state"]
    fields = {
        number: {key: local(value) for key, value in state.items()}
        for number, state in inner.items()
    }
    return weights, fields


@replicas(4)
@pytest.mark.parametrize(
    "strategy",
    grid(DENSE, (Strategy.zero1, Strategy.zero3).__contains__),
    ids=lambda strategy: strategy.name,
)
@pytest.mark.parametrize("kind", grid(["allreduce", "co2", "co2 in parts"], "co2".__ne__))
def test_the_ledger_counts_what_is_held(rank: int, kind: str, strategy: Strategy) -> None:
    """In all storages that came with a worker."""
    before = storages()
    worker = Worker(rank, kind, strategy, 2, "adamw", torch.float32, width=257)
    for _ in range(4):
        worker.step(zero_grad=False)
    worker.method.state_dict()  # brings in what is in flight
    now = storages()
    worker.method.flush()
    held = sum(one.nbytes() for at, one in now.items() if at not in before)
    found = ledger(worker.net, worker.optimizer, worker.method)
    assert sum(dataclasses.asdict(found).values()) == pytest.approx(held, rel=0.03)
    whole = 4 * sum(p.numel() for p in Net(257).parameters())
    cut = strategy in (Strategy.zero2, Strategy.zero3)
    assert found.parameter_bytes == pytest.approx(whole / (2 if cut else 1), rel=0.02)
    assert found.gradient_bytes == pytest.approx(found.parameter_bytes, rel=0.02)
    share = 1 if strategy is Strategy.ddp else 2
    assert found.inner_state_bytes == pytest.approx(2 * whole / share, rel=0.1)
    copies = {"allreduce": 0, "co2": 3, "co2 in parts": 2}[kind]
    assert found.extra_bytes == pytest.approx(copies * found.parameter_bytes, rel=0.02)


@replicas(4)
def test_who_is_where(rank: int) -> None:
    mesh = co2.Mesh.world(2)
    place = (mesh.replica, mesh.num_replicas, mesh.rank_in_replica, mesh.worker, mesh.num_workers)
    assert place == (rank // 2, 2, rank % 2, rank, 4)
    made, original = [], dist.new_group

    def new_group(ranks: list[int], *arguments: Any, **others: Any) -> Any:
        made.append(len(ranks))
        return original(ranks, *arguments, **others)

    with patch.object(dist, "new_group", new_group):
        groups = [
            mesh.new_group_across_replicas(),
            mesh.new_group_within_replica(),
            mesh.new_group_of_workers(),
        ]
    counterparts, replica = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
    assert made == [2, 2, 4], "a worker makes its own groups only"
    ranks = [dist.get_process_group_ranks(group) for group in groups]
    assert ranks == [counterparts, replica, [0, 1, 2, 3]]


def test_blocks_are_the_outermost_of_lists_and_sequences():
    net = Net()
    assert blocks(net) == list(net.h)
    stages = nn.Sequential(nn.Sequential(Block(3), Block(3)), nn.ReLU(), Block(3))
    assert blocks(stages) == [stages[0], stages[2]]
    lists = nn.ModuleList([nn.ModuleList([Block(3)]), Block(3)])
    assert blocks(lists) == [lists[0][0], lists[1]]
    net.h[0].linear.weight = net.h[1].linear.weight
    assert blocks(net) == [], "each would be cut without the other"


@replicas(2)
def test_a_single_number_is_refused() -> None:
    net = Net()
    net.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(co2.ConfigError, match=r"^mesh.strategy=zero3: cannot cut scale, .*zero1$"):
        Replica(MeshConfig(2, Strategy.zero3), co2.Mesh.world(2), False).shard(net)


@replicas(4)
def test_gradients_that_nobody_averages_are_refused() -> None:
    """A loop of one's own has sharded each replica alone, as other methods want it."""
    mesh, net = co2.Mesh.world(2), Net()
    Replica(MeshConfig(2, Strategy.zero3), mesh, across=False).shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(co2.ConfigError, match=r"^model=sharded over 2 of 4 workers: nobody aver"):
        co2.AllReduce().prepare(net, optimizer, mesh)


@replicas(2)
@pytest.mark.parametrize("strategy", [Strategy.zero2, Strategy.zero3])
def test_bf16_weights_travel_as_autocast_casts_them(strategy: Strategy) -> None:
    """So a replica of two, both with the same samples, finds what one worker finds."""
    torch.manual_seed(0)
    alone, net = Net(8), Net(8)
    for each in (alone, net):
        for block in each.h:
            block.norm = nn.Identity()  # a CPU's autocast leaves what it takes as it is
    net.load_state_dict(alone.state_dict())
    as_on_gpu = partial(gathered_as, device=torch.device("cuda"))
    with patch.object(within_replica, "gathered_as", lambda block, kind, _: as_on_gpu(block, kind)):
        Replica(MeshConfig(2, strategy), co2.Mesh.world(2), False).shard(net, Precision.bf16)
    seen: set[torch.dtype] = set()
    net.h[1].linear.register_forward_pre_hook(lambda module, _: seen.add(module.weight.dtype))
    x = torch.randn(6, 5)
    gradients = []
    for each in (net, alone):
        with torch.autocast("cpu", torch.bfloat16):
            loss = each(x).float().square().mean()
        loss.backward()
        gradients.append([p.grad for p in each.parameters() if p.requires_grad])
    cut, whole = gradients
    assert all(local(grad).dtype is torch.float32 for grad in cut)
    assert seen == {torch.bfloat16}
    torch.testing.assert_close([grad.full_tensor() for grad in cut], whole, rtol=1e-2, atol=1e-5)


def test_what_is_gathered_in_bf16():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    for block, precision, device, dtype in (
        (Block(3), Precision.bf16, gpu, torch.bfloat16),
        (Block(3), Precision.bf16, cpu, None),
        (Block(3), Precision.fp32, gpu, None),
        (nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)), Precision.bf16, gpu, None),
    ):
        assert gathered_as(block, precision, device).param_dtype is dtype


@replicas(4)
def test_batch_norm_is_synchronized_within_a_replica(rank: int) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm2d(3)))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    weights = list(net.parameters())
    config = MeshConfig(2, sync_batch_norm=True)
    Replica(config, co2.Mesh.world(2), False).synchronize_batch_norm(net)
    after = net.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(a is b for a, b in zip(weights, net.parameters(), strict=True))
    norms = [part for part in net.modules() if isinstance(part, nn.SyncBatchNorm)]
    groups = [dist.get_process_group_ranks(norm.process_group) for norm in norms]
    assert groups == [[rank // 2 * 2, rank // 2 * 2 + 1]] * 2
