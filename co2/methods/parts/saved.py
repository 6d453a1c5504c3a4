"""What a replica needs to go on exactly, and its file: `Method.save` and `Method.resume`.

    FOLDER/step40_worker0of2.pt, FOLDER/step40_worker1of2.pt

Every worker has a file of its own, because replicas differ between two means. A step counts if all
workers have written theirs; those of before are deleted only then, so an interruption loses
nothing.
"""

import io
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from co2.atomic import durable
from co2.comm.collectives import gathered, local
from co2.comm.waiting import everyone
from co2.errors import ConfigError, WrongCall, require
from co2.methods.parts.guard import checksums

if TYPE_CHECKING:
    from co2.methods.base import Method

_NAME = re.compile(r"step(\d+)_worker(\d+)of(\d+)\.pt")


# Any: what torch.save takes.
def held(sync: "Method", module: nn.Module) -> dict[str, Any]:
    """What this replica needs to go on exactly, by reference."""
    return {
        "replicas": sync.mesh.num_replicas,
        "module": module.state_dict(),
        "optimizer": sync.optimizer.state_dict(),
        "sync": sync.state_dict(),
    }


def load_held(sync: "Method", module: nn.Module, state: dict[str, Any]) -> None:
    """Go on from what `held` returned, after `prepare`. Without module and method in it, the method
    begins with the weights that were prepared."""
    sync.optimizer.load_state_dict(state["optimizer"])
    if "sync" in state:
        module.load_state_dict(state["module"])
        sync.load_state_dict(state["sync"])


def check_held(sync: "Method", state: dict[str, Any], key: str, value: object) -> None:
    """Raise `ConfigError` unless this replica can go on from what `held` returned.

    Args:
        key, value: the argument that named the checkpoint, for errors.
    """
    then, now = state["replicas"], sync.mesh.num_replicas
    require(then == now, key, value, f"is of {then} processes, not of {now}; start as many")
    if "sync" in state:
        sync.check_state(state["sync"])
    groups = [own.keys() for own in sync.optimizer.state_dict()["param_groups"]]
    alike = [own.keys() for own in state["optimizer"]["param_groups"]] == groups
    kind = type(sync.optimizer).__name__
    require(alike, key, value, f"is of another optimizer than this {kind}; make it as it was")


Kept = Mapping[str, tuple[object, str]]
"""Attributes of objects, by their names in a state."""


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
        elif isinstance(now, torch.Tensor):
            now.copy_(state[key])
        else:
            setattr(of, name, state[key])


def owner(sync: "Method") -> dict[str, Any]:
    """Which worker a state is of, and checksums of the weights that go with it."""
    place = [sync.mesh.worker, sync.mesh.num_workers]
    return {"place": place, "weights": checksums(sync.model)}


def check_owner(sync: "Method", found: dict[str, Any] | None) -> None:
    """Raise `ConfigError` unless a state is this worker's, and the model holds its weights.

    Args:
        found: what `owner` returned then. None: nobody knows.
    """
    if found is None:
        return
    (worker, workers), own = found["place"], [sync.mesh.worker, sync.mesh.num_workers]
    hint = f"this is worker {own[0]} of {own[1]}; load on each what it saved itself"
    require(found["place"] == own, "state", f"of worker {worker} of {workers}", hint)
    hint = "the model holds others; after prepare load model, optimizer and then this"
    require(found["weights"] == checksums(sync.model), "state", "of other weights", hint)


def save(sync: "Method", folder: Path, extra: dict[str, Any]) -> None:
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
def resume(sync: "Method", folder: Path) -> dict[str, Any] | None:
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
        state = _read(sync, folder / f"step{max(common)}_worker{worker}of{workers}.pt")
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


def _read(sync: "Method", path: Path) -> dict[str, Any]:
    """What `save` has written into a file. Raises `ConfigError` if this replica cannot go on from
    it."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, UnpicklingError) as error:
        hint = f"is damaged ({type(error).__name__}); begin in another folder, or bring a copy"
        raise ConfigError("file", path, hint) from None
    except OSError as error:
        raise ConfigError("file", path, f"cannot be read ({error.strerror})") from None
    known = isinstance(state, dict) and {"sync", "run"} <= state.keys()
    require(known, "file", path, "is no file that sync.save wrote; give another folder")
    check_held(sync, state, "file", path)
    shapes = {name: value.shape for name, value in _tensors(sync.model.state_dict())}
    other = shapes.items() ^ {(name, value.shape) for name, value in _tensors(state["module"])}
    hint = f"is of another model: {min(other)[0] if other else ''} differs; make it as it was"
    require(not other, "file", path, hint)
    return dict(state)


def _random(sync: "Method") -> list[torch.Tensor]:
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
