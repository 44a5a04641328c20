"""What a run looks like in the terminal: live while it runs, and its end."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from hpcml.cli import text
from hpcml.cli.tables import coloured, console, reasons_of, results_table, shown_metrics
from hpcml.runs.comparison import Comparison
from hpcml.runs.find import reference
from hpcml.runs.folder import RunFolder
from hpcml.runs.results import Result, Results
from hpcml.runs.status import STATES, CellState, Status, waits_for_rung

if TYPE_CHECKING:
    from rich.console import Console

_PROGRESS_SECONDS = 10.0
# With more running cells than this, a log gets one line for all of them.
_TALKATIVE = 20
SHOWN_RESULTS = 20


class View(Protocol):
    """Shows the states of a run as they change."""

    def refresh(self, status: Status) -> None:
        """Show these states now."""

    def say(self, line: str) -> None:
        """Tell the user something that is no state of a cell."""


@contextmanager
def progress(run: RunFolder) -> Iterator[View]:
    """Show a run while it runs: a picture that is drawn anew, or elsewhere a line per change."""
    output = console()
    if not output.is_terminal or output.is_dumb_terminal:
        yield LineView(run, output)
        return
    from rich.live import Live

    from hpcml.cli.dashboard import Dashboard

    # Without a thread of its own: it draws when it is told what is new.
    live = Live(console=output, auto_refresh=False, screen=True)
    dashboard = Dashboard(run, live)
    try:
        with live, _signals(dashboard.draw):
            yield dashboard
    finally:
        for line in dashboard.said:
            output.print(line, soft_wrap=True)


@contextmanager
def _signals(draw: Callable[[], None]) -> Iterator[None]:
    """Call ``draw`` when the terminal gets another size; TERM, too, leaves the terminal clean."""

    def end(signum: int, frame: FrameType | None) -> None:
        sys.exit(128 + signum)

    resized = signal.signal(signal.SIGWINCH, lambda signum, frame: draw())
    ended = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, resized)
        signal.signal(signal.SIGTERM, ended)


def look(run: RunFolder, *, releases: bool = False) -> Status | None:
    """Show a run until nothing of it runs or waits any more; None if the user had enough.

    Args:
        run: the run.
        releases: let tasks go on that the scheduler holds for no fault of theirs.
    """
    import click

    from hpcml.launch.watch import follow, watch

    try:
        with progress(run) as view:
            return follow(watch(run), view.refresh, view.say, releases=releases)
    except KeyboardInterrupt:
        name = reference(run)
        click.echo(
            f"hpcml: no longer followed; the cells go on. hpcml watch {name} shows them, "
            f"hpcml cancel {name} ends them",
            err=True,
        )
        return None


class LineView:
    """Lines for a log file: each change of a state, and now and then the progress."""

    def __init__(self, run: RunFolder, output: Console) -> None:
        self._run = run
        self._output = output
        self._states: dict[int, tuple[str, int, bool]] | None = None
        self._steps: dict[int, int | None] = {}
        self._spoken: dict[int, float] = {}
        self._summarized = float("-inf")

    def refresh(self, status: Status) -> None:
        """Print what changed since the last call."""
        moment = time.monotonic()
        if self._states is None:
            # What an earlier command did is told in one line.
            self._states = {
                cell.index: (cell.state, cell.attempts, cell.stuck)
                for cell in status.cells.values()
                if cell.state != "running" and not cell.stuck
            }
            self.say(_summary(status))
        running = status.in_state("running")
        for cell in status.cells.values():
            now = cell.state, cell.attempts, cell.stuck
            changed = self._states.get(cell.index, ("pending", 0, False)) != now
            progressed = (
                cell.state == "running"
                and len(running) <= _TALKATIVE
                and cell.step != self._steps.get(cell.index)
                and moment - self._spoken.get(cell.index, 0.0) >= _PROGRESS_SECONDS
            )
            if changed or progressed:
                self._states[cell.index] = now
                self._steps[cell.index] = cell.step
                self._spoken[cell.index] = moment
                self.say(self._line(cell))
        if len(running) > _TALKATIVE and moment - self._summarized >= _PROGRESS_SECONDS:
            self._summarized = moment
            self.say(_summary(status))

    def say(self, line: str) -> None:
        """Print a line with the time."""
        self._output.print(f"[{time.strftime('%H:%M:%S')}] {line}", soft_wrap=True)

    def _line(self, cell: CellState) -> str:
        parts = [cell.state]
        if cell.attempts > 1:
            parts.append(f"attempt {cell.attempts}")
        if cell.step is not None:
            parts.append(f"step {text.steps(cell)}")
        parts += [
            f"{text.printable(name)} {text.number(cell.metrics[name])}"
            for name in shown_metrics([cell], self._run.objective)
        ]
        if cell.eta_seconds is not None:
            parts.append(f"{text.duration(cell.eta_seconds)} left")
        line = f"{text.cell_name(cell, self._run.swept)}: {', '.join(parts)}"
        return f"{line}: {text.one_line(cell.reason)}" if cell.reason else line


def print_summary(results: Results, status: Status, *, every: bool = False) -> None:
    """Print how a run ended: the ranking, the best cell, where everything lies, what comes next.

    Args:
        results: the ranked cells.
        status: the states they were made from.
        every: print all cells and not only the first ones.
    """
    output = console()
    run = results.run
    print_counts(output, status)
    rows = results.rows if every else results.rows[:SHOWN_RESULTS]
    if rows:
        output.print()
        output.print(results_table(results, rows, output.width))
    if len(rows) < len(results.rows):
        hidden = len(results.rows) - len(rows)
        output.print(f"and {hidden} more: hpcml results {reference(run)} --all", style="dim")
    print_reasons(output, [row.cell for row in results.rows])
    if run.plan.get("kind") == "infer":
        from hpcml.cli.answers import print_answers

        print_answers(output, results)
    if results.best:
        _print_best(output, results, results.best, bool(_unfinished(status)))
    output.print()
    output.print("Everything is in", style="bold")
    output.print(f"  {run.path}", soft_wrap=True)
    steps = _next_steps(results, status)
    if steps:
        output.print()
        output.print("Next", style="bold")
    for purpose, command in steps:
        output.print(f"  {purpose}" + (":" if command else ""))
        if command:
            output.print(f"    {command}", style="cyan", soft_wrap=True)


def print_comparison(
    comparison: Comparison, states: Sequence[Status], *, every: bool = False
) -> None:
    """Print how several runs ended: one ranking, the best cell of all, where everything lies.

    Args:
        comparison: the ranked cells.
        states: the states of each run.
        every: print all cells and not only the first ones.
    """
    output = console()
    for (name, found), status in zip(comparison.runs.items(), states, strict=True):
        output.print(f"{text.printable(name)}, {found.run.path}", style="bold", soft_wrap=True)
        print_counts(output, status)
    rows = comparison.rows if every else comparison.rows[:SHOWN_RESULTS]
    if rows:
        output.print()
        shown = [row for _, row in rows]
        names = [name for name, _ in rows]
        output.print(results_table(comparison, shown, output.width, runs=names))
    if len(rows) < len(comparison.rows):
        output.print(f"and {len(comparison.rows) - len(rows)} more: --all", style="dim")
    if comparison.best:
        name, best = comparison.best
        unfinished = any(map(_unfinished, states))
        _print_best(output, comparison, best, unfinished, of=f" of {text.printable(name)}")


def print_reasons(output: Console, cells: Sequence[CellState]) -> None:
    """Print why cells are in their states, where there is something to say."""
    sentences = reasons_of(cells)
    if sentences:
        output.print()
    for sentence in sentences:
        output.print(sentence, soft_wrap=True)


def print_counts(output: Console, status: Status) -> None:
    """Print the cells by state, and the time left while there is some."""
    from rich.text import Text

    line = Text(_summary(status), style="bold")
    for state in STATES:
        line.highlight_words([state], f"not bold {coloured(state)}")
    output.print(line)


def _print_best(
    output: Console,
    results: Results | Comparison,
    best: Result,
    unfinished: bool,
    *,
    of: str = "",
) -> None:
    assert results.objective
    metric, mode = results.objective
    found = text.number(best.cell.metrics[metric])
    side = "lowest" if mode == "min" else "highest"
    facts = {
        **{name: text.value(best.cell.params.get(name)) for name in results.params},
        **({"checkpoint": str(best.checkpoint)} if best.checkpoint else {}),
    }
    title = "Best so far" if unfinished else "Best"
    output.print()
    output.print(f"{title}: cell {best.cell.index}{of}, {side} {metric}: {found}", style="bold")
    pad = max(map(len, facts), default=0)
    for name, fact in facts.items():
        output.print(f"  {name:{pad}}  {fact}", soft_wrap=True)


def _next_steps(results: Results, status: Status) -> list[tuple[str, str]]:
    """What the user may want to do now, and the command for it, if it is one that we know."""
    run = reference(results.run)
    steps = []
    failed = status.in_state("failed")
    if failed:
        steps.append(("See why a cell failed", f"hpcml logs {run} {failed[0].index}"))
    # A pending cell with a reason waits in the queue of a scheduler.
    waiting = status.in_state("pending")
    queued = any(cell.reason for cell in waiting if cell.reason != waits_for_rung(cell))
    if queued or status.in_state("running"):
        steps.append(("See how far it is", f"hpcml watch {run}"))
    elif left := _unfinished(status):
        steps.append((f"Give the command again: it continues the {left} unfinished", ""))
    best = results.best or next((row for row in results.rows if row.cell.state == "done"), None)
    if best and best.checkpoint and results.run.plan.get("kind") == "train":
        which = "best" if results.best else str(best.cell.index)
        export = f"hpcml export {run} {which} DIR"
        if _only_apart(results.run, best.cell):
            export += " --unmerged"
        steps.append(("Write the model for other programs", export))
    return steps


def _only_apart(run: RunFolder, cell: CellState) -> bool:
    """Whether what was trained cannot become a part of the model."""
    parameters = run.cell(cell.index)["payload"].get("parameters") or {}
    return bool(parameters.get("fine_tuning_method") == "prompt_tuning")


def _unfinished(status: Status) -> int:
    return status.total - len(status.in_state("done", "failed", "dropped"))


def _summary(status: Status) -> str:
    line = text.counts(status.counts(), status.total)
    left = status.eta_seconds
    return f"{line}; about {text.duration(left)} left" if left is not None else line
