"""The scheduler Slurm: the tasks of a submission as a few arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hpcml.launch.cluster import MAYBE, Journal, PartlySubmitted
from hpcml.launch.executor import TaskJob
from hpcml.launch.slurm import client
from hpcml.launch.slurm.text import NoJobId, submitted_job
from hpcml.plan.arrays import Part


def command(
    script: Path, part: Part, after: int | str | None, needs: Sequence[int | str] = ()
) -> list[str]:
    """The call of sbatch for one part of a submission.

    Args:
        script: the batch script. It gets the part's offset as its argument.
        part: the array.
        after: the job of this submission before it.
        needs: jobs of other runs before it.

    It begins when these have ended, in whatever way: what became of their cells is for the worker
    to see. Slurm takes a job that it has forgotten for one that succeeded, and one that used up
    its memory on the way to success for one that failed.
    """
    before = [*([] if after is None else [after]), *needs]
    dependency = [f"--dependency={_ended(before)}"] if before else []
    return [
        "sbatch",
        "--parsable",
        f"--array={part.indices}",
        *dependency,
        str(script),
        str(part.offset),
    ]


def wait_for(jobs: Iterable[int], needs: Iterable[int]) -> None:
    """Let jobs that wait in the queue begin only when other ones have ended.

    Raises:
        SlurmError: Slurm refused it; a job may have begun.
    """
    for job in jobs:
        client.run(["scontrol", "update", f"JobId={job}", f"Dependency={_ended(needs)}"])


def _ended(jobs: Iterable[int | str]) -> str:
    return ":".join(("afterany", *map(str, jobs)))


class SlurmScheduler:
    """Submits the arrays of one submission.

    Args:
        script: the rendered batch script.
        links: how often each is submitted, each time to follow the time before.
        journal: told of each call of sbatch before and after it.
        lock: a descriptor that sbatch inherits, so that the lock lasts as long as the call.
        needs: jobs of other runs that must have ended first.
    """

    def __init__(
        self,
        script: Path,
        links: int,
        journal: Journal,
        lock: int,
        needs: Sequence[int] = (),
    ) -> None:
        self._script = script
        self._links = links
        self._journal = journal
        self._lock = lock
        self._needs = needs
        self._parts: Sequence[Part] = ()
        self.jobs: list[int] = []

    def submit(self, folder: Path, parts: Sequence[Part]) -> list[TaskJob]:
        """Submit all parts, in their order.

        Raises:
            PartlySubmitted: sbatch refused one; what was submitted before stays.
        """
        self._parts = parts
        numbers: dict[int, int] = {}
        for part in parts:
            after = None if part.after is None else numbers[part.after]
            for link in range(self._links):
                after = numbers[part.number] = self._submit_part(part, link, after)
        return [TaskJob(folder, str(numbers[part.number])) for part in parts]

    def _submit_part(self, part: Part, link: int, after: int | None) -> int:
        what: dict[str, Any] = {
            "part": part.number,
            "link": link,
            "offset": part.offset,
            "tasks": part.tasks,
            "after": after,
        }
        self._journal("submitting", **what)
        try:
            text = client.run(command(self._script, part, after, self._needs), keep=[self._lock])
        except client.NoAnswer as error:
            self._journal("unclear", **what, text=str(error))
            raise PartlySubmitted(self._message(part, f"{error}\n{MAYBE}")) from None
        except client.SlurmError as error:
            self._journal("refused", **what, reason=str(error))
            raise PartlySubmitted(self._message(part, str(error))) from None
        try:
            job = submitted_job(text)
        except NoJobId:
            self._journal("unclear", **what, text=text)
            raise PartlySubmitted(
                self._message(
                    part,
                    f"sbatch named no single job. It printed:\n{text.strip() or '(nothing)'}\n"
                    f"{MAYBE}",
                )
            ) from None
        # The next line flushes this one. If a crash comes first, the job is found in the queue.
        self._journal("submitted", durable=False, **what, job=job.number, cluster=job.cluster)
        self.jobs.append(job.number)
        return job.number

    def _message(self, part: Part, reason: str) -> str:
        if len(self._parts) == 1:
            return reason
        total = sum(part.tasks for part in self._parts)
        return (
            f"{reason}\n{part.offset} of {total} tasks were submitted before that; "
            "give the command again to submit the rest"
        )
