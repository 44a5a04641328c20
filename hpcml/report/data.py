"""Everything that a report shows of a run, gathered once from its folder."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hpcml
from hpcml.files import plain_errors
from hpcml.report.curves import PARSED_BYTES, Curve, finite, read_curves, size
from hpcml.report.speed import speed
from hpcml.report.timeline import Attempt, attempts, submitted
from hpcml.runs.answers import Sample, answers, samples
from hpcml.runs.folder import RunFolder, workers
from hpcml.runs.logs import cell_logs, tail
from hpcml.runs.results import column_names, rank_cells
from hpcml.runs.status import STATES, CellState, Status, with_pending
from hpcml.runs.tables import json_value

#: Points of all curves together: some 6 MB of text.
_POINTS = 400_000
_FEWEST, _MOST = 12, 1000
_FAILURES, _LOG_LINES, _LOG_BYTES = 100, 20, 4000
_INFERENCES, _SAMPLES, _SAMPLE = 20, 20, 2000
_TEXT = 200_000


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell as the report lists it. Times are seconds since the epoch."""

    index: int
    id: str
    rank: int | None
    state: str
    params: dict[str, Any]
    metrics: dict[str, float | None]
    attempts: int
    step: int | None
    total_steps: int | None
    speed: float | None
    started: float | None
    ended: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class Failure:
    """A cell that failed or was lost, and the end of what it wrote last."""

    cell: int
    state: str
    reason: str
    log: str
    lines: str


@dataclass(frozen=True, slots=True)
class Inference:
    """The answers of one cell.

    Attributes:
        proof: what ``merge.json`` says; None while the answers are not merged.
        speed: as :func:`hpcml.report.speed.speed` gives it.
    """

    cell: int
    proof: dict[str, Any] | None
    speed: list[tuple[float, float, float]]
    samples: list[Sample]


@dataclass(frozen=True, slots=True)
class Report:
    """All that is known of a run at one moment.

    Attributes:
        made: when it was gathered, in seconds since the epoch.
        objective: the metric that ranks the cells, and ``min`` or ``max``.
        titles: what columns are called, by swept parameter (``params``) and by metric
            (``metrics``): a metric that has the name of a parameter gets another one.
        counts: cells by state.
        cells: by index, also those that left nothing yet.
        curves: by metric, then by the cell's index.
        curved: how many cells have curves here; the best ones, where all would be too many.
        failed: how many failures there are, of which the first are listed.
    """

    name: str
    run_id: str
    kind: str
    path: str
    made: float
    version: str
    scheduler: str
    objective: tuple[str, str] | None
    halving: dict[str, Any] | None
    search: dict[str, Any] | None
    swept: list[str]
    titles: dict[str, dict[str, str]]
    states: list[str]
    counts: dict[str, int]
    cells: list[Cell]
    curves: dict[str, dict[int, Curve]]
    curved: int
    attempts: list[Attempt]
    failed: int
    failures: list[Failure]
    inferences: list[Inference]
    recipe: str
    site: str


def gather(run: RunFolder, status: Status) -> Report:
    """Read a run folder.

    Args:
        run: the run.
        status: the states of its cells.
    """
    states = list(with_pending(run, status))
    ranked = rank_cells(states, run.objective)
    ranks = {cell.index: rank for rank, cell in ranked}
    curves, curved = _curves(run, [cell for _, cell in ranked if cell.index in status.cells])
    made = submitted(run)
    found = sorted({name for cell in states for name in cell.metrics})
    params, metrics = column_names(run.swept, found, "time")
    known = list(status.cells.values())
    broken = [cell for cell in known if cell.state in ("failed", "lost")]
    return Report(
        name=run.name,
        run_id=run.run_id,
        kind=str(run.plan.get("kind")),
        path=str(run.path),
        made=time.time(),
        version=hpcml.__version__,
        scheduler=str(run.plan.get("scheduler")),
        objective=run.objective,
        halving=run.plan.get("halving"),
        search=run.plan.get("search"),
        swept=run.swept,
        titles={"params": params, "metrics": metrics},
        states=list(STATES),
        counts=status.counts(),
        cells=[_cell(cell, ranks[cell.index]) for cell in states],
        curves=curves,
        curved=curved,
        attempts=[
            _told(attempt, cell)
            for cell in known
            for attempt in attempts(run, cell.index, cell.id, made)
        ],
        failed=len(broken),
        failures=[_failure(run, cell) for cell in broken[:_FAILURES]],
        inferences=[_inference(run, cell) for cell in known[:_INFERENCES]]
        if run.plan.get("kind") == "infer"
        else [],
        recipe=_text(run.recipe_file),
        site=_text(run.site_file),
    )


def _cell(cell: CellState, rank: int | None) -> Cell:
    return Cell(
        index=cell.index,
        id=cell.id,
        rank=rank,
        state=cell.state,
        params=json_value(cell.params),
        metrics={name: finite(value) for name, value in cell.metrics.items()},
        attempts=cell.attempts,
        step=cell.step,
        total_steps=cell.total_steps,
        speed=finite(cell.tokens_per_second),
        started=cell.started,
        ended=cell.ended,
        reason=cell.reason or "",
    )


def _told(attempt: Attempt, cell: CellState) -> Attempt:
    """An attempt without an end runs, if the cell does; else it was lost."""
    if (
        attempt.cause == "lost"
        and cell.state == "running"
        and (attempt.worker is not None or attempt.number == cell.attempts)
    ):
        attempt.ended, attempt.cause = None, ""
    return attempt


def _curves(run: RunFolder, cells: list[CellState]) -> tuple[dict[str, dict[int, Curve]], int]:
    """The curves of cells, the best first; of as many cells as there is room for."""
    found: dict[str, dict[int, Curve]] = {}
    paths = {cell.index: run.cell_dir(cell.id) / "metrics.jsonl" for cell in cells}
    sizes = {index: bytes_ for index, path in paths.items() if (bytes_ := size(path))}
    if not sizes:
        return {}, 0
    # How many curves there will be is known from the first cell, closely enough.
    kinds = max(1, len(read_curves(paths[next(iter(sizes))], 2, 1 << 16)))
    points = min(_MOST, max(_FEWEST, _POINTS // (kinds * len(sizes))))
    shown = list(sizes)[: max(1, _POINTS // (kinds * points))]
    share = max(1, int(PARSED_BYTES / len(shown)))
    for index in shown:
        for name, curve in read_curves(paths[index], points, share).items():
            found.setdefault(name, {})[index] = curve
    return dict(sorted(found.items(), key=lambda item: _order(item[0], run))), len(shown)


def _order(metric: str, run: RunFolder) -> tuple[bool, bool, str]:
    objective = run.objective[0] if run.objective else None
    return metric != objective, "loss" not in metric, metric


def _failure(run: RunFolder, cell: CellState) -> Failure:
    folder = run.cell_dir(cell.id)
    places = [folder, *workers(folder)] if run.plan.get("kind") == "infer" else [folder]
    logs = [log for place in places for log in cell_logs(place) if size(log.path)]
    if not logs:
        return Failure(cell.index, cell.state, cell.reason or "", "", "")
    # What went wrong is said on stderr, if anything is.
    newest = max(log.attempt for log in logs)
    log = max((log for log in logs if log.attempt == newest), key=lambda log: log.stream == "err")
    text, _ = tail(log.path, _LOG_LINES)
    lines = text[-_LOG_BYTES:].decode("utf-8", "replace")
    return Failure(
        cell.index, cell.state, cell.reason or "", str(log.path.relative_to(run.path)), lines
    )


def _inference(run: RunFolder, cell: CellState) -> Inference:
    merged = answers(run, cell.id)
    shown = samples(merged.proof["output"], _SAMPLES) if merged else []
    return Inference(
        cell.index,
        json_value(merged.proof) if merged else None,
        speed(run.cell_dir(cell.id)),
        [Sample(sample.key, sample.text[:_SAMPLE], sample.failed) for sample in shown],
    )


def _text(path: Path) -> str:
    with plain_errors(f"read {path}"):
        return path.read_text(encoding="utf-8", errors="replace")[:_TEXT]
