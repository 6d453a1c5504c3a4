"""Guard: notices what a loop of one's own does to model and optimizer behind a method's back.

A method goes on from vectors of its own, so weights that somebody else writes are undone by the
next mean, and weights that lie elsewhere are not averaged. A loop that does either trains on, to
wrong weights. Hence:

- the optimizer steps in `sync.step` only;
- the first step begins with the weights of `prepare`, and a step after `load_state_dict` of the
  model with those of before, unless the method's own state was loaded after it;
- parameters stay where they are, and of their type.
"""

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from co2.comm.collectives import local
from co2.comm.reproducible import checksum
from co2.errors import ConfigError, WrongCall, require


def trained(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer trains."""
    groups = optimizer.param_groups
    return [param for group in groups for param in group["params"] if param.requires_grad]


def trained_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Return the names of the parameters that an optimizer trains, by its groups."""
    names = {id(param): name for name, param in model.named_parameters()}
    return [
        [names[id(param)] for param in group["params"] if param.requires_grad]
        for group in optimizer.param_groups
    ]


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise `ConfigError` unless an optimizer trains parameters of the model, no others, and for no
    other method."""
    kind, own = type(optimizer).__name__, set(map(id, model.parameters()))
    found = trained(optimizer)
    hint = "trains no parameter of the model; make it of model.parameters()"
    require(any(id(one) in own for one in found), "optimizer", kind, hint)
    hint = "trains parameters that the model does not have; prepare one module that has all"
    require(all(id(one) in own for one in found), "optimizer", kind, hint)
    hooks = _hooks(optimizer)
    hint = "its __init__ must call that of torch.optim.Optimizer; or give the optimizer inside it"
    require(hooks is not None, "optimizer", kind, hint)
    held = any(isinstance(hook, _BeforeStep) and hook.held() for hook in (hooks or {}).values())
    hint = "belongs to another method, which has not ended; call that one's finish() first"
    require(not held, "optimizer", kind, hint)


def _stepped(optimizer: Optimizer) -> Optimizer:
    """What steps: accelerate's optimizer has the plain one inside, which it calls."""
    inside: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inside


def _hooks(optimizer: Optimizer) -> dict[int, object] | None:
    return getattr(_stepped(optimizer), "_optimizer_step_pre_hooks", None)


class Guard:
    """Made when a method has prepared model and optimizer (`check_optimizer`).

    Args:
        fresh: whether the weights are those to begin with. False: a state will be loaded.
        alone: whether no other replica has other weights.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, fresh: bool, alone: bool = False
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._trained = list({id(one): one for one in trained(optimizer)}.values())
        self._parameters = {id(param) for param in model.parameters()}
        self._trains = trains = set(map(id, self._trained))
        named = model.named_parameters()
        self._others = [
            (name, one) for name, one in named if one.requires_grad and id(one) not in trains
        ]
        """What another optimizer could train, which nothing would synchronize."""
        self.allows_step = False
        """Whether the method steps now."""
        self.shows = False
        """Whether the model holds the consensus now."""
        self._ended = False
        self.finished = False
        """Whether it holds the consensus for good."""
        self._since: list[int] = []
        """Steps since the last consensus."""
        self._forgotten = None if alone else weakref.finalize(self, _tell_forgotten, self._since)
        self.note_places()
        self._versions, self._sums = self._written(), self._summed()
        self._begins_with = checksums(model) if fresh else None
        """Checksums of the weights that the next step must find; None: it may find any."""
        self._hooks = [_stepped(optimizer).register_step_pre_hook(_BeforeStep(self))]
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):  # it takes no such hook
                self._hooks.append(module.register_load_state_dict_pre_hook(_BeforeLoad(self)))

    def check_places(self) -> None:
        """Raise `WrongCall` if the trained parameters do not lie where they did."""
        for param, was, now in zip(self._trained, self._places, self._where(), strict=True):
            if was != now:
                self._replaced(param)

    def note_places(self) -> None:
        """Take the present places of the parameters for the right ones."""
        self._places = self._where()

    def check_others(self, by_bits: bool = False) -> None:
        """Raise `WrongCall` if a parameter was written that the optimizer does not hold.

        Args:
            by_bits: read them all. Fused optimizers and `.data` write without being counted.
        """
        then, found = self._versions, self._written()
        if by_bits:
            then, found = self._sums, self._summed()
        for (name, _), was, now in zip(self._others, then, found, strict=True):
            if was != now:
                raise WrongCall(
                    f"{name} was written, and the method's optimizer does not hold it, so nothing "
                    "synchronizes it: put it into that optimizer, or prepare the part of the model "
                    "that another optimizer trains with a method of its own"
                )

    def check_trained(self) -> None:
        """Raise `ConfigError` unless the optimizer trains the parameters of `prepare`."""
        now = set(map(id, trained(self._optimizer)))
        if now == self._trains:
            return
        changed = now ^ self._trains
        named = (name for name, param in self._model.named_parameters() if id(param) in changed)
        hint = (
            "was trained when prepare was called, and the next mean would move it; finish() first"
        )
        if now - self._trains:
            hint = (
                "was not trained when prepare was called, so replicas would drift apart; put it "
                "into the optimizer and set requires_grad before prepare"
            )
        raise ConfigError("parameter", next(named, "(not the model's)"), hint)

    def check_parameters(self) -> None:
        """Raise `WrongCall` if the model has other parameters. Its cost grows with the modules."""
        if all(local(param) is param for param in self._trained):  # else fully_shard changes them
            for param in self._model.parameters():
                if id(param) not in self._parameters:
                    self._replaced(param)

    def check_weights(self) -> None:
        """Raise `WrongCall` if the weights are not those that the next step must find."""
        if self._begins_with not in (None, checksums(self._model)):
            raise WrongCall(
                "the model's weights were written after prepare, and the next mean would undo "
                "that: load weights first, then call sync.prepare; to go on from a checkpoint of "
                "sync.save, call sync.resume after prepare; to train, call sync.step() in place of "
                "optimizer.step()"
            )

    def _replaced(self, param: Tensor) -> NoReturn:
        names = (name for name, one in self._model.named_parameters() if one is param)
        raise WrongCall(
            f"{next(names, 'a parameter')} was moved, converted or replaced after prepare, and is "
            "no longer synchronized: place and convert the model first, then make optimizer and "
            "method"
        )

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around a step of the method.

        Raises:
            WrongCall: the loop has written weights that the method would undo, or shows the
                consensus.
            ConfigError: see `check_trained`.
        """
        if self._ended:
            raise WrongCall("sync.step() came after finish() or flush(): make a new method")
        self.check_places()
        if self.shows:
            raise WrongCall("sync.step() came inside consensus(): leave its with block first")
        if self._begins_with is not None:
            self.check_parameters()
            self.check_weights()
            self.loaded()  # the same weights were written again
        self.check_others()
        self.check_trained()
        self.allows_step = True
        try:
            yield
        finally:
            self.allows_step = False
        self._since[:] = [sum(self._since) + 1]

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Around a shown consensus, whose end undoes what is loaded meanwhile."""
        before, self.shows = self.shows, True
        self._since.clear()
        try:
            yield
        finally:
            self.shows, self._versions = before, self._written()

    def loaded(self) -> None:
        """The method goes on from the weights that there are."""
        self._begins_with = None
        self._versions, self._sums = self._written(), self._summed()

    def end(self) -> None:
        """The method has ended; model and optimizer are the loop's again."""
        self._ended = True
        self.tell_no_end()
        while self._hooks:
            self._hooks.pop().remove()

    def tell_no_end(self) -> None:
        """Say nothing of an end that was forgotten."""
        if self._forgotten is not None:
            self._forgotten.detach()

    def refuse_step(self) -> NoReturn:
        """The optimizer is about to step by somebody else's call."""
        raise WrongCall(
            "the optimizer was told to step outside sync.step(), which makes its step and "
            "synchronizes: call sync.step() in its place, or sync.step(scaler) in place of "
            "scaler.step(optimizer); after the training, call sync.finish() first"
        )

    def before_load(self) -> None:
        """Somebody is about to load weights into the model."""
        if self._begins_with is None and not self.shows:
            self._begins_with = checksums(self._model)

    def _written(self) -> list[int]:
        """How many times each of the other parameters was written."""
        return [param._version for _, param in self._others]

    def _summed(self) -> list[int]:
        """Checksums of the other parameters."""
        return sums(one for _, one in self._others)

    def _where(self) -> list[tuple[int, torch.dtype]]:
        parts = map(local, self._trained)
        return [(part.data_ptr(), part.dtype) for part in parts]


def _tell_forgotten(steps: list[int]) -> None:
    """Say that a method has gone, or the process ends, with weights that no consensus has."""
    if steps and not hasattr(sys, "last_value"):  # else an error has ended it, which is told
        print(
            f"note: a training has ended {steps[0]} steps after its last consensus and without "
            "sync.finish(): the model holds this replica's own weights, not the mean of all",
            file=sys.stderr,
            flush=True,
        )


def checksums(module: nn.Module) -> list[int]:
    """Numbers that change with the bits of the parameters."""
    return sums(module.parameters())


def sums(tensors: Iterable[Tensor]) -> list[int]:
    """Checksums of tensors of any type, of what this worker holds of them."""
    found = [checksum(local(one.detach())) for one in tensors]
    return torch.stack([one.cpu() for one in found]).tolist() if found else []


class _Hook:
    """A guard's hook. In copies and pickles of the module or optimizer it has no guard."""

    def __init__(self, guard: Guard | None = None) -> None:
        self._guard = None if guard is None else weakref.ref(guard)

    @property
    def guard(self) -> Guard | None:
        """The guard, unless its method has gone."""
        return None if self._guard is None else self._guard()

    def held(self) -> Guard | None:
        """The guard, unless only a cycle of references keeps its method."""
        if self.guard is not None:
            gc.collect()
        return self.guard

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


class _BeforeStep(_Hook):
    def __call__(self, *_: object) -> None:
        if self.guard is None or self.guard.allows_step:
            return
        if (guard := self.held()) is not None:
            guard.refuse_step()


class _BeforeLoad(_Hook):
    def __call__(self, *_: object) -> None:
        if self.guard is not None:
            self.guard.before_load()
