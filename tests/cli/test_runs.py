"""Runs from the command line: what they leave behind, and what must not change a result."""

import json
import math
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import train
from co2.config import OptimConfig, Schedule, Validation
from co2.errors import DIVERGED, REFUSED
from co2.methods import METHODS
from co2.methods.allreduce import AllReduce
from co2.start import launch
from co2.train import state_file
from co2.train.schedule import learning_rate
from tasks.toy import CLASSES, Toy
from tests.cli.harness import (
    ANNOUNCED,
    ROOT,
    STORY,
    TOY,
    TRAPS,
    Run,
    as_tasks,
    assert_same_run,
    assert_same_weights,
    cli,
    command,
    configured,
    contents,
    execute,
    folder_of,
    folders,
    manifest,
    metrics,
    pooled,
    saved_steps,
    side_by_side,
    started_processes,
    story,
    summary,
    weights,
    with_losses,
)
from tests.cli.test_checkpoint import held
from tests.grids import OF_A_KIND, grid, nonempty
from tests.methods.driver import overrides
from tests.tasks.build import toy
from tests.workers import Pool

PARAMETERS = 16 * 32 + 32 + 2 * 32 + 32 * CLASSES + CLASSES
"""Of the toy's model."""


def test_a_run_leaves_these_files(spawned: Run) -> None:
    place = "toy/co2/eval_every10-steps60-tau3/seed0"
    assert spawned.folder == spawned.runs / place
    names = {path.name for path in spawned.folder.iterdir()}
    files = {"config.yaml", "manifest.json", "metrics.jsonl", "summary.json", "model.pt"}
    assert names == {*files, "checkpoints"}
    around = {path.name for path in spawned.runs.parent.iterdir()}
    assert around == {"runs", "spy", *TRAPS}, "no module where the user stands was run"


def test_its_manifest(spawned: Run) -> None:
    told = manifest(spawned.folder)
    assert told["world_size"] == 2
    assert told["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert {"python", "numpy", "hydra-core"} <= told["packages"].keys()
    assert told["hardware"]["cores"] >= 1
    capability = torch.backends.cpu.get_cpu_capability()
    assert told["hardware"]["cpu"].endswith(f" ({capability})")
    assert "train.py" in told["command"] and "co2.tau=3" in told["command"]
    assert told["data"]["num_samples"] == 512
    assert len(told["data"]["sha256"]) == 64
    if (ROOT / ".git").exists():
        assert len(told["git"]["commit"]) == 40
        assert isinstance(told["git"]["dirty"], bool)


def test_its_metrics(spawned: Run) -> None:
    trained, evaluated = (metrics(spawned.folder, kind) for kind in ("train", "eval"))
    assert [line["step"] for line in trained] == list(range(1, 61))
    assert [line["step"] for line in evaluated] == [10, 20, 30, 40, 50, 60]
    times = {"samples_per_s", "comm_s", "exposed_s", "exposed_share", "data_share"}
    keys = {"loss", "lr", "bytes", *times}
    for line in trained:
        assert {"kind", "step", "gap", "clipped", *keys} == line.keys()
        assert all(line[key] >= 0 for key in keys)
    for line in evaluated:
        assert line.keys() == {"kind", "step", "loss", "accuracy", "train_s"}


def test_its_bytes(spawned: Run) -> None:
    """One mean every three steps; of G workers each sends 2(G−1)/G of the vector."""
    sent = [line["bytes"] for line in metrics(spawned.folder, "train")]
    assert sent == [0, 0, 4 * PARAMETERS] * 20
    assert summary(spawned.folder)["bytes_per_step"] == pytest.approx(4 * PARAMETERS / 3)


def test_its_summary(spawned: Run) -> None:
    told = summary(spawned.folder)
    last = metrics(spawned.folder, "eval")[-1]
    assert told["final"] == {key: last[key] for key in ("loss", "accuracy")}
    task = toy()  # like the run's, but for what is trained
    task.data.validation = Validation.report
    task.setup(1)
    model = task.model()
    model.load_state_dict(weights(spawned.folder))
    assert task.evaluate(model) == pytest.approx(told["final"], rel=1e-6)
    assert told["steps"] == 60 and told["workers"] == 2 and told["unit"] == "samples"
    assert told["extra_model_copies"] == 3
    assert told["memory"]["parameter_bytes"] == 4 * PARAMETERS
    assert told["memory"]["extra_bytes"] == 3 * 4 * PARAMETERS
    assert 0 <= told["overlap"] <= 1 and told["comm_s"] > 0
    assert told["peak_memory_bytes"] > 2**20
    assert 0 < told["train_s"] <= told["wall_s"]
    # The first step of a segment is not timed.
    assert told["throughput"] == pytest.approx(59 * 2 * 16 / told["train_s"])
    assert (spawned.runs.parent / told["folder"]).resolve() == spawned.folder.resolve()


def test_its_checkpoints(spawned: Run) -> None:
    assert saved_steps(spawned.folder) == [40, 60]
    for step in (40, 60):
        names = {path.name for path in (spawned.folder / f"checkpoints/step_{step}").iterdir()}
        assert names == {"replica_0", "replica_1", "equal", "manifest.json"}


def test_its_closing_table(spawned: Run) -> None:
    table = spawned.out[spawned.out.index("┌") :]
    final = summary(spawned.folder)["final"]
    texts = ("majority accuracy", "samples/s", "exposed communication", "overlap", "try next: ")
    texts += ("bytes sent per step", "extra model copies", "eval_every10-steps60-tau3/seed0")
    for text in (f"{final['loss']:.4f}", f"{final['accuracy']:.4f}", *texts):
        assert text in table, text
    assert spawned.err == ANNOUNCED


def test_its_workers_are_forked(spawned: Run) -> None:
    """Interpreters are the command's own, Python's resource tracker, and the fork server."""
    assert started_processes(spawned.runs.parent / "spy") == 3


def test_finished_means_finished(
    tmp_path: Path,
    spawned: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(spawned.runs, tmp_path / "runs")
    before = contents(tmp_path / "runs")
    monkeypatch.setattr(launch, "run", lambda *_: pytest.fail("workers were started"))
    assert train.APP.main(command(*STORY, runs=tmp_path / "runs")[2:]) == 0
    said = capsys.readouterr().out
    assert said.startswith("finished already;") and "resume=never" in said
    assert "┌" in said and "step " not in said.partition("┌")[0]
    assert contents(tmp_path / "runs") == before


def test_afresh_moves_the_old_run_aside(workers: Pool, tmp_path: Path) -> None:
    arguments, runs = ("train.steps=6", "log.every=1"), tmp_path / "runs"
    first = folder_of(*arguments, "launch.workers=2", runs=runs)
    pooled(workers, 2, *arguments, runs=runs)
    kept = contents(first)
    for number in (1, 2):
        run = pooled(workers, 2, *arguments, runs=runs, fresh=True)
        assert "resumed" not in run.out
        assert contents(first.with_name("seed0.1")) == kept
        assert len(folders(runs)) == number + 1
        assert_same_run(first, first.with_name(f"seed0.{number}"))
    # The configuration may be another one, too: nothing of the old run is mixed in.
    pooled(workers, 2, *arguments, "optim.lr=0.2", "tag=x", runs=runs)
    run = pooled(workers, 2, *arguments, "optim.lr=0.3", "tag=x", runs=runs, fresh=True)
    folder = folder_of("tag=x", "resume=never", runs=runs)
    assert max(line["lr"] for line in metrics(folder, "train")) == pytest.approx(0.3)
    assert len(story(folder)) == 7


def assert_learned(folder: Path) -> None:
    told = summary(folder)
    assert told["final"]["accuracy"] > told["baselines"]["majority_accuracy"] + 0.3
    assert told["final"]["loss"] < metrics(folder, "train")[0]["loss"] - 0.2
    assert (told["overlap"] is None) == (told["workers"] == 1)


def without_gradients(path: Path, value: Tensor, _: int) -> Tensor:
    """Every gradient of worker 1 is zero; it writes down the losses of its own weights."""
    if dist.get_rank() == 0:
        return value
    with path.open("a") as file:
        file.write(f"{value.item()}\n")
    return value * 0


@pytest.mark.parametrize("method", grid(METHODS, OF_A_KIND.__contains__))
def test_every_method_brings_what_others_learn(workers: Pool, tmp_path: Path, method: str) -> None:
    """A worker without gradients learns all the same, from the other one: its own loss falls. It
    would stay where it was to the last bit if the method synchronized nothing.

    The recipe is the toy's but for the method; these are five rounds. Eager DiLoCo's outer momentum
    of 0.9, made for long trainings, overshoots in so few. Adam's variants need Adam; these 60 steps
    end before they freeze v, and the next test is about what comes then. Under DES-LOC the idle
    worker halves the step of the other's Adam, so its rate is larger. SPARTA's 0.5 % of the weights
    a step would take longer.
    """
    adam = ["optim.name=adamw", "optim.lr=0.01"]
    fields = {
        "eager_diloco": ["eager_diloco.outer_momentum=0.5"],
        "desloc": ["optim.name=adamw", "optim.lr=0.03"],
        "mt_dao": ["optim.name=adamw", "optim.lr=0.03"],
        "demo": ["optim.lr=0.01"],
        "sparta": ["sparta.share=0.1"],
        "onebit_adam": adam,
        "zero_one_adam": adam,
    }
    words = [f"method={method}", *fields.get(method, [])]
    path = tmp_path / "losses"
    setup = partial(with_losses, partial(without_gradients, path))
    run = pooled(workers, 2, *words, runs=tmp_path / "runs", setup=setup)
    assert_learned(run.folder)
    assert ("chooses optim.name=" in run.out) == (method == "demo")
    losses = [float(line) for line in path.read_text().splitlines()]
    assert len(losses) == 60
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.3
    assert summary(run.folder)["bytes_per_step"] > 0


@contextmanager
def ended_late(runs: Path) -> Iterator[None]:
    """Setup: worker 1 ends later than worker 0, and looks whether the run has."""
    flush = AllReduce.flush

    def late(method: AllReduce) -> None:
        flush(method)
        if dist.get_rank() == 1:
            time.sleep(0.5)
            assert list(runs.rglob("summary.json")) == []

    with patch.object(AllReduce, "flush", late):
        yield


def test_a_run_has_ended_once_all_workers_have(workers: Pool, tmp_path: Path) -> None:
    words = ("method=allreduce", "train.steps=3")
    run = pooled(workers, 2, *words, runs=tmp_path, setup=partial(ended_late, tmp_path))
    assert math.isfinite(summary(run.folder)["final"]["loss"])


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("method", ["allreduce", "co2"])
def test_other_worlds_learn(workers: Pool, tmp_path: Path, method: str, world: int) -> None:
    run = pooled(workers, world, f"method={method}", runs=tmp_path / "runs")
    assert_learned(run.folder)
    assert (summary(run.folder)["bytes_per_step"] > 0) == (world > 1)


def test_a_sweep_over_methods_and_workers(tmp_path: Path) -> None:
    """One process starts the workers of one run after the other, or is the worker."""
    runs = tmp_path / "runs"
    ended = cli("-m", "method=allreduce,co2", "launch.workers=1,2", runs=runs)
    places = {
        f"toy/{name}/workers{count}/seed0" for name in ("allreduce", "co2") for count in (1, 2)
    }
    assert {str(path.relative_to(runs)) for path in folders(runs)} == places
    for folder in folders(runs):
        assert_learned(folder)
        assert summary(folder)["workers"] == int(folder.parent.name[-1])
    assert ended.out.count("┌") == 4 and ended.out.count("┏") == 1
    table = ended.out[ended.out.index("sweep: ") :]
    assert all(f"method={name} launch.workers=1" in table for name in ("allreduce", "co2"))
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


def swept(runs: Path, *words: str) -> int:
    """The status of a sweep in this process, which is the only worker."""
    return train.APP.main(["-m", *TOY, f"runs={runs}", "launch.workers=1", *words])


@pytest.mark.parametrize(
    ("words", "own"),
    [
        (("co2.tau=1,3", "tag=one"), "both co2.tau=1 and co2.tau=3;"),
        (("co2.tau=1,3", "tag=one", "resume=never"), "both co2.tau=1 and co2.tau=3;"),
        (("co2.tau=3,3",), "a run that is given twice"),
    ],
)
def test_two_runs_of_a_sweep_in_one_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], own: str
) -> None:
    """Are refused before the first one is made."""
    assert swept(tmp_path, "method=co2", "train.steps=2", *words) == REFUSED
    said = capsys.readouterr().err
    assert said.startswith("error: tag=") and f"would name the folder of {own}" in said
    assert not folders(tmp_path)


@pytest.mark.parametrize("method", ["co2", "co2_keep"])  # whose fragments follow from τ
def test_a_folder_of_another_tau(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    words = (f"method={method}", "train.steps=2", "tag=one")
    assert swept(tmp_path, *words, f"{method}.tau=1") == 0
    assert swept(tmp_path, *words, f"{method}.tau=3") == REFUSED
    assert f"holds a run with {method}.tau=1; give this one a" in capsys.readouterr().err


def test_a_failed_job_of_a_sweep_loses_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert swept(tmp_path, "method=local_sgd", "optim.lr=0.1,1e30,0.2") == DIVERGED
    finished = [path.parent.parent.name for path in sorted(tmp_path.rglob("summary.json"))]
    assert finished == ["lr0.1-workers1", "lr0.2-workers1"]
    table = capsys.readouterr().out.partition("sweep: ")[2]
    failed = "optim.lr=1e+30: the loss is not finite (exit status 65); see above"
    assert failed in table.splitlines()
    assert table.count("/lr0.") == 2


def test_a_worker_that_is_done_before_the_first(tmp_path: Path) -> None:
    """It does not look for the summary, which the first has still to write."""
    config = configured("launch.workers=2", runs=tmp_path)
    with patch.object(launch, "run", return_value=0):
        with patch("co2.app.application.is_first", return_value=False):
            assert train.APP.run(config) == 0


def test_workers_as_torchrun_starts_them_make_the_same_run(tmp_path: Path, spawned: Run) -> None:
    runs, shared = tmp_path / "runs", {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    shared["MASTER_ADDR"] = "127.0.0.1"
    ranks = [shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    first, second = side_by_side(command(*STORY, runs=runs)[1:], tmp_path, ranks)
    assert first.count("┌") == 1 and second == "", "only worker 0 speaks"
    assert_same_run(runs / spawned.folder.relative_to(spawned.runs), spawned.folder)


@pytest.mark.slow  # three interpreters start
def test_torchrun_starts_the_workers_of_the_same_run(tmp_path: Path, spawned: Run) -> None:
    runs = tmp_path / "runs"
    words = command(*STORY, runs=runs)[1:]
    # What the command torchrun runs.
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = execute([*launcher, "--nproc-per-node", "2", *words], runs)
    assert ended.out.count("┌") == 1, "only worker 0 speaks"
    assert ended.folder.relative_to(runs) == spawned.folder.relative_to(spawned.runs)
    assert_same_run(ended.folder, spawned.folder)


def test_srun_starts_the_workers_of_the_same_runs(tmp_path: Path, spawned: Run) -> None:
    runs = tmp_path / "runs"
    own = ("-m", "train.seed=0,1", "launch.workers=7", "tag=srun")
    _, *words = command(*own, *STORY, runs=runs)
    texts = as_tasks(words, tmp_path)
    assert "┌" in texts[0] and texts[1] == ""
    names = [str(folder.relative_to(runs / "toy" / "co2")) for folder in folders(runs)]
    assert sorted(names) == ["srun/seed0", "srun/seed1"], "one run after the other"
    folder = runs / "toy" / "co2" / "srun" / "seed0"
    assert summary(folder)["workers"] == 2, "launch.workers is for workers started here"
    assert_same_run(folder, spawned.folder)


def test_the_pool_trains_the_same_run(workers: Pool, tmp_path: Path, spawned: Run) -> None:
    """So that what is shown with it is shown of train.py."""
    assert_same_run(pooled(workers, 2, *STORY, runs=tmp_path / "runs").folder, spawned.folder)


@contextmanager
def counted(path: str) -> Iterator[None]:
    """Setup: worker 0 writes down the elements of each collective that a method launches, with
    the number of optimizer steps done before it."""
    log: list[tuple[int, int]] = []
    prepare, all_reduce, steps = AllReduce.prepare, dist.all_reduce, []
    step = torch.optim.SGD.step

    def counting_step(optimizer: torch.optim.SGD, *arguments: Any) -> Any:
        steps.append(None)
        return step(optimizer, *arguments)

    def hooked(method: AllReduce, *arguments: Any) -> nn.Module:
        model = prepare(method, *arguments)

        def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            log.append((len(steps), bucket.buffer().numel()))
            mean = bucket.buffer().div_(dist.get_world_size())
            work = all_reduce(mean, async_op=True)
            assert work is not None
            return work.get_future().then(lambda done: done.value()[0])

        assert isinstance(model, nn.parallel.DistributedDataParallel)
        model.register_comm_hook(None, hook)
        return model

    def logged(tensor: Tensor, *arguments: Any, **more: Any) -> Any:
        if tensor.numel() == PARAMETERS:
            log.append((len(steps), tensor.numel()))
        return all_reduce(tensor, *arguments, **more)

    with (
        patch.object(AllReduce, "prepare", hooked),
        patch.object(dist, "all_reduce", logged),
        patch.object(torch.optim.SGD, "step", counting_step),
    ):
        yield
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(log))


@pytest.mark.parametrize("method", ["allreduce", "co2"])
def test_accumulation_adds_no_collective(workers: Pool, tmp_path: Path, method: str) -> None:
    logs, sent = [], []
    for accumulate in (1, 4):
        log = tmp_path / f"{accumulate}.json"
        words = ("train.steps=12", "train.batch_size=4", f"train.accumulate={accumulate}")
        rounds = (word for word in overrides(method) if "tau" in word)
        given = {"runs": tmp_path / str(accumulate), "setup": partial(counted, str(log))}
        run = pooled(workers, 2, f"method={method}", *rounds, *words, **given)
        logs.append(json.loads(log.read_text()))
        sent.append(summary(run.folder)["bytes_per_step"])
    assert logs[0] == logs[1]
    means = 12 if method == "allreduce" else 4
    assert sum(numel for _, numel in logs[1]) == PARAMETERS * means
    assert sent[0] == sent[1] > 0


@contextmanager
def without_batch_norm() -> Iterator[None]:
    """Setup: a model for which the loss of a batch is the mean of its samples' losses."""
    model = Toy.model

    def plain(task: Toy) -> nn.Module:
        return nn.Sequential(*(part for part in model(task) if type(part) is not nn.BatchNorm1d))

    with patch.object(Toy, "model", plain):
        yield


@pytest.mark.parametrize("method", grid(METHODS, OF_A_KIND.__contains__))
def test_evaluation_changes_nothing(workers: Pool, tmp_path: Path, method: str) -> None:
    words = (f"method={method}", *overrides(method), "train.steps=20", "log.every=1")
    often, once = (
        pooled(workers, 2, *words, f"train.eval_every={every}", runs=tmp_path / str(every)).folder
        for every in (1, 20)
    )
    assert len(metrics(often, "eval")) == 20 and len(metrics(once, "eval")) == 1
    assert_same_weights(often, once)
    trained = [[line for line in story(one) if line["kind"] == "train"] for one in (often, once)]
    assert trained[0] == trained[1]


def test_sharding_is_no_other_training(workers: Pool, tmp_path: Path) -> None:
    """Warm-up and decay: rates that the background is told ahead, those after the end too."""
    words = (*STORY, "optim.schedule=cosine")
    plain, sharded = (
        pooled(workers, 2, *words, f"co2.shard={shard}", runs=tmp_path / shard).folder
        for shard in ("false", "true")
    )
    one, other = ([line["gap"] for line in metrics(folder, "train")] for folder in (plain, sharded))
    assert one == pytest.approx(other, rel=1e-3) and len(set(one)) > 15
    torch.testing.assert_close(weights(plain), weights(sharded), rtol=1e-3, atol=1e-4)
    assert summary(plain)["extra_model_copies"] == 3
    assert summary(sharded)["extra_model_copies"] == 2
    assert summary(sharded)["bytes_per_step"] == summary(plain)["bytes_per_step"]
    assert summary(sharded)["comm_s"] > 0


def test_seeds(workers: Pool, tmp_path: Path) -> None:
    """Another seed is another run, in a folder of its own beside the first."""
    for seed in (0, 1, 1):
        words, given = ("train.steps=5", f"train.seed={seed}"), {"runs": tmp_path / "runs"}
        pooled(workers, 2, *words, fresh=True, **given)
    first, second, again = folders(tmp_path / "runs")
    assert [path.name for path in (first, second, again)] == ["seed0", "seed1", "seed1.1"]
    assert_same_run(second, again)
    with pytest.raises(AssertionError):
        assert_same_weights(first, second)


def test_bf16(workers: Pool, tmp_path: Path) -> None:
    """Forward in bf16; weights and what is saved of them stay fp32."""
    half, single = (
        pooled(workers, 2, *STORY, f"train.precision={name}", runs=tmp_path / name).folder
        for name in ("bf16", "fp32")
    )
    assert all(value.dtype != torch.bfloat16 for value in weights(half).values())
    state = state_file.read(held(half / "checkpoints/step_60"))
    assert state["method"]["tensors"]["anchor"].dtype == torch.float32
    told = [summary(folder)["final"]["loss"] for folder in (half, single)]
    assert told[0] != told[1] and told[0] == pytest.approx(told[1], abs=0.1)
    lines = (metrics(folder, "train") for folder in (half, single))
    for one, other in zip(*lines, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=0.3)


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="needs a C++ compiler"
)
def test_compile(workers: Pool, tmp_path: Path) -> None:
    arguments = ("train.steps=20", "log.every=1", "train.eval_every=20")
    run = cli(*arguments, "launch.workers=1", "train.compile=true", runs=tmp_path / "compiled")
    plain = pooled(workers, 1, *arguments, runs=tmp_path / "plain").folder
    assert weights(run.folder).keys() == weights(plain).keys()
    for one, other in zip(nonempty(metrics(run.folder)), metrics(plain), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-3)


RATES: list[tuple[dict[str, Any], int, dict[int, float]]] = [
    (  # A cosine: halfway between warm-up and end at step 14, at a quarter of it at step 9.
        {"warmup_steps": 4, "min_lr_ratio": 0.1},
        24,
        {0: 0.25, 1: 0.5, 2: 0.75, 3: 1, 4: 1, 9: 0.55 + 0.45 * 0.5**0.5, 14: 0.55, 24: 0.1},
    ),
    ({"schedule": "constant", "warmup_steps": 2}, 9, {0: 0.5, 1: 1, 2: 1, 8: 1}),
    (
        {"schedule": "poly", "power": 2, "warmup_steps": 2, "min_lr_ratio": 0.2},
        10,
        {0: 0.5, 1: 1, 2: 1, 6: 0.2 + 0.8 * 0.25, 10: 0.2},
    ),
    (  # 0/1 Adam's recipe for BERT, with its first stairs: × 0.99 every 520 steps.
        {"schedule": "exponential", "warmup_steps": 12500, "decay_rate": 0.99, "decay_every": 520},
        100_000,
        {0: 1 / 12500, 12499: 1, 12500: 1, 13019: 1, 13020: 0.99, 13539: 0.99, 13540: 0.9801},
    ),
    (  # 0/1 Adam's recipe for ImageNet: × 0.1 at two milestones.
        {"schedule": "step", "milestones": (30, 60), "warmup_steps": 2},
        90,
        {0: 0.5, 1: 1, 29: 1, 30: 0.1, 59: 0.1, 60: 0.01, 89: 0.01},
    ),
    (
        {"schedule": "step", "milestones": (2, 3, 9), "gamma": 0.5},
        5,
        {0: 1, 1: 1, 2: 0.5, 3: 0.25, 4: 0.25},
    ),
]


@pytest.mark.parametrize(("fields", "steps", "expected"), RATES)
def test_the_learning_rate(fields: dict[str, Any], steps: int, expected: dict[int, float]) -> None:
    """As a share of the base rate; after the warm-up it never rises."""
    schedule = Schedule(fields.get("schedule", "cosine"))
    optim = OptimConfig(**{**fields, "schedule": schedule})
    shares = {step: learning_rate(step, optim, steps) for step in expected}
    assert shares == pytest.approx(expected)
    decayed = [learning_rate(step, optim, steps) for step in range(optim.warmup_steps, steps)]
    assert decayed == sorted(decayed, reverse=True)


def test_the_learning_rate_is_what_trains(spawned: Run) -> None:
    """The toy's recipe: lr 0.1, five steps of warm-up, a cosine to 0."""
    for line in nonempty(metrics(spawned.folder, "train")):
        index = line["step"] - 1
        cosine = (1 + math.cos(math.pi * (index - 5) / 55)) / 2
        share = (index + 1) / 5 if index < 5 else cosine
        assert line["lr"] == pytest.approx(0.1 * share)


WARNING = "warning: {} will happen in time: the first mean {}, and training ends at step 20"
NONE = WARNING.format("no communication", "of weights is due at step {}")
SOME = "not all communication"
LATE_MEANS = [
    ("local_sgd", "local_sgd.tau=21", NONE.format(21)),
    ("local_sgd", "local_sgd.tau=20", ""),
    ("co2", "co2.tau=12", NONE.format(24)),
    (
        "streaming_diloco",
        "streaming_diloco.tau=24",
        WARNING.format(SOME, "of fragment 1 is due at step 24"),
    ),
    (
        "desloc",
        "desloc.tau=20 optim.name=adamw",
        WARNING.format(
            SOME, "of first moments is due at step 36, of second moments is due at step 72"
        ),
    ),
    ("allreduce", "", ""),
]


@pytest.mark.parametrize(("method", "words", "says"), LATE_MEANS)
def test_rounds_longer_than_the_training_are_told_before_it(
    workers: Pool, tmp_path: Path, method: str, words: str, says: str
) -> None:
    arguments = (f"method={method}", *words.split(), "train.steps=20")
    run = pooled(workers, 2, *arguments, runs=tmp_path)
    first, *others = run.out.splitlines()
    assert (first if says else "") == says
    assert not any(line.startswith("warning") for line in others)
