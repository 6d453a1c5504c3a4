"""The seconds that 1-bit Adam and 0/1 Adam take on slow links, beside AllReduce.

    sudo .venv/bin/python -m recipes run zero_one_time     in the laboratory

Cost: 24 trainings of half a minute to three minutes on 2 cores, half an hour.
Found (results/tables/zero_one_time.md): on slow links both take a fraction of AllReduce's time; the
steps before v is frozen take most of what is left.
"""

from recipes.recipe import Recipe
from recipes.runs.laboratory import LabColumn
from recipes.signs.common import ROWS, schedule
from recipes.tables.methods import LIMIT

STEPS = 60
LINKS = ("20", "100")

RECIPE = Recipe(
    name="zero_one_time",
    title="The time that signs save",
    text=f"Seconds of {STEPS} steps of the laboratory's GPT-2, two workers, every one on a link of "
    "its own, with the whole schedule of zero_one_adam in them. Repeats stand in for seeds.",
    rows=(*ROWS, LIMIT),
    columns=tuple(
        LabColumn(
            f"seconds, {mbit} Mbit/s",
            ("--workers=2", f"--mbit={mbit}", *schedule(STEPS)),
            "train_s",
            lower=True,
            digits=1,
            curve=False,
        )
        for mbit in LINKS
    ),
    scales=("smoke",),
    undisturbed=True,
)
