"""The cross-entropy of tokens, compiled as a graph of its own."""

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import co2
from tasks.text import losses
from tasks.text.losses import token_losses
from tasks.text.masking import IGNORED
from tests.tasks.small import SMALL, small_task

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


@pytest.mark.parametrize("name", ["gpt2", "moe", "roberta", "transnormer"])
def test_training_compiles_it_where_it_compiles_the_model(
    counter: CompileCounterWithBackend, root: Path, tmp_path: Path, name: str
) -> None:
    task = small_task(name, root, SMALL[name].data(tmp_path / "text"), 1)
    model, batch = task.model().eval(), next(task.batches(co2.Mesh.world(), 0))
    plain = task.loss(model, batch)
    assert counter.frame_count == 0
    task.train.compile = True
    assert task.loss(model, batch).item() == pytest.approx(plain.item(), rel=1e-5)
    assert counter.frame_count == 1


@pytest.mark.slow  # the compiler's work
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_as_the_compiler_makes_it() -> None:
    (plain, targets), (fused, _) = drawn(0), drawn(0)
    ours, theirs = (
        token_losses(logits, targets, SIZE, "mean", compiled)
        for logits, compiled in ((fused, True), (plain, False))
    )
    torch.testing.assert_close(ours, theirs)
    ours.backward()
    theirs.backward()
    torch.testing.assert_close(fused.grad, plain.grad)
