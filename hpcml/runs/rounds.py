"""Asking again: a further round of a cell, which keeps the answers that are still valid."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress

from hpcml.files import plain_errors
from hpcml.runs.disk import dumps, replace, write_flushed
from hpcml.runs.folder import RunFolder
from hpcml.worker.flush import flush_folder


def begin_round(run: RunFolder, cell_id: str, *, accept_changes: bool) -> None:
    """Begin another round of an inference: the next worker plans it.

    Args:
        run: the run; nothing of it may be running.
        cell_id: the cell.
        accept_changes: whether model or input may be others than before.

    Raises:
        UserError: the run folder cannot be written.
    """
    folder = run.cell_dir(cell_id) / "rounds"
    if not folder.is_dir():
        return  # nothing was done yet
    request = dumps({"accept_changes": accept_changes}) + b"\n"
    with plain_errors(f"write to {folder}"):
        # Without its result, the cell is not done any more.
        with suppress(FileNotFoundError):
            (run.cell_dir(cell_id) / "result.json").unlink()
        newest = max((int(name) for name in os.listdir(folder) if name.isdecimal()), default=0)
        if newest and not (folder / str(newest) / "plan").exists():
            replace(folder / str(newest) / "request.json", request)
            return
        building = folder / f".{uuid.uuid4().hex}"
        building.mkdir()
        write_flushed(building / "request.json", request)
        building.rename(folder / str(newest + 1))
        flush_folder(folder)
