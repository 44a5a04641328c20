"""The logs of a cell: where they are, their ends, and following them while the cell runs."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcml.files import plain_errors
from hpcml.runs.folder import RunFolder
from hpcml.runs.liveness import Alive
from hpcml.runs.status import CellState, Watcher

_LOG_NAME = re.compile(r"log\.(\d+)(?:\.(\d+))?\.(out|err)")
_BLOCK = 1 << 16
# A failed cell whose budget allows it is started again at once.
_RETRY_SECONDS = 5.0
# Whoever knows the queue may say something new of a cell that waits.
_WAITING_SECONDS = 30.0


@dataclass(frozen=True, slots=True, order=True)
class Log:
    """One log file.

    Attributes:
        attempt: counts from 1.
        rank: the process that wrote it.
        stream: ``out`` or ``err``.
    """

    attempt: int
    rank: int
    stream: str
    path: Path


def cell_logs(cell_dir: Path) -> list[Log]:
    """All logs of a cell, by attempt and rank, ``out`` before ``err``."""
    with plain_errors(f"read {cell_dir}"):
        try:
            names = os.listdir(cell_dir)
        except FileNotFoundError:
            return []
    logs = [
        Log(int(match[1]), int(match[2] or 0), match[3], cell_dir / name)
        for name in names
        if (match := _LOG_NAME.fullmatch(name))
    ]
    return sorted(logs, key=lambda log: (log.attempt, log.rank, log.stream == "err"))


def tail(path: Path, lines: int) -> tuple[bytes, int]:
    """The last lines of a file, and the offset at which they begin."""
    with plain_errors(f"read {path}"), path.open("rb") as file:
        position = file.seek(0, os.SEEK_END)
        data = b""
        # One newline more than lines: the one that ends the line before them.
        while position > 0 and data.count(b"\n") <= lines:
            size = min(_BLOCK, position)
            position -= size
            file.seek(position)
            data = file.read(size) + data
    kept = data.splitlines(keepends=True)[-lines:]
    text = b"".join(kept)
    return text, position + len(data) - len(text)


def follow(
    run: RunFolder,
    cell_id: str,
    streams: tuple[str, ...] = ("out", "err"),
    *,
    offsets: dict[Path, int] | None = None,
    alive: Alive | None = None,
    interval: float = 0.5,
    folder: Path | None = None,
) -> Iterator[tuple[Log, bytes] | CellState]:
    """What rank 0 of a cell writes, across its attempts, until the cell ends.

    Args:
        run: the run.
        cell_id: the cell.
        streams: which streams to follow.
        offsets: where to begin in files that were shown already; attempts before theirs are
            left out.
        alive: asked about attempts on other machines.
        interval: seconds between two looks.
        folder: where the logs lie; by default in the cell's folder.

    Yields:
        A log and the complete lines that are new in it, or the cell's state when that changes, and
        every half a minute while it does not run. A stopped or lost cell is waited for, because a
        next attempt continues it; a failed one only for the moment that a retry takes.
    """
    positions = dict(offsets or {})
    watcher = Watcher(run, alive, only=cell_id)
    index = run.ids[cell_id]
    shown: tuple[str, int] | None = None
    shown_at = 0.0
    failed_since: float | None = None
    while True:
        # The state before the logs: what was written before the end is then read in this round.
        cell = watcher.refresh().cells.get(index) or CellState(cell_id, index, "pending")
        ended = cell.state == "done" or (cell.cancelled and cell.state != "running")
        if cell.state == "failed":
            failed_since = failed_since or time.monotonic()
            ended = ended or time.monotonic() - failed_since >= _RETRY_SECONDS
        else:
            failed_since = None
        logs = cell_logs(folder or run.cell_dir(cell_id))
        first = min((log.attempt for log in logs if log.path in positions), default=0)
        for log in logs:
            if log.rank == 0 and log.stream in streams and log.attempt >= first:
                whole = cell.state != "running" or log.attempt < cell.attempts
                while text := _read_new(log.path, positions, whole=whole):
                    yield log, text
        waited = cell.state != "running" and time.monotonic() - shown_at > _WAITING_SECONDS
        if (cell.state, cell.attempts) != shown or waited:
            shown, shown_at = (cell.state, cell.attempts), time.monotonic()
            yield cell
        if ended:
            return
        time.sleep(interval)


def _read_new(path: Path, positions: dict[Path, int], *, whole: bool) -> bytes:
    """What is new in a file; a line that is still being written only if nobody will end it."""
    start = positions.setdefault(path, 0)
    with plain_errors(f"read {path}"), path.open("rb") as file:
        file.seek(start)
        data = file.read(_BLOCK * 16)
    # A progress bar ends its states by carriage returns, and never a line.
    if not whole and len(data) < _BLOCK * 16:
        data = data[: max(data.rfind(b"\n"), data.rfind(b"\r")) + 1]
    positions[path] = start + len(data)
    return data
