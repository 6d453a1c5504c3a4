"""TensorBoard's event files, read back; and that nothing of it ends a training."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import train
from co2.errors import PREEMPTED, ConfigError
from co2.record.metrics import figures
from tasks.toy import Toy
from tests.cli.harness import configured, folder_of, metrics
from tests.cli.test_wandb import STEPS, at_step, stop
from tests.cli.test_wandb import trained as trained_with_wandb

WORDS = ("method=co2", "co2.tau=3", "launch.workers=1", f"train.steps={STEPS}", "log.every=1")
WORDS += ("train.eval_every=4", "checkpoint.every=5", "log.wandb=disabled")
ON = "log.tensorboard=true"

Scalars = dict[str, list[tuple[int, float]]]
"""Steps and values, by their names."""


def trained(runs: Path, *words: str) -> int:
    """As with W&B, without it."""
    return trained_with_wandb(runs, "log.wandb=disabled", *words)


def shown(runs: Path) -> Scalars:
    """What TensorBoard shows of the run."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = folder_of(*WORDS, runs=runs) / "tensorboard"
    found = accumulators.EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    names = found.Tags()["scalars"]
    return {name: [(own.step, own.value) for own in found.Scalars(name)] for name in names}


def written(runs: Path) -> Scalars:
    """The same of metrics.jsonl."""
    found: Scalars = {}
    for line in metrics(folder_of(*WORDS, runs=runs)):
        for name, value in figures(line).items():
            if value is not None:
                found.setdefault(name, []).append((line["step"], pytest.approx(value)))
    return found


def fail() -> None:
    raise ArithmeticError("of the test")


class TestWithThePackage:
    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("tensorboard")

    def test_a_run_that_stops_and_goes_on(self, tmp_path: Path) -> None:
        with at_step(7, stop):
            assert trained(tmp_path, ON) == PREEMPTED
        first = shown(tmp_path)
        assert first == written(tmp_path)
        assert trained(tmp_path, ON) == 0
        told = shown(tmp_path)
        assert told == written(tmp_path)
        assert [step for step, _ in told["train/loss"]] == list(range(1, STEPS + 1))
        assert [step for step, _ in told["eval/loss"]] == [4, 8, 12, 16, 20]
        folder = folder_of(*WORDS, runs=tmp_path) / "tensorboard"
        assert len(list(folder.iterdir())) == 2

    def test_steps_that_are_trained_again(self, tmp_path: Path) -> None:
        """A run that fails at step 8 goes on from its checkpoint of step 5."""
        with at_step(8, fail), pytest.raises(ArithmeticError):
            trained(tmp_path, ON)
        assert [step for step, _ in shown(tmp_path)["train/loss"]] == list(range(1, 8))
        assert trained(tmp_path, ON) == 0
        told = shown(tmp_path)
        assert told == written(tmp_path)
        assert [step for step, _ in told["train/loss"]] == list(range(1, STEPS + 1))

    def test_segments_without_it_are_shown_later(self, tmp_path: Path) -> None:
        for words in ((ON,), (), (ON,)):
            with at_step(4, stop):
                assert trained(tmp_path, *words) == PREEMPTED
        assert trained(tmp_path, ON) == 0
        told = shown(tmp_path)
        assert told == written(tmp_path)
        assert [step for step, _ in told["train/loss"]] == list(range(1, STEPS + 1))

    def test_its_failure_is_said_and_ends_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def no_room(*arguments: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", no_room)
        assert trained(tmp_path, ON) == 0
        said = [line for line in capsys.readouterr().out.splitlines() if "TensorBoard" in line]
        text = "TensorBoard: OSError: [Errno 28] No space left on device; the run goes on without"
        assert said == [f"{text} it"]
        assert len(metrics(folder_of(*WORDS, runs=tmp_path), "train")) == STEPS


def test_without_the_package_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loss(*arguments: Any) -> Tensor:
        raise AssertionError("it trains")

    monkeypatch.setattr("co2.record.tensorboard.find_spec", lambda name: None)
    monkeypatch.setattr(Toy, "loss", loss)
    words = ["task=toy", *WORDS, f"runs={tmp_path}"]
    assert train.APP.main([*words, ON]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "error: log.tensorboard=true: needs an extra: pip install -e '.[tensorboard]', or "
        "'co2-suite[tensorboard]' outside a clone"
    )
    assert not list(tmp_path.iterdir())
    assert configured(*WORDS, runs=tmp_path).log.tensorboard is False
    with pytest.raises(ConfigError, match="needs an extra"):
        configured(*WORDS, ON, runs=tmp_path)
