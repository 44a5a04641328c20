"""The local scheduler: as many tasks at a time as this machine has cores and GPUs for.

It lives in the process of the command; there is no daemon.
"""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from hpcml.launch.executor import TaskJob
from hpcml.worker.codes import AGAIN
from hpcml.worker.processes import kill_marked


class _Running:
    def __init__(self, job: TaskJob, task: int, gpus: list[str], process: subprocess.Popen[bytes]):
        self.job = job
        self.task = task
        self.gpus = gpus
        self.process = process
        self.started = time.monotonic()
        self.signalled = False


class LocalScheduler:
    """Runs the tasks of a submission on this machine.

    Submitting returns at once. :meth:`poll` starts and reaps tasks; call it until :attr:`idle`.

    Args:
        run_dir: the run folder.
        script: the rendered batch script.
        log: where tasks write: task 3 to ``<log>.3.out`` and ``<log>.3.err``.
        slots: how many tasks run at a time.
        gpus: the GPUs to share out.
        gpus_per_task: how many of them each task gets.
        time: seconds a task may run before it must make way; None is no limit.
        lead: seconds between the signal and that end.
        signum: the signal.
    """

    def __init__(
        self,
        run_dir: Path,
        script: Path,
        log: Path,
        slots: int,
        gpus: Sequence[str],
        gpus_per_task: int,
        time: int | None,
        lead: int,
        signum: int,
    ) -> None:
        self.stopping = False
        # Tasks whose worker did not end as workers do, and their exit codes.
        self.broken: dict[int, int] = {}
        self._run_dir = run_dir
        self._script = script
        self._log = log
        self._slots = slots
        self._gpus = list(gpus)
        self._gpus_per_task = gpus_per_task
        self._time = time
        self._lead = lead
        self._signum = signum
        self._waiting: collections.deque[tuple[TaskJob, int]] = collections.deque()
        self._running: list[_Running] = []
        # Tasks hold the read end: it ends when this process does, however it dies.
        self._lifeline, self._lifeline_end = os.pipe()

    def submit(self, folder: Path, tasks: Sequence[int]) -> list[TaskJob]:
        """Queue tasks."""
        jobs = [TaskJob(folder, f"{os.getpid()}_{task}") for task in tasks]
        self._waiting.extend(zip(jobs, tasks, strict=True))
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
        while self._waiting and len(self._running) < self._slots:
            self._start(*self._waiting.popleft())

    def last_words(self, task: int) -> str:
        """The last line that the batch script of ``task`` left on stderr."""
        try:
            with open(f"{self._log}.{task}.err", errors="replace") as file:
                lines = file.read()[-4096:].strip().splitlines()
        except OSError:
            return ""
        return lines[-1] if lines else ""

    def stop(self) -> None:
        """Ask every task to save and leave, and start no more."""
        self.stopping = True
        for job, _ in self._waiting:
            job.state = "CANCELLED"
        self._waiting.clear()
        for running in self._running:
            self._signal(running, self._signum)

    def kill(self) -> None:
        """End every task at once."""
        self.stop()
        for running in self._running:
            os.killpg(running.process.pid, signal.SIGKILL)
            running.process.wait()
        kill_marked("HPCML_RUN_DIR", str(self._run_dir))

    def _start(self, job: TaskJob, task: int) -> None:
        count = self._gpus_per_task
        gpus, self._gpus = self._gpus[:count], self._gpus[count:]
        environment = {
            **os.environ,
            "HPCML_TASK": str(task),
            "HPCML_LIFELINE": str(self._lifeline),
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        }
        log = f"{self._log}.{task}"
        with open(f"{log}.out", "ab") as stdout, open(f"{log}.err", "ab") as stderr:
            process = subprocess.Popen(
                ["bash", str(self._script)],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=environment,
                # Ctrl-C in the terminal is for the command; it decides what the tasks hear.
                start_new_session=True,
                pass_fds=[self._lifeline],
            )
        job.state = "RUNNING"
        self._running.append(_Running(job, task, gpus, process))

    def _reap(self, running: _Running, code: int) -> None:
        self._running.remove(running)
        self._gpus += running.gpus
        if code == AGAIN and not self.stopping:
            running.job.state = "PENDING"
            self._waiting.append((running.job, running.task))
        elif code == AGAIN:
            running.job.state = "CANCELLED"
        else:
            running.job.state = "FAILED" if code else "COMPLETED"
            if code not in (0, 1):  # which are what the events of the cells tell
                self.broken[running.task] = code

    def _mind_time(self, running: _Running) -> None:
        limit = self._time
        if limit is None:
            return
        elapsed = time.monotonic() - running.started
        if elapsed > limit - self._lead and not running.signalled:
            running.signalled = True
            self._signal(running, self._signum)
        # The worker ends its payload itself when the lead is over; this is for a worker that hangs.
        if elapsed > limit + self._lead:
            os.killpg(running.process.pid, signal.SIGKILL)

    @staticmethod
    def _signal(running: _Running, signum: int) -> None:
        if running.process.poll() is None:
            running.process.send_signal(signum)
