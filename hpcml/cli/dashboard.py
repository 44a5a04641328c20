"""The live view of a run: one picture that fits the terminal."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from hpcml.cli import text
from hpcml.cli.tables import cells_table, coloured, reasons_of, results_table, shown_metrics
from hpcml.runs.course import Course, summed
from hpcml.runs.folder import RunFolder, workers
from hpcml.runs.results import Result, Results, column_names, rank_cells
from hpcml.runs.status import CellState, Status, waits_for_rung

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.live import Live
    from rich.text import Text

_CURVE = 12
_LATELY = 50
_SAID = 50
# Shown to the right of what is done, in this order. Each state has a sign of its own, since a
# terminal may have no colours.
_BAR = {
    "done": "█#",
    "dropped": "▒-",
    "running": "▓=",
    "stopped": "‖!",
    "lost": "?",
    "failed": "x",
    "pending": "░.",
}
_LEVELS = "▁▂▃▄▅▆▇█", "_.-~=+*#"


class Dashboard:
    """Draws a run on the terminal's second screen, so that the first one stays as it was."""

    def __init__(self, run: RunFolder, live: Live) -> None:
        self._live = live
        self._picture = Picture(run)
        self._status: Status | None = None
        self._drawing = self._stale = False

    def refresh(self, status: Status) -> None:
        """Draw these states."""
        self._status = status
        self.draw()

    def draw(self) -> None:
        """Draw what is known, in the terminal's size; a signal may ask for it at any moment."""
        self._stale = True
        if self._drawing:
            return
        self._drawing = True
        try:
            while self._stale and self._status is not None:
                self._stale = False
                self._live.update(_Frame(self._picture, self._status), refresh=True)
        finally:
            self._drawing = False

    @property
    def said(self) -> list[str]:
        """What was said last, which is gone with the picture."""
        return [line for _, line in self._picture.said]

    def say(self, line: str) -> None:
        """Show a line among what happened lately."""
        self._picture.say(line)
        self.draw()


@dataclass(frozen=True, slots=True)
class _Section:
    """A part of the picture: a title and lines, of which as many are shown as there is room for."""

    title: str
    wanted: int

    @property
    def frame(self) -> int:
        """Lines around its rows: a blank one, and the title."""
        return 2


class Picture:
    """What is shown of a run, and the curves that it takes.

    Only the metrics of cells that are on the screen are read beyond their last values.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._begun = time.monotonic()
        #: When something was said that is about no cell, and what.
        self.said: list[tuple[float, str]] = []
        self._courses: dict[str, Course] = {}
        self._infers = run.plan.get("kind") == "infer"
        resources = run.plan.get("resources") or {}
        self._gpus = int(resources.get("gpus") or 0) * int(resources.get("nodes") or 1)

    def say(self, line: str) -> None:
        """Keep a line that is about no cell."""
        self.said = [*self.said, (time.time(), line)][-_SAID:]

    def draw(
        self, status: Status, output: Console, options: ConsoleOptions
    ) -> Iterable[RenderableType]:
        """The picture, at most as wide and high as the terminal."""
        from rich.text import Text

        width, height = options.max_width, output.size.height
        running = sorted(status.in_state("running"), key=lambda cell: cell.index)
        best = [
            Result(rank, cell, None)
            for rank, cell in rank_cells(list(status.cells.values()), self._run.objective)
            if rank is not None
        ]
        lately = self._lately(status, width)
        waiting = self._waiting(status)
        header = self._header(status, width, plain=options.ascii_only)
        sections = [
            _Section(f"running: {len(running)}", len(running)),
            _Section("lately", len(lately)),
            _Section(self._best_title(), len(best)),
            _Section("waiting", len(waiting)),
        ]
        # A table has a line of titles, which counts as a row; the last line stays empty.
        shares = _shares(sections, height - len(header) - 1, tables={0, 2})
        yield from header
        for number, share in enumerate(shares):
            if not share:
                continue
            yield Text("")
            yield Text(sections[number].title, style="bold", no_wrap=True, overflow="ellipsis")
            if number == 0:
                shown = running[: share - 1]
                curves = [self._curve(cell, plain=options.ascii_only) for cell in shown]
                yield cells_table(shown, self._run, width, curves=curves)
            elif number == 2:
                rows = best[: share - 1]
                yield results_table(self._results(rows), rows, width)
            else:
                for line in (lately if number == 1 else waiting)[:share]:
                    yield Text(line, no_wrap=True, overflow="ellipsis")

    def _header(self, status: Status, width: int, *, plain: bool) -> list[Text]:
        from rich.text import Text

        facts = [self._run.name, self._run.run_id, self._place()]
        facts.append(f"watched for {text.duration(time.monotonic() - self._begun)}")
        states, total = status.counts(), status.total
        counts = [text.counts(states, total)]
        if self._infers:
            rows, of = _rows(status)
            counts.append(f"{rows:,} of {of:,} rows" if of else f"{rows:,} rows")
            if of and states.keys() <= {"running", "done"}:
                states, total = {"done": rows, "pending": of - rows}, of
        if (left := status.eta_seconds) is not None:
            counts.append(f"about {text.duration(left)} left")
        worked = sum(cell.worked_seconds for cell in status.cells.values())
        if self._gpus and worked:
            counts.append(f"{worked * self._gpus / 3600:.1f} GPU hours")
        lines = [Text(text.printable("  ".join(facts)), style="bold")]
        lines.append(_bar(states, total, width, plain=plain))
        # The time left is not what a narrow terminal cuts off.
        together = "; ".join(counts)
        lines += map(Text, [together] if len(together) <= width else counts)
        if rungs := self._rungs(status):
            lines.append(Text(rungs))
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return lines

    def _place(self) -> str:
        """The site, and its scheduler where that has another name."""
        scheduler = str(self._run.plan.get("scheduler") or "")
        site = str((self._run.plan.get("site") or {}).get("name") or scheduler)
        return site if site == scheduler else f"{site} ({scheduler})"

    def _rungs(self, status: Status) -> str:
        """Of a halving: how many cells have begun each rung."""
        halving = self._run.plan.get("halving")
        if not halving:
            return ""
        began = [cell.rung or 0 for cell in status.cells.values()]
        return "rungs: " + ", ".join(
            f"{rung} to step {steps}: {sum(found >= rung for found in began)} begun"
            for rung, steps in enumerate(halving["steps"], start=1)
        )

    def _best_title(self) -> str:
        objective = self._run.objective
        if objective is None:
            return ""
        side = "lowest" if objective[1] == "min" else "highest"
        return f"best so far, {side} {text.printable(objective[0])}"

    def _results(self, rows: Sequence[Result]) -> Results:
        assert self._run.objective
        shown = shown_metrics([row.cell for row in rows], self._run.objective)
        params, metrics = column_names(self._run.swept, shown)
        return Results(self._run, list(rows), 0, params, metrics)

    def _lately(self, status: Status, width: int) -> list[str]:
        """Failures, losses and comings back, and what was said, the newest first."""
        from rich.cells import cell_len

        found: list[tuple[float, CellState | None, str]] = [(at, None, it) for at, it in self.said]
        for cell in status.cells.values():
            if cell.state in ("failed", "lost", "stopped"):
                at = cell.ended or cell.begun or cell.cancelled_time or 0.0
                found.append((at, cell, f"{cell.state}: {cell.reason}"))
            if cell.state == "running" and cell.reason and cell.begun and not self._infers:
                found.append((cell.begun, cell, f"runs: {cell.reason}"))
            if cell.before and cell.begun:
                back = f"came back: attempt {cell.attempts}, after: {cell.before}"
                found.append((cell.begun, cell, back))
        lines = []
        for at, about, words in heapq.nlargest(_LATELY, found, key=lambda item: item[0]):
            said = text.one_line(words)
            line = f"{_clock(at)}  {said}"
            if about is not None:
                line = f"{_clock(at)}  {text.cell_name(about, self._run.swept)} {said}"
                if cell_len(line) > width:
                    # The cause says more than the parameters.
                    line = f"{_clock(at)}  cell {about.index} {said}"
            lines.append(line)
        return lines

    def _waiting(self, status: Status) -> list[str]:
        """Why cells wait, in words, for as many as there are."""
        known = [cell for cell in status.in_state("pending") if cell.reason]
        groups: dict[str, int] = {}
        for cell in known:
            reason = waits_for_rung(cell) or text.one_line(cell.reason)
            groups[reason] = groups.get(reason, 0) + 1
        if len(groups) > _SAID:
            return reasons_of(known)
        ordered = sorted(groups.items(), key=lambda item: -item[1])
        return [
            f"{count} {'cell' if count == 1 else 'cells'}: {reason}" for reason, count in ordered
        ]

    def _curve(self, cell: CellState, *, plain: bool) -> str:
        folder = self._run.cell_dir(cell.id)
        if self._infers:
            courses = [
                self._course(path / "metrics.jsonl", "tokens_per_second", "reported_at")
                for path in workers(folder)
            ]
            return sparkline(summed([course.look() for course in courses]), _CURVE, plain=plain)
        metrics = shown_metrics([cell], self._run.objective)
        if not metrics:
            return ""
        # A loss is reported more often than what an evaluation finds.
        metric = "loss" if "loss" in metrics else metrics[0]
        points = self._course(folder / "metrics.jsonl", metric, "step").look()
        return sparkline([value for _, value in points], _CURVE, plain=plain)

    def _course(self, path: Path, metric: str, along: str) -> Course:
        key = f"{path} {metric}"
        if key not in self._courses:
            self._courses[key] = Course(path, metric, along)
        return self._courses[key]


@dataclass(frozen=True, slots=True)
class _Frame:
    """One drawing; it measures the terminal when it is drawn."""

    picture: Picture
    status: Status

    def __rich_console__(
        self, output: Console, options: ConsoleOptions
    ) -> Iterable[RenderableType]:
        return self.picture.draw(self.status, output, options)


def sparkline(values: Sequence[float], width: int, *, plain: bool = False) -> str:
    """A curve of one line: means of equal stretches, from the lowest to the highest.

    Args:
        values: in their order; what is not finite is left out.
        width: the most characters.
        plain: characters of ASCII alone.
    """
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    width = min(width, len(finite))
    cuts = [len(finite) * place // width for place in range(width + 1)]
    # Halves, and each divided before the sum: the largest floats would be infinite together.
    halves = [
        sum(value / (last - first) / 2 for value in finite[first:last])
        for first, last in pairwise(cuts)
    ]
    low = min(halves)
    span = max(halves) - low
    levels = _LEVELS[plain]
    top = len(levels) - 1
    return "".join(levels[round((half - low) / span * top) if span else 0] for half in halves)


def _bar(counts: dict[str, int], total: int, width: int, *, plain: bool) -> Text:
    """Cells by state, each state as wide as its share; none that there is gets lost."""
    from rich.text import Text

    present = [state for state in _BAR if counts.get(state)]
    room = max(width, len(present))
    widths = {state: max(1, counts[state] * room // max(1, total)) for state in present}
    while present and (over := sum(widths.values()) - room):
        widest = max(present, key=lambda state: widths[state])
        widths[widest] -= over if over < 0 else 1
    bar = Text()
    for state in present:
        sign = _BAR[state][-1 if plain else 0]
        bar.append(sign * widths[state], style=coloured(state))
    return bar


def _rows(status: Status) -> tuple[int, int]:
    """Of an inference: how many rows have answers, of how many; 0 where that is not known yet."""
    cells = list(status.cells.values())
    totals = [cell.total_steps for cell in cells if cell.total_steps is not None]
    known = len(totals) == status.total
    return sum(cell.step or 0 for cell in cells), sum(totals) if known else 0


def _shares(sections: Sequence[_Section], room: int, tables: set[int]) -> list[int]:
    """How many lines each section gets below its title: in turn one each, until none is left."""
    shares = [0] * len(sections)
    wants = [
        section.wanted + (number in tables) if section.wanted else 0
        for number, section in enumerate(sections)
    ]
    grown = True
    while grown:
        grown = False
        for number, section in enumerate(sections):
            if shares[number] >= wants[number]:
                continue
            first = 2 if number in tables else 1
            cost, lines = (section.frame + first, first) if not shares[number] else (1, 1)
            if cost <= room:
                shares[number] += lines
                room -= cost
                grown = True
    return shares


def _clock(at: float) -> str:
    """A time of today, or the day of an earlier one."""
    moment = time.localtime(at)
    today = moment[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M", moment)
