"""Train one task under one way of keeping the replicas in step.

python train.py task=gpt2 method=co2 co2.tau=12
python train.py -m task=gpt2 method=co2 co2.tau=1,3,6,12
torchrun --nproc-per-node 2 train.py task=gpt2 method=allreduce
"""

import math
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from co2 import launch, peers, sharding
from co2.compose import preflight
from co2.config import Config, Resume, typed
from co2.console import Outcome, closing_table, sweep_table
from co2.errors import ConfigError
from co2.loop import train
from co2.methods import METHODS, SyncMethod
from co2.record import check_folder, read_summary, tag_from
from tasks import TASKS

CONF = Path(__file__).parent / "conf"
KNOWN = {**METHODS, **peers.PEERS}
OUTCOMES: list[Outcome] = []
"""Of the jobs of a sweep, as they end."""


def validate(cfg: DictConfig, overrides: list[str]) -> Config:
    """The composed configuration as a checked run. Raises `ConfigError`; writes nothing."""
    config = typed(cfg, KNOWN, TASKS)
    check = getattr(KNOWN[config.method], "check", None)
    if check is not None:
        check(config.optim)
    world = launch.world_size(config.launch)
    if cfg.tag is None:
        config.tag = tag_from(overrides, world, config.launch.workers, config.method)
    launch.check(config)
    peers.check(config, world)
    sharding.check(config, world, make_method(config))
    check_folder(config, world)
    return config


def check(cfg: DictConfig, overrides: list[str]) -> None:
    """`validate`, and the data too: prepared here once, before any worker starts."""
    config = validate(cfg, overrides)
    make_task(config).setup(launch.world_size(config.launch))


def make_task(config: Config) -> Any:
    return TASKS[config.task](config.task_config, config.train, config.optim, config.data)


def make_method(config: Config) -> SyncMethod:
    """Raises `ConfigError` where its knobs and those of `comm` do not go together."""
    return KNOWN[config.method](config.method_config, config.comm)


def work(config: Config) -> None:
    """What every worker runs."""
    mesh = launch.mesh(config)
    task = make_task(config)
    task.setup(mesh.num_workers)
    train(config, task, make_method(config), mesh)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float | None:
    """Returns what a sweeper that searches makes small: see `objective`."""
    overrides = list(HydraConfig.get().overrides.task)
    if not in_sweep():
        config = validate(cfg, overrides)
        status = job(config)
        if status:
            sys.exit(status)
        return objective(status, read_summary(config))
    summary = None
    try:
        config = validate(cfg, overrides)
        status = job(config)
        summary = None if status else read_summary(config)
    except ConfigError as error:  # a value that a sweeper has made up
        status = launch.refuse(error)
    except Exception:  # of this job; the others shall not suffer
        traceback.print_exc()
        status = 1
    OUTCOMES.append(Outcome(overrides, status, summary))
    if status in launch.STOPPED:
        raise SystemExit(status)
    return objective(status, summary)


def objective(status: int, summary: dict[str, Any] | None) -> float | None:
    """The final validation loss; infinite where training diverged; None where it failed."""
    if summary is None:
        return math.inf if status == launch.DIVERGED else None
    loss = summary["final"]["loss"]
    return math.inf if loss is None else loss


def job(config: Config) -> int:
    """One run, to its end; returns its exit status."""
    if config.resume is Resume.auto and read_summary(config):
        if launch.is_first():
            print("finished already; resume=never trains it afresh and keeps this one aside")
    else:
        status = launch.run(work, config)
        if status:
            return status
    if launch.is_first():  # who has written it; the others may be here before
        summary = read_summary(config)
        assert summary is not None, "a run that ended well has a summary"
        print(closing_table(summary))
    return 0


def in_sweep() -> bool:
    """Whether this process starts all jobs of a sweep, one after the other."""
    hydra_config = HydraConfig.get()
    alone = launch.identity() is None and hydra_config.runtime.choices["hydra/launcher"] == "basic"
    return alone and hydra_config.mode is RunMode.MULTIRUN


if __name__ == "__main__":
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach us; Hydra would print pages
    try:
        preflight(CONF, "config", sys.argv[1:], check)
    except ConfigError as error:
        sys.exit(launch.refuse(error))
    if {"-m", "--multirun"} & set(sys.argv):
        # W&B's own variable: the runs of a sweep are one group, named by its command line.
        words = [word for word in sys.argv[1:] if word not in ("-m", "--multirun")]
        os.environ.setdefault("WANDB_RUN_GROUP", " ".join(words)[:128])
    try:
        main()
    except ValueError:
        # A search without a trial that ended well has no best one: the table says why.
        if not OUTCOMES or not all(outcome.status for outcome in OUTCOMES):
            raise
    finally:
        if OUTCOMES:
            print(sweep_table(OUTCOMES))
    sys.exit(next((outcome.status for outcome in OUTCOMES if outcome.status), 0))
