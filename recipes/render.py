"""results/tables (Markdown, LaTeX, CSV), results/figures, results/report.html: from CSV files."""

import csv
from collections.abc import Sequence
from pathlib import Path

from recipes import figures, report, table
from recipes.collect import read
from recipes.recipe import Recipe
from recipes.table import HEAD


def render(recipes: Sequence[Recipe], out: Path, scale: str) -> None:
    """Tables and figures of these recipes, and the page that has them all."""
    ours, evals = read(out / "ours.csv"), read(out / "evals.csv")
    paper = read(out / "paper.csv")
    sections = []
    for recipe in recipes:
        found = table.entries(recipe, ours, paper, scale)
        source = origin(recipe, ours, scale)
        stem = out / "tables" / (recipe.name if scale == "smoke" else f"{recipe.name}_{scale}")
        stem.parent.mkdir(parents=True, exist_ok=True)
        title = f"{recipe.title} (scale={scale})"
        text = (
            f"# {title}\n\n{recipe.text} {notes(recipe)}\n\n{table.markdown(found)}\n\n{source}\n"
        )
        stem.with_suffix(".md").write_text(text)
        stem.with_suffix(".tex").write_text(table.latex(found, f"{title}. {recipe.text}") + "\n")
        with stem.with_suffix(".csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(HEAD)
            writer.writerows(table.lines(found))
        drawn = figures.draw(recipe, ours, evals, scale, out / "figures")
        sections.append(
            report.Section(
                recipe.name, title, f"{recipe.text} {notes(recipe)}", found, drawn, source
            )
        )
        print(f"{title}\n\n{table.markdown(found)}\n")
    report.write(out / "report.html", sections)
    print(f"{out / 'report.html'}: all of it in one page")


def notes(recipe: Recipe) -> str:
    return (
        "Measured here: mean ± standard deviation over the seeds, bold where the best interval "
        f"overlaps no other; p: paired t-test over the seeds against {recipe.rows[0].name}. Paper: "
        "results/paper.csv, at the paper's own scale."
    )


def origin(recipe: Recipe, ours: Sequence[dict[str, str]], scale: str) -> str:
    """Commits and hardware of the runs behind a table. A table of several commits says so."""
    mine = [row for row in ours if row["recipe"] == recipe.name and row["scale"] == scale]
    if not mine:
        return f"Nothing has run: `python -m recipes run {recipe.name} --scale {scale}`."
    commits = sorted({row["commit"] for row in mine})
    machines = sorted({row["hardware"] for row in mine})
    mixed = ", a mixture" if len(commits) > 1 else ""
    return (
        f"{len({row['folder'] for row in mine})} runs: results/ours.csv has folder and command of "
        f"each. Commit {', '.join(commits)}{mixed}. Hardware: {', '.join(machines)}. Again: "
        f"`python -m recipes run {recipe.name} --scale {scale}`."
    )
