"""A metric while it is being reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcml.runs.course import Course, summed


@pytest.mark.parametrize("count", [1, 1024, 1025, 2000, 5000])
def test_the_newest_point_is_never_thinned_away(tmp_path: Path, count: int) -> None:
    path = tmp_path / "metrics.jsonl"
    course = Course(path, "loss")
    for step in range(count):
        with path.open("a") as file:
            file.write(json.dumps({"step": step, "loss": -step}) + "\n")
        if step % 700 == 0:
            course.look()
    points = course.look()
    assert points[-1] == (count - 1, 1 - count)
    assert len(points) <= 1024
    assert points == sorted(points)


def test_several_reporters_together() -> None:
    assert summed([[(1, 10), (3, 30)], [(2, 5), (4, 6)]]) == [10, 15, 35, 36]
    assert summed([]) == []
