"""Tables of cells that fit the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcml.cli import text
from hpcml.runs.folder import RunFolder
from hpcml.runs.results import Result, Results
from hpcml.runs.status import CellState

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_GAP = 2
_COLOURS = {
    "running": "cyan",
    "done": "green",
    "failed": "red",
    "lost": "yellow",
    "stopped": "yellow",
    "pending": "dim",
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
    from rich.console import Console

    return Console(highlight=False, markup=False, soft_wrap=False)


def cells_table(
    cells: Sequence[CellState], run: RunFolder, width: int, *, wrap: bool = True
) -> Table:
    """The progress of some cells.

    Args:
        cells: the rows.
        run: the run they belong to.
        width: columns of the terminal.
        wrap: long reasons go on in the next line; otherwise each cell takes one line.
    """

    attempts = [str(cell.attempts) if cell.attempts > 1 else "" for cell in cells]
    speeds = [text.speed(cell.tokens_per_second) for cell in cells]
    columns = [
        _Column("cell", [str(cell.index) for cell in cells], 100, right=True),
        _Column("parameters", [text.params(cell, run.swept, " ") for cell in cells], 60, 12),
        _Column("state", [cell.state for cell in cells], 100),
        _Column("step", [text.steps(cell) for cell in cells], 90, right=True),
        *(
            _Column(name, [text.number(cell.metrics.get(name)) for cell in cells], keep, right=True)
            for name, keep in zip(shown_metrics(cells, run), (80, 40), strict=False)
        ),
        _Column("tokens/s", speeds, 50, right=True),
        _Column("left", [text.duration(cell.eta_seconds) for cell in cells], 70, right=True),
        _Column("attempts", attempts, 30, right=True),
        _Column("reason", [_one_line(cell.reason) for cell in cells], 20, 16),
    ]
    return _fit(columns, [cell.state for cell in cells], width, wrap=wrap)


def results_table(results: Results, rows: Sequence[Result], width: int) -> Table:
    """Ranked cells with their parameters and metrics."""
    cells = [row.cell for row in rows]
    columns = [
        _Column("rank", [str(row.rank or "") for row in rows], 100, right=True),
        _Column("cell", [str(cell.index) for cell in cells], 100, right=True),
        _Column(
            "parameters", [text.params(cell, results.run.swept, " ") for cell in cells], 80, 12
        ),
        *(
            _Column(
                name,
                [text.number(cell.metrics.get(name)) for cell in cells],
                90 - place,
                right=True,
            )
            for place, name in enumerate(list(results.metrics)[:6])
        ),
        _Column("state", [cell.state for cell in cells], 95),
        _Column(
            "attempts",
            [str(cell.attempts) if cell.attempts > 1 else "" for cell in cells],
            30,
            right=True,
        ),
        _Column("reason", [_one_line(cell.reason) for cell in cells], 60, 16),
    ]
    return _fit(columns, [cell.state for cell in cells], width, wrap=True)


def shown_metrics(cells: Sequence[CellState], run: RunFolder) -> list[str]:
    """The two metrics to show while cells run: the objective, the loss, or else the first."""
    found = {name for cell in cells for name in cell.metrics}
    wanted = [run.objective[0]] if run.objective else []
    preferred = [name for name in dict.fromkeys([*wanted, "loss"]) if name in found]
    return (preferred + sorted(found.difference(preferred)))[:2]


def coloured(state: str) -> str:
    """The style of a state's word."""
    return _COLOURS.get(state, "")


def _fit(columns: list[_Column], states: list[str], width: int, *, wrap: bool) -> Table:
    from rich.table import Table
    from rich.text import Text

    # A column that says nothing takes no room.
    columns = [column for column in columns if any(column.fields)]
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
            no_wrap=not (wrap and column.title == "reason"),
            overflow="fold" if wrap and column.title == "reason" else "ellipsis",
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


def _one_line(reason: str | None) -> str:
    return " ".join(part for part in (reason or "").split() if part.isprintable())
