"""What to run: recipes, their sweeps, and the vocabulary of hyperparameters."""

from hpcml.recipe.cell import Cell
from hpcml.recipe.load import LoadedRecipe, load_recipe
from hpcml.recipe.schema import Recipe, json_schema
from hpcml.recipe.sweep import expand
from hpcml.recipe.yaml import Document, load_yaml

__all__ = [
    "Cell",
    "Document",
    "LoadedRecipe",
    "Recipe",
    "expand",
    "json_schema",
    "load_recipe",
    "load_yaml",
]
