"""Every schema of the suite, and `typed`: plain YAML to checked objects.

Method and task schemas live beside their code (`METHODS[name].Config`, `TASKS[name].Config`).
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from co2.errors import ConfigError, nearest, require, require_count, require_number


class Waits(Enum):
    """What the computation of a replica waits for."""

    always = "always"
    """Every collective: a replica stands still until it is over."""
    beyond_delay = "beyond_delay"
    """A collective that takes longer than a whole round, or than `delay` steps."""
    never = "never"
    """Nothing, because nothing is communicated: the limit of what any method can reach."""


class Precision(Enum):
    fp32 = "fp32"
    bf16 = "bf16"


class Schedule(Enum):
    cosine = "cosine"
    poly = "poly"
    constant = "constant"


class Optimizer(Enum):
    sgd = "sgd"
    adamw = "adamw"


class Wandb(Enum):
    offline = "offline"
    online = "online"
    disabled = "disabled"


class Strategy(Enum):
    ddp = "ddp"
    zero1 = "zero1"
    zero2 = "zero2"
    zero3 = "zero3"


class Resume(Enum):
    auto = "auto"
    never = "never"


class CommDevice(Enum):
    auto = "auto"
    cpu = "cpu"


@dataclass
class TrainConfig:
    steps: int = 100
    """Optimizer steps of every replica."""
    seed: int = 0
    """Of the initial weights, the data order and dropout."""
    batch_size: int = 8
    """Samples in one micro-batch of one worker."""
    accumulate: int = 1
    """Micro-batches whose gradients make one step."""
    precision: Precision = Precision.fp32
    """bf16: autocast of forward and loss; weights and the outer state stay fp32."""
    compile: bool = False
    """torch.compile the model."""
    checkpoint_activations: bool = False
    """Keep the inputs of the model's blocks only, and work out the rest again in the backward pass:
    less memory for a third more work."""
    clip_norm: float | None = None
    """Largest gradient norm; null leaves gradients alone."""
    eval_every: int = 100
    """Steps between evaluations of the consensus; the end is always evaluated."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulate", "eval_every"):
            require_count(name, getattr(self, name))
        require(self.seed >= 0, "seed", self.seed, "must be 0 or more")
        if self.clip_norm is not None:
            hint = "must be above 0, or null for no clipping"
            require_number("clip_norm", self.clip_norm, 1e-30, hint)


@dataclass
class OptimConfig:
    name: Optimizer = Optimizer.adamw
    lr: float = 1e-3
    """Peak learning rate of the inner optimizer."""
    weight_decay: float = 0.0
    """On matrices only; biases, norms and embeddings of one dimension are spared."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.9
    """SGD only."""
    nesterov: bool = False
    schedule: Schedule = Schedule.cosine
    power: float = 1.0
    """Of the schedule poly; 1 is a straight line."""
    warmup_steps: int = 0
    """Linear from lr/warmup_steps to lr."""
    min_lr_ratio: float = 0.0
    """Where cosine and poly end, as a share of lr."""

    def __post_init__(self) -> None:
        require_number("lr", self.lr, 0.0, "must be a finite number, 0 or more")
        for name in ("weight_decay", "eps", "momentum", "power", "min_lr_ratio"):
            require_number(name, getattr(self, name), 0.0, "must be a finite number, 0 or more")
        require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "must be 0 or more")
        hint = "needs optim.momentum above 0"
        require(not self.nesterov or self.momentum > 0, "nesterov", self.nesterov, hint)
        good = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        require(good, "betas", list(self.betas), "must be two numbers in [0, 1)")


@dataclass
class LaunchConfig:
    workers: int = 2
    """Local workers that train.py starts. Under torchrun or srun their number wins."""
    backend: str = "auto"
    """auto: on GPUs under nccl where every local worker has one of its own; with comm.device=cpu
    on GPUs under gloo where there is any; else on the CPU under gloo. gloo: on the CPU, whatever
    GPUs there are. nccl: on GPUs, one for each worker."""

    def __post_init__(self) -> None:
        require_count("workers", self.workers)
        hint = "must be auto, gloo or nccl"
        require(self.backend in ("auto", "gloo", "nccl"), "backend", self.backend, hint)


@dataclass
class MeshConfig:
    replica_size: int = 1
    """Workers that share one replica, with adjacent ranks. Must divide their number."""
    strategy: Strategy = Strategy.ddp
    """What they share (replica.py). ddp: gradients. zero1: the inner optimizer's state, too.
    zero2: gradients, state and, between steps, weights. zero3: weights always."""

    def __post_init__(self) -> None:
        require_count("replica_size", self.replica_size)


@dataclass
class CommConfig:
    bucket_mb: float = 25.0
    """Largest payload of one collective, in MiB."""
    dtype: Precision = Precision.fp32
    """What travels: fp32 (fp64 where a parameter is), or half of it as bf16."""
    device: CommDevice = CommDevice.auto
    """Where a method keeps its copies of the model, and works on them. auto: beside the model.
    cpu: in the host's memory, and gloo carries them; workers may then share a GPU."""

    def __post_init__(self) -> None:
        hint = "must be a finite number of MiB above 0"
        require_number("bucket_mb", self.bucket_mb, 1e-9, hint)


@dataclass
class CheckpointConfig:
    every: int = 100
    """Steps between checkpoints; 0 saves only when the run is told to stop."""
    keep: int = 2
    """Newest checkpoints kept. With 2, a torn newest one costs no more than `every` steps."""

    def __post_init__(self) -> None:
        require(self.every >= 0, "every", self.every, "must be 0 or more steps")
        require_count("keep", self.keep)


@dataclass
class LogConfig:
    wandb: Wandb = Wandb.offline
    every: int = 10
    """Steps between lines of metrics.jsonl."""

    def __post_init__(self) -> None:
        require_count("every", self.every)


@dataclass
class DataConfig:
    root: str = "data"
    """Where data sets and token caches live."""
    path: str | None = None
    """The user's own file or folder, in place of the task's data."""
    workers: int = 0
    """Processes of each worker that load data ahead; 0 loads in the training process."""

    def __post_init__(self) -> None:
        require(self.workers >= 0, "workers", self.workers, "must be 0 or more processes")


@dataclass
class Config:
    """A whole, checked run. `method_config` and `task_config` are the chosen ones' own."""

    task: str
    method: str
    scale: str
    task_config: Any
    method_config: Any
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    data: DataConfig = field(default_factory=DataConfig)
    resume: Resume = Resume.auto
    trace: bool = False
    """Write a Chrome trace of some rounds, per worker: see co2/record/trace.py."""
    tag: str = "default"
    runs: str = "results/runs"
    """The folder of all runs; this one is `<task>/<method>/<tag>/seed<k>` in it."""


NODES: dict[str, type] = {
    "train": TrainConfig,
    "optim": OptimConfig,
    "launch": LaunchConfig,
    "mesh": MeshConfig,
    "comm": CommConfig,
    "checkpoint": CheckpointConfig,
    "log": LogConfig,
    "data": DataConfig,
}


def typed(
    cfg: DictConfig, methods: Mapping[str, Any], tasks: Mapping[str, Any], tag: str = "default"
) -> Config:
    """The composed configuration as checked objects.

    A structured root would refuse the node that a method adds, so the root stays plain and each
    node is merged into its own schema here.

    Args:
        cfg: what Hydra composed.
        methods, tasks: name to class with a `Config`.
        tag: the run's tag where `cfg.tag` is null.
    Raises:
        ConfigError: an unknown key (with the nearest known one) or a wrong value.
    """
    task, method = str(cfg.get("task")), str(cfg.get("method"))
    require(task in tasks, "task", task, nearest(task, tasks))
    require(method in methods, "method", method, nearest(method, methods))
    nodes = dict(NODES)
    nodes[task] = tasks[task].Config
    nodes[method] = methods[method].Config
    plain = {"task", "method", "scale", "resume", "trace", "tag", "runs"}
    for key in map(str, cfg):
        if key not in plain and key not in nodes:
            value = _short(cfg[key])
            if key in methods:
                hint = f"the chosen method is {method}, whose keys are {method}.*"
                raise ConfigError(key, value, hint)
            raise ConfigError(key, value, "unknown key; " + nearest(key, plain | set(nodes)))
    require(bool(cfg.get("runs")), "runs", cfg.get("runs"), "must be a folder")
    built = {name: node(cfg.get(name), schema, name) for name, schema in nodes.items()}
    resume = str(cfg.get("resume", "auto"))
    good = [choice.name for choice in Resume]
    require(resume in good, "resume", resume, f"must be one of {', '.join(good)}")
    trace = cfg.get("trace", False)
    require(isinstance(trace, bool), "trace", trace, "must be true or false")
    chosen_tag = str(cfg.tag) if cfg.get("tag") is not None else tag
    safe = chosen_tag not in ("", ".", "..") and not set(chosen_tag) & set("/\\\0")
    require(safe, "tag", chosen_tag, "must be a plain folder name")
    return Config(
        task=task,
        method=method,
        scale=str(cfg.get("scale")),
        task_config=built.pop(task),
        method_config=built.pop(method),
        resume=Resume[resume],
        trace=trace,
        tag=chosen_tag,
        runs=str(cfg.get("runs", "results/runs")),
        **built,
    )


def node(values: DictConfig | None, schema: type, name: str) -> Any:
    """One node of the configuration as an instance of its dataclass.

    Raises:
        ConfigError: with the key's full name.
    """
    given: Any = values
    try:
        if OmegaConf.is_config(values):
            given = OmegaConf.to_container(values, resolve=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or name
        raise ConfigError(key, "", str(error).splitlines()[0]) from None
    if not isinstance(given, dict):
        raise ConfigError(name, given, "must be a group of keys")
    known = {f.name: f for f in dataclasses.fields(schema)}
    merged = OmegaConf.structured(schema)
    for key in known.keys() - given.keys():
        raise ConfigError(f"{name}.{key}", "", "is missing; conf/ has a value for it, so leave it")
    for key, value in ((str(k), v) for k, v in given.items()):
        full = f"{name}.{key}"
        if key not in known and not known:
            raise ConfigError(full, _short(value), f"{name} has no keys")
        if key not in known:
            names = [f"{name}.{field}" for field in known]
            raise ConfigError(full, _short(value), "unknown key; " + nearest(full, names))
        if float in _choices(merged, key) and isinstance(value, int):
            value = float(value)
        try:
            merged[key] = value
        except OmegaConfBaseException:
            raise ConfigError(full, _short(value), _expected(merged, key)) from None
    try:
        return OmegaConf.to_object(merged)
    except ConfigError as error:
        raise error.under(name) from None


_NUMBERS = {1: "one", 2: "two", 3: "three"}


def _choices(schema: DictConfig, key: str) -> tuple[type, ...]:
    """The types of a field that takes several; else none."""
    kind = _kind(schema, key)
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if union else ()


def _kind(schema: DictConfig, key: str) -> Any:
    return schema._get_node(key)._metadata.ref_type  # type: ignore[union-attr]


def _expected(schema: DictConfig, key: str) -> str:
    """What a field of a structured config takes, in words."""
    if choices := _choices(schema, key):
        number = "a number" if float in choices else "a whole number"
        return f"must be {number} or one of the names that conf/ lists beside it"
    kind = _kind(schema, key)
    if typing.get_origin(kind) is tuple:
        return f"must be a list of {_NUMBERS[len(typing.get_args(kind))]} numbers"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"must be one of {', '.join(choice.name for choice in kind)}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return f"must be {words.get(kind, getattr(kind, '__name__', str(kind)))}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
