"""The processes of one cell on this node: one per rank, as torch.distributed expects them."""

import errno
import hashlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from typing import Any, NamedTuple, Optional

from hpcml.worker import memory, processes
from hpcml.worker.codes import OUT_OF_MEMORY

# What the batch script tells the worker, and what only a cell of a halving has. A payload that
# starts cells itself must not hand it on.
_NOT_HANDED_ON = frozenset(
    (
        "HPCML_JOB_VERSION",
        "HPCML_LAUNCH",
        "HPCML_MASTER_ADDR",
        "HPCML_NODE_COUNT",
        "HPCML_NODE_RANK",
        "HPCML_RUNG",
        "HPCML_STEPS",
        "HPCML_TASK",
    )
)

# After one rank failed, the others get this long to end by themselves before they are killed.
GRACE_SECONDS = 5.0
# A rank that was asked to stop may wait for another's save.
STOPPING_GRACE_SECONDS = 60.0


class Node(NamedTuple):
    """Where this worker stands among the nodes of its task.

    Attributes:
        rank: position of the node, from 0; the first one leads.
        of: how many nodes there are.
        master_address: the first node, as the others reach it.
    """

    rank: int
    of: int
    master_address: str


class Context(NamedTuple):
    """What all cells of a task have in common.

    Attributes:
        run_dir: the run folder.
        plan: ``plan.json`` with the settings of the submission.
        node: where this worker stands.
        submission, task: numbers of both.
        job: the scheduler's id of the task.
        launch: one word for this start of the task, the same on all of its nodes.
        code: the snapshot's folder, relative to the run folder.
        alone: whether the task's control group has no other cell in it.
        worker: the number of this worker, where several share a cell; None where none do.
        workers: how many the submission has for each cell.
        rung: of a sweep with halving, the rung of the submission, from 1.
    """

    run_dir: str
    plan: "dict[str, Any]"
    node: Node
    submission: int
    task: int
    job: str
    launch: str
    code: str
    alone: bool
    worker: Optional[int] = None
    workers: int = 1
    rung: Optional[int] = None

    @property
    def steps(self) -> Optional[int]:
        """Where the rung ends, in steps from the beginning of the training; None without one."""
        if self.rung is None:
            return None
        steps: int = self.plan["halving"]["steps"][self.rung - 1]
        return steps

    def folder(self, cell_id: str) -> str:
        """Where the attempts at a cell in this task leave their files."""
        cell = os.path.join(self.run_dir, "cells", cell_id)
        return cell if self.worker is None else os.path.join(cell, "workers", str(self.worker))


def this_node() -> Node:
    """The node as the batch script described it; one node without a description."""
    count = int(os.environ.get("HPCML_NODE_COUNT", "1"))
    rank = os.environ.get("HPCML_NODE_RANK") or os.environ.get("SLURM_NODEID") or "0"
    return Node(
        # A run of one node within a job of several may see the job's variables.
        rank=int(rank) if count > 1 else 0,
        of=count,
        master_address=os.environ.get("HPCML_MASTER_ADDR", "127.0.0.1"),
    )


def free_port() -> int:
    """A TCP port that nobody listens on now, proved by binding it."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


class Ranks:
    """The ranks of one attempt at one cell on this node.

    Args:
        context: what the cell shares with the others of its task.
        cell: the line of ``cells.jsonl``.
        gpus: the devices this cell may use, as in ``CUDA_VISIBLE_DEVICES``; None leaves that
            variable as it is.
    """

    def __init__(
        self, context: Context, cell: "dict[str, Any]", gpus: "Optional[list[str]]"
    ) -> None:
        self.context = context
        self.cell = cell
        self.gpus = gpus
        self.dir = context.folder(cell["id"])
        self.metrics_path = os.path.join(self.dir, "metrics.jsonl")
        self.stop_file = os.path.join(self.dir, "stop")
        # Cells of other runs may have the same id.
        digest = hashlib.sha256(os.fsencode(self.dir)).hexdigest()[:8]
        self.scratch_prefix = f"hpcml-{cell['id']}-{digest}-"
        self.number = 0
        self.failure: Optional[int] = None
        self._failed_at = 0.0
        self._failed_rank = 0
        self._killed = False
        self._kills = 0
        self._asked_at: Optional[float] = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._scratch = ""

    def start(self, number: int, port: int, lock: Optional[int]) -> None:
        """Start every rank of this node.

        Args:
            number: of the attempt, from 1.
            port: where rank 0 listens.
            lock: the descriptor that holds the cell, for the ranks to hold it as well.
        """
        self.number = number
        self._kills = memory.kills()
        self._scratch = tempfile.mkdtemp(prefix=self.scratch_prefix)
        environment = self._environment()
        before_exec = processes.die_with_parent()
        for local_rank in range(self._count()):
            rank = self._rank(local_rank)
            with open(self.log("out", rank), "ab") as out, open(self.log("err", rank), "ab") as err:
                try:
                    process = subprocess.Popen(
                        self.arguments(os.environ.get("HPCML_PYTHON", "python3")),
                        cwd=self.directory(),
                        env={**environment, **self._rank_environment(local_rank, port)},
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                        start_new_session=True,
                        pass_fds=[] if lock is None else [lock],
                        preexec_fn=before_exec,  # the worker has no threads
                    )
                except OSError as error:
                    err.write(f"hpcml: cannot start the program: {error}\n".encode())
                    self.fail(127 if error.errno == errno.ENOENT else 126)
                    self.kill()
                    return
            self._processes.append(process)

    def poll(self) -> Optional[int]:
        """None while a rank runs; then 0, or the code of the first one that failed."""
        codes = [process.poll() for process in self._processes]
        for local_rank, code in enumerate(codes):
            # What kill() did to the others is no news.
            if code and not (self._killed and self.failure is not None) and self.fail(code):
                self._failed_rank = local_rank
        if any(code is None for code in codes):
            grace = GRACE_SECONDS if self._asked_at is None else STOPPING_GRACE_SECONDS
            if self.failure is not None and time.monotonic() - self._failed_at > grace:
                self.kill()
            return None
        return self.failure or 0

    def fail(self, code: int) -> bool:
        """One of the cell's ranks, here or elsewhere, ended with ``code``: the others follow.

        Returns:
            Whether this code counts: the first one does, unless a rank died of memory or was
            killed. The others then failed because that one was gone, and may have been seen first.
        """
        telling = (OUT_OF_MEMORY, *memory.KILLED)
        if self.failure is None:
            self._failed_at = time.monotonic()
        elif code not in telling or self.failure in telling:
            return False
        self.failure = code
        return True

    def verdict(self, code: int) -> "tuple[str, str]":
        """The cause of a failure with ``code``, and a sentence for a person."""
        words = self.last_words()
        if code == OUT_OF_MEMORY:
            return "oom", f"out of memory: {words or f'exit code {code}'}"
        if (self.context.alone or code in memory.KILLED) and memory.kills() > self._kills:
            return "oom", "out of memory: the kernel killed it"
        if code in memory.KILLED:
            return "killed", "killed by SIGKILL, often a lack of memory"
        what = f"exit code {code}" if code > 0 else f"ended by {processes.name_of(-code)}"
        return "application", f"{what}: {words}" if words else what

    def ask_to_stop(self, signum: int) -> None:
        """Hand a request to save and leave to every rank."""
        self._asked_at = time.monotonic()
        for process in self._processes:
            if process.poll() is None:
                processes.deliver(process.pid, signum)

    def kill_after(self, seconds: float) -> None:
        """End ranks that were asked to stop and have not after ``seconds``."""
        if self._asked_at is not None and time.monotonic() - self._asked_at > seconds:
            self.kill()

    def kill(self) -> None:
        """End every rank at once."""
        self._killed = True
        for process in self._processes:
            if process.poll() is None:
                processes.kill_group(process.pid)

    def close(self) -> None:
        """Remove what the ranks leave on this node: helpers that outlived them, scratch folders."""
        for process in self._processes:
            processes.kill_group(process.pid)
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def last_words(self) -> str:
        """The last line on stderr of the rank that failed, or of the first one that wrote any."""
        for local_rank in (self._failed_rank, *range(self._count())):
            path = self.log("err", self._rank(local_rank))
            if not os.path.exists(path):
                continue
            with open(path, "rb") as file:
                file.seek(max(0, os.path.getsize(path) - 4096))
                lines = file.read().decode(errors="replace").strip().splitlines()
            if lines:
                return lines[-1].strip()[:300]
        return ""

    def log(self, stream: str, rank: int) -> str:
        """The path of a rank's log; ``stream`` is ``out`` or ``err``."""
        which = f".{rank}" if rank else ""
        return os.path.join(self.dir, f"log.{self.number}{which}.{stream}")

    def _count(self) -> int:
        return int(self.context.plan["resources"]["processes"])

    def _rank(self, local_rank: int) -> int:
        return self.context.node.rank * self._count() + local_rank

    def arguments(self, python: str) -> "list[str]":
        """What is executed; ``python`` runs what is hpcml's own."""
        kind = self.context.plan["kind"]
        if kind == "command":
            return list(self.cell["payload"]["argv"])
        return [python, "-u", "-m", f"hpcml.{kind}"]

    def directory(self) -> str:
        """The folder that it is executed in."""
        plan = self.context.plan
        if plan["kind"] != "command":
            return self.dir
        # os.path.join takes an absolute directory of the recipe as it is.
        code = os.path.join(self.context.run_dir, self.context.code)
        recipe = os.path.join(code, "project", plan["directory"])
        return os.path.join(recipe, self.cell["payload"].get("directory") or "")

    def variables(self) -> "dict[str, str]":
        """What a payload finds in its environment on every node."""
        context = self.context
        found = {
            "HPCML_RUN_DIR": context.run_dir,
            "HPCML_CELL_DIR": self.dir,
            "HPCML_WORKERS": str(context.workers),
            "HPCML_CELL_ID": self.cell["id"],
            "HPCML_CELL_INDEX": str(self.cell["index"]),
            "HPCML_ATTEMPT": str(self.number),
            "HPCML_METRICS": self.metrics_path,
            "HPCML_STOP_FILE": self.stop_file,
            "HPCML_SIGNAL_LEAD": str(context.plan["signal"]["lead"]),
            "HPCML_NODE_MTBF": str(context.plan["node_mtbf"]),
            "HPCML_CHECKPOINTS": os.path.join(self.dir, "checkpoints"),
            "OMP_NUM_THREADS": str(context.plan["resources"]["cpus"]),
        }
        if context.rung is not None:
            found.update(HPCML_RUNG=str(context.rung), HPCML_STEPS=str(context.steps))
        return found

    def _environment(self) -> "dict[str, str]":
        context = self.context
        environment = {k: v for k, v in os.environ.items() if k not in _NOT_HANDED_ON}
        environment.update(
            self.variables(),
            TMPDIR=self._scratch,
            XDG_CACHE_HOME=os.path.join(self._scratch, "cache"),
            TRITON_CACHE_DIR=os.path.join(self._scratch, "triton"),
            TORCHINDUCTOR_CACHE_DIR=os.path.join(self._scratch, "inductor"),
        )
        if self.gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        code = os.path.join(context.run_dir, context.code)
        others = [part for part in environment.get("PYTHONPATH", "").split(":") if part]
        others = [part for part in others if part != code]
        # For a user's command last, so that hpcml can be imported and hides nothing of theirs.
        path = [*others, code] if context.plan["kind"] == "command" else [code, *others]
        environment["PYTHONPATH"] = ":".join(path)
        environment.update(self.cell["payload"].get("env") or {})
        return environment

    def _rank_environment(self, local_rank: int, port: int) -> "dict[str, str]":
        node = self.context.node
        return {
            "RANK": str(self._rank(local_rank)),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(node.of * self._count()),
            "LOCAL_WORLD_SIZE": str(self._count()),
            "NODE_RANK": str(node.rank),
            "MASTER_ADDR": node.master_address,
            "MASTER_PORT": str(port),
        }
