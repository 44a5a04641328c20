"""Reading a recipe and saying, for each mistake in it, where it is and what is allowed."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcml.recipe.halving import check_halving
from hpcml.recipe.hyperparameters import ALIASES
from hpcml.recipe.inference import check_inference
from hpcml.recipe.memory import no_collection
from hpcml.recipe.objective import TRAINING_METRICS, objective_of
from hpcml.recipe.problems import Problems, did_you_mean
from hpcml.recipe.schema import Recipe, StagedRecipe
from hpcml.recipe.search import check_search
from hpcml.recipe.stages import SHARED, in_order
from hpcml.recipe.validation import checked
from hpcml.recipe.yaml import Document, load_yaml


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe that is right, and the document that it comes from.

    Attributes:
        recipe: the checked content.
        document: the YAML with its lines, with the overrides applied.
        notes: what a person should know, such as names that are stored under another one.
        stage: the stage's name, where the recipe has several.
        needs: the stages that come before it.
    """

    recipe: Recipe
    document: Document
    notes: tuple[str, ...] = ()
    stage: str | None = None
    needs: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """The file, as it was given."""
        return self.document.path

    @property
    def text(self) -> str:
        """The file's text."""
        return self.document.text

    @property
    def folder(self) -> Path:
        """The folder that relative paths in the recipe start from: the file's, not a link's."""
        return Path(os.path.realpath(self.document.path)).parent


def load_recipe(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> LoadedRecipe:
    """Read and check a recipe.

    Args:
        path: the YAML file.
        overrides: settings ``key=value`` with dotted keys, which replace what the file says.

    Raises:
        UserError: anything is wrong; the message lists all mistakes with file, line and key.
    """
    stages = load_stages(path, overrides)
    assert len(stages) == 1, f"{path} has stages: use load_stages"
    return stages[0]


@no_collection()
def load_stages(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> list[LoadedRecipe]:
    """Read and check a recipe that may have several stages.

    Returns:
        The stages, each after those that it needs; one recipe where there are no stages.

    Raises:
        UserError: as :func:`load_recipe`.
    """
    document = load_yaml(path).override(overrides)
    if "stages" not in document.data:
        return [_load(document)]
    problems = Problems(document)
    checked(StagedRecipe, document.data, problems)
    problems.raise_any()
    stages = []
    for name, needs in in_order(document):
        loaded = _load(document.stage(name, SHARED), stage=True)
        stages.append(replace(loaded, stage=name, needs=needs))
    return stages


def _load(document: Document, stage: bool = False) -> LoadedRecipe:
    problems = Problems(document)
    recipe = checked(Recipe, _literal(document), problems)
    _check_kind(problems, document.data)
    if document.data.get("needs") and not stage:
        problems.add(("needs",), "only a stage needs another; see stages in docs/recipe.md")
    if recipe is None:
        problems.raise_any()
        raise AssertionError("unreachable")
    _check_environment(problems, recipe)
    _check_train(problems, recipe)
    if recipe.infer is not None:
        check_inference(problems, recipe, recipe.infer)
    _check_values(problems, recipe, document.data)
    if recipe.sweep.halving is not None:
        check_halving(problems, recipe, recipe.sweep.halving, stage)
    if recipe.sweep.search is not None:
        check_search(problems, recipe, recipe.sweep.search, stage)
    problems.raise_any()
    recipe = recipe.model_copy(update={"objective": objective_of(recipe)})
    return LoadedRecipe(recipe, document, _notes(recipe))


def _literal(document: Document) -> dict[str, Any]:
    """Return the data with the scalars of ``command.run`` and of each ``env`` as they are written.

    A program gets ``1.10`` and ``1e-4`` as the person wrote them, not as Python would.
    """
    data = dict(document.data)
    command, env = data.get("command"), data.get("env")
    if isinstance(command, dict) and isinstance(command.get("run"), list):
        run = [
            _or(document.as_written(("command", "run", index)), value)
            for index, value in enumerate(command["run"])
        ]
        data["command"] = {**command, "run": run}
    if isinstance(env, dict):
        data["env"] = _as_written(document, ("env",), env)
    container = data.get("container")
    if isinstance(container, dict) and isinstance(container.get("env"), dict):
        written = _as_written(document, ("container", "env"), container["env"])
        data["container"] = {**container, "env": written}
    return data


def _as_written(
    document: Document, path: tuple[str, ...], values: Mapping[str, Any]
) -> dict[str, Any]:
    return {name: _or(document.as_written((*path, name)), value) for name, value in values.items()}


def _or(text: str | None, value: Any) -> Any:
    return value if text is None else text


def _check_kind(problems: Problems, data: Mapping[str, Any]) -> None:
    kind = data.get("kind")
    kinds = ("command", "train", "infer")
    for block in kinds:
        if kind == block and data.get(block) is None:
            problems.add((block,), f"this key is missing; kind {kind} needs it")
        elif kind in kinds and kind != block and data.get(block) is not None:
            problems.add((block,), f"the kind is {kind}, so it would not be used; leave it out")
    if kind == "command" and data.get("parallel"):
        problems.add(("parallel",), "the kind is command, so it would not be used; leave it out")


def _check_environment(problems: Problems, recipe: Recipe) -> None:
    for index, name in enumerate(recipe.env_from):
        if name in recipe.env:
            problems.add(("env_from", index), f"{name} is in env too; it can be in one of them")
        if name in recipe.env_from[:index]:
            problems.add(("env_from", index), f"{name} is given twice")
    if recipe.command is not None and not recipe.command.run[0].strip():
        problems.add(("command", "run", 0), "the first entry is the program, and it is empty")


def _check_train(problems: Problems, recipe: Recipe) -> None:
    if recipe.train is None:
        return
    data = recipe.train.data
    if (data.source is None) == (not data.files):
        problems.add(
            ("train", "data"),
            "exactly one of source and files is needed, for example source: python-stdlib",
        )
    if recipe.objective is not None and recipe.objective.metric not in TRAINING_METRICS:
        metric = recipe.objective.metric
        problems.add(
            ("objective", "metric"),
            f"a training reports no {metric!r}{did_you_mean(metric, TRAINING_METRICS)}",
        )


def _check_values(problems: Problems, recipe: Recipe, data: Mapping[str, Any]) -> None:
    """Values must be kept as JSON, which has no infinity; one parameter has a text form of it."""
    for part in ("params", "parallel", "sweep"):
        for path, value in _floats((part,), data.get(part)):
            infinite_norm = recipe.kind == "train" and {"grad_norm_type", "norm_type"} & {*path}
            if not math.isfinite(value) and not infinite_norm:
                problems.add(
                    path,
                    f"{value} is not a finite number; put it in quotes if a program takes it as "
                    "text",
                )


def _floats(
    path: tuple[str | int, ...], value: Any
) -> Iterator[tuple[tuple[str | int, ...], float]]:
    if isinstance(value, float):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _floats((*path, key), item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _floats((*path, index), item)


def _notes(recipe: Recipe) -> tuple[str, ...]:
    if recipe.kind == "command":
        return ()
    sweep = recipe.sweep
    names = [*recipe.params, *recipe.parallel, *sweep.grid]
    for mapping in (*sweep.zip, *sweep.points):
        names += mapping
    for block in (sweep.random, sweep.search):
        names += block.params if block else ()
    return tuple(
        f"{name} is stored as {ALIASES[name]}" for name in dict.fromkeys(names) if name in ALIASES
    )
