"""Curves keep their shape when they are thinned."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hpcml.report.curves import read_curves


def curve(path: Path, *records: object, points: int = 1000, share: int = 1 << 20):  # type: ignore[no-untyped-def]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_curves(path, points, share)


def test_each_metric_has_its_course(tmp_path: Path) -> None:
    found = curve(
        tmp_path / "m",
        {"step": 1, "loss": 2.0, "total_steps": 9},
        {"step": 2, "loss": 1.5, "acc": 1},
    )
    assert (found["loss"].steps, found["loss"].values) == ([1, 2], [2.0, 1.5])
    assert (found["acc"].steps, found["acc"].values) == ([2], [1.0])
    assert set(found) == {"loss", "acc"}


def test_a_later_line_replaces_an_earlier_one(tmp_path: Path) -> None:
    found = curve(tmp_path / "m", *({"step": s, "loss": v} for s, v in [(1, 5), (2, 4), (1, 3)]))
    assert (found["loss"].steps, found["loss"].values) == ([1, 2], [3.0, 4.0])


def test_what_is_no_finite_number_is_a_gap(tmp_path: Path) -> None:
    values = [float("nan"), float("inf"), None, 10**400, 1]
    found = curve(tmp_path / "m", *({"step": s, "loss": v} for s, v in enumerate(values)))
    assert found["loss"].values == [None, None, None, None, 1.0]


def test_lines_without_a_step_are_counted(tmp_path: Path) -> None:
    found = curve(
        tmp_path / "m", {"loss": 2}, {"loss": 1}, {"loss": "text"}, {"step": "x", "loss": 7}
    )
    assert (found["loss"].steps, found["loss"].values) == ([0, 1], [2.0, 1.0])


def test_torn_lines_cost_only_themselves(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b'{"step": 1, "loss": 2}\n{"step": 2, "lo{"step": 3, "loss": 1}\n{"step": 4')
    assert read_curves(path, 1000, 1 << 20)["loss"].steps == [1, 3]


def test_a_missing_file_has_no_curves(tmp_path: Path) -> None:
    assert read_curves(tmp_path / "none", 1000, 1 << 20) == {}


@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300),
    points=st.integers(4, 80),
)
def test_no_peak_is_lost(tmp_path_factory, values: list[float], points: int) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.getbasetemp() / "peaks"
    whole = curve(path, *({"step": s, "loss": v} for s, v in enumerate(values)))["loss"]
    thin = read_curves(path, points, 1 << 20)["loss"]
    assert len(thin.steps) <= points
    assert thin.steps == sorted(set(thin.steps))
    assert {thin.steps[0], thin.steps[-1]} == {0, len(values) - 1}
    assert set(zip(thin.steps, thin.values, strict=True)) <= set(
        zip(whole.steps, whole.values, strict=True)
    )
    assert (min(thin.values), max(thin.values)) == (min(whole.values), max(whole.values))


def test_of_very_many_lines_some_are_read(tmp_path: Path) -> None:
    records = [{"step": step, "loss": step / 2} for step in range(10_001)]
    found = curve(tmp_path / "m", *records, share=20_000)["loss"]
    assert found.steps[0] == 0
    assert found.steps[-1] == 10_000
    assert 400 < len(found.steps) < 1000
