"""What Slurm knows of a user's jobs: one call of squeue, one of sacct, whatever their number."""

from __future__ import annotations

import getpass
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
RUNNING = frozenset(("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING"))


class JobState(NamedTuple):
    """The state of a task in Slurm's words, why it waits, and where it came from."""

    state: str
    reason: str
    script: str


class Queue:
    """The jobs of this user that squeue shows.

    ``tasks`` holds those with known indices by (job, index); index None is a job without an
    array. ``rests`` holds jobs of which squeue shortened the list of waiting tasks.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        self.tasks: dict[tuple[int, int | None], JobState] = {}
        self.rests: dict[int, JobState] = {}
        for job, indices, state in _parse(lines):
            if indices:
                self.tasks.update({(job, index): state for index in indices})
            elif indices is None:
                self.tasks[job, None] = state
                self.rests[job] = state

    def find(self, job: int, index: int) -> JobState | None:
        """The state of one task, or None if squeue does not show it."""
        return self.tasks.get((job, index)) or self.rests.get(job)


def queue() -> Queue:
    """Ask squeue, once.

    Raises:
        SlurmError: the controller gave no answer.
    """
    # The reason comes last: it may hold any character, the others hold no bar.
    text = run(["squeue", "--noheader", f"--user={getpass.getuser()}", "--format=%i|%T|%o|%r"])
    return Queue(text.splitlines())


def accounting(jobs: Iterable[int]) -> dict[tuple[int, int | None], str]:
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
        job_id, _, rest = line.strip().partition("|")
        parts = rest.split("|", 2)
        if len(parts) != 3:
            continue
        try:
            job, indices = array_tasks(job_id)
        except ValueError:
            continue
        state, script, reason = parts
        yield job, indices, JobState(state, reason.strip(), script)
