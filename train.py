"""Train one task under one way of keeping the replicas in step.

python train.py task=gpt2 method=co2 co2.tau=12
python train.py -m task=gpt2 method=co2 co2.tau=1,3,6,12
torchrun --nproc-per-node 2 train.py task=gpt2 method=allreduce
"""

import os
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from co2 import launch, peers
from co2.compose import preflight
from co2.config import Config, Resume, typed
from co2.console import closing_table
from co2.errors import ConfigError
from co2.loop import train
from co2.methods import METHODS, SyncMethod
from co2.record import check_folder, read_summary, tag_from
from tasks import TASKS

CONF = Path(__file__).parent / "conf"
KNOWN = {**METHODS, **peers.PEERS}


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
    make_method(config)
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
    task.setup(mesh.num_replicas)
    train(config, task, make_method(config), mesh)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    config = validate(cfg, list(HydraConfig.get().overrides.task))
    if config.resume is Resume.auto and read_summary(config):
        if launch.is_first():
            print("finished already; resume=never trains it afresh and keeps this one aside")
    else:
        status = launch.run(work, config)
        if status:
            sys.exit(status)
    summary = read_summary(config)
    assert summary is not None, "a run that ended well has a summary"
    if launch.is_first():
        print(closing_table(summary))


if __name__ == "__main__":
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach us; Hydra would print pages
    try:
        preflight(CONF, "config", sys.argv[1:], check)
    except ConfigError as error:
        sys.exit(launch.refuse(error))
    if {"-m", "--multirun"} & set(sys.argv):
        # W&B's own variable: the runs of a sweep are one group, named by its command line.
        os.environ.setdefault("WANDB_RUN_GROUP", " ".join(sys.argv[1:])[:128])
    main()
