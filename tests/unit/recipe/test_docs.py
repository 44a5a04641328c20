from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hpcml.recipe.halving import rungs
from hpcml.recipe.load import load_stages
from hpcml.recipe.sweep import expand

from .writing import Recipes

ROOT = Path(__file__).parents[3]


def test_the_reference_pages_are_up_to_date() -> None:
    found = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr


def test_the_recipe_on_the_first_page_is_right(recipes: Recipes) -> None:
    page = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    first, staged, second, third = (
        part.partition("```")[0] for part in page.split("```yaml\n")[1:]
    )
    cells = recipes.cells(first)
    assert len(cells) == 6
    arguments = ["--lr=0.001", "--seed=1", "--steps=1000"]
    assert cells[1].payload["argv"] == ["python3", "fit.py", *arguments]
    sweep = recipes.cells("name: t\nkind: train\ntrain: {data: {source: python-stdlib}}\n" + second)
    assert [cell.swept for cell in sweep] == [
        {"optim": "adamw"},
        {"optim": "sgd", "momentum": 0.9},
    ]
    train = (
        "name: t\nkind: train\nparams: {max_steps: 450}\ntrain: {data: {source: python-stdlib}}\n"
    )
    halved = recipes.load(train + third)
    course = rungs(halved.recipe, halved.document, expand(halved))
    assert course is not None
    assert (course["cells"], course["steps"]) == ([27, 9, 3], [50, 150, 450])
    path = recipes.folder / "staged.yaml"
    path.write_text(staged, encoding="utf-8")
    assert [stage.stage for stage in load_stages(path)] == ["explore", "longer"]
