"""RoBERTa: masks, sizes, ids, loss and evaluation; bad data. What all tasks must do is in
test_contract.py.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from scipy.stats import chisquare
from transformers import RobertaConfig

from co2.app.export import once
from co2.errors import ConfigError
from tasks import RoBERTa
from tasks.shared.randomness import generator
from tasks.text import store
from tasks.text.masking import IGNORED, Masking, Vocabulary, masked
from tasks.text.roberta import CorpusName, Size, begin_as_waves, roberta_ids
from tasks.text.text import windows
from tests.tasks.build import gpt2, mesh, num_parameters, roberta, sampler, text_of

WORDS = Vocabulary(1000)


def rows(number: int, length: int = 100) -> np.ndarray:
    """Windows of ordinary tokens between <s> and </s>, with a separator here and there."""
    source = generator(5)
    found = source.integers(4, WORDS.mask, (number, length))
    found[source.random(found.shape) < 0.05] = Vocabulary.END
    found[:, 0], found[:, -1] = Vocabulary.START, Vocabulary.END
    return found


def test_a_window_loses_just_the_chosen_places() -> None:
    given = rows(50)
    before = given.copy()
    seen, places, targets = masked(given, WORDS, Masking(), 0, 0, np.arange(50))
    assert np.array_equal(given, before)
    assert places.shape == targets.shape == (50, 15)
    assert (np.diff(places, axis=1) > 0).all()
    assert np.array_equal(np.take_along_axis(given, places, axis=1), targets)
    restored = seen.copy()
    np.put_along_axis(restored, places, targets, axis=1)
    assert np.array_equal(restored, given)


def test_only_ordinary_tokens_are_chosen_and_drawn() -> None:
    given = rows(400)
    seen, _, targets = masked(given, WORDS, Masking(), 0, 0, np.arange(400))
    assert targets.min() >= 4 and targets.max() < WORDS.mask
    special = (given < 4) | (given == WORDS.mask)
    assert np.array_equal(seen[special], given[special])
    drawn = seen[(seen != given) & (seen != WORDS.mask)]
    assert len(drawn) > 300 and drawn.min() >= 4 and drawn.max() < WORDS.mask


@pytest.mark.parametrize("masking", [Masking(), Masking(0.4, 0.5, 0.3), Masking(0.2, 1.0, 0.0)])
def test_the_shares_are_those_of_the_recipe(masking: Masking) -> None:
    """Within four standard deviations of a binomial."""
    given = rows(4000)
    seen, places, targets = masked(given, WORDS, masking, 0, 0, np.arange(4000))
    assert places.shape == (4000, round(100 * masking.share))
    shown = np.take_along_axis(seen, places, axis=1)
    is_mask, is_same = shown == WORDS.mask, shown == targets
    is_random = ~(is_mask | is_same)
    rest = 1 - masking.masked - masking.random
    number = targets.size
    kinds = ((masking.masked, is_mask), (rest, is_same), (masking.random, is_random))
    for share, kind in kinds:
        # One random token in 995 is the token itself.
        error = 4 * math.sqrt(abs(share * (1 - share)) / number)
        assert abs(kind.mean() - share) <= error + 4e-4 * masking.random + 1e-12
    # Random tokens are uniform over the ordinary ones, and places over the window.
    if masking.random:
        drawn = shown[is_random]
        often = np.bincount(drawn, minlength=WORDS.size)[4 : WORDS.mask]
        assert chisquare(often).pvalue > 1e-3
    often = np.bincount(places.ravel(), minlength=100)[1:-1]
    expected = number / 98
    assert abs(often - expected).max() < 6 * math.sqrt(expected)


def test_the_key_alone_decides() -> None:
    given = rows(8)
    first = masked(given, WORDS, Masking(), 3, 7, np.arange(8))
    np.random.seed(1)
    again = masked(given[4:], WORDS, Masking(), 3, 7, np.arange(4, 8))  # of other neighbours
    for whole, half in zip(first, again, strict=True):
        assert np.array_equal(whole[4:], half)
    for other in ((3, 8), (4, 7)):
        found = masked(given, WORDS, Masking(), *other, np.arange(8))
        assert (found[1] != first[1]).any(axis=1).all()


def test_windows_with_too_few_words() -> None:
    given = np.full((2, 22), Vocabulary.END)
    given[0, 5] = 9
    seen, places, targets = masked(given, WORDS, Masking(), 0, np.arange(2))
    assert sorted(targets[0]) == [IGNORED, IGNORED, 9]
    assert places[0][targets[0] == 9].tolist() == [5]
    assert (targets[1] == IGNORED).all() and np.array_equal(seen[1], given[1])


@pytest.mark.parametrize(("length", "number"), [(2, 1), (20, 3), (40, 6), (512, 77)])
def test_fifteen_percent(length: int, number: int) -> None:
    assert Masking().num_chosen(length) == number


def small(root: Path, text_file: Path, **more: Any) -> RoBERTa:
    task = roberta(root, text_file, **{"context": 34, "vocab_size": 300, **more}, num_workers=3)
    return task


@pytest.fixture
def task(root: Path, text_file: Path) -> RoBERTa:
    """The smoke model on the small text."""
    return small(root, text_file)


def test_sizes() -> None:
    public = {"corpus": CorpusName.wikibooks, "context": 512}
    assert num_parameters("roberta", size=Size.base, **public) == 124_697_433  # as published
    assert num_parameters("roberta", size=Size.large, **public) == 355_412_057
    one_norm = 2 * 1024  # that of the last layer's output
    assert (
        num_parameters("roberta", size=Size.large, pre_norm=True, **public)
        == 355_412_057 + one_norm
    )
    assert num_parameters("roberta") < 200_000


def num_windows(task: RoBERTa, part: str) -> int:
    return text_of(task).count(part) // 32


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
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert loss.item() == pytest.approx(math.log(304), abs=0.6)


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
    task = roberta(tmp_path, corpus=CorpusName.wikibooks, context=34, num_workers=1)
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
    task = roberta(
        tmp_path, corpus=CorpusName.wikibooks, context=34, workers=workers, num_workers=1
    )
    with pytest.raises(ConfigError) as caught:
        next(task.batches(mesh(), 0))
    line = str(caught.value)
    assert "train.bin holds token 60001, the vocabulary ends at 50265" in line
    assert caught.value.key == "data.root" and "\n" not in line


def test_text_that_is_too_little(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("only a few words")
    with pytest.raises(ConfigError, match=r"^data\.path=.*roberta\.context=34 needs 32"):
        small(tmp_path / "root", path)
    path.write_text(" \n")
    with pytest.raises(ConfigError, match=r"^data\.path=.*holds no text"):
        small(tmp_path / "root", path)


def test_shares_of_the_mask_that_are_more_than_all() -> None:
    with pytest.raises(ConfigError) as caught:
        RoBERTa.Config(mask_masked=0.8, mask_random=0.3)
    assert caught.value.key == "mask_random"
