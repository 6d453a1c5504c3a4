"""The exchange of tokens between workers that share experts: padded in one piece, and in tiles.

    sudo .venv/bin/python -m recipes run moe               in the laboratory

Cost: 105 trainings of 10 to 60 seconds on 2 cores, three quarters of an hour.
Found (results/tables/moe.md): tiles carry a third of the bytes and hide most of their exchange;
without a limit on the links three repeats show no gain.
"""

from collections.abc import Iterator
from functools import partial

from co2.record.table import Table
from recipes.recipe import Column, Recipe, Row, Rows
from recipes.runs.cells import SummaryJSON
from recipes.runs.laboratory import LabColumn
from recipes.tables.entries import by_seed, median_ratio
from recipes.tables.methods import LIMIT

RATES = {2: ("100", "250", "500", "unlimited"), 4: ("100", "500", "unlimited")}
"""Of the links, by the number of workers. At 250 the exchange takes two workers about as long as
what they compute."""
STEPS = 60
EXCHANGES = ("bulk", "tiled")
NAMES = {"AllReduce": "allreduce", "CO2": "co2"}
STEP = "step, ms"
SHARED = ("mesh.replica_size=2", "mesh.strategy=ep")
ROWS = tuple(
    Row(
        f"{exchange}, {name}",
        (f"method={method}", *SHARED, f"moe.exchange={exchange}"),
    )
    for name, method in NAMES.items()
    for exchange in EXCHANGES
)


def step_ms(summary: SummaryJSON) -> float:
    """Milliseconds of a step."""
    return 1e3 * float(summary["train_s"]) / float(summary["steps"])


def exposed_ms(summary: SummaryJSON) -> float | None:
    """Milliseconds of a step in which computation stood still for tokens."""
    exchange = summary.get("exchange")
    return 1e3 * float(exchange["exposed_s"]) / float(summary["steps"]) if exchange else None


def hidden(summary: SummaryJSON) -> float | None:
    """What was hidden, at most as much as the experts' computation could hide, as a share of that:
    the exchange or the computation, whichever is shorter. None where nothing was computed
    meanwhile."""
    exchange = summary.get("exchange")
    if not exchange or not exchange["behind_s"]:
        return None
    comm_s, behind_s = float(exchange["comm_s"]), float(exchange["behind_s"])
    share = (comm_s - float(exchange["exposed_s"])) / min(comm_s, behind_s)
    return min(max(share, 0.0), 1.0)


def kilobytes(summary: SummaryJSON) -> float | None:
    """Of tokens that a worker sends in a step."""
    exchange = summary.get("exchange")
    return float(exchange["bytes_per_step"]) / 1e3 if exchange else None


def columns(workers: int, mbit: str) -> tuple[Column, ...]:
    """Of one kind of link."""
    links = (f"--workers={workers}", f"--mbit={mbit}")
    length = (f"train.steps={STEPS}", f"train.eval_every={STEPS}", "optim.warmup_steps=6")
    words = (*links, "task=moe", *length, "checkpoint.every=0")
    link = mbit if mbit == "unlimited" else f"{mbit} Mbit/s"
    part = f"{workers} workers, {link}"
    bulk = tuple(row.name for row in ROWS if "moe.exchange=bulk" in row.overrides)
    column = partial(LabColumn, curve=False, part=part)
    alone = (LIMIT.name,)
    return (
        column(f"{part}: {STEP}", words, step_ms, True, digits=1),
        column(f"{part}: exposed exchange, ms", words, exposed_ms, True, digits=1, without=alone),
        column(f"{part}: hidden share", words, hidden, without=(*alone, *bulk)),
        column(f"{part}: tokens, kB", words, kilobytes, True, digits=0, without=alone),
    )


def goals(ours: Rows, _: Rows) -> Iterator[Table]:
    """How many times as long steps are as with tiles, and as shares of the limit."""
    values = by_seed(ours)

    def ratio(part: str, above: str, below: str) -> str:
        long, short = (values.get((row, f"{part}: {STEP}"), {}) for row in (above, below))
        return median_ratio(long, short)

    parts = list(dict.fromkeys(column.part for column in RECIPE.columns))
    if ours:
        yield Table(
            name="moe_ratios",
            title="What tiles gain, and what is left to gain",
            text="Medians of ratios within a repeat. Gain: a step with `bulk` over one with "
            "`tiled`. Limit: a step without communication over one with `tiled`. The goal is a "
            "gain of 2 where the exchange takes as long as the computation, which for two workers "
            "is at 250 Mbit/s.",
            head=("links", *(f"{what}, {name}" for what in ("gain", "limit") for name in NAMES)),
            rows=[
                (
                    part,
                    *(ratio(part, f"bulk, {name}", f"tiled, {name}") for name in NAMES),
                    *(ratio(part, LIMIT.name, f"tiled, {name}") for name in NAMES),
                )
                for part in parts
            ],
        )


RECIPE = Recipe(
    name="moe",
    title="Exchange of tokens",
    text="GPT-2 with experts in every second block, which two workers share; every worker on a "
    f"link of its own, {STEPS} steps. `bulk` pads every expert's tokens to the largest number and "
    "waits; `tiled` computes one tile while others travel. Without communication every worker has "
    "all experts. The hidden share is of what the experts' computation could hide: the exchange "
    "or that computation, whichever is shorter. Repeats stand in for seeds. All workers share one "
    "machine's processor.",
    rows=(*ROWS, LIMIT),
    columns=tuple(
        column
        for workers, rates in RATES.items()
        for mbit in rates
        for column in columns(workers, mbit)
    ),
    scales=("smoke",),
    beside=goals,
    undisturbed=True,
)
