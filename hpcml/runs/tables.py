"""Writing results for other programs: JSON, CSV and Parquet."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from hpcml.files import plain_errors

_INT64 = range(-(2**63), 2**63)


class Table(Protocol):
    """The results of a run, or of several."""

    @property
    def columns(self) -> list[str]:
        """All column names in order."""

    def records(self) -> list[dict[str, Any]]:
        """The rows with the columns as keys; absent values are ``None``."""

    def document(self) -> dict[str, Any]:
        """The same, and what has no column, for JSON."""


def json_value(value: Any) -> Any:
    """The value as strict JSON has it: a number that is not finite becomes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: json_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_value(item) for item in value]
    return value


def to_json(table: Table) -> str:
    """The whole as a JSON object."""
    return json.dumps(json_value(table.document()), indent=1)


def to_csv(table: Table) -> str:
    """A table with a header line. Absent values are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    for record in table.records():
        writer.writerow([_csv_field(record[column]) for column in table.columns])
    return text.getvalue()


def write_parquet(table: Table, path: Path) -> None:
    """Write the table so that the file at ``path`` is the old or the new one, never a part."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = table.records()
    columns = {
        column: _arrow_column([record[column] for record in records]) for column in table.columns
    }
    content = pa.table({name: pa.array(values, kind) for name, (values, kind) in columns.items()})
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with plain_errors(f"write {path}"):
        try:
            pq.write_table(content, aside)
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
