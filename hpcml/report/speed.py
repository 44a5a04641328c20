"""The speed of an inference over time."""

from __future__ import annotations

from pathlib import Path

from hpcml.runs.events import JsonLines
from hpcml.runs.folder import workers

_POINTS = 300


def speed(cell_dir: Path) -> list[tuple[float, float, float]]:
    """Tokens and rows of answers per second of all workers of a cell together, over time.

    What a worker counted between two of its lines is spread evenly over the time between them.

    Returns:
        Of each span of equal length: its middle in seconds since the epoch, tokens and rows per
        second.
    """
    parts = [part for folder in workers(cell_dir) for part in _parts(folder / "metrics.jsonl")]
    if not parts:
        return []
    begin, end = min(part[0] for part in parts), max(part[1] for part in parts)
    shortest = max(min(part[1] - part[0] for part in parts), 1e-3)
    count = max(1, min(_POINTS, int((end - begin) / max(shortest, 2.0))))
    width = max((end - begin) / count, 1e-3)
    sums = [[0.0, 0.0] for _ in range(count)]
    for start, stop, tokens, rows in parts:
        first = min(count - 1, int((start - begin) / width))
        last = min(count - 1, int((stop - begin) / width))
        for span in range(first, last + 1):
            low, high = begin + span * width, begin + (span + 1) * width
            share = (min(high, stop) - max(low, start)) / max(stop - start, 1e-9)
            sums[span][0] += tokens * max(0.0, share)
            sums[span][1] += rows * max(0.0, share)
    return [
        (begin + (span + 0.5) * width, tokens / width, rows / width)
        for span, (tokens, rows) in enumerate(sums)
    ]


def _parts(path: Path) -> list[tuple[float, float, float, float]]:
    """Begin, end, tokens and rows of what a worker counted from one line to the next."""
    found = []
    before, tokens, rows = 0.0, 0.0, 0.0
    for record in JsonLines(path).read():
        try:
            start = max(before, float(record["begun_at"]))
            before = float(record["reported_at"])
            done = float(record["output_tokens"]), float(record["step"])
        except (KeyError, TypeError, ValueError):
            continue
        found.append((min(start, before), before, done[0] - tokens, done[1] - rows))
        tokens, rows = done
    return found
