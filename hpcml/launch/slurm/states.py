"""The states of a run's cells, from its files and from one look at Slurm."""

from __future__ import annotations

import getpass
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from hpcml.launch.slurm.client import SlurmError, run
from hpcml.launch.slurm.journal import (
    Entry,
    TaskId,
    clusters,
    read_journal,
    settled,
    submitted_tasks,
)
from hpcml.launch.slurm.query import ENDED, RUNNING, JobState, Queue, accounting, on, queue
from hpcml.launch.slurm.reasons import end_words, words
from hpcml.launch.slurm.text import array_list, array_tasks
from hpcml.runs.events import parse_time
from hpcml.runs.folder import RunFolder
from hpcml.runs.status import CellState, Status, Watcher

_TERMINAL = ("done", "failed")

# The clocks of nodes differ by less than this.
_SKEW = 5.0

# A failed cell whose budget allows it is started again by its job at once.
_RETRY_SECONDS = 5.0


class SlurmWatcher:
    """Looks at a run again and again; Slurm is asked by :meth:`ask` alone.

    ``trouble`` says what could not be asked, for the person who sees the states.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.trouble: str | None = None
        self._run = folder
        self._accounting = folder.plan["site"]["slurm"]["accounting"]
        self._entries: list[Entry] | None = None
        self._tasks: dict[int, list[TaskId]] = {}
        self._jobs: set[int] = set()
        self._created: dict[int, float] = {}
        self._queue: Queue | None = None
        self._accounts: dict[tuple[int, int | None], str] | None = None
        self._asked = float("-inf")
        self._asked_time = 0.0
        self._clusters: set[str] = set()
        self._untouched: dict[int, CellState] = {}
        self._watcher = Watcher(folder, self.alive)

    def ask(self, older: float = 0.0) -> None:
        """Ask squeue, once, unless it was asked less than ``older`` seconds ago."""
        if time.monotonic() - self._asked < older:
            return
        # The journal first: a job that it names is in the queue, or has left it.
        entries = read_journal(self._run)
        self._asked_time = time.time()
        self.trouble = None
        self._accounts = None
        try:
            self._clusters = clusters(self._run, entries)
            self._queue = queue(self._user(), self._clusters)
        except SlurmError as error:
            self._queue = None
            self.trouble = f"{error}; what is shown is from the run folder alone"
        else:
            entries += settled(self._run, entries, self._queue)
        self._asked = time.monotonic()
        if entries != self._entries:
            self._entries = entries
            self._tasks = submitted_tasks(self._run, entries)
            newest = {tasks[0].submission for tasks in self._tasks.values()}
            self._jobs = {task.job for tasks in self._tasks.values() for task in tasks}
            self._created = {
                number: parse_time(self._run.read_submission(number)["created"])
                for number in newest
            }

    def refresh(self) -> Status:
        """The states now, with what Slurm said last."""
        status = self._watcher.refresh()
        if self._queue is None:
            return status
        cells = dict(status.cells)
        self._read_untouched(index for index in self._tasks if index not in cells)
        gone = []
        for index in self._tasks:
            cell = cells.get(index) or self._untouched[index]
            if cell.cancelled and self._is_given_again(cell):
                state = "stopped" if cell.attempts else "pending"
                cell = cells[index] = replace(cell, cancelled=False, state=state, reason=None)
            if cell.state in _TERMINAL or cell.cancelled:
                continue
            job = self._job(index)
            if job is None:
                gone.append(cell)
            elif cell.state != "running":
                cells[index] = self._queued(cell, job)
        gone = [cell for cell in gone if cell.state in ("pending", "lost")]
        if gone and self._accounts is None:
            self._accounts = self._ask_accounting({self._tasks[cell.index][0].job for cell in gone})
        cells.update((cell.index, self._gone(cell)) for cell in gone)
        return Status(status.total, dict(sorted(cells.items())))

    def going(self, status: Status) -> bool:
        """Whether something of the run is running or waiting, as far as is known."""
        if self._queue is None:
            return sum(status.counts().get(state, 0) for state in _TERMINAL) < status.total
        return bool(status.in_state("running") or self.taken(status))

    def taken(self, status: Status) -> set[int]:
        """The cells that a queued or running task is going to run, or runs."""
        if self._queue is None:
            return set()
        return {
            index
            for index in self._tasks
            if (job := self._job(index)) is not None
            and not self._is_free(status.cells.get(index), job)
        }

    def in_queue(self) -> set[int]:
        """The cells of which a task is queued or running, whether it will run them or not."""
        if self._queue is None:
            return set()
        return {index for index in self._tasks if self._job(index) is not None}

    def last_jobs(self, cells: Iterable[int]) -> set[int]:
        """The jobs submitted last for some cells: when they have succeeded, the cells are done."""
        return {self._tasks[index][0].job for index in cells}

    def first_waiting(self) -> set[int]:
        """The jobs in the queue that wait for none of their own submission."""
        if self._queue is None or self._entries is None:
            return set()
        first = {entry.get("job") for entry in self._entries if entry.get("after", 0) is None}
        waiting = {job for job, state in self._queue.jobs() if state.state not in ENDED | RUNNING}
        return {job for job in waiting if job in first}

    def remove(self, status: Status, cancelled: Iterable[int]) -> str | None:
        """Take the waiting tasks of cancelled cells out of the queue, if no other cell needs them.

        Args:
            status: the states before the cells were cancelled.
            cancelled: the cells.

        Returns:
            What went wrong, if anything.
        """
        if self._queue is None:
            return self.trouble
        tasks = self._unneeded(status, cancelled)
        if tasks:
            try:
                # Not with --state=PENDING, which would end the whole array.
                run(["scancel", *on(self._clusters), *tasks])
            except SlurmError as error:
                return str(error)
        return None

    def _unneeded(self, status: Status, cancelled: Iterable[int]) -> list[str]:
        """Arguments for scancel: ``12_[0-5,9]`` for each array."""
        assert self._queue is not None
        chosen = set(cancelled)
        wanted: dict[TaskId, bool] = {}
        for index, tasks in self._tasks.items():
            cell = status.cells.get(index)
            over = index in chosen or (
                cell is not None and (cell.state in _TERMINAL or cell.cancelled)
            )
            for task in tasks:
                wanted[task] = wanted.get(task, False) or not over
        found: dict[int, set[int]] = {}
        for task in {task for index in chosen for task in self._tasks.get(index, ())}:
            job = self._queue.find(task.job, task.task)
            if job is not None and job.state not in ENDED | RUNNING and not wanted[task]:
                found.setdefault(task.job, set()).add(task.task)
        return [f"{job}_[{array_list(indices)}]" for job, indices in sorted(found.items())]

    def alive(self, started: Mapping[str, Any]) -> bool | None:
        """Whether the attempt of a ``started`` event lives; None if that cannot be told."""
        if self._queue is None:
            return None
        try:
            job, indices = array_tasks(str(started.get("job")))
        except ValueError:
            return None
        if not indices or job not in self._jobs:
            return None
        if parse_time(str(started.get("time"))) > self._asked_time - _SKEW:
            return True
        state = self._queue.find(job, min(indices))
        return state is not None and state.state in RUNNING

    def _user(self) -> str:
        """Who submitted the run: others may look at it, too."""
        try:
            return self._run.journal_file.owner()
        except (OSError, KeyError):
            return getpass.getuser()

    def _job(self, index: int) -> JobState | None:
        assert self._queue is not None
        found = [self._queue.find(task.job, task.task) for task in self._tasks[index]]
        alive = [state for state in found if state is not None and state.state not in ENDED]
        # The links of a chain that wait for the one that runs are of no interest.
        return next((s for s in alive if s.state in RUNNING), alive[-1] if alive else None)

    @staticmethod
    def _is_free(cell: CellState | None, job: JobState) -> bool:
        """Whether a cell's job will not run it any more, or again."""
        if cell is None or cell.state == "running":
            return False
        if cell.state == "failed":
            over = time.time() - (cell.ended or 0.0) > _RETRY_SECONDS
            return over or job.state not in RUNNING
        return cell.state == "done" or cell.cancelled

    def _is_given_again(self, cell: CellState) -> bool:
        """Whether a cell was submitted after it was cancelled, and has not begun since."""
        submitted = self._created[self._tasks[cell.index][0].submission]
        return cell.state != "running" and submitted > (cell.cancelled_time or 0.0)

    def _read_untouched(self, indices: Iterable[int]) -> None:
        """Make states for cells that left nothing yet, all with one reading."""
        missing = [index for index in indices if index not in self._untouched]
        for index, record in zip(missing, self._run.read_cells(missing), strict=True):
            self._untouched[index] = CellState(record["id"], index, "pending", record["params"])

    def _queued(self, cell: CellState, job: JobState) -> CellState:
        if job.state not in RUNNING:
            why = words(job.reason)
            if cell.state in ("stopped", "lost") and cell.reason:
                why = f"{cell.reason}; {why}"
            return replace(cell, state="pending", reason=why)
        if cell.state == "stopped" and (cell.ended or 0.0) > self._asked_time - _SKEW:
            return cell
        return replace(cell, state="pending", reason="starts")

    def _gone(self, cell: CellState) -> CellState:
        """The state of a cell without an end, of which no job is left."""
        assert self._accounts is not None
        task = self._tasks[cell.index][0]
        accounts = self._accounts
        state = accounts.get((task.job, task.task)) or accounts.get((task.job, None), "")
        if cell.out_of_memory:
            return replace(cell, state="failed")
        if state in ENDED or state == "PREEMPTED":
            said = end_words(state)
        elif cell.state == "lost":
            return cell
        else:
            said = "its job has left the queue"
        last = self._last_words(task)
        end = "failed" if state == "OUT_OF_MEMORY" else "lost"
        return replace(cell, state=end, reason=f"{said}: {last}" if last else said)

    def _ask_accounting(self, jobs: set[int]) -> dict[tuple[int, int | None], str]:
        if not self._accounting:
            return {}
        try:
            return accounting(jobs, self._clusters)
        except SlurmError as error:
            self.trouble = f"{error}; how jobs ended is not known"
            return {}

    def _last_words(self, task: TaskId) -> str:
        """The last line that the batch script, or Slurm in its place, left on stderr."""
        path = self._run.tasks / f"{task.submission:03}.{task.job}_{task.task}.err"
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 4096))
                lines = file.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1].strip()[:300] if lines else ""
