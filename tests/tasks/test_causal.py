"""Causal language models. GPT-2: attention, sizes, batches, loss and evaluation. TransNormerLLM:
its three forms agree, what it is made of, and which form a GPU gets. The cross-entropy
of tokens, compiled as a graph of its own.

What all tasks must do is in test_contract.py.
"""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from signal import SIGKILL
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.overrides import TorchFunctionMode

from co2_measure.simulate.models import MODELS
from tasks import GPT2
from tasks.shared.randomness import initial_std
from tasks.text import losses
from tasks.text import transnormer_model as parts
from tasks.text.causal import CorpusName
from tasks.text.gpt2 import Size
from tasks.text.losses import token_losses
from tasks.text.masking import IGNORED
from tasks.text.text import token_bytes
from tasks.text.transnormer import SHAPES, TransNormer
from tasks.text.transnormer import Size as Sizes
from tests.tasks.build import (
    gpt2,
    mesh,
    moe,
    num_parameters,
    roberta,
    sampler,
    text_of,
    transnormer,
)

Made = tuple[nn.Module, Callable[[nn.Module], Tensor]]


@pytest.fixture(params=["gpt2", "moe", "roberta"])
def made(request: pytest.FixtureRequest, root: Path) -> Made:
    """A model, and what computes its logits for some tokens."""
    tokens = torch.randint(4, 300, (2, 16), generator=torch.Generator().manual_seed(0))
    if request.param == "roberta":
        model = roberta(root, context=16).model()
        return model, lambda own: own(tokens, torch.tensor([[1, 4], [2, 9]]))
    task = {"gpt2": gpt2, "moe": moe}[request.param](root, context=16, vocab_size=300)
    return task.model(), lambda own: task.logits(own, tokens)


class Calls(TorchFunctionMode):
    """What PyTorch's attention is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.found.append({**dict(zip(("q", "k", "v", "attn_mask"), args, strict=False))})
            self.found[-1].update(kwargs or {})
        return func(*args, **(kwargs or {}))


def test_attention_gets_no_mask(made: Made) -> None:
    """So that its fast kernels run. The logits are those of transformers' own attention."""
    model, logits = made
    with Calls() as calls:
        ours = logits(model)
    assert len(calls.found) >= 2
    for call in calls.found:
        assert call["attn_mask"] is None
        assert call["is_causal"] is not hasattr(model, "language")
    getattr(model, "language", model).set_attn_implementation("sdpa")
    assert torch.equal(ours, logits(model))


@pytest.fixture
def task(root: Path, text_file: Path) -> GPT2:
    """The smoke model on the small text."""
    return gpt2(root, text_file, context=32, vocab_size=300, num_workers=3)


PADDING = 50304 - 50257
"""Rows of the embedding that stand for no token."""


def test_sizes(root: Path) -> None:
    assert 1.25e6 < num_parameters("gpt2") < 1.35e6
    tiny = num_parameters("gpt2", size=Size.tiny, context=64, vocab_size=512)
    assert round(tiny / 1e4) == 19
    public = {"corpus": CorpusName.openwebtext, "context": 1024}
    assert num_parameters("gpt2", size=Size.small, **public) == 124_439_808 + PADDING * 768
    assert round(num_parameters("gpt2", size=Size.medium, **public) / 1e6) == 355
    modules = gpt2(root, dropout=0.25).model().modules()
    assert {one.p for one in modules if isinstance(one, nn.Dropout)} == {0.25}
    for width, std in ((64, 0.0693), (768, 0.02), (1600, 0.02)):
        assert initial_std(width) == pytest.approx(std, rel=1e-3), "a row sums as a wide one"


def test_the_loss_is_that_of_the_next_token(task: GPT2) -> None:
    """Of windows of the training part."""
    model, batch = task.model(), next(task.batches(mesh(1, 3), 2))
    tokens = np.asarray(text_of(task).tokens("train"), np.int64)
    chosen = sampler(task, (len(tokens) - 1) // 32, 3).indices(2, 1)
    assert batch.tolist() == [tokens[n * 32 : n * 32 + 33].tolist() for n in chosen]
    chances = model(batch[:, :-1]).logits[..., :300].log_softmax(-1)
    chances = chances.gather(2, batch[:, 1:, None])
    assert task.loss(model, batch).item() == pytest.approx(-chances.mean().item(), rel=1e-5)


def test_the_padding_of_the_vocabulary_changes_nothing(task: GPT2) -> None:
    """Neither the loss nor what transformers reads, and it has no gradient."""
    model, batch = task.model(), next(task.batches(mesh(), 0))
    rows = batch[:, :-1]
    embedding = model.transformer.wte
    assert embedding.num_embeddings == 384 and task.logits(model, rows).shape == (4, 32, 300)
    with torch.no_grad():
        embedding.weight[300:] = 100.0
    loss = task.loss(model, batch)
    loss.backward()
    assert (embedding.weight.grad[300:] == 0).all() and embedding.weight.grad[:300].any()
    logits, saved = task.logits(model, rows), task.package(model).files
    assert json.loads(saved["config.json"])["vocab_size"] == 300
    assert torch.equal(model(rows).logits, logits)
    assert task.loss(model, batch).item() == pytest.approx(loss.item(), rel=1e-6)
    again = task.model()
    assert again.transformer.wte.num_embeddings == 384
    again.load_state_dict(task.adopted(model.state_dict()))
    assert torch.equal(task.logits(again, rows), logits)


def test_evaluation_is_the_mean_over_all_windows(task: GPT2) -> None:
    model, store = task.model(), text_of(task)
    tokens = torch.from_numpy(np.asarray(store.tokens("val"), np.int64))
    count = (len(tokens) - 1) // 32 * 32
    rows, following = tokens[:count].reshape(-1, 32), tokens[1 : count + 1]
    with torch.no_grad():
        loss = F.cross_entropy(task.logits(model, rows).flatten(0, 1), following).item()
    scores, lengths = task.evaluate(model), token_bytes(store)
    assert scores["loss"] == pytest.approx(loss, rel=1e-5)
    assert scores["perplexity"] == pytest.approx(math.exp(scores["loss"]))
    bits = scores["loss"] * count / math.log(2)
    assert scores["bits_per_byte"] == pytest.approx(bits / lengths[following.numpy()].sum())


def test_importing_tasks_is_cheap() -> None:
    heavy = {"transformers", "datasets", "tokenizers", "sympy", "pandas", "triton"}
    heavy.add("torch_geometric")
    code = f"import sys, tasks; print('tasks.text.gpt2' in sys.modules, {heavy} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "True set()\n", result.stderr


@pytest.fixture
def transnormer_task(root: Path, text_file: Path) -> TransNormer:
    return transnormer(root, text_file, context=32, vocab_size=300, num_workers=3)


def test_sizes_of_transnormer() -> None:
    assert 1.35e6 < num_parameters("transnormer", size=Sizes["smoke"]) < 1.45e6
    assert round(num_parameters("transnormer", size=Sizes["tiny"], vocab_size=512) / 1e4) == 20
    for size in ("385m", "1b", "7b"):
        counted = num_parameters("transnormer", size=Sizes[size], corpus=CorpusName.openwebtext)
        layers, _, width = SHAPES[Sizes[size]]
        # Four projections and one back, three matrices of 2.75 times the width; angles; embedding.
        expected = layers * (5 + 3 * 2.75) * width**2 + width + 50304 * width
        assert counted == expected
        assert counted == pytest.approx(MODELS[f"transnormer-{size}"].num_parameters, rel=0.02)


def qkv(length: int, heads: int = 3) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(length)
    return [
        torch.randn(2, heads, length, width, generator=random, dtype=torch.float64).requires_grad_()
        for width in (5, 5, 4)
    ]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 24, 29])
@pytest.mark.parametrize("rates", [(0.0, 1e-3, 0.1), (0.02, 0.5, 8.0)])
def test_the_forms_agree(length: int, rates: tuple[float, ...]) -> None:
    """Recurrent, parallel, in blocks of 8, and the sum as the paper writes it; gradients too."""
    decay = torch.tensor(rates, dtype=torch.float64)
    inputs = qkv(length)
    q, k, v = inputs

    def term(t: int, s: int) -> Tensor:
        product = (q[:, :, t] * k[:, :, s]).sum(-1, keepdim=True)
        return product * torch.exp(-decay[:, None] * (t - s)) * v[:, :, s]

    sums = [sum(term(t, s) for s in range(t + 1)) for t in range(length)]
    written = torch.stack(sums, dim=2)
    weights = torch.randn(written.shape, dtype=torch.float64)
    expected = torch.autograd.grad((written * weights).sum(), inputs)
    for form in (parts.parallel, parts.recurrent, partial(parts.chunked, size=8)):
        out = form(q, k, v, decay)
        torch.testing.assert_close(out, written, rtol=1e-12, atol=1e-12)
        gradients = torch.autograd.grad((out * weights).sum(), inputs)
        torch.testing.assert_close(gradients, expected, rtol=1e-11, atol=1e-11)


def test_the_fastest_decay_stays_finite_over_a_long_text() -> None:
    inputs = [part.float() for part in qkv(2000, heads=1)]
    out = parts.chunked(*inputs, torch.tensor([8.0]))
    out.sum().backward()
    near = parts.recurrent(*(part[:, :, -40:] for part in inputs), torch.tensor([8.0]))
    torch.testing.assert_close(out[:, :, -1], near[:, :, -1])


def test_decay_rates() -> None:
    """λ = exp(−2^(−8h/H) (1 − l/(L−1) + 10⁻⁵)), h from 1, l from 0."""
    model = transnormer(Path("unused"), size=Sizes["smoke"]).model()
    for number, layer in enumerate(model.layers):
        rates = parts.decay_rates(4, layer.tokens.place, torch.zeros(1))
        expected = [2 ** (-8 * h / 4) * (1 - number / 3 + 1e-5) for h in (1, 2, 3, 4)]
        assert rates.tolist() == pytest.approx(expected, rel=1e-4)
    assert rates[3].item() == pytest.approx(2**-8 * 1e-5, rel=1e-4)  # the last layer's last head


class Kernel:
    """Stands for flash-linear-attention's chunk_simple_gla, with its layout [B, T, H, D]."""

    def __init__(self) -> None:
        self.types: list[torch.dtype] = []

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g_gamma: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, None]:
        self.types += [q.dtype, k.dtype, v.dtype]
        q, k, v = (part.transpose(1, 2).double() for part in (q, k, v))
        return parts.parallel(q * scale, k, v, -g_gamma).transpose(1, 2), None


def test_kernels_have_their_own_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    monkeypatch.setitem(sys.modules, "fla.ops.simple_gla", SimpleNamespace(chunk_simple_gla=kernel))
    q, k, v = qkv(29)
    rates = torch.tensor([0.0, 1e-3, 0.1])
    torch.testing.assert_close(parts.kernels(q, k, v, rates), parts.parallel(q, k, v, rates))
    parts.kernels(q, k, v.bfloat16(), rates)  # under autocast positions leave q and k in fp32
    assert kernel.types[3:] == [torch.bfloat16] * 3


def test_positions_count_by_their_distance() -> None:
    q, k, _ = (part[:, :, :1].expand(-1, -1, 12, -1) for part in qkv(12))
    theta = torch.rand(3, 5, dtype=torch.float64)
    products = parts.with_positions(q, theta) @ parts.with_positions(k, theta).mT
    for apart in range(12):
        expected = (q[:, :, 0] * k[:, :, 0] * (theta * apart).cos()).sum(-1, keepdim=True)
        found = products.diagonal(-apart, -2, -1)
        torch.testing.assert_close(found, expected.expand_as(found))


def test_only_the_first_layer_learns_positions(transnormer_task: TransNormer) -> None:
    """Which do not decay."""
    model = transnormer_task.model()
    names = [name for name, _ in model.named_parameters() if "theta" in name]
    theta, groups = model.layers[0].tokens.theta, transnormer_task.optimizer(model).param_groups
    assert names == ["layers.0.tokens.theta"]
    assert any(weight is theta for weight in groups[1]["params"])
    lone = parts.TransNormer(300, 1, 4, 64)
    assert lone.layers[0].tokens.place == 0, "of one layer, too"
    assert lone(torch.randint(300, (2, 5))).isfinite().all()


def test_the_norm_has_a_mean_square_of_one() -> None:
    x = torch.randn(4, 7, dtype=torch.float64) * 100
    expected = x / (x.norm(dim=-1, keepdim=True) / math.sqrt(7))
    torch.testing.assert_close(parts.normalized(x), expected, rtol=1e-6, atol=0)
    assert torch.equal(parts.normalized(torch.zeros(3)), torch.zeros(3))
    assert parts.normalized(x.bfloat16()).dtype == torch.float32


def test_decay_and_state_are_fp32_under_autocast() -> None:
    """A state in bf16 would stall: 512 + 2 is 512 there."""
    ones = torch.ones(1, 1, 1200, 1)
    rates = 0 * parts.decay_rates(1, 0.0, ones.bfloat16())
    assert rates.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = parts.chunked(ones, ones, ones, rates, size=2)[0, 0, :, 0]
    torch.testing.assert_close(sums.float(), torch.arange(1.0, 1201), rtol=0.01, atol=0)


@pytest.fixture
def asked_anew() -> Iterator[None]:
    parts.fastest_on_gpus.cache_clear()
    with patch.object(torch, "compile", lambda form: ("compiled", form)):
        yield
    parts.fastest_on_gpus.cache_clear()


HANGS = "import time\nprint('ready', flush=True)\ninput()\ntime.sleep(600)"


def probed(program: str) -> Any:
    """As if the probe were this program. One that hangs has half a second; others have as long as
    they take on a busy machine."""
    answer_s = 0.5 if program == HANGS else 100.0
    return patch.multiple(parts, _KERNELS=True, _PROBE=program, _ANSWER_S=answer_s)


@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize(
    ("program", "line", "status"),
    [
        ("print('ready', flush=True)\ninput()", "", 0),
        (HANGS, "warning: flash-linear-attention's kernels do not answer in 0.5 s; ", -SIGKILL),
        ("raise ImportError", "warning: flash-linear-attention's kernels fail; ", 1),
    ],
    ids=["answer", "hang", "fail"],
)
def test_kernels_that_do_not_answer_are_not_used(
    program: str, line: str, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """A probe that hangs is killed."""
    made, begin = [], subprocess.Popen

    def popen(*arguments: Any, **more: Any) -> Any:
        made.append(begin(*arguments, **more))
        return made[-1]

    with probed(program), patch.object(subprocess, "Popen", popen):
        found = parts.fastest_on_gpus()
        assert parts.fastest_on_gpus() is found, "it is asked once"
    assert found == (("compiled", parts.chunked) if line else parts.kernels)
    told = capfd.readouterr().err
    assert told.startswith(line) and bool(told) == bool(line)
    assert [one.returncode for one in made] == [status]


SIZE, PADDED = 300, 384


@pytest.fixture
def counter() -> Iterator[CompileCounterWithBackend]:
    """Stands in for the compiler, which takes half a minute, and counts its graphs."""
    torch._dynamo.reset()
    found = CompileCounterWithBackend("aot_eager")
    losses._compiled.cache_clear()
    with patch.object(torch, "compile", partial(torch.compile, backend=found, fullgraph=True)):
        yield found
    losses._compiled.cache_clear()


def drawn(step: int) -> tuple[Tensor, Tensor]:
    """Logits of a padded head under autocast, and targets, of which some are left out."""
    generator = torch.Generator().manual_seed(step)
    logits = torch.randn(2, 5, PADDED, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(SIZE, (2, 5), generator=generator)
    targets[0, :2] = IGNORED
    return logits, targets


def by_hand(logits: Tensor, targets: Tensor) -> Tensor:
    """-log softmax at the target, in fp64."""
    chances = logits.detach().double()[..., :SIZE].softmax(-1)
    own = chances.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return torch.where(targets == IGNORED, 0.0, -own.log()).flatten()


@pytest.mark.parametrize("compiled", [False, True])
def test_the_loss_and_its_gradient(counter: CompileCounterWithBackend, compiled: bool) -> None:
    """Under autocast, for several steps; it is compiled once."""
    for step in range(3):
        logits, targets = drawn(step)
        with torch.autocast("cpu", torch.bfloat16):
            each = token_losses(logits, targets, SIZE, compiled=compiled)
            mean = token_losses(logits, targets, SIZE, "mean", compiled)
        assert each.dtype == mean.dtype == torch.float32
        torch.testing.assert_close(each.double(), by_hand(logits, targets))
        torch.testing.assert_close(mean, each.sum() / (targets != IGNORED).sum())
        mean.backward()
        assert logits.grad is not None and not logits.grad[..., SIZE:].any()
        chances = logits.detach().float()[..., :SIZE].softmax(-1)
        chosen = F.one_hot(targets.clamp(min=0), SIZE)
        wanted = (chances - chosen) * (targets != IGNORED)[..., None] / 8
        torch.testing.assert_close(logits.grad[..., :SIZE], wanted.bfloat16())
    assert counter.frame_count == (2 if compiled else 0)  # each, and the mean
