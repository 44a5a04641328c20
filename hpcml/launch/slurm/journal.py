"""What a run's journal says of its jobs, and how a call of sbatch that was cut off ended."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import NamedTuple

from hpcml.files import plain_errors
from hpcml.launch.journal import Entry, open_calls
from hpcml.launch.slurm.query import Queue
from hpcml.runs.folder import RunFolder

_CLUSTERS = re.compile(r"^#SBATCH --clusters=(.*)$", re.MULTILINE)
_TASK_LOG = re.compile(r"(\d+)\.(\d+)_\d+\.(?:out|err)")


class TaskId(NamedTuple):
    """A task of an array: the job, its index there, and the submission that it belongs to."""

    job: int
    task: int
    submission: int


def of_slurm(entries: Iterable[Entry]) -> bool:
    """Whether any submission went to Slurm."""
    return any("link" in entry for entry in entries)


def submitted_tasks(run: RunFolder, entries: Sequence[Entry]) -> dict[int, list[TaskId]]:
    """The tasks that were submitted for each cell, the newest first."""
    found: dict[int, list[TaskId]] = {}
    for entry in reversed(entries):
        if entry.get("event") != "submitted" or "job" not in entry:
            continue
        number, job = entry["submission"], entry["job"]
        record = run.read_submission(number)
        places = run.places(record)
        pack, workers = record["pack"], record.get("workers", 1)
        for index in range(entry["tasks"]):
            first = (entry["offset"] + index) // workers * pack
            for cell in chain.from_iterable(places[first : first + pack]):
                found.setdefault(cell, []).append(TaskId(job, index, number))
    return found


def releases(entries: Iterable[Entry]) -> Counter[tuple[int, int]]:
    """How often each task, by job and index, was released."""
    return Counter(
        (entry["job"], index)
        for entry in entries
        if entry.get("event") == "released"
        for index in entry["indices"]
    )


def job_clusters(entries: Iterable[Entry], jobs: Container[int]) -> dict[str | None, list[int]]:
    """Some of the jobs, by the cluster that sbatch named; None is this one."""
    found: dict[str | None, list[int]] = {}
    for entry in entries:
        if entry.get("event") == "submitted" and entry.get("job") in jobs:
            found.setdefault(entry.get("cluster"), []).append(entry["job"])
    return found


def clusters(run: RunFolder, entries: Iterable[Entry]) -> set[str]:
    """The clusters that scripts of the run name; empty where all went to this cluster."""
    names: set[str] = set()
    for number in {entry["submission"] for entry in entries if "link" in entry}:
        with suppress(OSError):
            for value in _CLUSTERS.findall((run.scripts / f"{number:03}.sh").read_text()):
                names.update("".join(shlex.split(value)).split(","))
    return names


def settled(run: RunFolder, entries: Sequence[Entry], queue: Queue) -> list[Entry]:
    """What became of the calls of sbatch whose end the journal does not tell.

    The command was killed, or sbatch printed no number. A job of such a call is in the queue,
    where its script names the submission; or it has begun, and its number is in the name of the
    file that its output goes to. If it is neither, then there is none.

    Returns:
        The entries that the journal lacks.
    """
    found = []
    known = {entry["job"] for entry in entries if "job" in entry}
    for call in open_calls(entry for entry in entries if "link" in entry):
        jobs = _jobs_of(run, call["submission"], queue) - known
        what = {key: call[key] for key in ("submission", "part", "link", "offset", "tasks")}
        if jobs:
            job = min(jobs)
            known.add(job)
            found.append({"event": "submitted", **what, "job": job, "cluster": None, "found": True})
        else:
            found.append({"event": "vanished", **what})
    return found


def _jobs_of(run: RunFolder, submission: int, queue: Queue) -> set[int]:
    script = str(run.scripts / f"{submission:03}.sh")
    # squeue shows the script with its argument, the offset.
    jobs = {job for job, state in queue.jobs() if state.script.rpartition(" ")[0] == script}
    with plain_errors(f"read {run.tasks}"):
        for path in run.tasks.iterdir():
            match = _TASK_LOG.fullmatch(path.name)
            if match and int(match[1]) == submission:
                jobs.add(int(match[2]))
    return jobs
