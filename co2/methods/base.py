"""Method: the base class of every way of keeping the replicas in step."""

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.profiler import record_function
from torch.utils._pytree import tree_map_only

from co2.catalogue import CATALOGUE
from co2.comm.background_mean import BackgroundMean, new_mean
from co2.comm.clocks import CommTotals
from co2.comm.collectives import (
    check_alike,
    check_equal,
    check_plain,
    consensus,
    local,
    meet,
    replicate,
)
from co2.comm.deadlocks import DeadlockWatch
from co2.comm.flat import FlatParams
from co2.comm.mesh import Mesh
from co2.comm.phases import OUTER_STEP
from co2.config import Blocking, CommConfig
from co2.errors import ConfigError, WrongCall, nearest, require
from co2.methods.shared import worker_files
from co2.methods.shared.guard import Guard, check_optimizer, trained, trained_names
from co2.methods.shared.state import Stateful

Schedule = Callable[[int], float]
"""The index of a step, from 0 → the largest learning rate of the inner optimizer in that step."""
_PLAIN = (bool, int, float, str, tuple)
ELASTIC, QUORUM = "launch.elastic=true", "launch.quorum"
OTHERS = "another launch.workers"
BF16, HOST = "comm.dtype=bf16", "comm.device=cpu"
"""Keys of `Method.refusals`: elastic runs, unequal numbers of steps, going on with another number
of workers, rounding on the wire, and copies of the model in the host's memory."""


@dataclass(frozen=True)
class MethodStats(CommTotals):
    """What a method has done on this worker since the start of training."""

    own: dict[str, float] = field(default_factory=dict)
    """Figures that only this method has, by name: the τ that it chose, its staleness gap, …"""


class Method(Stateful):
    """One way of keeping the replicas in step.

    A subclass sets `Config`, a `Limited` dataclass whose fields are documented, and `blocking`,
    unless it is in the catalogue; it implements `set_up` and `update`, and names its tensors by
    `hold`. The order of calls, on every replica, is prepare, then load_state_dict or resume if a
    run goes on, then step as often as needed, then finish.

    Args:
        config: an instance of `Config`; None for its defaults.
        comm: how collectives travel; None for the defaults.
        settings: fields of `Config`, in place of `config`.
    Raises:
        ConfigError: a setting is wrong, or the two do not go together.
    """

    Config: ClassVar[type]
    blocking: ClassVar[Blocking]
    """What the computation of a replica waits for: of a registered method the catalogue's."""
    version: ClassVar[int] = 1
    """Of its code. Its author raises it when results change, so that no table mixes the two
    (tests/recipes/test_golden.py)."""
    averages_gradients: ClassVar[bool] = False
    """Whether all replicas step with the same gradients, averaged by PyTorch's own wrappers. Those
    then work across the replicas too (co2/train/within_replica.py)."""
    equal_weights: ClassVar[bool] = False
    """Whether all replicas hold the same weights after every step, which each consensus checks."""
    reads_gradients: ClassVar[bool] = False
    """Whether it works with the gradients themselves, which must then be dense and unscaled. All
    others step by `inner_step`, and take any that their optimizer takes."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Settings without which it trains no task, as `key=value`. `method=NAME` sets them too."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        entry = CATALOGUE.get(cls.registered_name())
        if entry is not None and entry.class_name == cls.__name__:
            cls.blocking = entry.blocking

    def __init__(self, config: Any = None, comm: CommConfig | None = None, **settings: Any) -> None:
        super().__init__()
        self.config = self._configured(config, settings)
        self.comm = comm or CommConfig()
        good = isinstance(self.comm, CommConfig)
        require(good, "comm", self.comm, "must be a co2.CommConfig, or None for its defaults")
        self.schedule: Schedule | None = None
        self.total_steps: int | None = None
        self._notices: list[str] = []
        self._scaler: GradScaler | None = None
        for key, value in (("dtype", self.comm.dtype), ("device", self.comm.device)):
            self.refuse(f"comm.{key}", value.value)

    def _configured(self, config: Any, settings: dict[str, Any]) -> Any:
        kind, name = self.Config, type(self).__name__
        known = [own.name for own in fields(kind)]
        for key in settings:
            require(
                key in known, key, settings[key], f"{name} has no such key; {nearest(key, known)}"
            )
        example = f"{known[0]}={kind().__dict__[known[0]]!r}" if known else ""
        hint = (
            f"must be a {name}.Config; give {name}({example}), or {name}({name}.Config({example}))"
        )
        good = config is None or (isinstance(config, kind) and not settings)
        require(good, "config", config, hint)
        return kind(**settings) if config is None else config

    def refusals(self) -> dict[str, str]:
        """What this method, as it is configured, cannot be combined with: values of
        `mesh.strategy`, `optim.name`, `comm.dtype`, `comm.device` and `launch.elastic` as
        `key=value`, or `QUORUM`, each with the reason and what to use. A method with rounds
        overrides this and need not extend it."""
        return {
            ELASTIC: "has no rounds at whose end replicas could come and go; use false",
            QUORUM: "does not support weighted averaging; use null",
        }

    def refuse(self, key: str, value: object) -> None:
        """Raise `ConfigError` if this method cannot be combined with this setting."""
        refusals = self.refusals()
        if "mesh.strategy=zero2" in refusals:  # under ep, too, a worker has parts of tensors
            refusals.setdefault("mesh.strategy=ep", refusals["mesh.strategy=zero2"])
        reason = refusals.get(f"{key}={value}", refusals.get(key))
        hint = f"method={self.registered_name()}: {reason}"
        require(reason is None, key, value, hint)

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        mesh: Mesh,
        schedule: Schedule | None = None,
        fresh: bool = True,
        total_steps: int | None = None,
    ) -> nn.Module:
        """Give every replica the weights of replica 0, and return the module to train. Collective.

        Args:
            model: its parameters may be sharded over the workers of a replica (fully_shard); a
                method works on local shards, and exchanges them with its counterparts.
            optimizer: the inner optimizer of the model's parameters.
            mesh: the workers.
            schedule: step index → largest inner learning rate, for methods that prepare an outer
                step while its round is still being trained (CO2 with `shard`). None: they take the
                rate of the round before, which is exact for constant rates.
            fresh: False for a replica that comes to others which train already: nobody's weights
                are sent. It gets everything by `load_state_dict`.
            total_steps: of the whole training, of which some methods treat a first share in another
                way (`blocking_share`). None: nobody knows, and there is no first share.
        Raises:
            ConfigError: the method cannot train this model with this optimizer on this mesh, or
                the model is wrapped in DistributedDataParallel or its like, or the optimizer's step
                needs a closure, as that of LBFGS does.
        """
        if self._guard is not None:
            raise WrongCall("prepare came a second time: make a new method for another model")
        kind = type(optimizer).__name__
        good, hint = isinstance(model, nn.Module), "must be the model, an nn.Module"
        require(good, "model", type(model).__name__, f"{hint}; the order is model, optimizer, mesh")
        hint = "must be one torch.optim.Optimizer; the order is model, optimizer, mesh"
        require(isinstance(optimizer, Optimizer), "optimizer", kind, hint)
        good, hint = isinstance(mesh, Mesh), "must be a mesh, such as co2.Mesh.world()"
        require(good, "mesh", type(mesh).__name__, hint)
        check_plain(model)
        lazy = any(isinstance(one, UninitializedParameter) for one in model.parameters())
        require(not lazy, "model", type(model).__name__, "is lazy; pass one batch through it first")
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        needed = closure is not None and closure.default is inspect.Parameter.empty
        hint = "its step needs a closure, which a method does not have; use another, such as AdamW"
        require(not needed, "optimizer", kind, hint)
        self.model, self.optimizer, self.schedule = model, optimizer, schedule
        self._settled = replace(self.config)  # which checks it once more: somebody may have set it
        check_optimizer(model, optimizer)
        self.total_steps = total_steps
        self._regroup(mesh)
        self.replica_group = mesh.new_group_within_replica()
        self.watch = DeadlockWatch(mesh, self.group)
        mesh.on_change(self._regroup)
        if fresh:
            check_alike(self._description(), self.group)
            replicate(model, self.group)
        prepared = self.set_up()
        alone = mesh.num_replicas == 1 or self.equal_weights
        self._guard = Guard(model, optimizer, fresh, alone)
        return prepared

    def _description(self) -> dict[str, str]:
        """What all replicas must have alike, by name."""
        found = {"method": self.registered_name(), "total_steps": str(self.total_steps)}
        found["versions"] = f"torch {torch.__version__}"
        with suppress(PackageNotFoundError):  # a clone that is not installed
            found["versions"] += f", co2-suite {version('co2-suite')}"
        for node, config in ((found["method"], self.config), ("comm", self.comm)):
            found |= {f"{node}.{key}": str(value) for key, value in asdict(config).items()}
        found["optimizer"] = type(self.optimizer).__name__
        groups = self.optimizer.param_groups
        names = trained_names(self.model, self.optimizer)
        for index, (group, trains) in enumerate(zip(groups, names, strict=True)):
            plain = {key: value for key, value in group.items() if isinstance(value, _PLAIN)}
            found[f"optimizer.param_groups[{index}]"] = str(plain)
            found[f"trained parameters of group {index}"] = ", ".join(trains)
            state = self.optimizer.state
            steps = [float(state[one].get("step", 0)) for one in group["params"] if one in state]
            kept = f"state of {len(steps)} parameters, step {max(steps, default=0):g}"
            found[f"optimizer.state of group {index}"] = kept
        found["order of parameters"] = ", ".join(name for name, _ in self.model.named_parameters())
        return found | self.layout()

    def _regroup(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.group = mesh.new_group_across_replicas()

    def set_up(self) -> nn.Module:
        """Make what training needs, and return the module to train. `prepare` calls it last."""
        raise NotImplementedError

    def new_mean(
        self,
        flat: FlatParams,
        name: str = "buffer",
        copies: int = 1,
        beside: BackgroundMean | None = None,
    ) -> BackgroundMean:
        """Make one of `means`, whose buffer is as long as so many vectors, and is held by this
        name. `beside`: see `BackgroundMean`."""
        numel = copies * flat.numel
        mean = new_mean(numel, self.mesh, self.comm, flat.dtype, flat.device, beside)
        return self.send_by(mean, name)

    def send_by(self, mean: BackgroundMean, name: str = "buffer") -> BackgroundMean:
        """Make a mean one of `means`. These save their buffers, and only while they are in
        flight."""
        self.means.append(mean)
        mean.watched_by(self.watch)
        self.hold(name, mean.buffer, saved=False)
        return mean

    def step(self, scaler: GradScaler | None = None) -> None:
        """Do the inner optimizer's step and the synchronization due now. Gradients are ready. All
        replicas make the same number of steps.

        Args:
            scaler: does the inner step, as by `scaler.step(optimizer)`, and is updated by the loop
                afterwards. It skips the step where this replica's gradients are not finite. That
                counts as a local step in which the replica has not moved: rounds are of equal
                length on all, and to agree on a skip all would have to wait for each other at every
                step. Under `allreduce` gradients are the same, so all skip it.
        Raises:
            WrongCall: before `prepare`, after the end, inside `consensus`; or the loop has moved,
                converted or loaded weights, or written them before the first step. In a mean:
                another replica waits in a consensus.
            ConfigError: other parameters are trained than when `prepare` was called, or `config` is
                another. Or this method works with gradients, which are scaled or sparse.
        """
        guard = self._prepared("sync.step()")
        if self.config != self._settled:
            self._refuse_changes()
        with guard.stepping(), _exact(self.mesh.device.type):
            if scaler is not None:
                self._check_scaler(scaler)
            if self.reads_gradients:
                self._check_dense()
            self.steps += 1
            self._scaler = scaler
            try:
                self.watch.steps = self.steps
                self.update()
            except Exception:  # such as too little memory: the loop may make this step again
                self.steps -= 1
                self.watch.steps = self.steps
                raise

    def _refuse_changes(self) -> None:
        for key, then in asdict(self._settled).items():
            now = getattr(self.config, key)
            hint = f"was {then} when prepare was called; make a method with it, and prepare that"
            require(now == then, f"config.{key}", now, hint)

    def _check_scaler(self, scaler: GradScaler) -> None:
        good, hint = isinstance(scaler, GradScaler), "must be a torch.amp.GradScaler, or left out"
        require(good, "scaler", type(scaler).__name__, hint)
        hint = f"{self.registered_name()} works with gradients as they are; train in bf16 or fp32"
        good = not (self.reads_gradients and scaler.is_enabled())
        require(good, "scaler", "GradScaler", hint)

    def _check_dense(self) -> None:
        for name, param in self.model.named_parameters():
            sparse = param.grad is not None and param.grad.is_sparse
            hint = f"has a sparse gradient; {self.registered_name()} takes dense ones, sparse=False"
            require(not sparse, "parameter", name, hint)

    def update(self) -> None:
        """Do what the method's equations say for this step; `steps` counts it already."""
        raise NotImplementedError

    def inner_step(self) -> None:
        """Do one step of the inner optimizer. A method that changes it extends this."""
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)

    def lr(self, group: int) -> float:
        """γ_t: a parameter group's inner learning rate in this step. Raises `ConfigError` where the
        optimizer does not tell it."""
        rate = self.optimizer.param_groups[group].get("lr")
        if rate is None:
            kind = type(self.optimizer).__name__
            hint = f"the outer step needs the learning rate; give {kind} one"
            raise ConfigError("lr", rate, hint)
        return float(rate)

    def highest_lr(self) -> float:
        """γ_t, the highest where parameter groups differ."""
        return max(self.lr(group) for group in range(len(self.optimizer.param_groups)))

    def _trained(self) -> list[Tensor]:
        """The parameters that the inner optimizer trains."""
        return trained(self.optimizer)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the model holds the mean over the replicas of the weights as training left them,
        and that of the float buffers and frozen parameters that differ between replicas. All are
        restored bit for bit afterwards. Collective: every replica enters it, after the same number
        of steps. Tensors of a state dict taken inside are the model's own, so they change as it is
        left; `consensus_state_dict` copies them. Inside another consensus and after `finish` the
        model holds it already, and nothing happens.

        A collective in flight may be waited for, where it carries what was trained last, but it
        stays in flight, so evaluating more often does not change training.

        Raises:
            ReplicasDiffer: the numbers of steps, or one of the `replicated_tensors`, are not equal
                on all replicas.
            WrongCall: before `prepare`; weights were moved, or written by somebody else; another
                replica waits in a mean.
        """
        guard = self._prepared("sync.consensus()")
        if guard.shows or guard.finished:
            yield
            return
        guard.check_places()
        guard.check_parameters()
        guard.check_weights()
        guard.check_others(by_bits=True)
        guard.check_trained()
        meet(self.watch, "consensus", self.group, self.mesh.device, self.layout())
        equal = self.replicated_tensors()
        if self.equal_weights:
            equal |= {name: local(p.detach()) for name, p in self.model.named_parameters()}
        check_equal(equal, self.group, self.mesh.device)
        shown = consensus(self.model, self.group, self.replica_group, self.show_trained)
        with guard.showing(), shown:
            yield

    def consensus_state_dict(self) -> dict[str, Any]:
        """The model's `state_dict` in the consensus, copied. Collective. Raises what `consensus`
        does."""
        with self.consensus():
            copied: dict[str, Any] = tree_map_only(Tensor, Tensor.clone, self.model.state_dict())
            return copied

    def show_trained(self) -> None:
        """Set the live weights to the newest local ones. Override it if the live weights lag behind
        them. `consensus` calls it on all replicas, and puts the live weights back. Nothing else may
        change: `BackgroundMean.peek` waits for a result and leaves it pending."""

    def finish(self) -> None:
        """End the training: leave the consensus in the model, on every replica, and model and
        optimizer to the loop. Collective; a second time it does nothing. Raises what `consensus`
        does."""
        if self._prepared("sync.finish()").finished:
            return
        guard = self._as_trained("sync.finish()")
        tensors = [*self.model.parameters(), *self.model.buffers()]
        live = [local(tensor.detach()) for tensor in tensors]
        with self.consensus():
            final = [tensor.clone() for tensor in live]
        self.flush()
        for tensor, value in zip(live, final, strict=True):
            tensor.copy_(value)
        guard.finished = True

    # Any: what the loop gives.
    def save(self, folder: str | os.PathLike[str], extra: dict[str, Any] | None = None) -> None:
        """Write what this replica needs to go on exactly into a file of its own: weights, inner
        state, the method's, those of torch's generators. Older steps are deleted when all have
        theirs. Collective.

        Args:
            folder: the same for all workers; or one of each machine, as long as workers stay there.
            extra: what the loop needs besides, such as a scheduler's state dict: tensors, numbers,
                texts, lists and dicts. It may differ between replicas.
        Raises:
            WrongCall: inside `consensus`, whose weights are not those to go on from; before
                `prepare`; of parameters that fully_shard has sharded.
            OSError: the file cannot be written. Older ones stay.
        """
        self._as_trained("sync.save()")
        worker_files.save(self, Path(folder), extra or {})

    def resume(self, folder: str | os.PathLike[str]) -> dict[str, Any] | None:
        """Go on from the newest step that all workers have saved in a folder, bit for bit. Call it
        right after `prepare`, in every run: `steps` tells how many are made. Collective.

        Returns:
            `extra`, as it was saved; None where nothing was.
        Raises:
            ConfigError: the folder is of another number of workers, another model, optimizer or
                method, or of settings that its state depends on (`may_change` has the others); or a
                file is damaged.
            WrongCall: after a step.
        """
        self._as_trained("sync.resume()")
        if self.steps:
            raise WrongCall(
                f"sync.resume() came after {self.steps} steps: call it before the first"
            )
        return worker_files.resume(self, Path(folder))

    def tell_no_end(self) -> None:
        """Say nothing where the training ends without `finish`, because the loop tells that."""
        self._prepared("sync.tell_no_end()").tell_no_end()

    def flush(self) -> None:
        """Wait for what is in flight, at the end of training only: nothing can be sent after it.
        Replicas keep their own weights; `finish` leaves the consensus in them."""
        guard = self._as_trained("sync.flush()")
        for mean in self.means:
            mean.close()
        guard.end()

    def scratch_tensors(self) -> list[Tensor]:
        """Tensors whose content is not needed from one step to the next. Their size does not grow
        with the model."""
        return []

    def stats(self) -> MethodStats:
        """Totals of this worker, and the method's own figures."""
        return MethodStats(**vars(self.totals()), own=self.figures())

    def totals(self) -> CommTotals:
        """Totals of all that this worker has sent."""
        return sum((mean.totals() for mean in self.means), start=CommTotals())

    def figures(self) -> dict[str, float]:
        """Figures that only this method has. A subclass extends this."""
        return {}

    def notices(self) -> list[str]:
        """Lines for a person since the last call: what the method has decided, and why."""
        taken, self._notices = self._notices, []
        return taken

    def __getstate__(self) -> dict[str, Any]:
        """Of a method that has prepared nothing. Raises `TypeError`: a prepared one belongs to its
        process, model and optimizer."""
        if self._guard is not None:
            name = type(self).__name__
            raise TypeError(
                f"a {name} that has prepared a model cannot be copied or pickled: save its "
                f"state_dict(), and make a new one with {name}(sync.config, sync.comm)"
            )
        return self.__dict__

    @property
    def round_steps(self) -> int:
        """Inner steps of a round, τ; 1 for a method without rounds."""
        return 1

    def first_means(self) -> dict[str, int]:
        """What is averaged once in several steps → the step that takes in its first mean, such as
        {"weights": 2τ}. A shorter training takes in none. Call it after `prepare`."""
        return {}

    @property
    def extra_bytes(self) -> int:
        """Bytes of `state_tensors`. Figures, which have no dimension, are not counted."""
        return sum(tensor.nbytes for tensor in self.state_tensors().values() if tensor.dim() > 0)

    @property
    def extra_copies(self) -> float:
        """Model copies held beyond parameters, gradients and the inner optimizer's state. One copy
        is every trained parameter in fp32, or fp64 where a parameter is."""
        return self.extra_bytes / max(1, self.copy_bytes)

    @property
    def scratch_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.scratch_tensors())

    @property
    def state_device(self) -> torch.device:
        """Where `state_tensors` lie."""
        return next((t.device for t in self.state_tensors().values()), self.mesh.device)

    @property
    def copy_bytes(self) -> int:
        """Bytes of one model copy, of what this worker holds of the trained parameters."""
        unique = {id(param): param for param in self._trained()}
        trained = [local(p.detach()) for p in unique.values()]
        width = max((4, *(part.element_size() for part in trained)))
        return width * sum(part.numel() for part in trained)


def _exact(device: str) -> AbstractContextManager[None]:
    """Inside, an autocast that the loop is in rounds nothing."""
    known = torch.amp.is_autocast_available(device)
    return torch.autocast(device, enabled=False) if known else nullcontext()


@contextmanager
def synchronizing() -> Iterator[None]:
    """Around all that a method does as a round ends."""
    with torch.no_grad(), record_function(OUTER_STEP):
        yield
