"""Successive halving: how many cells each rung has, and how far they go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcml.recipe.cell import Cell
from hpcml.recipe.hyperparameters import ALIASES, BY_NAME
from hpcml.recipe.objective import check_agreement
from hpcml.recipe.problems import Problems
from hpcml.recipe.schema import Halving, Recipe
from hpcml.recipe.yaml import Document

# What every evaluation and every log line of a training reports.
_OF_TRAINING = ("eval_loss", "loss")


def check_halving(problems: Problems, recipe: Recipe, halving: Halving, stage: bool) -> None:
    """Record what is wrong with a halving, as far as it shows without the cells."""
    path = ("sweep", "halving")
    if recipe.kind == "infer":
        problems.add(path, "an inference has no steps, so it can't be halved; leave it out")
        return
    if stage:
        problems.add(
            path,
            "a stage can't be halved, since a later one waits for all of its cells; make it a "
            "recipe of its own",
        )
    check_agreement(problems, recipe, path, halving)
    objective = recipe.objective
    if recipe.kind == "command":
        if halving.steps is None:
            problems.add((*path, "steps"), "this key is missing: the steps of a whole training")
        return
    if halving.steps is not None:
        problems.add((*path, "steps"), "for a training it is params.max_steps; leave it out")
    metric = halving.metric or (objective.metric if objective else "eval_loss")
    if metric not in _OF_TRAINING:
        problems.add(
            (*path, "metric"), f"a training reports {' and '.join(_OF_TRAINING)}, not {metric}"
        )
    given = {ALIASES.get(name, name) for name, value in recipe.params.items() if value is not None}
    if "max_steps" not in given:
        problems.add(path, "params.max_steps is needed, from which the steps of a rung follow")


def rungs(recipe: Recipe, document: Document, cells: Sequence[Cell]) -> dict[str, Any] | None:
    """What the plan says of a halving, or None without one.

    Returns:
        ``metric`` and ``mode``; and for each rung how many ``cells`` it has and the ``steps`` that
        they have done at its end, counted from the beginning of the training.

    Raises:
        UserError: it has more rungs than the cells, or the steps, are enough for, or nothing is
            measured in the first one.
    """
    halving = recipe.sweep.halving
    if halving is None:
        return None
    assert recipe.objective is not None
    problems = Problems(document)
    whole = halving.steps
    if whole is None:
        if "max_steps" in cells[0].swept:
            problems.add(("sweep",), "max_steps can't be swept where rungs are counted in steps")
            problems.raise_any()
        whole = int(cells[0].params["max_steps"])
    shrink = halving.factor ** (halving.rungs - 1)
    for what, number in (("cells", len(cells)), ("steps", whole)):
        if number < shrink:
            problems.add(
                ("sweep", "halving", "rungs"),
                f"{number} {what} are too few for {halving.rungs} rungs of factor "
                f"{halving.factor}, which need at least {shrink:,}",
            )
    problems.raise_any()
    parts = [halving.factor**rung for rung in range(halving.rungs)]
    steps = [-(-whole // part) for part in reversed(parts)]
    if recipe.kind == "train" and recipe.objective.metric == "loss":
        usual = BY_NAME["logging_steps"].default
        slowest = max(int(cell.params.get("logging_steps", usual)) for cell in cells)
        if slowest > steps[0]:
            problems.add(
                ("sweep", "halving"),
                f"the first rung ends at step {steps[0]}, before the first loss is logged: "
                f"params.logging_steps is {slowest}, and may be {steps[0]} at most",
            )
            problems.raise_any()
    return {
        "metric": recipe.objective.metric,
        "mode": recipe.objective.mode,
        "cells": [-(-len(cells) // part) for part in parts],
        "steps": steps,
    }
