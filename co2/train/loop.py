"""The training loop, from top to bottom."""

import contextlib
import math
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from co2.comm.clocks import overlap
from co2.comm.mesh import Mesh
from co2.config import Config, OptimConfig, Precision, Resume, Schedule
from co2.errors import DIVERGED, PREEMPTED
from co2.methods import Method
from co2.record.console import TrainProgress
from co2.record.folder import Record, run_folder
from co2.record.trace import Trace
from co2.train.checkpoint import Checkpoints, random_states, restore_random_states
from co2.train.launch import STOP_SIGNALS
from co2.train.meters import Meter, ledger, peak_memory_bytes
from co2.train.replica import (
    Replica,
    accumulating,
    checkpoint_activations,
    own_buffers,
    whole_weights,
)
from co2.train.stop import StopVote


def train(config: Config, task: Any, method: Method, mesh: Mesh) -> None:
    """Train one run to its end, or to where it is told to stop; every worker calls this.

    Args:
        config: of the run, checked.
        task: follows `co2.task.Task`, set up.
        method: how the replicas are kept in step.
        mesh: of the workers.
    Raises:
        SystemExit: `PREEMPTED` after a signal, saved; `DIVERGED` when a loss is not finite.
    """
    knobs, first = config.train, mesh.worker == 0
    _seed(knobs.seed, mesh.worker)
    # A group for flags, barriers and final figures, which no training collective can hold up.
    control = mesh.new_group_of_workers("gloo")
    folder = run_folder(config)
    if first and config.resume is Resume.never and folder.exists():
        _move_aside(folder)
    if control is not None:
        dist.barrier(group=control)

    module: nn.Module = task.model().to(mesh.device)
    if knobs.checkpoint_activations:
        checkpoint_activations(module)
    if knobs.compile:
        module.compile()
    replica = Replica(config.mesh, mesh, method.averages_gradients)
    replica.shard(module)
    optimizer = replica.optimizer(task.optimizer(module))
    model = method.prepare(
        module,
        optimizer,
        mesh,
        schedule=lambda index: _largest_lr(optimizer, config.optim, index, knobs.steps),
    )
    model = replica.wrap(model, config.comm)

    title = f"{config.task} · {config.method} · {config.tag}"
    console = TrainProgress(title, knobs.steps, task.unit) if first else None
    say = console.say if console else lambda line: None
    record = Record(config, mesh.num_workers, task.fingerprint(), say) if first else None
    shared, keep = replica.state(module, optimizer), config.checkpoint.keep
    checkpoints = Checkpoints(folder / "checkpoints", mesh, control, keep, say, shared)

    step, totals = 0, None
    found = checkpoints.load()
    if found is not None:
        step, state = found
        if _remembers_order(model):
            # A pass that counts for nothing: what it moved is loaded now.
            batch = _to(next(task.batches(mesh, 0)), mesh.device)
            with _autocast(knobs.precision, mesh.device):
                unused = task.loss(model, batch)
            unused.backward()
            optimizer.zero_grad(set_to_none=True)
            del batch, unused
        if shared is None:
            module.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        else:
            module.load_state_dict(state["buffers"], strict=False)
        method.load_state_dict(state["method"])
        totals = state["totals"]
        restore_random_states(state["random"])
        say(f"resumed at step {step} of {knobs.steps}")
        del state, found
    if record is not None:
        record.begin(step)

    units_per_step = knobs.batch_size * knobs.accumulate * task.units_per_sample
    meter = Meter(units_per_step, mesh.num_workers, method.stats, totals)
    batches = task.batches(mesh, step * knobs.accumulate)
    losses = _Losses(step, mesh, checkpoints, config.log.every)

    def save() -> bool:
        with meter.paused():
            state = {
                "method": method.state_dict(),
                "totals": meter.state_dict(),
                "random": random_states(),
            }
            if shared is None:
                state |= {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
            else:
                state["buffers"] = own_buffers(module)
            return checkpoints.save(step, state)

    def evaluate() -> dict[str, float]:
        with meter.paused(), method.consensus(), torch.no_grad():
            with _autocast(knobs.precision, mesh.device):
                scores = task.evaluate(module)
            if mesh.replica == 0 and step == knobs.steps:
                weights = whole_weights(module)
                if first:
                    torch.save(weights, folder / "model.pt")
        if record is not None:
            record.log("eval", step, {**scores, "train_s": meter.totals.train_s})
        text = "  ".join(f"{name} {value:.4f}" for name, value in scores.items())
        say(f"step {step}/{knobs.steps}  validation {text}")
        return scores

    tau = method.round_steps
    trace = Trace(folder / "trace" / f"rank_{mesh.worker}.json", tau) if config.trace else None
    status = 1
    try:
        with StopVote(mesh, control, lambda: method.max_skew_steps, STOP_SIGNALS) as stop:
            while step < knobs.steps:
                _set_lr(optimizer, config.optim, step, knobs.steps)
                loss = torch.zeros((), device=mesh.device)
                for micro in range(knobs.accumulate):
                    with meter.waiting():
                        batch = _to(next(batches), mesh.device)
                    with accumulating(model, last=micro == knobs.accumulate - 1):
                        with _autocast(knobs.precision, mesh.device):
                            part = task.loss(model, batch) / knobs.accumulate
                        part.backward()
                    loss += part.detach()
                if knobs.clip_norm is not None:
                    nn.utils.clip_grad_norm_(module.parameters(), knobs.clip_norm)
                losses.add(loss)  # on a CPU, looked at before a bad step reaches the others
                method.step()
                optimizer.zero_grad(set_to_none=True)
                step += 1
                meter.step()
                for notice in method.notices():
                    say(f"step {step}/{knobs.steps}  {notice}")
                    if record is not None:
                        record.log("notice", step, {"text": notice})
                if trace is not None:
                    with meter.paused():  # starting a profiler and writing its file cost seconds
                        trace.step()

                figures = None
                if step % config.log.every == 0 or step == knobs.steps:
                    with meter.paused():
                        lr = optimizer.param_groups[0]["lr"]
                        figures = {"loss": losses.look(), "lr": lr, **meter.interval()}
                        if record is not None:
                            record.log("train", step, _named(figures, task.unit))
                if console is not None:
                    console.step(step, figures)
                if step % knobs.eval_every == 0 and step < knobs.steps:
                    evaluate()
                saved, every = False, config.checkpoint.every
                if every > 0 and (step % every == 0 or step == knobs.steps):
                    losses.look()
                    saved = save()
                if step < knobs.steps and stop():
                    stop.drain()
                    losses.look()
                    if saved or save():
                        say(f"stopped and saved at step {step}; the same command goes on from here")
                        status = PREEMPTED
                    raise SystemExit(status)
            stop.drain()
        scores = evaluate()
        summary = _summary(config, task, method, mesh, control, meter, scores, module, optimizer)
        method.flush()
        if control is not None:
            dist.barrier(group=control)
        if record is not None:
            record.finish(summary)
        status = 0
    finally:
        if trace is not None:
            trace.close()
        if console is not None:
            console.close()
        if record is not None:
            record.close(0 if status == PREEMPTED else status)


def learning_rate(step: int, optim: OptimConfig, steps: int) -> float:
    """The schedule's share of the peak rate in the step with this index: a pure function.

    Linear warm-up that ends at index `warmup_steps` − 1, then a cosine or (1 − x)^power (or
    nothing) that would reach `min_lr_ratio` at index `steps`.
    """
    if step < optim.warmup_steps:
        return (step + 1) / optim.warmup_steps
    if optim.schedule is Schedule.constant:
        return 1.0
    done = (step - optim.warmup_steps) / max(1, steps - optim.warmup_steps)
    if optim.schedule is Schedule.cosine:
        left = 0.5 * (1 + math.cos(math.pi * done))
    else:
        left = (1 - done) ** optim.power
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * left


def _set_lr(optimizer: torch.optim.Optimizer, optim: OptimConfig, step: int, steps: int) -> None:
    share = learning_rate(step, optim, steps)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * share


def _largest_lr(
    optimizer: torch.optim.Optimizer, optim: OptimConfig, step: int, steps: int
) -> float:
    """Of the parameter groups in the step with this index. Past the last step, where a round may
    be prepared that nobody trains, the last one's."""
    share = learning_rate(min(step, steps - 1), optim, steps)
    return max(group["initial_lr"] * share for group in optimizer.param_groups)


def _autocast(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager:
    if precision is Precision.fp32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def _remembers_order(model: Any) -> bool:
    """Whether gradients are added up in an order that the first backward pass decides.

    From its second pass on DDP has gradients in the order in which they came in the first, and
    where one stands decides in which order three workers or more add theirs: so it rounds.
    """
    ddp = isinstance(model, DistributedDataParallel)
    return ddp and dist.get_world_size(model.process_group) > 2


def _to(batch: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(device, non_blocking=True), batch)


def _seed(seed: int, worker: int) -> None:
    """Dropout and the like differ between workers, and repeat from run to run."""
    own = seed * 1_000_003 + worker
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)


class _Losses:
    """The losses since the last look. A look makes the host wait for a GPU, so it is rare there."""

    def __init__(self, step: int, mesh: Mesh, checkpoints: Checkpoints, every: int) -> None:
        self._seen, self._mesh, self._checkpoints = step, mesh, checkpoints
        self._every = every if mesh.device.type == "cuda" else 1
        self._losses: list[Tensor] = []
        self._last = math.nan

    def add(self, loss: Tensor) -> None:
        self._losses.append(loss)
        if len(self._losses) >= self._every:
            self.look()

    def look(self) -> float:
        """The newest loss. Ends the run where one since the last look is not finite."""
        for loss in torch.stack(self._losses).tolist() if self._losses else []:
            self._seen += 1
            self._last = loss
            if not math.isfinite(loss):
                self._end(loss)
        self._losses.clear()
        return self._last

    def _end(self, loss: float) -> None:
        steps = self._checkpoints.steps()
        folder = os.path.relpath(self._checkpoints.folder)
        last = f"{folder}/step_{steps[0]}" if steps else "none"
        print(
            f"error: the loss is {loss} at step {self._seen} on worker {self._mesh.worker}; "
            f"last good checkpoint: {last}; "
            "try a lower optim.lr, a longer warm-up or train.clip_norm=1",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(DIVERGED)


def _move_aside(folder: Path) -> None:
    """Nothing is lost: `seed0` becomes `seed0.1`, or the next free number."""
    number = 1
    while (target := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(target)


def _named(figures: dict[str, float], unit: str) -> dict[str, float]:
    return {f"{unit}_per_s" if key == "per_s" else key: value for key, value in figures.items()}


def _summary(
    config: Config,
    task: Any,
    method: Method,
    mesh: Mesh,
    control: dist.ProcessGroup | None,
    meter: Meter,
    scores: dict[str, float],
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """Final figures; communication and bytes are means over the workers, training time and so
    throughput are the slowest one's. Collective."""
    totals = meter.state_dict()
    stats = method.stats()
    means = torch.tensor([stats.comm_s, stats.exposed_s, stats.bytes_sent], dtype=torch.float64)
    if control is not None:
        dist.all_reduce(means, op=dist.ReduceOp.AVG, group=control)
    comm_s, exposed_s, sent = means.tolist()
    slowest = torch.tensor([totals["train_s"], -meter.throughput()], dtype=torch.float64)
    if control is not None:
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=control)
    train_s, throughput = slowest[0].item(), -slowest[1].item()
    return {
        "title": f"{config.task} · {config.method} · {config.tag} · seed {config.train.seed}",
        "task": config.task,
        "method": config.method,
        "tag": config.tag,
        "scale": config.scale,
        "seed": config.train.seed,
        "final": scores,
        "baselines": task.baselines(),
        "steps": totals["steps"],
        "workers": mesh.num_workers,
        "replica_size": mesh.replica_size,
        "unit": task.unit,
        "throughput": throughput,
        "comm_s": comm_s,
        "exposed_s": exposed_s,
        "exposed_share": exposed_s / max(train_s, 1e-9),
        "data_share": totals["data_s"] / max(train_s, 1e-9),
        "overlap": overlap(comm_s, exposed_s),
        "bytes_per_step": sent / max(totals["steps"], 1),
        "train_s": train_s,
        "wall_s": totals["wall_s"],
        "peak_memory_bytes": peak_memory_bytes(mesh.device),
        "extra_model_copies": method.extra_copies,
        "memory": ledger(module, optimizer, method),
        "device": str(mesh.device),
        "folder": os.path.relpath(run_folder(config)),
        **stats.own,
    }
