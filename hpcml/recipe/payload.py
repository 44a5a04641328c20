"""What is run in a cell, and the digest by which a cell is known."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from hpcml.recipe import deepspeed
from hpcml.recipe.cell import ABSENT, Entry, Row, Source, canonical_json
from hpcml.recipe.expression import ExpressionError, Parameters, Template
from hpcml.recipe.hyperparameters import ALIASES, HYPERPARAMETERS, LAYOUT
from hpcml.recipe.problems import KeyPath, Problems
from hpcml.recipe.schema import Recipe
from hpcml.recipe.stages import RUNG_STEPS, Stages, is_token
from hpcml.recipe.vocabulary import BATCH, Contradiction, Setting, interacting, resolve

T = TypeVar("T")

_MAX_KNOWN = 10_000  # results kept, for the sake of memory


class PerValue(Generic[T]):
    """A function of a row, computed once for each combination of the entries it depends on."""

    def __init__(self, compute: Callable[[Row], T], positions: Iterable[int]) -> None:
        self._compute = compute
        self._positions = tuple(positions)
        self._known: dict[Row, T] = {}

    def __call__(self, row: Row) -> T:
        key = tuple([row[position] for position in self._positions])
        try:
            return self._known[key]
        except KeyError:
            result = self._compute(row)
            if len(self._known) < _MAX_KNOWN:
                self._known[key] = result
            return result


def positions_of(names: Iterable[str], used: frozenset[str] | None) -> list[int]:
    """Return the positions of those names whose first part is used; None uses all."""
    return [
        position
        for position, name in enumerate(names)
        if used is None or name.split(".")[0] in used
    ]


def compiled(text: str, path: KeyPath, problems: Problems) -> Template:
    """Return the template of a recipe's text; record a mistake if it isn't one."""
    try:
        return Template(text)
    except ExpressionError as error:
        problems.add(path, str(error))
        return Template("")


class CommandCells(Source):
    """The cells of a recipe that runs a program."""

    def __init__(
        self,
        recipe: Recipe,
        names: tuple[str, ...],
        fixed: Mapping[str, Any],
        problems: Problems,
        stages: Stages,
    ) -> None:
        assert recipe.command is not None
        self._stages = stages
        self.names = names
        self.fixed = dict(fixed)
        self._problems = problems
        self._halved = recipe.sweep.halving is not None
        command = recipe.command
        texts: list[tuple[KeyPath, str]] = [
            (("command", "run", index), text) for index, text in enumerate(command.run)
        ]
        texts += [(("env", name), text) for name, text in recipe.env.items()]
        if command.directory is not None:
            texts.append((("command", "directory"), command.directory))
        self._arguments = len(command.run)
        self._variables = tuple(recipe.env)
        self._texts = [self._text(path, text) for path, text in texts]
        # The members of a cell's canonical JSON: the key, the position in the row or among the
        # texts, and what a parameter that is not in the row is instead.
        self._members = [
            (
                f"{json.dumps(name)}:",
                names.index(name) if name in names else None,
                canonical_json(fixed[name]) if name in fixed else None,
            )
            for name in sorted({*fixed, *names})
        ]
        self._env_members = [
            (f"{json.dumps(name)}:", self._arguments + self._variables.index(name))
            for name in sorted(self._variables)
        ]

    def payload(self, row: Row, index: int) -> dict[str, Any]:
        """Return the arguments, the folder and the environment."""
        texts = [text(row, index).value for text in self._texts]
        rest = texts[self._arguments :]
        return {
            "argv": texts[: self._arguments],
            "directory": rest[len(self._variables)] if len(rest) > len(self._variables) else None,
            "env": dict(zip(self._variables, rest, strict=False)),
        }

    def identity(self, row: Row, index: int) -> str:
        """Return the cell's id."""
        return digest(f'{{"kind":"command",{self.members(row, index)}}}')

    def members(self, row: Row, index: int) -> str:
        """Return the canonical JSON of the parameters and of the payload."""
        members = []
        for key, position, otherwise in self._members:
            if position is not None and row[position] is not ABSENT:
                members.append(key + row[position].text)
            elif otherwise is not None:
                members.append(key + otherwise)
        params = ",".join(members)
        texts = [text(row, index).text for text in self._texts]
        argv = ",".join(texts[: self._arguments])
        env = ",".join([key + texts[position] for key, position in self._env_members])
        has_directory = len(texts) > self._arguments + len(self._variables)
        directory = texts[-1] if has_directory else "null"
        return (
            f'"params":{{{params}}},'
            f'"payload":{{"argv":[{argv}],"directory":{directory},"env":{{{env}}}}}'
        )

    def _text(self, path: KeyPath, text: str) -> Callable[[Row, int], Entry]:
        template = compiled(text, path, self._problems)
        if template.constant:
            constant = Entry(text, canonical_json(text))
            return lambda row, index: constant

        halving = {"halving": {"steps": RUNG_STEPS}} if self._halved else {}

        def render(row: Row, index: int) -> Entry:
            context = {
                "params": Parameters(self.params(row)),
                "cell": {"index": index},
                "stages": self._stages,
                **halving,
            }
            try:
                rendered = template.render(context)
            except ExpressionError as error:
                self._problems.add(path, str(error))
                self._problems.raise_any()
                raise
            return Entry(rendered, canonical_json(rendered))

        if template.names is None:
            return render
        cached = PerValue(lambda row: render(row, 0), positions_of(self.names, template.names))
        return lambda row, index: cached(row)


class Rendered(Source):
    """Cells whose texts are rendered with their parameters, and whose paths start at the recipe."""

    _folder: Path
    _problems: Problems
    _stages: Stages
    _templates: Mapping[KeyPath, Template]

    def _render(self, parameters: Mapping[str, Any], index: int) -> dict[KeyPath, str]:
        context = {
            "params": Parameters(parameters, ALIASES),
            "cell": {"index": index},
            "stages": self._stages,
        }
        texts: dict[KeyPath, str] = {}
        for path, template in self._templates.items():
            try:
                texts[path] = template.render(context)
            except ExpressionError as error:
                self._problems.add(path, str(error))
                self._problems.raise_any()
        return texts

    def _absolute(self, path: str) -> str:
        if path.startswith("\0"):  # a token: the path of an earlier stage's result is absolute
            return path
        return os.path.normpath(self._folder / path)

    def _pattern(self, pattern: str) -> str:
        # The wildcards are in the recipe's text, not in the folder's name.
        if pattern.startswith("\0"):
            return pattern
        return os.path.normpath(os.path.join(glob.escape(str(self._folder)), pattern))


@dataclass(frozen=True)
class _Resolved:
    """The complete parameters of a combination, and the pieces of their JSON."""

    values: dict[str, Any]
    pieces: list[str]
    places: dict[str, int]


class TrainCells(Rendered):
    """The cells of a recipe that trains.

    Attributes:
        layout: how processes share the work, as far as it does not tell cells from each other:
            what the recipe gives, and null for what follows from the number of processes.

    ``stand_ins`` are values by which all else is completed where a search proposes a parameter.
    """

    def __init__(
        self,
        recipe: Recipe,
        names: tuple[str, ...],
        fixed: Mapping[str, Any],
        folder: Path,
        problems: Problems,
        places: Mapping[str, KeyPath],
        stages: Stages,
        stand_ins: Mapping[str, Any],
    ) -> None:
        assert recipe.train is not None
        self._stages = stages
        self._stand_ins = stand_ins
        assert recipe.objective is not None
        self.names = names
        self._recipe = recipe
        self.fixed = dict(fixed)
        self._folder = folder
        self._problems = problems
        self._places = places
        train, data = recipe.train, recipe.train.data
        self._setting = Setting(
            engine=train.engine,
            processes=recipe.resources.world_size,
            has_model=train.model is not None,
            has_tokenizer=data.tokenizer is not None,
            packing=data.packing,
            deepspeed=self._deepspeed(),
        )
        texts: dict[KeyPath, str] = {
            ("train", "data", "files", index): text for index, text in enumerate(data.files)
        }
        texts |= {("env", name): text for name, text in recipe.env.items()}
        for path, text in (
            (("train", "model"), train.model),
            (("train", "data", "tokenizer"), data.tokenizer),
        ):
            if text is not None:
                texts[path] = text
        self._templates = {path: compiled(text, path, problems) for path, text in texts.items()}
        self._constant = all(template.constant for template in self._templates.values())
        if recipe.checkpoint.interval != "auto" and "save_steps" in {*names, *fixed}:
            problems.add(
                ("checkpoint", "interval"),
                "save_steps says when to save as well, in steps; give one of them",
            )
        matter = interacting({*names, *fixed}) & set(names)
        self._alone = [
            (position, name, f"{json.dumps(name)}:")
            for position, name in enumerate(names)
            if name not in matter
        ]
        self._resolved = PerValue(
            self._resolve, [position for position, name in enumerate(names) if name in matter]
        )
        used = {row.name for row in HYPERPARAMETERS if train.engine in row.engines}
        derived = [name for name in BATCH[1:] if fixed.get(name) is None]
        self.layout = {
            name: fixed.get(name) for name in (*LAYOUT, *derived) if name in used - {*names}
        }
        self._pieces: dict[tuple[str, type, Any], str] = {}
        self._shared: tuple[dict[str, Any], str] | None = None

    def payload(self, row: Row, index: int) -> dict[str, Any]:
        """Return what the training needs, with the complete parameters."""
        recipe = self._recipe
        assert recipe.objective is not None
        parameters = self._parameters(row)
        return {
            **self._common(parameters, index)[0],
            "parameters": parameters,
            # Seconds, which a dump of the model would write as a text for people.
            "checkpoint": {
                "interval": recipe.checkpoint.interval,
                "keep": recipe.checkpoint.keep,
            },
        }

    def identity(self, row: Row, index: int) -> str:
        """Return the cell's id: the complete parameters count, so that it doesn't matter whether a
        default is written. How processes share the work counts only where it is swept, and how a
        batch is spread over them where it is given, so that a training can continue with more.
        """
        resolved = self._resolved(row)
        pieces = resolved.pieces.copy()
        for position, name, key in self._alone:
            entry = row[position]
            if entry is not ABSENT:
                pieces[resolved.places[name]] = key + entry.text
        params = ",".join(pieces)
        payload = self._common(None if self._constant else self._parameters(row), index)[1]
        return digest(f'{{"kind":"train","params":{{{params}}},"payload":{payload}}}')

    def _deepspeed(self) -> Mapping[str, Any]:
        """The recipe's own configuration of DeepSpeed."""
        train = self._recipe.train
        assert train is not None
        path = ("train", "deepspeed")
        if train.deepspeed is None:
            return {}
        if train.engine != "deepspeed":
            self._problems.add(path, f"the engine is {train.engine}, so it would not be used")
        if not isinstance(train.deepspeed, str):
            return train.deepspeed
        try:
            return deepspeed.read(train.deepspeed, self._folder)
        except ValueError as error:
            self._problems.add(path, str(error))
            return {}

    def _parameters(self, row: Row) -> dict[str, Any]:
        values = dict(self._resolved(row).values)
        for position, name, _ in self._alone:
            if row[position] is not ABSENT:
                values[name] = row[position].value
        return values

    def _resolve(self, row: Row) -> _Resolved:
        given = self.params(row)
        later = {name: value for name, value in given.items() if is_token(value)}
        known = {name: value for name, value in given.items() if name not in later}
        known |= {name: self._stand_ins[name] for name in later if name in self._stand_ins}
        try:
            # What an earlier stage decides is checked by the training itself.
            values = {**resolve(known, self._setting), **later}
        except Contradiction as error:
            shown = ", ".join(
                f"{name}={entry.text}"
                for name, entry in zip(self.names, row, strict=True)
                if entry is not ABSENT
            )
            suffix = f" (in the cell with {shown})" if shown else ""
            for name, message in error.mistakes:
                path = self._places.get(name, ("params", name))
                if name.startswith("train."):
                    path = tuple(name.split("."))
                self._problems.add(path, message + suffix)
            self._problems.raise_any()
            raise
        counted = sorted(name for name in values if name not in self.layout)
        pieces = [self._piece(name, values[name]) for name in counted]
        return _Resolved(values, pieces, {name: place for place, name in enumerate(counted)})

    def _piece(self, name: str, value: Any) -> str:
        # Most values are defaults, the same in every combination.
        key = (name, value.__class__, None if isinstance(value, (list, dict)) else value)
        piece = self._pieces.get(key)
        if piece is None:
            piece = f"{json.dumps(name)}:{canonical_json(value)}"
            if not isinstance(value, (list, dict)):
                self._pieces[key] = piece
        return piece

    def _common(
        self, parameters: Mapping[str, Any] | None, index: int
    ) -> tuple[dict[str, Any], str]:
        """Return what the payload has besides the parameters, and its JSON for the digest."""
        if self._shared is not None:
            return self._shared
        recipe, data = self._recipe, self._recipe.train.data  # type: ignore[union-attr]
        assert recipe.train is not None
        assert recipe.objective is not None
        texts = self._render(parameters or {}, index)
        model = texts.get(("train", "model"))
        tokenizer = texts.get(("train", "data", "tokenizer"))
        common = {
            "engine": recipe.train.engine,
            "model": None if model is None else self._absolute(model),
            "data": {
                "source": data.source,
                "files": [
                    self._pattern(texts["train", "data", "files", position])
                    for position in range(len(data.files))
                ],
                "tokenizer": None if tokenizer is None else self._absolute(tokenizer),
                "eval_fraction": data.eval_fraction,
                "packing": data.packing,
            },
            "objective": recipe.objective.model_dump(),
            "env": {name: texts["env", name] for name in recipe.env},
        }
        if self._setting.deepspeed:
            common["deepspeed"] = dict(self._setting.deepspeed)
        result = common, canonical_json(common)
        if self._constant:
            self._shared = result
        return result


def same(first: Any, second: Any) -> bool:
    """Return whether two values are equal; 1 and 1.0 are, 1 and true are not."""
    return isinstance(first, bool) == isinstance(second, bool) and bool(first == second)


def digest(text: str) -> str:
    """Return the id of the cell that a canonical text describes."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
