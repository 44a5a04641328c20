"""Several runs as one ranking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcml.errors import UserError
from hpcml.runs.folder import RunFolder
from hpcml.runs.results import Result, Results, column_names, rank_cells


@dataclass(frozen=True, slots=True)
class Comparison:
    """The cells of several runs, ranked together.

    Attributes:
        runs: the results of each run, by the name that the run has here.
        rows: the run's name and the cell; ranked cells of all runs, then those without a rank,
            then the failed ones.
        objective: the metric that ranks, and ``min`` or ``max``; the same in all runs.
        params: column name by parameter: those swept in any of the runs, and those that differ
            between them.
        metrics: column name by metric, the objective's first.
    """

    runs: dict[str, Results]
    rows: list[tuple[str, Result]]
    objective: tuple[str, str] | None
    params: dict[str, str]
    metrics: dict[str, str]

    @property
    def best(self) -> tuple[str, Result] | None:
        """The best cell of all and the name of its run, if any has a rank."""
        return self.rows[0] if self.rows and self.rows[0][1].rank == 1 else None

    @property
    def columns(self) -> list[str]:
        """All column names in order."""
        return [
            *("rank", "run", "cell", "index", "state"),
            *self.params.values(),
            *self.metrics.values(),
            *("attempts", "step", "checkpoint", "reason"),
        ]

    def records(self) -> list[dict[str, Any]]:
        """The rows as dictionaries with :attr:`columns` as keys; absent values are ``None``."""
        return [
            {"run": name, **result.record(self.params, self.metrics)} for name, result in self.rows
        ]

    def document(self) -> dict[str, Any]:
        """The runs with their paths, and one object per row."""
        return {
            "runs": [
                {"name": name, "run": str(found.run.path), "pending": found.pending}
                for name, found in self.runs.items()
            ],
            "cells": [{"run": name, **result.document()} for name, result in self.rows],
        }


def compare(found: Sequence[Results]) -> Comparison:
    """Rank the cells of several runs together.

    Equal values keep the order of the runs. With halving, a cell that stopped at an earlier rung
    comes after all that were, or are, in a last one: its training is shorter.

    Args:
        found: the results of each run.

    Raises:
        UserError: the runs have different objectives.
    """
    names = _names([results.run for results in found])
    runs = dict(zip(names, found, strict=True))
    objective = _objective(runs)
    params = _params(found)
    results = [(name, row) for name, each in runs.items() for row in _with_defaults(each, params)]
    # A number of its own for each cell of all runs; and rungs counted from the last one.
    cells = [
        replace(result.cell, index=place, rung=_rungs_to_go(runs[name].run, result))
        for place, (name, result) in enumerate(results)
    ]
    rows = []
    for rank, cell in rank_cells(cells, objective):
        name, result = results[cell.index]
        rows.append((name, replace(result, rank=rank)))
    first = objective[0] if objective else None
    metrics = {metric for each in found for metric in each.metrics}
    columns = column_names(params, sorted(metrics, key=lambda it: (it != first, it)), "run")
    return Comparison(runs, rows, objective, *columns)


def _names(runs: Sequence[RunFolder]) -> list[str]:
    """What tells the runs apart: their recipes' names, or their ids too, or their paths."""
    for names in ([run.name for run in runs], [f"{run.name}/{run.run_id}" for run in runs]):
        if len(set(names)) == len(runs):
            return names
    return [str(run.path) for run in runs]


def _objective(runs: dict[str, Results]) -> tuple[str, str] | None:
    objectives = {name: each.run.objective for name, each in runs.items()}
    if len(set(objectives.values())) > 1:
        told = "; ".join(
            f"{name} by {f'{found[0]} ({found[1]})' if found else 'nothing'}"
            for name, found in objectives.items()
        )
        raise UserError(
            f"these runs are ranked by different objectives: {told}; "
            "compare runs whose recipes have the same metric and mode"
        )
    return next(iter(objectives.values()), None)


def _params(found: Sequence[Results]) -> list[str]:
    """Parameters that are swept in any of the runs, then those that are fixed to other values."""
    swept = list(dict.fromkeys(name for each in found for name in each.run.swept))
    first = [each.run.cell(0) for each in found if len(each.run)]
    given = dict.fromkeys(name for cell in first for name in cell["params"])
    fixed = [name for name in given if name not in swept]
    return swept + [
        name
        for name in fixed
        if any(_value(cell, name) != _value(first[0], name) for cell in first)
    ]


def _with_defaults(each: Results, params: list[str]) -> list[Result]:
    """The rows with what their recipe leaves to the default where another run gives a value."""
    if all(name in row.cell.params for row in each.rows for name in params):
        return each.rows
    cells = each.run.read_cells(row.cell.index for row in each.rows)
    return [
        replace(row, cell=replace(row.cell, params={**row.cell.params, **_values(cell, params)}))
        for row, cell in zip(each.rows, cells, strict=True)
    ]


def _values(cell: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := _value(cell, name)) is not None}


def _value(cell: dict[str, Any], name: str) -> Any:
    """A parameter of a cell as it was given, or else the default that its training has."""
    parameters = cell["payload"].get("parameters") or {}
    return cell["params"].get(name, parameters.get(name))


def _rungs_to_go(run: RunFolder, row: Result) -> int:
    """The rungs that a cell has not begun, below zero; 0 without halving, and in the last one."""
    halving = run.plan.get("halving")
    return (row.cell.rung or 0) - len(halving["steps"]) if halving else 0
