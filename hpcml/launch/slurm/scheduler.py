"""The scheduler Slurm: the tasks of a submission as a few arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpcml.launch.executor import TaskJob
from hpcml.launch.slurm import client
from hpcml.launch.slurm.text import NoJobId, submitted_job
from hpcml.plan.arrays import Part

#: Writes a line of the run's journal before returning.
Journal = Callable[..., None]


class PartlySubmitted(Exception):
    """Slurm refused a part; the message says which, why, and how much is submitted."""


def command(script: Path, part: Part, after: int | None) -> list[str]:
    """The call of sbatch for one part of a submission.

    Args:
        script: the batch script. It gets the part's offset as its argument.
        part: the array.
        after: a job that must have ended, in whatever way, before this one begins.
    """
    dependency = [f"--dependency=afterany:{after}"] if after is not None else []
    return [
        "sbatch",
        "--parsable",
        f"--array={part.indices}",
        *dependency,
        str(script),
        str(part.offset),
    ]


class SlurmScheduler:
    """Submits the arrays of one submission.

    Args:
        script: the rendered batch script.
        parts: the arrays, in order.
        links: how often each is submitted, each time to follow the time before.
        journal: told of each call of sbatch before and after it.
    """

    def __init__(self, script: Path, parts: Sequence[Part], links: int, journal: Journal) -> None:
        self._script = script
        self._parts = parts
        self._links = links
        self._journal = journal
        self.jobs: list[int] = []

    def submit(self, folder: Path, tasks: Sequence[int]) -> list[TaskJob]:
        """Submit all parts.

        Raises:
            PartlySubmitted: sbatch refused one; what was submitted before stays.
        """
        numbers: dict[int, int] = {}
        for part in self._parts:
            after = None if part.after is None else numbers[part.after]
            for link in range(self._links):
                after = numbers[part.number] = self._submit_part(part, link, after)
        jobs = []
        for part in self._parts:
            number = numbers[part.number]
            jobs += [TaskJob(folder, f"{number}_{index}") for index in range(part.tasks)]
        return jobs

    def _submit_part(self, part: Part, link: int, after: int | None) -> int:
        what: dict[str, Any] = {
            "part": part.number,
            "link": link,
            "offset": part.offset,
            "tasks": part.tasks,
        }
        self._journal("submitting", **what)
        try:
            text = client.run(command(self._script, part, after))
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
                    "sbatch named no single job, so it may have submitted something "
                    f"(squeue shows it). It printed:\n{text.strip() or '(nothing)'}",
                )
            ) from None
        self._journal("submitted", **what, job=job.number, cluster=job.cluster)
        self.jobs.append(job.number)
        return job.number

    def _message(self, part: Part, reason: str) -> str:
        if len(self._parts) == 1:
            return reason
        return (
            f"{reason}\n{part.offset} tasks are submitted, the rest is not; "
            "give the command again to submit it"
        )
