"""Flushing to the disk, so that what was written survives a crash of the machine."""

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor

SIDE_BY_SIDE = 8
"""How many files to treat at a time: each waits for the disk or for a file server."""


def flush_file(path: "str | os.PathLike[str]") -> None:
    """Flush a file's content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_folder(path: "str | os.PathLike[str]") -> None:
    """Flush a folder's entries, so that a rename in it is for good."""
    # Some network filesystems cannot flush a folder; the rename itself is still atomic there.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: "str | os.PathLike[str]") -> None:
    """Flush a folder and all files and folders in it, many side by side."""
    files, folders = [], []
    for parent, _, names in os.walk(folder):
        folders.append(parent)
        files += [os.path.join(parent, name) for name in names]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        list(pool.map(flush_file, [path for path in files if not os.path.islink(path)]))
        list(pool.map(flush_folder, folders))
