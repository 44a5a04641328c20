"""A cell within a task: attempt after attempt, until the task is finished with it."""

import json
import os
import signal
import sys
import time
from typing import Any, Optional, Union

from hpcml.worker import events, policy, reports
from hpcml.worker.attempt import Attempt, Busy, Outcome
from hpcml.worker.codes import AGAIN
from hpcml.worker.ranks import Context, Ranks

# How often things that send no signal are looked at: the stop file, the parent, an old attempt.
TICK_SECONDS = 0.5

# How often the files for TensorBoard grow.
_CURVES_SECONDS = 5.0

# How long an earlier attempt may take to leave a cell before this task gives up on it.
_BUSY_SECONDS = 300.0


class LeadingCell:
    """A cell on the first node of its task: here its attempts are made, counted and judged.

    ``code`` is None until the cell needs this task no more: 0 done, 75 run again, 1 failed.

    Args:
        context: what the cells of the task share.
        cell: the line of ``cells.jsonl``.
        gpus: see :class:`Ranks`.
        created: when the submission was made; what was cancelled later does not start.
    """

    def __init__(
        self,
        context: Context,
        cell: "dict[str, Any]",
        gpus: "Optional[list[str]]",
        created: str,
    ) -> None:
        self.code: Optional[int] = None
        self._context = context
        self._cell = cell
        self._gpus = gpus
        self._created = created
        self._attempt: Optional[Attempt] = None
        self._history: list[dict[str, Any]] = []
        self._stopping = False
        self._busy_since: Optional[float] = None
        self._next_look = 0.0
        self._next_curves = 0.0

    def step(self) -> None:
        """Look after the cell: called when something happened, and at least every tick."""
        if self._attempt is None:
            self._begin()
            return
        outcome = self._attempt.poll()
        if outcome is not None:
            self._end(self._attempt, outcome)
        elif time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + TICK_SECONDS
            if os.path.exists(self._attempt.ranks.stop_file):
                self.stop("stop file", signal.SIGUSR1)
            self._attempt.ranks.kill_after(self._context.plan["signal"]["lead"])
            if time.monotonic() >= self._next_curves:
                self._next_curves = time.monotonic() + _CURVES_SECONDS
                self._attempt.draw()

    def stop(self, reason: str, signum: int) -> None:
        """Ask the payload to save and leave."""
        if self._attempt is not None:
            self._attempt.ask_to_stop(reason, signum)
        else:
            self._leave(AGAIN)  # never started: nothing to save

    def give_up(self) -> None:
        """Leave the cell after a fault of the worker itself; nothing of it goes on."""
        if self._attempt is not None:
            self._attempt.ranks.kill()
            self._attempt.ranks.close()
            self._attempt.release()
        self._leave(1)

    def task_stops(self) -> None:
        """The task was asked to end: no further attempt is made in it."""
        self._stopping = True

    def _begin(self) -> None:
        """Claim the cell and start an attempt, unless it is done, cancelled, or still claimed."""
        attempt = Attempt(self._context, self._cell, self._gpus)
        try:
            self._history = attempt.claim()
        except Busy as error:
            self._busy_since = self._busy_since or time.monotonic()
            if time.monotonic() - self._busy_since > _BUSY_SECONDS:
                print(f"hpcml: {error}; giving up on it for now", file=sys.stderr)
                self._leave(1)
            return
        self._busy_since = None
        done = os.path.exists(attempt.result_path)
        if not done:
            self._record_death(attempt)
        finished = policy.finished(
            self._history, self._context.submission, self._context.plan["retry"]
        )
        if done or finished or self._cancelled(self._history):
            attempt.release()
            # A worker has done its part before the cell is done.
            self._leave(0 if done or (finished and self._history[-1].get("code") == 0) else 1)
            return
        attempt.start(self._history)
        self._attempt = attempt
        # Whoever cancelled it in this moment could not see that it runs.
        if self._cancelled(events.read(attempt.events_path)):
            self.stop("cancelled", signal.SIGUSR1)

    def _record_death(self, attempt: Attempt) -> None:
        """Write down the end of an attempt that could not do so itself, as far as it is known."""
        outcome = attempt.killed_with_its_job(self._history)
        if outcome is not None:
            number = sum(event.get("event") == "started" for event in self._history)
            attempt.record(number, outcome, self._decide(outcome).again)
            self._history = events.read(attempt.events_path)

    def _decide(self, outcome: Outcome) -> policy.Decision:
        return policy.decide(
            outcome.cause,
            outcome.progress,
            policy.of_submission(self._history, self._context.submission),
            self._context.plan["retry"],
        )

    def _end(self, attempt: Attempt, outcome: Outcome) -> None:
        decision = self._decide(outcome)
        if decision.cause is not None:
            outcome = outcome._replace(cause=decision.cause, reason=str(decision.reason))
        attempt.finish(outcome, decision.again)
        self._attempt = None
        cancelled = self._cancelled(events.read(attempt.events_path))
        attempt.release()
        if outcome.cause in ("done", "rung"):
            self._leave(0)
        elif not decision.again or cancelled:
            self._leave(1)
        elif outcome.cause == "stopped" or self._stopping:
            # The allocation ends, or was asked to: the scheduler gives the next one.
            self._leave(AGAIN)
        # Otherwise the cell's budget allows another attempt in this task: the next step starts it.

    def _leave(self, code: int) -> None:
        if self._context.node.of > 1:
            cell_dir = self._context.folder(self._cell["id"])
            reports.dismiss(cell_dir, self._context.launch, code)
        self.code = code

    def _cancelled(self, history: "list[dict[str, Any]]") -> bool:
        """Whether somebody cancelled the cell after this submission was made."""
        if self._context.worker is not None:
            cell_dir = os.path.join(self._context.run_dir, "cells", self._cell["id"])
            history = history + events.read(os.path.join(cell_dir, "events.jsonl"))
        return any(
            event.get("event") == "cancelled" and event["time"] > self._created for event in history
        )


class FollowingCell:
    """A cell on a further node of its task: its ranks start and end as the first node says.

    ``code`` is None until the first node is finished with the cell, then 0: what became of the
    cell is for the first node to say.
    """

    def __init__(
        self, context: Context, cell: "dict[str, Any]", gpus: "Optional[list[str]]"
    ) -> None:
        self.code: Optional[int] = None
        self._context = context
        self._gpus = gpus
        self._dir = context.folder(cell["id"])
        self._ranks: Optional[Ranks] = None
        self._last = 0
        self._signum: Optional[int] = None
        self._next_look = 0.0

    def step(self) -> None:
        """Look after the cell: called when something happened, and at least every tick."""
        ranks = self._ranks
        if ranks is not None:
            code = ranks.poll()
            if code is not None:
                self._end(ranks, code)
                return
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + TICK_SECONDS
        ended = reports.dismissed(self._dir, self._context.launch) is not None
        if ranks is None:
            if ended:
                self.code = 0
            else:
                self._follow()
            return
        if self._signum is None and os.path.exists(ranks.stop_file):
            self.stop("stop file", signal.SIGUSR1)
        ranks.kill_after(self._context.plan["signal"]["lead"])
        if ended or self._attempts("ended")[-1:] == [ranks.number]:
            ranks.kill()

    def stop(self, reason: str, signum: int) -> None:
        """Ask the ranks of this node to save and leave."""
        if self._signum is None:
            self._signum = signum
            if self._ranks is not None:
                self._ranks.ask_to_stop(signum)

    def give_up(self) -> None:
        """Leave the cell after a fault of the worker itself; nothing of it goes on."""
        if self._ranks is not None:
            self._ranks.kill()
            self._end(self._ranks, 1)
        self.code = 1

    def task_stops(self) -> None:
        """The first node decides what that means."""

    def _follow(self) -> None:
        """Start the ranks of this node once the first node has started an attempt."""
        for event in reversed(events.read(os.path.join(self._dir, "events.jsonl"))):
            if event.get("event") == "started":
                if event.get("launch") == self._context.launch and event["attempt"] > self._last:
                    # As the first node completed it, with the results of earlier stages.
                    with open(os.path.join(self._dir, "cell.json"), encoding="utf-8") as file:
                        cell = json.load(file)
                    self._ranks = Ranks(self._context, cell, self._gpus)
                    self._ranks.start(event["attempt"], event["port"], None)
                return

    def _end(self, ranks: Ranks, code: int) -> None:
        ranks.close()
        cause, words = ranks.verdict(code) if code else ("done", "")
        reason = f"node {self._context.node.rank}: {words}"
        reports.leave_report(
            self._dir,
            self._context.launch,
            ranks.number,
            self._context.node.rank,
            {"code": code, "cause": cause, "reason": reason},
        )
        self._last = ranks.number
        self._ranks = None

    def _attempts(self, kind: str) -> "list[int]":
        history = events.read(os.path.join(self._dir, "events.jsonl"))
        return [event["attempt"] for event in history if event.get("event") == kind]


Cell = Union[LeadingCell, FollowingCell]
