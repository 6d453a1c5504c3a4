"""co2 sample: text from a run of a language model."""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

import train
from co2.app import sample
from tasks.text.causal import CausalText

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
