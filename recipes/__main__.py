"""Experiments: run what is missing of them, collect the values, render tables and figures.

python -m recipes list                     every recipe, and how many of its runs have finished
python -m recipes run table2               train what is missing; after Ctrl-C the same continues
python -m recipes run table2 --missing     only what results/ours.csv has no value of that stands
python -m recipes run table2 --dry-run     only print these runs, and how long they train
python -m recipes collect                  finished runs → results/{ours,runs,evals}.csv
python -m recipes render                   → results/tables, results/figures, results/report.html
python -m recipes tune gpt2 co2 slowmo     settings for a task, each method with as many trials
python -m recipes check table2             what of its values has to be made again, and why
python -m recipes again --cells 12         so many values at random made again, and compared
python -m recipes retrace gpt2             whether the code of older values trains as today's
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from co2 import program

with program.starting(__name__):
    from co2.arguments import Parser
    from co2.errors import ConfigError, nearest, require
    from co2.record import provenance
    from co2.start import launch
    from co2.start.identity import identity, is_first
    from recipes.recipe import SCALES, Recipe
    from recipes.registry import RECIPES
    from recipes.runs import (
        again,
        cells,
        check,
        functions,
        job,
        laboratory,
        measured,
        plan,
        retrace,
        slurm,
    )
    from recipes.runs.collect import collect
    from recipes.runs.known import Known
    from recipes.tables import render
    from recipes.tuning.tune import tune_methods
    from recipes.tuning.tuning import TunedRecipe
    from tasks import TASKS


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns 0; 1 when a run failed; 2 for a wrong value."""
    parser = Parser(
        prog="python -m recipes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "action",
        choices=("list", "run", "collect", "render", "tune", "check", "again", "retrace"),
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="recipe",
        help="default: all; of tune: TASK [METHOD …]; of retrace: tasks",
    )
    parser.add_argument("--scale", default="smoke", choices=SCALES)
    parser.add_argument(
        "--seeds", help="such as 0,1,2; in the laboratory, repeats; default: the recipe's own"
    )
    less = "of run: leave out runs whose values have been collected and pass check"
    parser.add_argument("--missing", action="store_true", help=less)
    dry = "of run: print the runs that are missing with the times that are known, and make none"
    parser.add_argument("--dry-run", action="store_true", help=dry)
    mixed = "of collect: take the runs of a column although their fingerprints differ"
    parser.add_argument("--mixed", action="store_true", help=mixed)
    dirty = "of run and tune: record runs although the code has changes that are not committed"
    parser.add_argument("--dirty", action="store_true", help=dirty)
    parser.add_argument("--launcher", default="local", choices=("local", "slurm"))
    parser.add_argument("--trials", type=int, default=12, help="of tune: of each method, short")
    parser.add_argument("--tau", type=int, help="of tune: τ of all methods; default: conf's")
    moments = "of tune: average the inner Adam's moments as well, in methods that can"
    parser.add_argument("--average-moments", action="store_true", help=moments)
    gap = "of tune: the gap penalty, in methods that have one; default: conf's"
    parser.add_argument("--gap-penalty", metavar="KIND", help=gap)
    parser.add_argument("--cells", type=int, help="of again: how many values; default: 12")
    parser.add_argument("--seed", type=int, help="of again: draws which; default: 0")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(argv)
    try:
        only = "is of run alone, as in: python -m recipes run table2 --dry-run"
        require(options.action == "run" or not options.dry_run, "--dry-run", options.action, only)
        for name in ("cells", "seed"):
            given = getattr(options, name)
            hint = "is of again alone; the seeds of runs are --seeds"
            require(options.action == "again" or given is None, f"--{name}", given, hint)
        if options.action == "tune":
            return tune(options)
        if options.action == "retrace":
            for name in options.names:
                require(name in TASKS, "task", name, "no such task; " + nearest(name, TASKS))
            return retrace.retrace(options.out, options.scale, options.names)
        chosen = [recipe_of(name, options.scale) for name in options.names]
        known = [recipe for recipe in RECIPES.values() if options.scale in recipe.scales]
        end = render.ending(options.scale)
        seeds = (
            None if options.seeds is None else [_seed(word) for word in options.seeds.split(",")]
        )
        if options.action == "list":
            listing(chosen or known, options.scale, options.out)
        elif options.action == "run":
            recorded = Known(options.out / "ours.csv") if options.missing else None
            if options.dry_run:
                print_plan(
                    chosen or known,
                    options.scale,
                    seeds,
                    options.launcher,
                    recorded,
                    options.out,
                )
                return 0
            provenance.require_clean(options.dirty)
            return run(chosen or known, options.scale, seeds, options.launcher, recorded)
        elif options.action == "collect":
            # By name: trials may be among those that were named, too.
            named = {one.name: one for one in (*trials_of(chosen, options.scale), *chosen)}
            here, elsewhere = collect(
                list(named.values()) or known, options.out, options.scale, options.mixed
            )
            print(f"{options.out}: {here} values from runs here, {elsewhere} from runs elsewhere")
        elif options.action == "again":
            count = 12 if options.cells is None else options.cells
            require(count >= 1, "--cells", count, "must be 1 or more")
            return again.again(
                chosen or known, options.out, options.scale, count, options.seed or 0
            )
        elif options.action == "check":
            found = check.check(chosen or known, options.out, options.scale, not chosen)
            notes = check.hardware(chosen or known, options.out, options.scale)
            print(*found, *notes, check.summary(found), sep="\n")
            return 1 if found else 0
        else:
            # The report always holds every recipe; the named ones are printed as well.
            render.render(known, options.out, options.scale)
            for recipe in chosen:
                print((options.out / "tables" / f"{recipe.name}{end}.md").read_text())
            print(f"{options.out / f'report{end}.html'}: all of it in one page")
    except ConfigError as error:
        return launch.refuse(error)
    return 0


def trials_of(chosen: Sequence[Recipe], scale: str) -> list[Recipe]:
    """The trials of the tuned ones among these recipes, where there are any at this scale."""
    found = [recipe.trials for recipe in chosen if isinstance(recipe, TunedRecipe)]
    return [trials for trials in found if scale in trials.scales]


def tune(options: argparse.Namespace) -> int:
    """Tune the methods of a task. Returns 0; 1 where nothing has won; 130 after Ctrl-C."""
    example = f"{program.python()} -m recipes tune gpt2 co2"
    require(bool(options.names), "task", "", f"name a task, as in: {example}")
    task, *methods = options.names
    try:
        return tune_methods(
            task,
            methods,
            options.trials,
            options.scale,
            options.tau,
            options.out,
            options.average_moments,
            options.gap_penalty,
            options.dirty,
        )
    except KeyboardInterrupt:
        print("stopped; the same command goes on with the next run", file=sys.stderr)
        return 130


def recipe_of(name: str, scale: str) -> Recipe:
    """The recipe of this name. Raises `ConfigError` if there is none at this scale."""
    require(name in RECIPES, "recipe", name, "no such recipe; " + nearest(name, RECIPES))
    hint = f"{name} can be run at scale={', '.join(RECIPES[name].scales)} alone"
    require(scale in RECIPES[name].scales, "--scale", scale, hint)
    return RECIPES[name]


def _seed(word: str) -> int:
    require(word.isdecimal(), "--seeds", word, "must be whole numbers, as in 0,1,2")
    return int(word)


def listing(chosen: Sequence[Recipe], scale: str, out: Path) -> None:
    """Print every recipe, how many of its runs have finished here, and its values in ours.csv."""
    lines = measured.read(out / "ours.csv")
    for recipe in chosen:
        cells = list(recipe.cells(scale))
        runs = list(dict.fromkeys(cell for *_, cell in cells))
        done = sum(cell.summary() is not None for cell in runs)
        places = {(row.name, column.name, str(seed)) for row, column, seed, _ in cells}
        own = [line for line in lines if (line["recipe"], line["scale"]) == (recipe.name, scale)]
        kept = sum((line["row"], line["column"], line["seed"]) in places for line in own)
        print(
            f"{recipe.name:20}  {recipe.title:38}  scale={scale}: {done} of {len(runs)} runs here, "
            f"{kept} of {len(cells)} values collected{_waiting(recipe, scale)}"
        )


def _waiting(recipe: Recipe, scale: str) -> str:
    """What a tuned recipe waits for."""
    places = recipe.undecided(scale)
    trials = f"{recipe.name}'s trials" if isinstance(recipe, TunedRecipe) else "recipes tune"
    return f", {places} table values wait for {trials}" if places else ""


def run(
    chosen: Sequence[Recipe],
    scale: str,
    seeds: Sequence[int] | None,
    launcher: str,
    recorded: Known | None = None,
) -> int:
    """Train what is missing, here or on a cluster. Returns 0; 1 when a run failed; 130: Ctrl-C.

    The trials of tuned recipes come first, because they decide what else there is to train.

    Args:
        recorded: values whose runs are not made again if they stand; None for no such values.
    """
    trials = trials_of(chosen, scale)
    failed: list[cells.Cell] = []
    try:
        first, rest = wanted(trials, scale, None, recorded), wanted(chosen, scale, seeds, recorded)
        job.check((*first, *rest), [recipe.name for recipe in chosen], scale)
        if launcher == "slurm":
            status = slurm.submit([c for c in (*first, *rest) if isinstance(c, cells.TrainCell)])
        else:
            laboratory.check([c for c in (*first, *rest) if isinstance(c, laboratory.LabCell)])
            failed += train(first)
            # Asked for again, because finished trials have added cells.
            failed += train(wanted(chosen, scale, seeds, recorded))
            status = 1 if failed else 0
    except KeyboardInterrupt:
        print("stopped; the same command goes on with the next run", file=sys.stderr)
        return 130
    if is_first():
        for cell in failed:
            print(f"failed: {cell.command}", file=sys.stderr)
        print_waiting(chosen, scale)
    return status


def print_plan(
    chosen: Sequence[Recipe],
    scale: str,
    seeds: Sequence[int] | None,
    launcher: str,
    recorded: Known | None,
    out: Path,
) -> None:
    """Print what `run` would make with these arguments. Writes nothing."""
    trials = wanted(trials_of(chosen, scale), scale, None, recorded)
    made = [*trials, *wanted(chosen, scale, seeds, recorded)]
    if launcher == "slurm":
        made = [cell for cell in made if isinstance(cell, cells.TrainCell)]
    for line in plan.plan(made, out):
        print(line)
    print_waiting(chosen, scale)


def print_waiting(chosen: Sequence[Recipe], scale: str) -> None:
    """Tell of the recipes that wait for their trials."""
    for recipe in chosen:
        waiting = _waiting(recipe, scale)
        if waiting:
            print(f"{recipe.name}{waiting}; the same command goes on when these have ended")


def wanted(
    chosen: Sequence[Recipe], scale: str, seeds: Sequence[int] | None, recorded: Known | None
) -> list[cells.Cell]:
    """The cells of these recipes, but for those whose values are recorded and stand. A run that
    others are held against is among them where one of these is: without it they have no value."""
    found: list[cells.Cell] = []
    for recipe in chosen:
        for row, column, seed, cell in recipe.cells(scale, seeds):
            line = recorded and recorded.find(recipe.name, row, column, scale, seed, cell)
            if line and check.stands(line, column):
                continue
            if recorded and column.of is not None:
                found.append(recipe.cell(recipe.row(column.of), column, scale, seed))
            found.append(cell)
    return found


def train(made: Sequence[cells.Cell]) -> list[cells.Cell]:
    """Make the missing runs among these cells on this machine. Returns those that failed."""
    if identity() is not None:
        return list(job.run([cell for cell in made if isinstance(cell, job.JobCell)]))
    return [
        *cells.run([cell for cell in made if isinstance(cell, cells.TrainCell)]),
        *functions.run([cell for cell in made if isinstance(cell, functions.FunctionCell)]),
        *laboratory.run([cell for cell in made if isinstance(cell, laboratory.LabCell)]),
    ]


if __name__ == "__main__":
    program.run(main)
