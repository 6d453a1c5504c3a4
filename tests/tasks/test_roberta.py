"""RoBERTa: sizes, ids, loss, evaluation and batches; bad data."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import RobertaConfig

from co2.app.export import once
from co2.config import DataConfig, OptimConfig, TrainConfig
from co2.errors import ConfigError
from tasks import RoBERTa
from tasks.text import store
from tasks.text.masking import IGNORED, Masking, Vocabulary, masked
from tasks.text.roberta import CorpusName, Size, begin_as_waves, roberta_ids
from tasks.text.text import windows
from tests.tasks.build import gpt2, mesh, sampler, text_of


def roberta(
    root: Path,
    path: Path | None = None,
    seed: int = 0,
    batch_size: int = 4,
    workers: int = 0,
    **config: Any,
) -> RoBERTa:
    data = DataConfig(root=str(root), path=None if path is None else str(path), workers=workers)
    train = TrainConfig(seed=seed, batch_size=batch_size)
    return RoBERTa(RoBERTa.Config(**config), train, OptimConfig(lr=3e-3), data)


def small(root: Path, text_file: Path, **more: Any) -> RoBERTa:
    task = roberta(root, text_file, **{"context": 34, "vocab_size": 300, **more})
    task.setup(3)
    return task


@pytest.fixture
def task(root: Path, text_file: Path) -> RoBERTa:
    """The smoke model on the small text."""
    return small(root, text_file)


def num_parameters(**config: Any) -> int:
    with torch.device("meta"):
        model = roberta(Path("unused"), **config).model()
    return sum(weight.numel() for weight in model.parameters())


def test_sizes() -> None:
    public = {"corpus": CorpusName.wikibooks, "context": 512}
    assert num_parameters(size=Size.base, **public) == 124_697_433  # as published
    assert num_parameters(size=Size.large, **public) == 355_412_057
    one_norm = 2 * 1024  # that of the last layer's output
    assert num_parameters(size=Size.large, pre_norm=True, **public) == 355_412_057 + one_norm
    assert num_parameters() < 200_000


def num_windows(task: RoBERTa, part: str) -> int:
    return text_of(task).count(part) // 32


def test_weights_depend_on_the_seed_alone(root: Path) -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.rand(seed + 1)
        before = torch.get_rng_state()
        model = roberta(root, seed=seed).model()
        assert torch.equal(torch.get_rng_state(), before)
        return torch.cat([weight.detach().flatten() for weight in model.parameters()])

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_words_come_in_and_out_by_one_matrix(root: Path) -> None:
    inner = roberta(root, dropout=0.25).model().language
    assert inner.lm_head.decoder.weight is inner.roberta.embeddings.word_embeddings.weight
    assert inner.lm_head.decoder.bias is inner.lm_head.bias
    rates = {module.p for module in inner.modules() if isinstance(module, torch.nn.Dropout)}
    assert rates == {0.25}


def test_positions_of_a_narrow_model_begin_as_waves() -> None:
    """All as long, each nearest to its neighbours; a model as wide as RoBERTa has random ones."""
    narrow = torch.nn.Embedding(35, 64)
    begin_as_waves(narrow, RobertaConfig(initializer_range=0.07))
    rows = narrow.weight.detach()
    torch.testing.assert_close(rows.norm(dim=1), torch.full((35,), 2 * 0.07 * 8))
    near = rows @ rows.T / rows[0].square().sum()
    for apart in range(1, 4):
        assert (near.diagonal(apart) < near.diagonal(apart - 1)[: 35 - apart] - 0.01).all()
    wide = torch.nn.Embedding(5, 768)
    before = wide.weight.detach().clone()
    begin_as_waves(wide, RobertaConfig())
    assert torch.equal(wide.weight, before)


def test_ids_are_laid_out_as_roberta_does(task: RoBERTa) -> None:
    """<s>, text, </s>; the store's separator is </s>; other tokens keep their order."""
    tokens = np.asarray(text_of(task).tokens("train"), np.int64)
    separator = text_of(task).meta["separator"]
    indices = sampler(task, num_windows(task, "train")).indices(0, 0)
    seen, places, targets = next(task.batches(mesh(), 0))
    original = seen.scatter(1, places, targets)
    for row, index in zip(original.tolist(), indices, strict=True):
        text = tokens[index * 32 : index * 32 + 32]
        assert row[0] == Vocabulary.START and row[-1] == Vocabulary.END
        expected = [2 if t == separator else t + 4 - (t > separator) for t in text.tolist()]
        assert row[1:-1] == expected
    assert roberta_ids(text_of(task), False).max() == task.vocabulary.mask - 1
    assert task.vocabulary.size == 304
    assert separator in tokens[-1:]  # the document's end is there to be mapped


def test_batches_go_on_from_any_start(root: Path, text_file: Path, task: RoBERTa) -> None:
    per_epoch = sampler(task, num_windows(task, "train"), 3).draws_per_epoch
    whole = task.batches(mesh(1, 3), 0)
    batches = [next(whole) for _ in range(per_epoch + 3)]
    seen, places, targets = batches[0]
    assert seen.shape == (4, 34) and places.shape == targets.shape == (4, 5)
    assert {tensor.dtype for tensor in batches[0]} == {torch.int64}
    for start in (0, 1, per_epoch - 1, per_epoch, per_epoch + 2):
        again = next(task.batches(mesh(1, 3), start))
        assert all(map(torch.equal, again, batches[start]))
    ahead = small(root, text_file, workers=2).batches(mesh(1, 3), per_epoch - 1)
    for expected in batches[per_epoch - 1 :]:
        assert all(map(torch.equal, next(ahead), expected))
    assert not torch.equal(next(task.batches(mesh(2, 3), 0))[0], seen)
    assert not torch.equal(next(small(root, text_file, seed=1).batches(mesh(1, 3), 0))[0], seen)


def test_a_window_has_another_mask_in_every_epoch(task: RoBERTa) -> None:
    samples = sampler(task, num_windows(task, "train"))
    masks: dict[int, list[torch.Tensor]] = {}
    drawn = task.batches(mesh(), 0)
    for draw in range(2 * samples.draws_per_epoch):
        _, places, _ = next(drawn)
        for index, own in zip(samples.indices(draw, 0).tolist(), places, strict=True):
            masks.setdefault(index, []).append(own)
    twice = [both for both in masks.values() if len(both) == 2]
    assert len(twice) > 0.9 * samples.num_samples
    assert sum(torch.equal(*both) for both in twice) <= 1


def test_masks_are_as_configured(root: Path, text_file: Path) -> None:
    """Wettig et al.'s: 40 % of the tokens, and each becomes <mask>."""
    task = small(root, text_file, mask_share=0.4, mask_masked=1.0, mask_random=0.0)
    seen, places, targets = next(task.batches(mesh(), 0))
    assert places.shape == (4, 14) and (targets != IGNORED).all()
    assert (seen.gather(1, places) == task.vocabulary.mask).all()
    kept = small(root, text_file, mask_share=0.4, mask_masked=0.0, mask_random=0.0)
    seen, places, targets = next(kept.batches(mesh(), 0))
    assert torch.equal(seen.gather(1, places), targets)


def test_pre_norm(root: Path, text_file: Path) -> None:
    """Without what the layers add, all that is left of them is the last norm."""
    task = small(root, text_file, pre_norm=True)
    model, batch = task.model().eval(), next(task.batches(mesh(), 0))
    inner, seen = model.language.base_model, batch[0]
    loss = task.loss(model, batch)
    assert loss.item() == pytest.approx(math.log(304), abs=0.6)
    with torch.no_grad():
        for layer in inner.encoder.layer:
            for dense in (layer.attention.output.dense, layer.output.dense):
                dense.weight.zero_(), dense.bias.zero_()
        expected = inner.LayerNorm(inner.embeddings(seen))
        torch.testing.assert_close(inner(input_ids=seen).last_hidden_state, expected)


def test_transformers_reads_pre_norm(root: Path, text_file: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForMaskedLM

    task = small(root, text_file, pre_norm=True)
    model, (seen, places, _) = task.model().eval(), next(task.batches(mesh(), 0))
    package = task.package(model)
    (tmp_path / "config.json").write_text(package.files["config.json"])
    save_file(once(model, package.prefix), tmp_path / "model.safetensors", {"format": "pt"})
    read = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    logits = read(input_ids=seen).logits
    chosen = places.unsqueeze(-1).expand(-1, -1, logits.shape[-1])
    torch.testing.assert_close(model(seen, places), logits.gather(1, chosen))


def test_the_loss_is_that_of_the_chosen_tokens(task: RoBERTa) -> None:
    """Against the whole of transformers' own forward, labels where a token was chosen."""
    model, batch = task.model(), next(task.batches(mesh(), 0))
    seen, places, targets = batch
    labels = torch.full_like(seen, -100).scatter(1, places, targets)
    expected = model.language(input_ids=seen, labels=labels).loss
    loss = task.loss(model, batch)
    assert loss.shape == () and loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert loss.item() == pytest.approx(math.log(304), abs=0.6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = task.loss(model, batch)
    assert rough.dtype == torch.float32
    assert rough.item() == pytest.approx(loss.item(), abs=0.05)


def test_places_that_do_not_count(task: RoBERTa) -> None:
    model, (seen, places, targets) = task.model(), next(task.batches(mesh(), 0))
    some = targets.clone()
    some[0, 1:] = some[2] = IGNORED
    logits = model(seen, places)
    kept = some != IGNORED
    expected = F.cross_entropy(logits[kept], targets[kept])
    assert task.loss(model, (seen, places, some)).item() == pytest.approx(expected.item(), rel=1e-5)
    nothing = task.loss(model, (seen, places, torch.full_like(targets, IGNORED)))
    assert nothing.item() == 0


def test_every_weight_learns_a_batch_by_heart(task: RoBERTa) -> None:
    model, batch = task.model(), next(task.batches(mesh(), 0))
    optimizer = task.optimizer(model)
    for _ in range(60):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
    assert all(weight.grad is not None for weight in model.parameters())
    assert loss.item() < 1.5 < task.baselines()["unigram_entropy"]


def test_evaluation_is_the_mean_over_all_windows(root: Path, text_file: Path) -> None:
    task = small(root, text_file)
    model = task.model()
    numbers = np.arange(num_windows(task, "val"))
    inside = windows(text_of(task).tokens("val"), numbers, 32, overlap=0).numpy()
    rows = np.full((len(inside), 34), Vocabulary.START)
    rows[:, 1:-1], rows[:, -1] = roberta_ids(text_of(task), False)[inside], Vocabulary.END
    made = masked(rows, task.vocabulary, Masking(), 1907_11692, numbers)
    seen, places, targets = map(torch.from_numpy, made)
    with torch.no_grad():
        expected = F.cross_entropy(model(seen, places).flatten(0, 1), targets.flatten())
    scores = task.evaluate(model)
    assert scores["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert scores["perplexity"] == pytest.approx(math.exp(scores["loss"]))
    assert model.training
    other = small(root, text_file, seed=5)  # masks do not depend on the seed
    assert other.evaluate(model) == scores


class Bigrams(torch.nn.Module):
    """A model that workers need not import transformers for."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(304, 304, generator=torch.Generator().manual_seed(0))
        self.table = torch.nn.Embedding.from_pretrained(weight)

    def forward(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return self.table(tokens.gather(1, places - 1))


def scores(rank: int, world: int, root: str, text: str) -> dict[str, float]:
    task = small(Path(root), Path(text), eval_samples=700)  # six batches, the last one short
    return task.evaluate(Bigrams())


def test_evaluation_over_gloo(workers, task: RoBERTa, root: Path, text_file: Path) -> None:
    alone = scores(0, 1, str(root), str(text_file))
    for world in (1, 2, 3):
        assert workers.run(scores, world, str(root), str(text_file)) == [alone] * world


def test_the_baseline_leaves_separators_out(task: RoBERTa) -> None:
    tokens = np.asarray(text_of(task).tokens("val"))
    words = tokens[tokens != text_of(task).meta["separator"]]
    shares = np.unique(words, return_counts=True)[1] / len(words)
    expected = -(shares * np.log(shares)).sum()
    assert task.baselines() == {"unigram_entropy": pytest.approx(expected)}


def test_gpt2_shares_the_cache(
    monkeypatch: pytest.MonkeyPatch, root: Path, text_file: Path, task: RoBERTa
) -> None:
    other = gpt2(root, text_file, context=32, vocab_size=300)
    monkeypatch.setattr("tasks.text.text.create", lambda *_: pytest.fail("it is made again"))
    other.setup(1)
    assert task.fingerprint() == other.fingerprint()


def kept(root: Path, tokens: list[int], vocab_size: int = 50265, separator: int = 2) -> None:
    """A store at the place of wikibooks."""
    parts = {part: [np.array(tokens, np.uint16)] for part in store.PARTS}
    store.create(root / "wikibooks", parts, vocab_size, separator, {})


def test_wikibooks_keeps_its_ids(tmp_path: Path) -> None:
    kept(tmp_path, [*range(1000, 1015), 2] * 20)
    task = roberta(tmp_path, corpus=CorpusName.wikibooks, context=34)
    task.setup(1)
    seen, places, targets = next(task.batches(mesh(), 0))
    assert seen.scatter(1, places, targets)[0].tolist() == [0, *([*range(1000, 1015), 2] * 2), 2]
    assert task.vocabulary.mask == 50264 and (targets != 2).all()
    assert task.fingerprint()["data"] == "wikibooks"


@pytest.mark.parametrize(
    ("tokens", "of", "says"),
    [
        ([1000, 2] * 100, {"separator": 50256}, "end with 50256, RoBERTa's with 2"),
        ([2] * 200, {}, "train.bin holds separators and no text"),
        ([1000, 2] * 10, {}, "one window of roberta.context=34 needs 32"),
    ],
)
def test_a_store_that_cannot_be_used(tmp_path: Path, tokens: list[int], of, says: str) -> None:
    kept(tmp_path, tokens, **of)
    with pytest.raises(ConfigError) as caught:
        roberta(tmp_path, corpus=CorpusName.wikibooks, context=34).setup(1)
    line = str(caught.value)
    assert line.startswith("roberta.corpus=wikibooks: ") and says in line and "\n" not in line


@pytest.mark.parametrize("workers", [0, 1])
def test_a_token_outside_the_vocabulary(tmp_path: Path, workers: int) -> None:
    kept(tmp_path, [1000, 60001] * 100)
    task = roberta(tmp_path, corpus=CorpusName.wikibooks, context=34, workers=workers)
    task.setup(1)
    with pytest.raises(ConfigError) as caught:
        next(task.batches(mesh(), 0))
    line = str(caught.value)
    assert "train.bin holds token 60001, the vocabulary ends at 50265" in line
    assert caught.value.key == "data.root" and "\n" not in line


def test_wikibooks_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^roberta\.corpus=wikibooks.*prepare wikibooks --root"):
        roberta(tmp_path / "none", corpus=CorpusName.wikibooks).setup(1)
    assert not (tmp_path / "none").exists()


def test_text_that_is_too_little(tmp_path: Path, root: Path, text_file: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("only a few words")
    with pytest.raises(ConfigError, match=r"^data\.path=.*roberta\.context=34 needs 32"):
        small(tmp_path / "root", path)
    path.write_text(" \n")
    with pytest.raises(ConfigError, match=r"^data\.path=.*holds no text"):
        small(tmp_path / "root", path)
    with pytest.raises(ConfigError, match=r"^train\.batch_size=1000: 3 workers draw 3000"):
        small(root, text_file, batch_size=1000)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("context", 3), ("vocab_size", 256), ("eval_samples", 0)),
        *(("dropout", value) for value in (1.0, -0.1)),
        *(("mask_share", value) for value in (0.0, 1.1)),
        *(("mask_masked", value) for value in (-0.1, 1.1)),
        *(("mask_random", value) for value in (-0.1, 0.3)),
    ],
)
def test_config(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        RoBERTa.Config(**{key: value})
    assert caught.value.key == key
