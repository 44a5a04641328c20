"""The report as a Markdown text, for a message or a ticket."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import Any

from hpcml.report.data import Report

_BEST, _REASONS, _LONGEST = 10, 10, 200
_MARKS = re.compile(r"([\\`*_{}\[\]<>()#+!|~&$@])")


def markdown(report: Report) -> str:
    """Counts by state, the best cells, failures by reason, and what an inference answered."""
    parts = [
        f"# {_text(report.name)} {_text(report.run_id)}",
        _about(report),
        _table(("state", "cells"), report.counts.items()),
        *_best(report),
        *_answers(report),
        *_failures(report),
    ]
    return "\n\n".join(parts) + "\n"


def _about(report: Report) -> str:
    made = datetime.fromtimestamp(report.made, timezone.utc)
    return (
        f"{len(report.cells)} cells, {_text(report.kind)} on {_text(report.scheduler)}, as of "
        f"{made:%Y-%m-%d %H:%M} UTC, in {_text(report.path)}"
    )


def _best(report: Report) -> list[str]:
    ranks = {cell.rank: cell for cell in report.cells if cell.rank is not None}
    ranked = sorted(ranks.items())[:_BEST]
    if report.objective is None or not ranked:
        return []
    metric, mode = report.objective
    rows = [
        (
            *(rank, cell.index, cell.state),
            *(cell.params.get(name) for name in report.swept),
            *(cell.metrics.get(metric), cell.step, cell.attempts),
        )
        for rank, cell in ranked
    ]
    what = "smallest" if mode == "min" else "largest"
    params, metrics = report.titles["params"].values(), report.titles["metrics"]
    head = ("rank", "cell", "state", *params, metrics[metric], "step", "attempts")
    return [f"## Best cells by the {what} {_text(metric)}", _table(head, rows)]


def _answers(report: Report) -> list[str]:
    names = ("rows_in", "rows_out", "answered", "failed", "prompt_tokens", "output_tokens")
    rows = [
        (found.cell, *(found.proof.get(name) for name in names))
        for found in report.inferences
        if found.proof is not None
    ]
    head = ("cell", *(name.replace("_", " ") for name in names))
    return ["## Answers", _table(head, rows)] if rows else []


def _failures(report: Report) -> list[str]:
    cells: dict[str, list[int]] = defaultdict(list)
    for failure in report.failures:
        cells[failure.reason or "no reason is known"].append(failure.cell)
    if not cells:
        return []
    most = sorted(cells.items(), key=lambda item: -len(item[1]))[:_REASONS]
    rows = [(len(found), " ".join(map(str, found[:_BEST])), reason) for reason, found in most]
    title = f"## Failures: {report.failed}"
    return [title, _table(("cells", "the first of them", "reason"), rows)]


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        f"| {' | '.join('---' if item == '---' else _text(item) for item in line)} |"
        for line in lines
    )


def _text(item: Any) -> str:
    """A value on one line, with nothing in it that Markdown would obey."""
    if item is None:
        return ""
    if isinstance(item, float):
        return f"{item:.4g}"
    text = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    line = line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"
    return _MARKS.sub(r"\\\1", line)
