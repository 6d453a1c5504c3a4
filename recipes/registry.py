"""All recipes, by the names that people call."""

from recipes.faults import faults, faults_elsewhere, goodput
from recipes.paper import figure1, table1, table2, table3, table4, tau_sweep
from recipes.recipe import Recipe
from recipes.signs import zero_one_adam, zero_one_training, zero_one_volume
from recipes.studies import (
    blocking,
    digits,
    fashion,
    field,
    fragments,
    gap,
    glue,
    graph,
    kept_progress,
    kept_variants,
    moe,
    muon,
    quality,
    rates,
    rounds,
    time_to_loss,
)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        table1.RECIPE,
        table2.RECIPE,
        table3.RECIPE,
        table4.RECIPE.trials,
        table4.RECIPE,
        tau_sweep.RECIPE.trials,
        tau_sweep.RECIPE,
        rounds.RECIPE.trials,
        rounds.RECIPE,
        fragments.RECIPE,
        blocking.RECIPE,
        gap.RECIPE.trials,
        gap.RECIPE,
        rates.RECIPE,
        zero_one_adam.RECIPE.trials,
        zero_one_adam.RECIPE,
        zero_one_volume.RECIPE,
        zero_one_training.RECIPE,
        figure1.RECIPE,
        quality.RECIPE,
        glue.RECIPE.trials,
        glue.RECIPE,
        moe.RECIPE,
        graph.RECIPE,
        muon.RECIPE.trials,
        muon.RECIPE,
        field.RECIPE,
        time_to_loss.RECIPE.trials,
        time_to_loss.RECIPE,
        digits.RECIPE,
        fashion.RECIPE.trials,
        fashion.RECIPE,
        faults.RECIPE,
        faults_elsewhere.RECIPE,
        goodput.RECIPE,
        kept_progress.RECIPE,
        kept_variants.RECIPE,
    )
}
