"""The life of a cell: one JSON line per event in ``events.jsonl``, appended by whoever saw it."""

import contextlib
import json
import os
from datetime import datetime, timezone
from typing import Any, Optional

from hpcml.worker.metrics import append_line


def now() -> str:
    """The time as events carry it: ISO 8601, UTC, milliseconds."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def append(path: str, event: str, **fields: Any) -> None:
    """Append one event to the file at ``path``."""
    append_line(path, {"time": now(), "event": event, **fields})


def read(path: str) -> "list[dict[str, Any]]":
    """All events of the file at ``path``, oldest first.

    A line that a crash cut off is left out: what it would have said did not happen.
    """
    try:
        with open(path, "rb") as file:
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    events = []
    for line in lines:
        event = _parse(line)
        if event is not None:
            events.append(event)
    return events


def last_step(metrics_path: str) -> Optional[int]:
    """The largest ``step`` that the metrics file at ``metrics_path`` holds, or None."""
    largest: Optional[int] = None
    for record in read(metrics_path):
        step = record.get("step")
        if isinstance(step, int) and (largest is None or step > largest):
            largest = step
    return largest


def write_json(path: str, content: Any, durable: bool = True) -> None:
    """Write ``content`` so that the file at ``path`` is complete or absent.

    With ``durable`` this holds after a crash of the machine as well, at the price of a flush.
    """
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(content, file, ensure_ascii=False, indent=1)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise


def _parse(line: bytes) -> "Optional[dict[str, Any]]":
    if not line.strip():
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
