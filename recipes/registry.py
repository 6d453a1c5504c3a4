"""All recipes, by the names that people call."""

from recipes import figure1, table1, table2, table3, table4, tau_sweep, zero_one_adam
from recipes.recipe import Recipe

RECIPES: dict[str, Recipe] = {
    module.RECIPE.name: module.RECIPE
    for module in (table1, table2, table3, table4, tau_sweep, zero_one_adam, figure1)
}
