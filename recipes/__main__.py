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

from co2.errors import ConfigError, nearest, require
from co2.train import launch
from recipes import cells, laboratory, readme, render, slurm
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
    parser.add_argument("--seeds", help="as in 0,1,2; in the laboratory, repeats; default: 0,1,2")
    parser.add_argument("--launcher", default="local", choices=("local", "slurm"))
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(argv)
    try:
        chosen = [recipe_of(name, options.scale) for name in options.names]
        known = [recipe for recipe in RECIPES.values() if options.scale in recipe.scales]
        end = render.ending(options.scale)
        seeds = (
            None if options.seeds is None else [_seed(word) for word in options.seeds.split(",")]
        )
        if options.action == "list":
            listing(chosen or known, options.scale)
        elif options.action == "run":
            return run(chosen or known, options.scale, seeds, options.launcher)
        elif options.action == "collect":
            here, others = collect(chosen or known, options.out, options.scale)
            print(f"{here} values of finished runs here, {others} of others, in {options.out}")
        else:
            # The page holds every recipe; those that are named are shown here too.
            render.render(known, options.out, options.scale)
            page = options.out.parent / "README.md"
            if options.scale == "smoke" and page.exists():
                readme.fill(page, options.out / "ours.csv")
            for recipe in chosen:
                print((options.out / "tables" / f"{recipe.name}{end}.md").read_text())
            print(f"{options.out / f'report{end}.html'}: all of it in one page")
    except ConfigError as error:
        return launch.refuse(error)
    return 0


def recipe_of(name: str, scale: str) -> Recipe:
    require(name in RECIPES, "recipe", name, "no such recipe; " + nearest(name, RECIPES))
    hint = f"{name} can be run at scale={', '.join(RECIPES[name].scales)} alone"
    require(scale in RECIPES[name].scales, "--scale", scale, hint)
    return RECIPES[name]


def _seed(word: str) -> int:
    require(word.isdecimal(), "--seeds", word, "must be whole numbers, as in 0,1,2")
    return int(word)


def listing(chosen: Sequence[Recipe], scale: str) -> None:
    """Every recipe, and how many of its runs are finished."""
    for recipe in chosen:
        runs = list(dict.fromkeys(cell for *_, cell in recipe.cells(scale)))
        done = sum(cell.summary() is not None for cell in runs)
        print(f"{recipe.name:16} {recipe.title:34} {done} of {len(runs)} runs at scale={scale}")


def run(chosen: Sequence[Recipe], scale: str, seeds: Sequence[int] | None, launcher: str) -> int:
    """Train what is missing, here or on a cluster. Returns 0; 1 when a run failed; 130: Ctrl-C."""
    asked = [cell for recipe in chosen for *_, cell in recipe.cells(scale, seeds)]
    on_links = [cell for cell in asked if isinstance(cell, laboratory.LabCell)]
    others = [cell for cell in asked if isinstance(cell, cells.Cell)]
    if launcher == "slurm":
        return slurm.submit(others)
    laboratory.check(on_links)
    try:
        failed = [*cells.run(others), *laboratory.run(on_links)]
    except KeyboardInterrupt:
        print("stopped; the same command goes on with the next run", file=sys.stderr)
        return 130
    for cell in failed:
        print(f"failed: {cell.command}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
