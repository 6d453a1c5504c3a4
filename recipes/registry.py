"""All recipes, by the names that people call."""

from recipes import (
    digits,
    field,
    figure1,
    glue,
    kept_progress,
    kept_variants,
    muon,
    quality,
    table1,
    table2,
    table3,
    table4,
    tau_sweep,
    time_to_loss,
    zero_one_adam,
    zero_one_time,
    zero_one_training,
    zero_one_volume,
)
from recipes.recipe import Recipe

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        table1.RECIPE,
        table2.RECIPE,
        table3.RECIPE,
        table4.RECIPE,
        tau_sweep.RECIPE,
        zero_one_adam.TRIALS,
        zero_one_adam.RECIPE,
        zero_one_time.RECIPE,
        zero_one_volume.RECIPE,
        zero_one_training.RECIPE,
        figure1.RECIPE,
        quality.RECIPE,
        glue.TRIALS,
        glue.RECIPE,
        muon.TRIALS,
        muon.RECIPE,
        field.RECIPE,
        time_to_loss.RECIPE,
        digits.RECIPE,
        kept_progress.TRIALS,
        kept_progress.RECIPE,
        kept_variants.RECIPE,
    )
}
