"""What is done with a finished run: `co2 export`, whose files other libraries read; another run
starts from it by init_from; and it writes texts."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

import train
from co2.app import sample
from co2.app.compose import preflight
from co2.errors import ConfigError
from co2.task import Task
from co2.train import init_from
from tasks.text.causal import CausalText
from tasks.text.gpt2 import GPT2
from tasks.text.roberta import RoBERTa, roberta_ids
from tests.cli.harness import (
    assert_same_run,
    configured,
    contents,
    folder_of,
    manifest,
    pooled,
    refused,
    small,
    summary,
    weights,
)
from tests.tasks import small_glue
from tests.tasks.build import text_of
from tests.tasks.conftest import story
from tests.workers import Pool

Finished = Callable[[str], Path]
WORDS = "replica anchor, über\n\n\tround数 the"


@pytest.fixture(scope="module")
def exported(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The export of a finished run of a task."""
    base, made = tmp_path_factory.mktemp("exported"), {}

    def of(task: str) -> Path:
        if task not in made:
            assert train.APP.main(["export", str(finished(task)), str(base / task)]) == 0
            made[task] = base / task
        return made[task]

    return of


@pytest.fixture
def words(root: Path, text: Path, tmp_path: Path) -> Callable[..., tuple[str, ...]]:
    """The command line of a run that starts from a folder."""

    def of(task: str, start: Path, *more: str) -> tuple[str, ...]:
        few = ("train.batch_size=4", "launch.workers=1", "method=allreduce", "log.wandb=disabled")
        return (*small(task, root, text), *few, f"init_from={start}", *more)

    return of


def read(folder: Path) -> dict[str, Any]:
    """What the lines of Python in an export's README.md make."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code.replace("FOLDER", str(folder)), "README.md", "exec"), names)
    return names


def started(words: tuple[str, ...], runs: Path) -> tuple[Task, nn.Module]:
    """A task that init_from has been checked for, and a new model with the weights. Raises
    `ConfigError` as train.py does."""
    config = configured(*words, runs=runs)
    train.APP.prepare_data(config)
    task = train.APP.make_task(config)
    task.setup(1)
    model = task.model()
    assert config.init_from is not None
    init_from.load(config.init_from, model, task)
    return task, model


def not_begun(words: tuple[str, ...], runs: Path) -> str:
    """Why a run does not start from what init_from names, which is told before any worker is."""
    with pytest.raises(ConfigError) as caught:
        preflight(train.APP.conf, [*words, f"runs={runs}"], train.APP.check)
    assert caught.value.key == "init_from" and "\n" not in str(caught.value)
    assert not runs.exists()
    return caught.value.hint


def test_all_files_have_the_mode_that_the_umask_leaves(tmp_path: Path) -> None:
    """Those of a run and its checkpoints, and those of the export."""
    runs, words = tmp_path / "runs", ("method=co2", "launch.workers=1", "train.steps=2")
    before = os.umask(0o027)
    try:
        train.APP.work(configured(*words, "checkpoint.every=1", "log.wandb=offline", runs=runs))
        run = str(folder_of(*words, runs=runs))
        assert train.APP.main(["export", run, str(tmp_path / "made")]) == 0
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert {"model.safetensors", "model.pt", "worker_0.safetensors"} <= {
        path.name for path in files
    }
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == {
        path.name: "0o640" for path in files
    }


def test_gpt2(finished: Finished, exported: Finished) -> None:
    """Logits and tokens are the same, and nothing is missing."""
    from transformers import AutoModelForCausalLM

    folder = exported("gpt2")
    names, run = read(folder), train.APP.open(str(finished("gpt2")))
    model, tokenizer, own = names["model"], names["tokenizer"], run.model()
    assert isinstance(run.task, GPT2)
    learned = run.task.tokenizer()
    assert learned is not None
    tokens = torch.tensor([tokenizer.encode(WORDS)])
    assert tokens[0].tolist() == Tokenizer.from_str(learned).encode(WORDS).ids
    assert tokenizer.decode(tokens[0]) == WORDS
    assert tokenizer.eos_token_id == model.config.eos_token_id == run.task.separator
    assert torch.equal(model(tokens).logits, own(input_ids=tokens).logits)
    _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert tokenizer.model_max_length == 32


def test_roberta(finished: Finished, exported: Finished) -> None:
    folder = exported("roberta")
    names, run = read(folder), train.APP.open(str(finished("roberta")))
    model, tokenizer, own = names["model"], names["tokenizer"], run.model()
    assert isinstance(run.task, RoBERTa)
    text = text_of(run.task)
    learned = Tokenizer.from_file(f"{text.folder}/tokenizer.json").encode(WORDS).ids
    tokens = torch.tensor([tokenizer.encode(WORDS)])
    assert tokens[0].tolist() == [0, *roberta_ids(text, False)[learned], 2]
    size = model.config.vocab_size
    filled = tokenizer("replica <mask> round")["input_ids"]
    assert size == 516 and filled.count(size - 1) == 1 and tokenizer.mask_token_id == size - 1
    assert len(filled) == len(tokenizer("replica round")["input_ids"]) + 1
    special = tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id
    assert (*special, tokenizer.unk_token_id) == (0, 1, 2, 3)
    places = torch.arange(tokens.shape[1])[None]
    torch.testing.assert_close(model(tokens).logits, own(tokens, places), rtol=0, atol=1e-6)
    first, second = (tokenizer(words)["input_ids"][1:-1] for words in ("the", "of"))
    assert tokenizer("the", "of")["input_ids"] == [0, *first, 2, 2, *second, 2]


def test_glue(finished: Finished, exported: Finished) -> None:
    names, own = read(exported("glue")), train.APP.open(str(finished("glue"))).model()
    given = names["tokenizer"](["the round", "anchor"], padding=True, return_tensors="pt")
    logits = names["model"](**given).logits
    assert logits.shape == (2, 2)
    torch.testing.assert_close(logits, own(given["input_ids"]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("task", ["vit", "resnet50"])
def test_images(finished: Finished, exported: Finished, task: str) -> None:
    folder, images = exported(task), torch.rand(3, 3, 28, 28)
    model, own = read(folder)["model"].eval(), train.APP.open(str(finished(task))).model()
    assert torch.equal(model(images), own(images))
    about = json.loads((folder / "config.json").read_text())
    assert about["num_classes"] == 10 and about["pretrained_cfg"]["input_size"] == [3, 28, 28]
    assert about["label_names"] == list("0123456789")


@pytest.mark.parametrize("task", ["toy", "moe"])
def test_what_no_library_knows(finished: Finished, exported: Finished, task: str) -> None:
    """Plain weights by their own names; one of two names is stored once."""
    found, there = read(exported(task))["weights"], weights(finished(task))
    assert there.keys() - found.keys() == ({"lm_head.weight"} if task == "moe" else set())
    assert found and all(torch.equal(weight, there[name]) for name, weight in found.items())
    about = json.loads((exported(task) / "config.json").read_text())
    assert about["task"] == task and about[task].keys() > {"toy": {"hidden"}, "moe": {"size"}}[task]
    with safe_open(exported(task) / "model.safetensors", "pt") as file:
        header = file.metadata()
    assert header["task"] == task and header["method"] == "allreduce"
    assert header.keys() >= {"command", "commit", "scale"}
    assert (exported(task) / "tokenizer.json").exists() == (task == "moe")


@pytest.mark.parametrize("task", ["gpt2", "roberta", "glue", "vit", "resnet50", "moe", "toy"])
def test_it_comes_back(
    finished: Finished, exported: Finished, words: Callable, tmp_path: Path, task: str
) -> None:
    """init_from of the export starts with the weights of the run, to the last bit."""
    _, model = started(words(task, exported(task)), tmp_path / "runs")
    there, here = weights(finished(task)), model.state_dict()
    assert there.keys() == here.keys()
    assert all(torch.equal(weight, there[name]) for name, weight in here.items())


def test_it_is_evaluated_alike(
    finished: Finished, exported: Finished, words: Callable, tmp_path: Path
) -> None:
    """A run of the export that learns nothing ends where the other one did, and says from what."""
    still = ("train.steps=1", "optim.lr=0")
    config = configured(*words("gpt2", exported("gpt2"), *still), runs=tmp_path / "runs")
    train.APP.prepare_data(config)
    train.APP.work(config)
    (folder,) = (path.parent for path in (tmp_path / "runs").rglob("summary.json"))
    assert summary(finished("gpt2"))["final"] == summary(folder)["final"]
    start = manifest(folder)["init_from"]
    digest = hashlib.sha256((exported("gpt2") / "model.safetensors").read_bytes()).hexdigest()
    assert start == {"folder": str(exported("gpt2")), "sha256": digest}


@pytest.mark.parametrize(
    ("task", "data"), [("gpt2", "openwebtext"), ("moe", "openwebtext"), ("glue", "wikibooks")]
)
def test_data_of_its_tokenizer(
    exported: Finished, words: Callable, text: Path, tmp_path: Path, task: str, data: str
) -> None:
    """The vocabulary of the data is the model's (docs/runs.md), which may be larger than that of
    its tokenizer, as here."""
    from datasets import Dataset

    from tasks.prepare.__main__ import main

    root, start = tmp_path / "root", exported("roberta" if task == "glue" else task)
    pieces = text.read_text().split("\n\n")
    Dataset.from_dict({"text": pieces}).save_to_disk(str(tmp_path / "texts"))
    own = ("--source", str(tmp_path / "texts"), "--tokenizer", str(start / "tokenizer.json"))
    assert main([data, *own, "--shards", "2", "--val-share", "0.2", "--root", str(root)]) == 0
    more = ["data.path=null", f"data.root={root}", f"{task}.corpus={data}"]
    if task == "glue":
        small_glue.write(root / "glue", ("rte",))
        more.append("glue.name=rte")
    _, model = started(words(task, start, *more), tmp_path / "runs")
    here = {name.removeprefix("language."): weight for name, weight in model.state_dict().items()}
    there = load_file(start / "model.safetensors")
    same = [name for name in there if not name.startswith("lm_head.")]
    assert len(same) > 20 and all(torch.equal(here[name], there[name]) for name in same)


def test_glue_starts_from_roberta(
    finished: Finished, exported: Finished, words: Callable, tmp_path: Path
) -> None:
    """The encoder is that of the export, the head is as it would be without."""
    task, model = started(words("glue", exported("roberta")), tmp_path / "runs")
    here, there, new = model.state_dict(), weights(finished("roberta")), task.model().state_dict()
    encoder = here.keys() & there.keys()
    assert len(encoder) > 30 and all(torch.equal(here[name], there[name]) for name in encoder)
    heads = here.keys() - there.keys()
    assert heads and all(torch.equal(here[name], new[name]) for name in heads)


def edited(source: Path, folder: Path, name: str, change: Callable[[Any], object]) -> Path:
    """A copy with another file of JSON."""
    shutil.copytree(source, folder)
    value = json.loads((folder / name).read_text())
    change(value)
    (folder / name).write_text(json.dumps(value))
    return folder


def test_as_the_hub_has_gpt2(
    finished: Finished, exported: Finished, words: Callable, tmp_path: Path
) -> None:
    """Other names, masks among the weights, merges as texts, its own name of the activation."""
    folder = shutil.copytree(exported("gpt2"), tmp_path / "older")
    saved = load_file(folder / "model.safetensors")
    saved = {name.removeprefix("transformer."): weight for name, weight in saved.items()}
    saved["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    save_file(saved, folder / "model.safetensors")  # nobody says whose they are
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "config.json").read_text())
    config = {**config, "activation_function": "gelu_new"}
    del config["layer_norm_epsilon"]
    (folder / "config.json").write_text(json.dumps(config))
    _, model = started(words("gpt2", folder), tmp_path / "runs")
    there = weights(finished("gpt2"))
    assert all(torch.equal(weight, there[name]) for name, weight in model.state_dict().items())


def test_another_model_is_refused(
    finished: Finished, exported: Finished, words: Callable, tmp_path: Path
) -> None:
    """Of an export, and of a run."""
    gpt2, roberta, other = exported("gpt2"), finished("roberta"), tmp_path / "other.txt"
    heads = edited(gpt2, tmp_path / "heads", "config.json", lambda c: c.update(n_head=2))
    other.write_text(story(40_000, 1))
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    for given, says in (
        (("moe", gpt2), "is a run of task=gpt2"),
        (("gpt2", exported("toy")), "is a run of task=toy"),
        (("glue", gpt2), "model_type=gpt2"),
        (("gpt2", gpt2, "gpt2.context=16"), "has the shape"),
        (("gpt2", heads), "n_head=2, this run's model 4"),
        (("toy", finished("toy"), "toy.hidden=9"), "has the shape"),
        (("toy", roberta), "is a run of task=roberta; give one of task=toy"),
        (("glue", finished("toy")), "is a run of task=toy"),
        (("glue", roberta, "glue.size=base"), "roberta.size=smoke, this run glue.size=base"),
        (("glue", roberta, "glue.context=16"), "roberta.context=32, this run glue.context=16"),
        (("glue", roberta, "glue.vocab_size=300"), "=512, this run glue.vocab_size=300"),
        (("glue", roberta, f"data.path={other}"), "vocabulary"),
        (
            ("toy", tmp_path / "pickle"),
            "it is no finished run; train it to its end first, or give ",
        ),
    ):
        assert says in not_begun(words(*given), tmp_path / "runs"), given


def test_another_vocabulary_is_refused(exported: Finished, words: Callable, tmp_path: Path) -> None:
    def swapped(tokenizer: Any) -> None:
        merges = tokenizer["model"]["merges"]
        merges[0], merges[1] = merges[1], merges[0]

    runs = tmp_path / "runs"
    for task in ("gpt2", "moe", "roberta", "glue"):
        folder = edited(exported(task), tmp_path / task, "tokenizer.json", swapped)
        hint = not_begun(words(task, folder), runs)
        assert "its tokenizer.json is not that of" in hint and "tasks.prepare" in hint
        (folder / "tokenizer.json").unlink()
        assert "holds no tokenizer.json" in not_begun(words(task, folder), runs)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("model.safetensors", b"\x80\x04.", "model.safetensors cannot be read"),
        ("config.json", b"{", "config.json or tokenizer.json is damaged"),
        ("config.json", b"{}", "model_type=None"),
        ("tokenizer.json", b"[" * 100_000, "config.json or tokenizer.json is damaged"),
    ],
)
def test_a_damaged_export(
    exported: Finished, words: Callable, tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    folder = shutil.copytree(exported("gpt2"), tmp_path / "damaged")
    (folder / name).write_bytes(content)
    assert says in not_begun(words("gpt2", folder), tmp_path / "runs")


def answer(*words: Path | str) -> str:
    """The line with which an export is refused."""
    return refused(train.APP.main, ["export", *map(str, words)])


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "unfinished": (lambda f: (f / "summary.json").unlink(), "no summary.json: it is no finished"),
    "cut": (lambda f: os.truncate(f / "model.pt", 999), "model.pt cannot be read"),
    "unknown task": (
        lambda f: (f / "config.yaml").write_text("task: tyo"),
        "is a run of task=tyo; did you mean toy?",
    ),
    "unknown method": (
        lambda f: (f / "config.yaml").write_text("{task: toy, method: col2}"),
        "its config.yaml does not fit",
    ),
    "code": (
        lambda f: (f / "config.yaml").write_text("!!python/object/apply:os.mkdir [here]"),
        "missing or damaged",
    ),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_no_finished_run(finished: Finished, tmp_path: Path, kind: str) -> None:
    spoil, says = SPOILT[kind]
    run = shutil.copytree(finished("toy"), tmp_path / "toy")
    spoil(run)
    line = answer(run, tmp_path / "out")
    assert line.startswith(f"RUN={run}: ") and says in line
    assert os.listdir(tmp_path) == ["toy"]


def test_other_data(finished: Finished, text: Path, tmp_path: Path) -> None:
    """The vocabulary would be another one; and without data there is none."""
    run, own = shutil.copytree(finished("gpt2"), tmp_path / "gpt2"), tmp_path / "own.txt"
    config = (run / "config.yaml").read_text()
    assert str(text) in config
    (run / "config.yaml").write_text(config.replace(str(text), str(own)))
    assert "its data are needed" in answer(run, tmp_path / "out")
    own.write_text(text.read_text()[::-1])
    assert "its data have changed" in answer(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("ended", [True, False])
def test_other_data_than_before(
    finished: Finished, root: Path, text: Path, tmp_path: Path, ended: bool
) -> None:
    """To go on with a run says the same, and so does to show a finished one."""
    own, run = tmp_path / text.name, finished("gpt2")
    shutil.copy(text, own)
    place = tmp_path / "runs" / run.relative_to(run.parents[3])
    shutil.copytree(run, place)
    config = (place / "config.yaml").read_text()
    (place / "config.yaml").write_text(config.replace(str(text), str(own)))
    if not ended:
        (place / "summary.json").unlink()
    few = ("train.steps=2", "train.batch_size=4", "train.eval_every=100", "launch.workers=1")
    words = (*small("gpt2", root, own), "method=allreduce", *few, f"tag={place.parent.name}")
    words = (*words, "log.wandb=disabled")
    train.APP.prepare_data(configured(*words, runs=tmp_path / "runs"))
    own.write_text(text.read_text() + "And another line.\n")
    before = contents(place)
    with pytest.raises(ConfigError) as caught:
        train.APP.prepare_data(configured(*words, runs=tmp_path / "runs"))
    assert str(caught.value).startswith(f"data.path={own}: ")
    assert "its data have changed since it was trained: " in str(caught.value)
    assert "resume=never" in str(caught.value) and contents(place) == before
    train.APP.prepare_data(configured(*words, "resume=never", runs=tmp_path / "runs"))


def test_the_folder_is_taken(finished: Finished, tmp_path: Path) -> None:
    """Nothing of it is changed; an empty one will do."""
    run, taken, empty = finished("toy"), tmp_path / "taken", tmp_path / "empty"
    taken.mkdir()
    empty.mkdir()
    (taken / "model.safetensors").write_text("another")
    before = contents(tmp_path)
    for folder in (taken, taken / "model.safetensors", run):
        assert "exists and is not empty" in answer(run, folder)
    assert "no such folder" in answer(tmp_path / "nowhere", tmp_path / "out")
    below = taken / "model.safetensors" / "out"
    assert answer(run, below).startswith(f"FOLDER={below}: ")
    assert contents(tmp_path) == before
    assert train.APP.main(["export", str(run), str(empty)]) == 0
    assert (empty / "model.safetensors").exists()
    assert "holds an exported model" in answer(empty, tmp_path / "out")


def test_whole_or_not_at_all(finished: Finished, tmp_path: Path) -> None:
    """Where the disk is full, or somebody else was first."""
    out = tmp_path / "out"

    def full(weights: Any, path: Path, header: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with patch.object(safetensors.torch, "save_file", full):
        assert "No space left on device" in answer(finished("toy"), out)
    assert os.listdir(tmp_path) == []

    def late(weights: Any, path: Path, header: Any) -> None:
        save_file(weights, path, header)
        out.mkdir()
        (out / "theirs").touch()

    with patch.object(safetensors.torch, "save_file", late):
        assert "exists and is not empty" in answer(finished("toy"), out)
    assert os.listdir(tmp_path) == ["out"] and os.listdir(out) == ["theirs"]


@pytest.fixture
def tuned(finished: Finished, words: Callable) -> Callable[..., tuple[str, ...]]:
    """A fine-tuning of RoBERTa, in a few steps."""
    few = ("method=co2", "co2.tau=2", "train.steps=6", "checkpoint.every=3", "tag=own")
    few += ("train.eval_every=100", "log.every=1")

    def of(*more: str, start: Path | None = None) -> tuple[str, ...]:
        return words("glue", start or finished("roberta"), *few, *more)

    return of


def test_any_task_starts_from_a_run_of_its_own(
    workers: Pool, tmp_path: Path, finished: Finished
) -> None:
    """Buffers and all: without learning, the run ends where the other did."""
    few, toy = ("train.steps=1", "optim.lr=0", "method=allreduce"), finished("toy")
    run = pooled(workers, 2, *few, f"init_from={toy}", runs=tmp_path / "runs")
    first, second = weights(toy), weights(run.folder)
    for name, value in first.items():
        if "running" not in name and "tracked" not in name:
            assert torch.equal(value, second[name]), name
    tracked = next(name for name in first if "tracked" in name)
    assert second[tracked] == first[tracked] + 1
    origin = manifest(run.folder)["init_from"]
    assert origin["folder"] == str(toy) and len(origin["sha256"]) == 64
    fresh = pooled(workers, 2, *few, runs=tmp_path / "fresh")
    assert manifest(fresh.folder)["init_from"] is None


def test_a_replica_of_several_workers(
    workers: Pool, tmp_path: Path, finished: Finished, tuned: Callable
) -> None:
    words = tuned("train.steps=1", "optim.lr=0", "mesh.replica_size=2", "mesh.strategy=zero3")
    run = pooled(workers, 2, *words, runs=tmp_path / "runs")
    here, there = weights(run.folder), weights(finished("roberta"))
    shared = here.keys() & there.keys()
    assert shared and all(torch.equal(here[name], there[name]) for name in shared)


def test_it_is_not_read_again(
    workers: Pool, tmp_path: Path, finished: Finished, tuned: Callable
) -> None:
    """A run goes on exactly when the one that it started from is gone."""
    source = shutil.copytree(finished("roberta"), tmp_path / "source")
    words = tuned(start=source)
    whole = pooled(workers, 2, *words, runs=tmp_path / "whole")
    shutil.copytree(whole.runs, tmp_path / "cut")
    cut = tmp_path / "cut" / whole.folder.relative_to(whole.runs)
    (cut / "summary.json").unlink()
    shutil.rmtree(cut / "checkpoints" / "step_6")
    shutil.rmtree(source)
    again = pooled(workers, 2, *words, runs=tmp_path / "cut")
    assert "resumed at step 3 of 6" in again.out
    assert_same_run(whole.folder, again.folder)
    assert manifest(again.folder)["init_from"] == manifest(whole.folder)["init_from"]


CONTEXT = 32


def printed(capsys: pytest.CaptureFixture[str], run: Path, *words: str) -> str:
    capsys.readouterr()  # what training has printed
    assert train.APP.main(["sample", str(run), *words]) == 0
    caught = capsys.readouterr()
    assert caught.err == "" and caught.out.endswith("\n")
    return caught.out[:-1]


@pytest.mark.parametrize("task", ["gpt2", "moe", "transnormer"])
def test_the_same_seed_prints_the_same_text(
    finished: Finished, capsys: pytest.CaptureFixture[str], task: str
) -> None:
    words = ("the round", "--tokens", "20")
    first = printed(capsys, finished(task), *words)
    assert first.startswith("the round") and len(first) > len("the round")
    assert printed(capsys, finished(task), *words) == first
    others = {printed(capsys, finished(task), *words, "--seed", str(seed)) for seed in (1, 2)}
    assert others - {first}


def test_the_likeliest_token_each_time(
    finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against the model itself, beyond its context, whose last tokens it then sees."""
    run = train.APP.open(str(finished("gpt2")))
    assert isinstance(run.task, CausalText)
    text = run.task.tokenizer()
    assert text is not None
    tokenizer, model = Tokenizer.from_str(text), run.model()
    tokens = tokenizer.encode("the").ids
    with torch.no_grad():
        for _ in range(CONTEXT + 8):
            logits = model(input_ids=torch.tensor([tokens[-CONTEXT:]])).logits[0, -1]
            tokens.append(int(logits[: tokenizer.get_vocab_size()].argmax()))
            if tokens[-1] == run.task.separator:
                break
    wanted = sample.shown(tokenizer.decode(tokens, skip_special_tokens=True)).rstrip("�")
    for words in (("--temperature", "0"), ("--top-k", "1")):
        got = printed(capsys, finished("gpt2"), "the", "--tokens", str(CONTEXT + 8), *words)
        assert got.rstrip("�") == wanted


def test_the_context_is_respected(finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []
    original = CausalText.logits

    def logits(self: CausalText, model: nn.Module, tokens: Tensor) -> Tensor:
        seen.append(tokens.shape[1])
        return original(self, model, tokens)

    with patch.object(CausalText, "logits", logits):
        printed(capsys, finished("transnormer"), "the round " * 40, "--tokens", "3")
        assert set(seen) == {CONTEXT}
        seen.clear()
        printed(capsys, finished("transnormer"), "--tokens", "3")
        assert seen == list(range(1, len(seen) + 1))


def test_drawn() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, -50.0])
    draws = torch.Generator().manual_seed(0)
    some = torch.tensor([sample.drawn(logits, 0.5, 3, draws) for _ in range(4000)])
    shares = torch.bincount(some, minlength=4) / 4000
    wanted = torch.softmax(torch.tensor([0.0, 4.0, 2.0]), 0)
    torch.testing.assert_close(shares[:3], wanted, rtol=0, atol=0.02)
    assert {sample.drawn(logits, 100.0, 2, draws) for _ in range(100)} == {1, 2}
    assert sample.drawn(logits, 0.0, 4, draws) == 1


@pytest.mark.parametrize(
    ("task", "words", "says"),
    [
        ("toy", (), "is a run of task=toy, which writes no text"),
        ("roberta", (), "is a run of task=roberta, which fills masks"),
        ("toy", ("", "--temperature", "nan"), "--temperature=nan: must be a finite number"),
        ("toy", ("", "--seed", "-1"), "--seed=-1: must be a whole number from 0"),
    ],
)
def test_no_text_is_written(
    finished: Finished, task: str, words: tuple[str, ...], says: str
) -> None:
    assert says in refused(train.APP.main, ["sample", str(finished(task)), *words])
