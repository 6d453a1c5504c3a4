"""Mixtures of experts. The layer: closed forms of the gate, and what is written token by token.
GPT-2 with such layers: sizes, losses, scores, that it learns, and where it runs.

What all tasks must do is in test_contract.py.
"""

import functools
import math
import re
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import tasks.moe.moe as task_module
from co2.config import Precision, Strategy
from co2.errors import ConfigError
from tasks.moe.experts import EXPERTS as EXPERT_WEIGHTS
from tasks.moe.experts import Exchange, Experts, Kernel, balance_loss, z_loss
from tasks.moe.moe import SHAPES, MoE, Size, mixtures
from tasks.moe.routing import route
from tasks.text.causal import CorpusName
from tests.grids import grid
from tests.tasks.build import gpt2, mesh, moe, num_parameters
from tests.tasks.waits import no_waits
from tests.workers import Pool, replicas

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


@pytest.mark.parametrize("active", [1, 2, 3])
@pytest.mark.parametrize("capacity", [None, 0.3, 1.0, 9.0])
def test_equals_what_is_written_token_by_token(active: int, capacity: float | None) -> None:
    """Values and all gradients."""
    made = layer(active, capacity=capacity)
    most = math.inf if capacity is None else math.ceil(capacity * active * TOKENS / EXPERTS)
    weights = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    found = []
    for act in (made, lambda x: written(made, x, most)):
        x = tokens().requires_grad_()
        out = act(x)
        inputs = [x, *made.parameters()]
        found.append((out, *torch.autograd.grad((out * weights).sum(), inputs)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    dropped = made.routing.wanted - made.routing.counts
    assert (dropped > 0).any() == (capacity in (0.3, 1.0))
    assert made.routing.wanted.sum() == active * TOKENS


def test_one_expert_is_a_plain_mlp() -> None:
    made = layer(1, experts=1)
    x = tokens()
    torch.testing.assert_close(made(x), mlp(made, 0, x), rtol=1e-12, atol=1e-12)
    assert made.losses[0].item() == pytest.approx(1)


def test_alike_experts_are_one_of_them() -> None:
    """Whoever is chosen: the weights of two chosen ones add up to 1."""
    made = layer(2)
    with torch.no_grad():
        for weight in (made.inner, made.inner_bias, made.outer, made.outer_bias):
            weight.copy_(weight[:1].expand_as(weight))
    x = tokens()
    torch.testing.assert_close(made(x), mlp(made, 0, x), rtol=1e-12, atol=1e-12)


def test_a_shared_expert_sees_every_token() -> None:
    made, x = layer(1, shared=True, capacity=1e-9), tokens()
    nothing_else = made.shared(x)
    routed = made.routing
    out = made(x)
    assert routed is None and made.routing.counts.max() == 1, "room for one token each"
    alone = (out == nothing_else).all(1)
    assert alone.sum() == TOKENS - made.routing.counts.sum()


@pytest.mark.parametrize("shape", [(TOKENS,), (1, TOKENS), (TOKENS, 1)])
def test_any_shape_of_tokens(shape: tuple[int, ...]) -> None:
    made, x = layer(2), tokens()
    torch.testing.assert_close(made(x.view(*shape, WIDTH)).view(TOKENS, WIDTH), made(x))


def test_experts_that_nobody_wants_have_gradients_of_zero() -> None:
    """So that no worker waits for the gradient of one that its tokens do not use."""
    made = layer(1)
    with torch.no_grad():
        made.gate.weight.zero_()
        made.gate.weight[3, 0] = 100
    x = tokens().abs()
    made(x).sum().backward()
    assert made.routing.counts.tolist() == [[0, 0, 0, TOKENS, 0]]
    for weight in made.parameters():
        assert weight.grad is not None
    assert made.inner.grad[3].any() and not made.inner.grad[[0, 1, 2, 4]].any()


def test_room_goes_to_first_choices_and_earlier_tokens() -> None:
    shares = torch.tensor([[0.5, 0.4, 0.1], [0.6, 0.1, 0.3], [0.3, 0.6, 0.1], [0.7, 0.2, 0.1]])
    routing = route(shares, active=2, capacity=0.75)
    # First choices 0 0 1 0, second ones 1 2 0 1; choice c of token t is number 4 c + t.
    assert routing.wanted.tolist() == [[4, 3, 1]]
    assert routing.counts.tolist() == [[2, 2, 1]]
    assert routing.choice.tolist() == [0, 1, 2, 4, 5]
    expected = [0.5 / 0.9, 0.6 / 0.9, 0.6 / 0.9, 0.4 / 0.9, 0.3 / 0.9]
    assert routing.weight.tolist() == pytest.approx(expected)
    assert route(shares, active=1, capacity=None).weight.tolist() == pytest.approx(
        [0.5, 0.6, 0.7, 0.6]
    )


def test_losses_of_the_gate() -> None:
    """Balance: 1 where all are alike, E where one has all. z: of logits that are all c, the square
    of c + log E."""
    even = torch.full((8, 4), 0.25)
    assert balance_loss(even, torch.full((4,), 4)).item() == pytest.approx(1)
    alone = torch.zeros(8, 4)
    alone[:, 2] = 1
    assert balance_loss(alone, torch.tensor([0, 0, 8, 0])).item() == pytest.approx(4)
    assert z_loss(torch.full((8, 4), 1.5)).item() == pytest.approx((1.5 + math.log(4)) ** 2)


def test_the_balance_loss_balances() -> None:
    """By gradient descent on the gate alone, from a gate that prefers one expert."""
    made, x = layer(1), tokens() + 1
    with torch.no_grad():
        made.gate.weight[0] += 1
    made(x)
    before = made.routing.wanted.max()
    assert before > TOKENS / 2
    descent = torch.optim.SGD([made.gate.weight], lr=2.0)
    for _ in range(100):
        made(x)
        descent.zero_grad()
        made.losses[0].backward()
        descent.step()
    assert made.routing.wanted.max() < before / 2


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
        inputs = [x, *made.parameters()]
        found.append((out, *torch.autograd.grad((out * (1 + out.detach())).sum(), inputs)))
    for one, other in zip(*found, strict=True):
        close = (3e-2 if bf16 else 1e-5) * one.abs().max().item()
        torch.testing.assert_close(one, other, rtol=0, atol=close)
    assert (made.routing.counts == 0).sum() == (0 if favourite is None else 3)


@pytest.mark.parametrize("bf16", [False, True])
def test_no_host_waits_for_a_grouped_product(bf16: bool) -> None:
    made = layer(2, width=8, hidden=16, kernel=Kernel.grouped).float()
    x = F.pad(tokens(), (0, 2)).float().requires_grad_()

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            out = made(x).square().sum()
        balance, z = made.losses
        return out + balance + z

    with no_waits():
        loss().backward()
    made.kernel = Kernel.loop
    with pytest.raises(AssertionError, match="the host would wait for"), no_waits():
        loss()


def test_a_grouped_product_is_one_graph() -> None:
    """Compiled once, however the tokens are divided."""
    made = layer(2, width=8, hidden=16, kernel=Kernel.grouped).to(torch.bfloat16)
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(made, backend=counter, fullgraph=True)
    for seed in range(4):
        torch.manual_seed(seed)
        compiled(torch.randn(TOKENS, 8, dtype=torch.bfloat16)).sum().backward()
    assert counter.frame_count == 1


def divided(
    rank: int, world: int, active: int, capacity: float | None, ways: dict
) -> tuple[Tensor, ...]:
    """Of each worker's tokens: what the layer makes of them, their gradients, the gradients of the
    gate and of this worker's experts, and the losses."""
    made = layer(active, experts=4, capacity=capacity, **ways)
    made.divide(dist.group.WORLD)
    x = tokens()[:20].chunk(world)[rank].requires_grad_()
    out = made(x)
    balance, z = made.losses
    loss = (out * (1 + out.detach())).sum() + balance + z
    weights = [made.gate.weight, *(getattr(made, name) for name in EXPERT_WEIGHTS)]
    found = torch.autograd.grad(loss, [x, *weights])
    return out.detach(), *found, balance.detach(), z.detach()


@pytest.mark.parametrize("active", [1, 2])
@pytest.mark.parametrize("capacity", [None, 0.5, 1.0])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "ways",
    [{"exchange": Exchange.bulk}, {"exchange": Exchange.tiled}, {"tile": 2}],
    ids=["bulk", "whole tiles", "small tiles"],
)
def test_divided_over_workers(
    workers: Pool, world: int, active: int, capacity: float | None, ways: dict
) -> None:
    """As by one worker with all experts and all tokens."""
    made = layer(active, experts=4, capacity=capacity)
    x = tokens()[:20].requires_grad_()
    out = made(x)
    balance, z = made.losses
    loss = (out * (1 + out.detach())).sum() + world * (balance + z)
    weights = [made.gate.weight, *(getattr(made, name) for name in EXPERT_WEIGHTS)]
    dx, gate, *experts = torch.autograd.grad(loss, [x, *weights])
    found = list(zip(*workers.run(divided, world, active, capacity, ways), strict=True))
    close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
    close(torch.cat(found[0]), out.detach())
    close(torch.cat(found[1]), dx)
    close(sum(found[2]), gate)
    for parts, whole in zip(found[3:7], experts, strict=True):
        close(torch.cat(parts), whole)
    close(sum(found[7]) / world, balance.detach())
    close(sum(found[8]) / world, z.detach())
    assert (made.routing.wanted != made.routing.counts).any() == (capacity is not None)


@replicas(2)
def test_divided_experts_have_a_way_of_their_own() -> None:
    line = "moe.kernel=fused: needs all experts on each worker; with mesh.strategy=ep use loop"
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        layer(1, experts=4, kernel=Kernel.fused).divide(dist.group.WORLD)


@replicas(2)
def test_as_many_experts_for_each_worker() -> None:
    with pytest.raises(ConfigError, match=r"^mesh.replica_size=2: must divide the 5 experts$"):
        layer(1, experts=5).divide(dist.group.WORLD)


@pytest.fixture
def task(root: Path, text_file: Path) -> MoE:
    """The smoke model on the small text."""
    task = moe(root, text_file, context=32, vocab_size=300, num_workers=3)
    return task


@pytest.mark.parametrize("size", ["small-8e", "small-64e", "medium-128e"])
def test_sizes(size: str) -> None:
    """GPT-2's own number of parameters, in every second block E − 1 more MLPs and a gate, and 47
    rows that fill the vocabulary up to 50304."""
    (layers, _, width), experts = SHAPES[Size[size]]
    plain = {12: 124_439_808, 24: 354_823_168}[layers]
    mlp = 8 * width**2 + 5 * width
    expected = plain + layers // 2 * ((experts - 1) * mlp + experts * width) + 47 * width
    assert (
        num_parameters("moe", size=Size[size], corpus=CorpusName.openwebtext, context=1024)
        == expected
    )


def test_where_the_experts_are(task: MoE) -> None:
    blocks = task.model().transformer.h
    assert [isinstance(block.mlp, Experts) for block in blocks] == [False, True, False, True]


def test_initial_weights_and_decay(task: MoE) -> None:
    """A model of the same seed has the same weights, the experts' are spread as GPT-2's; biases and
    norms have no decay."""
    model, again = task.model(), task.model()
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    decayed, others = (group["params"] for group in task.optimizer(model).param_groups)
    assert all(weight.dim() >= 2 for weight in decayed)
    layer = next(mixtures(model))
    assert any(weight is layer.inner for weight in decayed)
    assert any(weight is layer.outer_bias for weight in others)
    std = layer.inner.std().item()
    assert layer.outer.std().item() == pytest.approx(std / 8**0.5, rel=0.05)
    assert std == pytest.approx(model.transformer.wte.weight.std().item(), rel=0.05)


def test_loss(task: MoE) -> None:
    """The cross-entropy, and the gates' losses with their weights; the scores have neither."""
    model = task.model()
    batch = next(task.batches(mesh(), 0))
    loss = task.loss(model, batch)
    expected = nn.functional.cross_entropy(
        task.logits(model, batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
    )
    for layer in mixtures(model):
        balance, z = layer.losses
        expected = expected + 0.01 * balance + 0.001 * z
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize(
    "options",
    grid([{}, {"active": 1, "capacity": 1.25}, {"shared": True}], lambda options: options != {}),
    ids=str,
)
def test_it_learns(root: Path, text_file: Path, options: dict) -> None:
    task = moe(root, text_file, context=32, vocab_size=300, **options, num_workers=1)
    model, batches = task.model(), task.batches(mesh(), 0)
    optimizer = task.optimizer(model)
    before = task.evaluate(model)
    for _ in range(40):
        optimizer.zero_grad()
        task.loss(model, next(batches)).backward()
        optimizer.step()
    after = task.evaluate(model)
    assert after["loss"] < before["loss"] - 0.5
    assert after["busiest_expert"] >= 1
    assert (after["dropped"] > 0) == ("capacity" in options)


def test_scores_are_of_the_whole_validation_text(task: MoE) -> None:
    """Where all tokens go to two experts, each of them has E / k times the mean."""
    model = task.model()
    for layer in mixtures(model):
        nn.init.zeros_(layer.gate.weight)  # ties: the first ones are chosen
    scores = task.evaluate(model)
    assert scores["busiest_expert"] == pytest.approx(8 / 2) and scores["dropped"] == 0


def test_no_token_sees_a_later_one(root: Path, text_file: Path) -> None:
    """Without a capacity, for which tokens compete."""
    task = moe(root, text_file, context=32, vocab_size=300, num_workers=1)
    model = task.model().eval()
    tokens = torch.randint(300, (1, 32))
    changed = tokens.clone()
    changed[0, 20:] = torch.randint(300, (12,))
    one, other = (task.logits(model, each)[0, :20] for each in (tokens, changed))
    torch.testing.assert_close(one, other)


def test_more_active_experts_than_there_are() -> None:
    with pytest.raises(ConfigError, match="active=9: must not be above the 8 experts of size=smok"):
        moe(Path("unused"), active=9)


@dataclass(frozen=True)
class Place:
    """Where layers are to be computed."""

    config: dict[str, Any]
    refusal: str | None = None
    """How the line begins, after the task's name."""
    strategy: Strategy = Strategy.ddp
    device: str = "cuda"
    precision: Precision | None = None
    """Of a compiled model; None for one that is not compiled."""
    interpreted: bool = False
    """Whether Triton interprets its kernels."""
    has: bool = True
    """Triton, NVSHMEM and a PyTorch that compiles a grouped GEMM in fp32."""
    capability: tuple[int, int] = (8, 0)


LOOP, GROUPED, FUSED = ({"kernel": kernel} for kernel in Kernel)
SYMMETRIC = {"exchange": Exchange.symmetric}
PLACES = [
    Place(LOOP, strategy=Strategy.ep, device="cpu"),
    Place(GROUPED, device="cpu"),
    Place(GROUPED, "kernel=grouped: needs all experts on each worker; with ", Strategy.ep, "cpu"),
    Place(FUSED, "kernel=fused: needs all experts on each worker; with ", Strategy.ep, "cpu"),
    Place(FUSED, "kernel=fused: needs a CUDA device, and these ", Strategy.zero3, "cpu"),
    Place(FUSED, strategy=Strategy.zero3, device="cpu", interpreted=True),
    Place(FUSED, "kernel=fused: needs Triton, which is not ", has=False),
    Place(FUSED, "kernel=fused: needs a GPU of compute capability 8.0 ", capability=(7, 5)),
    Place(FUSED),
    Place(SYMMETRIC, device="cpu"),  # where nothing is exchanged
    Place(SYMMETRIC, "exchange=symmetric: needs CUDA devices, and ", Strategy.ep, "cpu"),
    Place(SYMMETRIC, "exchange=symmetric: needs a PyTorch with NVSH", Strategy.ep, has=False),
    Place(SYMMETRIC, strategy=Strategy.ep),
    Place(GROUPED, "compile=true: this PyTorch compiles ", precision=Precision.fp32, has=False),
    Place(GROUPED, precision=Precision.fp32),
    Place(GROUPED, precision=Precision.bf16, has=False),
]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_where_it_runs(monkeypatch: pytest.MonkeyPatch, place: Place) -> None:
    def grouped(*given: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """Old compilers look at its types before they know that it takes fp32."""
        if not place.has:
            raise RuntimeError("Expected inputs of BF16 type")
        return torch.empty(0)

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if place.interpreted:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(task_module, "find_spec", lambda name: name if place.has else None)
    monkeypatch.setattr(task_module, "nvshmem_available", lambda: place.has)
    monkeypatch.setattr(nn.functional, "grouped_mm", grouped)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: place.capability)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    task = moe(Path("unused"), **place.config)
    if place.precision is not None:
        task.train.compile, task.train.precision = True, place.precision
    refusal = nullcontext()
    if place.refusal is not None:
        refusal = pytest.raises(ConfigError, match=rf"^(moe|train)\.{place.refusal}")
    with refusal:
        task.check_place(torch.device(place.device), place.strategy)


def test_the_layers_have_the_kernel() -> None:
    with torch.device("meta"):
        model = moe(Path("unused"), kernel=Kernel.fused).model()
    assert {layer.kernel for layer in mixtures(model)} == {Kernel.fused}


def test_the_dense_part_is_gpt2s_tiny_model_one_block_longer(root: Path) -> None:
    assert SHAPES[Size["smoke"]][0][1:] == (4, 64)
    names = {name for name, _ in gpt2(root).model().named_parameters()}
    own = {name for name, _ in moe(root).model().named_parameters() if ".mlp." not in name}
    assert own <= names
