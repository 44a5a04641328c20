"""Writing files so that a kill, a crash or a full disk never leaves half of one."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hpcml.errors import UserError

_WHAT_TO_DO = {
    errno.ENOSPC: "the disk is full; free some space, or choose another place",
    errno.EDQUOT: "your disk quota is used up; free some space, or choose another place",
    errno.EROFS: "the filesystem is read-only; choose another place",
    errno.EACCES: "you have no permission there; choose another place",
    errno.EPERM: "the system does not permit it; choose another place",
    errno.ENOTDIR: "a part of the path is a file, not a folder; choose another place",
    errno.ENAMETOOLONG: "the path is too long; choose a shorter one",
}


@contextmanager
def plain_errors(doing: str) -> Iterator[None]:
    """Turn an ``OSError`` into a :class:`UserError` that says what could not be done and why.

    Args:
        doing: the attempted work, as it reads after "cannot": ``write the run folder /scratch/r``.
    """
    try:
        yield
    except BrokenPipeError:
        # Whoever reads our output has enough; that is no trouble of the disk.
        raise
    except OSError as error:
        advice = _WHAT_TO_DO.get(error.errno or 0, error.strerror or str(error))
        raise UserError(f"cannot {doing}: {advice}") from error


def dumps(record: object) -> bytes:
    """One line of compact JSON, without its newline.

    Text stays readable, except where it has no UTF-8 form (lone surrogates): that is escaped.
    """
    try:
        return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(record, separators=(",", ":")).encode()


def append_line(path: Path, record: dict[str, Any], *, durable: bool = False) -> None:
    """Append one JSON line with a single write, so that several writers never mix their lines."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, dumps(record) + b"\n")
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def flush_folder(path: Path) -> None:
    """Flush a folder's entries, so that a rename in it survives a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Some network filesystems cannot flush a folder; the rename itself is still atomic there.
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
