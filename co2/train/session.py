"""Session: what is trained, and how it is saved, resumed and evaluated."""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from co2.config import Precision
from co2.elastic.quorum import Quorum
from co2.elastic.replicas import replicas_of
from co2.errors import ConfigError
from co2.gpus import gpu_of
from co2.methods.base import QUORUM
from co2.record.files import durable
from co2.record.folder import begun
from co2.record.metrics import Change, Evaluation
from co2.train import initial
from co2.train.average import MovingAverage
from co2.train.checkpoint import Checkpoints
from co2.train.convolutions import tune_convolutions
from co2.train.host_copy import HostCopy
from co2.train.meters import Meter, Utilization
from co2.train.randomness import random_states, restore_random_states
from co2.train.replica import (
    Replica,
    ReplicaState,
    checkpoint_activations,
    compile_model,
    own_buffers,
    whole_weights,
)
from co2.train.run import Run
from co2.train.samples import Samples
from co2.train.schedule import largest_lr
from co2.train.state_file import REPLICA, rebuilt, split
from co2.train.weights import EMA_MODEL, MODEL, write

T = TypeVar("T")


class Session:
    """Model, optimizer and method of a run, from its start or its last checkpoint on.

    `module` is the task's own model, whose parameters are trained; `model` is what the forward pass
    goes through: the module, or the module inside PyTorch's own wrapper.
    """

    def __init__(self, run: Run) -> None:
        config, mesh = run.config, run.mesh
        self.run, self.step = run, 0
        self.module: nn.Module = run.task.model().to(mesh.device)
        self._from_checkpoint = begun(run.folder)
        if config.init_from is not None and not self._from_checkpoint:
            initial.load(config.init_from, self.module, run.task)
        self.replica = replica = Replica(config.mesh, mesh, run.method.averages_gradients)
        replica.synchronize_batch_norm(self.module)
        tune_convolutions(self.module, mesh.device, config.mesh.strategy)
        if config.train.compile:
            compile_model(self.module, config.mesh.strategy)
        if config.train.checkpoint_activations:
            checkpoint_activations(self.module)
        replica.shard(self.module, config.train.precision)
        self.optimizer = replica.optimizer(run.task.optimizer(self.module))
        fresh = not mesh.newcomer
        prepared = run.method.prepare(
            self.module, self.optimizer, mesh, self.largest_lr, fresh, config.train.steps
        )
        self.model = replica.wrap(prepared, config.comm)
        self.shared = ReplicaState(self.module, self.optimizer, replica)
        self.average = MovingAverage(self.module, config.train.ema_decay)
        self.checkpoints = Checkpoints(
            run.folder / "checkpoints",
            mesh,
            run.control,
            config.checkpoint.keep,
            lambda line: run.console.print_line(line),  # another's, where this worker takes over
            config.launch.elastic,
        )
        self.replicas = replicas = replicas_of(mesh)
        """What renews those that train, where they come and go; None where they do not."""
        self.changes: list[Change] = []
        """How replicas came and went."""
        self.samples = Samples(run)
        weighted = QUORUM not in run.method.refusals()
        members = None if replicas is None else replicas.members
        self.quorum = Quorum(
            config.launch.quorum, run.method.round_steps, members, mesh.device, weighted
        )
        if replicas is not None:
            replicas.begin(self._changed)
        totals: dict[str, Any] | None
        if replicas is not None and mesh.newcomer:
            totals = replicas.join(self.checkpoints.finish, self._load_given, run.control)
        else:
            totals = self._resume()
        self.began_at = self.step
        self.samples.begin()
        if run.is_first:
            self.utilization  # noqa: B018 — counted now, not in the midst of training
        self.meter = Meter(run.method.stats, totals)

    def close(self) -> None:
        """End the threads that write checkpoints, that load batches, and what gives newcomers their
        state."""
        self.samples.close()
        self.checkpoints.close()
        if self.replicas is not None:
            self.replicas.close()

    def largest_lr(self, step: int) -> float:
        """The largest inner learning rate in the step with this index: the method's schedule."""
        config = self.run.config
        return largest_lr(self.optimizer, config.optim, step, config.train.steps)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Around the forward pass and the loss."""
        if self.run.config.train.precision is Precision.fp32:
            return contextlib.nullcontext()
        return torch.autocast(self.run.mesh.device.type, dtype=torch.bfloat16)

    @cached_property
    def utilization(self) -> Utilization | None:
        """How to tell model FLOP utilization; None on a device without a known peak, where workers
        share a GPU, and where operations cannot be counted before there are data."""
        run = self.run
        if run.mesh.device.type != "cuda":
            return None
        gpu = gpu_of(torch.cuda.get_device_name(run.mesh.device))
        shared = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count()
        if gpu is None or shared:
            return None
        from co2.train.shapes import flops  # only GPUs need it

        try:
            counted = flops(run.task, run.config)
        except ConfigError:
            return None
        units = run.config.train.batch_size * run.task.units_per_sample
        return Utilization(counted / units, gpu.peak_flops)

    @property
    def units(self) -> int:
        """Tokens or samples of the step under way, of all workers that make it."""
        return self.samples.units(self.quorum.making(self.step, self.run.mesh.num_workers))

    def catch_up(self) -> None:
        """Wait until a GPU has done the work of all steps, without collectives in the background:
        the clock is about to stand still."""
        if self.run.mesh.device.type == "cuda":
            torch.cuda.current_stream(self.run.mesh.device).synchronize()

    def skip_step(self) -> None:
        """Skip this step on this replica."""
        self.samples.skip_step()
        self.meter.totals.passed_over += 1

    def synchronize(self) -> None:
        """The inner step, and the synchronization due now."""
        self.quorum.tell(self.step)
        self.run.method.step()
        shares = self.quorum.share_out(self.step)
        if shares is not None:
            self.run.record.log(shares)
            if text := shares.text():
                self.run.console.print_line(f"step {shares.step}: {text}")

    def together(self, act: Callable[[], T]) -> T:
        """Do what all workers do together and may do twice; where replicas may be lost, until all
        that are left have done it."""
        return act() if self.replicas is None else self.replicas.together(act)

    def _changed(self, lost: Mapping[int, str], before: int, began: float) -> None:
        """Replicas have come or gone: go on with those that are there now. See `Replicas`."""
        run, replicas = self.run, self.replicas
        assert replicas is not None
        members = replicas.members
        run.take_over(self.step)
        self.checkpoints.regroup(run.mesh, run.control)
        self.quorum.regroup()
        self.samples.regroup(before)
        self.samples.begin()
        seconds = time.perf_counter() - began
        change = Change(
            self.step, members.generation, members.ids, dict(lost), members.joined, seconds
        )
        self.changes.append(change)
        run.record.log(change)
        text = f"{change.text()}{self.samples.compared(before)}"
        run.console.print_line(f"step {self.step}: {text} ({seconds:.2f} s)")
        if members.joined and run.is_first:
            assert run.control is not None, "there are two at least"
            copy = HostCopy()
            own = split(self.state(), 0)
            given = own.values, copy.take(own.tensors)
            copy.hold()
            replicas.give(given, copy.wait, run.control)

    def save(self) -> None:
        """Begin a checkpoint, which is written while training goes on. Every worker calls it; none
        waits for another."""
        with self.meter.saving():
            self.checkpoints.start(self.step, self.state(arriving=True))

    def save_now(self) -> bool:
        """Save synchronously. Collective. False, with a line for a person, where that failed."""

        def act() -> bool:
            begun = self.checkpoints.finish() == self.step
            return begun or self.checkpoints.save(self.step, self.state())

        with self.meter.saving():
            return self.together(act)

    def finish_saving(self) -> None:
        """Wait for the checkpoint that was begun last. Collective."""
        with self.meter.saving():
            self.together(self.checkpoints.finish)

    def state(self, arriving: bool = False) -> dict[str, Any]:
        """Everything of this worker that a checkpoint holds.

        Args:
            arriving: do not wait for what is in flight (`Method.state_dict`).
        """
        return {
            REPLICA: self.shared.state(),
            "model": own_buffers(self.module),
            "step": self.step,
            "workers": self.run.mesh.num_workers,
            "draws": self.samples.draws,
            "behind": self.samples.behind,
            "steps_in_round": self.quorum.state(),
            "stretches": list(map(list, self.samples.stretches)),
            "changes": [change.line() for change in self.changes],
            "method": self.run.method.state_dict(arriving),
            "totals": self.meter.state_dict(),
            "random": random_states(),
            "average": self.average.tensors,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned, with the random generators as they are."""
        self.step = state["step"]
        self.samples.draws, self.samples.behind = state["draws"], state["behind"]
        self.quorum.load(state["steps_in_round"])
        self.changes = [Change.of(line) for line in state["changes"]]
        self.samples.stretches = tuple((draw, workers) for draw, workers in state["stretches"])
        self.shared.load(state[REPLICA])
        self.module.load_state_dict(state["model"], strict=False)
        self.run.method.load_state_dict(state["method"])
        self.average.load(state["average"])

    def _load_given(self, given: Any) -> dict[str, Any]:
        """Go on from what another replica gave. Returns the meter's totals."""
        values, tensors = given
        state = rebuilt(values, tensors.__getitem__)
        self.load(state)
        return dict(state["totals"])

    def evaluate(self) -> dict[str, float]:
        """The task's metrics of the consensus, and with the prefix ema_ those of the moving
        average; at the run's end the weights of both are saved too. Collective."""
        run, steps = self.run, self.run.config.train.steps
        self.checkpoints.hold()
        with self.meter.paused():
            scores = self.together(self._scores)
        run.record.log(Evaluation(self.step, scores, self.meter.totals.train_s))
        text = "  ".join(f"{name} {value:.4f}" for name, value in scores.items())
        run.console.print_line(f"step {self.step}/{steps}  validation {text}")
        return scores

    def _scores(self) -> dict[str, float]:
        scores = self._scores_of(self.run.method.consensus(), MODEL)
        if self.average.tensors:
            found = self._scores_of(self.average.shown(self.run.method), EMA_MODEL)
            scores |= {f"ema_{name}": value for name, value in found.items()}
        return scores

    def _scores_of(
        self, shown: contextlib.AbstractContextManager[None], name: str
    ) -> dict[str, float]:
        """The metrics of the weights that the model holds inside `shown`. At the run's end they are
        saved under this name."""
        run = self.run
        with shown, torch.no_grad():
            with self.autocast():
                scores = run.task.evaluate(self.module)
            if run.mesh.replica == 0 and self.step == run.config.train.steps:
                weights = whole_weights(self.module, self.replica.parts)
                if run.is_first:
                    with durable(run.folder / name) as file:
                        write(file, weights)
        return scores

    def _resume(self) -> dict[str, Any] | None:
        """Go on from the newest sound checkpoint, if there is one; returns the meter's totals. Of
        an elastic run other replicas may have written it: one too many goes on from the first's."""
        found = self.checkpoints.load()
        if found is None:
            folder = self.run.config.init_from
            if folder is not None and self._from_checkpoint:
                hint = "was not read, for there were checkpoints, but all are damaged; start again"
                raise ConfigError("init_from", folder, hint)
            return None
        _, state = found
        if _remembers_order(self.model):
            self._rehearse()
        self.load(state)
        mesh, text = self.run.mesh, ""
        saved_by = state["workers"]
        if mesh.worker < saved_by:
            restore_random_states(state["random"])
        if mesh.num_workers != saved_by:
            self.samples.regroup(saved_by)
            text = self.samples.compared(saved_by)
        steps = self.run.config.train.steps
        self.run.console.print_line(f"resumed at step {self.step} of {steps}{text}")
        return state["totals"]

    def _rehearse(self) -> None:
        """A forward and a backward pass that count for nothing: whatever they move is loaded
        afterwards."""
        batch = self.samples.to_device(next(self.run.task.batches(self.run.mesh, 0)))
        with self.autocast():
            loss = self.run.task.loss(self.model, batch)
        loss.backward()
        self.optimizer.zero_grad(set_to_none=True)


def _remembers_order(model: nn.Module) -> bool:
    """Whether gradients are added up in an order that the first backward pass decides.

    From its second pass on DDP lays out gradients in the order in which they came in the first, and
    the place of a gradient decides in which order three workers or more add theirs, and with it how
    the sum is rounded.
    """
    if not isinstance(model, DistributedDataParallel):
        return False
    return dist.get_world_size(model.process_group) > 2
