"""What every benchmark prints and keeps: a Markdown table with its command and hardware."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from co2.record.provenance import provenance


def write(
    path: Path, title: str, intro: str, head: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print a table, and write it to `path` with what is needed to run it again."""
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join(['---'] * len(head))}|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    table = "\n".join(lines)
    print(f"\n{title}\n\n{table}\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# {title}\n\n{intro}\n\n{table}\n\n{provenance()}\n")


def mean(values: Sequence[float], form: str = ".4f", sign: str = "") -> str:
    """Mean ± standard deviation of the sample; of one value, only that. The mean shows its sign
    with `sign="+"`."""
    spread = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}{form}}{spread}"
