"""The tables of an inference: rows on their way from the input to the output.

Everything is Arrow's IPC format, compressed, read and written a batch at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from hpcml.worker.flush import flush_folder

_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")

# What is asked about a row. A row that cannot be asked has a cause instead.
QUESTION = [
    pa.field("row", pa.int64()),
    pa.field("key", pa.large_string()),
    pa.field("prompt", pa.large_string()),
    pa.field("is_chat", pa.bool_()),
    pa.field("parameters", pa.large_string()),
    pa.field("fingerprint", pa.uint64()),
    pa.field("cause", pa.string()),
    pa.field("error", pa.string()),
]

# What came out. Lists have an entry for each of the n answers.
ANSWER = [
    pa.field("row", pa.int64()),
    pa.field("key", pa.large_string()),
    pa.field("is_chat", pa.bool_()),
    pa.field("fingerprint", pa.uint64()),
    pa.field("text", pa.list_(pa.large_string())),
    pa.field("finish_reason", pa.list_(pa.string())),
    pa.field("prompt_tokens", pa.int32()),
    pa.field("output_tokens", pa.list_(pa.int32())),
    pa.field("logprobs", pa.list_(pa.list_(pa.float32()))),
    pa.field("seconds", pa.float32()),
    pa.field("cause", pa.string()),
    pa.field("error", pa.string()),
]


def question_schema(columns: pa.Schema) -> pa.Schema:
    """Schema of a shard; ``columns`` are those of the input that the output will have."""
    return pa.schema([*QUESTION, pa.field("columns", pa.struct(list(columns)))])


def answer_schema(columns: pa.Schema) -> pa.Schema:
    """Schema of a part."""
    return pa.schema([*ANSWER, pa.field("columns", pa.struct(list(columns)))])


def write(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
    """Write a file, flushed to the disk; returns the number of rows."""
    rows = 0
    with path.open("wb") as file:
        with pa.ipc.new_stream(file, schema, options=_OPTIONS) as writer:
            for batch in batches:
                writer.write_batch(batch)
                rows += batch.num_rows
        file.flush()
        os.fsync(file.fileno())
    return rows


def append(path: Path, batch: pa.RecordBatch | pa.Table) -> None:
    """Append rows to a file that :func:`read` reads; not safe against a kill."""
    with (
        path.open("ab") as file,
        pa.ipc.new_stream(file, batch.schema, options=_OPTIONS) as writer,
    ):
        writer.write(batch)


def read(path: Path) -> Iterator[pa.RecordBatch]:
    """The batches of a file, or of several that were appended to one."""
    with pa.OSFile(str(path)) as file:
        while file.tell() < file.size():
            with pa.ipc.open_stream(file) as reader:
                yield from reader


def publish(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch], token: str) -> bool:
    """Write a file so that it is complete or absent, and only the first to do so counts.

    Returns:
        Whether this one was the first.
    """
    aside = path.with_name(f".{path.name}.{token}")
    try:
        write(aside, schema, batches)
        os.link(aside, path)
    except FileExistsError:
        return False
    finally:
        with suppress(FileNotFoundError):
            aside.unlink()
    flush_folder(path.parent)
    return True
