"""The main plots of a report as one PNG."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

from hpcml.errors import UserError
from hpcml.report.data import Cell, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CURVES, _PARAMETERS, _ROWS = 10, 6, 60
# As in the page: colours that people with any kind of colour vision can tell apart.
_STATES = {
    "done": "#00805d",
    "running": "#0072b2",
    "pending": "#8a929c",
    "stopped": "#c27a00",
    "lost": "#b0528a",
    "failed": "#c44900",
    "dropped": "#6f6494",
}
_CAUSES = {"done": "done", "rung": "done", "": "running", "stopped": "stopped", "lost": "lost"}


def picture(report: Report) -> bytes:
    """Curves, the objective against swept parameters, and the timeline.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "--png needs matplotlib; install it by: pip install 'hpcml[report]'"
        ) from None
    metric = _metric(report)
    known = [cell for cell in report.cells if metric and cell.metrics.get(metric) is not None]
    names = report.swept[:_PARAMETERS] if known else []
    kinds = ["curves"] * bool(report.curves) + names + ["timeline"] * bool(report.attempts)
    rows = max(1, -(-len(kinds) // 2))
    figure = Figure(figsize=(13, 4 * rows + 0.6), layout="constrained")
    counts = ", ".join(f"{count} {state}" for state, count in report.counts.items())
    title = f"{report.name} {report.run_id}: {counts}"
    figure.suptitle(title, parse_math=False)
    panels = list(figure.subplots(rows, 2, squeeze=False).flat)
    for panel in panels[len(kinds) :]:
        panel.axis("off")
    places = iter(panels)
    if report.curves:
        _curves(next(places), report)
    for name in names:
        _parameter(next(places), report, name, str(metric), known)
    if report.attempts:
        _timeline(next(places), report)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()


def _metric(report: Report) -> str | None:
    if report.objective is not None:
        return report.objective[0]
    return next((name for cell in report.cells for name in sorted(cell.metrics)), None)


def _label(axis: Axes, x: str, y: str) -> None:
    axis.set_xlabel(x, parse_math=False)
    axis.set_ylabel(y, parse_math=False)
    axis.grid(alpha=0.3)


def _curves(axis: Axes, report: Report) -> None:
    metric, curves = next(iter(report.curves.items()))
    cells = sorted(
        (cell for cell in report.cells if cell.index in curves),
        key=lambda cell: (cell.rank is None, cell.rank, cell.index),
    )[:_CURVES]
    for cell in cells:
        curve = curves[cell.index]
        values = [float("nan") if value is None else value for value in curve.values]
        mark = "o" if len(values) == 1 else ""
        axis.plot(curve.steps, values, marker=mark, linewidth=1.2, label=f"cell {cell.index}")
    axis.legend(fontsize="small")
    _label(axis, "step", metric)


def _parameter(axis: Axes, report: Report, name: str, metric: str, cells: list[Cell]) -> None:
    found = [cell for cell in cells if name in cell.params]
    values: list[Any] = [cell.params[name] for cell in found]
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        if values and min(values) > 0 and max(values) / min(values) >= 30:
            axis.set_xscale("log")
    else:
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        order = {text: place for place, text in enumerate(sorted(set(texts)))}
        values = [order[text] for text in texts]
        shown = [text if len(text) <= 16 else f"{text[:15]}…" for text in order]
        axis.set_xticks(range(len(shown)), shown, parse_math=False)
    metrics: list[Any] = [cell.metrics[metric] for cell in found]
    axis.scatter(
        values,
        metrics,
        s=14,
        c=[_STATES[cell.state] for cell in found],
    )
    _label(axis, report.titles["params"][name], report.titles["metrics"][metric])


def _timeline(axis: Axes, report: Report) -> None:
    first = min(attempt.queued or attempt.started for attempt in report.attempts)
    rows: dict[tuple[int, int | None], int] = {}
    for attempt in sorted(report.attempts, key=lambda attempt: attempt.started):
        row = rows.setdefault((attempt.cell, attempt.worker), len(rows))
        if row >= _ROWS:
            continue
        begin = attempt.started - first
        if attempt.queued is not None:
            queued = attempt.queued - first
            axis.barh(row, begin - queued, left=queued, height=0.25, color=_STATES["pending"])
        length = (attempt.ended or report.made) - attempt.started
        colour = _STATES[_CAUSES.get(attempt.cause, "failed")]
        axis.barh(row, length, left=begin, height=0.8, color=colour)
        for start, end in attempt.saved:
            axis.barh(row, end - start, left=start - first, height=0.4, color="black")
    shown = list(rows)[:_ROWS]
    labels = [f"{cell}" if worker is None else f"{cell}, {worker}" for cell, worker in shown]
    axis.set_yticks(range(len(shown)), labels, fontsize=5 if len(shown) > 20 else 8)
    axis.invert_yaxis()
    more = "" if len(rows) <= _ROWS else f", the first {_ROWS} of {len(rows)}"
    _label(axis, "seconds since the beginning", f"cells{more}")
