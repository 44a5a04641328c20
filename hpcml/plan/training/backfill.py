"""Checkpoints: how large, how often; and what a training makes of jobs of a limited length."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpcml.plan.training.layout import Layout, Training

#: Seconds from the start of a job to its first step, without reading the checkpoint: imports, the
#: meeting of the ranks, opening the data. An assumption.
STARTUP = 120


def checkpoint_bytes(training: Training, layout: Layout) -> int:
    """Bytes of one checkpoint: weights and the optimizer's states, of all ranks together.

    torch writes 32 bits for each, and of a model with added weights only these; DeepSpeed and
    Megatron write the weights in 16 bits, where they have them so, and a copy in 32.
    """
    states = 4 * training.optimizer_values * training.learning
    if layout.engine == "torch":
        added = any(part.kind == "added" for part in training.parts)
        return 4 * (training.learning if added else training.parameters) + states
    if layout.engine == "megatron" or training.half:
        element = 2 if training.half else 4
        return element * training.parameters + 4 * training.learning + states
    master = 4 * training.learning if layout.zero_stage else 0
    return 4 * training.parameters + master + states


@dataclass(frozen=True)
class Segments:
    """A training in jobs of a limited length.

    Attributes:
        length: seconds of a job.
        links: jobs; None where a job is too short to get anything done.
        lost: seconds of each job that don't train: start, restoring, saves, and the rest of the
            signal's lead.
        useful: the part of the jobs' time that trains, with what failures are expected to cost.
        total: seconds of all jobs together, without the time in queues; None as ``links``.
    """

    length: int
    links: int | None
    lost: float
    useful: float
    total: float | None


@dataclass(frozen=True)
class Costs:
    """Seconds that checkpoints and failures cost.

    Attributes:
        save, restore: of one checkpoint.
        best: training between two checkpoints that loses the least.
        interval: training between two checkpoints as the recipe has it.
        mtbf: mean time between failures of the job.
        lead: between the signal and the end of a job.
        startup: from the start of a job to its first step.
    """

    save: float
    restore: float
    best: float
    interval: float
    mtbf: float
    lead: int
    startup: float = STARTUP


def segments(length: int, training: float, costs: Costs) -> Segments:
    """A training of ``training`` seconds in jobs of ``length`` seconds.

    Each job starts, restores, trains with a save after each interval, and saves when the signal
    comes. It leaves as soon as that is done, so that it does not take the rest of the lead. Where
    the lead is shorter than a save, the last save fails and the work since the one before is
    lost, half an interval on average. A failure costs half an interval, a start and a restore,
    and comes once in ``costs.mtbf``.
    """
    begin = costs.startup + costs.restore
    room = length - costs.lead - begin
    in_time = costs.lead >= costs.save
    # In the last interval the save at the signal takes the place of the periodic one.
    saves = max(0, math.ceil(room / (costs.interval + costs.save)) - 1)
    trains = room - saves * costs.save
    occupied = length - costs.lead + min(costs.save, costs.lead)
    if not in_time:
        trains = saves * costs.interval
    if trains <= 0:
        return Segments(length, None, length, 0.0, None)
    failing = (costs.interval / 2 + begin) / costs.mtbf
    useful = trains / occupied * max(0.0, 1 - failing)
    if useful == 0:
        return Segments(length, None, occupied - trains, 0.0, None)
    links = math.ceil(training / (useful * occupied))
    if links == 1:
        # A job that reaches the end of the training neither waits for the signal nor restores.
        whole = costs.startup + training * (1 + costs.save / costs.interval) / (1 - failing)
        return Segments(length, 1, whole - training, training / whole, whole)
    return Segments(length, links, occupied - trains, useful, training / useful)
