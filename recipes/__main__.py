"""Tables from runs.

python -m recipes list                     what there is, and how much of it has run
python -m recipes run table2               what is missing; Ctrl-C, and go on later
python -m recipes collect                  finished runs → results/ours.csv, results/evals.csv
python -m recipes render                   → results/tables, results/figures, results/report.html
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from co2 import launch
from co2.errors import ConfigError, nearest, require
from recipes import cells, render, slurm
from recipes.collect import collect
from recipes.recipe import Recipe
from recipes.registry import RECIPES


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns 0; 1 when a run failed; 2 for a wrong value."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("list", "run", "collect", "render"))
    parser.add_argument("names", nargs="*", metavar="recipe", help="default: all")
    parser.add_argument("--scale", default="smoke", choices=("smoke", "gpu", "paper"))
    parser.add_argument("--seeds", help="as in 0,1,2; default: the recipe's")
    parser.add_argument("--launcher", default="local", choices=("local", "slurm"))
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(argv)
    try:
        chosen = [recipe_of(name) for name in options.names or RECIPES]
        seeds = None if options.seeds is None else [int(seed) for seed in options.seeds.split(",")]
        if options.action == "list":
            listing(chosen, options.scale)
        elif options.action == "run":
            return run(chosen, options.scale, seeds, options.launcher)
        elif options.action == "collect":
            count = collect(chosen, options.out, options.scale)
            print(f"{count} values of finished runs in {options.out}")
        else:
            render.render(list(RECIPES.values()), options.out, options.scale)
    except ConfigError as error:
        return launch.refuse(error)
    return 0


def recipe_of(name: str) -> Recipe:
    require(name in RECIPES, "recipe", name, "no such recipe; " + nearest(name, RECIPES))
    return RECIPES[name]


def listing(chosen: Sequence[Recipe], scale: str) -> None:
    """Every recipe, and how many of its runs are finished."""
    for recipe in chosen:
        runs = list(dict.fromkeys(cell for *_, cell in recipe.cells(scale)))
        done = sum(cell.summary() is not None for cell in runs)
        print(f"{recipe.name:16} {recipe.title:34} {done} of {len(runs)} runs at scale={scale}")


def run(chosen: Sequence[Recipe], scale: str, seeds: Sequence[int] | None, launcher: str) -> int:
    """Train what is missing, here or on a cluster. Returns 0, or 1 when a run failed."""
    asked = [cell for recipe in chosen for *_, cell in recipe.cells(scale, seeds)]
    if launcher == "slurm":
        return slurm.submit(asked)
    failed = cells.run(asked)
    for cell in failed:
        print(f"failed: {cell.command}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
