"""Muon inside DiLoCo (MuLoCo, arXiv 2505.23725) beside AdamW inside it, each at its own rates.

    python -m recipes run muon                             its trials, then what won in them

Cost: 40 trials of half a minute and 12 runs of one on 2 cores, half an hour. PyTorch's Muon works
in bf16: on a processor without instructions for it (AVX2) a step takes 3.4 times as long as
AdamW's, and this recipe an hour and a half.
Found (results/tables/muon.md): Muon gains about as much under AllReduce as under DiLoCo, so DiLoCo
with Muon ends close to AllReduce with AdamW, and behind AllReduce with Muon.

Both optimizers have as many trials: every learning rate with every outer step for DiLoCo, and every
learning rate for AllReduce. Under Muon the rate is that of hidden matrices too (shared/muon.py).
"""

from recipes.recipe import Column, Row
from recipes.tuning.tuning import TunedRecipe, trial_column

STEPS = 1800
TAU = 36
OPTIMIZERS = {"AdamW": "adamw", "Muon": "muon"}
RATES = ("1e-3", "2e-3", "4e-3", "8e-3", "1.6e-2")
OUTER = (("1", "0"), ("1", "0.4"), ("0.7", "0.9"))
"""Outer learning rates and momenta; the last are those of DiLoCo's paper."""


def schedule(steps: int) -> tuple[str, ...]:
    """A warm-up of a twentieth of the steps."""
    return (
        f"train.steps={steps}",
        f"train.eval_every={steps}",
        f"optim.warmup_steps={steps // 20}",
    )


def diloco(optimizer: str) -> str:
    """The name of the row of DiLoCo around this optimizer."""
    return f"DiLoCo, {optimizer}"


def allreduce(optimizer: str) -> str:
    """The name of the row of AllReduce with this optimizer."""
    return f"AllReduce, {optimizer}"


def trials(optimizer: str) -> dict[str, tuple[Row, ...]]:
    """The rows of trials of each row with this optimizer."""
    whole: list[Row] = []
    local: list[Row] = []
    for rate in RATES:
        own = (f"optim.name={OPTIMIZERS[optimizer]}", f"optim.lr={rate}")
        name = allreduce(optimizer)
        whole.append(Row(f"{name}, rate {rate}", ("method=allreduce", *own)))
        name = diloco(optimizer)
        for lr, momentum in OUTER:
            outer = (f"diloco.outer_lr={lr}", f"diloco.outer_momentum={momentum}")
            words = ("method=diloco", *own, *outer)
            local.append(Row(f"{name}, rate {rate}, α {lr}, β {momentum}", words))
    return {allreduce(optimizer): tuple(whole), diloco(optimizer): tuple(local)}


GPT2 = ("task=gpt2", f"diloco.tau={TAU}")
TRIAL = trial_column("GPT-2", (*GPT2, *schedule(STEPS // 2)))

RECIPE = TunedRecipe(
    name="muon",
    title="Muon inside DiLoCo",
    text=f"GPT-2, validation loss after {STEPS} steps, two workers, τ = {TAU} for DiLoCo. Each row "
    "has the settings that won in muon_trials. Muon moves hidden matrices, AdamW the rest.",
    rows=tuple(
        Row(name, (f"method={method}", f"optim.name={OPTIMIZERS[optimizer]}"))
        for optimizer in OPTIMIZERS
        for name, method in ((allreduce(optimizer), "allreduce"), (diloco(optimizer), "diloco"))
    ),
    columns=(Column("GPT-2", (*GPT2, *schedule(STEPS)), "final.loss", lower=True, digits=4),),
    scales=("smoke",),
    grids=trials("AdamW") | trials("Muon"),
    tuned_in={TRIAL.name: TRIAL},
)
