"""What the rungs of a halving and the rounds of a search have in common.

They are submissions that follow one another. What a later one runs is decided when it begins, from
what the cells before it came to, by whoever is first, and written down once for all.
"""

import json
import os
from typing import Any, Optional

from hpcml.worker import events, memory


class NotOver(Exception):
    """What comes before is not over, or leaves nothing to go on from; for a person to read."""


def write_once(path: str, content: Any) -> None:
    """Write ``content`` to ``path``, unless somebody has done so already."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    # Linked and not renamed, so that the first one counts.
    aside = f"{path}.{os.uname().nodename}.{os.getpid()}"
    events.write_json(aside, content)
    try:
        os.link(aside, path)
    except FileExistsError:
        pass
    finally:
        os.remove(aside)


def read(path: str) -> "Optional[dict[str, Any]]":
    """What :func:`write_once` wrote, or None where nothing is written yet."""
    try:
        with open(path, encoding="utf-8") as file:
            content: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        return None
    return content


def plan_of(run_dir: str) -> "dict[str, Any]":
    """The plan of a run."""
    with open(os.path.join(run_dir, "plan.json"), encoding="utf-8") as file:
        plan: dict[str, Any] = json.load(file)
    return plan


def ids(run_dir: str) -> "list[str]":
    """The ids of all cells, by index."""
    with open(os.path.join(run_dir, "cells.jsonl"), "rb") as file:
        return [json.loads(line)["id"] for line in file]


def is_cancelled(run_dir: str, cell_id: str, since: str) -> bool:
    """Whether a cell was cancelled after this time, so that no earlier submission will run it."""
    return any(
        event.get("event") == "cancelled" and event["time"] > since
        for event in _events(run_dir, cell_id)
    )


def is_over(run_dir: str, cell_id: str) -> bool:
    """Whether a cell without a result failed for good, or is not wanted any more."""
    last: dict[str, Any] = {}
    cancelled = False
    for event in _events(run_dir, cell_id):
        kind = event.get("event")
        if kind in ("started", "ended"):
            last, cancelled = event, cancelled and kind == "ended"
        cancelled |= kind == "cancelled"
    if last.get("event") != "started":
        # One that ended its last rung well has not begun this one.
        failed = last.get("cause") not in (None, "stopped", "rung") and not last.get("again")
        return cancelled or failed
    # Slurm killed its whole job for its memory, so that nobody could write down the end.
    stderr = memory.stderr_of(run_dir, last["submission"], last["job"])
    return memory.slurm_said(stderr, last.get("stderr", 0)) is not None


def _events(run_dir: str, cell_id: str) -> "list[dict[str, Any]]":
    return events.read(os.path.join(run_dir, "cells", cell_id, "events.jsonl"))
