"""How each command that a page shows is checked, without the work that it would do.

What parses arguments is what would parse them: Hydra's composition and train.py's own checks,
torchrun's parser, a module's `main` as far as its parser, make without its recipes.
"""

import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch.distributed.run import get_args_parser

import train
from co2.__main__ import COMMANDS
from co2.app.compose import preflight
from co2.config import Config
from co2.errors import ConfigError
from co2.methods import METHODS
from co2_measure.lab.plan import plan
from co2_measure.lab.training import trial_overrides
from co2_measure.lab.trial import LIMIT
from co2_measure.peers import base as peers
from co2_measure.simulate import __main__ as simulate
from recipes.registry import RECIPES
from recipes.rehearse import __main__ as rehearse
from tasks import TASKS
from tests.cli.harness import ROOT
from tests.grids import OF_A_KIND, nonempty

OURS = ("co2", "co2_measure", "recipes", "benchmarks", "tasks", "tests")
"""Packages whose modules are commands."""
NAMES = {"NAME": "imagenet"}
"""What a page puts in a name's place, and one that it stands for."""
NOT_RUN = {
    "scancel": "ends a job of a cluster; tests/slurm has one",
    "tensorboard": "shows event files in a browser",
    "wandb": "sends to W&B, with an account",
}
"""Programs whose arguments are not checked, with the reason."""
ELSEWHERE = {"method=easgd": "tests/docs/test_add_pages.py"}
"""What a page makes, and the test that makes it and checks the commands with it."""
ASKS = ("--help", "--cfg", "--info")
"""Options of train.py which Hydra answers itself, whatever else is given."""
NO_ARGUMENTS = ("examples/own_loop.py",)
"""Scripts; tests/engine/test_replicas.py and tests/integrations/test_examples.py run them."""


class NotInstalled(Exception):
    """A command needs an extra that is not here."""


def check(command: str) -> None:
    """Raises an `AssertionError`, a `ConfigError` or a `SystemExit` for what cannot be run, and
    `NotInstalled`."""
    words = shlex.split(command)
    if any(word in ELSEWHERE for word in words):
        return
    while words[0] == "sudo" or re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    program = words[0].removeprefix(".venv/bin/")
    if program in NOT_RUN:
        return
    assert program in CHECKS, f"nothing in {Path(__file__).name} checks {program}"
    CHECKS[program](words[1:])


def python(arguments: list[str]) -> None:
    if arguments[0] != "-m":
        script(arguments[0], arguments[1:])
    elif arguments[1] == "co2":
        co2_command(arguments[2:])
    else:
        module(arguments[1], arguments[2:])


def script(path: str, arguments: list[str], world: int | None = None) -> None:
    if path == "train.py":
        trains(arguments, world)
    else:
        assert path in NO_ARGUMENTS and (ROOT / path).exists(), f"nothing checks {path}"
        assert not arguments


def trains(arguments: list[str], world: int | None = None) -> list[Config]:
    """The runs of a command line of train.py, composed and checked as it does before it starts.

    Args:
        world: workers that somebody else starts; None: train.py itself.
    """
    place = {"RANK": "0", "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    runs: list[Config] = []
    # Whether an extra is installed here says nothing about the page.
    with patch.dict(os.environ, place if world else {}), patch.object(peers, "find_spec", str):
        try:
            preflight(train.APP.conf, arguments, lambda *job: runs.append(train.APP.validate(*job)))
        except ConfigError as error:
            if "pip install" in str(error):
                raise NotInstalled(str(error)) from None
            raise
    assert runs or set(arguments) & set(ASKS), "starts nothing"
    return runs


def torchrun(arguments: list[str]) -> None:
    options = get_args_parser().parse_args(arguments)
    world = int(options.nproc_per_node) * int(options.nnodes.partition(":")[0])
    if options.module:
        python(["-m", options.training_script, *options.training_script_args])
        return
    script(options.training_script, options.training_script_args, world)


def source(arguments: list[str]) -> None:
    assert arguments == [".venv/bin/activate"]


def srun(arguments: list[str]) -> None:
    at = arguments.index("python")
    check(shlex.join(arguments[at:]))


def sbatch(arguments: list[str]) -> None:
    at = next(n for n, word in enumerate(arguments) if not word.startswith("-"))
    path, given = arguments[at], dict(word.partition("=")[::2] for word in arguments[:at])
    assert (ROOT / path).exists()
    if path == "slurm/sweep.sbatch":
        runs = trains(["-m", *arguments[at + 1 :]])
        assert given["--array"].partition("%")[0] == f"0-{len(runs) - 1}"
        return
    if path == "slurm/elastic.sbatch":
        assert "--array" in given
        trains(["launch.elastic=true", "launch.store=node1:29400", *arguments[at + 1 :]])
        return
    if path == "slurm/worlds.sbatch":
        module("recipes", ["run", *arguments[at + 1 :]])
        return
    assert path == "slurm/train.sbatch"
    tasks = int(given.get("--ntasks-per-node", 2)) * int(given.get("--nodes", 1))
    trains(arguments[at + 1 :], tasks)


def dry_run(*arguments: str) -> list[str]:
    """The lines that `make` would run."""
    outer = re.compile("MAKE|ARGS$")  # of a make that runs these tests
    env = {name: value for name, value in os.environ.items() if not outer.match(name)}
    words = ["make", "--dry-run", "--no-print-directory", *arguments]
    ended = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def make(arguments: list[str]) -> None:
    """The targets are there, and what they run of ours is as good as if a page had it."""
    ours = re.compile(rf"\.venv/bin/python (train\.py|-m ({'|'.join(OURS)})\b)")
    for line in re.split(r"[;&|\n\\]+", "\n".join(dry_run(*arguments))):
        if ours.match(line.strip()):
            check(line)


def pip(arguments: list[str]) -> None:
    """An installation of this repository, with extras that it has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = re.fullmatch(r"install (?:-e )?\.(?:\[(.*)\])?", " ".join(arguments))
    assert found
    assert set((found[1] or "dev").split(",")) <= project["optional-dependencies"].keys()


def co2_command(arguments: list[str]) -> None:
    """The installed command: each of its words stands for a module."""
    if arguments == ["--help"]:
        return
    assert arguments[0] in COMMANDS, f"co2 has no command {arguments[0]}"
    name, *own = COMMANDS[arguments[0]][0].split()
    if own:
        parsed = _parsed(name, [*own, *arguments[1:]], train.APP.main)
        if parsed is not None and arguments[0] in ("plan", "probe"):
            trains(parsed.rest)
        elif parsed is not None:
            nothing_left(parsed.options, parsed.rest)
    elif name == "train":
        trains(arguments[1:])
    else:
        module(name, arguments[1:])


def module(name: str, arguments: list[str]) -> None:
    assert name.partition(".")[0] in OURS, f"nothing checks python -m {name}"
    if name in ("co2.lab", "co2.simulate"):  # only start what stands beside the library
        name = name.replace("co2.", "co2_measure.")
    if (ROOT / name.replace(".", "/")).is_dir():
        name += ".__main__"
    main = importlib.import_module(name).main
    words = [NAMES.get(word, word) for word in arguments]
    if main is rehearse.main:
        rehearses(words)
        return
    parsed = _parsed(name, words, lambda _: main())
    if parsed is not None:
        MEANS.get(name, nothing_left)(parsed.options, parsed.rest)


def _parsed(
    name: str, arguments: list[str], main: Callable[[list[str]], object]
) -> "Parsed | None":
    """What a program makes of its arguments; None where they ask for its help."""
    with patch.object(sys, "argv", [name, *arguments]), _stopped_after_parsing():
        try:
            main(arguments)
        except Parsed as parsed:
            return parsed
        except SystemExit as ended:
            if ended.code:
                raise
            return None
    raise AssertionError(f"{name} parses nothing")


class Parsed(Exception):
    """A command line was parsed; `rest` is what the parser does not know."""

    def __init__(self, options: Namespace, rest: list[str]) -> None:
        super().__init__(options, rest)
        self.options, self.rest = options, rest


def _stopped_after_parsing() -> Any:
    original, depth = ArgumentParser.parse_known_args, 0

    def parse(parser: ArgumentParser, *arguments: Any) -> Any:
        nonlocal depth
        depth += 1  # a sub-command has a parser of its own
        result = original(parser, *arguments)
        depth -= 1
        if depth == 0:
            raise Parsed(*result)
        return result

    return patch.object(ArgumentParser, "parse_known_args", parse)


def nothing_left(options: Namespace, rest: list[str]) -> None:
    assert not rest, f"unknown: {rest}"


def lab_means(options: Namespace, overrides: list[str]) -> None:
    with patch.object(peers, "find_spec", str):
        trials, _ = plan(options)
    methods = {trial.method for trial in trials} - {LIMIT}
    if len(methods) > len(OF_A_KIND):  # nearly all: one of each kind, and those that have own keys
        methods &= {*OF_A_KIND, *(word.partition(".")[0] for word in overrides)}
    for method in nonempty(methods):
        trains(trial_overrides(method, overrides))


def simulate_means(options: Namespace, rest: list[str]) -> None:
    nothing_left(options, rest)
    simulate.Options(options)


def rehearses(words: list[str]) -> None:
    """It has no parser, and would train."""
    with patch.object(rehearse, "_rows", return_value=[]), patch.object(rehearse, "write"):
        assert rehearse.main(words) == 0


def durations_mean(options: Namespace, arguments: list[str]) -> None:
    """What is left is pytest's, such as files."""
    assert all((ROOT / word).exists() for word in arguments if "/" in word)


def recipes_mean(options: Namespace, rest: list[str]) -> None:
    nothing_left(options, rest)
    if options.action == "tune":
        task, *methods = options.names
        assert task in TASKS and set(methods) <= METHODS.keys()
        return
    assert set(options.names) <= (TASKS if options.action == "retrace" else RECIPES).keys()
    assert all(seed.isdigit() for seed in (options.seeds or "0").split(","))


MEANS: dict[str, Callable[[Namespace, list[str]], None]] = {
    "co2_measure.lab.__main__": lab_means,
    "co2_measure.simulate.__main__": simulate_means,
    "recipes.__main__": recipes_mean,
    "tests.durations": durations_mean,
}
"""Of modules: what more must hold of arguments that have been parsed."""
CHECKS: dict[str, Callable[[list[str]], None]] = {
    "co2": co2_command,
    "make": make,
    "pip": pip,
    "python": python,
    "sbatch": sbatch,
    "source": source,
    "srun": srun,
    "torchrun": torchrun,
}
PROGRAMS = {*CHECKS, *NOT_RUN, "sudo", ".venv/bin/python"}
