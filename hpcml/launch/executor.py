"""hpcml's plugin for submitit: an executor whose jobs are tasks of a script that hpcml rendered.

submitit's own executors pickle a function for every job and write a script of their own around
it. Here one script runs all tasks of a submission, and no file is written per task.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from submitit.core import core, utils
from submitit.core.job_environment import JobEnvironment


class TaskJob(core.Job[None]):
    """One task, or an array of them. ``state`` is what the scheduler last said of it."""

    def __init__(self, folder: Path | str, job_id: str, state: str = "PENDING") -> None:
        # Not submitit's own: it works out paths that these jobs don't have, and registers each job
        # with a watcher, while the states of a run are asked for all at once. There are thousands.
        self._job_id = job_id
        self._tasks = (0,)
        self._sub_jobs: list[TaskJob] = []
        self._cancel_at_deletion = False
        self._folder = folder
        self._state = state

    @property
    def paths(self) -> utils.JobPaths:
        """Where submitit would look for files of the job."""
        return utils.JobPaths(self._folder, job_id=self._job_id, task_id=0)

    @property
    def state(self) -> str:
        return self._state

    @state.setter
    def state(self, state: str) -> None:
        self._state = state

    def done(self, force_check: bool = False) -> bool:
        """Whether the task has ended for good."""
        return self._state not in ("PENDING", "RUNNING")

    def get_info(self, mode: str = "force") -> dict[str, str]:
        """What submitit calls the information of a job."""
        return {"JobID": self.job_id, "State": self._state}


class TaskJobEnvironment(JobEnvironment):
    """How a process finds out that it runs in such a task."""

    _env: ClassVar[dict[str, str]] = {
        "job_id": "HPCML_JOB_ID",
        "global_rank": "RANK",
        "local_rank": "LOCAL_RANK",
    }


class Scheduler(Protocol):
    """What runs tasks: one at a time, or arrays of them."""

    def submit(self, folder: Path, work: Sequence[Any]) -> list[TaskJob]:
        """Submit tasks of the script, or whole arrays of them; returns a job for each."""


class ScriptExecutor(core.Executor):
    """Submits calls of :func:`hpcml.worker.task.run_task` as tasks of a scheduler.

    The function is not called here: the batch script starts the worker, which makes the same call
    on the node. The last argument is a task, or for a scheduler with arrays a part of the tasks.

    Args:
        folder: where submitit thinks that files of jobs lie.
        scheduler: what runs the tasks.
    """

    job_class = TaskJob

    def __init__(self, folder: Path | str, scheduler: Scheduler | None = None) -> None:
        super().__init__(folder)
        self.scheduler = scheduler

    @classmethod
    def name(cls) -> str:
        """What submitit calls this executor."""
        return "hpcml"

    @classmethod
    def affinity(cls) -> int:
        """0: only used when asked for."""
        return 0

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return {"scheduler"}

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        self.scheduler = kwargs.pop("scheduler", self.scheduler)
        super()._internal_update_parameters(**kwargs)

    def _internal_process_submissions(
        self, delayed_submissions: list[utils.DelayedSubmission]
    ) -> list[core.Job[Any]]:
        if self.scheduler is None:
            raise ValueError("update_parameters(scheduler=…) must say what runs the tasks")
        work = [submission.args[2] for submission in delayed_submissions]
        return list(self.scheduler.submit(self.folder, work))
