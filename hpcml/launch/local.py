"""The local scheduler: a submitit executor that runs batch scripts on this machine.

It differs from submitit's own local executor in what it runs (the script that hpcml rendered, not
a pickled function in a script of submitit's), and in that it queues: as many tasks at a time as the
machine has cores and GPUs for. It lives in the process of the command; there is no daemon.
"""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from submitit.core import core, utils
from submitit.core.job_environment import JobEnvironment

AGAIN = 75  # the exit code of a task that saved and wants to run again


class LocalJob(core.Job[None]):
    """One task. ``state`` is one of PENDING, RUNNING, COMPLETED, FAILED, CANCELLED."""

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        super().__init__(folder, job_id, tasks)
        self._state = "PENDING"

    def _register_in_watcher(self) -> None:
        """The executor knows the state; nobody needs to be asked for it."""

    @property
    def state(self) -> str:
        return self._state

    def done(self, force_check: bool = False) -> bool:
        """Whether the task has ended for good."""
        return self._state not in ("PENDING", "RUNNING")

    def get_info(self, mode: str = "force") -> dict[str, str]:
        """What submitit calls the information of a job."""
        return {"JobID": self.job_id, "State": self._state}


class LocalJobEnvironment(JobEnvironment):
    """How a process finds out that it runs in such a task."""

    _env: ClassVar[dict[str, str]] = {
        "job_id": "HPCML_JOB_ID",
        "global_rank": "RANK",
        "local_rank": "LOCAL_RANK",
    }


class _Running:
    def __init__(self, job: LocalJob, task: int, gpus: list[str], process: subprocess.Popen[bytes]):
        self.job = job
        self.task = task
        self.gpus = gpus
        self.process = process
        self.started = time.monotonic()
        self.signalled = False


class LocalExecutor(core.Executor):
    """Runs the tasks of a submission on this machine.

    Parameters (:meth:`update_parameters`):
        script: the rendered batch script.
        log: where tasks write: task 3 to ``<log>.3.out`` and ``<log>.3.err``.
        slots: how many tasks run at a time.
        gpus: the GPUs to share out.
        gpus_per_task: how many of them each task gets.
        time: seconds a task may run before it must make way; None is no limit.
        lead: seconds between the signal and that end.
        signum: the signal.

    Submitting returns at once. :meth:`poll` starts and reaps tasks; call it until :attr:`idle`.
    """

    job_class = LocalJob

    def __init__(self, folder: Path | str) -> None:
        super().__init__(folder)
        self.stopping = False
        # Tasks whose worker did not end as workers do, and their exit codes.
        self.broken: dict[int, int] = {}
        self._waiting: collections.deque[tuple[LocalJob, int]] = collections.deque()
        self._running: list[_Running] = []
        self._gpus: list[str] = []
        # Tasks hold the read end: it ends when this process does, however it dies.
        self._lifeline, self._lifeline_end = os.pipe()

    @classmethod
    def name(cls) -> str:
        """What submitit calls this executor."""
        return "hpcml_local"

    @classmethod
    def affinity(cls) -> int:
        """0: only used when asked for."""
        return 0

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return {"script", "log", "slots", "gpus", "gpus_per_task", "time", "lead", "signum"}

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        super()._internal_update_parameters(**kwargs)
        self._gpus = list(self.parameters["gpus"])

    def _internal_process_submissions(
        self, delayed_submissions: list[utils.DelayedSubmission]
    ) -> list[core.Job[Any]]:
        jobs: list[core.Job[Any]] = []
        for submission in delayed_submissions:
            _, _, task = submission.args  # of hpcml.worker.task.run_task
            job = LocalJob(self.folder, f"{os.getpid()}_{task}")
            self._waiting.append((job, task))
            jobs.append(job)
        return jobs

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self._running and not self._waiting

    def poll(self) -> None:
        """Reap tasks that ended, warn those whose time ends, start what fits."""
        for running in list(self._running):
            code = running.process.poll()
            if code is not None:
                self._reap(running, code)
            else:
                self._mind_time(running)
        while self._waiting and len(self._running) < self.parameters["slots"]:
            self._start(*self._waiting.popleft())

    def last_words(self, task: int) -> str:
        """The last line that the batch script of ``task`` left on stderr."""
        try:
            with open(f"{self.parameters['log']}.{task}.err", errors="replace") as file:
                lines = file.read()[-4096:].strip().splitlines()
        except OSError:
            return ""
        return lines[-1] if lines else ""

    def stop(self) -> None:
        """Ask every task to save and leave, and start no more."""
        self.stopping = True
        for job, _ in self._waiting:
            job._state = "CANCELLED"
        self._waiting.clear()
        for running in self._running:
            self._signal(running, self.parameters["signum"])

    def kill(self) -> None:
        """End every task at once."""
        self.stop()
        for running in self._running:
            os.killpg(running.process.pid, signal.SIGKILL)

    def _start(self, job: LocalJob, task: int) -> None:
        count = self.parameters["gpus_per_task"]
        gpus, self._gpus = self._gpus[:count], self._gpus[count:]
        environment = {
            **os.environ,
            "HPCML_TASK": str(task),
            "HPCML_LIFELINE": str(self._lifeline),
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        }
        log = f"{self.parameters['log']}.{task}"
        with open(f"{log}.out", "ab") as stdout, open(f"{log}.err", "ab") as stderr:
            process = subprocess.Popen(
                ["bash", self.parameters["script"]],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=environment,
                # Ctrl-C in the terminal is for the command; it decides what the tasks hear.
                start_new_session=True,
                pass_fds=[self._lifeline],
            )
        job._state = "RUNNING"
        self._running.append(_Running(job, task, gpus, process))

    def _reap(self, running: _Running, code: int) -> None:
        self._running.remove(running)
        self._gpus += running.gpus
        if code == AGAIN and not self.stopping:
            running.job._state = "PENDING"
            self._waiting.append((running.job, running.task))
        elif code == AGAIN:
            running.job._state = "CANCELLED"
        else:
            running.job._state = "FAILED" if code else "COMPLETED"
            if code not in (0, 1):
                self.broken[running.task] = code

    def _mind_time(self, running: _Running) -> None:
        limit = self.parameters["time"]
        if limit is None:
            return
        elapsed = time.monotonic() - running.started
        if elapsed > limit - self.parameters["lead"] and not running.signalled:
            running.signalled = True
            self._signal(running, self.parameters["signum"])
        # The worker ends its payload itself when the lead is over; this is for a worker that hangs.
        if elapsed > limit + self.parameters["lead"]:
            os.killpg(running.process.pid, signal.SIGKILL)

    @staticmethod
    def _signal(running: _Running, signum: int) -> None:
        if running.process.poll() is None:
            running.process.send_signal(signum)
