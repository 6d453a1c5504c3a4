"""Session: what is trained, and how it is saved, resumed and evaluated."""

import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from co2.atomic import durable
from co2.comm.collectives import gathered
from co2.config import Precision
from co2.elastic.quorum import Quorum
from co2.elastic.replicas import Replicas
from co2.errors import ConfigError
from co2.gpus import gpu_of
from co2.methods.base import QUORUM
from co2.methods.shared.state import Kept, put_values, values
from co2.randomness import random_states, restore_random_states
from co2.record.fingerprint import combined
from co2.record.metrics import Change, Evaluation, Line
from co2.train.checkpoint import Checkpoints
from co2.train.layout import Layout
from co2.train.meters import LossWatch, Meter, Utilization
from co2.train.moving_average import MovingAverage
from co2.train.run import Run
from co2.train.samples import Samples
from co2.train.saving import SaveTimes
from co2.train.state_file import LAYOUT, METHOD, REPLICA, Equal, HostCopy, rebuilt, split
from co2.train.weight_files import EMA_MODEL, MODEL, write
from co2.train.within_replica import Replica, ReplicaState, own_buffers, whole_weights

T = TypeVar("T")


@dataclass(eq=False)
class Session:
    """Model, optimizer and method of a run, and what measures and saves them. `build` makes it."""

    run: Run
    module: nn.Module
    """The task's own model, whose parameters are trained."""
    model: nn.Module
    """What the forward pass goes through: the module, or it inside PyTorch's own wrapper."""
    optimizer: Optimizer
    replica: Replica
    begun_with: str
    """Digest of the weights that the task began with."""

    def __post_init__(self) -> None:
        run, config, mesh = self.run, self.run.config, self.run.mesh
        self.step = self.began_at = 0
        self.shared = ReplicaState(self.module, self.optimizer, self.replica)
        self.layout = Layout.of(self.module, run.method.optimizer, self.replica.experts)
        self.average = MovingAverage(self.module, config.train.ema_decay)
        self.checkpoints = Checkpoints(
            run.folder / "checkpoints",
            mesh,
            run.control,
            config.checkpoint.keep,
            lambda line: run.console.print_line(line),  # another's, where this worker takes over
        )
        self.saves = SaveTimes(
            config.checkpoint,
            config.train.steps,
            lambda own: self.together(lambda: gathered(own, run.control)),
        )
        self.losses = LossWatch(run, self.checkpoints)
        self.replicas = mesh.elastic if isinstance(mesh.elastic, Replicas) else None
        """What renews those that train, where they come and go; None where they do not."""
        self.changes: list[Line] = []
        """How replicas came and went."""
        self.samples = Samples(run)
        self.quorum = Quorum(
            config.launch.quorum,
            run.method.round_steps,
            None if self.replicas is None else self.replicas.members,
            mesh.device,
            weighted=QUORUM not in run.method.refusals(),
        )
        self.meter = Meter(run.method.stats)
        self._kept: Kept = {
            "step": (self, "step"),
            "draws": (self.samples, "draws"),
            "behind": (self.samples, "behind"),
            "stretches": (self.samples, "stretches"),
            "steps_in_round": (self, "quorum"),
            "changes": (self, "changes"),
            "totals": (self, "meter"),
            "average": (self, "average"),
        }
        """What a checkpoint holds beside weights, inner state and the method's."""

    def close(self) -> None:
        """End the threads that write checkpoints, that load batches, and what gives newcomers their
        state."""
        self.samples.close()
        self.checkpoints.close()
        if self.replicas is not None:
            self.replicas.close()

    def autocast(self) -> torch.autocast:
        """Around the forward pass and the loss."""
        bf16 = self.run.config.train.precision is Precision.bf16
        return torch.autocast(self.run.mesh.device.type, torch.bfloat16, enabled=bf16)

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
        from co2.train.estimate import flops  # only GPUs need it

        try:
            counted = flops(run.task, run.config)
        except ConfigError:
            return None
        units = run.config.train.batch_size * run.task.units_per_sample
        return Utilization(counted / units, gpu.peak_flops)

    def catch_up(self) -> None:
        """Wait until a GPU has done the work of all steps, without collectives in the background:
        the clock is about to stand still."""
        if self.run.mesh.device.type == "cuda":
            torch.cuda.current_stream(self.run.mesh.device).synchronize()

    def synchronize(self) -> None:
        """The inner step, and the synchronization due now."""
        self.quorum.report_pace(self.step)
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

    def changed(self, lost: Mapping[int, str], before: int, began: float) -> None:
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
        self.changes.append(change.line())
        run.record.log(change)
        text = f"{change.text()}{self.samples.compared(before)}"
        run.console.print_line(f"step {self.step}: {text} ({seconds:.2f} s)")
        if members.joined:
            self.saves.begin(self.step)  # as they do
        if members.joined and run.mesh.replica == 0:
            assert run.control is not None, "there are two at least"
            copy, own = HostCopy(), split(self.state(whole=True), run.mesh.rank_in_replica)
            given = own.values, copy.take(own.tensors)
            copy.hold()
            replicas.give(given, copy.wait, run.control)

    def tell_fingerprint(self) -> None:
        """Record what the run trains on and with, if it was begun here. Collective."""
        run, first = self.run, self.losses.first
        own = ("", 0.0) if first is None else (combined(self.samples.digests), float(first))

        with self.meter.paused():
            found = self.together(lambda: gathered(own, run.control))
            digests = [data for data, _ in found]
            if all(digests):
                run.record.tell_fingerprint(
                    {
                        "data": combined(digests),
                        "weights": self.begun_with,
                        "task": run.task.version,
                        "method": run.method.version,
                        "loss": math.fsum(loss for _, loss in found) / len(found),
                    }
                )

    def save(self) -> None:
        """Begin a checkpoint, which is written while training goes on. No worker waits for
        another."""
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

    def state(self, arriving: bool = False, whole: bool = False) -> dict[str, Any]:
        """Everything of this worker that a checkpoint holds.

        Args:
            arriving: do not wait for what is in flight (`Method.state_dict`).
            whole: with what other workers save.
        """
        found = {
            REPLICA: self.shared.state(whole),
            "model": own_buffers(self.module),
            "workers": self.run.mesh.num_workers,
            "replicas": self.run.mesh.num_replicas,
            LAYOUT: self.layout.values(),
            METHOD: self.run.method.state_dict(arriving),
            "random": random_states(),
            **values(self._kept),
        }
        return found if whole else self._marked(found)

    def _marked(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state in which what is equal on all replicas is marked."""
        method, shared, held = self.run.method, state[REPLICA], state[METHOD]
        equal = method.replicated_tensors()
        held["tensors"] = {
            name: Equal(tensor) if name in equal else tensor
            for name, tensor in held["tensors"].items()
        }
        for mean, one in zip(method.means, held["means"], strict=True):
            if mean.in_flight and mean.is_equal:
                one["buffer"] = Equal(one["buffer"])
        if method.equal_weights:
            shared["model"] = tree_map_only(Tensor, Equal, shared["model"])
            weights = self.average.of_weights
            state["average"] = [
                Equal(one) if number < weights else one
                for number, one in enumerate(state["average"])
            ]
        if method.averages_gradients:
            shared["optimizer"] = tree_map_only(Tensor, Equal, shared["optimizer"])
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned, with the random generators as they are."""
        put_values(self._kept, state)
        self.shared.load(state[REPLICA])
        self.module.load_state_dict(state["model"], strict=False)
        self.run.method.load_state_dict(state[METHOD])

    def load_given(self, given: Any) -> None:
        """Go on from what another replica gave in `changed`. Any: plain values, and tensors."""
        plain, tensors = given
        self.load(rebuilt(plain, tensors.__getitem__))

    def resume(self) -> None:
        """Go on from the newest sound checkpoint, if there is one. Another number of workers may
        have written it. Collective."""
        found = self.checkpoints.load(self.layout)
        if found is None:
            return
        _, state = found
        self._rehearse()
        text, saved_by, replicas = "", state["workers"], state["replicas"]
        mesh = self.run.mesh
        others = mesh.num_replicas != replicas
        regrouped = mesh.num_workers != saved_by or others
        if regrouped:
            state[METHOD].pop("owner", None)  # it may be another's
        self.load(state)
        if mesh.worker < saved_by and mesh.replica_size * replicas == saved_by:
            restore_random_states(state["random"])  # else they are another worker's
        if others:
            told = self._others(replicas)
            self.run.record.tell_replicas(told)
            text = f", with {told}"
        if regrouped:
            self.samples.regroup(saved_by)
            text += self.samples.compared(saved_by)
        steps = self.run.config.train.steps
        self.run.console.print_line(f"resumed at step {self.step} of {steps}{text}")

    def _others(self, before: int) -> str:
        """What becomes of the replicas where another number of them has saved, in words."""
        now = self.run.mesh.num_replicas
        text = f"{now} replicas in place of {before}"
        if self.run.method.equal_weights:
            return text
        return f"{text}: {'the new ones' if now > before else 'all'} begin from their mean"

    def _rehearse(self) -> None:
        """With DDP over three workers or more make a forward and a backward pass that count for
        nothing: whatever they move is loaded afterwards.

        From its second pass on DDP lays out gradients in the order in which they came in the first,
        and the place of a gradient decides in which order three workers or more add theirs, and
        with it how the sum is rounded.
        """
        model, run = self.model, self.run
        if isinstance(model, DistributedDataParallel) and model.process_group.size() > 2:
            batch = self.samples.copies.begin(next(run.task.batches(run.mesh, 0)))()
            with self.autocast():
                loss = run.task.loss(model, batch)
            loss.backward()
            self.optimizer.zero_grad(set_to_none=True)

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
        run = self.run
        scores: dict[str, float] = {}
        shown: list[tuple[str, str, AbstractContextManager[None]]]
        shown = [("", MODEL, run.method.consensus())]
        if self.average.tensors:
            shown.append(("ema_", EMA_MODEL, self.average.shown(run.method)))
        for prefix, file_name, inside in shown:
            with inside, torch.no_grad():
                with self.autocast():
                    found = run.task.evaluate(self.module)
                self.losses.check_validation(self.step, found)
                scores |= {f"{prefix}{name}": value for name, value in found.items()}
                last = self.step == run.config.train.steps
                if run.mesh.replica == 0 and last and run.config.checkpoint.model:
                    weights = whole_weights(self.module, self.replica.experts)
                    if run.is_first:
                        with durable(run.folder / file_name) as file:
                            write(file, weights)
        return scores
