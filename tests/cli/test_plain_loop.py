"""Every task trains, under the suite and on two workers, as in a loop of plain PyTorch."""

from pathlib import Path

import pytest
import torch

import train
from co2.comm.mesh import Mesh
from co2.config import Config
from co2.randomness import seed_everything
from tasks import TASKS
from tests.cli.harness import configured, metrics, pooled, small
from tests.cli.test_every_task import few_scenes
from tests.tasks import random_graph
from tests.workers import Pool

WORKERS, WARMUP = 2, 4
DECAY, CLIP = 0.1, 1.0
SGD = ("resnet50", "ade20k")
SIZES = {"toy": (40, 8), "glue": (20, 4), "resnet50": (20, 8), "vit": (40, 16)}
"""Steps and micro-batch of tasks that learn late; of all others they are 12 and 4."""
NO_DECAY = ("cls_token", "pos_embed", "theta", "inner_bias", "outer_bias")
"""Ends of the names of parameters that have several dimensions and no weight decay."""


def plain_loop(rank: int, world: int, config: Config) -> tuple[list[float], float, float]:
    """Train all workers' shares in this process.

    Returns:
        The loss of worker 0's micro-batch at each step; and the mean loss over all these
        micro-batches of an untrained model and of the trained one.
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
    generators, curve, seen = [], [], []
    for worker in range(WORKERS):
        seed_everything(config.train.seed, worker)
        generators.append(torch.get_rng_state())  # of dropout
    for step in range(steps):
        for group in optimizer.param_groups:  # a warm-up, then a straight line to 0
            group["lr"] = optim.lr * min((step + 1) / WARMUP, (steps - step) / (steps - WARMUP))
        optimizer.zero_grad()
        for worker in range(WORKERS):
            torch.set_rng_state(generators[worker])
            batch = next(batches[worker])
            loss = task.loss(model, batch)
            (loss / WORKERS).backward()
            generators[worker] = torch.get_rng_state()
            if worker == 0:
                curve.append(loss.item())
                seen.append(batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    with torch.no_grad():
        ends = [sum(task.loss(m, b).item() for b in seen) for m in (task.model(), model)]
    return curve, ends[0] / steps, ends[1] / steps


def plain_on_few_scenes(rank: int, world: int, config: Config) -> tuple[list[float], float, float]:
    with few_scenes():
        return plain_loop(rank, world, config)


@pytest.mark.parametrize("task", TASKS)
def test_same_curve(workers: Pool, tmp_path: Path, root: Path, text: Path, task: str) -> None:
    steps, batch_size = SIZES.get(task, (12, 4))
    name, lr = ("sgd", 0.05) if task in SGD else ("adamw", 1e-3)
    arguments = (
        *small(task, root, text),
        "method=allreduce",
        "log.every=1",
        "log.wandb=disabled",
        "checkpoint.every=0",
        f"train.steps={steps}",
        f"train.batch_size={batch_size}",
        "train.eval_every=100",
        f"train.clip_norm={CLIP}",
        f"optim.name={name}",
        f"optim.lr={lr}",
        "optim.nesterov=false",
        f"optim.weight_decay={DECAY}",
        "optim.schedule=poly",
        "optim.power=1",
        "optim.min_lr_ratio=0",
        f"optim.warmup_steps={WARMUP}",
    )
    if task == "graph":  # its own takes seconds to be made
        arguments = (*arguments, f"data.path={random_graph.write(tmp_path / 'graph').folder}")
    config = configured(*arguments, runs=tmp_path / "runs")
    [(expected, untrained, trained)] = workers.run(plain_on_few_scenes, 1, config)
    run = pooled(workers, WORKERS, *arguments, runs=tmp_path / "runs", setup=few_scenes)
    assert run.status == 0, run.err
    curve = [line["loss"] for line in metrics(run.folder, "train")]
    assert curve == pytest.approx(expected, rel=1e-5)
    assert trained < untrained
