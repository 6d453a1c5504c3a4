"""The schemas of a run: dataclasses that check their own limits.

They need the standard library alone, so that a training loop of one's own can use them. The schemas
of tasks and methods are `TASKS[name].Config` and `METHODS[name].Config`. `co2/app/schema.py` makes
all of them from composed YAML.
"""

import os
import re
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum, auto
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar

from co2.errors import require
from co2.gpus import known_gpu
from co2.limits import (
    Amount,
    Count,
    Decay,
    Inside,
    Limited,
    PartShare,
    Positive,
    Range,
    Seconds,
    Share,
    Steps,
    Whole,
)

LONGEST_NAME = 200
"""Bytes of a folder's name. File systems allow 255."""


class Blocking(StrEnum):
    """What the computation of a replica waits for."""

    always = auto()
    """Every collective: a replica stands still until it is over."""
    beyond_delay = auto()
    """A collective that takes longer than a whole round, or than `delay` steps."""
    never = auto()
    """Nothing, because nothing is communicated: the limit of what any method can reach."""


Patience = Annotated[float, Range(0.5, unit="seconds")]
Precision = StrEnum("Precision", ["fp32", "bf16"])
Schedule = StrEnum("Schedule", ["cosine", "poly", "constant", "exponential", "step"])
Optimizer = StrEnum("Optimizer", ["sgd", "adamw", "muon"])
Validation = StrEnum("Validation", ["all", "report", "tuning"])
Strategy = StrEnum("Strategy", ["ddp", "zero1", "zero2", "zero3", "ep"])
Resume = StrEnum("Resume", ["auto", "never"])
CommDevice = StrEnum("CommDevice", ["auto", "cpu"])


class Wandb(StrEnum):
    offline = "offline"
    online = "online"
    disabled = "disabled"


@dataclass
class TrainConfig(Limited):
    steps: Count = 100
    """Optimizer steps of every replica."""
    seed: Annotated[int, Range(0, 2**32, below=True)] = 0
    """Seed of the initial weights, the data order and dropout."""
    batch_size: Count = 8
    """Samples in one micro-batch of one worker."""
    accumulate: Count = 1
    """Micro-batches of one worker whose gradients make one step; follows from `global_batch`."""
    global_batch: Count | None = None
    """Samples in one step of the whole run. `accumulate` follows from it and the number of workers
    (co2/train/samples.py). null: batch_size × accumulate on each worker."""
    precision: Precision = Precision.fp32
    """With bf16, forward pass and loss run under autocast; weights and outer state stay fp32."""
    compile: bool = False
    """Whether the model is compiled with torch.compile."""
    deterministic: bool = False
    """Whether operations on GPUs, too, have the same bits in every run. It is slower there, and
    PyTorch warns of operations that it cannot repeat."""
    checkpoint_activations: bool = False
    """Whether only the inputs of the model's blocks are kept, and the backward pass computes the
    rest again: less memory for about a third more computation."""
    clip_norm: Positive | None = None
    """Norm to which larger gradients are scaled down; null leaves gradients as they are."""
    ema_decay: Inside | None = None
    """Decay of an exponential moving average of the weights, which is evaluated beside them
    (co2/train/moving_average.py); null for none."""
    eval_every: Count = 100
    """Steps between evaluations of the consensus. The last step is always evaluated."""

    def micro_batches(self, workers: int) -> int:
        """Micro-batches of a step on each of so many workers. With `global_batch`, the number that
        comes nearest to it, and at least one."""
        if self.global_batch is None:
            return self.accumulate
        return max(1, round(self.global_batch / (self.batch_size * workers)))


@dataclass
class OptimConfig(Limited):
    name: Optimizer = Optimizer.adamw
    """muon: Muon for the hidden matrices, AdamW for embeddings, head, convolutions, norms and
    biases (tasks/shared/optimizer.py)."""
    lr: Amount = 1e-3
    """Peak learning rate of the inner optimizer."""
    weight_decay: Amount = 0.0
    """Decay of matrices. Parameters of one dimension, such as biases and norms, do not decay."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Of AdamW, also of the one beside Muon."""
    eps: Amount = 1e-8
    """Of AdamW: what its denominator has at least."""
    momentum: Decay = 0.9
    """Momentum of SGD. AdamW has none, and Muon's is 0.95 in Nesterov's form, its authors'."""
    nesterov: bool = False
    """Whether SGD uses Nesterov's form of momentum."""
    schedule: Schedule = Schedule.cosine
    """cosine and poly end at min_lr_ratio; constant stays; exponential and step fall in stairs
    (co2/train/schedule.py)."""
    power: Amount = 1.0
    """Exponent of the schedule poly; 1 is a straight line."""
    decay_rate: PartShare = 0.99
    """Factor of one stair of the schedule exponential."""
    decay_every: Count | None = None
    """Steps of one stair of the schedule exponential, counted from the end of the warm-up; null
    with any other schedule."""
    gamma: PartShare = 0.1
    """Factor of one stair of the schedule step."""
    milestones: tuple[int, ...] = ()
    """Steps at which a stair of the schedule step begins, counted from 0, the warm-up included;
    empty with any other schedule."""
    warmup_steps: Steps = 0
    """Steps in which the learning rate rises linearly, from lr / warmup_steps to lr."""
    min_lr_ratio: Share = 0.0
    """Learning rate at the end of the schedules cosine and poly, as a share of lr."""

    def __post_init__(self) -> None:
        super().__post_init__()
        hint = "needs optim.momentum above 0"
        require(not self.nesterov or self.momentum > 0, "nesterov", self.nesterov, hint)
        schedule = f"schedule={self.schedule.value}"
        if self.schedule is Schedule.exponential:
            given = "null" if self.decay_every is None else self.decay_every
            hint = f"{schedule} needs a whole number of steps, 1 or more"
            require((self.decay_every or 0) >= 1, "decay_every", given, hint)
        else:
            hint = f"{schedule} has none; use null, or schedule=exponential"
            require(self.decay_every is None, "decay_every", self.decay_every, hint)
        if self.schedule is Schedule.step:
            steps = (max(0, self.warmup_steps - 1), *self.milestones)
            good = len(steps) > 1 and all(early < late for early, late in pairwise(steps))
            hint = f"{schedule} needs rising steps, none of them in the warm-up, such as [30, 60]"
        else:
            good = not self.milestones
            hint = f"{schedule} has none; use [], or schedule=step"
        require(good, "milestones", list(self.milestones), hint)


@dataclass
class LaunchConfig(Limited):
    workers: Count = 2
    """Local workers that train.py starts; null stands for one on each GPU, or 2 without GPUs. Under
    torchrun or srun, the number that those start counts."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """auto trains on GPUs under nccl where there is any, with comm.device=cpu under gloo, and else
    on the CPU under gloo. Workers of one machine share GPUs where there are fewer; elastic ones do
    with comm.device=cpu alone. gloo trains on the CPU, whatever GPUs there are. nccl trains on
    GPUs, one for each worker."""
    gpu: str | None = None
    """The workers' GPU, where this machine has none: a run that its memory cannot hold is refused
    before it is queued. A name of co2/gpus.py; null: nothing is checked."""
    elastic: bool = False
    """Whether replicas may be lost and come back while the others train on (docs/elastic.md)."""
    min_replicas: Count = 1
    """With fewer replicas than these an elastic run saves and waits."""
    wait_s: Patience = 600.0
    """How long it waits for more, in seconds, before it ends to be started again."""
    silent_s: Patience = 10.0
    """Seconds without a sign of life after which a replica counts as lost."""
    restarts: Whole = 0
    """How many lost replicas an elastic run starts again, on each machine."""
    quorum: Count | None = None
    """With K, an elastic run goes at the pace of its K-th fastest replica: slower ones make fewer
    steps of a round (co2/elastic/quorum.py). null: all make all."""
    store: str | None = None
    """Of an elastic run on several machines: host:port of `python -m co2.elastic.store`."""

    @property
    def store_address(self) -> tuple[str, int]:
        """Host and port of `store`."""
        host, _, port = (self.store or "").rpartition(":")
        return host.strip("[]"), int(port)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gpu is not None:
            known_gpu("gpu", self.gpu)
        hint = f"must be at most launch.workers, which is {self.workers}"
        for name, number in {"min_replicas": self.min_replicas, "quorum": self.quorum}.items():
            good = number is None or number <= self.workers or self.store is not None
            require(good, name, number, hint)
        if self.store is not None:
            good = re.fullmatch(r".+:\d{1,5}", self.store) is not None
            require(good, "store", self.store, "must be host:port, such as node1:29400")
            hint = "only an elastic run has one; set launch.elastic=true"
            require(self.elastic, "store", self.store, hint)


@dataclass
class MeshConfig(Limited):
    replica_size: Count = 1
    """Workers of adjacent ranks that share one replica. It must divide the number of workers."""
    strategy: Strategy = Strategy.ddp
    """What the workers of a replica share (co2/train/within_replica.py). ddp: gradients. zero1:
    also the inner optimizer's state. zero2: gradients, state and, between steps, weights. zero3:
    also the weights within a step. ep: as ddp, and each worker has its part of the experts."""
    sync_batch_norm: bool = False
    """Whether batch norm takes its statistics over the workers of a replica, which then wait for
    each other in every such layer; on GPUs only."""


@dataclass
class CommConfig(Limited):
    bucket_mb: Annotated[float, Range(0, above=True, unit="MiB")] = 25.0
    """Largest payload of one collective, in MiB."""
    max_ctas: Count | None = None
    """On GPUs: thread blocks that NCCL takes for a mean at most, which computation beside it does
    without. Fewer leave more to the computation, and the mean takes longer. null: NCCL's choice."""
    dtype: Precision = Precision.fp32
    """Type of what travels: fp32 (fp64 for fp64 parameters), or bf16, which is half the bytes."""
    device: CommDevice = CommDevice.auto
    """Where a method keeps its copies of the model and computes with them. auto: on the model's
    device. cpu: in the host's memory, from which gloo sends them; workers may then share a GPU."""
    find_unused_parameters: bool = False
    """Whether DDP looks in every step for parameters that took no part in the loss, which takes
    time. Without it, a model that has such parameters stops with an error. Of allreduce, and of
    replicas of several workers."""


@dataclass
class CheckpointConfig(Limited):
    every: Steps = 100
    """Steps between checkpoints. With 0 and no `every_s`, a run saves only when a signal stops
    it."""
    every_s: Annotated[float, Range(0, above=True, unit="seconds")] | None = None
    """Seconds between checkpoints, about, beside those of `every`; null for none."""
    keep: Count = 2
    """How many of the newest are kept. With 2, a damaged one costs at most `every` steps."""
    model: bool = True
    """Whether the final weights are kept in model.pt, which exports and other runs read."""
    grace_s: Seconds = 60.0
    """Seconds for which a run that is told to stop waits for a worker that does not answer, before
    it ends without saving. As many as pass between the signal and the loss of the machine."""


@dataclass
class LogConfig(Limited):
    wandb: Wandb = Wandb.offline
    """Whether W&B records the run in its folder, on its server, or not at all."""
    tensorboard: bool = False
    """Whether the figures of metrics.jsonl are also written as event files of TensorBoard."""
    every: Count = 10
    """Steps between lines of metrics.jsonl."""


AnyPath = TypeVar("AnyPath", str, str | None)


def at_home(path: AnyPath) -> AnyPath:
    """A path with the home folder in place of ~, which no shell expands amid a word."""
    return path if path is None else os.path.expanduser(path)


@dataclass
class DataConfig(Limited):
    root: str = "data"
    """Folder of data sets and token caches, relative to the current one."""
    path: str | None = None
    """A file or folder of the user's own, in place of the task's data; null for none."""
    workers: Annotated[int, Range(0, 512, unit="processes")] = 0
    """Processes per worker that load data ahead; with 0, the training process loads."""
    validation: Validation = Validation.all
    """Which validation samples an evaluation takes. report and tuning are halves without a common
    sample, the same for every seed: settings are chosen on one and reported on the other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.root, self.path = at_home(self.root), at_home(self.path)
        require(self.root.strip() != "", "root", self.root, "must be a folder")


@dataclass
class Config(Limited):
    """A whole run. `task_config` and `method_config` are the chosen task's and method's own."""

    task: str
    method: str
    scale: str
    task_config: Any  # the tasks' schemas have nothing in common but being dataclasses
    method_config: Any
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    data: DataConfig = field(default_factory=DataConfig)
    init_from: str | None = None
    """Folder of a finished run, from whose consensus this run starts, or of an exported model; null
    starts from new weights."""
    resume: Resume = Resume.auto
    """auto goes on from the newest good checkpoint of the run's folder. never trains afresh and
    puts what is there aside."""
    trace: bool = False
    """Whether every worker writes a Chrome trace of some rounds: see co2/record/trace.py."""
    tag: str = "default"
    """Name of this variant, a part of its folder's path; null stands for the overrides that
    matter."""
    runs: str = "results/runs"
    """Folder of all runs. This run's is `<task>/<method>/<tag>/seed<k>` in it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.runs, self.init_from = at_home(self.runs), at_home(self.init_from)
        limited, hint = self.comm.max_ctas is not None, "elastic runs have none; use null"
        good = not (limited and self.launch.elastic)
        require(good, "comm.max_ctas", self.comm.max_ctas, hint)
        plain = self.tag.strip() not in ("", ".", "..") and not set(self.tag) & set("/\\")
        good = plain and self.tag.isprintable() and len(os.fsencode(self.tag)) <= LONGEST_NAME
        hint = f"must be a plain folder name of {LONGEST_NAME} bytes at most"
        require(good, "tag", self.tag, hint)
        require(bool(self.runs) and self.runs.isprintable(), "runs", self.runs, "must be a folder")
        hint = "must be the folder of a finished run, or null"
        require(self.init_from != "", "init_from", self.init_from, hint)


NODES: dict[str, type] = {
    own.name: own.default_factory  # type: ignore[misc]
    for own in fields(Config)
    if own.default_factory is not MISSING
}
"""The groups of keys that every run has, and their schemas."""
