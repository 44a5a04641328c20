"""What all schedulers of clusters have in common: errors, and how a run on one is looked at."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from hpcml.launch.journal import Entry, read_journal
from hpcml.runs.events import parse_time
from hpcml.runs.folder import RunFolder
from hpcml.runs.status import CellState, Status, Watcher

TERMINAL = ("done", "failed", "dropped")

#: The clocks of nodes differ by less than this.
SKEW = 5.0

# A failed cell whose budget allows it is started again by its job at once.
_RETRY_SECONDS = 5.0

#: What is said where a call of the scheduler has no clear end.
MAYBE = "It may have submitted the job all the same; the command given again looks for it first."

#: Writes a line of the run's journal; with ``durable`` it is on the disk before it returns.
Journal = Callable[..., None]


class SchedulerError(Exception):
    """A scheduler gave no answer, or refused; the message is what it said."""


class PartlySubmitted(Exception):
    """A part was refused; the message says which, why, and how much is submitted."""


class Queued(NamedTuple):
    """A task that waits or runs: whether it runs, and why it waits, for a person.

    One that is ``stuck`` waits until somebody does something about it.
    """

    running: bool
    why: str
    stuck: bool = False


class Task(Protocol):
    """A task of a submission, as the scheduler knows it."""

    @property
    def submission(self) -> int:
        """The number of the submission."""


class ClusterWatcher(ABC):
    """Looks at a run again and again; the scheduler is asked by :meth:`ask` alone.

    ``trouble`` says what could not be asked, for the person who sees the states.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.trouble: str | None = None
        self._run = folder
        self._entries: list[Entry] | None = None
        self._choices: dict[int, list[int]] = {}
        self._proposed = 0
        self._tasks: Mapping[int, list[Any]] = {}
        self._created: dict[int, float] = {}
        self._answered = False
        self._asked = float("-inf")
        self._asked_time = 0.0
        self._untouched: dict[int, CellState] = {}
        self._watcher = Watcher(folder, self.alive)

    # What a scheduler says

    @abstractmethod
    def _question(self, entries: list[Entry]) -> list[Entry]:
        """Ask; returns what the journal lacks, of calls that were cut off.

        Raises:
            SchedulerError: there is no answer.
        """

    @abstractmethod
    def _submitted(self, entries: list[Entry]) -> Mapping[int, list[Any]]:
        """The tasks that were submitted for each cell, the newest first."""

    @abstractmethod
    def _find(self, task: Any) -> Queued | None:
        """What the scheduler said of a task that has not ended."""

    @abstractmethod
    def _gone(self, cells: list[CellState]) -> list[CellState]:
        """The states of cells without an end, of which no task is left."""

    @abstractmethod
    def alive(self, started: Mapping[str, Any]) -> bool | None:
        """Whether the attempt of a ``started`` event lives; None if that cannot be told."""

    @abstractmethod
    def remove(self, status: Status, cancelled: set[int]) -> str | None:
        """Take tasks out of the queue whose cells are cancelled, if no other cell needs them.

        Args:
            status: the states before the cells were cancelled.
            cancelled: the cells.

        Returns:
            What went wrong, if anything.
        """

    def release(self) -> list[str]:
        """Let tasks go on that the scheduler holds for no fault of theirs; what to say of it."""
        return []

    # What follows from it

    def ask(self, older: float = 0.0) -> bool:
        """Ask the scheduler, unless that was done less than ``older`` seconds ago.

        Returns:
            Whether it was asked.
        """
        if time.monotonic() - self._asked < older:
            return False
        # The journal first: a job that it names is in the queue, or has left it.
        entries = read_journal(self._run)
        self._asked_time = time.time()
        self.trouble = None
        try:
            entries += self._question(entries)
        except SchedulerError as error:
            self._answered = False
            self.trouble = f"{error}; what is shown is from the run folder alone"
        else:
            self._answered = True
        self._asked = time.monotonic()
        choices = self._run.choices()
        proposed = len(self._run.proposals())
        if proposed != self._proposed:
            self._proposed, self._untouched = proposed, {}  # their parameters are other ones
        if entries != self._entries or choices != self._choices:
            self._entries, self._choices = entries, choices
            self._tasks = self._submitted(entries)
            newest = {tasks[0].submission for tasks in self._tasks.values()}
            self._created = {
                number: parse_time(self._run.read_submission(number)["created"])
                for number in newest
            }
        return True

    def refresh(self) -> Status:
        """The states now, with what the scheduler said last."""
        status = self._watcher.refresh()
        if not self._answered:
            return status
        cells = dict(status.cells)
        self._read_untouched(index for index in self._tasks if index not in cells)
        gone = []
        for index in self._tasks:
            cell = cells.get(index) or self._untouched[index]
            if cell.cancelled and self._is_given_again(cell):
                state = "stopped" if cell.attempts else "pending"
                cell = cells[index] = replace(cell, cancelled=False, state=state, reason=None)
            task = self._task(index)
            again = cell.state == "failed" and task is not None and self._failed_before(cell)
            if (cell.state in TERMINAL and not again) or cell.cancelled:
                continue
            if task is None:
                gone.append(cell)
            elif cell.state != "running":
                cells[index] = self._queued(cell, task)
        gone = [cell for cell in gone if cell.state in ("pending", "lost")]
        if gone:
            cells.update((cell.index, cell) for cell in self._gone(gone))
        return Status(status.total, dict(sorted(cells.items())))

    def going(self, status: Status) -> bool:
        """Whether something of the run is running or waiting, as far as is known."""
        if not self._answered:
            return sum(status.counts().get(state, 0) for state in TERMINAL) < status.total
        return bool(status.in_state("running") or self.taken(status))

    def taken(self, status: Status) -> set[int]:
        """The cells that a queued or running task is going to run, or runs."""
        if not self._answered:
            return set()
        return {
            index
            for index in self._tasks
            if (task := self._task(index)) is not None
            and not self._is_free(status.cells.get(index), task)
        }

    def in_queue(self) -> set[int]:
        """The cells of which a task is queued or running, whether it will run them or not."""
        if not self._answered:
            return set()
        return {index for index in self._tasks if self._task(index) is not None}

    def _task(self, index: int) -> Queued | None:
        alive = [task for task in map(self._find, self._tasks[index]) if task is not None]
        # The links of a chain that wait for the one that runs are of no interest.
        return next((task for task in alive if task.running), alive[-1] if alive else None)

    @staticmethod
    def _is_free(cell: CellState | None, task: Queued) -> bool:
        """Whether a cell's task will not run it any more, or again."""
        if cell is None or cell.state == "running":
            return False
        if cell.state == "failed":
            over = time.time() - (cell.ended or 0.0) > _RETRY_SECONDS
            return over or not task.running
        return cell.state in ("done", "dropped") or cell.cancelled

    def _is_given_again(self, cell: CellState) -> bool:
        """Whether a cell was submitted after it was cancelled, and has not begun since."""
        submitted = self._created[self._tasks[cell.index][0].submission]
        return cell.state != "running" and submitted > (cell.cancelled_time or 0.0)

    def _failed_before(self, cell: CellState) -> bool:
        """Whether a cell was submitted after it failed."""
        return self._created[self._tasks[cell.index][0].submission] > (cell.ended or 0.0)

    def _read_untouched(self, indices: Iterable[int]) -> None:
        """Make states for cells that left nothing yet, all with one reading."""
        missing = [index for index in indices if index not in self._untouched]
        for index, record in zip(missing, self._run.read_cells(missing), strict=True):
            self._untouched[index] = CellState(record["id"], index, "pending", record["params"])

    def _queued(self, cell: CellState, task: Queued) -> CellState:
        if not task.running:
            why = task.why
            if cell.state in ("stopped", "lost") and cell.reason:
                why = f"{cell.reason}; {why}"
            return replace(cell, state="pending", reason=why, stuck=task.stuck)
        if cell.state == "stopped" and (cell.ended or 0.0) > self._asked_time - SKEW:
            return cell
        return replace(cell, state="pending", reason="starts")

    def _over(self, cell: CellState | None) -> bool:
        """Whether nobody wants anything of a cell any more."""
        return cell is not None and (cell.state in TERMINAL or cell.cancelled)

    def _last_words(self, submission: int, name: str) -> str:
        """The last line that the batch script of a task left on stderr."""
        path = self._run.tasks / f"{submission:03}.{name}.err"
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 4096))
                lines = file.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1].strip()[:300] if lines else ""
