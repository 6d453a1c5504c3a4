"""All recipes, by the names that people call."""

from recipes import table1, table2, table4, tau_sweep
from recipes.recipe import Recipe

RECIPES: dict[str, Recipe] = {
    module.RECIPE.name: module.RECIPE for module in (table1, table2, table4, tau_sweep)
}
