"""Whole trainings: every task as in a loop of plain PyTorch, the same global batch on any number of
workers, and optim.name=muon under every method."""

import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml
from torch import Tensor, nn

import co2
import train
from co2.app.compose import composed
from co2.app.schema import typed
from co2.app.tuned import with_tuned
from co2.comm.mesh import Mesh
from co2.config import Config, OptimConfig, Optimizer
from co2.errors import ConfigError
from co2.methods import METHODS
from co2.randomness import seed_everything
from co2.record.folder import settings_digest, tag_from
from co2.start import placement
from tasks import TASKS
from tasks.shared.optimizer import make_optimizer
from tests.cli.harness import (
    assert_same_run,
    assert_same_weights,
    cli,
    configured,
    metrics,
    pooled,
    small,
    tasks_at,
    weights,
)
from tests.cli.test_runs import without_batch_norm
from tests.grids import grid, nonempty
from tests.methods.driver import overrides
from tests.tasks import random_graph
from tests.workers import Pool

WORKERS, WARMUP = 2, 4
DECAY = 0.1
CLIPS = {"toy": 0.5}
"""The largest norm of a step's gradient, where it is not 1: the toy's are all clipped."""
MICRO = {"toy": 2}
"""Micro-batches of a step, where there are several."""
SGD = ("resnet50", "ade20k")
SIZES = {"toy": (40, 8), "glue": (20, 4), "resnet50": (20, 8), "vit": (40, 16)}
"""Steps and micro-batch of tasks that learn late; of all others they are 12 and 4."""
NO_DECAY = ("cls_token", "pos_embed", "theta", "inner_bias", "outer_bias")
"""Ends of the names of parameters that have several dimensions and no weight decay."""


@contextmanager
def few_scenes() -> Iterator[None]:
    """Setup: ADE20K's scenes are 20, not 512, for each of which UperNet takes its time."""
    with patch("tasks.ade20k.scenes.Scenes.__len__", lambda scenes: 20):
        yield


def quick(task: str, root: Path, text: Path, place: Path) -> tuple[str, ...]:
    """Overrides that make a few steps of the task quick; its own graph takes seconds to be made."""
    own = (f"data.path={random_graph.write(place).folder}",) if task == "graph" else ()
    return (*small(task, root, text), *own)


@few_scenes()
def plain_loop(rank: int, world: int, config: Config) -> tuple[list[float], float, float]:
    """Train all workers' shares in this process.

    Returns:
        The loss of worker 0's micro-batches at each step; and the mean loss over all of them of an
        untrained model and of the trained one.
    """
    task, optim, steps = train.APP.make_task(config), config.optim, config.train.steps
    task.setup(WORKERS)
    model = task.model()
    decayed, others = [], []
    for name, weight in model.named_parameters():
        (others if weight.dim() < 2 or name.endswith(NO_DECAY) else decayed).append(weight)
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, betas=optim.betas, eps=optim.eps)
    if config.task in SGD:
        optimizer = torch.optim.SGD(groups, momentum=optim.momentum)
    batches = [task.batches(Mesh(w, WORKERS, torch.device("cpu")), 0) for w in range(WORKERS)]
    generators, curve, seen, micro = [], [], [], MICRO.get(config.task, 1)
    for worker in range(WORKERS):
        seed_everything(config.train.seed, worker)
        generators.append(torch.get_rng_state())  # of dropout
    for step in range(steps):
        for group in optimizer.param_groups:  # a warm-up, then a straight line to 0
            group["lr"] = optim.lr * min((step + 1) / WARMUP, (steps - step) / (steps - WARMUP))
        optimizer.zero_grad()
        for worker in range(WORKERS):
            torch.set_rng_state(generators[worker])
            drawn = [next(batches[worker]) for _ in range(micro)]
            losses = [task.loss(model, batch) for batch in drawn]
            (sum(losses) / (micro * WORKERS)).backward()
            generators[worker] = torch.get_rng_state()
            if worker == 0:
                curve.append(sum(losses).item() / micro)
                seen.extend(drawn)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPS.get(config.task, 1.0))
        optimizer.step()
    with torch.no_grad():
        ends = [sum(task.loss(m, b).item() for b in seen) for m in (task.model(), model)]
    return curve, ends[0] / len(seen), ends[1] / len(seen)


@pytest.mark.parametrize("task", TASKS)
def test_same_curve(workers: Pool, tmp_path: Path, root: Path, text: Path, task: str) -> None:
    steps, batch_size = SIZES.get(task, (12, 4))
    name, lr = ("sgd", 0.05) if task in SGD else ("adamw", 1e-3)
    arguments = (
        *(*quick(task, root, text, tmp_path / "graph"), "method=allreduce", "log.every=1"),
        *("log.wandb=disabled", "checkpoint.every=0", "train.eval_every=100"),
        *(f"train.steps={steps}", f"train.batch_size={batch_size}"),
        *(f"train.clip_norm={CLIPS.get(task, 1.0)}", f"train.accumulate={MICRO.get(task, 1)}"),
        *(f"optim.name={name}", f"optim.lr={lr}", "optim.nesterov=false"),
        *(f"optim.weight_decay={DECAY}", f"optim.warmup_steps={WARMUP}"),
        *("optim.schedule=poly", "optim.power=1", "optim.min_lr_ratio=0"),
    )
    config = configured(*arguments, runs=tmp_path / "runs")
    [(expected, untrained, trained)] = workers.run(plain_loop, 1, config)
    run = pooled(workers, WORKERS, *arguments, runs=tmp_path / "runs", setup=few_scenes)
    curve = [line["loss"] for line in metrics(run.folder, "train")]
    assert curve == pytest.approx(expected, rel=1e-5)
    assert trained < untrained


SHAPES = ((1, 8), (2, 8), (4, 8), (1, 4), (2, 16))
"""Workers and samples of a micro-batch: 4, 2, 1, 8 and 1 of these make the 32 of a step."""


def test_the_number_of_workers_changes_no_loss(workers: Pool, tmp_path: Path) -> None:
    """Over four epochs, of which 4 of 100 samples are left out each time."""

    words = ("method=allreduce", "train.global_batch=32", "toy.samples=100", "train.steps=12")
    runs = {}
    for world, batch in SHAPES:
        given = {"runs": tmp_path / f"{world}-{batch}", "setup": without_batch_norm}
        more = ("train.eval_every=1", f"train.batch_size={batch}")
        runs[world, batch] = pooled(workers, world, *words, *more, **given).folder
    told = {shape: metrics(folder, "eval") for shape, folder in runs.items()}
    losses = {shape: [line["loss"] for line in lines] for shape, lines in told.items()}
    first, *others = SHAPES
    assert len(losses[first]) == 12 and len(set(losses[first])) == 12
    for shape in others:
        assert losses[shape] == pytest.approx(losses[first], abs=1e-6), shape
        expected = weights(runs[first])
        torch.testing.assert_close(weights(runs[shape]), expected, rtol=1e-5, atol=1e-6)
    kept = [yaml.safe_load((runs[one] / "config.yaml").read_text())["train"] for one in SHAPES]
    assert [one["accumulate"] for one in kept] == [4, 2, 1, 8, 1]
    assert {one["global_batch"] for one in kept} == {32}


@pytest.mark.parametrize(
    ("whole", "batch", "world", "use"),
    [
        (64, 12, 4, "use 48, 96 or 144, or train.batch_size=8"),
        (8, 12, 4, "use 48, 96 or 144, or train.batch_size=2"),  # less than a micro-batch each
        (480, 5, 64, "use 320, 640 or 960, or train.global_batch=512 train.batch_size=4"),
    ],
)
def test_what_does_not_divide_is_refused(
    tmp_path: Path, whole: int, batch: int, world: int, use: str
) -> None:
    words = (f"launch.workers={world}", f"train.batch_size={batch}")
    with pytest.raises(ConfigError) as caught:
        configured(*words, f"train.global_batch={whole}", runs=tmp_path)
    assert str(caught.value).startswith(f"train.global_batch={whole}: is no multiple of the ")
    assert str(caught.value).endswith(use)
    sizes, _, other = use.removeprefix("use ").rpartition(", or ")
    for size in sizes.replace(" or ", ", ").split(", "):
        made = configured(*words, f"train.global_batch={size}", runs=tmp_path).train
        assert made.accumulate * batch * world == int(size)
    if "train.global_batch" not in other:
        other += f" train.global_batch={whole}"
    made = configured(*words, *other.split(), runs=tmp_path).train
    assert made.accumulate * made.batch_size * world == made.global_batch


def test_workers_that_share_a_replica_draw_their_own(tmp_path: Path) -> None:
    words = ("launch.workers=4", "mesh.replica_size=2", "train.global_batch=64")
    assert configured(*words, "train.batch_size=4", runs=tmp_path).train.accumulate == 4


def test_the_workers_of_torchrun_count(tmp_path: Path, variables: Callable) -> None:
    variables(RANK="0", WORLD_SIZE="8", LOCAL_WORLD_SIZE="4")
    config = configured("train.global_batch=64", "train.batch_size=2", runs=tmp_path)
    assert config.train.accumulate == 4 and "workers8" in config.tag
    with pytest.raises(ConfigError, match=r"train\.global_batch=60: .* 16 samples that 8 workers"):
        configured("train.global_batch=60", "train.batch_size=2", runs=tmp_path)


def test_a_run_goes_on_with_its_global_batch(workers: Pool, tmp_path: Path) -> None:
    """Also with other workers; an elastic one rounds it."""
    runs = tmp_path / "runs"
    words = ("tag=one", "method=co2", "co2.tau=2", "train.steps=4", "train.batch_size=8")
    whole = "train.global_batch=48"
    pooled(workers, 3, *words, whole, runs=runs)
    digests = set()
    for number, micro in ((2, 3), (3, 2), (4, 2), (8, 1)):
        more = ("launch.elastic=true", f"launch.workers={number}")
        config = configured(*words, whole, *more, runs=runs)
        assert config.train.accumulate == micro
        digests.add(settings_digest(config))
    assert len(digests) == 4, "they are other settings"
    with pytest.raises(ConfigError, match=r"train\.global_batch=48: is no multiple of the 32"):
        configured(*words, whole, "launch.workers=4", runs=runs)
    assert configured(*words, whole, "launch.workers=2", runs=runs).train.accumulate == 3


def test_workers_where_none_are_named(tmp_path: Path) -> None:
    for gpus, number in ((4, 4), (0, 2)):
        with patch("torch.cuda.device_count", lambda gpus=gpus: gpus):
            assert placement.workers_here() == number
    with patch("co2.start.placement.workers_here", lambda: 4):
        config = configured("launch.workers=null", "train.global_batch=128", runs=tmp_path)
    assert config.launch.workers == 4 and config.train.accumulate == 2
    same = configured("launch.workers=4", "train.global_batch=128", runs=tmp_path)
    assert config.tag == same.tag, "the same run"
    assert tag_from((), 4, None, "co2") == "workers4"


MUON = ("optim.name=muon", "optim.lr=0.02")


@pytest.mark.parametrize("method", ["allreduce", "co2_keep", "streaming_diloco"])
def test_muon_learns(workers: Pool, tmp_path: Path, method: str) -> None:
    words = (f"method={method}", *overrides(method), *MUON)
    run = pooled(workers, 2, *words, runs=tmp_path)
    *_, last = metrics(run.folder, "eval")
    assert last["accuracy"] > 0.65  # to name the most frequent class gives 0.36


def test_a_replica_shares_its_state(workers: Pool, tmp_path: Path) -> None:
    """ZeRO-1 gives whole matrices to one worker or another: the bits of ddp."""
    words = ("method=diloco", "diloco.tau=3", *MUON, "train.steps=16", "mesh.replica_size=2")
    runs = (
        pooled(workers, 4, *words, f"mesh.strategy={strategy}", runs=tmp_path / strategy).folder
        for strategy in ("ddp", "zero1")
    )
    assert_same_weights(*runs)


class Inclined(nn.Module):
    """A loss that is linear in a matrix and a bias: gradients are means of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.bias = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(5))

    def forward(self, samples: Tensor) -> Tensor:
        first, second = samples[:, :24], samples[:, 24:]
        return (first @ self.matrix.flatten() + second @ self.bias).mean()


def trained(rank: int, world: int) -> dict[str, Tensor]:
    model = Inclined()
    optimizer = make_optimizer(model, OptimConfig(name=Optimizer.muon, lr=0.1, weight_decay=0.1))
    method = METHODS["allreduce"](METHODS["allreduce"].Config())
    wrapped = method.prepare(model, optimizer, co2.Mesh.world())
    for step in range(5):
        # Whole numbers, of which fp32 rounds no mean of 8: both sides see the same gradients.
        source = torch.Generator().manual_seed(step)
        samples = torch.randint(-9, 10, (8, 29), generator=source).float()
        wrapped(samples.chunk(world)[rank]).backward()
        method.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def test_two_workers_step_as_one_with_the_joint_batch(workers: Pool) -> None:
    (alone,) = workers.run(trained, 1)
    for worker in workers.run(trained, 2):
        assert all(torch.equal(value, alone[name]) for name, value in worker.items())
    assert not torch.equal(alone["matrix"], torch.ones(6, 4))


PLACES = [
    (task, scale)
    for scale in ("smoke", "gpu", "node", "paper")
    for task in nonempty(tasks_at(scale))
]
PLACES.append(("roberta", "liu"))


@pytest.mark.parametrize(("place", "method"), list(zip(PLACES, itertools.cycle(METHODS))))
def test_composes(place: tuple[str, str], method: str) -> None:
    """Every task at every scale, and every method: no file of `conf` depends on both."""
    task, scale = place
    choice = [f"task={task}", f"method={method}", f"scale={scale}", "launch.workers=2"]
    conf = train.APP.conf
    values, _ = with_tuned(conf, composed(conf, choice), choice, train.APP.methods)
    config = typed(values, METHODS, TASKS)
    assert (config.task, config.method, config.scale) == (task, method, scale)
    made = train.APP.make_task(config)
    assert made.units_per_sample >= 1 and made.unit in ("tokens", "samples")


OF_A_TASK = ("resnet50", "ade20k", "shapenet", "gpt2", "roberta", "glue", "graph")
"""A task of each kind. resnet50 stands for vit; gpt2 for moe, which tests/cli/test_mesh.py has, and
for transnormer; the toy is everywhere."""


@pytest.mark.parametrize("task", grid(TASKS, OF_A_TASK.__contains__))
def test_goes_on_exactly(workers: Pool, tmp_path: Path, root: Path, text: Path, task: str) -> None:
    """A run that lost its last four steps makes them again, to the last bit.

    Under CO2 alone: tests/cli/test_disturbed.py has every method.
    """
    arguments = (
        *quick(task, root, text, tmp_path / "graph"),
        *("method=co2", "co2.tau=2", "train.steps=7", "train.batch_size=4", "train.eval_every=3"),
        *("checkpoint.every=3", "checkpoint.keep=3", "log.every=1"),
    )
    whole = pooled(workers, 2, *arguments, runs=tmp_path / "whole", setup=few_scenes)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    cut = tmp_path / "cut" / whole.folder.relative_to(tmp_path / "whole")
    (cut / "summary.json").unlink()
    for step in (6, 7):
        shutil.rmtree(cut / "checkpoints" / f"step_{step}")
    again = pooled(workers, 2, *arguments, runs=tmp_path / "cut", setup=few_scenes)
    assert "resumed at step 3 of 7" in again.out
    assert_same_run(whole.folder, again.folder)


def test_loading_ahead_changes_nothing(workers: Pool, tmp_path: Path) -> None:
    """Processes that make batches change neither weights nor figures; and they end with the run."""
    words = ("task=resnet50", "train.steps=6", "train.batch_size=4", "log.every=1", "co2.tau=2")
    plain = pooled(workers, 1, *words, runs=tmp_path / "plain")
    ahead = cli(*words, "launch.workers=1", "data.workers=1", runs=tmp_path / "ahead")
    assert_same_run(plain.folder, ahead.folder)
