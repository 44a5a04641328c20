"""Recipes of several stages, and what a later stage may say about the results of an earlier one.

A result is known only once the earlier stage has run, so an expression such as
``{{ stages.first.best.params.learning_rate }}`` gives a token, which the worker replaces by the
value when the cell starts. Tokens are marked by NUL, which no value of a recipe can hold.
"""

from __future__ import annotations

import graphlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from hpcml.recipe.problems import Problems, did_you_mean
from hpcml.recipe.yaml import Document

_MARK = "\0"

# Keys of a recipe that all of its stages share unless they have them themselves.
SHARED = (
    "resources",
    "slurm",
    "container",
    "array",
    "checkpoint",
    "retry",
    "env",
    "env_from",
    "code",
)


class Unknown:
    """A value that is known only when a cell starts: it can stand in a text, and no more.

    Attributes:
        token: what stands for it until then.
    """

    def __init__(self, token: str) -> None:
        self.token = token

    def __eq__(self, other: object) -> bool:
        _refuse()

    def __bool__(self) -> bool:
        _refuse()

    def __str__(self) -> str:
        _refuse()


def _refuse() -> NoReturn:
    raise TypeError(
        "the value is known only when the cell starts, so it can be put into a text, and "
        "nothing be computed from it"
    )


class Reference(Mapping[str, Any]):
    """A part of a stage's result, as far as an expression has named it.

    Args:
        run: the stage's run folder, relative to the runs root.
        parts: the names so far, such as ``("best", "params")``.
        params: the names of the parameters that the stage's cells have; None where any may be.
        ranked: whether one of the cells is the best: there is an objective, or only one cell.
    """

    def __init__(
        self,
        run: str,
        parts: tuple[str, ...] = (),
        params: Collection[str] | None = None,
        ranked: bool = True,
    ) -> None:
        self._run = run
        self._parts = parts
        self._params = params
        self._ranked = ranked

    def __getitem__(self, name: str) -> Reference:
        if name not in self._known():
            raise KeyError(name)
        return Reference(self._run, (*self._parts, name), self._params, self._ranked)

    def __eq__(self, other: object) -> bool:
        _refuse()

    def __bool__(self) -> bool:
        _refuse()

    def __iter__(self) -> Iterator[str]:
        return iter(self._known())

    def __len__(self) -> int:
        return len(list(self._known()))

    @property
    def token(self) -> str:
        """What stands for the value until it is known.

        Raises:
            ValueError: it is not a value yet; the message says what may follow.
        """
        if self._parts[:1] == ("best",) and not self._ranked:
            raise ValueError(
                "the stage has several cells, and needs an objective to have a best one"
            )
        known = self._known()
        if not isinstance(known, _Anything) and known:
            here = ".".join(("stages.NAME", *self._parts))
            raise ValueError(f"{here} is no value; go on with one of {', '.join(known)}")
        if self._parts in (("best", "params"), ("best", "metrics")):
            raise ValueError(f"go on with the name of one of the {self._parts[-1]}")
        return f"{_MARK}{self._run}{_MARK}{'.'.join(self._parts)}{_MARK}"

    def _known(self) -> Iterable[str] | _Anything:
        if not self._parts:
            return ("best", "run")
        if self._parts == ("best",):
            return ("checkpoint", "id", "metrics", "params")
        if self._parts[:2] == ("best", "params") and self._params is not None:
            here = len(self._parts) - 2
            names = [name.split(".") for name in self._params]
            below = [name[here] for name in names if name[:here] == [*self._parts[2:]] != name]
            return dict.fromkeys(below)
        if self._parts[:2] in (("best", "params"), ("best", "metrics")):
            return _Anything()
        return ()


class _Anything:
    """Contains every name: which metrics there will be is not known yet."""

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())


#: What ``{{ halving.steps }}`` stands for until a rung begins.
RUNG_STEPS = Reference("", ("halving", "steps"))


class Stages(dict[str, Reference]):
    """The stages that an expression may name."""


def is_token(value: object) -> bool:
    """Whether ``value`` is a token and nothing else."""
    return (
        isinstance(value, str)
        and value.startswith(_MARK)
        and value.endswith(_MARK)
        and value.count(_MARK) == 3
    )


def in_order(document: Document) -> list[tuple[str, tuple[str, ...]]]:
    """The names of the stages and what each needs, each after what it needs.

    Raises:
        UserError: a stage is no mapping, needs an unknown one, or needs itself by a detour.
    """
    problems = Problems(document)
    stages = document.data["stages"]
    if not isinstance(stages, dict) or not stages:
        problems.add(("stages",), "must be a mapping from names to recipes without a name")
        problems.raise_any()
    needs: dict[str, tuple[str, ...]] = {}
    for name, stage in stages.items():
        wanted = stage.get("needs") or [] if isinstance(stage, dict) else None
        if not isinstance(wanted, list):
            where = ("stages", name) if wanted is None else ("stages", name, "needs")
            problems.add(where, "must be a mapping" if wanted is None else "must be a list")
            continue
        for index, other in enumerate(wanted):
            if other not in stages:
                place = ("stages", name, "needs", index)
                problems.add(
                    place, f"there is no stage {other!r}{did_you_mean(str(other), stages)}"
                )
        needs[name] = tuple(map(str, wanted))
    problems.raise_any()
    try:
        ordered = list(graphlib.TopologicalSorter(needs).static_order())
    except graphlib.CycleError as error:
        problems.add(("stages",), f"they need each other in a circle: {' -> '.join(error.args[1])}")
        problems.raise_any()
        raise
    # As written where the needs allow it.
    position = {name: index for index, name in enumerate(stages)}
    done: list[str] = []
    left = sorted(ordered, key=position.__getitem__)
    while left:
        ready = next(name for name in left if set(needs[name]) <= set(done))
        done.append(ready)
        left.remove(ready)
    return [(name, needs[name]) for name in done]
