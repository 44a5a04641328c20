"""The ranking, and the tables made from it."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcml.errors import UserError
from hpcml.runs import tables
from hpcml.runs.results import checkpoint_of, column_names, rank_cells, results
from hpcml.runs.status import STATES, CellState
from tests.unit.runs.fakes import FakeRun, make_cells

LOSS = {"metric": "loss", "mode": "min"}

metric = st.one_of(
    st.none(), st.floats(), st.integers(min_value=-(10**400), max_value=10**400), st.integers(-3, 3)
)
cells = st.lists(st.tuples(st.sampled_from(STATES), metric), max_size=12).map(
    lambda drawn: [
        CellState(f"c{index}", index, state, metrics={} if value is None else {"loss": value})
        for index, (state, value) in enumerate(drawn)
    ]
)


@given(cells, st.sampled_from(["min", "max"]))
def test_ranking(drawn: list[CellState], mode: str) -> None:
    ranked = rank_cells(drawn, ("loss", mode))
    assert sorted(cell.index for _, cell in ranked) == list(range(len(drawn)))
    ranks = [rank for rank, _ in ranked if rank is not None]
    assert ranks == list(range(1, len(ranks) + 1))
    # First those with a rank, then those without, the failed ones last.
    order = [(rank is None, cell.state == "failed") for rank, cell in ranked]
    assert order == sorted(order)
    values = [cell.metrics["loss"] for rank, cell in ranked if rank is not None]
    assert values == sorted(values, reverse=mode == "max")
    assert all(isinstance(value, int) or math.isfinite(value) for value in values)
    for rank, cell in ranked:
        if rank is None and cell.state not in ("failed", "pending") and "loss" in cell.metrics:
            assert not math.isfinite(cell.metrics["loss"])


@given(cells)
def test_without_an_objective_the_order_is_that_of_the_cells(drawn: list[CellState]) -> None:
    ranked = rank_cells(drawn, None)
    assert all(rank is None for rank, _ in ranked)
    good = [cell.index for _, cell in ranked if cell.state != "failed"]
    assert good == sorted(good)


def ranked_run(tmp_path: Path) -> FakeRun:
    fake = FakeRun(tmp_path, make_cells(6), objective=LOSS)
    fake.done(0, loss=2.0, accuracy=0.5)
    fake.done(1, loss=math.nan)
    fake.done(2, loss=1.0)
    fake.failed(3, "exit code 1: boom", loss=0.1)
    fake.start(4)
    return fake


def test_the_table(tmp_path: Path) -> None:
    fake = ranked_run(tmp_path)
    fake.checkpoint(2, 10, pointer="final")
    fake.checkpoint(0, 10)
    found = results(fake.folder)
    assert [row.cell.index for row in found.rows] == [2, 0, 1, 4, 3]
    assert [row.rank for row in found.rows] == [1, 2, None, None, None]
    assert found.pending == 1
    assert found.best
    assert found.best.cell.index == 2
    assert found.columns == [
        *("rank", "cell", "index", "state", "learning_rate", "seed", "loss", "accuracy"),
        *("attempts", "step", "checkpoint", "reason"),
    ]
    record = found.records()[0]
    assert record["checkpoint"] == str(fake.dir(2) / "checkpoints" / "step-10")
    assert found.records()[-1]["reason"] == "exit code 1: boom"


def test_a_name_that_is_taken_says_what_it_is(tmp_path: Path) -> None:
    cells = make_cells(2, state=["x", "y"], loss=[1, 2])
    fake = FakeRun(tmp_path, cells, objective=LOSS)
    fake.done(0, loss=1.0, rank=3.0)
    found = results(fake.folder)
    assert found.params == {
        "learning_rate": "learning_rate",
        "loss": "loss",
        "seed": "seed",
        "state": "param.state",
    }
    assert found.metrics == {"loss": "metric.loss", "rank": "metric.rank"}
    assert len(set(found.columns)) == len(found.columns)


names = st.sampled_from(["a", "state", "metric.a", "param.state", "metric.metric.a", "rank"])


@given(st.lists(names, unique=True), st.lists(names, unique=True))
def test_every_column_has_a_name_of_its_own(params: list[str], metrics: list[str]) -> None:
    given_params, given_metrics = column_names(params, metrics, "time")
    assert (list(given_params), list(given_metrics)) == (params, metrics)
    columns = ["rank", "state", "time", *given_params.values(), *given_metrics.values()]
    assert len(set(columns)) == len(columns)


def test_a_pointer_to_nowhere_is_no_checkpoint(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path, make_cells(1))
    assert checkpoint_of(fake.dir(0)) is None
    newest = fake.checkpoint(0, 3)
    for pointer in ("", "step-9", "../..", "\0", "/etc"):
        (newest.parent / "final").write_text(pointer)
        assert checkpoint_of(fake.dir(0)) == newest
    (newest.parent / "final").write_bytes(b"\xff")
    assert checkpoint_of(fake.dir(0)) == newest


def test_json_is_strict(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    text = tables.to_json(results(ranked_run(tmp_path).folder))
    document = json.loads(text, parse_constant=refuse)
    assert document["pending"] == 1
    assert document["cells"][0]["metrics"]["loss"] == 1.0
    assert document["cells"][2]["metrics"]["loss"] is None


def test_csv_keeps_every_value_apart(tmp_path: Path) -> None:
    texts = ['a,"b"', "line\nline", "", "ü"]
    fake = FakeRun(tmp_path, make_cells(4, text=texts), objective=LOSS)
    for index in range(4):
        fake.done(index, loss=float(index))
    rows = list(csv.DictReader(io.StringIO(tables.to_csv(results(fake.folder)))))
    assert [row["text"] for row in rows] == texts
    assert [row["loss"] for row in rows] == ["0.0", "1.0", "2.0", "3.0"]
    assert rows[0]["checkpoint"] == ""


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda children: st.lists(children, max_size=2) | st.dictionaries(st.text(), children),
    max_leaves=4,
)


@given(column=st.lists(json_values, min_size=2, max_size=6))
def test_any_column_can_be_written(column: list[Any], tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("table")
    fake = FakeRun(folder, make_cells(len(column), mixed=column))
    for index in range(len(column)):
        fake.start(index)
    found = results(fake.folder)
    tables.to_csv(found)
    json.loads(tables.to_json(found))
    tables.write_parquet(found, folder / "table.parquet")
    table = pq.read_table(folder / "table.parquet")
    assert table.num_rows == len(column)
    assert sorted(path.name for path in folder.iterdir()) == [".hpcml-runs", "table.parquet", "toy"]


@pytest.mark.parametrize(
    ("column", "kind", "written"),
    [
        ([1, 2, None], "int64", [1, 2, None]),
        ([1, 2.5, None], "double", [1.0, 2.5, None]),
        ([True, False, None], "bool", [True, False, None]),
        ([1, "auto", 2.5], "string", ["1", "auto", "2.5"]),
        ([True, 1, "x"], "string", ["true", "1", "x"]),
        ([2**70, 1, 2], "double", [2.0**70, 1.0, 2.0]),
        ([10**400, 1, 2], "string", ["1" + "0" * 400, "1", "2"]),
        ([[1, 2], {"a": 1}, None], "string", ["[1, 2]", '{"a": 1}', None]),
    ],
)
def test_the_type_of_a_column(
    tmp_path: Path, column: list[Any], kind: str, written: list[Any]
) -> None:
    fake = FakeRun(tmp_path, make_cells(3, mixed=column))
    for index in range(3):
        fake.start(index)
    tables.write_parquet(results(fake.folder), tmp_path / "table.parquet")
    table = pq.read_table(tmp_path / "table.parquet")
    assert str(table.schema.field("mixed").type) == kind
    assert table["mixed"].to_pylist() == written


def test_an_empty_table_can_be_written(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path, make_cells(1))
    tables.write_parquet(results(fake.folder), tmp_path / "table.parquet")
    assert pq.read_table(tmp_path / "table.parquet").num_rows == 0


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path, make_cells(1))
    with pytest.raises(UserError, match="cannot write"):
        tables.write_parquet(results(fake.folder), tmp_path / "absent" / "table.parquet")
