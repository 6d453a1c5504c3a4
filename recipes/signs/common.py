"""What the studies of 1-bit Adam and 0/1 Adam share: rows, schedule and trials."""

from recipes.recipe import Column, Row
from recipes.tables.methods import KEPT_WHOLE
from recipes.tuning.tuning import at_rates, trial_column

RATES = ("1e-3", "2e-3", "4e-3", "8e-3")
ALLREDUCE = Row("AllReduce", ("method=allreduce",))
ROWS = (
    ALLREDUCE,
    Row("1-bit Adam", ("method=onebit_adam",)),
    Row("0/1 Adam", ("method=zero_one_adam",)),
)
STEPS = 1800


def schedule(steps: int) -> tuple[str, ...]:
    """A warm-up of a twentieth of the steps; v is frozen after 15 % of them."""
    freeze = round(0.15 * steps)
    return (
        f"train.steps={steps}",
        f"train.eval_every={steps}",
        f"optim.warmup_steps={steps // 20}",
        f"onebit_adam.freeze_step={freeze}",
        f"zero_one_adam.freeze_step={freeze}",
        "optim.betas=[0.9,0.999]",
        *KEPT_WHOLE,
    )


def trials(row: Row) -> tuple[Row, ...]:
    """The row with every learning rate."""
    return at_rates(row, RATES)


def trials_on(task: str, without: tuple[str, ...] = ()) -> Column:
    """Validation loss of a trial of this task."""
    return trial_column(task, (f"task={task}", *schedule(STEPS // 2)), without)
