"""The exchange of tokens between workers that share experts: padded in one piece, and in tiles.

    sudo .venv/bin/python -m recipes run moe               in the laboratory

Cost: 105 trainings of 10 to 60 seconds on 2 cores, three quarters of an hour.
Found: tiles carry a third of the bytes. Between two workers on links of 250 Mbit/s, where the
exchange takes `bulk` as long as all else, a step takes half as long with `tiled` (under AllReduce
1.9 to 2.0 times less, under CO2 2.3 to 2.4); on 100 Mbit/s 2.5 to 3 times less, on 500 1.2 to 1.5,
and without a limit no less that three repeats show. More is hidden than the experts' computation:
putting tiles together hides some, too. Without any exchange a step takes 45 ms in place of tiled's
98: of those 53, 17 are exposed, and the rest is work on tiles and sockets by the core that trains.
Four workers are two replicas of two: between those AllReduce waits at every step, CO2 does not; on
100 Mbit/s a step under CO2 takes 232 ms, under AllReduce 368.
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
