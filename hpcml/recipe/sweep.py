"""Expanding a sweep into its cells."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hpcml.recipe.axes import MAX_CELLS, Axis, Names, axes
from hpcml.recipe.cell import ABSENT, Cell, Row, canonical_json
from hpcml.recipe.expression import Condition, ExpressionError, Parameters
from hpcml.recipe.hyperparameters import ALIASES, BY_NAME, HYPERPARAMETERS
from hpcml.recipe.inference import InferCells
from hpcml.recipe.load import LoadedRecipe
from hpcml.recipe.memory import no_collection
from hpcml.recipe.payload import (
    CommandCells,
    PerValue,
    TrainCells,
    digest,
    positions_of,
    same,
)
from hpcml.recipe.problems import KeyPath, Problems, did_you_mean
from hpcml.recipe.search import check_apart, search_axis, search_of, searched
from hpcml.recipe.stages import Stages
from hpcml.recipe.vocabulary import BATCH

Values = dict[str, Any]


@no_collection()
def expand(loaded: LoadedRecipe, stages: Stages | None = None) -> list[Cell]:
    """Return the cells of a recipe, in the order of the file, the last axis fastest.

    The same recipe gives the same cells, everywhere and always.

    Args:
        loaded: the recipe.
        stages: the stages before it whose results it may name.

    Raises:
        UserError: a parameter or the sweep is wrong, nothing is left of the sweep, or it has more
            than 1,000,000 cells.
    """
    recipe = loaded.recipe
    problems = Problems(loaded.document)
    stages = stages or Stages()
    names = Names(recipe, problems, stages)
    written = loaded.document.data.get("sweep") or {}
    found = searched(recipe, names, problems) if recipe.sweep.search else {}
    parts = [search_axis(found)] if found else axes(recipe, written, names, problems)
    fixed = _fixed(loaded, names, problems)
    swept = tuple(itertools.chain.from_iterable(axis.names for axis in parts))
    _check_nesting({**fixed, **dict.fromkeys(swept)}, names, problems)
    _check_used(loaded, swept, names, problems)
    problems.raise_any()
    _check_size(parts, problems)

    known = {**_defaults(loaded), **fixed}
    drop = _droppers(loaded, swept, known, problems)
    excluded = _exclusions(loaded, names, swept, known, problems)
    source: CommandCells | TrainCells | InferCells
    if recipe.kind == "command":
        source = CommandCells(recipe, swept, fixed, problems, stages)
    elif recipe.kind == "infer":
        source = InferCells(recipe, swept, fixed, loaded.folder, problems, names.places, stages)
    else:
        stand_ins = {name: distribution.extremes[0] for name, distribution in found.items()}
        source = TrainCells(
            recipe, swept, fixed, loaded.folder, problems, names.places, stages, stand_ins
        )
    problems.raise_any()
    if found:
        if recipe.kind == "train":
            check_apart(source, found, names, problems)
        return _searched_cells(source, parts[0].choices[0], loaded)

    cells: list[Cell] = []
    seen: dict[str, tuple[Row, bool]] = {}
    for combination in itertools.product(*(axis.choices for axis in parts)):
        row: Row = tuple(itertools.chain.from_iterable(combination))
        dropped = False
        for position, condition in drop:
            if row[position] is not ABSENT and not condition(row):
                row = (*row[:position], ABSENT, *row[position + 1 :])
                dropped = True
        if excluded and any(exclude(row) for exclude in excluded):
            continue
        identity = source.identity(row, len(cells))
        if identity in seen:
            first, also_dropped = seen[identity]
            if dropped or also_dropped:
                continue
            problems.add(
                ("sweep",),
                f"two cells are the same: {_shown(swept, first)} and {_shown(swept, row)}",
            )
            problems.raise_any()
        seen[identity] = (row, dropped)
        cells.append(Cell(len(cells), identity, row, source))
    if not cells:
        problems.add(("sweep", "exclude"), "all cells are excluded, so there is nothing to run")
        problems.raise_any()
    return cells


def _searched_cells(
    source: CommandCells | TrainCells | InferCells, row: Row, loaded: LoadedRecipe
) -> list[Cell]:
    """The cells of a search: what tells them apart is its definition, and their number."""
    search = search_of(loaded.recipe, loaded.document)
    assert search is not None
    rounds = search.pop("cells")
    of_all = canonical_json({**search, "cells": rounds[0]})
    return [
        Cell(index, digest(f"{source.identity(row, index)}{of_all}{index}"), row, source)
        for index in range(sum(rounds))
    ]


def _fixed(loaded: LoadedRecipe, names: Names, problems: Problems) -> Values:
    """Return the fixed parameters under canonical names with dots, their values checked."""
    fixed: Values = {}
    first: dict[str, KeyPath] = {}
    nested = loaded.recipe.kind == "command"
    leaves = itertools.chain(
        _leaves(loaded.recipe.params, ("params",), nested),
        _leaves(loaded.recipe.parallel, ("parallel",), nested=False),
    )
    for written, path, value in leaves:
        name = names.canonical(written, path)
        if name is None:
            continue
        if path[0] == "parallel" and BY_NAME[name].group != "Hardware":
            problems.add(path, f"{name} does not say what processes share; it belongs in params")
            continue
        if name in first:
            problems.add(
                path,
                f"it is the same parameter as {loaded.document.key_of(first[name])} "
                f"({loaded.document.where(first[name])}); give one of them",
            )
            continue
        first[name] = path
        names.places.setdefault(name, tuple(path))
        fixed[name] = names.value(name, value, path)
    return fixed


def _leaves(
    tree: Mapping[str, Any], path: tuple[str | int, ...], nested: bool, prefix: str = ""
) -> Iterator[tuple[str, tuple[str | int, ...], Any]]:
    for key, value in tree.items():
        if nested and isinstance(value, dict) and value:
            yield from _leaves(value, (*path, key), nested, f"{prefix}{key}.")
        else:
            yield prefix + key, (*path, key), value


def _check_nesting(params: Values, names: Names, problems: Problems) -> None:
    for name in params:
        parts = name.split(".")
        for count in range(1, len(parts)):
            parent = ".".join(parts[:count])
            if parent in params:
                problems.add(
                    names.places[name],
                    f"{parent} is a parameter with a value of its own, so it can't have parts",
                )


def _check_used(
    loaded: LoadedRecipe, swept: tuple[str, ...], names: Names, problems: Problems
) -> None:
    """A setting on the command line that the sweep would overrule is a misunderstanding, and so is
    what ``parallel`` says of a parameter that is swept.
    """
    for written in loaded.recipe.parallel:
        path, name = ("parallel", written), ALIASES.get(written, written)
        if name in swept:
            place = names.places[name]
            problems.add(
                path,
                f"it is also swept, as {loaded.document.key_of(place)} "
                f"({loaded.document.where(place)}); give one of them",
            )
    for name in loaded.recipe.params:
        where = loaded.document.where(("params", name))
        canonical = name if loaded.recipe.kind == "command" else ALIASES.get(name, name)
        if where.startswith("--set") and canonical in swept and not loaded.recipe.sweep.when:
            problems.add(
                ("params", name),
                f"it would not be used, because {canonical} is swept; set the sweep instead",
            )


def _check_size(parts: list[Axis], problems: Problems) -> None:
    count = math.prod(len(axis.choices) for axis in parts)
    if count > MAX_CELLS:
        shown = " * ".join(f"{len(axis.choices):,} ({', '.join(axis.names)})" for axis in parts)
        problems.add(("sweep",), f"it has {count:,} cells, more than {MAX_CELLS:,}: {shown}")
        problems.raise_any()


def _defaults(loaded: LoadedRecipe) -> Values:
    """Return what conditions may ask for besides the parameters that are given."""
    block = loaded.recipe.train or loaded.recipe.infer
    if block is None:
        return {}
    return {
        row.name: row.default
        for row in HYPERPARAMETERS
        # These follow from other parameters, which would not be known yet.
        if block.engine in row.engines
        and not row.default_by
        and row.name not in (*BATCH, "num_train_epochs")
    }


Test = Callable[[Row], bool]


def _test(
    text: str, path: KeyPath, swept: tuple[str, ...], known: Values, problems: Problems
) -> Test | None:
    """Return a condition as a function of a row, or record that it isn't one."""
    try:
        condition = Condition(text)
    except ExpressionError as error:
        problems.add(path, str(error))
        return None

    def holds(row: Row) -> bool:
        values = dict(known)
        for name, entry in zip(swept, row, strict=True):
            if entry is not ABSENT:
                values[name] = entry.value
        try:
            return condition.holds({"params": Parameters(values, ALIASES)})
        except ExpressionError as error:
            problems.add(path, str(error))
            problems.raise_any()
            raise

    used = condition.names
    if used is not None:
        used |= {ALIASES[name] for name in used if name in ALIASES}
    return PerValue(holds, positions_of(swept, used))


def _droppers(
    loaded: LoadedRecipe, swept: tuple[str, ...], known: Values, problems: Problems
) -> list[tuple[int, Test]]:
    tests = []
    for written, text in loaded.recipe.sweep.when.items():
        path = ("sweep", "when", written)
        name = written if loaded.recipe.kind == "command" else ALIASES.get(written, written)
        if name not in swept:
            problems.add(path, f"{written} is not swept{did_you_mean(written, swept)}")
            continue
        test = _test(text, path, swept, known, problems)
        if test is not None:
            tests.append((swept.index(name), test))
    return tests


def _exclusions(
    loaded: LoadedRecipe,
    names: Names,
    swept: tuple[str, ...],
    known: Values,
    problems: Problems,
) -> list[Test]:
    tests: list[Test] = []
    for index, exclusion in enumerate(loaded.recipe.sweep.exclude):
        path = ("sweep", "exclude", index)
        if isinstance(exclusion, str):
            test = _test(exclusion, path, swept, known, problems)
        else:
            test = _all_equal(exclusion, path, names, swept, known, problems)
        if test is not None:
            tests.append(test)
    return tests


def _all_equal(
    exclusion: Mapping[str, Any],
    path: tuple[str | int, ...],
    names: Names,
    swept: tuple[str, ...],
    known: Values,
    problems: Problems,
) -> Test | None:
    wanted = []
    possible = True
    for written, value in exclusion.items():
        place = (*path, written)
        name = names.canonical(written, place)
        if name is None:
            continue
        value = names.value(name, value, place)
        if name not in swept and name not in known:
            problems.add(
                place, f"there is no parameter {written!r}{did_you_mean(written, [*swept, *known])}"
            )
            continue
        fallback = name in known and same(known[name], value)
        if name not in swept:
            possible = possible and fallback
            continue
        matching = {entry for entry in names.entries(name) if same(entry.value, value)}
        if fallback:
            matching.add(ABSENT)
        wanted.append((swept.index(name), matching))
    if not possible:
        return None
    return lambda row: all(row[position] in matching for position, matching in wanted)


def _shown(names: tuple[str, ...], row: Row) -> str:
    return (
        ", ".join(
            f"{name}={entry.text}"
            for name, entry in zip(names, row, strict=True)
            if entry is not ABSENT
        )
        or "the one without swept parameters"
    )
