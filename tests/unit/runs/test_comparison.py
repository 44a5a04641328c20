"""Several runs as one ranking."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from hpcml.errors import UserError
from hpcml.runs import tables
from hpcml.runs.comparison import Comparison, compare
from hpcml.runs.results import results
from tests.unit.runs.fakes import FakeRun, make_cells

LOSS = {"metric": "loss", "mode": "min"}


def run_of(root: Path, run_id: str, params: list[dict[str, Any]], **kinds: Any) -> FakeRun:
    """A run whose cells have these parameters."""
    defaults = kinds.pop("defaults", {})
    cells = make_cells(len(params))
    for cell, given in zip(cells, params, strict=True):
        cell["params"] = given
        cell["payload"] = {"parameters": {**defaults, **given}} if defaults else {}
    return FakeRun(root, cells, run_id=run_id, objective=kinds.pop("objective", LOSS), **kinds)


def together(*runs: FakeRun) -> Comparison:
    return compare([results(run.folder) for run in runs])


def test_one_ranking_over_all_runs(tmp_path: Path) -> None:
    one = run_of(tmp_path, "aaa", [{"lr": 1, "size": 8}, {"lr": 2, "size": 8}], name="one")
    two = run_of(tmp_path, "bbb", [{"lr": 1, "size": 16}, {"lr": 1, "size": 32}], name="two")
    one.done(0, loss=3.0)
    one.failed(1, "boom", loss=0.5)
    two.done(0, loss=2.0, accuracy=0.5)
    two.done(1, loss=4.0)
    found = together(one, two)
    ranked = [(name, row.rank, row.cell.index) for name, row in found.rows]
    assert ranked == [("two", 1, 0), ("one", 2, 0), ("two", 3, 1), ("one", None, 1)]
    assert found.best is not None
    assert found.best[0] == "two"
    # What one sweeps and the other has fixed is known of both.
    columns = ["rank", "run", "cell", "index", "state", "lr", "size", "loss", "accuracy"]
    assert found.columns[:9] == columns
    records = found.records()
    assert [(record["lr"], record["size"]) for record in records] == [
        *((1, 16), (1, 8), (1, 32), (2, 8))
    ]
    assert records[0]["checkpoint"] is None
    rows = list(csv.DictReader(io.StringIO(tables.to_csv(found))))
    assert [row["run"] for row in rows] == ["two", "one", "two", "one"]
    document = json.loads(tables.to_json(found))
    assert [(each["name"], each["run"]) for each in document["runs"]] == [
        *(("one", str(one.folder.path)), ("two", str(two.folder.path)))
    ]
    assert document["cells"][0]["run"] == "two"
    assert document["cells"][0]["rank"] == 1
    tables.write_parquet(found, tmp_path / "t.parquet")
    table = pq.read_table(tmp_path / "t.parquet")
    assert table.column_names == found.columns
    assert table["size"].to_pylist() == [16, 8, 32, 8]


def test_what_is_fixed_to_other_values_is_a_column(tmp_path: Path) -> None:
    one = run_of(tmp_path, "aaa", [{"size": 8, "same": 1, "mine": "x"}])
    two = run_of(tmp_path, "bbb", [{"size": 16, "same": 1}])
    one.done(0, loss=1.0)
    two.done(0, loss=2.0)
    assert list(together(one, two).params) == ["size", "mine"]
    assert [record["mine"] for record in together(one, two).records()] == ["x", None]


def test_what_a_training_leaves_to_the_default_has_its_value(tmp_path: Path) -> None:
    defaults = {"learning_rate": 1e-3, "seed": 0, "r": None}
    one = run_of(tmp_path, "aaa", [{"seed": 1}], kind="train", defaults=defaults)
    two = run_of(
        tmp_path, "bbb", [{"learning_rate": 1e-3}, {"learning_rate": 2e-3}], defaults=defaults
    )
    one.done(0, loss=1.0)
    two.done(1, loss=2.0)
    found = together(one, two)
    assert list(found.params) == ["learning_rate", "seed"]
    assert [(record["learning_rate"], record["seed"]) for record in found.records()] == [
        *((1e-3, 1), (2e-3, 0))
    ]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"metric": "loss", "mode": "max"}, r"toy/bbb by loss \(max\)"),
        ({"metric": "accuracy", "mode": "min"}, r"toy/bbb by accuracy \(min\)"),
        (None, "toy/bbb by nothing"),
    ],
)
def test_other_objectives_are_refused(
    tmp_path: Path, other: dict[str, str] | None, words: str
) -> None:
    one = run_of(tmp_path, "aaa", [{"a": 1}])
    two = run_of(tmp_path, "bbb", [{"a": 2}], objective=other)
    with pytest.raises(UserError, match=rf"toy/aaa by loss \(min\); {words}"):
        together(one, two)


def test_runs_have_names_of_their_own(tmp_path: Path) -> None:
    def names(*runs: FakeRun) -> list[str]:
        return list(together(*runs).runs)

    one = run_of(tmp_path / "here", "aaa", [{"a": 1}])
    other = run_of(tmp_path / "here", "aaa", [{"a": 1}], name="other")
    two = run_of(tmp_path / "here", "bbb", [{"a": 2}])
    there = run_of(tmp_path / "there", "aaa", [{"a": 1}])
    assert names(one, other) == ["toy", "other"]
    assert names(one, two) == ["toy/aaa", "toy/bbb"]
    assert names(one, there) == [str(one.folder.path), str(there.folder.path)]


def test_a_shorter_training_of_a_halving_comes_after_whole_ones(tmp_path: Path) -> None:
    halving = run_of(tmp_path, "aaa", [{"a": n} for n in range(3)], name="halved")
    plan = halving.folder.plan_file
    document = json.loads(plan.read_bytes())
    document["halving"] = {**LOSS, "steps": [1, 3], "cells": [3, 1]}
    plan.write_text(json.dumps(document))
    halving.folder.__dict__.clear()
    halving.folder = type(halving.folder)(plan.parent)
    for index in range(3):
        halving.start(index, rung=2 if index == 0 else 1)
        halving.metrics(index, {"loss": float(index)})
    whole = run_of(tmp_path, "bbb", [{"a": 9}], name="whole")
    whole.done(0, loss=5.0)
    ranked = [(name, row.cell.index) for name, row in together(halving, whole).rows]
    assert ranked == [("halved", 0), ("whole", 0), ("halved", 1), ("halved", 2)]


def test_a_parameter_may_be_called_like_any_column(tmp_path: Path) -> None:
    one = run_of(tmp_path, "aaa", [{"run": 1, "loss": 1, "metric.loss": 2}])
    two = run_of(tmp_path, "bbb", [{"run": 2, "loss": 2, "metric.loss": 3}])
    one.done(0, loss=0.5)
    found = together(one, two)
    assert len(set(found.columns)) == len(found.columns)
    (record,) = found.records()
    assert (record["run"], record["param.run"]) == ("toy/aaa", 1)
    assert (record["loss"], record["metric.loss"], record["metric.metric.loss"]) == (1, 2, 0.5)
