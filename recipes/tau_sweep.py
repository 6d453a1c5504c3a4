"""CO2 as τ changes: quality, overlap and throughput.

    make tau_sweep                                         all that is missing at scale=smoke
    python -m recipes run tau_sweep --scale paper --launcher slurm

Cost: smoke, 27 runs of a minute and a half on 2 cores, 40 minutes.
The committed values are of 480 steps of 1.3 M parameters, and stay until their runs are made again.
There perplexity is lowest at τ = 6. It rises up to τ = 96, where such a training has five rounds
(one of conf has 37), and falls again at 192, where it has two. It is high at τ = 1 as well.
"""

from collections.abc import Iterator
from pathlib import Path

from recipes import figures
from recipes.recipe import Column, Recipe, Row, Rows

TAUS = (1, 3, 6, 12, 24, 48, 96, 192)
GPT2 = ("task=gpt2",)

COLUMNS = (
    Column("perplexity", GPT2, "final.perplexity", lower=True),
    Column("overlap, %", GPT2, "overlap", factor=100, curve=False),
    Column("tokens/s", GPT2, "throughput", digits=0, curve=False),
)


def draw(ours: Rows, stem: Path) -> Iterator[Path]:
    """Draw every column over τ, with AllReduce as a dashed line."""
    for column in COLUMNS:
        found = [line for line in ours if line["column"] == column.name]
        runs = {tau: [line for line in found if line["row"] == name(tau)] for tau in TAUS}
        points = {tau: same for tau, same in runs.items() if same}
        if not points:
            continue
        path = figures.beside(stem, column.name)
        with figures.panel(path, f"CO2 on GPT-2: {column.name}") as axis:
            means = [figures.mean(same) for same in points.values()]
            spreads = [figures.spread(same) for same in points.values()]
            axis.errorbar(list(points), means, spreads, marker="o", capsize=3, label="CO2")
            without = [line for line in found if line["row"] == "AllReduce"]
            if without:
                axis.axhline(figures.mean(without), label="AllReduce", **figures.LIMIT)
            axis.set_xscale("log", base=2)
            axis.set_xticks(TAUS, [str(tau) for tau in TAUS], minor=False)
            axis.set_xlabel("τ")
            axis.set_ylabel(column.name)
        yield path


def name(tau: int) -> str:
    """The name of the row for this τ."""
    return f"CO2, τ = {tau}"


RECIPE = Recipe(
    name="tau_sweep",
    title="CO2 against τ",
    text="GPT-2 on the local network of one machine. Tokens per second of all workers.",
    rows=(
        Row("AllReduce", ("method=allreduce",)),
        *(Row(name(tau), ("method=co2", f"co2.tau={tau}")) for tau in TAUS),
    ),
    columns=COLUMNS,
    draw=draw,
    undisturbed=True,
)
