"""GPT-2 with experts: sizes, losses, scores, and that it learns.

Batches, evaluation and data are `CausalText`'s, which test_gpt2.py tests; the layer is
test_experts.py's.
"""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import tasks.moe.moe as task_module
from co2.config import Precision, Strategy
from co2.errors import ConfigError
from tasks.moe.experts import Exchange, Experts, Kernel
from tasks.moe.moe import SHAPES, MoE, Size, mixtures
from tasks.text.causal import CorpusName
from tests.grids import grid
from tests.tasks.build import gpt2, mesh, moe


@pytest.fixture
def task(root: Path, text_file: Path) -> MoE:
    """The smoke model on the small text."""
    task = moe(root, text_file, context=32, vocab_size=300)
    task.setup(3)
    return task


def num_parameters(size: str, **config) -> int:
    with torch.device("meta"):
        model = moe(Path("unused"), size=Size[size], **config).model()
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("size", ["small-8e", "small-64e", "medium-128e"])
def test_sizes(size: str) -> None:
    """GPT-2's own number of parameters, in every second block E − 1 more MLPs and a gate, and 47
    rows that fill the vocabulary up to 50304."""
    (layers, _, width), experts = SHAPES[Size[size]]
    plain = {12: 124_439_808, 24: 354_823_168}[layers]
    mlp = 8 * width**2 + 5 * width
    expected = plain + layers // 2 * ((experts - 1) * mlp + experts * width) + 47 * width
    assert num_parameters(size, corpus=CorpusName.openwebtext, context=1024) == expected


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
    task = moe(root, text_file, context=32, vocab_size=300, **options)
    task.setup(1)
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
    task = moe(root, text_file, context=32, vocab_size=300)
    task.setup(1)
    model = task.model().eval()
    tokens = torch.randint(300, (1, 32))
    changed = tokens.clone()
    changed[0, 20:] = torch.randint(300, (12,))
    one, other = (task.logits(model, each)[0, :20] for each in (tokens, changed))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"active": 9}, "active=9: must not be above the 8 experts of size=smoke"),
    ],
)
def test_refused(fields: dict, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        moe(Path("unused"), **fields)


@pytest.mark.parametrize(
    ("kernel", "strategy", "environment", "line"),
    [
        (Kernel.loop, Strategy.ep, {}, None),
        (Kernel.grouped, Strategy.ddp, {}, None),
        (Kernel.grouped, Strategy.ep, {}, "grouped: needs all experts on each worker; with "),
        (Kernel.fused, Strategy.ep, {}, "fused: needs all experts on each worker; with "),
        (Kernel.fused, Strategy.zero3, {}, "fused: needs a CUDA device, and these workers train "),
        (Kernel.fused, Strategy.zero3, {"TRITON_INTERPRET": "1"}, None),
    ],
)
def test_where_a_kernel_runs(
    monkeypatch: pytest.MonkeyPatch,
    kernel: Kernel,
    strategy: Strategy,
    environment: dict[str, str],
    line: str | None,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(task_module, "find_spec", lambda name: name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    task = moe(Path("unused"), kernel=kernel)
    refusal = nullcontext()
    if line is not None:
        refusal = pytest.raises(ConfigError, match=f"^moe.kernel={line}")
    with refusal:
        task.check_place(torch.device("cpu"), strategy)


@pytest.mark.parametrize("known", [False, True])
def test_compiling_in_fp32(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """Old compilers look at a grouped GEMM's types before they know that it takes fp32."""

    def grouped(*given: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        if not known:
            raise RuntimeError("Expected inputs of BF16 type")
        return torch.empty(0)

    monkeypatch.setattr(nn.functional, "grouped_mm", grouped)
    task = moe(Path("unused"), kernel=Kernel.grouped)
    task.check_place(torch.device("cpu"), Strategy.ddp)
    task.train.compile = True
    line = r"^train.compile=true: this PyTorch compiles moe.kernel=grouped in bf16 alone; train.pre"
    with nullcontext() if known else pytest.raises(ConfigError, match=line):
        task.check_place(torch.device("cpu"), Strategy.ddp)
    task.train.precision = Precision.bf16
    task.check_place(torch.device("cpu"), Strategy.ddp)


@pytest.mark.parametrize(
    ("capability", "line"),
    [((7, 5), "needs a GPU of compute capability 8.0 or newer; use loop"), ((8, 0), None)],
)
def test_a_gpu_that_is_too_old(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], line: str | None
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(task_module, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    task = moe(Path("unused"), kernel=Kernel.fused)
    refusal = nullcontext() if line is None else pytest.raises(ConfigError, match=line)
    with refusal:
        task.check_place(torch.device("cuda"), Strategy.ddp)


def test_where_memory_is_symmetric(monkeypatch: pytest.MonkeyPatch) -> None:
    task = moe(Path("unused"), exchange=Exchange.symmetric)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    task.check_place(cpu, Strategy.ddp)  # where nothing is exchanged
    with pytest.raises(ConfigError, match=r"^moe.exchange=symmetric: needs CUDA devices, and "):
        task.check_place(cpu, Strategy.ep)
    monkeypatch.setattr(task_module, "nvshmem_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^moe.exchange=symmetric: needs a PyTorch with NVSH"):
        task.check_place(gpu, Strategy.ep)
    monkeypatch.setattr(task_module, "nvshmem_available", lambda: True)
    task.check_place(gpu, Strategy.ep)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_module, "find_spec", lambda name: None)
    task = moe(Path("unused"), kernel=Kernel.fused)
    with pytest.raises(ConfigError, match=r"^moe.kernel=fused: needs Triton, which is not "):
        task.check_place(torch.device("cuda"), Strategy.ddp)


def test_the_layers_have_the_kernel() -> None:
    with torch.device("meta"):
        model = moe(Path("unused"), kernel=Kernel.fused).model()
    assert {layer.kernel for layer in mixtures(model)} == {Kernel.fused}


def test_the_dense_part_is_gpt2s_tiny_model_one_block_longer(root: Path) -> None:
    assert SHAPES[Size["smoke"]][0][1:] == (4, 64)
    names = {name for name, _ in gpt2(root).model().named_parameters()}
    own = {name for name, _ in moe(root).model().named_parameters() if ".mlp." not in name}
    assert own <= names
