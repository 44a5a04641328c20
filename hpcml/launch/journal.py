"""The journal of a run's submissions: what was said to a scheduler, and what it answered."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hpcml.files import plain_errors
from hpcml.runs.events import JsonLines
from hpcml.runs.folder import RunFolder

Entry = dict[str, Any]


def read_journal(run: RunFolder) -> list[Entry]:
    """The journal of a run's submissions, oldest first."""
    with plain_errors(f"read {run.journal_file}"):
        return JsonLines(run.journal_file).read()


def open_calls(entries: Iterable[Entry]) -> list[Entry]:
    """The calls of a scheduler whose end the journal does not tell."""
    calls: dict[tuple[int, int, int], Entry] = {}
    for entry in entries:
        key = entry["submission"], entry["part"], entry.get("link", 0)
        if entry["event"] in ("submitting", "unclear"):
            calls[key] = entry
        else:
            calls.pop(key, None)
    return list(calls.values())
