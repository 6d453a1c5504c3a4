"""`train.global_batch`: the same training on any number of workers.

Every worker draws samples of its own, also those that share a replica. So a step of the whole run
has batch_size × accumulate × workers samples. A recipe names that product, and `accumulate` follows
from it once the number of workers is known.
"""

from dataclasses import replace

from co2.config import Config, Resume, TrainConfig
from co2.errors import require
from co2.record.folder import begun, run_folder


def accumulated(config: Config, workers: int) -> Config:
    """The run on so many workers: with `train.global_batch` it has the `train.accumulate` that
    follows. An elastic run on several machines does not know its workers yet, and keeps 1.

    Raises:
        ConfigError: both keys are given, or the workers' micro-batches do not divide
            `train.global_batch`. An elastic run that goes on rounds instead: its replicas come and
            go.
    """
    train, launch = config.train, config.launch
    if train.global_batch is None:
        return config
    hint = f"follows from train.global_batch={train.global_batch}; give one of the two"
    require(train.accumulate == 1, "train.accumulate", train.accumulate, hint)
    if launch.store is not None:
        return config
    goes_on = config.resume is Resume.auto and begun(run_folder(config))
    if not (launch.elastic and goes_on):
        divides = train.global_batch % (train.batch_size * workers) == 0
        hint = "" if divides else _mend(train, train.global_batch, workers)
        require(divides, "train.global_batch", train.global_batch, hint)
    return replace(config, train=replace(train, accumulate=train.micro_batches(workers)))


def _mend(train: TrainConfig, wanted: int, workers: int) -> str:
    """What divides: the three nearest global batches of these micro-batches; and the micro-batch,
    not above this one, with which `wanted` divides, or else what is nearest to it."""
    at_once = train.batch_size * workers
    times = wanted // at_once
    multiples = [at_once * number for number in range(max(1, times - 1), times + 4)]
    low, middle, high = sorted(sorted(multiples, key=lambda size: abs(size - wanted))[:3])
    hint = (
        f"is no multiple of the {at_once} samples that {workers} workers draw at once "
        f"(train.batch_size={train.batch_size} each); use {low}, {middle} or {high}"
    )
    share = max(1, round(wanted / workers))
    sizes = range(1, min(train.batch_size, share) + 1)
    other = f"train.batch_size={max(size for size in sizes if share % size == 0)}"
    if share * workers in (low, middle, high):
        return hint
    if share * workers != wanted:
        other = f"train.global_batch={share * workers} {other}"
    return f"{hint}, or {other}"
