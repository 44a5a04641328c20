"""When the attempts of a run waited, ran, saved and were asked to stop."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcml.files import plain_errors
from hpcml.runs.events import JsonLines, parse_time
from hpcml.runs.folder import RunFolder, workers


@dataclass(slots=True)
class Attempt:
    """One attempt of a cell. Times are seconds since the epoch.

    Attributes:
        cell: the cell's index.
        number: counts from 1.
        worker: of an inference, which of the cell's workers.
        queued: since when it waited, if that is known.
        ended: None while it runs.
        cause: why it ended; ``lost`` if nobody could say, empty while it runs.
        asked: when it was asked to stop, if it was.
        saved: start and end of each time that it saved.
    """

    cell: int
    number: int
    worker: int | None
    queued: float | None
    started: float
    ended: float | None = None
    cause: str = ""
    reason: str = ""
    host: str = ""
    asked: float | None = None
    saved: list[tuple[float, float]] = field(default_factory=list)


def submitted(run: RunFolder) -> dict[int, float]:
    """When each submission was made."""
    found: dict[int, float] = {}
    with plain_errors(f"read {run.submissions}"):
        for path in run.submissions.glob("[0-9]*.json"):
            with suppress(ValueError, KeyError, TypeError):  # it is being written
                record = json.loads(path.read_bytes())
                found[int(record["submission"])] = parse_time(record["created"])
    return found


def attempts(run: RunFolder, cell: int, cell_id: str, queued: dict[int, float]) -> list[Attempt]:
    """All attempts of a cell, those of its workers too, by their start.

    Args:
        run: the run.
        cell: the cell's index.
        cell_id: its id.
        queued: when each submission was made.
    """
    folder = run.cell_dir(cell_id)
    found = list(_of_folder(folder, cell, None, queued))
    if run.plan.get("kind") == "infer":
        for path in workers(folder):
            found += _of_folder(path, cell, int(path.name), queued)
    return sorted(found, key=lambda attempt: attempt.started)


def _of_folder(
    folder: Path, cell: int, worker: int | None, queued: dict[int, float]
) -> Iterator[Attempt]:
    attempt: Attempt | None = None
    before: tuple[Any, float] | None = None
    last = 0.0
    with plain_errors(f"read {folder}"):
        events = JsonLines(f"{folder}/events.jsonl").read()
    for event in events:
        kind, time = event.get("event"), parse_time(event.get("time", ""))
        if kind == "started":
            if attempt is not None and attempt.ended is None:
                attempt.ended, attempt.cause = last, "lost"
            # It waited since its submission, and if that brought an earlier attempt, since the
            # end of that one.
            number = event.get("submission")
            since = queued.get(number) if isinstance(number, int) else None
            if since is not None and before is not None and before[0] == number:
                since = max(since, before[1])
            if attempt is not None:
                yield attempt
            attempt = Attempt(
                cell,
                number=event.get("attempt") or 1,
                worker=worker,
                queued=since if since is not None and since <= time else None,
                started=time,
                host=str(event.get("host", "")),
            )
            before = number, time
        elif attempt is None:
            continue
        elif kind == "checkpoint":
            seconds = event.get("seconds")
            took = float(seconds) if isinstance(seconds, (int, float)) else 0.0
            attempt.saved.append((max(attempt.started, time - took), time))
        elif kind == "signal" and attempt.asked is None:
            attempt.asked = time
        elif kind == "ended":
            attempt.ended = time
            attempt.cause = str(event.get("cause") or "")
            attempt.reason = str(event.get("reason") or "")
            before = before[0] if before else None, time
        last = time
    if attempt is not None:
        if attempt.ended is None:
            # The last that is known of it, should it not be alive.
            with suppress(OSError):
                last = max(last, os.stat(folder / "metrics.jsonl").st_mtime)
            attempt.reason = ""
            attempt.cause = "lost"
            attempt.ended = last
        yield attempt
