"""The states of a run's cells, from its files and from one look at Slurm."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from hpcml.launch.slurm.client import SlurmError
from hpcml.launch.slurm.query import ENDED, RUNNING, JobState, Queue, accounting, queue
from hpcml.launch.slurm.reasons import words
from hpcml.launch.slurm.text import array_tasks
from hpcml.runs.disk import plain_errors
from hpcml.runs.folder import RunFolder
from hpcml.runs.status import CellState, Status, Watcher

_TERMINAL = ("done", "failed")


class TaskId(NamedTuple):
    """A task of an array: the job, and its index there."""

    job: int
    task: int


class SlurmWatcher:
    """Looks at a run again and again; Slurm is asked each time :meth:`ask` is called.

    ``trouble`` says what could not be asked, for the person who sees the states.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._tasks = submitted_tasks(run)
        self._queue: Queue | None = None
        self._accounts: dict[tuple[int, int | None], str] | None = None
        self.trouble: str | None = None
        self._watcher = Watcher(run, self._alive)

    def ask(self) -> None:
        """Ask squeue, once."""
        self.trouble = None
        self._accounts = None
        try:
            self._queue = queue()
        except SlurmError as error:
            self._queue = None
            self.trouble = f"{error}; what is shown is from the run folder alone"

    def refresh(self) -> Status:
        """The states now, with what Slurm said last."""
        status = self._watcher.refresh()
        if self._queue is None:
            return status
        cells = dict(status.cells)
        for index in self._tasks:
            cell = cells.get(index)
            if cell is None or cell.state not in _TERMINAL:
                seen = self._look(index, cell)
                if seen is not None:
                    cells[index] = seen
        return Status(status.total, dict(sorted(cells.items())))

    def in_queue(self) -> set[int]:
        """The cells of which a task is queued or running."""
        if self._queue is None:
            return set()
        return {index for index in self._tasks if self._job(index) is not None}

    def _alive(self, started: Mapping[str, Any]) -> bool | None:
        if self._queue is None:
            return None
        try:
            job, indices = array_tasks(str(started.get("job")))
        except ValueError:
            return None
        if not indices:
            return None
        state = self._queue.find(job, min(indices))
        return state is not None and state.state in RUNNING

    def _job(self, index: int) -> JobState | None:
        assert self._queue is not None
        found = [self._queue.find(*task) for task in self._tasks[index]]
        alive = [state for state in found if state is not None and state.state not in ENDED]
        # The links of a chain that wait for the one that runs are of no interest.
        return next((s for s in alive if s.state in RUNNING), alive[0] if alive else None)

    def _look(self, index: int, cell: CellState | None) -> CellState | None:
        """The state of a cell that has not ended; None if nothing is to be said."""
        job = self._job(index)
        if job is not None and job.state in RUNNING:
            if cell is not None and cell.state == "running":
                return None
            return replace(self._cell(index, cell), state="pending", reason="starts")
        if job is not None:
            return replace(self._cell(index, cell), state="pending", reason=words(job.reason))
        if cell is not None and cell.state == "stopped":
            return None
        state = self._ended(index)
        if state is None:
            return None
        if state == "CANCELLED":
            said = "cancelled in Slurm"
        else:
            said = f"its job ended ({state}) without a word of the worker; see tasks/"
        return replace(self._cell(index, cell), state="lost", reason=said)

    def _cell(self, index: int, cell: CellState | None) -> CellState:
        if cell is not None:
            return cell
        record = self._run.cell(index)
        return CellState(record["id"], index, "pending", record["params"])

    def _ended(self, index: int) -> str | None:
        """How Slurm says the newest job of a cell ended; None where it does not say."""
        if self._accounts is None:
            unknown = {task.job for tasks in self._tasks.values() for task in tasks[:1]}
            try:
                self._accounts = accounting(unknown)
            except SlurmError as error:
                self._accounts = {}
                self.trouble = f"{error}; how jobs ended is not known"
        task = self._tasks[index][0]
        state = self._accounts.get(task) or self._accounts.get((task.job, None))
        return state if state in ENDED else None


def submitted_tasks(run: RunFolder) -> dict[int, list[TaskId]]:
    """The tasks that were submitted for each cell, the newest first."""
    found: dict[int, list[TaskId]] = {}
    for entry in reversed(journal(run)):
        if entry.get("event") != "submitted" or "job" not in entry:
            continue
        record = run.read_submission(entry["submission"])
        cells = _positions(record["cells"])
        pack = record["pack"]
        for index in range(entry["tasks"]):
            first = (entry["offset"] + index) * pack
            for cell in cells[first : first + pack]:
                found.setdefault(cell, []).append(TaskId(entry["job"], index))
    return found


def journal(run: RunFolder) -> list[dict[str, Any]]:
    """The journal of a run's submissions, oldest first."""
    with plain_errors(f"read {run.journal_file}"):
        try:
            lines = run.journal_file.read_text().splitlines()
        except FileNotFoundError:
            return []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _positions(ranges: Iterable[Iterable[int]]) -> list[int]:
    cells: list[int] = []
    for first, last in ranges:
        cells += range(first, last + 1)
    return cells
