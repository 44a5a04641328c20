"""Tables of cells that fit the terminal."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpcml.cli import text
from hpcml.runs.comparison import Comparison
from hpcml.runs.folder import RunFolder
from hpcml.runs.results import Result, Results, column_names
from hpcml.runs.status import CellState

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_GAP = 2
_SHORT_VALUE = 12
_SHORT_NAME = 16
_NAME = 24
_NAMED = 8
_REASONS = 10
_COLOURS = {
    "running": "cyan",
    "done": "green",
    "failed": "red",
    "lost": "yellow",
    "stopped": "yellow",
    "pending": "dim",
    "dropped": "dim",
}


@dataclass(frozen=True, slots=True)
class _Column:
    """A column and how it gives way where the terminal is narrow.

    Attributes:
        keep: columns with the smallest number are left out first.
        least: a flexible column may shrink to this width; 0 means that it never shrinks.
    """

    title: str
    fields: list[str]
    keep: int
    least: int = 0
    right: bool = False

    @property
    def width(self) -> int:
        from rich.cells import cell_len

        return max(map(cell_len, (self.title, *self.fields)))

    @property
    def narrowest(self) -> int:
        return min(self.width, self.least) if self.least else self.width


def console() -> Console:
    """The terminal, or whatever standard output is."""
    from rich.console import Console, ConsoleDimensions

    if isinstance(sys.stdout, io.TextIOWrapper):
        # Not every terminal's encoding has "…"; a table needs one character for one.
        sys.stdout.reconfigure(errors="replace")
    output = Console(highlight=False, markup=False, soft_wrap=False)
    if output.is_dumb_terminal:
        # Which rich takes for 80 columns wide, whatever it is said to be.
        output.size = ConsoleDimensions(*shutil.get_terminal_size())
    return output


def cells_table(
    cells: Sequence[CellState], run: RunFolder, width: int, *, curves: Sequence[str] = ()
) -> Table:
    """The progress of some cells, one line each.

    Args:
        cells: the rows.
        run: the run they belong to.
        width: columns of the terminal.
        curves: a small curve for each cell.
    """
    # The steps of an inference are rows.
    step = "rows" if run.plan.get("kind") == "infer" else "step"
    others = (step, "curve", "rung", "tokens/s", "left")
    params, metrics = column_names(run.swept, shown_metrics(cells, run.objective), *others)
    attempts = [str(cell.attempts) if cell.attempts > 1 else "" for cell in cells]
    rungs = [str(cell.rung or "") for cell in cells]
    speeds = [text.speed(cell.tokens_per_second) for cell in cells]
    columns = [
        _Column("cell", [str(cell.index) for cell in cells], 100, right=True),
        *_param_columns(cells, params),
        _Column("state", [cell.state for cell in cells], 100),
        _Column(step, [text.steps(cell) for cell in cells], 90, right=True),
        *_metric_columns(cells, metrics, (80, 40)),
        _Column("curve", list(curves), 65),
        _Column("rung", rungs, 50, right=True),
        _Column("tokens/s", speeds, 35, right=True),
        _Column("left", [text.duration(cell.eta_seconds) for cell in cells], 70, right=True),
        _Column("attempts", attempts, 30, right=True),
    ]
    return _fit(columns, [cell.state for cell in cells], width)


def results_table(
    results: Results | Comparison, rows: Sequence[Result], width: int, *, runs: Sequence[str] = ()
) -> Table:
    """Ranked cells with their parameters and metrics.

    Args:
        results: what has the names of the columns.
        rows: the cells.
        width: columns of the terminal.
        runs: the name of the run of each cell, where they are of several.
    """
    cells = [row.cell for row in rows]
    first = [name for name in shown_metrics(cells, results.objective) if name in results.metrics]
    shown = {name: results.metrics[name] for name in [*first, *results.metrics]}
    attempts = [str(cell.attempts) if cell.attempts > 1 else "" for cell in cells]
    columns = [
        _Column("rank", [str(row.rank or "") for row in rows], 100, right=True),
        _Column("run", [text.printable(name) for name in runs], 98, _NAME),
        _Column("cell", [str(cell.index) for cell in cells], 100, right=True),
        *_param_columns(cells, results.params),
        *_metric_columns(cells, shown, (90, 45, 44, 43, 42, 41)),
        _Column("state", [cell.state for cell in cells], 95),
        _Column("attempts", attempts, 30, right=True),
    ]
    return _fit(columns, [cell.state for cell in cells], width)


def reasons_of(cells: Sequence[CellState]) -> list[str]:
    """A sentence for each reason among some cells, naming the cells it holds for."""
    groups: dict[tuple[str, str], list[int]] = {}
    for cell in cells:
        if cell.reason:
            groups.setdefault((cell.state, text.one_line(cell.reason)), []).append(cell.index)
    sentences = []
    for (state, reason), indices in groups.items():
        named = ", ".join(map(str, indices[:_NAMED]))
        if len(indices) > _NAMED:
            named += f" and {len(indices) - _NAMED} more"
        sentences.append(f"{'cell' if len(indices) == 1 else 'cells'} {named} {state}: {reason}")
    if len(sentences) > _REASONS:
        sentences[_REASONS:] = [f"and {len(sentences) - _REASONS} other reasons (--json has all)"]
    return sentences


def _metric_columns(
    cells: Sequence[CellState], titles: Mapping[str, str], keep: Sequence[int]
) -> list[_Column]:
    return [
        _Column(title, [text.number(cell.metrics.get(name)) for cell in cells], kept, right=True)
        for (name, title), kept in zip(titles.items(), keep, strict=False)
    ]


def _param_columns(cells: Sequence[CellState], titles: Mapping[str, str]) -> list[_Column]:
    """A column for each swept parameter; a long name is cut sooner than a short value."""
    columns = []
    for place, (name, title) in enumerate(titles.items()):
        fields = [text.value(cell.params[name]) if name in cell.params else "" for cell in cells]
        least = min(max(map(len, fields), default=0), _SHORT_VALUE)
        least = max(least, min(len(name), _SHORT_NAME))
        columns.append(_Column(title, fields, max(46, 60 - place), max(least, 5)))
    return columns


def shown_metrics(cells: Sequence[CellState], objective: tuple[str, str] | None) -> list[str]:
    """The two metrics to show while cells run: the objective, the loss, or else the first."""
    found = {name for cell in cells for name in cell.metrics}
    wanted = [objective[0]] if objective else []
    preferred = [name for name in dict.fromkeys([*wanted, "loss"]) if name in found]
    return (preferred + sorted(found.difference(preferred)))[:2]


def coloured(state: str) -> str:
    """The style of a state's word."""
    return _COLOURS.get(state, "")


def _fit(columns: list[_Column], states: list[str], width: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    # A column that says nothing takes no room.
    columns = [
        replace(column, title=text.printable(column.title))
        for column in columns
        if any(column.fields)
    ]
    while len(columns) > 1 and _needed(columns) > width:
        columns.remove(min(columns, key=lambda column: column.keep))
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    room = width - _needed(columns)
    for column in columns:
        given = min(column.width, column.narrowest + room)
        room -= given - column.narrowest
        table.add_column(
            column.title,
            width=given,
            justify="right" if column.right else "left",
            no_wrap=True,
            overflow="ellipsis",
        )
    for row, state in enumerate(states):
        table.add_row(
            *(
                Text(column.fields[row], style=coloured(state) if column.title == "state" else "")
                for column in columns
            )
        )
    return table


def _needed(columns: list[_Column]) -> int:
    return sum(column.narrowest for column in columns) + _GAP * (len(columns) - 1)
