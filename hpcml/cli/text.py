"""How values, times and cells read in the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcml.runs.status import CellState

_VALUE = 100
_LINE = 1000


def printable(item: str) -> str:
    """A text in which everything that a terminal would obey is written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in item)


def short(item: str, longest: int) -> str:
    """A text without its middle where it is too long."""
    if len(item) <= longest:
        return item
    return f"{item[: longest * 2 // 3]} … {item[len(item) - longest // 3 :]}"


def message(item: str) -> str:
    """A message for the terminal: lines of a length that people read, with no odd characters."""
    return "\n".join(printable(short(line, _LINE)) for line in item.split("\n"))


def one_line(reason: str | None) -> str:
    """A reason on one line."""
    return short(" ".join(printable(part) for part in (reason or "").split()), _LINE)


def value(item: Any) -> str:
    """A parameter's value on one line, with nothing in it that a terminal would obey."""
    if isinstance(item, str) and item.isprintable():
        return short(item, _VALUE)
    if isinstance(item, float):
        return f"{item:.6g}"
    readable = json.dumps(item, ensure_ascii=False, default=str)
    return short(readable if readable.isprintable() else json.dumps(item, default=str), _VALUE)


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


def size(count: float) -> str:
    """Bytes in the unit that is easy to read: ``700 B``, ``2.1 KiB``, ``45 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.1f} {unit}" if unit != "B" and count < 10 else f"{count:.0f} {unit}"


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
        f"{printable(name)}={value(cell.params[name])}" for name in swept if name in cell.params
    )


def cell_name(cell: CellState, swept: list[str]) -> str:
    """A cell in a sentence: ``cell 3 (learning_rate=0.001, seed=1)``."""
    what = params(cell, swept)
    return f"cell {cell.index} ({what})" if what else f"cell {cell.index}"


def counts(states: Mapping[str, int], total: int) -> str:
    """Cells by state: ``6 cells: 2 running, 4 done``."""
    listed = ", ".join(f"{count} {state}" for state, count in states.items())
    return f"{total} {'cell' if total == 1 else 'cells'}: {listed}"
