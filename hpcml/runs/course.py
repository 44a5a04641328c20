"""The course of a metric while it is being reported."""

from __future__ import annotations

from pathlib import Path

from hpcml.runs.events import JsonLines, numbers

# With more points than this, every second one goes.
_POINTS = 1024


class Course:
    """One metric of a metrics file that grows; each look reads only what is new.

    Args:
        path: the file; a missing one is an empty one.
        metric: the metric's name.
        along: what the values are ordered by: another number of the same line.
    """

    def __init__(self, path: Path, metric: str, along: str = "step") -> None:
        self._lines = JsonLines(path)
        self._metric = metric
        self._along = along
        self._values: dict[float, float] = {}
        self._count = 0

    def look(self) -> list[tuple[float, float]]:
        """The points so far, ascending and thinned; of several for a place the last one."""
        for record in self._lines.read():
            found = numbers(record)
            if self._metric in found:
                self._values[found.get(self._along, self._count)] = found[self._metric]
            self._count += 1
        while len(self._values) > _POINTS:
            # From the end, since the newest one is what they come to.
            self._values = dict(sorted(self._values.items(), reverse=True)[::2])
        return sorted(self._values.items())


def summed(courses: list[list[tuple[float, float]]]) -> list[float]:
    """What several reporters have together at each time at which one of them says its value."""
    last: dict[int, float] = {}
    total = 0.0
    together = []
    points = [(at, who, value) for who, course in enumerate(courses) for at, value in course]
    for _, who, value in sorted(points):
        total += value - last.get(who, 0.0)
        last[who] = value
        together.append(total)
    return together
