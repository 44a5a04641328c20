"""The states of a run's cells, from its files and from one look at the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpcml.launch.cluster import SKEW, ClusterWatcher, Queued
from hpcml.launch.journal import Entry
from hpcml.launch.volcano.client import Cluster, Object, VolcanoError
from hpcml.launch.volcano.journal import LaneTask, labels, settled, submitted_tasks
from hpcml.launch.volcano.reasons import ENDED, ENDING, ended, exit_code, waits
from hpcml.runs.events import parse_time
from hpcml.runs.folder import RunFolder
from hpcml.runs.status import CellState, Status
from hpcml.worker.codes import AGAIN

# Jobs whose groups are looked at for the reason why they wait; more of them wait for the same.
_ASKED = 10


class VolcanoWatcher(ClusterWatcher):
    """Looks at a run again and again; the server is asked by :meth:`ask` alone.

    One call lists the run's jobs and one its pods, whatever their number.
    """

    def __init__(self, folder: RunFolder) -> None:
        super().__init__(folder)
        self._cluster: Cluster | None = None
        self._jobs: dict[str, Object] = {}
        self._pods: dict[str, Object] = {}
        self._groups: dict[str, Object | None] = {}
        self._queues: dict[str, Object | None] = {}

    def _question(self, entries: list[Entry]) -> list[Entry]:
        if self._cluster is None:
            self._cluster = Cluster(self._run.plan["site"]["volcano"])
        cluster = self._cluster
        found = labels(entries)
        jobs = [job for label in found for job in cluster.jobs(label)]
        pods = [pod for label in found for pod in cluster.pods(label)]
        self._jobs = {job["metadata"]["name"]: job for job in jobs}
        self._pods = {pod["metadata"]["name"]: pod for pod in pods}
        self._groups, self._queues = {}, {}
        waiting = [job for job in jobs if _phase(job) in ("", "Pending", "Restarting", "Running")]
        waiting = [job for job in waiting if not _all_run(job)]
        for job in waiting[:_ASKED]:
            self._ask_why(cluster, job)
        return settled(self._run, entries, self._jobs)

    def _ask_why(self, cluster: Cluster, job: Object) -> None:
        queue = job["spec"].get("queue", "default")
        try:
            self._groups[job["metadata"]["name"]] = cluster.pod_group(job)
            if queue not in self._queues:
                self._queues[queue] = cluster.queue(queue)
        except VolcanoError:
            # People may see their jobs without seeing groups and queues.
            self._queues.setdefault(queue, None)

    def _submitted(self, entries: list[Entry]) -> Mapping[int, list[LaneTask]]:
        return submitted_tasks(self._run, entries)

    def _find(self, task: LaneTask) -> Queued | None:
        job, pod = self._jobs.get(task.job), self._pods.get(task.pod)
        if job is None or _phase(job) in ENDED:
            return None
        phase = (pod.get("status") or {}).get("phase", "Pending") if pod else "Pending"
        if phase in ("Running", "Unknown"):
            return Queued(True, "")
        if _phase(job) in ENDING or job["metadata"].get("deletionTimestamp"):
            return None
        if pod is not None and phase == "Succeeded":
            return None
        if pod is not None and phase == "Failed":
            # Volcano is about to make the pod anew; after any other end the lane is over.
            return Queued(False, "is about to start again") if exit_code(pod) == AGAIN else None
        group = self._groups.get(task.job)
        return Queued(False, waits(job, pod, group, self._queues.get(job["spec"].get("queue"))))

    def _gone(self, cells: list[CellState]) -> list[CellState]:
        return [self._ended(cell) for cell in cells]

    def _ended(self, cell: CellState) -> CellState:
        task: LaneTask = self._tasks[cell.index][0]
        said, memory = ended(self._jobs.get(task.job), self._pods.get(task.pod))
        last = self._last_words(task.submission, task.pod)
        reason = f"{said}: {last}" if last else said
        return replace(cell, state="failed" if memory else "lost", reason=reason)

    def remove(self, status: Status, cancelled: set[int]) -> str | None:
        """Delete the jobs of cancelled cells, where nobody wants anything else of them.

        Their pods that run are asked to save. Of other jobs the cells end when they begin.
        """
        if not self._answered or self._cluster is None:
            return self.trouble
        wanted: dict[str, bool] = {}
        for index, tasks in self._tasks.items():
            over = index in cancelled or self._over(status.cells.get(index))
            for task in tasks:
                wanted[task.job] = wanted.get(task.job, False) or not over
        for name in sorted(
            {task.job for index in cancelled for task in self._tasks.get(index, ())}
        ):
            job = self._jobs.get(name)
            if job is None or wanted[name] or _phase(job) in ENDED:
                continue
            try:
                self._cluster.delete(name)
            except VolcanoError as error:
                return str(error)
        return None

    def alive(self, started: Mapping[str, Any]) -> bool | None:
        """Whether the attempt of a ``started`` event lives; None if that cannot be told."""
        if not self._answered:
            return None
        name = str(started.get("job"))
        if not any(name.startswith(f"{job}-") for job in self._names()):
            return None
        began = parse_time(str(started.get("time")))
        if began > self._asked_time - SKEW:
            return True
        pod = self._pods.get(name)
        if pod is None or (pod.get("status") or {}).get("phase") not in ("Running", "Unknown"):
            return False
        # The pod after it has the same name.
        return began >= parse_time(str(pod["status"].get("startTime") or "")) - SKEW

    def _names(self) -> set[str]:
        return {task.job for tasks in self._tasks.values() for task in tasks}


def _phase(job: Object) -> str:
    return str(((job.get("status") or {}).get("state") or {}).get("phase") or "")


def _all_run(job: Object) -> bool:
    status = job.get("status") or {}
    pods = sum(task.get("replicas", 0) for task in job["spec"]["tasks"])
    seen = sum(status.get(key) or 0 for key in ("running", "succeeded", "failed"))
    return bool(seen >= pods)
