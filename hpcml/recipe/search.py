"""Searching hyperparameters in rounds: what a recipe may say, and what follows for its cells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcml.recipe.axes import Axis, Names
from hpcml.recipe.cell import Entry, Row, Source, canonical_json
from hpcml.recipe.distribution import Distribution, read_distribution
from hpcml.recipe.objective import TRAINING_METRICS, check_agreement, objective_of
from hpcml.recipe.problems import Problems, did_you_mean
from hpcml.recipe.schema import Recipe, Search
from hpcml.recipe.stages import Reference, Stages
from hpcml.recipe.yaml import Document

_PATH = ("sweep", "search")
# All proposals of a round are one file, and each is told to the sampler again in every round.
_MOST = 100_000
# Beyond it a float, in which samplers compute, is no exact whole number.
_LARGEST = 2**53


def check_search(problems: Problems, recipe: Recipe, search: Search, stage: bool) -> None:
    """Record what is wrong with a search, as far as it shows without its parameters."""
    if recipe.kind == "infer":
        problems.add(_PATH, "an inference has no metric that could be searched by; leave it out")
        return
    if stage:
        problems.add(
            _PATH,
            "a stage can't be a search, since a later one waits for all of its cells; make it a "
            "recipe of its own",
        )
    for part in ("grid", "zip", "random", "points", "exclude", "when", "halving"):
        if getattr(recipe.sweep, part):
            problems.add(
                ("sweep", part),
                "it can't be combined with a search, which proposes every cell by itself; leave "
                "one of the two out",
            )
    if search.rounds * search.cells > _MOST:
        problems.add(
            _PATH,
            f"{search.rounds:,} rounds of {search.cells:,} cells are more than {_MOST:,} cells",
        )
    check_agreement(problems, recipe, _PATH, search)
    if recipe.kind == "train" and search.metric not in (None, *TRAINING_METRICS):
        known = did_you_mean(str(search.metric), TRAINING_METRICS)
        problems.add((*_PATH, "metric"), f"a training reports no {search.metric!r}{known}")


def searched(recipe: Recipe, names: Names, problems: Problems) -> dict[str, Distribution]:
    """What each searched parameter may be, by its canonical name; its values are checked.

    Args:
        recipe: a recipe with a search.
        names: learns where the parameters are given.
        problems: gets all mistakes; the result is of no use if there are any.
    """
    search = recipe.sweep.search
    assert search is not None
    found: dict[str, Distribution] = {}
    for written, distribution in search.params.items():
        path = (*_PATH, "params", written)
        name = names.canonical(written, path)
        drawn = read_distribution(distribution, path, problems)
        if name is None or drawn is None:
            continue
        if name in found:
            problems.add(path, f"{name} is searched already, under another name")
            continue
        names.places[name] = path
        values = [names.value(name, value, path) for value in drawn.extremes]
        if drawn.kind == "choice":
            drawn = Distribution("choice", values)
            if len({canonical_json(value) for value in values}) < len(values):
                problems.add(path, "two of the values are the same")
            if search.sampler == "cmaes":
                problems.add(path, "cmaes knows numbers only, and no choice; take tpe")
        elif drawn.kind == "int" and max(map(abs, values)) > _LARGEST:
            problems.add(path, f"whole numbers of a search are {_LARGEST:,} at most")
        found[name] = drawn
    return found


def search_axis(found: Mapping[str, Distribution]) -> Axis:
    """What stands for the searched parameters in every cell until they are proposed."""
    tokens = [Reference("", ("search", name)).token for name in found]
    return Axis(tuple(found), [tuple(Entry(token, canonical_json(token)) for token in tokens)])


def check_apart(
    source: Source, found: Mapping[str, Distribution], names: Names, problems: Problems
) -> None:
    """Refuse parameters of a training that others follow from.

    Cells are completed when the plan is made, and the searched values are only put in later. So
    whatever they turn out to be, all else must be the same.

    Raises:
        UserError: something else is not, or values contradict others.
    """
    row = [_entry(distribution.extremes[0]) for distribution in found.values()]
    others = _others(source, tuple(row), found)
    for position, (name, distribution) in enumerate(found.items()):
        for value in distribution.extremes[1:]:
            changed = [*row[:position], _entry(value), *row[position + 1 :]]
            now = _others(source, tuple(changed), found)
            different = [key for key in now if now[key] != others[key]]
            if different:
                problems.add(
                    names.places[name],
                    f"it can't be searched, since other parameters follow from it: "
                    f"{', '.join(different)}; give those in params, or take a grid",
                )
                break
    problems.raise_any()


def _entry(value: Any) -> Entry:
    return Entry(value, canonical_json(value))


def _others(source: Source, row: Row, found: Mapping[str, Distribution]) -> dict[str, Any]:
    parameters: Mapping[str, Any] = source.payload(row, 0)["parameters"]
    return {name: value for name, value in parameters.items() if name not in found}


def search_of(recipe: Recipe, document: Document) -> dict[str, Any] | None:
    """What the plan says of a search, or None without one.

    Returns:
        ``metric`` and ``mode``; ``sampler`` and ``seed``; how many ``cells`` each round has; and
        the ``params``, each with its distribution.
    """
    search, objective = recipe.sweep.search, objective_of(recipe)
    if search is None:
        return None
    assert objective is not None
    problems = Problems(document)
    found = searched(recipe, Names(recipe, problems, Stages()), problems)
    problems.raise_any()
    return {
        "metric": objective.metric,
        "mode": objective.mode,
        "sampler": search.sampler,
        "seed": search.seed,
        "cells": [search.cells] * search.rounds,
        "params": {name: {drawn.kind: drawn.argument} for name, drawn in found.items()},
    }
