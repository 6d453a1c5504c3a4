"""Files from which replicas go on exactly, one of each worker: `Method.save`, `Method.resume`.

    FOLDER/step40_worker0of2.pt, FOLDER/step40_worker1of2.pt

Every worker has a file of its own, because replicas differ between two means. A step counts if all
workers have written theirs; those of before are deleted only then, so an interruption loses
nothing.
"""

import io
import re
import uuid
from collections.abc import Callable
from itertools import chain, zip_longest
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from co2.atomic import durable
from co2.comm.collectives import gathered, local
from co2.comm.waiting import everyone
from co2.errors import ConfigError, WrongCall, require
from co2.methods.shared.guard import trained_names
from co2.methods.shared.state import Stateful

_NAME = re.compile(r"step(\d+)_worker(\d+)of(\d+)\.pt")


# Any: what torch.save takes.
def held(sync: Stateful, module: nn.Module) -> dict[str, Any]:
    """What this replica needs to go on exactly, by reference."""
    return {
        "replicas": sync.mesh.num_replicas,
        "module": module.state_dict(),
        "optimizer": sync.optimizer.state_dict(),
        "trained": trained_names(sync.model, sync.optimizer),
        "sync": sync.state_dict(),
    }


def load_held(sync: Stateful, module: nn.Module, state: dict[str, Any]) -> None:
    """Go on from what `held` returned, after `prepare`. Without module and method in it, the method
    begins with the weights that were prepared."""
    sync.optimizer.load_state_dict(state["optimizer"])
    if "sync" in state:
        module.load_state_dict(state["module"])
        sync.load_state_dict(state["sync"])


# Any: what torch.load returns.
def load(path: str) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def opened(
    sync: Stateful,
    folder: Path | str,
    name: str,
    key: str,
    load: Callable[[str], Any] = load,
    step: int | None = None,
) -> dict[str, Any]:
    """Return what this worker has written into its file: what `held` returned, and more.

    Args:
        sync: prepared.
        name: of the file in the folder.
        key: of the argument that named the folder, for errors.
        load: reads a file; by default from the local disk.
        step: that of the checkpoint. None: it is not compared.
    Raises:
        ConfigError: the file is missing or damaged, or of another number of replicas, step, method
            or optimizer.
    """
    mend = "give another checkpoint, or bring a copy"
    try:
        state = load(f"{folder}/{name}")
    except FileNotFoundError:
        hint = f"there is no {name}; give a checkpoint of this method and as many processes"
        raise ConfigError(key, folder, hint) from None
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        hint = f"{name} cannot be read ({type(error).__name__}); {mend}"
        raise ConfigError(key, folder, hint) from None
    known = isinstance(state, dict) and {"replicas", "optimizer"} <= state.keys()
    require(known, key, folder, f"{name} holds no state of a method; {mend}")
    then, now = state["replicas"], sync.mesh.num_replicas
    require(then == now, key, folder, f"is of {then} processes, not of {now}; start as many")
    found = state.get("step", step)
    hint = f"{name} is of step {found}, the checkpoint of step {step}; {mend}"
    require(step is None or found == step, key, folder, hint)
    if "sync" in state:
        sync.check_state(state["sync"])
    groups = sync.optimizer.state_dict()["param_groups"]
    found = state["optimizer"].get("param_groups", groups)  # a state of torchtitan's has none
    alike = [own.keys() for own in found] == [own.keys() for own in groups]
    kind = type(sync.optimizer).__name__
    require(alike, key, folder, f"is of another optimizer than this {kind}; make it as it was")
    trains = trained_names(sync.model, sync.optimizer)
    trained: list[list[str]] = state.get("trained", trains)  # a file of before has none
    if {*chain(*trained)} - {name for name, _ in sync.model.named_parameters()}:
        trained = trains  # another model, as whoever loads it will say
    for index, (before, own) in enumerate(zip(trained, trains, strict=True)):
        for was, other in zip_longest(before, own, fillvalue="nothing"):
            hint = f"trained {was} where group {index} of this optimizer has {other}; freeze and "
            require(was == other, key, folder, f"{hint}order parameters as they were")
    return dict(state)


def save(sync: Stateful, folder: Path, extra: dict[str, Any]) -> None:
    """See `Method.save`."""
    _check_plain(extra)
    if any(local(param) is not param for param in sync.model.parameters()):
        raise WrongCall(
            "sync.save() cannot save parameters that fully_shard has sharded: save model, "
            "optimizer and sync.state_dict() of each worker by torch.distributed.checkpoint"
        )
    worker, workers = sync.mesh.worker, sync.mesh.num_workers
    sync.meet("save")
    folder.mkdir(parents=True, exist_ok=True)
    run = gathered(uuid.uuid4().hex, everyone())[0]
    own = folder / f"step{sync.steps}_worker{worker}of{workers}.pt"
    state = {**held(sync, sync.model), "random": _random(sync), "extra": extra, "run": run}
    with durable(own) as file:
        torch.save(state, file)
    sync.meet("save")  # from here on all have theirs
    for step in _steps(folder, worker, workers):
        if step != sync.steps:
            (folder / f"step{step}_worker{worker}of{workers}.pt").unlink(missing_ok=True)


# Any: what was given to `save`.
def resume(sync: Stateful, folder: Path) -> dict[str, Any] | None:
    """See `Method.resume`."""
    worker, workers = sync.mesh.worker, sync.mesh.num_workers
    others = sorted({count for _, _, count in _files(folder)} - {workers})
    owns = gathered((_steps(folder, worker, workers), others), everyone())
    if not any(steps or counts for steps, counts in owns):
        return None
    common = set.intersection(*(set(steps) for steps, _ in owns))
    if not common:
        counts = [count for _, found in owns for count in found]
        hint = "has no step of which all workers have their file; give all the whole folder"
        if counts:
            hint = f"is of {counts[0]} workers, not of {workers}; start as many"
        raise ConfigError("folder", folder, hint)
    state: dict[str, Any] = {}
    failed: ConfigError | None = None
    try:
        state = _own(sync, folder, f"step{max(common)}_worker{worker}of{workers}.pt")
    except ConfigError as error:  # the others must not wait for this one
        failed = error
    found = gathered((failed, state.get("run")), everyone())
    for refusal, _ in found:
        if refusal is not None:
            raise refusal
    hint = "has files of several runs; give each run a folder of its own"
    require(len({run for _, run in found}) == 1, "folder", folder, hint)
    load_held(sync, sync.model, state)
    torch.set_rng_state(state["random"][0])
    if sync.mesh.device.type == "cuda":
        torch.cuda.set_rng_state(state["random"][1], sync.mesh.device)
    extra: dict[str, Any] = state["extra"]
    return extra


def _check_plain(extra: object) -> None:
    """Raise `ConfigError` for what could be written and not be read: `resume` runs no code that a
    file names."""
    content = io.BytesIO()
    torch.save(extra, content)
    content.seek(0)
    try:
        read = torch.load(content, weights_only=True)
    except UnpicklingError:
        read = None
    hint = "must be a dict of tensors, numbers, texts, and lists and dicts of these"
    require(isinstance(read, dict), "extra", type(extra).__name__, hint)


def _tensors(state: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    return [(name, one) for name, one in state.items() if isinstance(one, torch.Tensor)]


def _own(sync: Stateful, folder: Path, name: str) -> dict[str, Any]:
    """What `save` has written into a file. Raises `ConfigError` if this replica cannot go on from
    it."""
    state = opened(sync, folder, name, "folder")
    require("run" in state, "folder", folder, f"sync.save did not write its {name}; give another")
    shapes = {name: value.shape for name, value in _tensors(sync.model.state_dict())}
    other = shapes.items() ^ {(name, value.shape) for name, value in _tensors(state["module"])}
    hint = f"is of another model: {min(other)[0] if other else ''} differs; make it as it was"
    require(not other, "folder", folder, hint)
    return state


def _random(sync: Stateful) -> list[torch.Tensor]:
    """The states of torch's generators of this process: of the CPU and of its GPU."""
    gpu = sync.mesh.device.type == "cuda"
    more = [torch.cuda.get_rng_state(sync.mesh.device)] if gpu else []
    return [torch.get_rng_state(), *more]


def _files(folder: Path) -> list[tuple[int, int, int]]:
    """Step, worker and number of workers of each file in a folder, which need not exist."""
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else ()
    found = (_NAME.fullmatch(name) for name in names)
    return [(int(one[1]), int(one[2]), int(one[3])) for one in found if one is not None]


def _steps(folder: Path, worker: int, workers: int) -> list[int]:
    return sorted(step for step, *place in _files(folder) if place == [worker, workers])
