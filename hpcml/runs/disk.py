"""Writing files so that a kill, a crash or a full disk never leaves half of one."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcml.worker import metrics
from hpcml.worker.flush import flush_file, flush_folder

# Made once: there are thousands of cells.
_readable = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_escaped = json.JSONEncoder(separators=(",", ":")).encode


def dumps(record: object) -> bytes:
    """One line of compact JSON, without its newline.

    Text stays readable, except where it has no UTF-8 form (lone surrogates): that is escaped.
    """
    try:
        return _readable(record).encode()
    except UnicodeEncodeError:
        return _escaped(record).encode()


def append_line(path: Path, record: dict[str, Any], *, durable: bool = False) -> None:
    """Append one JSON line with a single write, so that several writers never mix their lines."""
    metrics.append_line(path, record)
    if durable:
        flush_file(path)


def write_flushed(path: Path, data: bytes) -> None:
    """Write a file and flush it to the disk; the caller renames it, or the folder it is in."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old or the new content, never a part."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_flushed(aside, data)
        aside.replace(path)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise
    flush_folder(path.parent)
