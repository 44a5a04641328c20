"""Asking cells to stop, and keeping them from being started again."""

from __future__ import annotations

from hpcml.runs.disk import append_line, plain_errors
from hpcml.runs.folder import RunFolder, now


def cancel_cell(run: RunFolder, cell_id: str, *, running: bool) -> None:
    """Cancel one cell, until the next submission.

    Args:
        run: the run.
        cell_id: the cell.
        running: an attempt is alive, and is asked to save and leave.
    """
    folder = run.cell_dir(cell_id)
    with plain_errors(f"write to {folder}"):
        folder.mkdir(exist_ok=True)
        # The event first: whoever sees the attempt end must find it.
        append_line(folder / "events.jsonl", {"time": now(), "event": "cancelled"})
        if running:
            (folder / "stop").touch()
