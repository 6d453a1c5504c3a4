"""GPT-2: sizes, loss, evaluation and batches; and the embedded corpus, for real."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from co2.config import Validation
from co2.errors import ConfigError
from tasks import GPT2
from tasks.shared.randomness import initial_std
from tasks.text.causal import CorpusName
from tasks.text.gpt2 import Size
from tasks.text.text import token_bytes
from tests.tasks.build import gpt2, mesh, sampler, text_of
from tests.tasks.test_evaluation import as_workers


@pytest.fixture
def task(root: Path, text_file: Path) -> GPT2:
    """The smoke model on the small text."""
    task = gpt2(root, text_file, context=32, vocab_size=300)
    task.setup(3)
    return task


def num_windows(task: GPT2, part: str) -> int:
    return (text_of(task).count(part) - 1) // 32


def num_parameters(**config) -> int:
    with torch.device("meta"):
        model = gpt2(Path("unused"), **config).model()
    return sum(weight.numel() for weight in model.parameters())


PADDING = 50304 - 50257
"""Rows of the embedding that stand for no token."""


def test_sizes() -> None:
    assert 1.25e6 < num_parameters() < 1.35e6
    public = {"corpus": CorpusName.openwebtext, "context": 1024}
    assert num_parameters(size=Size.small, **public) == 124_439_808 + PADDING * 768
    assert round(num_parameters(size=Size.medium, **public) / 1e6) == 355


def test_weights_depend_on_the_seed_alone(root: Path) -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(time.time_ns() % 1000)
        before = torch.get_rng_state()
        model = gpt2(root, seed=seed, vocab_size=300).model()
        assert torch.equal(torch.get_rng_state(), before)
        return torch.cat([weight.detach().flatten() for weight in model.parameters()])

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_dropout_reaches_the_model(root: Path) -> None:
    rates = {
        m.p for m in gpt2(root, dropout=0.25).model().modules() if isinstance(m, torch.nn.Dropout)
    }
    assert rates == {0.25}


def test_batches_go_on_from_any_start(task: GPT2) -> None:
    per_epoch = sampler(task, num_windows(task, "train"), 3).draws_per_epoch
    whole = task.batches(mesh(1, 3), 0)
    batches = [next(whole) for _ in range(per_epoch + 3)]
    for start in (0, 1, per_epoch - 1, per_epoch, per_epoch + 2):
        assert torch.equal(next(task.batches(mesh(1, 3), start)), batches[start])
    assert batches[0].shape == (4, 33) and batches[0].dtype == torch.int64
    other = next(task.batches(mesh(2, 3), 0))
    assert not torch.equal(other, batches[0])


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


def test_the_loss_stays_fp32_under_autocast(task: GPT2) -> None:
    model, batch = task.model(), next(task.batches(mesh(), 0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = task.loss(model, batch)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(task.loss(model, batch).item(), abs=0.02)


def test_it_learns_a_batch_by_heart(task: GPT2) -> None:
    model, batch = task.model(), next(task.batches(mesh(), 0))
    optimizer = task.optimizer(model)
    for _ in range(80):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
    assert loss.item() < 1.5 < task.baselines()["unigram_entropy"]
    assert model.transformer.wte.weight.grad is not None


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


def evaluated(monkeypatch: pytest.MonkeyPatch, task: GPT2) -> tuple[list[int], float]:
    """The windows that an evaluation reads, and its loss."""
    rows = np.asarray(text_of(task).tokens("val"))[: num_windows(task, "val") * 32].reshape(-1, 32)
    numbers = {tuple(row): number for number, row in enumerate(rows.tolist())}
    assert len(numbers) == len(rows), "no two windows are alike"
    read: list[int] = []
    original = task.logits

    def logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        read.extend(numbers[tuple(row)] for row in tokens.tolist())
        return original(model, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(task, "logits", logits)
        loss = task.evaluate(task.model())["loss"]
    return read, loss


def test_the_halves_of_the_validation_text(
    monkeypatch: pytest.MonkeyPatch, root: Path, text_file: Path
) -> None:
    """They have no window in common, and the whole is their mean."""
    found = {}
    for part in Validation:
        task = gpt2(root, text_file, context=32, vocab_size=300)
        task.data.validation = part
        task.setup(1)
        read, loss = evaluated(monkeypatch, task)
        facts = task.fingerprint()["evaluated"]
        assert facts == {"part": part.value, "num_samples": len(read)}
        found[part] = read, loss
    (whole, loss), (report, of_report), (tuning, of_tuning) = found.values()
    assert sorted(report + tuning) == whole and of_report != of_tuning
    mean = (len(report) * of_report + len(tuning) * of_tuning) / len(whole)
    assert loss == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("limit", [None, 50])
def test_evaluation_is_the_same_for_any_number_of_workers(
    monkeypatch: pytest.MonkeyPatch, root: Path, text_file: Path, limit: int | None
) -> None:
    monkeypatch.setattr("tasks.text.causal._EVAL_TOKENS", 512)  # 16 windows a batch
    task = gpt2(root, text_file, context=32, vocab_size=300, eval_samples=limit)
    task.setup(1)
    model = task.model()
    alone = task.evaluate(model)
    for world in (2, 3):
        with monkeypatch.context() as patch:
            assert as_workers(patch, world, lambda: task.evaluate(model)) == alone


def test_a_limited_evaluation_is_spread_over_the_whole_part(
    monkeypatch: pytest.MonkeyPatch, root: Path, text_file: Path
) -> None:
    task = gpt2(root, text_file, context=32, vocab_size=300, eval_samples=10)
    task.setup(1)
    (chosen, _), available = evaluated(monkeypatch, task), num_windows(task, "val")
    assert len(set(chosen)) == 10
    assert chosen[0] == 0 and available * 0.85 < chosen[-1] < available
    task.config.eval_samples = 10**9
    task.setup(1)
    assert evaluated(monkeypatch, task)[0] == list(range(available))


def test_evaluation_of_broken_weights_says_so(task: GPT2) -> None:
    model = task.model()
    task.config.eval_samples = 4
    with torch.no_grad():
        model.transformer.ln_f.bias.fill_(float("nan"))
    assert all(math.isnan(value) for value in task.evaluate(model).values())


@pytest.mark.slow  # tokenizes 16 MB
def test_the_embedded_corpus(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = gpt2(root, eval_samples=8)
    task.setup(2)
    monkeypatch.setattr("tasks.text.text.create", lambda *_: pytest.fail("it is made again"))
    task.setup(2)
    facts = task.fingerprint()
    assert facts["data"] == "embedded" and len(facts["sha256"]) == 64
    assert facts["num_tokens"]["train"] > 4_000_000 and facts["num_tokens"]["val"] > 200_000
    assert 6 < task.baselines()["unigram_entropy"] < 7
    assert task.evaluate(task.model())["loss"] == pytest.approx(math.log(4096), abs=0.2)


def test_openwebtext_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"python -m tasks\.prepare openwebtext --root"):
        gpt2(tmp_path / "none", corpus=CorpusName.openwebtext).setup(1)
    assert not (tmp_path / "none").exists()


def test_too_many_workers_for_the_text(root: Path, text_file: Path) -> None:
    task = gpt2(root, text_file, context=32, vocab_size=300, batch_size=1000)
    with pytest.raises(ConfigError, match=r"^train\.batch_size=1000: 3 workers draw 3000"):
        task.setup(3)


@pytest.mark.parametrize(
    ("key", "value"),
    [("context", 0), ("vocab_size", 256), ("dropout", 1.0), ("dropout", -0.1), ("eval_samples", 0)],
)
def test_config(key: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        GPT2.Config(**{key: value})
    assert caught.value.key == key


def test_importing_tasks_is_cheap() -> None:
    heavy = {"transformers", "datasets", "tokenizers", "sympy", "pandas", "triton"}
    heavy |= {"torch_geometric"}
    code = f"import sys, tasks; print('tasks.text.gpt2' in sys.modules, {heavy} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "True set()\n", result.stderr


@pytest.mark.parametrize(("width", "std"), [(64, 0.0693), (768, 0.02), (1600, 0.02)])
def test_a_row_of_narrow_weights_sums_as_a_wide_one(width: int, std: float) -> None:
    assert initial_std(width) == pytest.approx(std, rel=1e-3)
