"""GPT-2: attention, sizes, loss and evaluation; and the embedded corpus, for real. What all tasks
must do is in test_contract.py.
"""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tasks import GPT2
from tasks.shared.randomness import initial_std
from tasks.text.causal import CorpusName
from tasks.text.gpt2 import Size
from tasks.text.text import token_bytes
from tests.tasks.build import gpt2, mesh, moe, num_parameters, roberta, sampler, text_of

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


def is_causal(model: nn.Module) -> bool:
    return not hasattr(model, "language")


def test_eager(made: Made) -> None:
    model, logits = made
    with Calls() as calls:
        logits(model)
    assert len(calls.found) >= 2
    for call in calls.found:
        assert call["attn_mask"] is None and call["is_causal"] is is_causal(model)


def test_traced(made: Made) -> None:
    model, logits = made
    nodes: list[torch.fx.Node] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        nodes.extend(graph.graph.nodes)
        return graph.forward

    model.compile(backend=backend)
    logits(model)
    calls = [node for node in nodes if node.target is F.scaled_dot_product_attention]
    assert len(calls) >= 2
    for call in calls:
        assert call.kwargs["attn_mask"] is None and call.kwargs["is_causal"] is is_causal(model)


def test_as_transformers_own(made: Made) -> None:
    model, logits = made
    ours = logits(model)
    getattr(model, "language", model).set_attn_implementation("sdpa")
    assert torch.equal(ours, logits(model))


@pytest.fixture
def task(root: Path, text_file: Path) -> GPT2:
    """The smoke model on the small text."""
    task = gpt2(root, text_file, context=32, vocab_size=300, num_workers=3)
    return task


def num_windows(task: GPT2, part: str) -> int:
    return (text_of(task).count(part) - 1) // 32


PADDING = 50304 - 50257
"""Rows of the embedding that stand for no token."""


def test_sizes() -> None:
    assert 1.25e6 < num_parameters("gpt2") < 1.35e6
    public = {"corpus": CorpusName.openwebtext, "context": 1024}
    assert num_parameters("gpt2", size=Size.small, **public) == 124_439_808 + PADDING * 768
    assert round(num_parameters("gpt2", size=Size.medium, **public) / 1e6) == 355


def test_dropout_reaches_the_model(root: Path) -> None:
    rates = {
        m.p for m in gpt2(root, dropout=0.25).model().modules() if isinstance(m, torch.nn.Dropout)
    }
    assert rates == {0.25}


def test_batches_are_windows_of_the_training_part(task: GPT2) -> None:
    tokens = np.asarray(text_of(task).tokens("train"), np.int64)
    chosen = sampler(task, num_windows(task, "train"), 3).indices(2, 1)
    batch = next(task.batches(mesh(1, 3), 2))
    for row, index in zip(batch.tolist(), chosen, strict=True):
        assert row == tokens[index * 32 : index * 32 + 33].tolist()


def test_the_loss_at_first_is_that_of_guessing(task: GPT2) -> None:
    batch = next(task.batches(mesh(), 0))
    loss = task.loss(task.model(), batch)
    assert loss.shape == () and loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(300), abs=0.15)


def test_the_loss_is_that_of_the_next_token(task: GPT2) -> None:
    model, batch = task.model(), next(task.batches(mesh(), 0))
    chances = model(batch[:, :-1]).logits[..., :300].log_softmax(-1)
    expected = -torch.stack(
        [chances[b, t, batch[b, t + 1]] for b in range(4) for t in range(32)]
    ).mean()
    assert task.loss(model, batch).item() == pytest.approx(expected.item(), rel=1e-5)


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
    model = task.model()
    tokens = torch.from_numpy(np.asarray(text_of(task).tokens("val"), np.int64))
    count = (len(tokens) - 1) // 32
    with torch.no_grad():
        rows = (
            tokens[: count * 32].reshape(count, 32),
            tokens[1 : count * 32 + 1].reshape(count, 32),
        )
        losses = F.cross_entropy(task.logits(model, rows[0]).flatten(0, 1), rows[1].flatten())
    scores = task.evaluate(model)
    assert scores["loss"] == pytest.approx(losses.item(), rel=1e-5)
    assert scores["perplexity"] == pytest.approx(math.exp(scores["loss"]))
    lengths = token_bytes(text_of(task))
    assert lengths is not None
    bits = scores["loss"] * count * 32 / math.log(2)
    assert scores["bits_per_byte"] == pytest.approx(bits / lengths[rows[1].numpy()].sum())
    assert model.training


@pytest.mark.slow  # tokenizes 16 MB
def test_the_embedded_corpus(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = gpt2(root, eval_samples=8, num_workers=2)
    monkeypatch.setattr("tasks.text.text.create", lambda *_: pytest.fail("it is made again"))
    task.setup(2)
    facts = task.fingerprint()
    assert facts["data"] == "embedded" and len(facts["sha256"]) == 64
    assert facts["num_tokens"]["train"] > 4_000_000 and facts["num_tokens"]["val"] > 200_000
    assert 6 < task.baselines()["unigram_entropy"] < 7
    assert task.evaluate(task.model())["loss"] == pytest.approx(math.log(4096), abs=0.2)


def test_importing_tasks_is_cheap() -> None:
    heavy = {"transformers", "datasets", "tokenizers", "sympy", "pandas", "triton"}
    heavy |= {"torch_geometric"}
    code = f"import sys, tasks; print('tasks.text.gpt2' in sys.modules, {heavy} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "True set()\n", result.stderr


@pytest.mark.parametrize(("width", "std"), [(64, 0.0693), (768, 0.02), (1600, 0.02)])
def test_a_row_of_narrow_weights_sums_as_a_wide_one(width: int, std: float) -> None:
    assert initial_std(width) == pytest.approx(std, rel=1e-3)
