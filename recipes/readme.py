"""The README's main tables, which the report opens with too."""

from pathlib import Path

from co2.record.table import read_csv
from recipes import answer, measured

BEGIN, END = "<!-- results: begin (python -m recipes render) -->", "<!-- results: end -->"


def fill(readme: Path, ours: Path) -> None:
    """Replace the tables between the README's marks by those of ours.csv, at scale=smoke.

    results/tuning.csv is read beside it.
    """
    rows = [row for row in measured.read(ours) if row["scale"] == "smoke"]
    tuning = read_csv(ours.with_name("tuning.csv"))
    parts = []
    for table in (answer.losses(rows, tuning), answer.further(rows, tuning)):
        shown = table.markdown() if table.rows else "Not run yet."
        parts += [f"**{table.title}.** {table.text}", shown]
    before, rest = readme.read_text().split(BEGIN)
    after = rest.split(END)[1]
    middle = "\n\n".join(parts)
    readme.write_text(f"{before}{BEGIN}\n{middle}\n{END}{after}")
