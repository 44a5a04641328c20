"""The states of a run's cells, from its files and from one look at Slurm."""

from __future__ import annotations

import getpass
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from hpcml.launch.cluster import SKEW, ClusterWatcher, Queued
from hpcml.launch.journal import Entry
from hpcml.launch.slurm.client import SlurmError, run
from hpcml.launch.slurm.journal import (
    TaskId,
    clusters,
    job_clusters,
    releases,
    settled,
    submitted_tasks,
)
from hpcml.launch.slurm.query import ENDED, RUNNING, Queue, accounting, on, queue
from hpcml.launch.slurm.reasons import end_words, is_stuck, launch_failed, words
from hpcml.launch.slurm.text import array_list, array_tasks
from hpcml.runs.events import parse_time
from hpcml.runs.folder import RunFolder
from hpcml.runs.status import CellState, Status

#: How often a task is released that nodes could not start. What one node lacks, another one has;
#: what does not work anywhere would go on for ever.
RELEASES = 3


class SlurmWatcher(ClusterWatcher):
    """Looks at a run again and again; squeue is asked by :meth:`ask` alone."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__(folder)
        self._accounting = folder.plan["site"]["slurm"]["accounting"]
        self._jobs: set[int] = set()
        self._queue: Queue | None = None
        self._accounts: dict[tuple[int, int | None], str] | None = None
        self._clusters: set[str] = set()
        self._releases: Counter[tuple[int, int]] = Counter()

    def _question(self, entries: list[Entry]) -> list[Entry]:
        self._queue = self._accounts = None
        self._clusters = clusters(self._run, entries)
        self._queue = queue(self._user(), self._clusters)
        return settled(self._run, entries, self._queue)

    def _submitted(self, entries: list[Entry]) -> Mapping[int, list[TaskId]]:
        tasks = submitted_tasks(self._run, entries)
        self._releases = releases(entries)
        self._jobs = {task.job for found in tasks.values() for task in found}
        return tasks

    def _find(self, task: TaskId) -> Queued | None:
        assert self._queue is not None
        state = self._queue.find(task.job, task.task)
        if state is None or state.state in ENDED:
            return None
        why = words(state.reason, task.job)
        if launch_failed(state.reason):
            why += f"; {self._remedy(task)}"
        return Queued(state.state in RUNNING, why, is_stuck(why))

    def _remedy(self, task: TaskId) -> str:
        times = self._releases[task.job, task.task]
        if times < RELEASES:
            return "the sweep command given again releases it"
        return (
            f"it was released {times} times in vain, so this is no accident: ask the "
            "administrators, then `hpcml cancel` the cell and give the sweep command again"
        )

    def release(self) -> list[str]:
        """Release tasks that Slurm held after a failed launch, each at most ``RELEASES`` times.

        What a person has held is left to that person.
        """
        held = self._launch_failed()
        said = []
        for cluster, jobs in job_clusters(self._entries or (), held).items():
            names = [f"{job}_[{array_list(held[job])}]" for job in jobs]
            for job in jobs:
                self._run.journal("released", job=job, indices=held[job])
            try:
                run(["scontrol", *on([cluster] if cluster else []), "release", *names])
            except SlurmError as error:
                said.append(f"not released, though nodes could not start it: {error}")
            else:
                said.append(f"released {', '.join(names)}, which nodes could not start")
        return said

    def _launch_failed(self) -> dict[int, list[int]]:
        """The tasks to release, by job."""
        found: dict[int, list[int]] = {}
        for (job, index), state in self._queue.tasks.items() if self._queue else ():
            if job not in self._jobs or index is None or state.state in ENDED | RUNNING:
                continue
            if launch_failed(state.reason) and self._releases[job, index] < RELEASES:
                found.setdefault(job, []).append(index)
        return found

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

    def remove(self, status: Status, cancelled: set[int]) -> str | None:
        """Take tasks out of the queue whose cells are cancelled, if no other cell needs them."""
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
            over = index in chosen or self._over(status.cells.get(index))
            for task in tasks:
                wanted[task] = wanted.get(task, False) or not over
        # Which cell has which place of such a rung is open: a cell that is left may have any.
        needed = {task.submission for task, wants in wanted.items() if wants}
        open_rungs = {number for number in needed if self._is_open(number)}
        found: dict[int, set[int]] = {}
        for task in {task for index in chosen for task in self._tasks.get(index, ())}:
            job = self._queue.find(task.job, task.task)
            if job is None or job.state in ENDED | RUNNING or wanted[task]:
                continue
            if task.submission not in open_rungs:
                found.setdefault(task.job, set()).add(task.task)
        return [f"{job}_[{array_list(indices)}]" for job, indices in sorted(found.items())]

    def _is_open(self, submission: int) -> bool:
        """Whether it is a rung of a halving whose cells are not chosen yet."""
        rung = self._run.read_submission(submission).get("rung") or 1
        return rung > 1 and rung not in self._choices

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
        if parse_time(str(started.get("time"))) > self._asked_time - SKEW:
            return True
        state = self._queue.find(job, min(indices))
        return state is not None and state.state in RUNNING

    def _user(self) -> str:
        """Who submitted the run: others may look at it, too."""
        try:
            return self._run.journal_file.owner()
        except (OSError, KeyError):
            return getpass.getuser()

    def _gone(self, cells: list[CellState]) -> list[CellState]:
        if self._accounts is None:
            self._accounts = self._ask_accounting({self._tasks[c.index][0].job for c in cells})
        accounts = self._accounts
        return [self._ended(cell, accounts) for cell in cells]

    def _ended(self, cell: CellState, accounts: Mapping[tuple[int, int | None], str]) -> CellState:
        task = self._tasks[cell.index][0]
        state = accounts.get((task.job, task.task)) or accounts.get((task.job, None), "")
        if cell.out_of_memory:
            return replace(cell, state="failed")
        if state in ENDED or state == "PREEMPTED":
            said = end_words(state)
        elif cell.state == "lost":
            return cell
        else:
            said = "its job has left the queue"
        last = self._last_words(task.submission, f"{task.job}_{task.task}")
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
