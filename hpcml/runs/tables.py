"""Writing results for other programs: JSON, CSV and Parquet."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcml.files import plain_errors
from hpcml.runs.results import Results

_INT64 = range(-(2**63), 2**63)


def json_value(value: Any) -> Any:
    """The value as strict JSON has it: a number that is not finite becomes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: json_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_value(item) for item in value]
    return value


def to_json(results: Results) -> str:
    """A JSON object with the run's path and one object per row."""
    rows = [
        {
            "rank": row.rank,
            "id": row.cell.id,
            "index": row.cell.index,
            "state": row.cell.state,
            "params": row.cell.params,
            "metrics": row.cell.metrics,
            "attempts": row.cell.attempts,
            "step": row.cell.step,
            "checkpoint": str(row.checkpoint) if row.checkpoint else None,
            "reason": row.cell.reason,
        }
        for row in results.rows
    ]
    document = {"run": str(results.run.path), "pending": results.pending, "cells": rows}
    return json.dumps(json_value(document), indent=1)


def to_csv(results: Results) -> str:
    """A table with a header line. Absent values are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(results.columns)
    for record in results.records():
        writer.writerow([_csv_field(record[column]) for column in results.columns])
    return text.getvalue()


def write_parquet(results: Results, path: Path) -> None:
    """Write the table so that the file at ``path`` is the old or the new one, never a part."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = results.records()
    columns = {
        column: _arrow_column([record[column] for record in records]) for column in results.columns
    }
    table = pa.table({name: pa.array(values, kind) for name, (values, kind) in columns.items()})
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with plain_errors(f"write {path}"):
        try:
            pq.write_table(table, aside)
            aside.replace(path)
        finally:
            with suppress(OSError):
                aside.unlink()


def _csv_field(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else _as_text(value)


def _arrow_column(values: list[Any]) -> tuple[list[Any], str]:
    """Values and their Arrow type; a column whose values have no common type becomes text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {bool}:
        return values, "bool"
    if kinds == {int} and all(value is None or value in _INT64 for value in values):
        return values, "int64"
    if kinds and kinds <= {int, float}:
        with suppress(OverflowError):
            return [None if value is None else float(value) for value in values], "float64"
    return [None if value is None else _as_text(value) for value in values], "string"


def _as_text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    # Lone surrogates have no UTF-8 form.
    return text.encode("utf-8", "backslashreplace").decode()
