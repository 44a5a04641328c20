"""What a recipe may say of successive halving, and what its rungs then are."""

from __future__ import annotations

import pytest

from hpcml.recipe.halving import rungs
from hpcml.recipe.sweep import expand
from tests.unit.recipe.writing import Recipes

TRAIN = """
name: t
kind: train
params: {max_steps: 45}
sweep:
  grid: {seed: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]}
  halving: {}
train: {data: {source: python-stdlib}}
"""
COMMAND = """
name: c
kind: command
sweep:
  grid: {x: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]}
  halving: {metric: loss, mode: max, steps: 10}
command: {run: [echo, "{{ params.x }}"]}
"""


def test_each_rung_has_a_part_of_the_cells_and_all_steps_of_those_before(recipes: Recipes) -> None:
    loaded = recipes.load(TRAIN)
    assert rungs(loaded.recipe, loaded.document, expand(loaded)) == {
        "metric": "eval_loss",
        "mode": "min",
        "cells": [10, 4, 2],
        "steps": [5, 15, 45],
    }
    loaded = recipes.load(COMMAND, "sweep.halving.factor=2")
    assert rungs(loaded.recipe, loaded.document, expand(loaded)) == {
        "metric": "loss",
        "mode": "max",
        "cells": [10, 5, 3],
        "steps": [3, 5, 10],
    }


def test_halving_is_no_part_of_a_cell(recipes: Recipes) -> None:
    with_it = [cell.id for cell in recipes.cells(TRAIN)]
    assert [cell.id for cell in recipes.cells(TRAIN, "sweep.halving=null")] == with_it


@pytest.mark.parametrize(
    ("text", "setting", "said"),
    [
        (TRAIN, "sweep.halving.factor=1", "at least 2"),
        (TRAIN, "sweep.halving.rungs=1", "at least 2"),
        (TRAIN, "sweep.halving.metric=accuracy", "a training reports eval_loss and loss"),
        (TRAIN, "sweep.halving.steps=9", "for a training it is params.max_steps"),
        (TRAIN, "params={}", "params.max_steps is needed"),
        (TRAIN, "params.max_steps=null", "params.max_steps is needed"),
        (TRAIN, "objective={metric: loss, mode: max}", ""),
        (COMMAND, "objective={metric: loss}", "the objective says min"),
        (COMMAND, "sweep.halving.steps=null", "the steps of a whole training"),
        (COMMAND, "sweep.halving.metric=null", "the name of a metric that cells report"),
    ],
)
def test_what_makes_no_sense_is_refused(
    recipes: Recipes, text: str, setting: str, said: str
) -> None:
    if said:
        assert said in recipes.error(text, setting)
    else:
        recipes.load(text, setting)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("sweep.halving.rungs=4", "10 cells are too few for 4 rungs of factor 3"),
        ("params.max_steps=8", "8 steps are too few for 3 rungs of factor 3"),
        ("sweep.grid={max_steps: [9, 18, 27, 36, 45, 54, 63, 72, 81]}", "max_steps can't be swept"),
    ],
)
def test_more_rungs_than_there_is_to_share_out_are_refused(
    recipes: Recipes, setting: str, said: str
) -> None:
    from hpcml.errors import UserError

    loaded = recipes.load(TRAIN, setting)
    with pytest.raises(UserError, match=said):
        rungs(loaded.recipe, loaded.document, expand(loaded))


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ([], 10),  # what it is where the recipe does not say
        (["params.logging_steps=6"], 6),
        (["sweep.grid={logging_steps: [1, 2, 3, 7], seed: [1, 2, 3]}"], 7),
        (["params.logging_steps=5"], None),
    ],
)
def test_a_loss_is_logged_before_the_first_rung_ends(
    recipes: Recipes, settings: list[str], steps: int | None
) -> None:
    from hpcml.errors import UserError

    loaded = recipes.load(TRAIN, "sweep.halving.metric=loss", *settings)
    if steps is None:
        rungs(loaded.recipe, loaded.document, expand(loaded))
        return
    with pytest.raises(UserError, match=f"logging_steps is {steps}, and may be 5 at most"):
        rungs(loaded.recipe, loaded.document, expand(loaded))


def test_a_stage_is_not_halved(recipes: Recipes) -> None:
    from hpcml.errors import UserError
    from hpcml.recipe.load import load_stages

    path = recipes.folder / "staged.yaml"
    stage = "\n".join(f"    {line}" for line in COMMAND.splitlines() if not line.startswith("name"))
    path.write_text(f"name: staged\nstages:\n  one:{stage}\n")
    with pytest.raises(UserError, match="a stage can't be halved"):
        load_stages(path)
