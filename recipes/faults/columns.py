"""Columns of the recipes in which something happens to a run."""

from recipes.runs.functions import FunctionColumn, Trainer

SEEDS = (0, 1)


def column(name: str, metric: str, digits: int, train: Trainer) -> FunctionColumn:
    """One of the figures of a run."""
    return FunctionColumn(
        name,
        (),
        f"final.{metric}",
        lower=metric not in ("ended", "goodput"),
        digits=digits,
        curve=False,
        train=train,
    )
