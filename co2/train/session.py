"""Session: what is trained, and how it is saved, resumed, evaluated and summed up."""

import contextlib
import os
import random
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from co2.comm.background import without_joining
from co2.comm.clocks import ExchangeTotals, overlap
from co2.comm.members import Expelled, MemberLost, Members
from co2.comm.mesh import Mesh
from co2.comm.sockets import until_cut
from co2.config import Precision
from co2.errors import PREEMPTED, ConfigError
from co2.record.files import durable
from co2.record.metrics import Change, Evaluation, Summary
from co2.task import Exchanging, Reading, ReadTotals
from co2.train import initial
from co2.train.checkpoint import Checkpoints, random_states, restore_random_states
from co2.train.handover import Handover, receive
from co2.train.meters import Meter, ledger, peak_memory_bytes
from co2.train.quorum import Quorum
from co2.train.replica import Replica, checkpoint_activations, own_buffers, whole_weights
from co2.train.run import Run
from co2.train.schedule import largest_lr
from co2.train.weights import MODEL, write

T = TypeVar("T")
_WAIT_S = 1.0
"""Between two looks whether somebody has come."""
_FAILURES = 5


class Session:
    """Model, optimizer and method of a run, from its start or its last checkpoint on.

    `module` is the task's own model, whose parameters are trained; `model` is what the forward pass
    goes through: the module, or the module inside PyTorch's own wrapper.
    """

    def __init__(self, run: Run) -> None:
        config, mesh = run.config, run.mesh
        self.run, self.step = run, 0
        self.module: nn.Module = run.task.model().to(mesh.device)
        self._from_checkpoint = initial.begun(run.folder)
        if config.init_from is not None and not self._from_checkpoint:
            initial.load(config.init_from, self.module, run.task)
        if config.train.checkpoint_activations:
            checkpoint_activations(self.module)
        if config.train.compile:
            self.module.compile()
        self.replica = replica = Replica(config.mesh, mesh, run.method.averages_gradients)
        replica.shard(self.module)
        self.optimizer = replica.optimizer(run.task.optimizer(self.module))
        fresh = not mesh.newcomer
        prepared = run.method.prepare(self.module, self.optimizer, mesh, self.largest_lr, fresh)
        self.model = replica.wrap(prepared, config.comm)
        self.shared = replica.state(self.module, self.optimizer)
        self.checkpoints = Checkpoints(
            run.folder / "checkpoints",
            mesh,
            run.control,
            config.checkpoint.keep,
            lambda line: run.console.print_line(line),  # another's, where this worker takes over
            self.shared,
            config.launch.elastic,
        )
        self.draws = 0
        """Micro-batches that a worker which makes every step has drawn so far."""
        self.behind = 0
        """How many of them this worker has not drawn yet, because it has passed over steps."""
        self.changes: list[Change] = []
        """How replicas came and went."""
        self._failures = 0
        """Errors of what all do together, one after the other."""
        members = mesh.members
        if members is not None:
            members.formed()
        rounds = run.method.round_steps
        weighted = run.method.refused_quorum is None
        self.quorum = Quorum(config.launch.quorum, rounds, members, mesh.device, weighted)
        self.handover = Handover()
        totals = self._join() if mesh.newcomer else self._resume()
        self._began_at = self.step
        self._batches = run.task.batches(run.mesh, self.draws - self.behind)
        self.meter = Meter(run.method.stats, totals)

    def close(self) -> None:
        """End the threads that write checkpoints, that load batches, and what gives newcomers their
        state."""
        _close(self._batches)
        self.checkpoints.close()
        self.handover.close()

    def largest_lr(self, step: int) -> float:
        """The largest inner learning rate in the step with this index: the method's schedule."""
        config = self.run.config
        return largest_lr(self.optimizer, config.optim, step, config.train.steps)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Around the forward pass and the loss."""
        if self.run.config.train.precision is Precision.fp32:
            return contextlib.nullcontext()
        return torch.autocast(self.run.mesh.device.type, dtype=torch.bfloat16)

    @property
    def accumulate(self) -> int:
        """Micro-batches of a step, as the workers now are."""
        return self._accumulate(self.run.mesh.num_workers)

    def _accumulate(self, num_workers: int) -> int:
        train, stretches = self.run.config.train, self.run.mesh.stretches
        if not train.keep_global_batch or not stretches:
            return train.accumulate
        _, first = stretches[0]
        return rebalanced(train.accumulate, first, num_workers)

    def _batches_of(self, before: int) -> str:
        """The global batch now, and with the number of workers that there was before, in words."""
        size, workers = self.run.config.train.batch_size, (self.run.mesh.num_workers, before)
        now, then = (size * self._accumulate(number) * number for number in workers)
        return f", on {now} samples a step, before {then}"

    @property
    def units(self) -> int:
        """Tokens or samples of the step under way, of all workers that make it."""
        making = self.quorum.making(self.step, self.run.mesh.num_workers)
        samples = self.run.config.train.batch_size * self.accumulate * making
        return samples * self.run.task.units_per_sample

    def next_batch(self) -> Any:
        """The next micro-batch, where the model is."""
        self.draws += 1
        return self.to_device(next(self._batches))

    def pass_over(self) -> None:
        """Make no step of this replica's own. Its samples wait for its next one."""
        self.draws += self.accumulate
        self.behind += self.accumulate
        self.meter.totals.passed_over += 1

    def synchronize(self) -> None:
        """The inner step, and the synchronization due now; with the replicas that are left, if some
        are lost in it."""
        method = self.run.method
        self.quorum.tell(self.step)
        try:
            method.step()
        except MemberLost:
            self._renew()
            self._again(method.go_on)
        shares = self.quorum.share_out(self.step)
        if shares is not None:
            self.run.record.log(shares)
            if text := shares.text():
                self.run.console.print_line(f"step {shares.step}: {text}")

    def together(self, act: Callable[[], T]) -> T:
        """Do what all workers do together and may do twice; where replicas may be lost, until all
        that are left have done it."""
        members = self.run.mesh.members
        if members is None:
            return act()

        def agreed() -> T:
            try:
                done = act()
            except MemberLost:
                raise
            except RuntimeError as error:
                self._fruitless(error)
                members.failed(members.open(), error)
            members.agree()
            self._failures = 0
            return done

        return self._again(agreed)

    def _again(self, act: Callable[[], T]) -> T:
        while True:
            try:
                return act()
            except MemberLost:
                self._renew()

    def change_members(self) -> None:
        """At the end of a step: let those in who wait. With too few replicas save, and wait.

        Raises:
            SystemExit: `PREEMPTED`, where nobody has come in time.
        """
        members, launch = self.run.mesh.members, self.run.config.launch
        if members is None:
            return
        if members.change_due:
            self._renew(admit=True)
        if len(members.ids) >= launch.min_replicas:
            return
        self.save_now()
        text = f"fewer than launch.min_replicas={launch.min_replicas}; saved, and waiting"
        self.run.console.print_line(f"step {self.step}: {len(members.ids)} replicas, {text}")
        began = time.monotonic()
        while len(members.ids) < launch.min_replicas:
            if time.monotonic() - began > launch.wait_s:
                members.ask_to_stop()
            time.sleep(_WAIT_S)
            self.together(lambda: None)
            if members.stop_due:
                raise SystemExit(PREEMPTED)
            if members.change_due:
                self._renew(admit=True)

    def _renew(self, admit: bool = False) -> None:
        """Go on with the members that are left, and with newcomers if `admit`."""
        run, began, before = self.run, time.perf_counter(), self.run.mesh.num_workers
        members = run.mesh.members
        assert members is not None
        if admit:
            self.handover.close()
        lost: dict[int, str] = {}
        while True:
            members.renew(admit)
            lost |= members.lost
            try:
                self._regroup(members)
                break
            except MemberLost:
                continue
            except RuntimeError as error:
                members.give_up(members.store, members.generation)
                self._fruitless(error)
        seconds = time.perf_counter() - began
        self.changes.append(
            Change(self.step, members.generation, members.ids, lost, members.joined, seconds)
        )
        run.record.log(self.changes[-1])
        text = f"{self.changes[-1].text()}{self._batches_of(before)}"
        run.console.print_line(f"step {self.step}: {text} ({seconds:.2f} s)")

    def _fruitless(self, error: RuntimeError) -> None:
        """Raise an error that comes back again and again: it is no loss of a connection."""
        self._failures += 1
        if self._failures >= _FAILURES:
            raise error

    def _regroup(self, members: Members) -> None:
        """Make all groups anew, begin to tell newcomers everything, and send again what was in
        flight."""
        run = self.run
        before = run.mesh.stretches or ((0, run.mesh.num_workers),)
        mesh = Mesh.world(1, run.mesh.device)
        kept = tuple(one for one in before if one[0] < self.draws)
        stretches = (*kept, (self.draws, mesh.num_workers))
        run.regroup(replace(mesh, members=members, stretches=stretches), self.step)
        run.method.regroup(run.mesh)
        members.formed()
        members.agree()  # nobody leaves while another one still connects
        self.checkpoints.regroup(run.mesh, run.control)
        self.quorum.regroup()
        self.behind = 0
        _close(self._batches)
        self._batches = run.task.batches(run.mesh, self.draws)
        if members.joined and run.is_first:
            assert run.control is not None, "there are two at least"
            ranks = [members.ids.index(one) for one in members.joined]
            self.handover.give(self._state(), ranks, run.control)
        run.method.launch_again()

    def _join(self) -> dict[str, Any]:
        """Get everything from the first of those who train already; returns the meter's totals."""
        run = self.run
        assert run.mesh.members is not None
        try:
            run.mesh.members.agree()
            self.checkpoints.finish()  # the others wait for what they are saving
            state = receive(run.control)
            self._load(state)
            run.method.launch_again()
        except (
            RuntimeError
        ) as error:  # the others go on without this process, which knows too little
            raise Expelled("one of the others was lost as it joined") from error
        return state["totals"]

    def to_device(self, batch: Any) -> Any:
        """A batch where the model is. `Any`: a tensor, or a tuple or a dict of tensors."""
        device = self.run.mesh.device
        if device.type == "cpu":  # it is there; to look at every tensor takes longer than to draw
            return batch
        return tree_map_only(Tensor, lambda t: t.to(device, non_blocking=True), batch)

    def save(self) -> None:
        """Begin a checkpoint, which is written while training goes on. Every worker calls it; none
        waits for another."""
        with self.meter.saving(), without_joining():
            self.checkpoints.start(self.step, self._state())

    def save_now(self) -> bool:
        """Have a checkpoint of this step, and wait for it. Collective. False, with a line for a
        person, where that failed."""

        def act() -> bool:
            begun = self.checkpoints.finish() == self.step
            return begun or self.checkpoints.save(self.step, self._state())

        with self.meter.saving():
            return self.together(act)

    def finish_saving(self) -> None:
        """Wait for the checkpoint that was begun last. Collective."""
        with self.meter.saving():
            self.together(self.checkpoints.finish)

    def _state(self) -> dict[str, Any]:
        """Everything of this worker that a checkpoint holds."""
        state: dict[str, Any] = {
            "step": self.step,
            "workers": self.run.mesh.num_workers,
            "draws": self.draws,
            "behind": self.behind,
            "steps_in_round": self.quorum.state(),
            "stretches": list(map(list, self.run.mesh.stretches)),
            "changes": [change.line() for change in self.changes],
            "method": self.run.method.state_dict(),
            "totals": self.meter.state_dict(),
            "random": random_states(),
        }
        if self.shared is None:
            state["model"] = self.module.state_dict()
            state["optimizer"] = self.optimizer.state_dict()
        else:
            state["buffers"] = own_buffers(self.module)
        return state

    def _load(self, state: dict[str, Any]) -> None:
        """Go on from what `_state` returned, with the random generators as they are."""
        self.step, self.draws, self.behind = state["step"], state["draws"], state["behind"]
        self.quorum.load(state["steps_in_round"])
        self.changes = [Change.of(line) for line in state["changes"]]
        stretches = tuple((draw, workers) for draw, workers in state["stretches"])
        self.run.mesh = replace(self.run.mesh, stretches=stretches)
        if self.shared is None:
            self.module.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        else:
            self.module.load_state_dict(state["buffers"], strict=False)
        self.run.method.load_state_dict(state["method"])

    def evaluate(self) -> dict[str, float]:
        """The task's metrics of the consensus; at the run's end its weights are saved too.
        Collective."""
        run, steps = self.run, self.run.config.train.steps
        with self.meter.paused():
            scores = self.together(self._scores)
        run.record.log(Evaluation(self.step, scores, self.meter.totals.train_s))
        text = "  ".join(f"{name} {value:.4f}" for name, value in scores.items())
        run.console.print_line(f"step {self.step}/{steps}  validation {text}")
        return scores

    def _scores(self) -> dict[str, float]:
        run = self.run
        with run.method.consensus(), torch.no_grad():
            with self.autocast():
                scores = run.task.evaluate(self.module)
            if run.mesh.replica == 0 and self.step == run.config.train.steps:
                weights = whole_weights(self.module, self.replica.parts)
                if run.is_first:
                    with durable(run.folder / MODEL) as file:
                        write(file, weights)
        return scores

    def summary(self, scores: dict[str, float]) -> Summary:
        """The final figures. Collective: communication and bytes are means over the workers,
        training time and with it throughput are those of the slowest."""
        return self.together(lambda: self._summary(scores))

    def _summary(self, scores: dict[str, float]) -> Summary:
        run, totals, stats = self.run, self.meter.state_dict(), self.run.method.stats()
        config, steps = run.config, max(totals["steps"], 1)
        task = run.task
        inside = task.traffic(self.module) if isinstance(task, Exchanging) else ExchangeTotals()
        read = task.read() if isinstance(task, Reading) else ReadTotals()
        figures = [
            *(stats.comm_s, stats.exposed_s, stats.bytes_sent),
            *(inside.comm.comm_s, inside.comm.exposed_s, inside.comm.bytes_sent, inside.behind_s),
            *(read.needed_bytes, read.read_bytes, read.planning_s, read.plan_bytes),
        ]
        means = torch.tensor(figures, dtype=torch.float64)
        longest = [totals["train_s"], -self.meter.throughput(), totals["saving_s"]]
        slowest = torch.tensor(longest, dtype=torch.float64)
        if run.control is not None:
            until_cut(lambda: dist.all_reduce(means, op=dist.ReduceOp.AVG, group=run.control))
            until_cut(lambda: dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=run.control))
        comm_s, exposed_s, bytes_sent, *others = means.tolist()
        train_s, throughput, saving_s = slowest[0].item(), -slowest[1].item(), slowest[2].item()
        return Summary(
            title=f"{config.task} · {config.method} · {config.tag} · seed {config.train.seed}",
            task=config.task,
            method=config.method,
            tag=config.tag,
            scale=config.scale,
            seed=config.train.seed,
            final={**scores},
            baselines={**run.task.baselines()},
            steps=totals["steps"],
            workers=run.mesh.num_workers,
            replica_size=run.mesh.replica_size,
            unit=run.task.unit,
            throughput=throughput,
            comm_s=comm_s,
            exposed_s=exposed_s,
            exposed_share=exposed_s / max(train_s, 1e-9),
            data_share=totals["data_s"] / max(train_s, 1e-9),
            overlap=overlap(comm_s, exposed_s),
            bytes_per_step=bytes_sent / steps,
            train_s=train_s,
            wall_s=totals["wall_s"],
            peak_memory_bytes=peak_memory_bytes(run.mesh.device),
            extra_model_copies=run.method.extra_copies,
            memory=ledger(self.module, self.optimizer, run.method),
            device=str(run.mesh.device),
            folder=os.path.relpath(run.folder),
            saving_s=saving_s,
            members=[change.line() for change in self.changes],
            steps_made=self._steps_made(totals["steps"] - totals["passed_over"]),
            exchange=self._exchange(*others[:4]),
            reading=_reading(*others[4:]),
            own={**stats.own},
        )

    def _exchange(
        self, comm_s: float, exposed_s: float, bytes_sent: float, behind_s: float
    ) -> dict[str, float | None]:
        if not bytes_sent:
            return {}
        return {
            "comm_s": comm_s,
            "exposed_s": exposed_s,
            "behind_s": behind_s,
            "overlap": overlap(comm_s, exposed_s),
            "bytes_per_step": bytes_sent / max(self.step - self._began_at, 1),
        }

    def _steps_made(self, own: int) -> list[int]:
        """How many steps each replica has made; empty without launch.quorum. Collective."""
        if self.run.config.launch.quorum is None:
            return []
        made = [torch.tensor(own) for _ in range(self.run.mesh.num_workers)]
        control = self.run.control
        if control is not None:
            until_cut(lambda: dist.all_gather(made, torch.tensor(own), group=control))
        return [int(one) for one in made]

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
        self._load(state)
        mesh, text = self.run.mesh, ""
        saved_by = state["workers"]
        if mesh.worker < saved_by:
            restore_random_states(state["random"])
        if mesh.num_workers != saved_by:
            before = mesh.stretches or ((0, saved_by),)
            self.run.mesh = replace(mesh, stretches=(*before, (self.draws, mesh.num_workers)))
            self.behind = 0
            text = self._batches_of(saved_by)
        steps = self.run.config.train.steps
        self.run.console.print_line(f"resumed at step {self.step} of {steps}{text}")
        return state["totals"]

    def _rehearse(self) -> None:
        """A forward and a backward pass that count for nothing: whatever they move is loaded
        afterwards."""
        batch = self.to_device(next(self.run.task.batches(self.run.mesh, 0)))
        with self.autocast():
            loss = self.run.task.loss(self.model, batch)
        loss.backward()
        self.optimizer.zero_grad(set_to_none=True)


def _close(batches: Iterator[Any]) -> None:
    """End what makes batches ahead. A task may return an iterator that has nothing to end."""
    if isinstance(batches, Generator):
        batches.close()


def _reading(
    needed_bytes: float, read_bytes: float, planning_s: float, plan_bytes: float
) -> dict[str, float | None]:
    if not needed_bytes:
        return {}
    return {
        "needed_bytes": needed_bytes,
        "read_bytes": read_bytes,
        "amplification": read_bytes / needed_bytes,
        "planning_s": planning_s,
        "plan_bytes": plan_bytes,
    }


def rebalanced(accumulate: int, first: int, now: int) -> int:
    """Micro-batches of a step with which as many samples as before make a step, as nearly as whole
    micro-batches allow.

    Args:
        accumulate: micro-batches with which a run began.
        first: workers with which it began.
        now: workers that it has now.
    """
    return max(1, round(accumulate * first / now))


def seed_everything(seed: int, worker: int) -> None:
    """Dropout and the like differ between the workers, and repeat from run to run."""
    own = seed * 1_000_003 + worker
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)


def _remembers_order(model: nn.Module) -> bool:
    """Whether gradients are added up in an order that the first backward pass decides.

    From its second pass on DDP lays out gradients in the order in which they came in the first, and
    the place of a gradient decides in which order three workers or more add theirs, and with it how
    the sum is rounded.
    """
    if not isinstance(model, DistributedDataParallel):
        return False
    return dist.get_world_size(model.process_group) > 2
