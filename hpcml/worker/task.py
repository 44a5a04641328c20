"""A task of the scheduler on one node: the cells packed into it, supervised side by side."""

import json
import os
import select
import signal
import sys
import time
from types import FrameType
from typing import Any, Optional

from hpcml.worker import events, policy
from hpcml.worker.attempt import AGAIN, Attempt, Busy, Outcome, read_cell
from hpcml.worker.ranks import this_node

# Signals of the scheduler that ask for a checkpoint. INT is for people who run a script by hand.
_STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)

# How often things that send no signal are looked at: the stop file, the parent, an old attempt.
_TICK_SECONDS = 0.5

# How long an earlier attempt may take to leave a cell before this task gives up on it.
_BUSY_SECONDS = 300.0


class Task:
    """Runs the cells of one task to their end.

    Args:
        run_dir: the run folder.
        submission: number of the submission.
        task: number of the task within it, from 0.
    """

    def __init__(self, run_dir: str, submission: int, task: int) -> None:
        self.run_dir = run_dir
        self.number = task
        self.submission = submission
        with open(os.path.join(run_dir, "plan.json"), encoding="utf-8") as file:
            self.plan: dict[str, Any] = json.load(file)
        path = os.path.join(run_dir, "submissions", f"{submission:03d}.json")
        with open(path, encoding="utf-8") as file:
            self.record: dict[str, Any] = json.load(file)
        self.node = this_node()
        # What the site and the recipe said when this submission was made, not when the run began.
        self.plan.update(self.record["settings"])
        self.stop_signal: Optional[int] = None
        self.stop_reason: Optional[str] = None
        self.parent = os.getppid()
        self.lifeline = int(os.environ.pop("HPCML_LIFELINE", "-1"))

    def run(self) -> int:
        """Supervise the cells; returns the exit code of the task.

        Returns:
            0 when every cell is done, 75 when at least one wants to run again, 1 otherwise.
        """
        wakeup, write_end = os.pipe()
        for end in (wakeup, write_end):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for signum in _STOP_SIGNALS:
            signal.signal(signum, self._remember)
        codes: list[int] = []
        cells = [_Cell(self, index, slot) for slot, index in enumerate(self._indices())]
        for cell in cells:
            cell.begin()
        active = cells
        while True:
            for cell in active:
                cell.step()
            codes += [cell.code for cell in active if cell.code is not None]
            active = [cell for cell in active if cell.code is None]
            if not active:
                break
            watched = [wakeup] if self.lifeline < 0 else [wakeup, self.lifeline]
            ready, _, _ = select.select(watched, [], [], _TICK_SECONDS)
            if wakeup in ready:
                os.read(wakeup, 4096)
            if self.stop_reason is None:
                self.stop_reason = self._why_stop(self.lifeline in ready)
            if self.stop_reason is not None:
                self.lifeline = -1  # it stays readable once the other end is closed
                for cell in active:
                    cell.stop(self.stop_reason, self.stop_signal or signal.SIGTERM)
        if any(code == AGAIN for code in codes):
            return AGAIN
        return int(any(codes))

    def _indices(self) -> "list[int]":
        """The cells of this task: positions task * pack and following in the submission's list."""
        pack = self.record["pack"]
        first, end = self.number * pack, (self.number + 1) * pack
        indices: list[int] = []
        position = 0
        for low, high in self.record["cells"]:
            count = high - low + 1
            start, stop = max(first - position, 0), min(end - position, count)
            indices += range(low + start, low + stop)
            position += count
        return indices

    def gpus(self, slot: int) -> "Optional[list[str]]":
        """The devices of the cell in ``slot``: its share of what the scheduler gave the task."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        wanted = self.plan["resources"]["gpus"]
        if not visible or not wanted or self.record["pack"] == 1:
            return None
        devices = visible.split(",")
        return devices[slot * wanted : (slot + 1) * wanted]

    def _remember(self, signum: int, frame: Optional[FrameType]) -> None:
        self.stop_signal = signum

    def _why_stop(self, lifeline_ended: bool) -> Optional[str]:
        if self.stop_signal is not None:
            return signal.Signals(self.stop_signal).name[3:]
        if os.getppid() != self.parent:
            return "parent gone"
        if lifeline_ended and not os.read(self.lifeline, 1):
            return "parent gone"
        return None


def run_task(run_dir: str, submission: int, task: int) -> int:
    """Run one task of a submission on this node; returns its exit code."""
    return Task(run_dir, submission, task).run()


class _Cell:
    """The attempts at one cell within this task.

    ``code`` is None until the cell needs this task no more: 0 done, 75 run again, 1 failed.
    """

    def __init__(self, task: Task, index: int, slot: int) -> None:
        self.task = task
        self.cell = read_cell(task.run_dir, index)
        self.slot = slot
        self.code: Optional[int] = None
        self._attempt: Optional[Attempt] = None
        self._waiting_since = time.monotonic()
        self._history: list[dict[str, Any]] = []
        self._next_look = 0.0

    def begin(self) -> None:
        """Claim the cell and start an attempt, unless it is done, cancelled, or still claimed."""
        task = self.task
        attempt = Attempt(
            self.cell,
            task.plan,
            task.run_dir,
            task.node,
            task.submission,
            task.number,
            os.environ.get("HPCML_JOB_ID", ""),
            task.record["code"],
            task.gpus(self.slot),
        )
        try:
            self._history = attempt.claim()
        except Busy as error:
            if time.monotonic() - self._waiting_since > _BUSY_SECONDS:
                print(f"hpcml: {error}; giving up on it for now", file=sys.stderr)
                self.code = 1
            return
        if os.path.exists(os.path.join(attempt.dir, "result.json")):
            attempt.release()
            self.code = 0
            return
        if _cancelled(self._history, task.record["created"]):
            attempt.release()
            self.code = 1
            return
        attempt.start(self._history)
        self._attempt = attempt

    def step(self) -> None:
        """Look after the cell: called when something happened, and at least every tick."""
        if self.code is not None:
            return
        if self._attempt is None:
            self.begin()
            return
        outcome = self._attempt.poll()
        if outcome is not None:
            self._end(outcome)
            return
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _TICK_SECONDS
            if os.path.exists(self._attempt.stop_file):
                self.stop("stop file", signal.SIGUSR1)
            self._attempt.kill_after(self.task.plan["signal"]["lead"])

    def stop(self, reason: str, signum: int) -> None:
        """Ask the payload to save and leave."""
        if self._attempt is None:
            self.code = AGAIN  # never started: nothing to save
        else:
            self._attempt.ask_to_stop(reason, signum)

    def _end(self, outcome: Outcome) -> None:
        assert self._attempt is not None
        attempt = self._attempt
        decision = policy.decide(
            outcome.cause,
            outcome.progress,
            policy.of_submission(self._history, self.task.submission),
            self.task.plan["retry"],
        )
        if decision.cause is not None:
            outcome = outcome._replace(cause=decision.cause, reason=str(decision.reason))
        attempt.finish(outcome)
        self._attempt = None
        cancelled = _cancelled(events.read(attempt.events_path), self.task.record["created"])
        attempt.release()
        if outcome.cause == "done":
            self.code = 0
        elif not decision.again or cancelled:
            self.code = 1
        elif outcome.cause == "stopped" or self.task.stop_reason is not None:
            # The allocation ends, or was asked to: the scheduler gives the next one.
            self.code = AGAIN
        # Otherwise the cell's budget allows another attempt in this task: the next step starts it.


def _cancelled(history: "list[dict[str, Any]]", created: str) -> bool:
    """Whether somebody cancelled the cell after this submission was made."""
    return any(event.get("event") == "cancelled" and event["time"] > created for event in history)
