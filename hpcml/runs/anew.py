"""Letting a cell begin anew: what it had is set aside, and nothing is deleted."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

from hpcml.errors import UserError
from hpcml.files import plain_errors
from hpcml.runs.disk import append_line
from hpcml.runs.folder import RunFolder, now
from hpcml.worker import tensorboard
from hpcml.worker.flush import flush_folder

_RESULT = "result.json"
_STATE = ("checkpoints", "metrics.jsonl")


def begin_anew(run: RunFolder, cell_id: str) -> None:
    """Move a cell's result, checkpoints, metrics and curves to ``set-aside-<n>`` in its folder.

    After a kill in between, the cell goes on from the checkpoints that it still has.

    Raises:
        UserError: an attempt at the cell is alive, or the folder cannot be written.
    """
    folder = run.cell_dir(cell_id)
    if not any((folder / name).exists() for name in (_RESULT, *_STATE)):
        return
    with plain_errors(f"write to {folder}"), (folder / "events.jsonl").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"cell {cell_id} is running; it cannot begin anew now") from None
        except OSError:
            pass  # a filesystem without locks
        number = 1
        while (aside := folder / f"set-aside-{number}").exists():
            number += 1
        aside.mkdir()
        # First: without its result a cell is not done, whatever else a kill leaves in its place.
        with suppress(FileNotFoundError):
            os.rename(folder / _RESULT, aside / _RESULT)
        append_line(
            folder / "events.jsonl",
            {"time": now(), "event": "anew", "aside": aside.name},
            durable=True,
        )
        # Before the metrics, of which they say how many lines they have.
        for curves in tensorboard.folders_of(str(run.path), run.ids[cell_id]):
            (aside / "tensorboard").mkdir(exist_ok=True)
            os.rename(curves, aside / "tensorboard" / os.path.basename(curves))
        for name in _STATE:
            with suppress(FileNotFoundError):
                os.rename(folder / name, aside / name)
        flush_folder(aside)
        flush_folder(folder)
