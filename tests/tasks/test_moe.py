"""Mixtures of experts. The layer: closed forms of the gate, and what is written token by token.
GPT-2 with such layers: sizes, losses and scores. What travels between workers that share experts:
the plan of tiles, the bytes, and tokens in symmetric memory.

What all tasks must do is in test_contract.py.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _symmetric_memory as symm_mem

import tasks.moe.moe as task_module
from co2.config import Strategy
from tasks.moe.experts import EXPERTS as EXPERT_WEIGHTS
from tasks.moe.experts import Exchange, Experts, Kernel, balance_loss, z_loss
from tasks.moe.moe import SHAPES, MoE, Size, mixtures
from tasks.moe.symmetric_exchange import check_numbers, symmetric
from tasks.moe.token_exchange import Traffic, bulk, tiled
from tasks.text.causal import CorpusName
from tests.tasks.build import mesh, moe, num_parameters, refusal
from tests.workers import everybody, replicas

WIDTH, HIDDEN, EXPERTS, TOKENS = 6, 10, 5, 23


def layer(active: int, **options) -> Experts:
    torch.manual_seed(active)
    shape = {"width": WIDTH, "hidden": HIDDEN, "experts": EXPERTS, "stds": (0.5, 0.5)}
    defaults = {"capacity": None, "shared": False, "dropout": 0.0}
    made = Experts(**{**shape, **defaults, **options}, active=active).double()
    for name, weight in made.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(weight)
    return made


def tokens() -> Tensor:
    numbers = torch.Generator().manual_seed(9)
    return torch.randn(TOKENS, WIDTH, generator=numbers, dtype=torch.float64)


def mlp(made: Experts, expert: int, x: Tensor) -> Tensor:
    hidden = F.gelu(x @ made.inner[expert] + made.inner_bias[expert], approximate="tanh")
    return hidden @ made.outer[expert] + made.outer_bias[expert]


def written(made: Experts, x: Tensor, most: float) -> Tensor:
    """One token after another: first choices of all, then second ones, while there is room."""
    shares = (x @ made.gate.weight.T).softmax(-1)
    taken = [0] * EXPERTS
    out = [torch.zeros(WIDTH, dtype=torch.float64) for _ in x]
    ranked = shares.argsort(descending=True)[:, : made.active].tolist()
    for choice in range(made.active):
        for number, token in enumerate(x):
            expert = ranked[number][choice]
            weight = shares[number, expert]
            if made.active > 1:
                weight = weight / shares[number, ranked[number]].sum()
            if taken[expert] < most:
                out[number] = out[number] + weight * mlp(made, expert, token)
            taken[expert] += 1
    return torch.stack(out)


def with_gradients(out: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """What was made of the inputs, and gradients of a loss in which every element differs."""
    return [out.detach(), *torch.autograd.grad((out * (1 + out.detach())).sum(), inputs)]


@pytest.mark.parametrize("active", [1, 2, 3])
@pytest.mark.parametrize("capacity", [None, 0.3, 1.0, 9.0])
def test_equals_what_is_written_token_by_token(active: int, capacity: float | None) -> None:
    """Values and all gradients."""
    made = layer(active, capacity=capacity)
    most = math.inf if capacity is None else math.ceil(capacity * active * TOKENS / EXPERTS)
    found = []
    for act in (made, lambda x: written(made, x, most)):
        x = tokens().requires_grad_()
        found.append(with_gradients(act(x), [x, *made.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
    dropped = made.routing.wanted - made.routing.counts
    assert (dropped > 0).any() == (capacity in (0.3, 1.0))
    assert made.routing.wanted.sum() == active * TOKENS


@pytest.mark.parametrize(("bf16", "capacity"), [(False, 0.6), (True, None)])
def test_compiled_code_computes_the_same_bits(bf16: bool, capacity: float | None) -> None:
    """In one graph: values, losses and all gradients, of experts without tokens too. Under autocast
    AOTAutograd makes the gate's own backward pass in bf16, so that its gradient and the part of it
    in the tokens' are others."""
    made = layer(2, capacity=capacity).float()
    nn.init.zeros_(made.gate.weight)
    nn.init.constant_(made.gate.weight[3], 1)
    nn.init.constant_(made.gate.weight[2], 0.5)
    weights = torch.randn(TOKENS, WIDTH)
    found = []
    for act in (made, torch.compile(made, backend="aot_eager", fullgraph=True)):
        x = tokens().float().abs().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            out = act(x)
        loss = (out * weights).sum() + sum(made.losses)
        inputs = [*(getattr(made, name) for name in EXPERT_WEIGHTS), made.gate.weight, x]
        values = (out, *made.losses, made.routing.counts)
        found.append((*values, *torch.autograd.grad(loss, inputs)))
    assert (found[0][3] == 0).sum() == 3
    same = [torch.equal(one, other) for one, other in zip(*found, strict=True)]
    assert all(same[:-2] if bf16 else same)
    torch.testing.assert_close(*found, rtol=0.1, atol=0.1)


def test_shapes_alone_are_enough() -> None:
    """For what a training takes in memory."""
    made = layer(2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(made(x).sum(), x)
    assert gradient.shape == (TOKENS, WIDTH)


def test_a_shared_expert_sees_every_token() -> None:
    made, x = layer(1, shared=True, capacity=1e-9), tokens()
    nothing_else = made.shared(x)
    routed = made.routing
    out = made(x)
    assert routed is None and made.routing.counts.max() == 1, "room for one token each"
    alone = (out == nothing_else).all(1)
    assert alone.sum() == TOKENS - made.routing.counts.sum()


def test_losses_of_the_gate() -> None:
    """Balance: 1 where all are alike, E where one has all. z: of logits that are all c, the square
    of c + log E."""
    even = torch.full((8, 4), 0.25)
    assert balance_loss(even, torch.full((4,), 4)).item() == pytest.approx(1)
    alone = torch.zeros(8, 4)
    alone[:, 2] = 1
    assert balance_loss(alone, torch.tensor([0, 0, 8, 0])).item() == pytest.approx(4)
    made = layer(1)
    made(tokens())
    assert torch.autograd.grad(made.losses[0], made.gate.weight)[0].any(), "the gate learns of it"
    assert z_loss(torch.full((8, 4), 1.5)).item() == pytest.approx((1.5 + math.log(4)) ** 2)
    line = refusal(lambda: moe(Path("unused"), active=9))
    assert line.startswith("active=9: must not be above the 8 experts of size=smoke")


def test_autocast_leaves_the_gate_in_fp32() -> None:
    made, x = layer(2).float(), tokens().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = made(x)
    assert made.routing.weight.dtype == torch.float32 and out.dtype == x.dtype
    torch.testing.assert_close(out, made(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("capacity", [None, 0.6])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("favourite", [None, 3])
def test_a_grouped_product_is_the_loop(
    capacity: float | None, bf16: bool, favourite: int | None
) -> None:
    """Values and all gradients; also where some experts have nothing to do."""
    found = []
    for kernel in (Kernel.loop, Kernel.grouped):
        made = layer(2, width=8, hidden=16, capacity=capacity, kernel=kernel).float()
        if favourite is not None:
            nn.init.zeros_(made.gate.weight)
            nn.init.constant_(made.gate.weight[favourite], 1)
            nn.init.constant_(made.gate.weight[favourite - 1], 0.5)
        x = F.pad(tokens(), (0, 2)).float()
        x = (x if favourite is None else x.abs()).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            out = made(x)
        found.append(with_gradients(out, [x, *made.parameters()]))
    for one, other in zip(*found, strict=True):
        close = (3e-2 if bf16 else 1e-5) * one.abs().max().item()
        torch.testing.assert_close(one, other, rtol=0, atol=close)
    assert (made.routing.counts == 0).sum() == (0 if favourite is None else 3)


@replicas()
@pytest.mark.parametrize("active", [1, 2])
@pytest.mark.parametrize("capacity", [None, 0.5])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "ways",
    [{"exchange": Exchange.bulk}, {"exchange": Exchange.tiled}, {"tile": 2}],
    ids=["bulk", "whole tiles", "small tiles"],
)
def test_divided_over_workers(
    rank: int, world: int, active: int, capacity: float | None, ways: dict
) -> None:
    """As by one worker with all experts and all tokens: values, losses and gradients."""
    whole, own = (layer(active, experts=4, capacity=capacity, **more) for more in ({}, ways))
    own.divide(dist.group.WORLD)
    results = []
    for made, x, share in (
        (whole, tokens()[:20], world),
        (own, tokens()[:20].chunk(world)[rank].clone(), 1),
    ):
        out = made(x.requires_grad_())
        loss = (out * (1 + out.detach())).sum() + share * sum(made.losses)
        weights = [made.gate.weight, *(getattr(made, name) for name in EXPERT_WEIGHTS)]
        grads = torch.autograd.grad(loss, [x, *weights])
        losses = torch.stack(made.losses).detach()
        results.append((grads[1], losses, out.detach(), grads[0], *grads[2:]))
    (gate, losses, *others), (own_gate, own_losses, *parts) = results
    found = sum(everybody(own_gate)), sum(everybody(own_losses)) / world, *parts
    expected = gate, losses, *(one.chunk(world)[rank] for one in others)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert (whole.routing.wanted != whole.routing.counts).any() == (capacity is not None)


@pytest.fixture
def task(root: Path, text_file: Path) -> MoE:
    """The smoke model on the small text."""
    return moe(root, text_file, context=32, vocab_size=300, num_workers=3)


@pytest.mark.parametrize(
    ("size", "experts"), [("small-8e", 8), ("small-64e", 64), ("medium-128e", 128)]
)
def test_sizes(size: str, experts: int) -> None:
    """GPT-2's own number of parameters, in every second block E − 1 more MLPs and a gate, and 47
    rows that fill the vocabulary up to 50304."""
    layers, _, width = SHAPES[Size[size]][0]
    plain = {12: 124_439_808, 24: 354_823_168}[layers]
    mlp = 8 * width**2 + 5 * width
    expected = plain + layers // 2 * ((experts - 1) * mlp + experts * width) + 47 * width
    public = {"corpus": CorpusName.openwebtext, "context": 1024}
    assert num_parameters("moe", size=Size[size], **public) == expected


def test_experts_decay_in_every_second_block(task: MoE) -> None:
    """Biases and norms do not."""
    model = task.model()
    blocks = [isinstance(block.mlp, Experts) for block in model.transformer.h]
    assert blocks == [False, True, False, True]
    decayed, others = (group["params"] for group in task.optimizer(model).param_groups)
    layer = next(mixtures(model))
    assert all(weight.dim() >= 2 for weight in decayed)
    assert any(weight is layer.inner for weight in decayed)
    assert any(weight is layer.outer_bias for weight in others)
    std = layer.inner.std().item()
    assert layer.outer.std().item() == pytest.approx(std / 8**0.5, rel=0.05), "as GPT-2's"


def test_loss(task: MoE) -> None:
    """The cross-entropy, and the gates' losses with their weights; the scores have neither."""
    model = task.model()
    batch = next(task.batches(mesh(), 0))
    loss = task.loss(model, batch)
    logits = task.logits(model, batch[:, :-1]).flatten(0, 1)
    expected = F.cross_entropy(logits, batch[:, 1:].flatten())
    for layer in mixtures(model):
        balance, z = layer.losses
        expected = expected + 0.01 * balance + 0.001 * z
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"active": 1, "capacity": 1.25}, {"shared": True}])
def test_scores_of_the_gates(root: Path, text_file: Path, options: dict) -> None:
    """Where all tokens go to k experts, each of them has E / k times the mean."""
    task = moe(root, text_file, context=32, vocab_size=300, **options, num_workers=1)
    model = task.model()
    before = task.evaluate(model)["busiest_expert"]
    for layer in mixtures(model):
        nn.init.zeros_(layer.gate.weight)  # ties: the first ones are chosen
    scores = task.evaluate(model)
    assert scores["busiest_expert"] == pytest.approx(8 / options.get("active", 2))
    assert 1 <= before < scores["busiest_expert"]
    assert (scores["dropped"] > 0) == ("capacity" in options)


NARROW, INNER = 3, 5
"""Sizes of what travels here."""


@replicas()
@pytest.mark.parametrize("world", [2, 4])
def test_tiles_carry_tokens_only(rank: int, world: int) -> None:
    """`tiled` sends the rows for others' experts and what was made of others' rows, with gradients
    as many times again; `bulk` pads all to the largest count."""
    counts = counts_of(world, 4)
    weights = [weight.float().chunk(world)[rank].requires_grad_() for weight in weights_of(4)]
    rows = torch.randn(int(counts[rank].sum()), NARROW)
    to = counts.view(world, world, -1).sum(2)
    away = to[rank].sum() - to[rank, rank] + to[:, rank].sum() - to[rank, rank]
    padded = 4 * (4 - 4 // world) * counts.max()
    gradients = []
    for exchange, sent in ((partial(tiled, most=2), 2 * away), (bulk, padded)):
        traffic, own = Traffic(), rows.clone().requires_grad_()
        made = exchange(own, counts, tuple(weights), dist.group.WORLD, traffic)
        made.square().sum().backward()
        gradients.append(own.grad)
        totals = traffic.totals()
        assert totals.comm.bytes_sent == sent * NARROW * 4
        assert totals.comm.comm_s > 0 and totals.comm.exposed_s > 0
        assert (totals.behind_s > 0) == (exchange is not bulk)
        assert traffic.totals() == totals, "what has been counted stays counted"
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_seconds_under_way_are_counted_once() -> None:
    traffic = Traffic()
    traffic._events.extend([(1.0, 1), (1.5, 1), (2.0, -1), (4.0, -1), (7.0, 1), (7.5, -1)])
    assert traffic.totals().comm.comm_s == 3.5


def parts(rows: Tensor, numbers: Tensor, first: Tensor) -> list[Tensor]:
    return [rows[a : a + n].clone() for n, a in zip(numbers.tolist(), first.tolist(), strict=True)]


def put(out: Tensor, places: Tensor, groups: list[list[Tensor]], align: int | None) -> None:
    """Write the parts one behind the other, each group from a multiple of `align`; a group is at
    least that long."""
    out.fill_(torch.nan)
    at, lengths, first = 0, [], []
    for group in groups:
        begin = at
        for part in group:
            out[at : at + len(part)] = part
            lengths.append(len(part))
            first.append(at)
            at += len(part)
        if align is not None:
            at = begin + max(-(-(at - begin) // align), 1) * align
    places.copy_(torch.tensor([lengths, first]))


def dispatch(
    rows: Tensor, out: Tensor, numbers: Tensor, places: Tensor, _: str, align: int | None = None
) -> None:
    """From the order of workers to that of experts."""
    world, me = dist.get_world_size(), dist.get_rank()
    own = len(numbers) // world
    first = torch.tensor([0, *accumulate(numbers.tolist())][:-1])
    sent = everybody(parts(rows, numbers, first))
    groups = [[sent[a][me * own + e] for a in range(world)] for e in range(own)]
    put(out, places, groups, align or 1)


def combine(rows: Tensor, out: Tensor, sources: Tensor, places: Tensor, group_name: str) -> None:
    """From the order of experts to that of workers."""
    world, me = dist.get_world_size(), dist.get_rank()
    own = sources.shape[1] // world
    sent = everybody(parts(rows, *sources))
    put(out, places, [[sent[a][e * world + me] for e in range(own)] for a in range(world)], None)


@contextmanager
def kernels() -> Iterator[None]:
    """With the two kernels, and memory that is as symmetric."""

    def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        new = torch.empty(*shape, dtype=dtype, device=device)
        return new.fill_(torch.nan) if dtype.is_floating_point else new.fill_(-(10**9))

    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("all_to_all_vdev_2d", dispatch, "CPU")
    library.impl("all_to_all_vdev_2d_offset", combine, "CPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symm_mem, "empty", empty)
        patch.setattr(symm_mem, "rendezvous", lambda tensor, group: None)
        patch.setattr(symm_mem, "get_backend", lambda device: None)
        patch.setattr(symm_mem, "set_backend", lambda name: None)
        try:
            yield
        finally:
            library._destroy()


def counts_of(world: int, experts: int, seed: int = 0, most: int = 7) -> Tensor:
    numbers = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, most + 1, (world, experts), generator=numbers)
    counts[:, seed % experts] = 0  # an expert that nobody wants
    return counts


def weights_of(experts: int) -> list[Tensor]:
    torch.manual_seed(experts)
    shapes = ((NARROW, INNER), (INNER,), (INNER, NARROW), (NARROW,))
    return [torch.randn(experts, *shape, dtype=torch.float64) for shape in shapes]


def computed(weights: list[Tensor], rows: Tensor, counts: Tensor) -> Tensor:
    """One expert after another."""
    made = []
    for part, *expert in zip(rows.split(counts.tolist()), *weights, strict=True):
        inner, inner_bias, outer, outer_bias = expert
        hidden = F.gelu(torch.addmm(inner_bias, part, inner), approximate="tanh")
        made.append(torch.addmm(outer_bias, hidden, outer))
    return torch.cat(made)


@replicas()
@pytest.mark.parametrize(("world", "experts"), [(1, 3), (2, 6), (3, 6), (4, 4)])
def test_symmetric_memory_equals_tiles(rank: int, world: int, experts: int) -> None:
    """For several batches, in values, gradients and bytes.

    PyTorch's two kernels of symmetric memory need GPUs; here functions over gloo do what its
    documentation says of them, and fill with NaN what they leave unsaid.
    """
    group = dist.group.WORLD
    with kernels():
        for seed, most in enumerate((7, 2, 30, 0)):  # the third needs more memory
            counts, traffic, other = counts_of(world, experts, seed, most), Traffic(), Traffic()
            weights = [w.chunk(world)[rank].requires_grad_() for w in weights_of(experts)]
            numbers = torch.Generator().manual_seed(rank)
            shape = int(counts[rank].sum()), NARROW
            rows = torch.randn(shape, dtype=torch.float64, generator=numbers).requires_grad_()

            ways = (
                symmetric(rows, counts, partial(computed, weights), group, traffic),
                tiled(rows, counts, tuple(weights), group, other, 4),
            )
            results = [with_gradients(out, [rows, *weights]) for out in ways]
            assert all(mine.isfinite().all() for mine in results[0])
            torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)
            totals = traffic.totals().comm
            assert totals.comm_s == totals.exposed_s > 0
            assert totals.bytes_sent == other.totals().comm.bytes_sent


@replicas(2)
def test_experts_that_cannot_be_divided() -> None:
    fused, odd = layer(1, experts=4, kernel=Kernel.fused), layer(1, experts=5)
    many = layer(1, experts=34, exchange=Exchange.symmetric)
    line = refusal(lambda: fused.divide(dist.group.WORLD))
    assert line.startswith("moe.kernel=fused: needs all experts on each w")
    line = refusal(lambda: odd.divide(dist.group.WORLD))
    assert line.startswith("mesh.replica_size=2: must divide the 5 experts")
    line = refusal(lambda: many.divide(dist.group.WORLD))
    assert line.startswith("moe.exchange=symmetric: a worker would have 17 experts, at most 16")
    layer(1, experts=34, exchange=Exchange.tiled).divide(dist.group.WORLD)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"kernel": Kernel.fused}, "moe.kernel=fused: needs a GPU of compute capability 8.0 "),
        ({"exchange": Exchange.symmetric}, "moe.exchange=symmetric: needs a PyTorch with NVSH"),
        ({"kernel": Kernel.grouped}, "train.compile=true: this PyTorch compiles "),
    ],
)
def test_what_a_gpu_or_its_pytorch_lacks(config: dict[str, Any], says: str) -> None:
    """As if there were an old GPU, with a PyTorch without NVSHMEM that compiles grouped GEMMs in
    bf16 alone, which shows before it knows that they take fp32."""
    task = moe(Path("unused"), **config)
    task.train.compile = config.get("kernel") is Kernel.grouped
    old = {"get_device_capability": lambda _: (7, 5), "is_initialized": lambda: True}
    strategy = Strategy.ep if "exchange" in config else Strategy.ddp
    with (
        patch.multiple(torch.cuda, **old),
        patch.object(task_module, "nvshmem_available", lambda: False),
        patch.object(F, "grouped_mm", side_effect=RuntimeError("Expected inputs of BF16 type")),
    ):
        line = refusal(lambda: task.check_place(torch.device("cuda"), strategy))
    assert line.startswith(says)


def test_what_the_kernels_cannot_serve() -> None:
    check_numbers(16, 256)
    line = refusal(lambda: check_numbers(32, 64))
    assert line.startswith("mesh.replica_size=32: moe.exchange=symmetric serves at most 16 workers")
    line = refusal(lambda: check_numbers(2, 64))
    assert line.startswith("moe.exchange=symmetric: a worker would have 32 experts, at most 16")
