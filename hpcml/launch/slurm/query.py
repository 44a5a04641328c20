"""What Slurm knows of a user's jobs: one call of squeue, one of sacct, whatever their number."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from hpcml.launch.slurm.client import run
from hpcml.launch.slurm.text import array_tasks

# States in which a job has ended and will not come back by itself.
ENDED = frozenset(
    (
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "TIMEOUT",
    )
)
# Between the fields of squeue: no reason and hardly a path holds it.
_BAR = "\x1f"

# The reasons of an array's tasks, of which some are held.
_MIXED = re.compile(r",JobHeld|JobHeld\w+,")

RUNNING = frozenset(("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING"))


class JobState(NamedTuple):
    """The state of a task in Slurm's words, why it waits, and where it came from."""

    state: str
    reason: str
    script: str


class Queue:
    """The jobs of this user that squeue shows.

    ``tasks`` holds them by (job, index); index None is a job without an array, or one of which
    squeue shortened the list of waiting tasks.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        self.tasks: dict[tuple[int, int | None], JobState] = {}
        for job, indices, state in _parse(lines):
            self.tasks.update({(job, index): state for index in indices or (None,)})

    def find(self, job: int, index: int) -> JobState | None:
        """The state of one task, or None if squeue does not show it."""
        return self.tasks.get((job, index)) or self.tasks.get((job, None))

    def jobs(self) -> Iterator[tuple[int, JobState]]:
        """All jobs and tasks with their states; an array comes once for each of its tasks."""
        for (job, _), state in self.tasks.items():
            yield job, state


def queue(user: str, clusters: Iterable[str] = ()) -> Queue:
    """Ask squeue for the jobs of ``user``, on this cluster or on those that are named.

    Once, and a second time where some tasks of an array are held and others wait.

    Raises:
        SlurmError: the controller gave no answer.
    """
    command = ["squeue", "--noheader", f"--user={user}", f"--format=%i{_BAR}%T{_BAR}%r{_BAR}%o"]
    command += on(clusters)
    text = run(command)
    found = _read(text)
    if _MIXED.search(text):
        # Tasks that wait are one line with all their reasons. One by one they have their own, but
        # the last one of a list such as 0-999:3 is then missing (22.05): hence both.
        found.tasks |= _read(run([*command, "--array"])).tasks
    return found


def _read(text: str) -> Queue:
    # Not splitlines(): a script's path may hold what Unicode takes for the end of a line.
    return Queue(text.split("\n"))


def on(clusters: Iterable[str]) -> list[str]:
    """The option that sends a command of Slurm to other clusters than this one."""
    names = sorted(set(clusters))
    return [f"--clusters={','.join(names)}"] if names else []


def accounting(
    jobs: Iterable[int], clusters: Iterable[str] = ()
) -> dict[tuple[int, int | None], str]:
    """Ask sacct, once, for the newest states of ``jobs`` and their tasks.

    A task that has not started has no record of its own and is left out.

    Raises:
        SlurmError: there is no accounting, or its database gave no answer.
    """
    text = run(
        [
            "sacct",
            "--noheader",
            "--parsable2",
            "--allocations",
            f"--jobs={','.join(map(str, sorted(set(jobs))))}",
            "--format=JobID,State",
            *on(clusters),
        ]
    )
    states: dict[tuple[int, int | None], str] = {}
    for line in text.splitlines():
        job_id, _, state = line.partition("|")
        try:
            job, indices = array_tasks(job_id)
        except ValueError:
            continue
        # "CANCELLED by 1000" is CANCELLED.
        word = state.split()[0] if state.split() else ""
        for index in indices or (None,):
            states[job, index] = word
    return states


def _parse(lines: Iterable[str]) -> Iterator[tuple[int, frozenset[int] | None, JobState]]:
    for line in lines:
        parts = line.split(_BAR, 3)
        if len(parts) != 4:
            continue
        job_id, state, reason, script = parts
        try:
            job, indices = array_tasks(job_id.strip())
        except ValueError:
            continue
        yield job, indices, JobState(state, reason.strip(), script)
