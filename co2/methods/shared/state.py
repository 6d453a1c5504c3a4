"""What a method holds between steps, and the state that a checkpoint has of it.

Tensors and values are named once, by `hold` and `keep`. The state, what replicas compare in a
consensus and the ledger of memory follow from these names.
"""

from collections.abc import Mapping
from dataclasses import asdict
from enum import Enum
from itertools import chain
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from co2.comm.background_mean import BackgroundMean
from co2.comm.collectives import meet
from co2.comm.deadlocks import DeadlockWatch
from co2.comm.mesh import Mesh
from co2.errors import WrongCall, require
from co2.methods.shared.guard import Guard, checksums

Kept = dict[str, tuple[object, str]]
"""Attributes of objects, by their names in a state."""


class Stateful:
    """The part of every method that names, saves and loads what it holds. See `Method`."""

    may_change: ClassVar[frozenset[str]] = frozenset()
    """Keys of `Config` that may have another value when a state is loaded than when it was saved.
    A state cannot be loaded if any other key changed."""
    config: Any  # each subclass has a dataclass of its own
    model: nn.Module
    optimizer: Optimizer
    mesh: Mesh
    watch: DeadlockWatch
    group: dist.ProcessGroup | None
    """This worker and its counterparts in the other replicas."""
    replica_group: dist.ProcessGroup | None
    """The workers of this replica."""

    def __init__(self) -> None:
        self.steps = 0
        """Calls of `step` so far, over all segments of a resumed run."""
        self.means: list[BackgroundMean] = []
        """Everything that it sends by: what they hold is saved, loaded and waited for here."""
        self._held: dict[str, Tensor] = {}
        self._kept: Kept = {"steps": (self, "steps")}
        self._replicated: list[str] = []
        self._unsaved: list[str] = []
        self._guard: Guard | None = None

    def hold(
        self, name: str, tensor: Tensor, *, replicated: bool = False, saved: bool = True
    ) -> Tensor:
        """Name a tensor that is held between steps beyond parameters, gradients and inner state.
        Checkpoint and memory ledger follow from it. Returns the tensor.

        Args:
            replicated: whether it is equal on all replicas, bit for bit, between two steps.
            saved: whether a checkpoint has it under this name. False is right only where another
                part of the state has it, or where it is written before it is next read.
        """
        self._held[name] = tensor
        if replicated:
            self._replicated.append(name)
        if not saved:
            self._unsaved.append(name)
        return tensor

    def keep(self, owner: object, *names: str, prefix: str = "") -> None:
        """Name attributes of an object that a state holds beside tensors: plain values, figures,
        which are tensors of a few numbers, and what has a `state_dict` of its own."""
        self._kept |= {f"{prefix}{name}": (owner, name) for name in names}

    def _prepared(self, call: str) -> Guard:
        """Return the guard. Raises `WrongCall` before `prepare`."""
        if self._guard is None:
            raise WrongCall(f"{call} came before prepare: call prepare(model, optimizer, mesh)")
        return self._guard

    def _as_trained(self, call: str) -> Guard:
        """As `_prepared`. Raises `WrongCall` also where the model does not hold the weights that
        training left."""
        guard = self._prepared(call)
        if guard.finished:
            raise WrongCall(
                f"{call} came after finish(), which leaves the consensus and ends the training: "
                "call it before, or save the model's own state_dict()"
            )
        if guard.shows:
            raise WrongCall(f"{call} came inside consensus(): leave its with block first")
        return guard

    def meet(self, call: str) -> None:
        """Wait until all workers are at this call, after the same number of steps. Raises what
        `consensus` does."""
        meet(self.watch, call, self.group, self.mesh.device, self.layout())
        if self.replica_group is not None:
            dist.barrier(self.replica_group)

    def layout(self) -> dict[str, str]:
        """Shape and type of what the model holds, by name."""
        held = chain(self.model.named_parameters(), self.model.named_buffers())
        return {
            name: f"{tuple(one.shape)} of {one.dtype}".replace("torch.", "") for name, one in held
        }

    def state_tensors(self) -> dict[str, Tensor]:
        """All held tensors, by name."""
        return dict(self._held)

    def replicated_tensors(self) -> dict[str, Tensor]:
        """Held tensors that are equal on all replicas between two steps, which every consensus
        checks."""
        return {name: self._held[name] for name in self._replicated}

    def saved_tensors(self) -> dict[str, Tensor]:
        """Held tensors that a checkpoint has."""
        tensors = self.state_tensors().items()
        return {name: tensor for name, tensor in tensors if name not in self._unsaved}

    def state_dict(self, arriving: bool = False) -> dict[str, Any]:
        """Everything that this worker needs to go on exactly, a collective in flight included, for
        which it need not wait if `arriving` (`BackgroundMean.state_dict`)."""
        self._as_trained("sync.state_dict()")
        means = [mean.state_dict(arriving) for mean in self.means]  # they may still change tensors
        return {
            "method": self.registered_name(),
            "config": self._settings(),
            "means": means,
            "tensors": self.saved_tensors(),
            "values": values(self._kept),
            **({} if arriving or self.mesh.elastic is not None else {"owner": self._owner()}),
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise `ConfigError` unless this method can go on from a state: it is of the same method,
        and of a configuration that differs in `may_change` only."""
        whole = isinstance(state, Mapping) and {"method", "config", "values"} <= state.keys()
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
        """Go on from what `state_dict` returned on this replica. Call it after `prepare`, when
        model and optimizer have been loaded.

        Raises:
            ConfigError: as `check_state`, or the state is another replica's, or the model does not
                hold its weights.
        """
        guard = self._prepared("sync.load_state_dict()")
        self.check_state(state)
        if self.mesh.elastic is None:  # else it may be another replica's, and of other weights
            self._check_owner(state.get("owner"))
        guard.loaded()
        for mean, held in zip(self.means, state["means"], strict=True):
            mean.load_state_dict(held)  # first: what is in flight may still change the others
        put_values(self._kept, state["values"])
        self.watch.steps = self.steps
        for name, tensor in self.saved_tensors().items():
            tensor.copy_(state["tensors"][name])
        self.loaded()

    def loaded(self) -> None:
        """Called when a state has been loaded: make anew what follows from it."""

    def _owner(self) -> dict[str, Any]:
        """Which worker a state is of, and checksums of the weights that go with it."""
        place = [self.mesh.worker, self.mesh.num_workers]
        return {"place": place, "weights": checksums(self.model)}

    def _check_owner(self, found: dict[str, Any] | None) -> None:
        """Raise `ConfigError` unless a state is this worker's, and the model holds its weights.

        Args:
            found: what `_owner` returned then. None: nobody knows.
        """
        if found is None:
            return
        own = self._owner()
        (worker, workers), (me, now) = found["place"], own["place"]
        hint = f"this is worker {me} of {now}; load on each what it saved itself"
        require(found["place"] == own["place"], "state", f"of worker {worker} of {workers}", hint)
        hint = "the model holds others; after prepare load model, optimizer and then this"
        require(found["weights"] == own["weights"], "state", "of other weights", hint)


# Any: plain values, and what is in a `state_dict` of an object's own.
def values(kept: Kept) -> dict[str, Any]:
    """What a state holds of these attributes."""
    found = {key: getattr(of, name) for key, (of, name) in kept.items()}
    return {
        key: one.state_dict() if hasattr(one, "state_dict") else one for key, one in found.items()
    }


def put_values(kept: Kept, state: Mapping[str, Any]) -> None:
    """The reverse of `values`."""
    for key, (of, name) in kept.items():
        now = getattr(of, name)
        if hasattr(now, "load_state_dict"):
            now.load_state_dict(state[key])
        elif isinstance(now, Tensor):
            now.copy_(state[key])
        else:
            setattr(of, name, state[key])
