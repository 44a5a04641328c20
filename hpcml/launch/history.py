"""The submissions of one cell: what was said to a scheduler about it, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpcml.launch.journal import read_journal
from hpcml.launch.slurm.journal import submitted_tasks as slurm_tasks
from hpcml.launch.volcano.journal import submitted_tasks as volcano_tasks
from hpcml.runs.folder import RunFolder


@dataclass(frozen=True, slots=True)
class Submitted:
    """A submission that has the cell.

    Attributes:
        number: of the submission.
        time: when it was made, as events write times.
        scheduler: ``local``, ``slurm`` or ``volcano``.
        jobs: the tasks that run the cell, as the scheduler calls them: job and index, or pod; a
            chain has several. In a rung that is still open it may be any task.
        partition: what Slurm was told, or None.
        limit: seconds that an attempt may take, or None.
        rung: with halving, the rung.
        code: the snapshot, as a folder in the run folder.
    """

    number: int
    time: str
    scheduler: str
    jobs: list[str]
    partition: str | None
    limit: int | None
    rung: int | None
    code: str


def submissions_of(run: RunFolder, index: int) -> list[Submitted]:
    """The submissions that have the cell ``index``, oldest first."""
    entries = read_journal(run)
    jobs: dict[int, list[str]] = {}
    for task in slurm_tasks(run, [entry for entry in entries if "link" in entry]).get(index, ()):
        jobs.setdefault(task.submission, []).append(f"{task.job}_{task.task}")
    for lane in volcano_tasks(run, entries).get(index, ()):
        jobs.setdefault(lane.submission, []).append(lane.pod)
    found = []
    for number in sorted({entry["submission"] for entry in entries if "submission" in entry}):
        record = run.read_submission(number)
        if any(index in place for place in run.places(record)):
            found.append(_submitted(run, number, record, jobs.get(number, [])))
    return found


def _submitted(run: RunFolder, number: int, record: dict[str, Any], jobs: list[str]) -> Submitted:
    scheduler = record.get("scheduler", "local")
    return Submitted(
        number=number,
        time=record["created"],
        scheduler=scheduler,
        jobs=sorted(set(jobs)),
        partition=_partition(run, number) if scheduler == "slurm" else None,
        limit=record["settings"]["resources"]["time"],
        rung=record.get("rung"),
        code=record["code"],
    )


def _partition(run: RunFolder, number: int) -> str | None:
    """The partition in the script of a submission, where it names one."""
    try:
        script = (run.scripts / f"{number:03}.sh").read_text(encoding="utf-8")
    except OSError:
        return None
    for line in script.splitlines():
        if line.startswith("#SBATCH --partition="):
            return line.partition("=")[2].strip("'\"")
    return None
