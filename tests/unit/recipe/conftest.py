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
        self.path = folder / "recipe.yaml"

    def load(self, text: str, *overrides: str) -> LoadedRecipe:
        self.path.write_text(text)
        return load_recipe(self.path, overrides)

    def cells(self, text: str, *overrides: str) -> list[Cell]:
        return expand(self.load(text, *overrides))

    def command(self, text: str, *overrides: str) -> list[Cell]:
        return self.cells(COMMAND + text, *overrides)

    def train(self, text: str, *overrides: str) -> list[Cell]:
        return self.cells(TRAIN + text, *overrides)

    def error(self, text: str, *overrides: str) -> str:
        """Return the message about what is wrong, without the folder."""
        with pytest.raises(UserError) as caught:
            self.cells(text, *overrides)
        return str(caught.value).replace(f"{self.path.parent}/", "")


@pytest.fixture
def recipes(tmp_path: Path) -> Recipes:
    return Recipes(tmp_path)


@pytest.fixture(scope="module")
def shared_recipes(tmp_path_factory: pytest.TempPathFactory) -> Recipes:
    """For property tests, which write many recipes one after the other."""
    return Recipes(tmp_path_factory.mktemp("recipes"))
