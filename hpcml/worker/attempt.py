"""One attempt at one cell on this node: its lock, its processes, how it ended."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from typing import Any, NamedTuple, Optional

from hpcml.worker import events, processes
from hpcml.worker.ranks import Node, free_port, rank_environment

AGAIN = 75  # EX_TEMPFAIL: "saved; run me again"

# After one rank failed, the others get this long to end by themselves before they are killed.
_RANK_GRACE_SECONDS = 5.0


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
    """Runs the payload of a cell once.

    Args:
        cell: the line of ``cells.jsonl``.
        plan: ``plan.json``.
        run_dir: the run folder.
        node: where this worker stands.
        submission, task, job: who started it, for the record.
        code: the snapshot's folder, relative to the run folder.
        gpus: the devices this attempt may use, as in ``CUDA_VISIBLE_DEVICES``; None leaves that
            variable as it is.
    """

    def __init__(
        self,
        cell: "dict[str, Any]",
        plan: "dict[str, Any]",
        run_dir: str,
        node: Node,
        submission: int,
        task: int,
        job: str,
        code: str,
        gpus: "Optional[list[str]]",
    ) -> None:
        self.cell = cell
        self.plan = plan
        self.run_dir = run_dir
        self.node = node
        self.submission = submission
        self.task = task
        self.job = job
        self.code = code
        self.gpus = gpus
        self.dir = os.path.join(run_dir, "cells", cell["id"])
        self.events_path = os.path.join(self.dir, "events.jsonl")
        self.metrics_path = os.path.join(self.dir, "metrics.jsonl")
        self.stop_file = os.path.join(self.dir, "stop")
        self.number = 0
        self.stop_reason: Optional[str] = None
        self._stop_time = 0.0
        self._lock: Optional[int] = None
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._scratch: Optional[str] = None
        self._failed_at: Optional[float] = None
        self._first_failure: Optional[int] = None

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
        _end_last_line(self.events_path)
        _end_last_line(self.metrics_path)
        return events.read(self.events_path)

    def release(self) -> None:
        """Let go of the cell."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _end_orphans(self) -> None:
        started = [
            event for event in events.read(self.events_path) if event.get("event") == "started"
        ]
        if not started or started[-1].get("host") != socket.gethostname():
            return
        if not processes.is_worker(started[-1]["pid"]):
            processes.kill_orphans(self.dir)

    # -- running --------------------------------------------------------------------------------

    def start(self, history: "list[dict[str, Any]]") -> None:
        """Start the ranks of this node. ``history`` is what :meth:`claim` returned."""
        self.number = 1 + sum(event.get("event") == "started" for event in history)
        self._step_before = events.last_step(self.metrics_path)
        self._started = time.time()
        self._oom_kills = _oom_kills()
        with contextlib.suppress(FileNotFoundError):
            os.remove(self.stop_file)
        events.write_json(os.path.join(self.dir, "cell.json"), self.cell, durable=False)
        events.append(
            self.events_path,
            "started",
            attempt=self.number,
            host=socket.gethostname(),
            pid=os.getpid(),
            submission=self.submission,
            task=self.task,
            job=self.job,
            code=self.code,
        )
        count = self.plan["resources"]["processes"]
        self._scratch = tempfile.mkdtemp(prefix=f"hpcml-{self.cell['id']}-")
        port = int(os.environ.get("HPCML_MASTER_PORT") or free_port())
        before_exec = processes.die_with_parent()
        for local_rank in range(count):
            ranks = rank_environment(self.node, local_rank, count, port)
            rank_number = int(ranks["RANK"])
            with (
                open(self._log("out", rank_number), "ab") as out,
                open(self._log("err", rank_number), "ab") as err,
            ):
                try:
                    rank = subprocess.Popen(
                        self._arguments(),
                        cwd=self._directory(),
                        env={**self._environment(), **ranks},
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                        start_new_session=True,
                        pass_fds=[] if self._lock is None else [self._lock],
                        preexec_fn=before_exec,
                    )
                except OSError as error:
                    err.write(f"hpcml: cannot start the program: {error}\n".encode())
                    self._first_failure = 127 if error.errno == errno.ENOENT else 126
                    self._kill()
                    return
            self._ranks.append(rank)

    def ask_to_stop(self, reason: str, signum: int) -> None:
        """Hand a request to save and leave to the payload, once."""
        if self.stop_reason is not None:
            return
        self.stop_reason = reason
        self._stop_time = time.monotonic()
        events.append(self.events_path, "signal", attempt=self.number, signal=reason)
        # Payloads that look for the file, in case something swallowed the signal.
        with contextlib.suppress(OSError), open(self.stop_file, "a", encoding="ascii"):
            pass
        for rank in self._ranks:
            if rank.poll() is None:
                processes.deliver(rank.pid, signum)

    def kill_after(self, seconds: float) -> None:
        """End a payload that was asked to stop and has not after ``seconds``."""
        if self.stop_reason is not None and time.monotonic() - self._stop_time > seconds:
            self._kill()

    def poll(self) -> Optional[Outcome]:
        """How the attempt ended, or None while it runs."""
        codes = [rank.poll() for rank in self._ranks]
        failures = [code for code in codes if code]
        if failures and self._first_failure is None:
            self._first_failure = failures[0]
            self._failed_at = time.monotonic()
        if any(code is None for code in codes):
            if self._failed_at and time.monotonic() - self._failed_at > self._rank_grace():
                self._kill()
            return None
        return self._outcome(self._first_failure or 0)

    def finish(self, outcome: Outcome) -> None:
        """Record the end, and the result where the cell is done."""
        for rank in self._ranks:
            processes.kill_group(rank.pid)  # helpers that outlived their rank
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        if outcome.cause == "done":
            events.write_json(os.path.join(self.dir, "result.json"), self._result(outcome))
        events.append(self.events_path, "ended", attempt=self.number, **outcome._asdict())
        with contextlib.suppress(FileNotFoundError):
            os.remove(self.stop_file)

    # -- parts ----------------------------------------------------------------------------------

    def _rank_grace(self) -> float:
        # A rank that was asked to stop may wait for the others' save.
        return 60.0 if self.stop_reason is not None else _RANK_GRACE_SECONDS

    def _kill(self) -> None:
        for rank in self._ranks:
            if rank.poll() is None:
                processes.kill_group(rank.pid)

    def _arguments(self) -> "list[str]":
        if self.plan["kind"] == "command":
            return [str(argument) for argument in self.cell["payload"]["argv"]]
        python = os.environ.get("HPCML_PYTHON", "python3")
        return [python, "-u", "-m", f"hpcml.{self.plan['kind']}"]

    def _directory(self) -> str:
        if self.plan["kind"] != "command":
            return self.dir
        # os.path.join takes an absolute directory of the recipe as it is.
        recipe = os.path.join(self.run_dir, self.code, "project", self.plan["directory"])
        return os.path.join(recipe, self.cell["payload"].get("directory") or "")

    def _environment(self) -> "dict[str, str]":
        environment = dict(os.environ)
        resources = self.plan["resources"]
        scratch = str(self._scratch)
        environment.update(
            HPCML_RUN_DIR=self.run_dir,
            HPCML_CELL_DIR=self.dir,
            HPCML_CELL_ID=self.cell["id"],
            HPCML_CELL_INDEX=str(self.cell["index"]),
            HPCML_ATTEMPT=str(self.number),
            HPCML_METRICS=self.metrics_path,
            HPCML_STOP_FILE=self.stop_file,
            HPCML_CHECKPOINTS=os.path.join(self.dir, "checkpoints"),
            OMP_NUM_THREADS=str(resources["cpus"]),
            TMPDIR=scratch,
            XDG_CACHE_HOME=os.path.join(scratch, "cache"),
            TRITON_CACHE_DIR=os.path.join(scratch, "triton"),
            TORCHINDUCTOR_CACHE_DIR=os.path.join(scratch, "inductor"),
        )
        if self.gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        # Last in the path, so that hpcml can be imported and hides nothing of the user's.
        code = os.path.join(self.run_dir, self.code)
        others = [part for part in environment.get("PYTHONPATH", "").split(":") if part]
        others = [part for part in others if part != code]
        if self.plan["kind"] == "command":
            environment["PYTHONPATH"] = ":".join([*others, code])
        else:
            environment["PYTHONPATH"] = ":".join([code, *others])
        environment.update(self.cell["payload"].get("env") or {})
        return environment

    def _log(self, stream: str, rank: int) -> str:
        which = f".{rank}" if rank else ""
        return os.path.join(self.dir, f"log.{self.number}{which}.{stream}")

    def _outcome(self, code: int) -> Outcome:
        step = events.last_step(self.metrics_path)
        progress = self._saved() or (
            step is not None and (self._step_before is None or step > self._step_before)
        )
        if code == 0:
            return Outcome(0, "done", "done", step, progress)
        if self.stop_reason is not None or code == AGAIN:
            asked = f"asked to stop ({self.stop_reason})" if self.stop_reason else "wants to go on"
            kept = f"saved at step {step}" if step is not None else "ended"
            return Outcome(code, "stopped", f"{asked}, {kept}", step, progress)
        if code == -signal.SIGKILL:
            if _oom_kills() > self._oom_kills:
                return Outcome(code, "oom", "killed: out of memory", step, progress)
            return Outcome(
                code, "killed", "killed by SIGKILL, often a lack of memory", step, progress
            )
        what = f"exit code {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"
        last = self._last_words()
        return Outcome(code, "application", f"{what}: {last}" if last else what, step, progress)

    def _last_words(self) -> str:
        """The last line that rank 0 (or whichever rank wrote one) left on stderr."""
        first = self.node.rank * len(self._ranks)
        for rank in range(first, first + max(1, len(self._ranks))):
            path = self._log("err", rank)
            with open(path, "rb") as file:
                file.seek(max(0, os.path.getsize(path) - 4096))
                lines = file.read().decode(errors="replace").strip().splitlines()
            if lines:
                return lines[-1].strip()[:300]
        return ""

    def _saved(self) -> bool:
        """Whether this attempt left a checkpoint: something new in the cell's folder for them."""
        with os.scandir(os.path.join(self.dir, "checkpoints")) as entries:
            return any(
                not entry.name.startswith(".") and entry.stat().st_mtime >= self._started
                for entry in entries
            )

    def _result(self, outcome: Outcome) -> "dict[str, Any]":
        metrics: dict[str, Any] = {}
        for record in events.read(self.metrics_path):
            metrics.update(record)
        metrics.pop("step", None)
        return {
            "id": self.cell["id"],
            "index": self.cell["index"],
            "params": self.cell["params"],
            "metrics": metrics,
            "step": outcome.step,
            "attempts": self.number,
            "code": self.code,
            "time": events.now(),
        }


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
