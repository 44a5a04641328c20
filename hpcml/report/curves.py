"""The courses of metrics, thinned to what a picture can show."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcml.files import plain_errors
from hpcml.runs.events import JsonLines, parse_line

#: Metrics that have no course of their own.
_NO_COURSE = frozenset({"step", "total_steps"})
_NUMBERS = frozenset({float, int, type(None)})

#: Bytes of metrics that are parsed for one run; of more, every n-th line is taken.
PARSED_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric of one cell.

    Attributes:
        steps: strictly increasing.
        values: as many; None where the program reported no finite number.
    """

    steps: list[int]
    values: list[float | None]


def read_curves(path: Path, points: int, share: int) -> dict[str, Curve]:
    """The curves of a metrics file.

    Args:
        path: the file; a missing one has no curves.
        points: the most points that a curve may have.
        share: how many bytes of it may be parsed, about.
    """
    courses: dict[str, dict[int, float | None]] = {}
    for place, record in enumerate(_records(path, share)):
        step = record.get("step", place)
        if not isinstance(step, int) or isinstance(step, bool):
            continue
        for name, value in record.items():
            # As the results do: numbers are metrics, and null stands for NaN.
            if type(value) in _NUMBERS and name not in _NO_COURSE:
                # A later line for the same step replaces the earlier one.
                if name in courses:
                    courses[name][step] = value
                else:
                    courses[name] = {step: value}
    return {name: _thinned(course, points) for name, course in courses.items()}


def finite(value: float | None) -> float | None:
    """The value, rounded to what a picture needs; None if it is no finite number."""
    if value is None:
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return float(f"{value:.6g}") if math.isfinite(value) else None


def size(path: Path) -> int:
    """Bytes of a file, 0 of one that is not there."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _records(path: Path, share: int) -> list[dict[str, Any]]:
    with plain_errors(f"read {path}"):
        data = JsonLines(path).read_bytes()
    lines = data.splitlines()
    every = math.ceil(len(data) / share) if data else 1
    if every > 1:
        lines = [*lines[:-1:every], lines[-1]]
    try:
        # All lines at once take a third of the time.
        records = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        return [record for line in lines for record in parse_line(line)]
    return [record for record in records if isinstance(record, dict)]


def _thinned(course: dict[int, float | None], points: int) -> Curve:
    """A curve of at most so many points.

    The steps are divided into buckets of equal size; of each the smallest and the largest value
    stay, in their order, so that no peak is lost. The first and the last point stay as well.
    """
    steps = sorted(course)
    if len(steps) > points:
        inner = steps[1:-1]
        buckets = max(1, (points - 2) // 2)
        kept = {steps[0], steps[-1]}
        for number in range(buckets):
            bucket = inner[len(inner) * number // buckets : len(inner) * (number + 1) // buckets]
            known = [
                (value, step)
                for step in bucket
                if (value := course[step]) is not None and -math.inf < value < math.inf
            ]
            kept |= {min(known)[1], max(known)[1]} if known else set(bucket[:1])
        steps = sorted(kept)
    return Curve(steps, [finite(course[step]) for step in steps])
