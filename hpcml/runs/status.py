"""The states of a run's cells, derived from the events and metrics that the cells left."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpcml.files import plain_errors
from hpcml.runs.events import JsonLines, last_values, numbers, parse_time
from hpcml.runs.folder import RunFolder, workers
from hpcml.runs.liveness import Alive, is_alive
from hpcml.worker.codes import AGAIN
from hpcml.worker.memory import slurm_said, stderr_of
from hpcml.worker.rounds import round_of

#: All states, in the order in which summaries name them.
STATES = ("running", "pending", "stopped", "lost", "failed", "dropped", "done")

#: Metrics that describe the progress and not the result.
PROGRESS_METRICS = frozenset(
    {
        *("step", "total_steps", "tokens_per_second", "rows_per_second"),
        *("begun_at", "reported_at"),  # of an inference, in seconds since the epoch
    }
)

_STATE_OF_CAUSE = {
    "done": "done",
    "rung": "pending",
    "stopped": "stopped",
    "application": "failed",
    "oom": "failed",
    "killed": "failed",
    "no_progress": "failed",
    "lost": "lost",
}


@dataclass(frozen=True, slots=True)
class CellState:
    """What is known about one cell.

    Attributes:
        state: one of :data:`STATES`.
        attempts: how many attempts were started.
        metrics: the last value of each metric, without the progress ones.
        checkpoint_step: the step of the newest checkpoint.
        reason: one sentence for a person, where there is something to say.
        stuck: it is pending until somebody does what the reason says.
        out_of_memory: Slurm killed its job for its memory, before anybody could write that down.
        cancelled: somebody cancelled it, and it was not started again since.
        cancelled_time: when, in seconds since the epoch.
        rung: of a sweep with halving, the rung that it began last, from 1.
        eta_seconds: the time left of a running cell, from its speed in this attempt.
        started, ended: seconds since the epoch; the first attempt's start, the last one's end.
        begun: when the last attempt began.
        before: how the attempt before it ended, in one sentence, unless it was through with a rung.
        worked_seconds: how long all attempts ran together, those of all workers.
    """

    id: str
    index: int
    state: str
    params: dict[str, Any] = field(default_factory=dict)
    attempts: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    step: int | None = None
    total_steps: int | None = None
    tokens_per_second: float | None = None
    eta_seconds: float | None = None
    reason: str | None = None
    stuck: bool = False
    out_of_memory: bool = False
    cancelled: bool = False
    checkpoint_step: int | None = None
    rung: int | None = None
    started: float | None = None
    ended: float | None = None
    begun: float | None = None
    before: str | None = None
    worked_seconds: float = 0.0
    cancelled_time: float | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """The states of a run at one moment.

    Attributes:
        total: the number of cells.
        cells: the cells that were started or cancelled, by index. All others are pending.
    """

    total: int
    cells: dict[int, CellState]

    def counts(self) -> dict[str, int]:
        """The number of cells in each state, without the states that no cell is in."""
        counted = Counter(cell.state for cell in self.cells.values())
        counted["pending"] += self.total - len(self.cells)
        return {state: counted[state] for state in STATES if counted[state]}

    def in_state(self, *states: str) -> list[CellState]:
        """The known cells in these states, by index."""
        return [cell for cell in self.cells.values() if cell.state in states]

    @property
    def complete(self) -> bool:
        """Whether every cell is done, or was dropped by the halving of the sweep."""
        return set(self.counts()) <= {"done", "dropped"}

    @property
    def eta_seconds(self) -> float | None:
        """The time left of the whole run, if as many cells keep running as do now."""
        running = self.in_state("running")
        left = [cell.eta_seconds for cell in running if cell.eta_seconds is not None]
        waiting = self.total - sum(
            cell.state in ("running", "done", "failed", "dropped") for cell in self.cells.values()
        )
        if not running or (len(left) < len(running) and not waiting):
            return None
        took = [
            cell.ended - cell.started
            for cell in self.in_state("done")
            if cell.ended is not None and cell.started is not None
        ]
        if not waiting:
            return max(left)
        if not took:
            took = [_expected(cell) for cell in running if cell.eta_seconds is not None]
        if not took:
            return None
        mean = sum(took) / len(took)
        return (sum(left) + mean * (len(running) - len(left) + waiting)) / len(running)


def collect(run: RunFolder, alive: Alive | None = None) -> Status:
    """The states of a run's cells now. To look repeatedly, keep a :class:`Watcher`."""
    return Watcher(run, alive).refresh()


def with_pending(run: RunFolder, status: Status) -> Iterator[CellState]:
    """All cells of a run by index, also those that left nothing yet."""
    proposed = len(run.proposals())
    for cell in run.cells():
        known = status.cells.get(cell["index"])
        reason = waits_for_round(run, cell["index"], proposed)
        yield known or CellState(
            cell["id"], cell["index"], "pending", cell["params"], reason=reason
        )


class Watcher:
    """Looks at a run again and again, and each time reads only what is new.

    Args:
        run: the run.
        alive: asked about attempts on other machines; without it they count as running.
        only: the id of the one cell to look at; all others then count as pending.
    """

    def __init__(self, run: RunFolder, alive: Alive | None = None, only: str | None = None) -> None:
        self._run = run
        self._alive = alive
        self._only = only
        self._cells: dict[str, _Watched | _Shared] = {}
        self._proposed = 0

    def refresh(self) -> Status:
        """The states now."""
        proposed = len(self._run.proposals())
        if proposed != self._proposed:
            self._proposed, self._cells = proposed, {}  # their parameters may be other ones
        with plain_errors(f"read {self._run.cells_dir}"):
            found = [name for name in self._folders() if name in self._run.ids]
            new = sorted((self._run.ids[name], name) for name in found if name not in self._cells)
            cells = self._run.read_cells(index for index, _ in new)
            for (_, name), cell in zip(new, cells, strict=True):
                watched = _Shared if self._run.plan.get("kind") == "infer" else _Watched
                self._cells[name] = watched(self._run.cell_dir(name), cell)
            moment = time.time()
            states = [cell.refresh(moment, self._alive) for cell in self._cells.values()]
            choices = self._run.choices()
            states = [_in_rung(state, choices) for state in states]
        states.sort(key=lambda state: state.index)
        return Status(len(self._run), {state.index: state for state in states})

    def _folders(self) -> list[str]:
        if self._only is None:
            return os.listdir(self._run.cells_dir)
        return [self._only] if self._run.cell_dir(self._only).exists() else []


def waits_for_round(run: RunFolder, index: int, proposed: int) -> str | None:
    """What is said of a cell of a search whose parameters are not known yet.

    Args:
        run: the run.
        index: the cell.
        proposed: how many rounds are.
    """
    search = run.plan.get("search")
    if search is None or (number := round_of(search, index)) <= proposed:
        return None
    return f"to be proposed in round {number}"


def waits_for_rung(cell: CellState) -> str | None:
    """What is said of a cell that is through with its rung and may have a next one."""
    if cell.rung is None:
        return None
    return f"rung {cell.rung} is done, waits for rung {cell.rung + 1}"


def _in_rung(cell: CellState, choices: dict[int, list[int]]) -> CellState:
    """A cell as the halving of its sweep sees it.

    Args:
        cell: the cell by its own files.
        choices: the cells that a rung after the first has, as far as that is decided.
    """
    if cell.rung is None or cell.state != "pending" or cell.reason is not None:
        return cell
    following = choices.get(cell.rung + 1)
    if following is None or cell.index in following:
        if cell.cancelled:
            return replace(cell, state="stopped", reason="cancelled")
        return replace(cell, reason=waits_for_rung(cell))
    return replace(cell, state="dropped", reason=f"dropped at rung {cell.rung}")


class _Shared:
    """A cell that several workers share, each with attempts of its own."""

    def __init__(self, folder: Path, cell: dict[str, Any]) -> None:
        self._folder = folder
        self._cell = cell
        # The cell itself has a result, and says whether it was cancelled.
        self._whole = _Watched(folder, cell)
        self._workers: dict[Path, _Watched] = {}

    def refresh(self, moment: float, alive: Alive | None) -> CellState:
        for path in workers(self._folder):
            if path not in self._workers:
                self._workers[path] = _Watched(path, self._cell)
        whole = self._whole.refresh(moment, alive)
        states = [worker.refresh(moment, alive) for worker in self._workers.values()]
        if not states:
            return whole
        if whole.cancelled_time is not None and any(
            worker.started > whole.cancelled_time for worker in self._workers.values()
        ):
            whole = replace(whole, cancelled=False)  # it was given again
        running = [state for state in states if state.state == "running"]
        starts = [state.started for state in states if state.started is not None]
        ends = [state.ended for state in states if state.ended is not None]
        result = self._result() if not running else None
        state, reason = self._judge(states, whole)
        if result is not None:
            state, reason = "done", None
        metrics = _sums(states) if result is None else result["metrics"]
        total = max((s.total_steps for s in states if s.total_steps is not None), default=None)
        step = result["step"] if result else sum(s.step or 0 for s in states)
        speeds = [s.tokens_per_second for s in running if s.tokens_per_second is not None]
        rate = sum(worker.rate for worker in self._workers.values() if worker.runs)
        return replace(
            whole,
            cancelled=whole.cancelled and result is None,
            state=state,
            attempts=max(state.attempts for state in states),
            metrics=metrics,
            step=step,
            total_steps=result["step"] if result else total,
            tokens_per_second=sum(speeds) if speeds else None,
            eta_seconds=max(0.0, (total - step) / rate) if total and rate and running else None,
            reason=reason,
            started=min(starts, default=None),
            ended=None if running else max(ends, default=None),
            begun=(last := max(states, key=lambda state: state.begun or 0.0)).begun,
            before=last.before,
            worked_seconds=sum(state.worked_seconds for state in states),
        )

    def _judge(self, states: list[CellState], whole: CellState) -> tuple[str, str | None]:
        """The state of the cell: that of the worker that says most about it."""
        for wanted in ("running", "failed", "lost", "pending", "stopped"):
            found = [state for state in states if state.state == wanted]
            if found and whole.cancelled:
                return (wanted if wanted == "running" else "stopped"), "cancelled"
            if found:
                reasons = dict.fromkeys(state.reason for state in found if state.reason)
                reason = "; ".join(reasons) or None
                if wanted == "running":
                    return wanted, f"{len(found)} workers" if len(states) > 1 else reason
                return wanted, reason
        return "stopped", "its workers left before the end; give the command again"

    def _result(self) -> dict[str, Any] | None:
        try:
            result = json.loads((self._folder / "result.json").read_bytes())
            return {"metrics": numbers(result["metrics"]), "step": result["step"]}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


def _sums(states: list[CellState]) -> dict[str, float]:
    values: dict[str, float] = {}
    for state in states:
        for name, value in state.metrics.items():
            values[name] = values.get(name, 0) + value
    return values


class _Watched:
    """One cell, and how far its files have been read."""

    def __init__(self, folder: Path, cell: dict[str, Any]) -> None:
        self._folder = folder
        self._base: dict[str, Any] = {
            "id": cell["id"],
            "index": cell["index"],
            "params": cell["params"],
        }
        self._events = JsonLines(f"{folder}/events.jsonl")
        self._metrics = JsonLines(f"{folder}/metrics.jsonl")
        self._values: dict[str, float] = {}
        self._life = _Life()
        self._final: CellState | None = None

    @property
    def rate(self) -> float:
        """Rows per second of a worker, as it last said."""
        return self._values.get("rows_per_second", 0.0)

    @property
    def started(self) -> float:
        """When the last attempt began, in seconds since the epoch."""
        return self._life.started_time or 0.0

    @property
    def runs(self) -> bool:
        """Whether an attempt has begun and not said that it ended."""
        return self._life.started is not None and self._life.ended is None

    def refresh(self, moment: float, alive: Alive | None) -> CellState:
        if self._final is not None:
            return self._final
        for event in self._events.read():
            self._life.add(event)
        state, reason = self._judge(alive)
        if state == "lost" and (missed := self._events.read()):
            # It ended between the reading and the look at its lock.
            for event in missed:
                self._life.add(event)
            state, reason = self._judge(alive)
        said = self._slurm_said() if state == "lost" else None
        if said is not None:
            reason = f"out of memory: {said}"
        if state != "done" or not self._read_result():
            self._values.update(last_values(self._metrics.read_bytes()))
        life, values = self._life, self._values
        result = CellState(
            **self._base,
            state=state,
            attempts=life.attempts,
            metrics={name: values[name] for name in values if name not in PROGRESS_METRICS},
            step=_integer(values.get("step")),
            total_steps=_integer(values.get("total_steps")),
            tokens_per_second=values.get("tokens_per_second"),
            eta_seconds=self._eta(moment) if state == "running" else None,
            reason=reason,
            out_of_memory=said is not None,
            cancelled=life.cancelled,
            checkpoint_step=life.checkpoint_step,
            rung=_integer((life.started or {}).get("rung")),
            started=life.first_started,
            ended=None if state == "running" else life.ended_time,
            begun=life.started_time,
            before=life.before,
            worked_seconds=life.worked(moment if state == "running" else None),
            cancelled_time=life.cancelled_time,
        )
        if state == "done" and self._folder.parent.name != "workers":
            self._final = result  # only a worker can be given something again
        return result

    def _judge(self, alive: Alive | None) -> tuple[str, str | None]:
        life = self._life
        if life.ended is not None:
            cause = life.ended.get("cause")
            code = life.ended.get("code")
            # A cause that a newer worker writes and this version does not know.
            by_code = (
                {0: "done", AGAIN: "stopped"}.get(code, "failed") if code is not None else "failed"
            )
            state = _STATE_OF_CAUSE.get(str(cause), by_code)
            if state == "done" or cause == "rung":
                return state, None
            if life.cancelled:
                return "stopped", "cancelled"
            if state == "failed" and life.ended.get("again"):
                # Its budget allows another attempt, which follows at once.
                return "pending", f"tries again after: {life.ended.get('reason')}"
            return state, life.ended.get("reason") or None
        if life.started is None:
            return ("stopped", "cancelled") if life.cancelled else ("pending", None)
        lives = is_alive(life.started, self._folder / "events.jsonl", alive)
        if lives is False:
            if (self._folder / "result.json").exists():
                # It was ended between its result and its last word.
                return "done", None
            if (self._folder / "rungs" / f"{life.started.get('rung')}.json").exists():
                return "pending", None
            if life.cancelled:
                return "stopped", "cancelled"
            return "lost", f"the attempt on {life.started.get('host')} ended without a word"
        if life.cancelled:
            return "running", "cancelled, about to stop"
        if lives is None:
            return "running", f"on {life.started.get('host')}, not verifiable from here"
        return "running", f"asked to stop ({life.signal})" if life.signal else life.warning

    def _slurm_said(self) -> str | None:
        """What Slurm wrote of memory where the job of the lost attempt had its stderr."""
        started = self._life.started or {}
        run_dir, number = str(self._folder.parent.parent), _integer(started.get("submission")) or 0
        since = _integer(started.get("stderr")) or 0
        return slurm_said(stderr_of(run_dir, number, str(started.get("job"))), since)

    def _read_result(self) -> bool:
        """Take the metrics from ``result.json``, which is shorter than all metrics lines."""
        try:
            result = json.loads((self._folder / "result.json").read_bytes())
            values = numbers(result["metrics"])
            if result["step"] is not None:
                values["step"] = result["step"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        self._values = values
        return True

    def _eta(self, moment: float) -> float | None:
        step, total = self._values.get("step"), self._values.get("total_steps")
        since = self._life.started_time
        if step is None or total is None or since is None:
            return None
        # Metrics lines carry no time: the newest one is as old as the file.
        try:
            reported = os.stat(self._folder / "metrics.jsonl").st_mtime
        except OSError:
            return None
        done_here = step - self._life.resumed_from
        if done_here <= 0 or reported <= since:
            return None
        per_step = (reported - since) / done_here
        return max(0.0, (total - step) * per_step - (moment - reported))


@dataclass(slots=True)
class _Life:
    """A cell's events, folded."""

    attempts: int = 0
    started: dict[str, Any] | None = None
    ended: dict[str, Any] | None = None
    before: str | None = None
    signal: str | None = None
    warning: str | None = None
    cancelled: bool = False
    checkpoint_step: int | None = None
    resumed_from: int = 0
    first_started: float | None = None
    started_time: float | None = None
    ended_time: float | None = None
    cancelled_time: float | None = None
    earlier_seconds: float = 0.0
    last_time: float = 0.0

    def worked(self, now: float | None) -> float:
        """Seconds of all attempts; ``now`` if the last one runs, else it ran as far as is known."""
        if self.started is None or self.started_time is None:
            return self.earlier_seconds
        return self.earlier_seconds + max(0.0, (now or self.last_time) - self.started_time)

    def _end(self) -> str | None:
        if self.started is None:
            return None
        if self.ended is None:
            return "it ended without a word"
        cause = self.ended.get("cause")
        return None if cause == "rung" else str(self.ended.get("reason") or cause)

    def add(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if kind in ("started", "anew"):
            self.earlier_seconds = self.worked(None)
        if kind in ("started", "checkpoint", "signal", "ended"):
            self.last_time = parse_time(event.get("time", ""))
        if kind == "started":
            self.attempts = max(self.attempts + 1, _integer(event.get("attempt")) or 0)
            self.before = self._end()
            self.started, self.ended, self.signal, self.warning = event, None, None, None
            self.cancelled = False
            self.resumed_from = self.checkpoint_step or 0
            self.started_time = parse_time(event.get("time", ""))
            self.first_started = self.first_started or self.started_time
        elif kind == "anew":
            self.started, self.ended, self.signal, self.warning = None, None, None, None
            self.cancelled, self.checkpoint_step, self.resumed_from = False, None, 0
        elif kind == "ended":
            self.ended = event
            self.ended_time = parse_time(event.get("time", ""))
        elif kind == "signal":
            self.signal = str(event.get("signal"))
        elif kind == "short_lead":
            self.warning = (
                f"saving takes {_integer(event.get('saving'))} s, but the signal comes only "
                f"{_integer(event.get('lead'))} s before the end: raise the site's signal.lead"
            )
        elif kind == "checkpoint":
            self.checkpoint_step = _integer(event.get("step"))
        elif kind == "cancelled":
            self.cancelled = True
            self.cancelled_time = parse_time(event.get("time", ""))


def _integer(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _expected(cell: CellState) -> float:
    """How long a running cell takes from its beginning to its end."""
    so_far = time.time() - cell.started if cell.started is not None else 0.0
    return so_far + (cell.eta_seconds or 0.0)
