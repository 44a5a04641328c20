"""The axes of a sweep: each part of it is one, and the sweep is their product."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpcml.recipe.cell import ABSENT, Entry, canonical_json
from hpcml.recipe.distribution import read_distribution
from hpcml.recipe.expression import Template
from hpcml.recipe.hyperparameters import BY_NAME
from hpcml.recipe.problems import KeyPath, Problems
from hpcml.recipe.schema import RandomSweep, Recipe
from hpcml.recipe.stages import Stages, is_token
from hpcml.recipe.vocabulary import canonical_name, checked_value, interacting

Path = tuple[str | int, ...]

MAX_CELLS = 1_000_000


class Names:
    """The parameters of a recipe: their canonical names, where they are given, their values."""

    def __init__(self, recipe: Recipe, problems: Problems, stages: Stages) -> None:
        self._stages = stages
        block = recipe.train or recipe.infer
        self._engine = block.engine if block else None
        self._problems = problems
        self._entries: dict[str, dict[str, Entry]] = {}
        self.places: dict[str, Path] = {}
        """Where a swept parameter is given, or else a fixed one."""

    def canonical(self, name: str, path: KeyPath) -> str | None:
        """Return the canonical name; record a mistake and return None if it has none."""
        if self._engine is None:
            if all(name.split(".")):
                return name
            self._problems.add(path, f"{name!r} is not a name; between dots there must be a name")
            return None
        try:
            return canonical_name(name, self._engine)
        except ValueError as error:
            self._problems.add(path, str(error))
            return None

    def value(self, name: str, value: Any, path: KeyPath) -> Any:
        """Return the checked value; record a mistake and return None if it is wrong."""
        if self._engine is None:
            return value
        try:
            if isinstance(value, str) and "{{" in value:
                return self._of_stage(name, value)
            return checked_value(BY_NAME[name], value, self._engine)
        except ValueError as error:
            self._problems.add(path, str(error))
            return None

    def _of_stage(self, name: str, text: str) -> str:
        """Return the token of a value that an earlier stage decides.

        Raises:
            ValueError: it is something else, or other parameters are computed from it.
        """
        token = Template(text).render({"params": {}, "cell": {}, "stages": self._stages})
        if not is_token(token):
            raise ValueError("the value of a parameter can be {{ stages.… }} alone, and no more")
        if name in interacting({name}):
            raise ValueError("it can't come from a stage, since other parameters depend on it")
        return token

    def entry(self, name: str, value: Any, path: KeyPath) -> Entry:
        """Return the entry of a checked value; equal values of a parameter have the same one."""
        value = self.value(name, value, path)
        text = canonical_json(value)
        return self._entries.setdefault(name, {}).setdefault(text, Entry(value, text))

    def entries(self, name: str) -> Iterable[Entry]:
        """Return all values that a swept parameter takes."""
        return self._entries.get(name, {}).values()


@dataclass(frozen=True)
class Axis:
    """Parameters that vary together.

    Attributes:
        names: their canonical names.
        choices: the values of the names, for each position on the axis.
    """

    names: tuple[str, ...]
    choices: list[tuple[Entry, ...]]


_Column = tuple[str, Path, list[tuple[Any, Path]]]
"""A parameter, where it is given, and its values with where each one is given."""


@dataclass
class _Draft:
    """An axis before its names and values are looked at."""

    path: Path
    columns: list[_Column]
    collapse: bool = False


def axes(
    recipe: Recipe, written: Mapping[str, Any], names: Names, problems: Problems
) -> list[Axis]:
    """Return the axes in the order in which the recipe has them.

    Args:
        recipe: the recipe.
        written: the sweep as it is in the file, for the order of its parts.
        names: collects the values of the swept parameters.
        problems: gets all mistakes; the result is of no use if there are any.
    """
    drafts: list[_Draft] = []
    for part in written:
        if part == "grid":
            path: Path = ("sweep", "grid")
            drafts += [
                _Draft((*path, name), [_column(name, values, path)])
                for name, values in recipe.sweep.grid.items()
            ]
        elif part == "zip":
            drafts += _linked(recipe, problems)
        elif part == "random" and recipe.sweep.random:
            drafts.append(_drawn(recipe.sweep.random, names, problems))
        elif part == "points" and recipe.sweep.points:
            drafts.append(_written_out(recipe.sweep.points, names, problems))
    return [axis for draft in drafts if (axis := _axis(draft, names, problems)) is not None]


def _column(name: str, values: list[Any], parent: Path) -> _Column:
    path = (*parent, name)
    return name, path, [(value, (*path, index)) for index, value in enumerate(values)]


def _linked(recipe: Recipe, problems: Problems) -> Iterator[_Draft]:
    for index, group in enumerate(recipe.sweep.zip):
        path: Path = ("sweep", "zip", index)
        lengths = {name: len(values) for name, values in group.items()}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            problems.add(path, f"linked lists must have the same length: {shown}")
            continue
        yield _Draft(path, [_column(name, values, path) for name, values in group.items()])


def _written_out(points: list[dict[str, Any]], names: Names, problems: Problems) -> _Draft:
    path: Path = ("sweep", "points")
    columns: dict[str, _Column] = {}
    for index, point in enumerate(points):
        seen: dict[str, str] = {}
        for written, value in point.items():
            place = (*path, index, written)
            name = names.canonical(written, place)
            if name is None:
                continue
            if name in seen:
                problems.add(place, f"it is the same parameter as {seen[name]}")
                continue
            seen[name] = written
            if name not in columns:
                missing: list[tuple[Any, Path]] = [(ABSENT, path)] * len(points)
                columns[name] = (name, place, missing)
            columns[name][2][index] = (value, place)
    return _Draft(path, list(columns.values()))


def _drawn(random: RandomSweep, names: Names, problems: Problems) -> _Draft:
    columns = []
    for name, distribution in random.params.items():
        path: Path = ("sweep", "random", "params", name)
        canonical = names.canonical(name, path)
        drawn = read_distribution(distribution, path, problems)
        if canonical is None or drawn is None or random.samples > MAX_CELLS:
            continue
        values = [
            drawn.draw(_uniform(random.seed, canonical, index)) for index in range(random.samples)
        ]
        columns.append((name, path, [(value, path) for value in values]))
    if random.samples > MAX_CELLS:
        problems.add(
            ("sweep", "random", "samples"), f"must be at most {MAX_CELLS:,}, not {random.samples:,}"
        )
    return _Draft(("sweep", "random"), columns, collapse=True)


def _uniform(seed: int, name: str, index: int) -> float:
    """Return a number in [0, 1) that only its arguments decide, in every version of Python.

    More samples, or other parameters beside it, don't change the samples that were there.
    """
    digest = hashlib.sha256(f"{seed}\0{name}\0{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _axis(draft: _Draft, names: Names, problems: Problems) -> Axis | None:
    canonical: list[str] = []
    columns: list[list[Entry]] = []
    for written, place, cells in draft.columns:
        name = names.canonical(written, place)
        if name is None:
            continue
        if name in names.places:
            first = problems.key_of(names.places[name])
            problems.add(place, f"{name} is swept by {first} already")
            continue
        names.places[name] = place
        canonical.append(name)
        columns.append(
            [value if value is ABSENT else names.entry(name, value, path) for value, path in cells]
        )
    if not canonical:
        return None
    choices = list(zip(*columns, strict=True))
    if len(set(choices)) < len(choices) and not problems:
        if draft.collapse:
            choices = list(dict.fromkeys(choices))
        else:
            seen: dict[tuple[Entry, ...], int] = {}
            for index, choice in enumerate(choices):
                if choice in seen:
                    shown = ", ".join(
                        f"{name}={entry.text}"
                        for name, entry in zip(canonical, choice, strict=True)
                        if entry is not ABSENT
                    )
                    problems.add(
                        draft.path,
                        f"entries {seen[choice] + 1} and {index + 1} are the same ({shown})",
                    )
                seen.setdefault(choice, index)
    return Axis(tuple(canonical), choices)
