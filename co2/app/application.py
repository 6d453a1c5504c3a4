"""The application: from a command line to runs, of one configuration folder and a set of tasks."""

import math
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from co2 import program
from co2.app import export, plan, probe, sample
from co2.app.compose import (
    HYDRA_ERRORS,
    SWEEP,
    Values,
    command_line,
    composed,
    key_of,
    of_the_choice,
    offer,
    plain,
    preflight,
    quoted,
    refusal,
    scored_apart,
    sweep_job,
)
from co2.app.finished import Finished, opened
from co2.app.help import described, help_text
from co2.app.schema import typed
from co2.app.tuned import with_tuned
from co2.config import Config, Resume, Validation
from co2.errors import DIVERGED, STOPPED, ConfigError, first_line, from_outside, unusable
from co2.methods import Method
from co2.methods.base import OTHERS
from co2.record import tensorboard
from co2.record.console import Outcome, closing_table, sweep_table
from co2.record.folder import check_data, check_folder, read_summary, run_folder, tag_from
from co2.record.lock import FolderLock
from co2.record.metrics import Summary
from co2.record.provenance import UNKNOWN, Origin
from co2.start import elastic, launch, placement
from co2.start.identity import identity, is_first, world_size
from co2.task import Placed, Task
from co2.train import init_from, within_replica
from co2.train.loop import train
from co2.train.run import Run
from co2.train.samples import accumulated

Checked = tuple[Config, list[str]]
"""A checked run, and the overrides that it stands for."""


@dataclass(frozen=True)
class App:
    """What `train.py` runs. An `App` can be pickled, so that workers can be given its methods."""

    conf: Path
    """Folder of Hydra's configuration, whose root is `config.yaml`."""
    tasks: Mapping[str, type[Task]]
    """What can be trained, by the names of `task=`."""
    methods: Mapping[str, type[Method]]
    """How the replicas can be kept in step, by the names of `method=`."""

    def __post_init__(self) -> None:
        offer(self.tasks, self.methods)

    def config(self, overrides: Sequence[str]) -> Config:
        """The run that these overrides stand for. Raises `ConfigError`; writes nothing."""
        return self.validate(composed(self.conf, overrides), list(overrides))

    def planned(self, overrides: Sequence[str]) -> Config:
        """The same on GPUs that need not be here."""
        return self.validate(composed(self.conf, overrides), list(overrides), True)

    def validate(self, values: Values, overrides: list[str], planned: bool = False) -> Config:
        """The composed configuration as a checked run; if `planned`, as if every worker had a GPU.
        Raises `ConfigError`; writes nothing."""
        values = of_the_choice(values, (*self.tasks, *self.methods), overrides)
        values, named_by = with_tuned(self.conf, values, overrides, self.methods)
        config = typed(_with_workers(values), self.methods, self.tasks)
        world = world_size(config.launch)
        if values.get("tag") is None:
            tag = tag_from(named_by, world, values["launch"]["workers"], config.method)
            config = replace(config, tag=tag)
        config = accumulated(config, world)
        here = placement.first_device(config)
        if not planned:
            placement.check(config)
            tensorboard.check(config)
        method = self.make_method(config)
        given: dict[str, object] = {"optim.name": config.optim.name.value, "launch.workers": world}
        if config.optim.momentum > 0:
            given["optim.momentum"] = config.optim.momentum
        if config.mesh.replica_size > 1:
            given["mesh.replica_size"] = config.mesh.replica_size
        if here.type == "cuda":
            given["launch.backend"] = config.launch.backend
        for key, value in given.items():
            method.refuse(key, value)
        within_replica.check(config, world, method, torch.device("cuda") if planned else here)
        elastic.check(config, method, identity() is not None)
        task = self.make_task(config)
        if isinstance(task, Placed):
            task.check_place(here, config.mesh.strategy)
        self._check_folder(config, method)
        return config

    def _check_folder(self, config: Config, method: Method) -> None:
        """Raise `ConfigError` for a folder with which the run cannot go on."""
        others = OTHERS not in method.refusals()
        check_folder(config, world_size(config.launch), lists=is_first(), others=others)

    def open(self, folder: str) -> Finished:
        """The finished run in a folder. Raises `ConfigError`: see `opened`."""
        return opened(self.tasks, self.methods, folder)

    def prepare_data(self, config: Config) -> None:
        """Make and check the data, and the run to start from or to go on with, once, before any
        worker starts. Raises `ConfigError`."""
        task = self.make_task(config)
        task.setup(world_size(config.launch))
        check_data(config, task.fingerprint())
        init_from.check(config, task)

    def check_memory(self, config: Config, overrides: list[str]) -> None:
        """Refuse a run that the workers' GPU cannot hold, where it is known; not at scale=smoke.
        Raises `ConfigError`."""
        usable = plan.usable_bytes(config)
        if config.scale != "smoke" and usable is not None:
            planner = plan.Planner(self.planned, self.make_task, overrides, usable)
            planner.check(config, world_size(config.launch))

    def make_task(self, config: Config) -> Task:
        """The chosen task. Nothing is read yet."""
        return self.tasks[config.task](config.task_config, config.train, config.optim, config.data)

    def make_method(self, config: Config) -> Method:
        """The chosen method. Raises `ConfigError` where it cannot be combined with `comm`."""
        return self.methods[config.method](config.method_config, config.comm)

    def work(self, config: Config, origin: Origin = UNKNOWN) -> None:
        """What every worker of a run does."""
        task = self.make_task(config)
        task.setup(world_size(config.launch))
        if config.launch.elastic:
            # Imports what would keep this worker from giving signs of life.
            task.optimizer(task.model())
        mesh = launch.mesh(config)
        if isinstance(task, Placed):
            task.check_place(mesh.device, config.mesh.strategy)  # again: now the GPU can be asked
        train(Run.open(config, task, self.make_method(config), mesh, origin))

    def run(
        self, config: Config, origin: Origin = UNKNOWN, overrides: Sequence[str] | None = None
    ) -> int:
        """One run, to its end. Returns its exit status. `overrides` are those that it stands for,
        where a person has given them."""
        program.keep_output(training=True)
        workers, world = config.launch.workers, world_size(config.launch)
        given = any(key_of(word) == "launch.workers" for word in overrides or ())
        if given and workers != world and is_first():
            text = f"launch.workers={workers} is ignored: torchrun or srun has started {world}"
            print(text, file=sys.stderr, flush=True)
        if config.resume is Resume.auto and read_summary(config):
            if is_first():
                print("finished already; resume=never trains it afresh and keeps this one aside")
        else:
            if identity() is None and config.launch.store is None:
                # Worker 0 holds the folder; this refuses one that is held before any starts.
                FolderLock.take(run_folder(config)).release()
            status = launch.run(partial(self.work, origin=origin), config)
            if status:
                return status
        if is_first():  # worker 0 wrote the summary; others may get here before that
            summary = read_summary(config)
            # Another machine's file may show here later.
            assert summary or config.launch.store, "a run that ended well has a summary"
            if summary is not None:
                print(closing_table(summary), end="")
                if overrides is not None and (command := self.next_command(config, overrides)):
                    print(f"try next: {command}")
        return 0

    def next_command(self, config: Config, overrides: Sequence[str]) -> str | None:
        """The baseline with the settings of this run, without the method's own and what the
        baseline refuses; after the baseline, a sweep of CO2's τ. None where that cannot be run."""
        own = ("method", "tag", "resume")
        words = [
            word
            for word in overrides
            if (key := key_of(word)) not in own and not key.startswith(f"{config.method}.")
        ]
        baseline = config.method == "allreduce"
        after = "method=co2" if baseline else "method=allreduce"
        while True:
            try:
                self.config([*words, after])
                break
            except ConfigError as error:
                left = [word for word in words if key_of(word) != error.key]
                if left == words:
                    return None
                words = left
        sweep = ["-m", *words, after, "co2.tau=1,3,6,12,24,48"]
        line = shlex.join(sweep if baseline else [*words, after])
        if identity() is not None:
            return f"train.py {line} (started as this run was)"
        script = self.conf.parent / "train.py"
        here = Path("train.py").resolve() == script.resolve()
        return f"{program.python()} {'train.py' if here else '-m co2 train'} {line}"

    def main(self, argv: Sequence[str]) -> int:
        """The command line of `train.py`, without the program. Returns the exit status."""
        # Hydra's own variable: its errors reach the lines below, instead of being printed by it.
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")
        commands = {
            "export": partial(export.main, self.open),
            "plan": partial(plan.main, self.planned, self.make_task),
            "probe": partial(probe.main, self.config, self.make_task),
            "sample": partial(sample.main, self.open),
        }
        command = commands.get(argv[0]) if argv else None
        try:
            if command is not None:
                return command(argv[1:])
            if argv and argv[0] == "job":  # in slurm/sweep.sbatch
                print("\n".join(sweep_job(argv[1], argv[2:])))
                return 0
            argv = scored_apart(argv)
            line = command_line(argv)
            if "--version" in line.flags:  # Hydra would print its own
                print(program.version())
                return 0
            if not {"-h", "--help"}.isdisjoint(line.flags):
                files = {
                    group: described(self.conf / group)
                    for group in ("scale", "experiment", "debug")
                }
                values = composed(self.conf, line.overrides)
                print(help_text(values, self.tasks, self.methods, files))
                return 0
            runs = preflight(self.conf, argv, lambda *job: (self.check(*job), job[1]))
            origin = Origin(shlex.join(["train.py", *argv]))
            if line.sweep:
                # W&B's own variable: the runs of a sweep are one group, named by its command line.
                words = [word for word in argv if word not in SWEEP]
                os.environ.setdefault("WANDB_RUN_GROUP", " ".join(words)[:128])
                _check_folders(runs)
            if line.through_hydra:
                sys.argv[1:] = argv = list(map(quoted, argv))  # where hydra.main reads it
                return self._through_hydra(argv, origin)
            if line.sweep:
                return self._sweep(runs, origin)
            ((config, _),) = runs
            return self.run(config, origin, line.overrides)
        except ConfigError as error:
            return launch.refuse(error)
        except HYDRA_ERRORS as error:
            return launch.refuse(refusal(error))
        except OSError as error:
            if command is None:
                raise
            return launch.refuse(unusable(error))

    def check(self, values: Values, overrides: list[str]) -> Config:
        """As `validate`, and makes and checks the data. Raises `ConfigError`."""
        try:
            config = self.validate(values, overrides)
            self.prepare_data(config)
            self.check_memory(config, overrides)
        except OSError as error:
            raise unusable(error) from None
        return config

    def _sweep(self, runs: Sequence[Checked], origin: Origin) -> int:
        """Train the runs of a sweep, one after the other. Returns the first failed run's exit
        status, or that of the one that a signal has stopped."""
        outcomes: list[Outcome] = []
        try:
            for config, overrides in runs:
                outcomes.append(self._outcome(partial(replace, config), overrides, origin))
                status = outcomes[-1].status
                if status in STOPPED or (status and identity() is not None):
                    return status
        finally:
            if outcomes and is_first():
                print(sweep_table(outcomes))
        return next((outcome.status for outcome in outcomes if outcome.status), 0)

    def _outcome(
        self, make: Callable[[], Config], overrides: Sequence[str], origin: Origin
    ) -> Outcome:
        """Make and train one run of a sweep. If it fails, no other is lost."""
        summary, validation = None, Validation.all
        try:
            config = make()
            validation = config.data.validation
            # Once more: the run before it may have made the folder.
            self._check_folder(config, self.make_method(config))
            status = self.run(config, origin)
            summary = None if status else read_summary(config)
        except ConfigError as error:
            status = launch.refuse(error)
        except Exception as error:
            status = 1
            if line := from_outside(error):
                print(f"error: {line}", file=sys.stderr, flush=True)
            else:  # a bug
                traceback.print_exc()
        return Outcome(overrides, status, summary, validation)

    def _through_hydra(self, argv: Sequence[str], origin: Origin) -> int:
        """What Hydra starts, by its launchers and sweepers, or answers itself (--cfg, --help).
        Returns the first failed run's exit status."""
        outcomes: list[Outcome] = []

        def job(composed_by_hydra: DictConfig) -> float | None:
            """Returns what a sweeper that searches makes small: see `objective`."""
            values, overrides = plain(composed_by_hydra), list(HydraConfig.get().overrides.task)
            in_sweep = _in_sweep()
            # Its data too, where a cluster may start the job later, and again.
            make = partial(self.validate if in_sweep else self.check, values, overrides)
            outcome = self._outcome(make, overrides, origin)
            if in_sweep:
                outcomes.append(outcome)
            if outcome.status in STOPPED or (outcome.status and not in_sweep):
                raise SystemExit(outcome.status)  # under a launcher's script it decides a requeue
            return objective(outcome.status, outcome.summary)

        try:
            hydra.main(version_base="1.3", config_path=str(self.conf), config_name="config")(job)()
        except ValueError:
            # A search without a trial that ended well has no best one: the table says why.
            if not outcomes or not all(outcome.status for outcome in outcomes):
                raise
        except Exception as error:
            if type(error).__name__ != "FailedJobError":  # submitit's, which is not imported
                raise
            hint = f"{first_line(error)}; hydra.launcher.partition and .account name what it wants"
            raise ConfigError("hydra/launcher", "submitit_slurm", hint) from None
        finally:
            if outcomes:
                print(sweep_table(outcomes))
        return next((outcome.status for outcome in outcomes if outcome.status), 0)


def _check_folders(runs: Sequence[Checked]) -> None:
    """Refuse a sweep of which two runs would lie in one folder. Raises `ConfigError`."""
    known: dict[Path, list[str]] = {}
    for config, overrides in runs:
        folder = run_folder(config)
        other = known.setdefault(folder, overrides)
        if other is not overrides:
            one = [word for word in other if word not in overrides]
            two = [word for word in overrides if word not in other]
            named = "a run that is given twice"
            if one or two:
                named = f"both {' '.join(one)} and {' '.join(two)}"
            hint = (
                f"would name the folder of {named}; put what differs into it: 'tag=a${{co2.tau}}'"
            )
            raise ConfigError("tag", config.tag, hint)


def objective(status: int, summary: Summary | None) -> float | None:
    """The final validation loss; infinite where training diverged; None where it failed."""
    if summary is None:
        return math.inf if status == DIVERGED else None
    loss = summary.final["loss"]
    return math.inf if loss is None else loss


def _with_workers(values: Values) -> Values:
    """The values, with a number for launch.workers=null."""
    node = values.get("launch")
    if not isinstance(node, dict) or node.get("workers", 0) is not None:
        return values
    return {**values, "launch": {**node, "workers": placement.workers_here()}}


def _in_sweep() -> bool:
    """Whether this process starts all runs of a sweep, one after the other."""
    hydra_config = HydraConfig.get()
    alone = identity() is None and hydra_config.runtime.choices["hydra/launcher"] == "basic"
    return alone and hydra_config.mode is RunMode.MULTIRUN
