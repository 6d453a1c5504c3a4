"""Method: the base class of every way of keeping the replicas in step."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import record_function

from co2.comm.background import BackgroundMean, new_mean
from co2.comm.clocks import CommTotals
from co2.comm.collectives import check_equal, check_plain, consensus, local, replicate
from co2.comm.flat import FlatParams
from co2.comm.mesh import Mesh
from co2.comm.phases import OUTER_STEP
from co2.config import Blocking, CommConfig, OptimConfig
from co2.errors import ConfigError, require

Schedule = Callable[[int], float]
"""The index of a step, from 0 → the largest learning rate of the inner optimizer in that step."""
ELASTIC, QUORUM = "launch.elastic=true", "launch.quorum"
"""What `Method.refusals` calls replicas that come and go, and unequal numbers of steps."""


@dataclass(frozen=True)
class MethodStats(CommTotals):
    """What a method has done on this worker since the start of training."""

    own: dict[str, float] = field(default_factory=dict)
    """Figures that only this method has, by name: the τ that it chose, its staleness gap, …"""


class Method:
    """One way of keeping the replicas in step.

    A subclass sets `Config`, a dataclass whose fields are documented and checked, and `blocking`;
    it implements `set_up` and `step`, and names its tensors by `hold`. The order of calls is
    prepare, then load_state_dict if a run resumes, then step as often as needed, then flush.

    Args:
        config: an instance of `Config`; None for its defaults.
        comm: how collectives travel; None for the defaults.
    Raises:
        ConfigError: the two do not go together.
    """

    Config: ClassVar[type]
    blocking: ClassVar[Blocking]
    """What the computation of a replica waits for."""
    averages_gradients: ClassVar[bool] = False
    """Whether all replicas step with the same gradients, averaged by PyTorch's own wrappers. Those
    then work across the replicas too (co2/train/replica.py)."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Settings without which it trains no task, as `key=value`. `method=NAME` sets them too."""
    may_change: ClassVar[frozenset[str]] = frozenset()
    """Keys of `Config` that may have another value when a state is loaded than when it was saved.
    The state's tensors depend on all others, or mean something else under them."""
    saved_values: ClassVar[tuple[str, ...]] = ("steps",)
    """Attributes of plain values that a state holds."""
    model: nn.Module
    optimizer: Optimizer
    mesh: Mesh

    def __init__(self, config: Any = None, comm: CommConfig | None = None) -> None:
        # Any: each subclass has a dataclass of its own.
        self.config: Any = self.Config() if config is None else config
        self.comm = comm or CommConfig()
        self.schedule: Schedule | None = None
        self.total_steps: int | None = None
        self.steps = 0
        """Calls of `step` so far, over all segments of a resumed run."""
        self.means: list[BackgroundMean] = []
        """Everything that it sends by: what they hold is saved, loaded and waited for here."""
        self._notices: list[str] = []
        self._held: dict[str, Tensor] = {}
        self._replicated: list[str] = []
        self._unsaved: list[str] = []

    def refusals(self) -> dict[str, str]:
        """What this method, as it is configured, cannot be combined with: values of
        `mesh.strategy`, `optim.name` and `launch.elastic` as `key=value`, or `QUORUM`, each with
        the reason. A method with rounds overrides this and need not extend it."""
        return {
            ELASTIC: "has no rounds at whose end replicas could come and go",
            QUORUM: "does not support weighted averaging",
        }

    @classmethod
    def check(cls, optim: OptimConfig) -> None:
        """Raise `ConfigError` for an inner optimizer that this method cannot work with."""

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
        check_plain(model)
        kind = type(optimizer)
        closure = inspect.signature(kind.step).parameters.get("closure")
        needed = closure is not None and closure.default is inspect.Parameter.empty
        hint = "its step needs a closure, which a method does not have; use another, such as AdamW"
        require(not needed, "optimizer", kind.__name__, hint)
        self.model, self.optimizer, self.schedule = model, optimizer, schedule
        self.total_steps = total_steps
        self._regroup(mesh)
        self.replica_group = mesh.new_group_within_replica()
        mesh.on_change(self._regroup)
        self._known = {id(param) for param in self._trained()}
        if fresh:
            replicate(model, self.group)
        return self.set_up()

    def _regroup(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.group = mesh.new_group_across_replicas()

    def set_up(self) -> nn.Module:
        """Make what training needs, and return the module to train. `prepare` calls it last."""
        raise NotImplementedError

    def hold(
        self, name: str, tensor: Tensor, *, replicated: bool = False, saved: bool = True
    ) -> Tensor:
        """Name a tensor that is held between steps beyond parameters, gradients and inner state.
        Checkpoint and memory ledger follow from it. Returns the tensor.

        Args:
            replicated: whether it is equal on all replicas, bit for bit, between two steps.
            saved: whether a checkpoint has it under this name.
        """
        self._held[name] = tensor
        if replicated:
            self._replicated.append(name)
        if not saved:
            self._unsaved.append(name)
        return tensor

    def new_mean(self, flat: FlatParams, name: str = "buffer", copies: int = 1) -> BackgroundMean:
        """Make one of `means`, whose buffer is as long as so many vectors, and is held by this
        name."""
        numel = copies * flat.numel
        return self.send_by(new_mean(numel, self.mesh, self.comm, flat.dtype, flat.device), name)

    def send_by(self, mean: BackgroundMean, name: str = "buffer") -> BackgroundMean:
        """Make a mean one of `means`. These save their buffers, and only while they are in
        flight."""
        self.means.append(mean)
        self.hold(name, mean.buffer, saved=False)
        return mean

    def step(self) -> None:
        """Do the inner optimizer's step and the synchronization due now. Gradients are ready. A
        subclass extends this, which counts the step.

        Raises:
            ConfigError: a parameter is trained that was not when `prepare` was called. Nobody would
                synchronize it.
        """
        self.steps += 1
        new = next((param for param in self._trained() if id(param) not in self._known), None)
        if new is not None:
            named = (name for name, param in self.model.named_parameters() if param is new)
            hint = (
                "was not trained when prepare was called, so replicas would drift apart; put it "
                "into the optimizer and set requires_grad before prepare"
            )
            raise ConfigError("parameter", next(named, "(not the model's)"), hint)

    def lr(self, group: int) -> float:
        """γ_t: a parameter group's inner learning rate in this step. Raises `ConfigError` where the
        optimizer does not tell it."""
        rate = self.optimizer.param_groups[group].get("lr")
        if rate is None:
            kind = type(self.optimizer).__name__
            hint = f"the outer step needs the learning rate; give {kind} one"
            raise ConfigError("lr", rate, hint)
        return float(rate)

    def _trained(self) -> Iterator[Tensor]:
        """The parameters that the inner optimizer trains."""
        for group in self.optimizer.param_groups:
            yield from (param for param in group["params"] if param.requires_grad)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the model holds the mean over the replicas of the weights as training left them,
        and that of the float buffers. Both are restored bit for bit afterwards. Collective.

        A collective in flight may be waited for, where it carries what was trained last, but it
        stays in flight, so evaluating more often does not change training.

        Raises:
            ReplicasDiffer: one of the `replicated_tensors` is not equal on all replicas.
        """
        check_equal(self.replicated_tensors(), self.group, self.mesh.device)
        with consensus(self.model, self.group, self.replica_group, self.show_trained):
            yield

    def show_trained(self) -> None:
        """Set the live weights to the newest local ones. Override it if the live weights lag behind
        them. `consensus` calls it on all replicas, and puts the live weights back. Nothing else may
        change: `BackgroundMean.peek` waits for a result and leaves it pending."""

    def flush(self) -> None:
        """Wait for what is in flight and drop it. Call it at the end of training only."""
        for mean in self.means:
            mean.close()

    def state_tensors(self) -> dict[str, Tensor]:
        """What `hold` has named. A subclass extends this for tensors that it replaces by others."""
        return dict(self._held)

    def replicated_tensors(self) -> dict[str, Tensor]:
        """Those that are equal on all replicas between two steps. Every consensus compares them."""
        return {name: self._held[name] for name in self._replicated}

    def saved_tensors(self) -> dict[str, Tensor]:
        """Those that a checkpoint holds under their names."""
        tensors = self.state_tensors().items()
        return {name: tensor for name, tensor in tensors if name not in self._unsaved}

    def scratch_tensors(self) -> list[Tensor]:
        """Tensors whose content is not needed from one step to the next. Their size does not grow
        with the model."""
        return []

    def state_dict(self, arriving: bool = False) -> dict[str, Any]:
        """Everything that this worker needs to go on exactly, a collective in flight included, for
        which it need not wait if `arriving` (`BackgroundMean.state_dict`)."""
        means = [mean.state_dict(arriving) for mean in self.means]  # they may still change tensors
        return {
            "method": self.registered_name(),
            "config": self._settings(),
            "means": means,
            "tensors": self.saved_tensors(),
            **{name: getattr(self, name) for name in self.saved_values},
            **self.own_state(),
        }

    def own_state(self) -> dict[str, Any]:
        """What a state holds beside means, tensors and `saved_values`. A subclass extends this."""
        return {}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise `ConfigError` unless this method can go on from a state: it is of the same method,
        and of a configuration that differs in `may_change` only."""
        whole = isinstance(state, Mapping) and {"method", "config"} <= state.keys()
        hint = "is no state that a method of this version saved; give what state_dict() returned"
        require(whole, "state", type(state).__name__, hint)
        name, saved = self.registered_name(), state["method"]
        hint = f"the state was saved by {saved}; go on with that, or start without the state"
        require(saved == name, "method", name, hint)
        for key, value in self._settings().items():
            then = state["config"].get(key)
            hint = f"the state was saved with {then}; give that, or start without the state"
            require(key in self.may_change or value == then, f"{name}.{key}", value, hint)

    @classmethod
    def registered_name(cls) -> str:
        """As in the registry, which has the names of the files; of others' methods the class's."""
        ours = cls.__module__.startswith("co2.")
        return cls.__module__.rpartition(".")[2] if ours else cls.__name__

    def _settings(self) -> dict[str, object]:
        """The configuration in plain values."""
        fields = asdict(self.config).items()
        return {key: value.name if isinstance(value, Enum) else value for key, value in fields}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned. Call it after `prepare`, when model and optimizer
        have been loaded. A subclass extends this, which first raises what `check_state` does."""
        self.check_state(state)
        for name in self.saved_values:
            setattr(self, name, state[name])
        for name, tensor in self.saved_tensors().items():
            tensor.copy_(state["tensors"][name])
        for mean, saved in zip(self.means, state["means"], strict=True):
            mean.load_state_dict(saved)

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


@contextmanager
def synchronizing() -> Iterator[None]:
    """Around all that a method does as a round ends."""
    with torch.no_grad(), record_function(OUTER_STEP):
        yield
