"""One attempt at one cell: its lock, its ranks, how it ended."""

import contextlib
import errno
import fcntl
import glob
import json
import os
import shutil
import signal
import socket
import tempfile
import time
from typing import Any, NamedTuple, Optional

from hpcml.worker import events, processes, reports, stages
from hpcml.worker.ranks import STOPPING_GRACE_SECONDS, Context, Ranks, free_port

AGAIN = 75  # EX_TEMPFAIL: "saved; run me again"


class Busy(Exception):
    """An earlier attempt at the cell is still alive."""


class Outcome(NamedTuple):
    """How an attempt ended; the fields of its ``ended`` event."""

    code: int
    cause: str
    reason: str
    step: Optional[int]
    progress: bool


class Attempt:
    """Runs the payload of a cell once, as the first of its nodes.

    Args:
        context: what the cell shares with the others of its task.
        cell: the line of ``cells.jsonl``.
        gpus: see :class:`Ranks`.
    """

    def __init__(
        self, context: Context, cell: "dict[str, Any]", gpus: "Optional[list[str]]"
    ) -> None:
        self.context = context
        self.cell = cell
        self.ranks = Ranks(context, cell, gpus)
        self.dir = self.ranks.dir
        self.events_path = os.path.join(self.dir, "events.jsonl")
        self.stop_reason: Optional[str] = None
        self._lock: Optional[int] = None
        self._elsewhere: Optional[str] = None
        self._own_end: Optional[float] = None

    # -- claiming -------------------------------------------------------------------------------

    def claim(self) -> "list[dict[str, Any]]":
        """Take the cell for this worker; returns its events so far.

        Raises:
            Busy: an earlier attempt is alive; it says which.
        """
        os.makedirs(os.path.join(self.dir, "checkpoints"), exist_ok=True)
        lock = os.open(self.events_path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # A filesystem without locks (ENOSYS, EOPNOTSUPP): the scheduler's own promise to
            # run a task once is all there is.
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(lock)
                self._end_orphans()
                raise Busy(f"an earlier attempt at cell {self.cell['id']} is still alive") from None
        self._lock = lock
        # Whoever held the lock is gone; what it started and could not end is not part of this.
        self._clear()
        _end_last_line(self.events_path)
        _end_last_line(self.ranks.metrics_path)
        return events.read(self.events_path)

    def release(self) -> None:
        """Let go of the cell."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _end_orphans(self) -> None:
        history = events.read(self.events_path)
        started = [event for event in history if event.get("event") == "started"]
        if not started or started[-1].get("host") != socket.gethostname():
            return
        if not processes.is_worker(started[-1]["pid"], self.context.run_dir):
            self._clear()

    def _clear(self) -> None:
        """End what earlier attempts left running on this machine, and remove their scratch."""
        processes.kill_marked("HPCML_CELL_DIR", self.dir)
        pattern = os.path.join(glob.escape(tempfile.gettempdir()), f"{self.ranks.scratch_prefix}*")
        for folder in glob.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)

    # -- running --------------------------------------------------------------------------------

    def start(self, history: "list[dict[str, Any]]") -> None:
        """Start the ranks of this node. ``history`` is what :meth:`claim` returned."""
        number = 1 + sum(event.get("event") == "started" for event in history)
        self._step_before = events.last_step(self.ranks.metrics_path)
        self._started = time.time()
        self._oom_kills = _oom_kills()
        self._remove_stop_file()
        reports.clear(self.dir)
        missing = self._put_in_results_of_stages()
        events.write_json(os.path.join(self.dir, "cell.json"), self.cell, durable=False)
        context = self.context
        port = free_port()
        events.append(
            self.events_path,
            "started",
            attempt=number,
            host=socket.gethostname(),
            pid=os.getpid(),
            submission=context.submission,
            task=context.task,
            job=context.job,
            launch=context.launch,
            port=port,
            code=context.code,
        )
        if missing is None:
            self.ranks.start(number, port, self._lock)
        else:
            self._elsewhere = missing
            self.ranks.number = number
            self.ranks.fail(1)

    def _put_in_results_of_stages(self) -> Optional[str]:
        """Complete the cell with what earlier stages found; returns what is missing."""
        root = os.path.dirname(os.path.dirname(self.context.run_dir))
        try:
            self.cell.update(stages.resolve(self.cell, root))
        except (stages.NoResult, OSError) as error:
            return str(error)
        return None

    def ask_to_stop(self, reason: str, signum: int) -> None:
        """Hand a request to save and leave to the payload, once."""
        if self.stop_reason is not None:
            return
        self.stop_reason = reason
        events.append(self.events_path, "signal", attempt=self.ranks.number, signal=reason)
        # For payloads that look for the file, in case something swallowed the signal, and for the
        # other nodes.
        with contextlib.suppress(OSError), open(self.ranks.stop_file, "a", encoding="ascii"):
            pass
        self.ranks.ask_to_stop(signum)

    def poll(self) -> Optional[Outcome]:
        """How the attempt ended, or None while it runs."""
        missing = self._hear_other_nodes()
        code = self.ranks.poll()
        if code is None:
            return None
        if missing:
            self._own_end = self._own_end or time.monotonic()
            if time.monotonic() - self._own_end < STOPPING_GRACE_SECONDS:
                return None
            self._elsewhere = f"node {missing[0]} did not say how its ranks ended"
            code = code or -signal.SIGKILL
        return self._outcome(code)

    def finish(self, outcome: Outcome, again: bool) -> None:
        """Record the end, and the result where the cell is done.

        Args:
            outcome: how it ended.
            again: another attempt follows.
        """
        self.ranks.close()
        self._clear()
        if outcome.cause == "done":
            events.write_json(os.path.join(self.dir, "result.json"), self._result(outcome))
        events.append(
            self.events_path, "ended", attempt=self.ranks.number, again=again, **outcome._asdict()
        )
        self._remove_stop_file()

    # -- parts ----------------------------------------------------------------------------------

    def _hear_other_nodes(self) -> "list[int]":
        """Take note of nodes whose ranks failed; returns those that have not reported."""
        missing = []
        for node in range(1, self.context.node.of):
            report = reports.read_report(self.dir, self.context.launch, self.ranks.number, node)
            if report is None:
                missing.append(node)
            elif report["code"] and self.ranks.failure is None:
                self._elsewhere = report["reason"]
                self.ranks.fail(report["code"])
        return missing

    def _remove_stop_file(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.remove(self.ranks.stop_file)

    def _outcome(self, code: int) -> Outcome:
        step = events.last_step(self.ranks.metrics_path)
        progress = self._saved() or (
            step is not None and (self._step_before is None or step > self._step_before)
        )
        if code == 0:
            return Outcome(0, "done", "done", step, progress)
        if self.stop_reason is not None or code == AGAIN:
            asked = f"asked to stop ({self.stop_reason})" if self.stop_reason else "wants to go on"
            return Outcome(code, "stopped", f"{asked}, {self._kept(code, step)}", step, progress)
        if code == -signal.SIGKILL:
            if _oom_kills() > self._oom_kills:
                return Outcome(code, "oom", "killed: out of memory", step, progress)
            reason = self._elsewhere or "killed by SIGKILL, often a lack of memory"
            return Outcome(code, "killed", reason, step, progress)
        reason = self._elsewhere or describe(code, self.ranks.last_words())
        return Outcome(code, "application", reason, step, progress)

    def _kept(self, code: int, step: Optional[int]) -> str:
        """What is known of the state that a stopped attempt left."""
        saved = [
            event["step"]
            for event in events.read(self.events_path)
            if event.get("event") == "checkpoint"
        ]
        if saved:
            return f"saved at step {saved[-1]}"
        at = "" if step is None else f" at step {step}"
        if code == AGAIN:
            return f"saved{at}"
        return f"ended{at} without a word of having saved"

    def _saved(self) -> bool:
        """Whether this attempt left a checkpoint: something new in the cell's folder for them."""
        with os.scandir(os.path.join(self.dir, "checkpoints")) as entries:
            return any(
                not entry.name.startswith(".") and entry.stat().st_mtime >= self._started
                for entry in entries
            )

    def _result(self, outcome: Outcome) -> "dict[str, Any]":
        metrics: dict[str, Any] = {}
        for record in events.read(self.ranks.metrics_path):
            metrics.update(record)
        metrics.pop("step", None)
        return {
            "id": self.cell["id"],
            "index": self.cell["index"],
            "params": self.cell["params"],
            "metrics": metrics,
            "step": outcome.step,
            "attempts": self.ranks.number,
            "code": self.context.code,
            "time": events.now(),
        }


def describe(code: int, words: str) -> str:
    """One sentence for a failure: the code, and what the program said last."""
    what = f"exit code {code}" if code > 0 else f"ended by {processes.name_of(-code)}"
    return f"{what}: {words}" if words else what


def _end_last_line(path: str) -> None:
    """End a line that a crash cut off, so that the next one does not continue it."""
    with open(path, "a+b") as file:
        size = file.tell()
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            file.write(b"\n")


def _oom_kills() -> int:
    """How often the kernel killed for lack of memory in this process's control group (v2)."""
    try:
        with open("/proc/self/cgroup", encoding="ascii") as file:
            group = file.read().split("0::", 1)[1].split("\n", 1)[0]
        with open(f"/sys/fs/cgroup{group}/memory.events", encoding="ascii") as file:
            counts = dict(line.split() for line in file)
        return int(counts["oom_kill"])
    except (OSError, IndexError, KeyError, ValueError):
        return 0


def read_cell(run_dir: str, index: int) -> "dict[str, Any]":
    """The line of cell ``index`` in ``cells.jsonl``, found through ``cells.idx``."""
    with open(os.path.join(run_dir, "cells.idx"), "rb") as file:
        file.seek(8 * index)
        offset = int.from_bytes(file.read(8), "little")
    with open(os.path.join(run_dir, "cells.jsonl"), "rb") as file:
        file.seek(offset)
        cell: dict[str, Any] = json.loads(file.readline())
    return cell
