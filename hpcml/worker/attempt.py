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
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

from hpcml.worker import events, halving, memory, processes, reports, rounds, stages
from hpcml.worker.codes import AGAIN
from hpcml.worker.ranks import STOPPING_GRACE_SECONDS, Context, Ranks, free_port
from hpcml.worker.tensorboard import EventFile, folder_of


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
        # Of workers that share a cell, the one that completes it writes its result.
        self.result_path = halving.result_path(
            context.run_dir, cell["id"], context.plan.get("halving"), context.rung or 1
        )
        self.stop_reason: Optional[str] = None
        self._lock: Optional[int] = None
        self._elsewhere: Optional[tuple[str, str]] = None
        self._own_end: Optional[float] = None
        self._curves: Optional[EventFile] = None

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
        self._remove_stop_file()
        reports.clear(self.dir)
        missing = self._put_in_what_is_known()
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
            stderr=_size(memory.stderr_of(context.run_dir, context.submission, context.job)),
            port=port,
            code=context.code,
            **({} if context.rung is None else {"rung": context.rung}),
        )
        if context.worker is None:
            folder = folder_of(context.run_dir, self.cell, context.plan["swept"])
            with self._harmless():
                self._curves = EventFile(folder, self.ranks.metrics_path, number)
        if missing is None:
            self.ranks.start(number, port, self._lock)
        else:
            self._elsewhere = "application", missing
            self.ranks.number = number
            self.ranks.fail(1)

    def _put_in_what_is_known(self) -> Optional[str]:
        """Complete the cell with what came before it; returns what is missing."""
        root = os.path.dirname(os.path.dirname(self.context.run_dir))
        try:
            for run in self.context.plan.get("needs", ()):
                stages.require(os.path.join(root, run))
            self.cell.update(stages.complete(self.cell, root, self._own()))
        except (stages.NoResult, OSError) as error:
            return str(error)
        return None

    def _own(self) -> "dict[str, Any]":
        """What the run itself decides of the cell: where a rung ends, what a search proposed."""
        search = self.context.plan.get("search")
        if search is None:
            return {"halving.steps": self.context.steps}
        return stages.searched(rounds.of_cell(self.context.run_dir, search, self.cell["index"]))

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
            if not code:
                self._elsewhere = "killed", f"node {missing[0]} did not say how its ranks ended"
                code = -signal.SIGKILL
        return self._outcome(code)

    def draw(self) -> None:
        """Give TensorBoard what the payload has reported since."""
        with self._harmless():
            if self._curves is not None:
                self._curves.follow()

    def finish(self, outcome: Outcome, again: bool) -> None:
        """Record the end, and the result where the cell is done.

        Args:
            outcome: how it ended.
            again: another attempt follows.
        """
        self.ranks.close()
        self._clear()
        if outcome.cause in ("done", "rung") and self.context.worker is None:
            os.makedirs(os.path.dirname(self.result_path), exist_ok=True)
            events.write_json(self.result_path, self._result(outcome))
        self.record(self.ranks.number, outcome, again)
        with self._harmless():
            if self._curves is not None:
                self._curves.close()
        self._remove_stop_file()

    def record(self, number: int, outcome: Outcome, again: bool) -> None:
        """Write down how attempt ``number`` ended."""
        events.append(self.events_path, "ended", attempt=number, again=again, **outcome._asdict())

    def killed_with_its_job(self, history: "list[dict[str, Any]]") -> Optional[Outcome]:
        """How the last attempt in ``history`` ended, if Slurm killed its whole job for its memory.

        Then nobody was left to write it down.
        """
        attempts = [event for event in history if event.get("event") in ("started", "ended")]
        if not attempts or attempts[-1]["event"] == "ended":
            return None
        last = attempts[-1]
        path = memory.stderr_of(self.context.run_dir, last["submission"], last["job"])
        said = memory.slurm_said(path, last.get("stderr", 0))
        if said is None:
            return None
        step = events.last_step(self.ranks.metrics_path)
        return Outcome(-signal.SIGKILL, "oom", f"out of memory: {said}", step, False)

    # -- parts ----------------------------------------------------------------------------------

    def _hear_other_nodes(self) -> "list[int]":
        """Take note of nodes whose ranks failed; returns those that have not reported."""
        missing = []
        for node in range(1, self.context.node.of):
            report = reports.read_report(self.dir, self.context.launch, self.ranks.number, node)
            if report is None:
                missing.append(node)
            elif report["code"] and self.ranks.fail(report["code"]):
                self._elsewhere = report["cause"], report["reason"]
        return missing

    @contextlib.contextmanager
    def _harmless(self) -> "Iterator[None]":
        """That there is no place for curves is no reason to end a training."""
        try:
            yield
        except OSError as error:
            self._curves = None
            print(f"hpcml: no more files for TensorBoard: {error}", file=sys.stderr)

    def _remove_stop_file(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.remove(self.ranks.stop_file)

    def _outcome(self, code: int) -> Outcome:
        step = events.last_step(self.ranks.metrics_path)
        progress = self._saved() or (
            step is not None and (self._step_before is None or step > self._step_before)
        )
        if code == 0:
            if os.path.basename(self.result_path) != "result.json":
                return Outcome(0, "rung", f"rung {self.context.rung} is done", step, progress)
            return Outcome(0, "done", "done", step, progress)
        cause, reason = self._elsewhere or self.ranks.verdict(code)
        # Also when it was asked to stop: it may have needed memory to save.
        if code == AGAIN or (self.stop_reason is not None and cause != "oom"):
            asked = f"asked to stop ({self.stop_reason})" if self.stop_reason else "wants to go on"
            return Outcome(code, "stopped", f"{asked}, {self._kept(code, step)}", step, progress)
        return Outcome(code, cause, reason, step, progress)

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


def _end_last_line(path: str) -> None:
    """End a line that a crash cut off, so that the next one does not continue it."""
    with open(path, "a+b") as file:
        size = file.tell()
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            file.write(b"\n")


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
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
