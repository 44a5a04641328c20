"""Asking cells to stop, and keeping them from being started again."""

from __future__ import annotations

from hpcml.files import plain_errors
from hpcml.runs.disk import append_line
from hpcml.runs.folder import RunFolder, now, workers


def cancel_cell(run: RunFolder, cell_id: str) -> None:
    """Cancel one cell, until the next submission.

    An attempt that is alive, or begins in this moment, is asked to save and leave.
    """
    folder = run.cell_dir(cell_id)
    with plain_errors(f"write to {folder}"):
        folder.mkdir(exist_ok=True)
        # The event first: whoever sees the attempt end must find it.
        append_line(folder / "events.jsonl", {"time": now(), "event": "cancelled"})
        for attempts in workers(folder) or [folder]:
            (attempts / "stop").touch()
