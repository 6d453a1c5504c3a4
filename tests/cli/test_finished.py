"""What is done with a finished run: another starts from it by init_from, and it writes texts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

import train
from co2.app import sample
from co2.app.compose import preflight
from co2.errors import ConfigError
from co2.train import init_from
from tasks.text.causal import CausalText
from tests.cli.harness import (
    assert_same_run,
    cli,
    configured,
    metrics,
    pooled,
    weights,
)
from tests.cli.test_checkpoint import damage
from tests.tasks.conftest import story
from tests.workers import Pool

COMMON = ("log.wandb=disabled", "launch.backend=gloo", "train.eval_every=100", "log.every=1")
WIDTH = ("toy.hidden=8",)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory, workers: Pool) -> Path:
    """A finished run of the toy."""
    runs = tmp_path_factory.mktemp("toy") / "runs"
    run = pooled(workers, 2, "method=co2", "co2.tau=2", "train.steps=4", *WIDTH, runs=runs)
    assert run.status == 0, run.err
    return run.folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of two topics; more than twenty, so that whole files validate."""
    folder = tmp_path_factory.mktemp("files")
    for number in range(60):
        path = folder / ("north", "south")[number % 2] / f"{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(story(400, number))
    return folder


@pytest.fixture(scope="module")
def language(
    tmp_path_factory: pytest.TempPathFactory, workers: Pool, root: Path, texts: Path
) -> Path:
    """A finished run of RoBERTa on the texts."""
    runs = tmp_path_factory.mktemp("language") / "runs"
    words = ("task=roberta", "train.steps=3", "train.batch_size=4", "roberta.eval_samples=8")
    own = (f"data.root={root}", f"data.path={texts}", "method=allreduce")
    run = pooled(workers, 2, *words, *own, *COMMON, runs=runs)
    assert run.status == 0, run.err
    return run.folder


def tuned(language: Path, root: Path, texts: Path, *words: str) -> tuple[str, ...]:
    """A fine-tuning of it, in a few steps."""
    few = ("train.steps=6", "train.batch_size=4", "glue.eval_samples=8", "checkpoint.every=3")
    data = (f"data.root={root}", f"data.path={texts}")
    start = f"init_from={language}"
    return ("task=glue", "method=co2", "co2.tau=2", *few, *data, start, *COMMON, "tag=own", *words)


def started(folder: Path) -> dict[str, str]:
    """What manifest.json says of the weights that a run started from."""
    return json.loads((folder / "manifest.json").read_text())["init_from"]


def refused(*arguments: str, runs: Path) -> ConfigError:
    """What train.py answers before it starts any worker."""
    words = ["task=toy", f"runs={runs}", *arguments]
    if any(word.startswith("task=") for word in arguments):
        words = words[1:]
    with pytest.raises(ConfigError) as caught:
        preflight(train.APP.conf, words, train.APP.check)
    assert "\n" not in str(caught.value) and caught.value.key == "init_from"
    assert not runs.exists()
    return caught.value


def test_any_task_starts_from_a_run_of_its_own(workers: Pool, tmp_path: Path, toy: Path) -> None:
    """Buffers and all: without learning, the run ends where the other did."""
    words = ("train.steps=1", "optim.lr=0", f"init_from={toy}", *WIDTH, "train.eval_every=1")
    run = pooled(workers, 2, *words, "method=allreduce", runs=tmp_path / "runs")
    assert run.status == 0, run.err
    first, second = weights(toy), weights(run.folder)
    for name, value in first.items():
        if "running" not in name and "tracked" not in name:
            assert torch.equal(value, second[name]), name
    tracked = next(name for name in first if "tracked" in name)
    assert second[tracked] == first[tracked] + 1
    assert started(run.folder)["folder"] == str(toy) and len(started(run.folder)["sha256"]) == 64
    fresh = pooled(workers, 2, *WIDTH, "train.steps=1", "optim.lr=0", runs=tmp_path / "fresh")
    assert started(fresh.folder) is None


def test_the_encoder_is_the_run_s(
    workers: Pool, tmp_path: Path, root: Path, language: Path, texts: Path
) -> None:
    """At step 0; the head is new, as it would be without init_from."""
    words = ("train.steps=1", "optim.lr=0")
    ends = []
    for start in (str(language), "null"):
        line = tuned(language, root, texts, *words, f"init_from={start}")
        run = pooled(workers, 2, *line, runs=tmp_path / start.rpartition("/")[2])
        assert run.status == 0, run.err
        ends.append(weights(run.folder))
    there, (here, new) = weights(language), ends
    encoder = [name for name in here if name in there]
    assert len(encoder) > 30 and all(torch.equal(here[name], there[name]) for name in encoder)
    heads = here.keys() - there.keys()
    assert heads and all(name.startswith("language.classifier.") for name in heads)
    assert all(torch.equal(here[name], new[name]) for name in heads)
    assert not all(torch.equal(new[name], there[name]) for name in encoder)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_a_replica_of_several_workers(
    workers: Pool, tmp_path: Path, root: Path, language: Path, texts: Path, strategy: str
) -> None:
    words = ("train.steps=1", "optim.lr=0", "mesh.replica_size=2", f"mesh.strategy={strategy}")
    run = pooled(workers, 2, *tuned(language, root, texts, *words), runs=tmp_path / "runs")
    assert run.status == 0, run.err
    here, there = weights(run.folder), weights(language)
    assert all(torch.equal(here[name], there[name]) for name in here.keys() & there.keys())


def test_it_is_not_read_again(
    workers: Pool, tmp_path: Path, root: Path, language: Path, texts: Path
) -> None:
    """A run goes on exactly when the one that it started from is gone."""
    source = shutil.copytree(language, tmp_path / "source")
    words = tuned(source, root, texts)
    whole = pooled(workers, 2, *words, runs=tmp_path / "whole")
    assert whole.status == 0, whole.err
    cut = shutil.copytree(tmp_path / "whole", tmp_path / "cut") / whole.folder.relative_to(
        tmp_path / "whole"
    )
    (cut / "summary.json").unlink()
    shutil.rmtree(cut / "checkpoints" / "step_6")
    shutil.rmtree(source)
    again = pooled(workers, 2, *words, runs=tmp_path / "cut")
    assert again.status == 0 and "resumed at step 3 of 6" in again.out
    assert_same_run(whole.folder, again.folder)
    assert started(again.folder) == started(whole.folder)


def test_the_command_line(tmp_path: Path, root: Path, language: Path, texts: Path) -> None:
    """Pre-trained, then fine-tuned; goes on; another run to start from is another run."""
    runs = tmp_path / "runs"
    words = tuned(language, root, texts, "launch.workers=1")
    run = cli(*words, runs=runs)
    assert run.status == 0, run.err
    final = metrics(run.folder, "eval")[-1]
    assert {"loss", "accuracy"} <= final.keys()
    assert "finished already" in cli(*words, runs=runs).out
    with pytest.raises(ConfigError, match=r"^init_from=None: .* holds a run with init_from=/"):
        configured(*words, "init_from=null", runs=runs)


def test_without_a_sound_checkpoint(workers: Pool, tmp_path: Path, toy: Path) -> None:
    """Nothing of `init_from` was read, so training cannot silently begin from new weights."""
    words = (f"init_from={toy}", *WIDTH, "train.steps=4", "checkpoint.every=2")
    run = pooled(workers, 1, *words, runs=tmp_path / "runs")
    (run.folder / "summary.json").unlink()
    for step in (2, 4):
        damage(run.folder / "checkpoints" / f"step_{step}", "flipped")
    again = cli(*words, "launch.workers=1", runs=tmp_path / "runs")
    assert again.status == 2
    assert "/checkpoints holds no checkpoint that can be used" in again.err


def test_no_such_folder(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert "no such folder" in str(refused("init_from=nowhere", runs=runs))
    assert "or null" in str(refused("init_from=", runs=runs))
    # A worker that meets it all the same, where the folder has gone meanwhile, says it too.
    with pytest.raises(ConfigError, match=r"^init_from=nowhere: its model\.pt cannot be read"):
        init_from.described(configured("init_from=nowhere", runs=runs))


def test_another_model(
    tmp_path: Path, root: Path, toy: Path, text: Path, language: Path, texts: Path
) -> None:
    runs = tmp_path / "runs"
    assert "has the shape" in str(refused(f"init_from={toy}", "toy.hidden=9", runs=runs))
    error = refused(f"init_from={language}", runs=runs)
    assert "is a run of task=roberta; give one of task=toy" in str(error)

    def of_glue(*words: str) -> str:
        return str(refused(*tuned(language, root, texts, *words), runs=runs))

    assert "is a run of task=toy" in of_glue(f"init_from={toy}")
    assert "roberta.size=smoke, this run glue.size=base" in of_glue("glue.size=base")
    assert "roberta.context=32, this run glue.context=16" in of_glue("glue.context=16")
    assert "roberta.vocab_size=512, this run glue.vocab_size=300" in of_glue("glue.vocab_size=300")
    assert "vocabulary" in of_glue(f"data.path={text}", "glue.name=adjoin")


Finished = Callable[[str], Path]
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


def test_what_a_terminal_would_act_upon() -> None:
    assert sample.shown("a\x1b[2J\tb\nü数\r") == "a\\x1b[2J\tb\nü数\\r"


@pytest.mark.parametrize(
    ("task", "words", "says"),
    [
        ("toy", (), "is a run of task=toy, which writes no text"),
        ("roberta", (), "is a run of task=roberta, which fills masks"),
        ("toy", ("\udcff",), "PROMPT=\\udcff: must be UTF-8"),
        ("toy", ("", "--tokens", "0"), "--tokens=0: must be a whole number, 1 or more"),
        ("toy", ("", "--temperature", "-1"), "--temperature=-1.0: must be a finite number"),
        ("toy", ("", "--temperature", "nan"), "--temperature=nan: must be a finite number"),
        ("toy", ("", "--top-k", "-1"), "--top-k=-1: must be a whole number, 0 or more"),
        ("toy", ("", "--seed", "-1"), "--seed=-1: must be a whole number from 0"),
    ],
)
def test_refused(
    finished: Finished,
    capsys: pytest.CaptureFixture[str],
    task: str,
    words: tuple[str, ...],
    says: str,
) -> None:
    run = str(finished(task))
    capsys.readouterr()
    assert train.APP.main(["sample", run, *words]) == 2
    caught = capsys.readouterr()
    (line,) = caught.err.splitlines()
    assert caught.out == "" and line.startswith("error: ") and says in line


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.APP.main(["sample", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err
