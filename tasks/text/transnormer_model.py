"""TransNormerLLM: a language model with gated linear attention and exponential decay.

Qin et al., "TransNormerLLM: A Faster and Better Large Language Model with Improved TransNormer"
(arXiv 2307.14995). With width d, H heads and L layers, layer l = 0 … L−1 computes:

    X ← X + GLA(SRMSNorm(X));  X ← X + SGLU(SRMSNorm(X))
    GLA    O = [SRMSNorm((QKᵀ ⊙ M) V) ⊙ U] Wo;  Q, K = φ(XWq), φ(XWk);  V, U = XWv, XWu;  φ = swish
    SGLU   O = [V ⊙ U] Wo;  V, U = XWv, XWu                                (no activation function)
    SRMSNorm(x) = x / (‖x‖₂/√d)                                            (nothing learned)
    M_ts = λ^(t−s) for s ≤ t, else 0;  λ = exp(−2^(−8h/H) · (1 − l/(L−1) + 10⁻⁵)) in head h = 1 … H
    LRPE-d, in the first layer only: q_t · k_s becomes Σ_j q_tj k_sj cos(θ_j (t−s)), with θ learned

The attention is not divided by the sums of the rows of QKᵀ, because the norm replaces that. There
are no position embeddings.

Where the paper does not say, this follows the authors' public models: SGLU is 2.75 d wide; one norm
is over all heads; embedding (times √d) and logits share one matrix; there are no biases; weights
start from N(0, 0.02²), and θ_j from 10000^(−2j/d). λ follows them too (modeling_transnormer.py of
OpenNLPLab/TransNormerLLM-7B): ALiBi's slopes, which become smaller from layer to layer, and nearly
no decay in the last one. 1 % of a token is left after 218 others in the median head of the 7B
model. With the formula that the paper prints, exp(−8h/H · (1 − l/L)), it would be 3.

On CUDA the kernels of flash-linear-attention compute the attention, where they are installed and
answer; else its chunked form does, compiled, which is tens of thousands of operators otherwise.
"""

import math
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from co2.start.identity import is_first

_EPS = 1e-6
"""Added to the mean square, so that 0 is normalized to 0."""
_KERNELS = find_spec("fla") is not None
"""Whether flash-linear-attention is installed."""
_ANSWER_S = 20.0
"""In which its kernels compute a small attention, after all is imported."""

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""What returns the same as `parallel`, for [B, H, T, ·]."""


class TransNormer(nn.Module):
    """The language model: embedding, layers, norm and logits."""

    def __init__(self, vocab_size: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(Layer(number, layers, heads, width) for number in range(layers))
        if torch.cuda.is_available() and not self.embedding.weight.is_meta:
            for module in self.modules():
                if isinstance(module, GatedLinearAttention):
                    module.on_gpus = fastest_on_gpus()
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, T, vocabulary] for tokens [B, T], for any T."""
        hidden = self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.linear(normalized(hidden), self.embedding.weight)


class Layer(nn.Module):
    """Attention over tokens (GLA), then a gated linear unit over channels (SGLU)."""

    def __init__(self, number: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.tokens = GatedLinearAttention(number, layers, heads, width)
        self.channels = SimpleGLU(width, width * 11 // 4)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.tokens(normalized(hidden))
        return hidden + self.channels(normalized(hidden))


class GatedLinearAttention(nn.Module):
    """GLA of the layer with this number, from 0; the first layer has LRPE too."""

    def __init__(self, number: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        assert width % heads == 0
        self.heads, self.place = heads, number / max(1, layers - 1)
        self.on_gpus: Attention = chunked
        self.qkvu = nn.Linear(width, 4 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.theta: nn.Parameter | None = None
        if number == 0:
            theta = 10000.0 ** (-2 * torch.arange(width) / width)
            self.theta = nn.Parameter(theta.reshape(heads, width // heads))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, T, width] to [B, T, width]."""
        q, k, v, u = self.qkvu(hidden).chunk(4, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        q, k = F.silu(q), F.silu(k)
        if self.theta is not None:
            q, k = with_positions(q, self.theta), with_positions(k, self.theta)
        # The rates are computed each time, because a buffer would be averaged over the replicas.
        rates = decay_rates(self.heads, self.place, hidden)
        attention = self.on_gpus if q.is_cuda else chunked
        mixed = attention(q, k, v, rates).transpose(1, 2).flatten(2)
        return self.out(normalized(mixed) * u)


class SimpleGLU(nn.Module):
    """SGLU: a gated linear unit without activation function."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.vu = nn.Linear(width, 2 * inner, bias=False)
        self.out = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        v, u = self.vu(hidden).chunk(2, dim=-1)
        return self.out(v * u)


def normalized(x: Tensor) -> Tensor:
    """Apply SRMSNorm over the last axis, in fp32 at least, even under autocast."""
    return F.rms_norm(_wide(x), x.shape[-1:], eps=_EPS)


def decay_rates(heads: int, place: float, like: Tensor) -> Tensor:
    """Return −log λ of every head: [H], on the device of `like`, in fp32 at least.

    Args:
        heads: number of heads, H.
        place: the layer's place, l/(L−1): 0 in the first, 1 in the last.
        like: a tensor whose device and type are taken.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    h = torch.arange(1, heads + 1, device=like.device, dtype=dtype)
    return 2 ** (-8 * h / heads) * (1 - place + 1e-5)


def with_positions(x: Tensor, theta: Tensor) -> Tensor:
    """Apply LRPE. A product of two results, [B, H, T, 2D], depends on the distance of their places.

    Args:
        x: queries or keys [B, H, T, D].
        theta: angles from one place to the next, in radians, [H, D].
    """
    angles = theta[:, None, :] * torch.arange(x.shape[-2], device=x.device)[:, None]
    return torch.cat([x * angles.cos(), x * angles.sin()], dim=-1)


@cache
def fastest_on_gpus() -> Attention:
    """The kernels, where they are installed and answer; else the chunked form, compiled."""
    if _KERNELS and _answer():
        return kernels
    compiled: Attention = torch.compile(chunked)
    return compiled


_PROBE = """
import torch
from tasks.text.transnormer_model import decay_rates, kernels
import fla.ops.simple_gla
ones = (torch.ones(1, 2, 256, width, device="cuda") for width in (64, 128))
q, v = (one.bfloat16().requires_grad_() for one in ones)
rates = decay_rates(2, 0.0, q)
print("ready", flush=True)
input()
kernels(q, q, v, rates).sum().backward()
torch.cuda.synchronize()
"""


def _answer() -> bool:
    """Whether the kernels compute something in time, in a process that can be given up: on an H200
    six tests of theirs had not ended after 110 s. If not, a line says so."""
    with subprocess.Popen(
        [sys.executable, "-c", _PROBE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as probe:
        assert probe.stdout is not None
        probe.stdout.readline()
        try:
            probe.communicate("\n", timeout=_ANSWER_S)
        except subprocess.TimeoutExpired:
            probe.kill()
            why = f"do not answer in {_ANSWER_S:g} s"
        else:
            why = "" if probe.returncode == 0 else "fail"
    if why and is_first():
        text = (
            f"warning: flash-linear-attention's kernels {why}; the chunked form is compiled instead"
        )
        print(text, file=sys.stderr, flush=True)
    return not why


def kernels(q: Tensor, k: Tensor, v: Tensor, rates: Tensor) -> Tensor:
    """Return the same as `parallel`, for [B, H, T, ·], by flash-linear-attention, in the type of
    v."""
    from fla.ops.simple_gla import chunk_simple_gla  # takes seconds

    q, k, v = (part.to(v.dtype).transpose(1, 2).contiguous() for part in (q, k, v))
    mixed, _ = chunk_simple_gla(q, k, v, g_gamma=-rates.float(), scale=1.0)
    return mixed.transpose(1, 2)


def parallel(q: Tensor, k: Tensor, v: Tensor, rates: Tensor) -> Tensor:
    """Return (QKᵀ ⊙ M) V, computed as written, with work and memory of order T².

    Args:
        q, k: [..., T, D]; the leading axes begin with B, H.
        v: [..., T, E], with the same leading axes.
        rates: −log λ, [H].
    Returns:
        [..., T, E].
    """
    steps = torch.arange(q.shape[-2], device=q.device)
    apart = steps[:, None] - steps
    mask = _decay(rates, apart.clamp(min=0), q.dim()).tril()
    return (q @ k.mT * mask) @ v


def recurrent(q: Tensor, k: Tensor, v: Tensor, rates: Tensor) -> Tensor:
    """Return the same as `parallel`, for [B, H, T, ·], token by token:
    kv_t = λ kv_{t−1} + k_tᵀ v_t; o_t = q_t kv_t."""
    once = _decay(rates, torch.ones(1, 1, device=q.device), q.dim())
    kv, outputs = torch.zeros((), device=q.device), []
    for t in range(q.shape[-2]):
        now = slice(t, t + 1)
        kv = kv * once + k[..., now, :].mT @ v[..., now, :]
        outputs.append(q[..., now, :] @ kv)
    return torch.cat(outputs, dim=-2)


def chunked(q: Tensor, k: Tensor, v: Tensor, rates: Tensor, size: int = 128) -> Tensor:
    """Return the same as `parallel`, for [B, H, T, ·], in blocks of `size` tokens, with work and
    memory linear in T.

    The part within a block is computed as in `parallel`, and the part from earlier blocks as in
    `recurrent`. The decay and the recurrent state are in fp32 at least, even under autocast.
    """
    length = q.shape[-2]
    if length <= size:
        return parallel(q, k, v, rates)
    # Zeros at the end change nothing before them.
    q, k, v = (
        F.pad(part, (0, 0, 0, -length % size)).unflatten(2, (-1, size)) for part in (q, k, v)
    )
    steps = torch.arange(size, device=q.device)[:, None]
    left = (k * _decay(rates, size - 1 - steps, q.dim())).mT @ v
    whole = _decay(rates, torch.full((1, 1), size, device=q.device), q.dim() - 1)
    state = torch.zeros_like(_wide(left[:, :, 0]))
    states = []
    for block in left.unbind(2):
        states.append(state)
        state = state * whole + block
    before = (q * _decay(rates, steps + 1, q.dim())) @ torch.stack(states, dim=2)
    return (parallel(q, k, v, rates) + before).flatten(2, 3)[:, :, :length]


def _decay(rates: Tensor, apart: Tensor, dim: int) -> Tensor:
    """Return λ^apart for distances [M, N]: [H, 1 …, M, N], by which tensors of `dim` axes that
    begin with B, H can be multiplied."""
    return torch.exp(-rates.reshape(-1, *[1] * (dim - 2)) * apart)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
