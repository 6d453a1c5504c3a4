"""Which form of TransNormer's attention a GPU gets. What it computes: test_transnormer.py."""

import signal
import subprocess
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tasks.text import transnormer_model as parts
from tests.tasks.build import num_parameters, transnormer


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    parts.fastest_on_gpus.cache_clear()
    with patch.object(torch, "compile", lambda form: ("compiled", form)):
        yield
    parts.fastest_on_gpus.cache_clear()


def probed(program: str) -> Any:
    """As if the probe were this program, and had half a second."""
    return patch.multiple(parts, _KERNELS=True, _PROBE=program, _ANSWER_S=0.5)


HANGS = "import time\nprint('ready', flush=True)\ninput()\ntime.sleep(600)"


@pytest.mark.parametrize(
    ("program", "line"),
    [
        ("print('ready', flush=True)\ninput()", ""),
        (HANGS, "warning: flash-linear-attention's kernels do not answer in 0.5 s; "),
        ("raise ImportError", "warning: flash-linear-attention's kernels fail; "),
    ],
    ids=["answer", "hang", "fail"],
)
def test_kernels_that_do_not_answer_are_not_used(
    program: str, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with probed(program):
        found = parts.fastest_on_gpus()
        assert parts.fastest_on_gpus() is found, "it is asked once"
    assert found == (("compiled", parts.chunked) if line else parts.kernels)
    told = capfd.readouterr().err
    assert told.startswith(line) and bool(told) == bool(line)


def test_a_probe_that_hangs_is_killed() -> None:
    made = []
    begin = subprocess.Popen

    def popen(*arguments: Any, **more: Any) -> Any:
        made.append(begin(*arguments, **more))
        return made[-1]

    with probed(HANGS), patch.object(subprocess, "Popen", popen):
        parts.fastest_on_gpus()
    assert [one.returncode for one in made] == [-signal.SIGKILL]


def test_who_needs_no_gpu_asks_nobody() -> None:
    """On a CPU, and to count parameters."""
    with patch.object(parts, "fastest_on_gpus", side_effect=AssertionError):
        model = transnormer(vocab_size=300).model()
        assert all(layer.tokens.on_gpus is parts.chunked for layer in model.layers)
        with patch.object(torch.cuda, "is_available", lambda: True):
            assert num_parameters("transnormer") > 0


def test_each_layer_gets_it() -> None:
    with (
        patch.object(parts, "fastest_on_gpus", lambda: parts.parallel),
        patch.object(torch.cuda, "is_available", lambda: True),
    ):
        model = parts.TransNormer(20, 2, 2, 8)
    assert {layer.tokens.on_gpus for layer in model.layers} == {parts.parallel}
