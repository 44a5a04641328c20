"""How long a training goes on between two checkpoints."""

from __future__ import annotations

import math

FIRST = 60.0
"""Seconds to the first checkpoint, which shows how long saving takes, and that it works."""

_LONGEST = 1800.0
_SHARE = 0.01


def optimal_interval(save: float, mtbf: float) -> float:
    """The time between two checkpoints that loses the least.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps"
    (2006), equation 37; its first term is J. W. Young's (1974), sqrt(2·save·mtbf).

    Args:
        save: seconds that saving holds up the training.
        mtbf: mean seconds between two failures of the job.

    Returns:
        Seconds from the end of one checkpoint to the beginning of the next.
    """
    if save >= 2 * mtbf:
        return mtbf
    ratio = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


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
        # Nodes are not all that fails. Where it costs next to nothing, save more often.
        limit = max(_LONGEST, self._save / _SHARE)
        return min(optimal_interval(self._save, self._mtbf), limit)

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
