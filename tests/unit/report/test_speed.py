"""The speed of an inference over time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcml.report.speed import speed


def write(cell: Path, worker: int, *lines: tuple[float, float, int, int]) -> None:
    folder = cell / "workers" / str(worker)
    folder.mkdir(parents=True)
    names = ("begun_at", "reported_at", "output_tokens", "step")
    text = "".join(json.dumps(dict(zip(names, line, strict=True))) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)


def test_workers_are_added(tmp_path: Path) -> None:
    write(tmp_path, 0, (100, 110, 50, 5), (100, 120, 150, 15))
    write(tmp_path, 1, (110, 120, 200, 10))
    assert speed(tmp_path) == [(105, 5, 0.5), (115, 30, 2)]


def test_a_pause_between_attempts_is_slow(tmp_path: Path) -> None:
    write(tmp_path, 0, (100, 110, 50, 5), (140, 150, 150, 15))
    assert [tokens for _, tokens, _ in speed(tmp_path)] == [5, 0, 0, 0, 10]


def test_nothing_is_lost(tmp_path: Path) -> None:
    lines = [(1000.0, 1000 + 2.3 * n, 37 * n, 3 * n) for n in range(1, 999)]
    write(tmp_path, 0, *lines)
    found = speed(tmp_path)
    width = found[1][0] - found[0][0]
    assert len(found) == 300
    assert sum(tokens for _, tokens, _ in found) * width == pytest.approx(37 * 998)
    assert sum(rows for *_, rows in found) * width == pytest.approx(3 * 998)


def test_lines_without_times_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "workers" / "0"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 3, "output_tokens": 4}\n')
    assert speed(tmp_path) == []
