"""GLUE: examples, metrics, batches and evaluation; bad data."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from co2.config import DataConfig, OptimConfig, TrainConfig
from co2.errors import ConfigError
from co2.task import FineTuning
from tasks import GLUE, RoBERTa
from tasks.glue import passages
from tasks.glue.examples import Examples, fitted
from tasks.glue.glue import Name
from tasks.glue.glue_tables import GLUE_TASKS, read_examples
from tasks.glue.scores import METRICS
from tasks.shared.corpus import user_corpus
from tasks.text.masking import Vocabulary
from tasks.text.roberta import CorpusName, roberta_ids
from tests.tasks import small_glue
from tests.tasks.build import built, mesh, roberta, text_of
from tests.tasks.conftest import story

glue = partial(built, "glue", context=34, vocab_size=300)


def adjoin(root: Path, text_file: Path, **more: Any) -> GLUE:
    task = glue(root, text_file, name=Name.adjoin, **more, num_workers=3)
    return task


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


@pytest.fixture
def of_glue(tmp_path: Path, text_file: Path):
    """Makes a task of GLUE, set up."""

    def make(name: str, saved: bool = False, **more: Any) -> GLUE:
        small_glue.write(tmp_path / "glue", (name,), saved)
        task = glue(tmp_path, text_file, name=Name(name), **more, num_workers=1)
        return task

    return make


def test_metrics() -> None:
    source = np.random.default_rng(0)
    labels, predictions = source.integers(0, 2, 200), source.integers(0, 2, 200)
    tp, tn = ((labels == k) & (predictions == k) for k in (1, 0))
    fp, fn = ((labels != k) & (predictions == k) for k in (1, 0))
    tp, tn, fp, fn = (int(which.sum()) for which in (tp, tn, fp, fn))
    assert METRICS["accuracy"](labels, predictions) == (tp + tn) / 200
    assert METRICS["f1"](labels, predictions) == pytest.approx(2 * tp / (2 * tp + fp + fn))
    root = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert METRICS["mcc"](labels, predictions) == pytest.approx((tp * tn - fp * fn) / root)
    x, y = source.random(50), source.random(50)
    assert METRICS["pearson"](x, y) == pytest.approx(np.corrcoef(x, y)[0, 1])
    ranks = [values.argsort().argsort() for values in (x, y)]
    assert METRICS["spearman"](x, y) == pytest.approx(np.corrcoef(*ranks)[0, 1])
    for name, metric in METRICS.items():
        if name != "accuracy":  # nothing is learned from predictions that are all equal
            assert metric(labels, np.zeros(200)) == 0


def test_rows() -> None:
    ids, tokens = np.arange(100) + 4, np.arange(50)
    starts, lengths = np.array([[0, 10], [20, 30]]), np.array([[2, 1], [9, 5]])
    pairs = Examples(tokens, starts, lengths, np.zeros(2, np.int64))
    rows = pairs.rows(np.array([1, 0]), ids, 11)
    assert rows[0].tolist() == [0, 24, 25, 26, 27, 2, 2, 34, 35, 36, 2]
    assert rows[1].tolist() == [0, 4, 5, 2, 2, 14, 2, 1, 1, 1, 1]
    one = Examples(tokens, starts[:, :1], lengths[:, :1], np.zeros(2, np.int64))
    assert one.rows(np.array([0, 1]), ids, 6).tolist() == [
        [0, 4, 5, 2, 1, 1],
        [0, 24, 25, 26, 27, 2],
    ]
    for first, second, kept in ((9, 9, [4, 3]), (9, 2, [5, 2]), (1, 9, [1, 6]), (3, 4, [3, 4])):
        assert fitted(np.array([[first, second]]), 7).tolist() == [kept]


def examples(task: GLUE) -> dict[str, Examples]:
    """What the task reads, made of its text or its tables."""
    name, root, path = task.config.name, Path(task.data.root), task.data.path
    if name.value in GLUE_TASKS:
        return read_examples(root / "glue" / name.value, name.value, text_of(task), root)
    assert path is not None
    if name is Name.topic:
        return passages.topic(text_of(task), user_corpus(path), task.length - 2)
    return passages.adjoin(text_of(task), user_corpus(path), (task.length - 4) // 2)


def texts(task: GLUE, part: str) -> list[list[str]]:
    tokenizer = Tokenizer.from_file(str(text_of(task).folder / "tokenizer.json"))
    found = examples(task)[part]
    return [
        [
            tokenizer.decode(found.tokens[start : start + length].tolist())
            for start, length in zip(*pieces, strict=True)
        ]
        for pieces in zip(found.starts, found.lengths, strict=True)
    ]


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


def test_topics_of_a_single_file(root: Path, text_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data\.path=.*use glue\.name=adjoin"):
        glue(root, text_file).setup(1)


def test_adjoining(root: Path, text_file: Path) -> None:
    task = adjoin(root, text_file)
    for part, found in examples(task).items():
        assert task.fingerprint()["num_samples"][part] == len(found)
        apart = found.starts[:, 1] - found.starts[:, 0]
        assert ((apart == 15) == (found.labels == 1)).all()
        assert np.bincount(found.labels).tolist() == [len(found) // 2] * 2
        assert (found.lengths == 15).all() and len(np.unique(found.starts)) == 2 * len(found)
    assert task.baselines() == {"majority_accuracy": 0.5}


def test_the_embedded_tasks_are_large_enough() -> None:
    """By the text of sympy itself; 3.5 characters make no more than two tokens."""
    from tasks.shared.corpus import embedded_corpus

    sizes: dict[str, int] = {}
    for name, text in embedded_corpus("glue.corpus").named_documents("val"):
        sizes[name.partition("/")[0]] = sizes.get(name.partition("/")[0], 0) + len(text)
    six = [sizes[name] for name in ("core", "geometry", "physics", "polys", "printing", "solvers")]
    assert 6 * (min(six) / 3.5 // 30) >= 1000
    assert sum(sizes.values()) / 3.5 / 28 >= 1000


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("name", ["cola", "mnli", "stsb"])
def test_examples_are_the_tables(of_glue, name: str, saved: bool) -> None:
    task = of_glue(name, saved)
    columns = GLUE_TASKS[name].columns
    for part, splits in (("train", ("train",)), ("val", GLUE_TASKS[name].validation)):
        tables = [small_glue.table(name, split) for split in splits]
        rows = [[row[column] for column in columns] for one in tables for row in one.to_pylist()]
        assert texts(task, part) == rows
        labels = np.concatenate([one["label"].to_numpy() for one in tables])
        assert np.allclose(examples(task)[part].labels, labels)
    assert examples(task)["val"].first == len(
        small_glue.table(name, GLUE_TASKS[name].validation[0])
    )
    assert len(list((Path(task.data.root) / "text").glob(f"glue_{name}-*"))) == 1
    assert task.fingerprint()["num_samples"]["train"] == 40


@pytest.mark.parametrize("name", GLUE_TASKS)
def test_every_task_of_glue(of_glue, name: str) -> None:
    """The metrics are those of all predictions, whatever the batches."""
    task = of_glue(name)
    model, found = task.model(), examples(task)["val"]
    loss = task.loss(model, next(task.batches(mesh(), 0)))
    assert loss.shape == () and loss.dtype == torch.float32
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


def test_a_pre_norm_encoder_is_that_of_roberta(root: Path, text_file: Path) -> None:
    masks = roberta(root, text_file, pre_norm=True).model()
    classes = {
        name for name, _ in adjoin(root, text_file, pre_norm=True).model().named_parameters()
    }
    new = {
        name for name, _ in masks.named_parameters() if not name.startswith(GLUE.heads)
    } ^ classes
    assert new and all(name.startswith(GLUE.heads) for name in new)


def test_samples_shorter_than_the_context(root: Path, text_file: Path) -> None:
    """The model is the same: only the samples are shorter."""
    task, whole = adjoin(root, text_file, length=20), adjoin(root, text_file)
    tokens, _ = next(task.batches(mesh(), 0))
    assert tokens.shape == (4, 20) and (tokens != Vocabulary.PAD).all()
    shapes = [[weight.shape for weight in one.model().parameters()] for one in (task, whole)]
    assert shapes[0] == shapes[1]
    assert set(task.evaluate(task.model())) == {"loss", "accuracy"}
    for length in (7, 35):
        with pytest.raises(ConfigError, match=f"^length={length}: must be a whole number from 8"):
            GLUE.Config(context=34, length=length)
    with pytest.raises(ConfigError, match=r"^context=6: must be 8 or more"):
        GLUE.Config(context=6)


def test_padding_changes_nothing(root: Path, text_file: Path) -> None:
    task = adjoin(root, text_file)
    model, (tokens, _) = task.model().eval(), next(task.batches(mesh(), 0))
    short = tokens.clone()
    short[:, 20:] = Vocabulary.PAD
    with torch.no_grad():
        assert torch.allclose(model(short), model(tokens[:, :20]), atol=1e-6)


def test_the_encoder_is_that_of_roberta(root: Path, text_file: Path) -> None:
    task = adjoin(root, text_file)
    data = DataConfig(root=str(root), path=str(text_file))
    config = RoBERTa.Config(context=34, vocab_size=300)
    other = RoBERTa(config, TrainConfig(), OptimConfig(), data)
    shapes = [
        {name: value.shape for name, value in one.model().state_dict().items()}
        for one in (task, other)
    ]
    both = shapes[0].keys() & shapes[1].keys()
    assert all(shapes[0][name] == shapes[1][name] for name in both)
    rest = (shapes[0].keys() | shapes[1].keys()) - both
    assert rest and all(name.startswith(task.heads) for name in rest)
    assert isinstance(task, FineTuning)


def test_objections(root: Path, text_file: Path, folder: Path) -> None:
    task = adjoin(root, text_file)
    data = task.fingerprint()["text"]
    shape = {"size": "smoke", "context": 34, "vocab_size": 300}
    run = {"task": "roberta", "roberta": shape}
    assert task.objection(run, data) is None
    assert task.objection({"task": "glue", "glue": shape}, {"text": data}) is None
    assert "task=gpt2" in str(task.objection({"task": "gpt2"}, data))
    for key, value in (("size", "base"), ("context", 32), ("vocab_size", 512)):
        other = {"task": "roberta", "roberta": {**shape, key: value}}
        assert f"roberta.{key}={value}" in str(task.objection(other, data))
    elsewhere = glue(root, folder, num_workers=1)
    assert "vocabulary" in str(task.objection(run, elsewhere.fingerprint()["text"]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("none", "has no split train"),
        ("split", "has no split validation"),
        ("column", "validation has no column sentence2"),
        ("labels", "validation has labels that are not from 0 to 1"),
        ("damage", "validation cannot be read"),
    ],
)
def test_tables_that_cannot_be_used(
    tmp_path: Path, text_file: Path, change: str, says: str
) -> None:
    small_glue.write(tmp_path / "glue", () if change == "none" else ("rte",))
    file = tmp_path / "glue" / "rte" / "validation-00000-of-00002.parquet"
    if change == "split":
        for path in file.parent.glob("validation-*"):
            path.unlink()
    elif change == "damage":
        file.write_bytes(b"PAR1 and no more")
    elif change != "none":
        for path in file.parent.glob("validation-*"):
            table = pq.read_table(path)
            at = table.column_names.index("label")
            table = (
                table.drop_columns(["sentence2"])
                if change == "column"
                else table.set_column(at, "label", [[7] * len(table)])
            )
            pq.write_table(table, path)
    with pytest.raises(ConfigError) as caught:
        glue(tmp_path, text_file, name=Name.rte).setup(1)
    line = str(caught.value)
    assert line.startswith("glue.name=rte: ") and says in line and "\n" not in line
    assert f"python -m tasks.prepare glue --root {tmp_path}" in line


def test_public_text_has_no_files(tmp_path: Path) -> None:
    from tests.tasks.test_roberta import kept

    kept(tmp_path, [*range(1000, 1015), 2] * 20)
    with pytest.raises(ConfigError, match=r"^glue\.corpus=wikibooks: glue\.name=topic is made"):
        glue(tmp_path, corpus=CorpusName.wikibooks).setup(1)
