"""Reading rows from files, a batch at a time, and never failing because of one row."""

from __future__ import annotations

import csv
import glob
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hpcml.infer.failures import RowFailed
from hpcml.infer.job import InferenceError, Input

BATCH_ROWS = 4096
# A batch of very long rows is given on before it is full.
_BATCH_BYTES = 32 * 1024**2

Columns = dict[str, Any]


@dataclass
class Row:
    """One row as it was read: its columns, or why there are none."""

    columns: Columns = field(default_factory=dict)
    failure: RowFailed | None = None


@dataclass(frozen=True)
class Batch:
    """Rows that follow one another.

    Attributes:
        rows: the rows.
        table: the same rows as they lay in a Parquet file, or None.
    """

    rows: list[Row]
    table: pa.RecordBatch | None = None


def input_files(source: Input) -> list[str]:
    """The files of an input in the order in which they are read: sorted by name.

    Raises:
        InferenceError: a pattern matches nothing.
    """
    endings = {"parquet": (".parquet",), "csv": (".csv",)}.get(source.format, (".jsonl", ".json"))
    found: list[str] = []
    for pattern in source.files:
        matches = (
            [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        )
        for match in matches:
            if os.path.isdir(match):
                found += sorted(
                    os.path.join(folder, name)
                    for folder, _, names in os.walk(match)
                    for name in names
                    if name.endswith(endings) and not name.startswith((".", "_"))
                )
            else:
                found.append(match)
        if not matches:
            raise InferenceError(f"no input file matches {pattern}")
    return list(dict.fromkeys(found))


def read(source: Input) -> Iterator[Batch]:
    """The rows of all files of an input, in order.

    Raises:
        InferenceError: a file as a whole cannot be read.
    """
    readers = {"parquet": _parquet, "csv": _csv, "jsonl": _jsonl, "openai": _jsonl}
    for path in input_files(source):
        try:
            yield from readers[source.format](path)
        except (OSError, pa.ArrowException) as error:
            raise InferenceError(f"cannot read {path}: {error}") from error


def parquet_schema(source: Input) -> pa.Schema:
    """The schema of a Parquet input; files that differ from the first are an error.

    Raises:
        InferenceError: they differ, or one cannot be read.
    """
    schema: pa.Schema | None = None
    for path in input_files(source):
        try:
            mine = pq.read_schema(path).remove_metadata()
        except (OSError, pa.ArrowException) as error:
            raise InferenceError(f"cannot read {path}: {error}") from error
        if schema is None:
            first, schema = path, mine
        elif not mine.equals(schema):
            raise InferenceError(f"{path} has other columns or types than {first}")
    return schema if schema is not None else pa.schema([])


def _parquet(path: str) -> Iterator[Batch]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(BATCH_ROWS):
            try:
                rows = [Row(columns) for columns in batch.to_pylist()]
            except UnicodeDecodeError:
                rows = [_one_of(batch, index) for index in range(batch.num_rows)]
                batch = _readable(batch)
            yield Batch(rows, batch)


def _one_of(batch: pa.RecordBatch, index: int) -> Row:
    columns: Columns = {}
    failure = None
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            columns[name] = column[index].as_py()
        except UnicodeDecodeError:
            columns[name] = None
            failure = RowFailed("invalid_utf8", f"the column {name} is not UTF-8")
    return Row(columns, failure)


def _readable(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with text that is not UTF-8 made so, since nobody could read it otherwise."""
    columns = []
    for column in batch.columns:
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            raw = column.cast(
                pa.binary() if pa.types.is_string(column.type) else pa.large_binary()
            ).to_pylist()
            texts = [None if text is None else text.decode(errors="replace") for text in raw]
            columns.append(pa.array(texts, column.type))
        else:
            columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _jsonl(path: str) -> Iterator[Batch]:
    yield from _batches(_json_rows(path))


def _json_rows(path: str) -> Iterator[tuple[Row, int]]:
    with open(path, "rb") as file:
        for line in file:
            if line.strip():
                yield _json_row(line), len(line)


def _json_row(line: bytes) -> Row:
    try:
        text = line.decode()
    except UnicodeDecodeError:
        row = _json_row(line.decode(errors="replace").encode())
        row.failure = RowFailed("invalid_utf8", "the line is not UTF-8")
        return row
    try:
        columns = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Row(failure=RowFailed("malformed", f"the line is no JSON: {error}"))
    if not isinstance(columns, dict):
        return Row(failure=RowFailed("malformed", "the line is no JSON object"))
    return Row(columns)


def _csv(path: str) -> Iterator[Batch]:
    yield from _batches(_csv_rows(path))


def _csv_rows(path: str) -> Iterator[tuple[Row, int]]:
    csv.field_size_limit(2**31 - 1)
    # Bytes that are no UTF-8 become lone surrogates, by which their row is known.
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        lines = csv.reader(file, strict=False)
        header = next(lines, None)
        if header is None:
            return
        if len(set(header)) < len(header):
            raise InferenceError(f"{path}: two columns have the same name")
        for fields in lines:
            size = sum(map(len, fields))
            if len(fields) != len(header):
                message = f"it has {len(fields)} fields, and the header {len(header)}"
                yield Row(failure=RowFailed("malformed", message)), size
                continue
            row = Row(dict(zip(header, fields, strict=True)))
            for name, text in row.columns.items():
                if not text.isascii() and any("\udc80" <= c <= "\udcff" for c in text):
                    raw = text.encode(errors="surrogateescape")
                    row.columns[name] = raw.decode(errors="replace")
                    row.failure = RowFailed("invalid_utf8", f"the column {name} is not UTF-8")
            yield row, size


def _batches(rows: Iterator[tuple[Row, int]]) -> Iterator[Batch]:
    batch: list[Row] = []
    held = 0
    for row, size in rows:
        batch.append(row)
        held += size
        if len(batch) == BATCH_ROWS or held > _BATCH_BYTES:
            yield Batch(batch)
            batch, held = [], 0
    if batch:
        yield Batch(batch)
