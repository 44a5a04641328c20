"""What a worker tells about its progress."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from hpcml.infer.engine import Answer
from hpcml.worker import events
from hpcml.worker.metrics import append_line

_REPORT_SECONDS = 2.0
_NAMES = ("step", "failed", "prompt_tokens", "output_tokens")


class Progress:
    """Counts rows and tokens, over all attempts of this worker, and reports them.

    Args:
        path: the file for metrics lines, or None.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._counts = dict.fromkeys(_NAMES, 0)
        if path is not None:
            for record in events.read(os.fspath(path)):
                self._counts.update({name: record[name] for name in _NAMES if name in record})
        self._total = 0
        self._begun: float | None = None
        self._first = dict(self._counts)
        self._reported: dict[str, int] | None = None

    def begin(self, total: int) -> None:
        """Say how many rows all workers together have to answer."""
        self._total = total

    def add(self, answers: Sequence[Answer]) -> None:
        """Count answers that are new."""
        if self._begun is None:
            # The first ones came after the engine had begun: speed is measured from here.
            self._begun = time.monotonic() - max((a.seconds or 0.0 for a in answers), default=0.0)
        self._counts["step"] += len(answers)
        for answer in answers:
            self._counts["failed"] += answer.cause is not None
            self._counts["prompt_tokens"] += answer.prompt_tokens or 0
            self._counts["output_tokens"] += sum(answer.output_tokens or ())

    def report(self) -> None:
        """Append a metrics line, if there is anything new."""
        if self._path is None or self._counts == self._reported or self._begun is None:
            return
        self._reported = dict(self._counts)
        seconds = max(time.monotonic() - self._begun, 1e-3)
        speeds = {
            name: (self._counts[count] - self._first[count]) / seconds
            for name, count in (("rows_per_second", "step"), ("tokens_per_second", "output_tokens"))
        }
        # When it was, for whoever draws the speed over time.
        now = time.time()
        times = {"begun_at": now - seconds, "reported_at": now}
        append_line(self._path, {**self._counts, "total_steps": self._total, **speeds, **times})
