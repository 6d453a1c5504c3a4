"""Models of full windows give PyTorch's attention no mask, and compute what transformers' do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.tasks.build import gpt2, moe
from tests.tasks.test_roberta import roberta

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
