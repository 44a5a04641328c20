"""What a parameter is drawn from, by chance or by a search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcml.recipe.problems import Problems, did_you_mean

Path = tuple[str | int, ...]

# Further apart, their difference is no number any more.
_MOST = 1e300
_KINDS = ("uniform", "loguniform", "int", "choice")


@dataclass(frozen=True)
class Distribution:
    """``uniform`` or ``loguniform`` over two numbers, ``int`` over two with both, or ``choice``.

    Attributes:
        argument: the two numbers, or the values.
    """

    kind: str
    argument: list[Any]

    def draw(self, u: float) -> Any:
        """The value at the part ``u`` of the way, in [0, 1)."""
        if self.kind == "choice":
            return self.argument[int(u * len(self.argument))]
        low, high = self.argument
        if self.kind == "int":
            first, count = int(low), int(high) - int(low) + 1
            return first + int(u * count)
        if self.kind == "uniform":
            return _rounded(low + u * (high - low), low, high)
        start, width = math.log(low), math.log(high) - math.log(low)
        return _rounded(math.exp(start + u * width), low, high)

    @property
    def extremes(self) -> list[Any]:
        """Values that stand for all: those of a choice, else both ends and one between them."""
        if self.kind == "choice":
            return self.argument
        low, high = self.argument
        if self.kind == "int":
            return [int(low), int(high)]
        return [float(low), float(high), self.draw(0.4321)]


def read_distribution(
    written: Mapping[str, Any], path: Path, problems: Problems
) -> Distribution | None:
    """The distribution that a recipe names; a mistake is recorded, and the result is None."""
    if len(written) != 1:
        problems.add(path, f"must have exactly one of {', '.join(_KINDS)}")
        return None
    ((kind, argument),) = written.items()
    path = (*path, kind)
    if kind not in _KINDS:
        problems.add(path, f"there is no distribution {kind!r}{did_you_mean(kind, _KINDS)}")
        return None
    if kind == "choice":
        if not isinstance(argument, list) or not argument:
            problems.add(path, "must be a list of values")
            return None
        return Distribution(kind, argument)
    if not (
        isinstance(argument, list)
        and len(argument) == 2
        and all(isinstance(b, (int, float)) and not isinstance(b, bool) for b in argument)
        and all(-_MOST <= b <= _MOST for b in argument)
        and argument[0] < argument[1]
    ):
        problems.add(path, "must be two numbers [a, b] with a < b")
        return None
    low, high = argument
    if kind == "int" and not (float(low).is_integer() and float(high).is_integer()):
        problems.add(path, "must be two whole numbers [a, b] with a < b")
        return None
    if kind == "loguniform" and low <= 0:
        problems.add(path, "must be two numbers [a, b] with 0 < a < b")
        return None
    return Distribution(kind, argument)


def _rounded(value: float, low: float, high: float) -> float:
    # Readable, and the same on every machine: the last digits of exp and log are not.
    return min(max(float(f"{value:.9g}"), float(low)), float(high))
