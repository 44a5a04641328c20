"""A recipe is a file, so tests write one."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hpcml.errors import UserError
from hpcml.recipe import Cell, LoadedRecipe, expand, load_recipe

SCHEMAS = Path(__file__).parents[3] / "schemas"


@lru_cache
def _validator(kind: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((SCHEMAS / f"{kind}.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def problems(kind: str, data: Any) -> list[str]:
    """What the schema of recipes, or of sites, has against a document."""
    return [error.message for error in _validator(kind).iter_errors(data)]


COMMAND = "name: t\nkind: command\ncommand: {run: [echo, hello]}\n"
TRAIN = "name: t\nkind: train\ntrain: {data: {source: python-stdlib}}\n"


class Recipes:
    """Writes recipes into a folder and reads them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, text: str, *overrides: str) -> LoadedRecipe:
        path = self.folder / "recipe.yaml"
        path.write_text(text)
        loaded = load_recipe(path, overrides)
        # What is right for us is right for an editor.
        assert not problems("recipe", loaded.document.data), text
        return loaded

    def cells(self, text: str, *overrides: str) -> list[Cell]:
        return expand(self.load(text, *overrides))

    def error(self, text: str, *overrides: str) -> str:
        """Return the message about what is wrong, without the folder."""
        with pytest.raises(UserError) as caught:
            self.cells(text, *overrides)
        return str(caught.value).replace(f"{self.folder}/", "")
