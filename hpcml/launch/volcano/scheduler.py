"""The scheduler Volcano: the tasks of a submission as jobs with a pod for each lane."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcml.launch.cluster import MAYBE, Journal, PartlySubmitted
from hpcml.launch.executor import TaskJob
from hpcml.launch.volcano.client import AlreadyThere, Cluster, NoAnswer, Object, VolcanoError
from hpcml.launch.volcano.journal import is_of
from hpcml.launch.volcano.reasons import ENDED
from hpcml.plan.volcano import Job
from hpcml.runs.folder import RunFolder

#: A job and its manifest.
Work = tuple[Job, Object]

# Seconds for the server to remove a job that has ended, with its pods.
_GONE_SECONDS = 60.0


class VolcanoScheduler:
    """Submits the jobs of one submission.

    Args:
        cluster: where.
        run: the run.
        label: by which the jobs of the run are found.
        journal: told of each call before and after it.
    """

    def __init__(
        self,
        cluster: Cluster,
        run: RunFolder,
        label: str,
        journal: Journal,
    ) -> None:
        self._cluster = cluster
        self._run = run
        self._label = label
        self._journal = journal
        self.jobs: list[str] = []

    def check(self, work: Sequence[Work]) -> None:
        """Let the server and Volcano's webhook look at jobs, and create nothing.

        They differ in names and numbers only, so that the first and the last stand for all.

        Raises:
            VolcanoError: they would be refused.
        """
        for _, manifest in work if len(work) < 3 else (work[0], work[-1]):
            try:
                self._cluster.create(manifest, dry_run=True)
            except AlreadyThere:
                self._remove_leftover(manifest["metadata"]["name"])

    def submit(self, folder: Path, work: Sequence[Work]) -> list[TaskJob]:
        """Submit jobs, in order.

        Raises:
            PartlySubmitted: one was refused; what was submitted before stays.
        """
        for position, (job, manifest) in enumerate(work):
            try:
                self._submit_one(job, manifest)
            except PartlySubmitted as error:
                if len(work) == 1:
                    raise
                raise PartlySubmitted(
                    f"{error}\n{position} of {len(work)} jobs were submitted before that; "
                    "give the command again to submit the rest"
                ) from None
        return [TaskJob(folder, job.name) for job, _ in work]

    def _submit_one(self, job: Job, manifest: Object) -> None:
        what: dict[str, Any] = {
            "part": job.number,
            "job": job.name,
            "gang": job.pods > job.lanes,
            "first": job.first,
            "lanes": job.lanes,
            "stride": job.stride,
            "label": self._label,
        }
        self._journal("submitting", **what)
        try:
            try:
                self._cluster.create(manifest)
            except AlreadyThere:
                self._remove_leftover(job.name)
                self._cluster.create(manifest)
        except NoAnswer as error:
            self._journal("unclear", **what, text=str(error))
            raise PartlySubmitted(f"{error}\n{MAYBE}") from None
        except VolcanoError as error:
            self._journal("refused", **what, reason=str(error))
            raise PartlySubmitted(str(error)) from None
        # The next line flushes this one. If a crash comes first, the job is found by its name.
        self._journal("submitted", durable=False, **what)
        self.jobs.append(job.name)

    def _remove_leftover(self, name: str) -> None:
        """Remove a job of this name: one of a run folder that was removed, and made anew.

        Raises:
            VolcanoError: it is another's, it has not ended, or it does not go.
        """
        old = self._cluster.job(name)
        if old is None:
            return
        phase = ((old.get("status") or {}).get("state") or {}).get("phase")
        if not is_of(old, self._run) or phase not in ENDED:
            raise VolcanoError(
                f"there is a job {name} already, of an earlier run in this folder that was "
                f"removed or of somebody else ({phase or 'new'}); to end it: "
                f"kubectl --namespace {self._cluster.namespace} delete jobs.batch.volcano.sh {name}"
            )
        self._cluster.delete(name)
        end = time.monotonic() + _GONE_SECONDS
        while self._cluster.job(name) is not None:
            if time.monotonic() > end:
                raise VolcanoError(f"the job {name} of an earlier run does not go away")
            time.sleep(0.2)
