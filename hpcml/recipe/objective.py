"""What decides which cells are better, where the objective or a part of the sweep may say it."""

from __future__ import annotations

from hpcml.recipe.problems import Problems
from hpcml.recipe.schema import Halving, Objective, Recipe, Search

# What a training reports (hpcml/train/course.py).
TRAINING_METRICS = (
    "eval_loss",
    "loss",
    "learning_rate",
    "grad_norm",
    "epoch",
    "tokens_per_second",
    "unigram_entropy",
    "best_step",
)


def check_agreement(
    problems: Problems, recipe: Recipe, path: tuple[str, ...], block: Halving | Search
) -> None:
    """Record where a halving or a search says something else than the objective, or nobody says
    what a program is judged by.
    """
    objective = recipe.objective
    for name in ("metric", "mode"):
        here, there = getattr(block, name), getattr(objective, name, None)
        if objective is not None and here not in (None, there):
            problems.add(
                (*path, name),
                f"the objective says {there}, and both rank the cells; leave one of them out",
            )
    if recipe.kind == "command" and block.metric is None and objective is None:
        problems.add(
            (*path, "metric"), "this key is missing: the name of a metric that cells report"
        )


def objective_of(recipe: Recipe) -> Objective | None:
    """The objective of a recipe, which a halving or a search may say as well."""
    block = recipe.sweep.halving or recipe.sweep.search
    if recipe.objective is not None or (block is None and recipe.kind != "train"):
        return recipe.objective
    metric = block.metric if block else None
    mode = block.mode if block else None
    return Objective(metric=metric or "eval_loss", mode=mode or "min")
