"""A recipe is a file, so tests write one."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcml.errors import UserError
from hpcml.recipe import Cell, LoadedRecipe, expand, load_recipe

COMMAND = "name: t\nkind: command\ncommand: {run: [echo, hello]}\n"
TRAIN = "name: t\nkind: train\ntrain: {data: {source: python-stdlib}}\n"


class Recipes:
    """Writes recipes into a folder and reads them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, text: str, *overrides: str) -> LoadedRecipe:
        path = self.folder / "recipe.yaml"
        path.write_text(text)
        return load_recipe(path, overrides)

    def cells(self, text: str, *overrides: str) -> list[Cell]:
        return expand(self.load(text, *overrides))

    def error(self, text: str, *overrides: str) -> str:
        """Return the message about what is wrong, without the folder."""
        with pytest.raises(UserError) as caught:
            self.cells(text, *overrides)
        return str(caught.value).replace(f"{self.folder}/", "")
