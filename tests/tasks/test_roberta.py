"""RoBERTa: masks, sizes, ids, loss and evaluation. GLUE, its fine-tuning: examples, metrics,
batches and evaluation. Bad data of both.

What all tasks must do is in test_contract.py.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from scipy.stats import chisquare
from tokenizers import Tokenizer

from co2.app.export import once
from tasks import GLUE, RoBERTa
from tasks.glue import passages
from tasks.glue.examples import Examples, fitted
from tasks.glue.glue import Name
from tasks.glue.glue_tables import GLUE_TASKS, BadTable, read_examples, read_split
from tasks.glue.scores import METRICS
from tasks.shared.corpus import user_corpus
from tasks.shared.randomness import generator
from tasks.text import store
from tasks.text.masking import IGNORED, Masking, Vocabulary, masked
from tasks.text.roberta import CorpusName, Size, roberta_ids
from tasks.text.text import windows
from tests.tasks import small_glue
from tests.tasks.build import built, mesh, num_parameters, refusal, roberta, sampler, text_of
from tests.tasks.conftest import story

WORDS = Vocabulary(1000)


def rows(number: int, length: int = 100) -> np.ndarray:
    """Windows of ordinary tokens between <s> and </s>, with a separator here and there."""
    source = generator(5)
    found = source.integers(4, WORDS.mask, (number, length))
    found[source.random(found.shape) < 0.05] = Vocabulary.END
    found[:, 0], found[:, -1] = Vocabulary.START, Vocabulary.END
    return found


def test_a_window_loses_just_the_chosen_places() -> None:
    """Only ordinary tokens are chosen and drawn."""
    given = rows(400)
    before = given.copy()
    seen, places, targets = masked(given, WORDS, Masking(), 0, 0, np.arange(400))
    assert np.array_equal(given, before)
    assert places.shape == targets.shape == (400, 15)
    assert (np.diff(places, axis=1) > 0).all()
    assert np.array_equal(np.take_along_axis(given, places, axis=1), targets)
    restored = seen.copy()
    np.put_along_axis(restored, places, targets, axis=1)
    assert np.array_equal(restored, given)
    assert targets.min() >= 4 and targets.max() < WORDS.mask
    drawn = seen[(seen != given) & (seen != WORDS.mask)]
    assert len(drawn) > 300 and drawn.min() >= 4 and drawn.max() < WORDS.mask


@pytest.mark.parametrize("masking", [Masking(), Masking(0.4, 0.5, 0.3)])
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
        error = 4 * math.sqrt(share * (1 - share) / number)
        assert abs(kind.mean() - share) <= error + 4e-4 * masking.random
    # Random tokens are uniform over the ordinary ones, and places over the window.
    often = np.bincount(shown[is_random], minlength=WORDS.size)[4 : WORDS.mask]
    assert chisquare(often).pvalue > 1e-3
    often = np.bincount(places.ravel(), minlength=100)[1:-1]
    expected = number / 98
    assert abs(often - expected).max() < 6 * math.sqrt(expected)


def test_windows_with_too_few_words() -> None:
    given = np.full((2, 22), Vocabulary.END)
    given[0, 5] = 9
    seen, places, targets = masked(given, WORDS, Masking(), 0, np.arange(2))
    assert sorted(targets[0]) == [IGNORED, IGNORED, 9]
    assert places[0][targets[0] == 9].tolist() == [5]
    assert (targets[1] == IGNORED).all() and np.array_equal(seen[1], given[1])


def test_sizes() -> None:
    public = {"corpus": CorpusName.wikibooks, "context": 512}
    assert num_parameters("roberta", size=Size.base, **public) == 124_697_433  # as published
    assert num_parameters("roberta", size=Size.large, **public) == 355_412_057
    one_norm = 2 * 1024  # that of the last layer's output
    pre_norm = num_parameters("roberta", size=Size.large, pre_norm=True, **public)
    assert pre_norm == 355_412_057 + one_norm
    assert num_parameters("roberta") < 200_000
    for length, number in ((2, 1), (20, 3), (40, 6), (512, 77)):
        assert Masking().num_chosen(length) == number, "fifteen percent"


def small(root: Path, text_file: Path, **more: Any) -> RoBERTa:
    return roberta(root, text_file, **{"context": 34, "vocab_size": 300, **more}, num_workers=3)


@pytest.fixture
def task(root: Path, text_file: Path) -> RoBERTa:
    """The smoke model on the small text."""
    return small(root, text_file)


def num_windows(task: RoBERTa, part: str) -> int:
    return text_of(task).count(part) // 32


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


def test_masks_are_as_configured(root: Path, text_file: Path) -> None:
    """Wettig et al.'s: 40 % of the tokens, and each becomes <mask>."""
    task = small(root, text_file, mask_share=0.4, mask_masked=1.0, mask_random=0.0)
    seen, places, targets = next(task.batches(mesh(), 0))
    assert places.shape == (4, 14) and (targets != IGNORED).all()
    assert (seen.gather(1, places) == task.vocabulary.mask).all()


def test_pre_norm(root: Path, text_file: Path, tmp_path: Path) -> None:
    """transformers reads such a model. Without what the layers add, all that is left of them is
    the last norm."""
    from transformers import AutoModelForMaskedLM

    task = small(root, text_file, pre_norm=True)
    model, (seen, places, _) = task.model().eval(), next(task.batches(mesh(), 0))
    package, inner = task.package(model), model.language.base_model
    (tmp_path / "config.json").write_text(package.files["config.json"])
    save_file(once(model, package.prefix), tmp_path / "model.safetensors", {"format": "pt"})
    logits = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()(input_ids=seen).logits
    chosen = places.unsqueeze(-1).expand(-1, -1, logits.shape[-1])
    torch.testing.assert_close(model(seen, places), logits.gather(1, chosen))
    with torch.no_grad():
        for layer in inner.encoder.layer:
            for dense in (layer.attention.output.dense, layer.output.dense):
                dense.weight.zero_(), dense.bias.zero_()
        expected = inner.LayerNorm(inner.embeddings(seen))
        torch.testing.assert_close(inner(input_ids=seen).last_hidden_state, expected)


def test_the_loss_is_that_of_the_chosen_tokens(root: Path, text_file: Path) -> None:
    """Against the whole of transformers' own forward, labels where a token was chosen; words come
    in and out by one matrix."""
    task = small(root, text_file, dropout=0.25)
    inner = task.model().language
    rates = {module.p for module in inner.modules() if isinstance(module, torch.nn.Dropout)}
    assert rates == {0.25}
    assert inner.lm_head.decoder.weight is inner.roberta.embeddings.word_embeddings.weight
    model, (seen, places, targets) = task.model().eval(), next(task.batches(mesh(), 0))
    some = targets.clone()
    some[0, 1:] = some[2] = IGNORED  # places that do not count
    for own in (targets, some):
        labels = torch.full_like(seen, -100)
        kept = own != IGNORED
        labels[kept.nonzero()[:, 0], places[kept]] = own[kept]
        expected = model.language(input_ids=seen, labels=labels).loss
        loss = task.loss(model, (seen, places, own))
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert task.loss(model, (seen, places, torch.full_like(targets, IGNORED))).item() == 0


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
    other = small(root, text_file, seed=5)  # masks do not depend on the seed
    assert other.evaluate(model) == scores
    tokens = np.asarray(text_of(task).tokens("val"))
    words = tokens[tokens != text_of(task).meta["separator"]]
    shares = np.unique(words, return_counts=True)[1] / len(words)
    entropy = -(shares * np.log(shares)).sum()
    assert task.baselines() == {"unigram_entropy": pytest.approx(entropy)}


def test_wikibooks_keeps_its_ids(tmp_path: Path) -> None:
    tokens = np.array([*range(1000, 1015), 2] * 20, np.uint16)
    store.create(tmp_path / "wikibooks", {part: [tokens] for part in store.PARTS}, 50265, 2, {})
    of_it = {"corpus": CorpusName.wikibooks, "context": 34, "num_workers": 1}
    line = refusal(lambda: built("glue", tmp_path, name=Name.topic, **of_it))
    assert line.startswith("glue.corpus=wikibooks: glue.name=topic is made of text files")
    task = roberta(tmp_path, **of_it)
    seen, places, targets = next(task.batches(mesh(), 0))
    assert seen.scatter(1, places, targets)[0].tolist() == [0, *([*range(1000, 1015), 2] * 2), 2]
    assert task.vocabulary.mask == 50264 and (targets != 2).all()
    assert task.fingerprint()["data"] == "wikibooks"


glue = partial(built, "glue", context=34, vocab_size=300)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of three topics; more than twenty, so that whole files validate."""
    folder = tmp_path_factory.mktemp("files")
    for number in range(60):
        path = folder / ("north", "south/deep", "west")[number % 3] / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{path.parent.name} " * 10 + story(200, number))
    (folder / "top.txt").write_text(story(100))
    return folder


def test_metrics() -> None:
    labels, predictions = np.array([0, 1, 1, 0, 1, 0]), np.array([0, 1, 0, 0, 1, 1])
    for name, expected in (("accuracy", 2 / 3), ("f1", 2 / 3), ("mcc", 1 / 3)):
        assert METRICS[name](labels, predictions) == pytest.approx(expected)
    x, y = np.array([1.0, 2, 3]), np.array([1.0, 2, 9])
    assert METRICS["spearman"](x, y) == pytest.approx(1)
    assert METRICS["pearson"](x, y) == pytest.approx(8 / 76**0.5)
    for name, metric in METRICS.items():
        if name != "accuracy":  # nothing is learned from predictions that are all equal
            assert metric(labels, np.zeros(6)) == 0


def test_rows() -> None:
    ids, tokens = np.arange(100) + 4, np.arange(50)
    starts, lengths = np.array([[0, 10], [20, 30]]), np.array([[2, 1], [9, 5]])
    pairs = Examples(tokens, starts, lengths, np.zeros(2, np.int64))
    rows = pairs.rows(np.array([1, 0]), ids, 11)
    assert rows[0].tolist() == [0, 24, 25, 26, 27, 2, 2, 34, 35, 36, 2]
    assert rows[1].tolist() == [0, 4, 5, 2, 2, 14, 2, 1, 1, 1, 1]
    one = Examples(tokens, starts[:, :1], lengths[:, :1], np.zeros(2, np.int64))
    rows = one.rows(np.array([0, 1]), ids, 6)
    assert rows.tolist() == [[0, 4, 5, 2, 1, 1], [0, 24, 25, 26, 27, 2]]
    for first, second, kept in ((9, 9, [4, 3]), (9, 2, [5, 2]), (1, 9, [1, 6]), (3, 4, [3, 4])):
        assert fitted(np.array([[first, second]]), 7).tolist() == [kept]


def adjoin(root: Path, text_file: Path, **more: Any) -> GLUE:
    return glue(root, text_file, name=Name.adjoin, **more, num_workers=3)


def examples(task: GLUE) -> dict[str, Examples]:
    """What the task reads, made of its text or its tables."""
    name, root, path = task.config.name, Path(task.data.root), task.data.path
    if name.value in GLUE_TASKS:
        return read_examples(root / "glue" / name.value, name.value, text_of(task), root)
    if name is Name.topic:
        return passages.topic(text_of(task), user_corpus(path), task.length - 2)
    return passages.adjoin(text_of(task), user_corpus(path), (task.length - 4) // 2)


def texts(task: GLUE, part: str) -> list[list[str]]:
    tokenizer = Tokenizer.from_file(str(text_of(task).folder / "tokenizer.json"))
    found = examples(task)[part]

    def text(start: int, length: int) -> str:
        return tokenizer.decode(found.tokens[start : start + length].tolist())

    rows = zip(found.starts, found.lengths, strict=True)
    return [[text(*piece) for piece in zip(*pieces, strict=True)] for pieces in rows]


def test_topics(root: Path, folder: Path) -> None:
    task = glue(root, folder, num_workers=1)
    corpus = user_corpus(str(folder))
    assert task.num_labels == 3 and task.baselines() == {"majority_accuracy": 1 / 3}
    for part in ("train", "val"):
        documents = list(corpus.named_documents(part))
        found = examples(task)[part]
        assert task.fingerprint()["num_samples"][part] == len(found)
        assert (found.lengths == 32).all() and len(np.unique(found.starts)) == len(found)
        assert (np.diff(np.sort(found.starts[:, 0])) >= 32).all()  # none overlap
        assert len(set(np.bincount(found.labels))) == 1
        for (text,), label in zip(texts(task, part)[::7], found.labels[::7], strict=True):
            top = ("north", "south", "west")[label]
            inside = [name for name, whole in documents if text.strip("�") in whole]
            assert any(name.startswith(top) for name in inside)
    assert corpus.validation_files.isdisjoint(n for n, _ in corpus.named_documents("train"))


def test_adjoining(root: Path, text_file: Path) -> None:
    task = adjoin(root, text_file)
    for part, found in examples(task).items():
        assert task.fingerprint()["num_samples"][part] == len(found)
        apart = found.starts[:, 1] - found.starts[:, 0]
        assert ((apart == 15) == (found.labels == 1)).all()
        assert np.bincount(found.labels).tolist() == [len(found) // 2] * 2
        assert (found.lengths == 15).all() and len(np.unique(found.starts)) == 2 * len(found)
    assert task.baselines() == {"majority_accuracy": 0.5}


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with GLUE's tables, of which some are as `save_to_disk` writes them."""
    root = tmp_path_factory.mktemp("glue")
    for saved, names in ((True, ("mnli", "rte")), (False, GLUE_TASKS.keys() - {"mnli", "rte"})):
        small_glue.write(root / "glue", tuple(names), saved)
    return root


@pytest.mark.parametrize("name", ["cola", "mnli", "stsb"])
def test_examples_are_the_tables(tables: Path, text_file: Path, name: str) -> None:
    task = glue(tables, text_file, name=Name(name), num_workers=1)
    columns = GLUE_TASKS[name].columns
    for part, splits in (("train", ("train",)), ("val", GLUE_TASKS[name].validation)):
        tables = [small_glue.table(name, split) for split in splits]
        rows = [[row[column] for column in columns] for one in tables for row in one.to_pylist()]
        assert texts(task, part) == rows
        labels = np.concatenate([one["label"].to_numpy() for one in tables])
        assert np.allclose(examples(task)[part].labels, labels)
    first = small_glue.table(name, GLUE_TASKS[name].validation[0])
    assert examples(task)["val"].first == len(first)
    assert len(list((Path(task.data.root) / "text").glob(f"glue_{name}-*"))) == 1
    assert task.fingerprint()["num_samples"]["train"] == 40


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("sentence", 7, "has int64 values, not texts, in sentence"),
        ("sentence", None, "has no rows, or empty fields"),
        ("label", None, "has no rows, or empty fields"),
        ("label", 1.0, "has labels that are no numbers, or not whole ones"),
        ("label", 2, "has labels that are not from 0 to 1"),
        ("label", -1, "has labels that are not from 0 to 1"),
    ],
)
def test_a_table_that_is_not_the_task_s(
    tmp_path: Path, column: str, value: object, says: str
) -> None:
    sound = small_glue.table("sst2", "train")
    spoilt = sound.set_column(sound.column_names.index(column), column, [[value] * len(sound)])
    pq.write_table(spoilt, tmp_path / "train-00000-of-00001.parquet")
    with pytest.raises(BadTable, match=says):
        read_split(tmp_path, "sst2", "train")


@pytest.mark.parametrize("name", GLUE_TASKS)
def test_every_task_of_glue(tables: Path, text_file: Path, name: str) -> None:
    """The metrics are those of all predictions, whatever the batches."""
    task = glue(tables, text_file, name=Name(name), num_workers=1)
    model, found = task.model(), examples(task)["val"]
    rows = found.rows(np.arange(len(found)), roberta_ids(text_of(task), False), task.length)
    tokens, labels = torch.from_numpy(rows), torch.from_numpy(found.labels)
    with torch.no_grad():
        logits = model(tokens)
    regression = name == "stsb"
    predictions = (logits[:, 0] if regression else logits.argmax(-1)).numpy()
    scores = task.evaluate(model)
    whole = F.mse_loss(logits[:, 0], labels) if regression else F.cross_entropy(logits, labels)
    assert scores.pop("loss") == pytest.approx(whole.item(), rel=1e-5)
    expected = {}
    for metric in GLUE_TASKS[name].metrics:
        if name == "mnli":
            right = predictions == found.labels
            expected = {"accuracy": right[:13].mean(), "accuracy_mismatched": right[13:].mean()}
        else:
            expected[metric] = METRICS[metric](found.labels, predictions)
    assert scores == pytest.approx(expected, abs=1e-6)
    assert set(task.baselines()) == {"variance" if regression else "majority_accuracy"}


def test_samples_shorter_than_the_context(root: Path, text_file: Path) -> None:
    """The model is the same: only the samples are shorter; and padding changes nothing."""
    task, whole = adjoin(root, text_file, length=20), adjoin(root, text_file)
    tokens, _ = next(task.batches(mesh(), 0))
    assert tokens.shape == (4, 20) and (tokens != Vocabulary.PAD).all()
    shapes = [[weight.shape for weight in one.model().parameters()] for one in (task, whole)]
    assert shapes[0] == shapes[1]
    model, padded = task.model().eval(), F.pad(tokens, (0, 14), value=Vocabulary.PAD)
    with torch.no_grad():
        assert torch.allclose(model(padded), model(tokens), atol=1e-6)


def test_objections(root: Path, text_file: Path, folder: Path) -> None:
    task = adjoin(root, text_file)
    data = task.fingerprint()["text"]
    shape = {"size": "smoke", "context": 34, "vocab_size": 300}
    run = {"task": "roberta", "roberta": shape}
    assert task.objection(run, data) is None
    assert task.objection({"task": "glue", "glue": shape}, {"text": data}) is None
    assert "task=gpt2" in str(task.objection({"task": "gpt2"}, data))
    other = {"task": "roberta", "roberta": {**shape, "vocab_size": 512}}
    assert "roberta.vocab_size=512" in str(task.objection(other, data))
    elsewhere = glue(root, folder, num_workers=1)
    assert "vocabulary" in str(task.objection(run, elsewhere.fingerprint()["text"]))
