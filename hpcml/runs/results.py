"""What came out of a run: its cells, ranked by the objective."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcml.runs.folder import RunFolder
from hpcml.runs.status import CellState, Status, collect

_FIXED_COLUMNS = ("rank", "cell", "index", "state", "attempts", "step", "checkpoint", "reason")


@dataclass(frozen=True, slots=True)
class Result:
    """One cell in the ranking.

    Attributes:
        rank: 1 is the best; ``None`` where there is no objective, the cell has no value of it, or
            the cell failed.
        checkpoint: the one that the result is of, or else the newest, if there is one.
    """

    rank: int | None
    cell: CellState
    checkpoint: Path | None

    def record(self, params: dict[str, str], metrics: dict[str, str]) -> dict[str, Any]:
        """The row of a table whose columns are named so, by parameter and by metric."""
        return {
            "rank": self.rank,
            "cell": self.cell.id,
            "index": self.cell.index,
            "state": self.cell.state,
            **{column: self.cell.params.get(name) for name, column in params.items()},
            **{column: self.cell.metrics.get(name) for name, column in metrics.items()},
            "attempts": self.cell.attempts,
            "step": self.cell.step,
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "reason": self.cell.reason,
        }

    def document(self) -> dict[str, Any]:
        """All parameters and metrics, for a reader that is a program."""
        return {
            "rank": self.rank,
            "id": self.cell.id,
            "index": self.cell.index,
            "state": self.cell.state,
            "params": self.cell.params,
            "metrics": self.cell.metrics,
            "attempts": self.cell.attempts,
            "step": self.cell.step,
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "reason": self.cell.reason,
        }


@dataclass(frozen=True, slots=True)
class Results:
    """The ranked cells of a run, as a table.

    Attributes:
        rows: ranked cells, then those without a rank, then the failed ones.
        pending: how many cells were not started, and are not among the rows.
        params: column name by swept parameter.
        metrics: column name by metric, the objective's first.
    """

    run: RunFolder
    rows: list[Result]
    pending: int
    params: dict[str, str]
    metrics: dict[str, str]

    @property
    def objective(self) -> tuple[str, str] | None:
        """The metric that ranks, and ``min`` or ``max``."""
        return self.run.objective

    @property
    def best(self) -> Result | None:
        """The best cell, if any has a rank."""
        return self.rows[0] if self.rows and self.rows[0].rank == 1 else None

    @property
    def columns(self) -> list[str]:
        """All column names in order."""
        return [
            *("rank", "cell", "index", "state"),
            *self.params.values(),
            *self.metrics.values(),
            *("attempts", "step", "checkpoint", "reason"),
        ]

    def records(self) -> list[dict[str, Any]]:
        """The rows as dictionaries with :attr:`columns` as keys; absent values are ``None``."""
        return [row.record(self.params, self.metrics) for row in self.rows]

    def document(self) -> dict[str, Any]:
        """The run's path, and one object per row."""
        return {
            "run": str(self.run.path),
            "pending": self.pending,
            "cells": [row.document() for row in self.rows],
        }


def results(run: RunFolder, status: Status | None = None) -> Results:
    """The results of a run so far.

    Args:
        run: the run.
        status: its states, if they are known already.
    """
    status = status or collect(run)
    rows = [
        Result(rank, cell, checkpoint_of(run.cell_dir(cell.id)))
        for rank, cell in rank_cells(list(status.cells.values()), run.objective)
        if cell.state != "pending"
    ]
    found = {name for row in rows for name in row.cell.metrics}
    metrics = sorted(found, key=lambda name: (not _is_objective(name, run), name))
    params, columns = column_names(run.swept, metrics)
    return Results(
        run=run,
        rows=rows,
        pending=status.total - len(rows),
        params=params,
        metrics=columns,
    )


def column_names(
    params: Iterable[str], metrics: Iterable[str], *others: str
) -> tuple[dict[str, str], dict[str, str]]:
    """The columns of some parameters and of some metrics, all of different names.

    Args:
        params: names of parameters.
        metrics: names of metrics; trainings report a ``learning_rate``, for example.
        others: names of columns that the table has besides those that every table has.
    """
    taken = {*_FIXED_COLUMNS, *others}
    return _column_names(params, "param", taken), _column_names(metrics, "metric", taken)


def rank_cells(
    cells: list[CellState], objective: tuple[str, str] | None
) -> list[tuple[int | None, CellState]]:
    """Cells in the order of the results, with their ranks.

    A value that is no finite number is no result: a diverged cell is never the best one. Equal
    values keep the order of the cells. Values of a later rung of a halving come first: those of an
    earlier one are of a shorter training.
    """

    def value(cell: CellState) -> float | None:
        if objective is None or cell.state in ("failed", "pending"):
            return None
        number = cell.metrics.get(objective[0], math.nan)
        return number if _is_finite(number) else None

    sign = -1 if objective and objective[1] == "max" else 1
    ranked = sorted(
        (-(cell.rung or 0), sign * number, cell.index, cell)
        for cell in cells
        if (number := value(cell)) is not None
    )
    rest = sorted(
        (cell.state == "failed", cell.index, cell) for cell in cells if value(cell) is None
    )
    return [
        *((rank, cell) for rank, (*_, cell) in enumerate(ranked, start=1)),
        *((None, cell) for _, _, cell in rest),
    ]


def checkpoint_of(cell_dir: Path) -> Path | None:
    """The folder of the checkpoint that a cell's result is of, or else of its newest one."""
    for pointer in ("final", "latest"):
        try:
            name = (cell_dir / "checkpoints" / pointer).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            continue
        folder = cell_dir / "checkpoints" / name
        if name and "/" not in name and folder.is_dir():
            return folder
    return None


def _is_finite(number: float) -> bool:
    # An integer too large for a float is still a number that can be compared.
    return isinstance(number, int) or math.isfinite(number)


def _is_objective(name: str, run: RunFolder) -> bool:
    return run.objective is not None and run.objective[0] == name


def _column_names(names: Iterable[str], kind: str, taken: set[str]) -> dict[str, str]:
    """A column for each name; one whose name is taken gets its kind in front, until it is not."""
    columns = {}
    for name in names:
        column = name
        while column in taken:
            column = f"{kind}.{column}"
        taken.add(column)
        columns[name] = column
    return columns
