"""A run goes on with another number of workers, where its method holds nothing that only the same
ones can go on from."""

import re
from pathlib import Path

import pytest

from co2.catalogue import CATALOGUE
from co2.errors import PREEMPTED, ConfigError
from co2.methods import METHODS
from tests.cli.harness import Run, assert_same_run, configured, metrics, pooled, stopped_after
from tests.grids import grid
from tests.methods.driver import overrides
from tests.workers import Pool

WORDS = ("tag=other", "train.steps=14", "train.eval_every=7", "log.every=1", "train.batch_size=4")


def stopped(workers: Pool, world: int, words: tuple[str, ...], step: int, runs: Path) -> None:
    told = {"setup": stopped_after, "setup_arguments": (step,)}
    run = pooled(workers, world, *words, "checkpoint.every=0", runs=runs, **told)
    assert run.status == PREEMPTED, run.err


def resumed(workers: Pool, world: int, words: tuple[str, ...], runs: Path) -> Run:
    run = pooled(workers, world, *words, runs=runs)
    assert run.status == 0, run.err
    return run


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (3, 2, "with 2 replicas in place of 3: what the others had trained since their last mean"),
        (2, 4, "with 4 replicas in place of 2: the new ones begin as the first"),
    ],
)
def test_fewer_or_more(workers: Pool, tmp_path: Path, before: int, now: int, told: str) -> None:
    """Stopped again on the way, it ends as if it had not been."""
    words = (*WORDS, "method=co2", "co2.tau=3", "optim.name=adamw", "optim.lr=0.01")
    ended = []
    for name, again in (("once", None), ("twice", 10)):
        stopped(workers, before, words, 7, tmp_path / name)
        if again is not None:
            stopped(workers, now, words, again, tmp_path / name)
        ended.append(resumed(workers, now, words, tmp_path / name))
    assert_same_run(*(run.folder for run in ended))
    assert f"resumed at step 7 of 14, {told}" in ended[0].out
    assert re.search(rf", on {4 * now} samples a step, before {4 * before}", ended[0].out)
    assert [line["step"] for line in metrics(ended[0].folder, "eval")] == [7, 14]


def test_the_batch_of_the_whole_run_stays(workers: Pool, tmp_path: Path) -> None:
    words = (*WORDS, "method=local_sgd", "local_sgd.tau=3", "train.global_batch=16")
    stopped(workers, 4, words, 5, tmp_path)
    run = resumed(workers, 2, words, tmp_path)
    assert "on 16 samples a step, before 16" in run.out


@pytest.mark.parametrize(
    ("name", "good"),
    grid(
        [(name, CATALOGUE[name].any_number) for name in METHODS],
        lambda case: case[0] in ("allreduce", "co2_keep", "streaming_diloco", "desloc", "demo"),
    ),
)
def test_which_methods_do(workers: Pool, tmp_path: Path, name: str, good: bool) -> None:
    words = (*WORDS, f"method={name}", *overrides(name))
    stopped(workers, 3, words, 5, tmp_path)
    if good:
        assert "with 2 replicas in place of 3" in resumed(workers, 2, words, tmp_path).out
    else:
        with pytest.raises(ConfigError, match=r"^launch\.workers=2: .*holds a run with .*=3"):
            configured(*words, "launch.workers=2", runs=tmp_path)
