"""TransNormerLLM: its three forms agree, what it is made of, sizes, loss and evaluation.

Batches, evaluation and data are `CausalText`'s, which test_gpt2.py tests.
"""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from co2.config import OptimConfig
from co2.errors import ConfigError
from co2_measure.simulate.models import MODELS
from tasks.shared.optimizer import make_optimizer
from tasks.text import transnormer_model as parts
from tasks.text.causal import CorpusName
from tasks.text.transnormer import SHAPES, Size, TransNormer
from tests.tasks.build import mesh, num_parameters, transnormer


@pytest.fixture
def task(root: Path, text_file: Path) -> TransNormer:
    """The smoke model on the small text."""
    task = transnormer(root, text_file, context=32, vocab_size=300, num_workers=3)
    return task


def test_sizes() -> None:
    assert 1.35e6 < num_parameters("transnormer", size=Size["smoke"]) < 1.45e6
    for size in ("385m", "1b", "7b"):
        counted = num_parameters("transnormer", size=Size[size], corpus=CorpusName.openwebtext)
        layers, _, width = SHAPES[Size[size]]
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
    written = torch.stack(
        [
            sum(
                (q[:, :, t] * k[:, :, s]).sum(-1, keepdim=True)
                * torch.exp(-decay[:, None] * (t - s))
                * v[:, :, s]
                for s in range(t + 1)
            )
            for t in range(length)
        ],
        dim=2,
    )
    weights = torch.randn(written.shape, dtype=torch.float64)
    expected = torch.autograd.grad((written * weights).sum(), inputs)
    for form in (parts.parallel, parts.recurrent, lambda *x: parts.chunked(*x, size=8)):
        out = form(q, k, v, decay)
        torch.testing.assert_close(out, written, rtol=1e-12, atol=1e-12)
        for got, want in zip(
            torch.autograd.grad((out * weights).sum(), inputs), expected, strict=True
        ):
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_the_fastest_decay_stays_finite_over_a_long_text() -> None:
    inputs = [part.float() for part in qkv(2000, heads=1)]
    out = parts.chunked(*inputs, torch.tensor([8.0]))
    out.sum().backward()
    near = parts.recurrent(*(part[:, :, -40:] for part in inputs), torch.tensor([8.0]))
    torch.testing.assert_close(out[:, :, -1], near[:, :, -1])


def test_the_whole_model_is_the_same_in_every_form(
    task: TransNormer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = task.model().double()
    tokens = torch.randint(300, (2, 300))  # three blocks, whatever the context in training was
    logits = model(tokens)
    for form in (parts.parallel, parts.recurrent):
        monkeypatch.setattr(parts, "chunked", form)
        torch.testing.assert_close(model(tokens), logits, rtol=1e-9, atol=1e-9)


def test_decay_rates() -> None:
    """λ = exp(−2^(−8h/H) (1 − l/(L−1) + 10⁻⁵)), h from 1, l from 0."""
    model = transnormer(Path("unused"), size=Size["smoke"]).model()
    for number, layer in enumerate(model.layers):
        rates = parts.decay_rates(4, layer.tokens.place, torch.zeros(1))
        expected = [2 ** (-8 * h / 4) * (1 - number / 3 + 1e-5) for h in (1, 2, 3, 4)]
        assert rates.tolist() == pytest.approx(expected, rel=1e-4)
    assert rates[3].item() == pytest.approx(2**-8 * 1e-5, rel=1e-4)  # the last layer's last head


def test_how_far_the_heads_of_the_7b_model_look_back() -> None:
    """Tokens after which 1 % of a token is left."""
    with torch.device("meta"):
        layers = transnormer(Path("unused"), size=Size["7b"]).model().layers
    rates = [parts.decay_rates(32, layer.tokens.place, torch.zeros(1)) for layer in layers]
    tokens = math.log(100) / torch.stack(rates)
    assert tokens.quantile(0.5).item() == pytest.approx(218, abs=1)
    assert tokens.min().item() == pytest.approx(math.log(100) * 2**0.25, rel=1e-4)


def test_a_model_of_one_layer() -> None:
    model = parts.TransNormer(300, 1, 4, 64)
    assert model.layers[0].tokens.place == 0
    assert model(torch.randint(300, (2, 5))).isfinite().all()


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


def test_only_the_first_layer_learns_positions(task: TransNormer) -> None:
    model = task.model()
    assert [name for name, _ in model.named_parameters() if "theta" in name] == [
        "layers.0.tokens.theta"
    ]
    groups = task.optimizer(model).param_groups
    theta = model.layers[0].tokens.theta
    assert any(weight is theta for weight in groups[1]["params"])
    assert any(
        weight is theta for weight in make_optimizer(model, OptimConfig()).param_groups[0]["params"]
    )


def test_the_norm_has_a_mean_square_of_one() -> None:
    x = torch.randn(4, 7, dtype=torch.float64) * 100
    expected = x / (x.norm(dim=-1, keepdim=True) / math.sqrt(7))
    torch.testing.assert_close(parts.normalized(x), expected, rtol=1e-6, atol=0)
    assert torch.equal(parts.normalized(torch.zeros(3)), torch.zeros(3))
    assert parts.normalized(x.bfloat16()).dtype == torch.float32


def test_no_token_sees_a_later_one(task: TransNormer) -> None:
    model = task.model()
    tokens = torch.randint(300, (2, 200))
    changed = tokens.clone()
    changed[:, 150] = (changed[:, 150] + 1) % 300
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :128], after[:, :128])
    torch.testing.assert_close(before[:, :150], after[:, :150], rtol=1e-5, atol=1e-5)
    assert (before[:, 150:155] - after[:, 150:155]).abs().amax(-1).min() > 1e-4


def test_the_loss_at_first_is_that_of_guessing(task: TransNormer) -> None:
    loss = task.loss(task.model(), next(task.batches(mesh(), 0)))
    assert loss.shape == () and loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(300), abs=0.15)


def test_decay_and_state_are_fp32_under_autocast() -> None:
    """A state in bf16 would stall: 512 + 2 is 512 there."""
    ones = torch.ones(1, 1, 1200, 1)
    rates = 0 * parts.decay_rates(1, 0.0, ones.bfloat16())
    assert rates.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = parts.chunked(ones, ones, ones, rates, size=2)[0, 0, :, 0]
    torch.testing.assert_close(sums.float(), torch.arange(1.0, 1201), rtol=0.01, atol=0)


def test_errors_name_its_own_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^transnormer\.corpus=openwebtext: no sound"):
        transnormer(tmp_path / "none", corpus=CorpusName.openwebtext).setup(1)
