"""How values, times and cells read in the terminal."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcml.runs.folder import RunFolder, default_root
from hpcml.runs.status import CellState


def value(item: Any) -> str:
    """A parameter's value on one line, with nothing in it that a terminal would obey."""
    if isinstance(item, str) and item.isprintable():
        return item
    if isinstance(item, float):
        return f"{item:.6g}"
    readable = json.dumps(item, ensure_ascii=False, default=str)
    return readable if readable.isprintable() else json.dumps(item, default=str)


def number(item: float | None) -> str:
    """A metric with four significant digits."""
    if item is None:
        return ""
    if isinstance(item, int):
        return str(item)
    if not item or not math.isfinite(item):
        return f"{item:g}"
    if 1e-3 <= abs(item) < 1000:
        return f"{item:#.4g}"
    return f"{item:.0f}" if 1000 <= abs(item) < 1e6 else f"{item:.3e}"


def speed(item: float | None) -> str:
    """Tokens per second, with thousands apart."""
    return "" if item is None or not math.isfinite(item) else f"{item:,.0f}"


def duration(seconds: float | None) -> str:
    """A time span in its two largest units: ``40s``, ``3m 05s``, ``2h 10m``, ``3d 04h``."""
    if seconds is None:
        return ""
    left = max(0, round(seconds))
    for size, unit, smaller, below in ((86400, "d", 3600, "h"), (3600, "h", 60, "m")):
        if left >= size:
            return f"{left // size}{unit} {left % size // smaller:02}{below}"
    return f"{left // 60}m {left % 60:02}s" if left >= 60 else f"{left}s"


def steps(cell: CellState) -> str:
    """How far a cell is: ``40/200``."""
    if cell.step is None:
        return ""
    return f"{cell.step}/{cell.total_steps}" if cell.total_steps else str(cell.step)


def params(cell: CellState, swept: list[str], separator: str = ", ") -> str:
    """The swept parameters: what tells this cell from the others."""
    return separator.join(
        f"{name}={value(cell.params[name])}" for name in swept if name in cell.params
    )


def cell_name(cell: CellState, swept: list[str]) -> str:
    """A cell in a sentence: ``cell 3 (learning_rate=0.001, seed=1)``."""
    what = params(cell, swept)
    return f"cell {cell.index} ({what})" if what else f"cell {cell.index}"


def counts(states: Mapping[str, int], total: int) -> str:
    """Cells by state: ``6 cells: 2 running, 4 done``."""
    listed = ", ".join(f"{count} {state}" for state, count in states.items())
    return f"{total} {'cell' if total == 1 else 'cells'}: {listed}"


def reference(run: RunFolder) -> str:
    """What to type in this folder to name a run."""
    if run.path.parent.parent == default_root():
        return shlex.quote(f"{run.name}/{run.run_id}")
    here = Path.cwd()
    below = run.path.relative_to(here) if run.path.is_relative_to(here) else run.path
    return shlex.quote(str(below))
