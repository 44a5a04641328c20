"""When a training saves."""

from __future__ import annotations

from hpcml.interval import automatic_interval, optimal_interval

FIRST = 60.0
"""Seconds to the first checkpoint, which shows how long saving takes, and that it works."""


class CheckpointClock:
    """Says when the next checkpoint is due.

    Args:
        fixed: seconds between checkpoints, or None to derive them from how long saving takes.
        mtbf: mean seconds between two failures of the job.
        save: how long saving took in an earlier attempt, or None.
        now: seconds of a clock.
    """

    def __init__(self, fixed: float | None, mtbf: float, save: float | None, now: float) -> None:
        self._fixed = fixed
        self._mtbf = mtbf
        self._save = save
        self._last = now

    @property
    def interval(self) -> float:
        """Seconds from one checkpoint to the next."""
        if self._fixed is not None:
            return self._fixed
        if self._save is None:
            return FIRST
        return automatic_interval(self._save, self._mtbf)

    def due(self, now: float) -> bool:
        """Whether it is time."""
        return now - self._last >= self.interval

    def saved(self, save: float, now: float) -> str | None:
        """Note that a checkpoint was written.

        Args:
            save: how long it held up the training.
            now: seconds of the same clock as before.

        Returns:
            A line for the log where the interval has changed by much.
        """
        before = self.interval if self._save is not None else None
        self._save, self._last = save, now
        after = self.interval
        if self._fixed is not None or (before is not None and 0.5 < after / before < 2):
            return None
        optimum = optimal_interval(save, self._mtbf)
        limited = f", but at most {after:.0f} s, which costs little" if after < optimum else ""
        return (
            f"checkpoints every {after:.0f} s: saving took {save:.3g} s, this job fails every "
            f"{self._mtbf / 3600:.0f} h, so sqrt(2 * save * between failures) and Daly's terms "
            f"give {optimum:.0f} s{limited}"
        )
