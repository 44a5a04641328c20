"""A task of the scheduler on one node: the cells packed into it, supervised side by side."""

import json
import os
import select
import signal
import sys
import traceback
from types import FrameType
from typing import Any, Optional

from hpcml.worker import halving, rounds
from hpcml.worker.attempt import read_cell
from hpcml.worker.cell import TICK_SECONDS, Cell, FollowingCell, LeadingCell
from hpcml.worker.chain import NotOver
from hpcml.worker.codes import AGAIN, BROKEN
from hpcml.worker.processes import name_of
from hpcml.worker.ranks import Context, this_node

# Signals of the scheduler that ask for a checkpoint. INT is for people who run a script by hand.
_STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


class Task:
    """Runs the cells of one task to their end.

    Args:
        run_dir: the run folder.
        submission: number of the submission.
        task: number of the task within it, from 0.
    """

    def __init__(self, run_dir: str, submission: int, task: int) -> None:
        with open(os.path.join(run_dir, "plan.json"), encoding="utf-8") as file:
            plan: dict[str, Any] = json.load(file)
        path = os.path.join(run_dir, "submissions", f"{submission:03d}.json")
        with open(path, encoding="utf-8") as file:
            self._record: dict[str, Any] = json.load(file)
        workers = self._record.get("workers", 1)
        self._group, worker = divmod(task, workers)
        # What the site and the recipe said when this submission was made, not when the run began.
        plan.update(self._record["settings"])
        self._context = Context(
            run_dir=run_dir,
            plan=plan,
            node=this_node(),
            submission=submission,
            task=task,
            job=os.environ.get("HPCML_JOB_ID", ""),
            launch=os.environ.get("HPCML_LAUNCH", str(os.getpid())),
            code=self._record["code"],
            # Slurm makes a control group for each job, Kubernetes for each container.
            alone=self._record["pack"] == 1
            and self._record.get("scheduler") in ("slurm", "volcano"),
            worker=self._record["first_worker"] + worker if plan["kind"] == "infer" else None,
            workers=workers,
            rung=self._record.get("rung"),
        )
        self._broken = False
        self._stop_signal: Optional[int] = None
        self._stop_reason: Optional[str] = None
        self._parent = os.getppid()
        self._lifeline = int(os.environ.pop("HPCML_LIFELINE", "-1"))

    def run(self) -> int:
        """Supervise the cells; returns the exit code of the task.

        Returns:
            0 when every cell is done, 75 when at least one wants to run again, 70 after a fault of
            the worker itself, 1 otherwise.
        """
        wakeup, write_end = os.pipe()
        for end in (wakeup, write_end):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for signum in _STOP_SIGNALS:
            signal.signal(signum, self._remember)
        codes: list[int] = []
        try:
            indices = self._indices()
        except NotOver as error:
            print(f"hpcml: {error}", file=sys.stderr)
            return 1
        active = [self._cell(index, slot) for slot, index in enumerate(indices)]
        while True:
            for cell in active:
                self._look_after(cell)
            codes += [cell.code for cell in active if cell.code is not None]
            active = [cell for cell in active if cell.code is None]
            if not active:
                break
            watched = [wakeup] if self._lifeline < 0 else [wakeup, self._lifeline]
            ready, _, _ = select.select(watched, [], [], TICK_SECONDS)
            if wakeup in ready:
                os.read(wakeup, 4096)
            if self._stop_reason is None:
                self._stop_reason = self._why_stop(self._lifeline in ready)
            if self._stop_reason is not None:
                self._lifeline = -1  # it stays readable once the other end is closed
                for cell in active:
                    cell.task_stops()
                    cell.stop(self._stop_reason, self._stop_signal or signal.SIGTERM)
        if self._broken:
            return BROKEN
        if any(code == AGAIN for code in codes):
            return AGAIN
        return int(any(codes))

    def _look_after(self, cell: Cell) -> None:
        try:
            cell.step()
        except OSError:
            raise  # the run folder: no cell can go on
        except Exception:  # noqa: BLE001
            # A fault of the worker itself. It must not cost the other cells of the task.
            traceback.print_exc()
            self._broken = True
            cell.give_up()

    def _cell(self, index: int, slot: int) -> Cell:
        cell = read_cell(self._context.run_dir, index)
        if "parameters" in cell["payload"]:
            # How processes share the work may be another one than when the cells were written.
            cell["payload"]["parameters"].update(self._context.plan.get("layout") or {})
        if self._context.node.rank:
            return FollowingCell(self._context, cell, self._gpus(slot))
        return LeadingCell(self._context, cell, self._gpus(slot), self._record["created"])

    def _indices(self) -> "list[int]":
        """The cells of this task: positions group * pack and following in the submission's list.

        A group is one task, or as many as there are workers for each cell. In a later rung of a
        halving the list has places, and a place without a cell is empty.

        Raises:
            NotOver: the rung or round before must end first.
        """
        pack = self._record["pack"]
        first, end = self._group * pack, (self._group + 1) * pack
        indices: list[int] = []
        position = 0
        for low, high in self._record["cells"]:
            count = high - low + 1
            start, stop = max(first - position, 0), min(end - position, count)
            indices += range(low + start, low + stop)
            position += count
        search = self._context.plan.get("search")
        if search:
            for index in indices:
                rounds.of_cell(self._context.run_dir, search, index)
        rung = self._context.rung
        if rung is None or rung == 1:
            return indices
        chosen = halving.choose(self._context.run_dir, rung, self._record["created"])
        return [chosen[place] for place in indices if place < len(chosen)]

    def _gpus(self, slot: int) -> "Optional[list[str]]":
        """The devices of the cell in ``slot``: its share of what the scheduler gave the task."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        wanted = self._context.plan["resources"]["gpus"]
        if not visible or not wanted or self._record["pack"] == 1:
            return None
        devices = visible.split(",")
        return devices[slot * wanted : (slot + 1) * wanted]

    def _remember(self, signum: int, frame: Optional[FrameType]) -> None:
        self._stop_signal = signum

    def _why_stop(self, lifeline_ended: bool) -> Optional[str]:
        if self._stop_signal is not None:
            return name_of(self._stop_signal)
        if os.getppid() != self._parent:
            return "parent gone"
        if lifeline_ended and not os.read(self._lifeline, 1):
            return "parent gone"
        return None


def run_task(run_dir: str, submission: int, task: int) -> int:
    """Run one task of a submission on this node; returns its exit code."""
    return Task(run_dir, submission, task).run()
