"""How long a training should go on between two checkpoints.

A plan says it before the training begins, and the training does it, so this is beside the packages
and needs nothing.
"""

from __future__ import annotations

import math

# Seconds: nodes are not all that fails, so that no training goes on longer without a checkpoint,
# unless saving would then take more than this part of the time.
_LONGEST, _SHARE = 1800.0, 0.01


def optimal_interval(save: float, mtbf: float) -> float:
    """The time between two checkpoints that loses the least to saving and to failures.

    J. W. Young, "A first order approximation to the optimum checkpoint interval" (1974), has
    sqrt(2·save·mtbf). J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
    restart dumps" (2006), equation 37, has the terms after it, which matter where saves are long.

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


def automatic_interval(save: float, mtbf: float) -> float:
    """Seconds between two checkpoints with ``checkpoint.interval: auto``.

    That is :func:`optimal_interval`, or half an hour where that is less and costs next to nothing.
    """
    return min(optimal_interval(save, mtbf), max(_LONGEST, save / _SHARE))
