from __future__ import annotations

from pathlib import Path

import pytest

from .writing import Recipes


@pytest.fixture
def recipes(tmp_path: Path) -> Recipes:
    return Recipes(tmp_path)


@pytest.fixture(scope="module")
def shared_recipes(tmp_path_factory: pytest.TempPathFactory) -> Recipes:
    """For property tests, which write many recipes one after the other."""
    return Recipes(tmp_path_factory.mktemp("recipes"))
