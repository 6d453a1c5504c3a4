"""Which worker of a run this process is, as torchrun or srun has started it."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from co2.config import LaunchConfig
from co2.errors import ConfigError, require


@dataclass(frozen=True)
class Identity:
    """The place of a worker that torchrun or srun has started."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int


def identity(env: Mapping[str, str] = os.environ) -> Identity | None:
    """The place that torchrun (RANK, …) or srun (SLURM_PROCID, …) gives this process.

    None where neither has started it.

    Raises:
        ConfigError: the variables are no numbers, contradict each other, or are a batch script's.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        world = _number(env, "WORLD_SIZE", "", 1)
        local_world = _number(env, "LOCAL_WORLD_SIZE", "1", 1, world)
        return Identity(
            rank=_number(env, "RANK", "", 0, world - 1),
            world=world,
            local_rank=_number(env, "LOCAL_RANK", "0", 0, local_world - 1),
            local_world=local_world,
            address=env.get("MASTER_ADDR", "127.0.0.1"),
            port=_number(env, "MASTER_PORT", "29500", 0, 65535),
        )
    if "SLURM_PROCID" in env and _number(env, "SLURM_NTASKS", "1", 1) > 1:
        world = _number(env, "SLURM_NTASKS", "", 1)
        step = _number(env, "SLURM_STEP_ID", "0", 0)
        # In a batch script SLURM sets all variables of a task but this one.
        hint = "srun has not started this process, one of so many tasks; start it by: srun python "
        hint += "train.py …; or unset SLURM_NTASKS, and it starts launch.workers here"
        require("SLURM_STEP_ID" in env or "SLURM_JOB_ID" not in env, "SLURM_NTASKS", world, hint)
        per_node = re.match(r"\d+", env.get("SLURM_TASKS_PER_NODE", str(world)))
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "127.0.0.1")
        # All tasks of a step must use the same port, and no other step. Ports from 32768 on are
        # ephemeral: the kernel may have given one to another process.
        port = 20000 + (_number(env, "SLURM_JOB_ID", "0", 0) + 101 * step) % 12000
        return Identity(
            rank=_number(env, "SLURM_PROCID", "", 0, world - 1),
            world=world,
            local_rank=_number(env, "SLURM_LOCALID", "0", 0, world - 1),
            local_world=int(per_node.group()) if per_node else 1,
            address=env.get("MASTER_ADDR", first_host(nodes)),
            port=_number(env, "MASTER_PORT", str(port), 0, 65535),
        )
    return None


def _number(
    env: Mapping[str, str], name: str, default: str, low: int, high: int | None = None
) -> int:
    """A variable that torchrun or srun has set. Raises `ConfigError` unless it is in the range."""
    text = env.get(name, default)
    good = text.isdecimal() and low <= int(text) and (high is None or int(text) <= high)
    most = f"{low} or more" if high is None else f"from {low} to {high}"
    hint = f"must be a whole number, {most}; torchrun and srun set it, so unset it without them"
    require(good, name, text, hint)
    return int(text)


def first_host(nodelist: str) -> str:
    """The first host of SLURM's compressed list: `gpu[03-07,12],cpu1` → `gpu03`."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?", nodelist)
    return match.group(1) + (match.group(2) or "") if match else nodelist


def world_size(config: LaunchConfig) -> int:
    """The number of workers of a run: that of torchrun or srun, else `launch.workers`."""
    me = identity()
    return me.world if me else config.workers


def is_first() -> bool:
    """Whether this process prints for the run: it is worker 0, or it starts the workers."""
    try:
        me = identity()
    except ConfigError:  # whoever it is: nobody else may be there to say so
        return True
    return me is None or me.rank == 0
