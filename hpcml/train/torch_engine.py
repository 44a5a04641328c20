"""The engine ``torch``: one process, DistributedDataParallel, or FSDP2."""

from __future__ import annotations

from hpcml.train.config import TrainingJob
from hpcml.train.group import Group
from hpcml.train.stop import StopRequest
from hpcml.train.trainer import CellTrainer, check, train


def run(job: TrainingJob, stop: StopRequest) -> int:
    """Train one cell, from its newest checkpoint if there is one.

    Args:
        job: the cell.
        stop: asked between steps whether to save and leave.

    Returns:
        0 when the training is complete, 75 when it saved because it was asked to stop.

    Raises:
        TrainingError, DataError, CheckpointError: with a message for the user.
    """
    check(job)
    group = Group.join(job.config)
    kind = CellTrainer
    if job.config.fsdp and group.size > 1:
        from hpcml.train.fsdp import ShardedTrainer

        kind = ShardedTrainer
    code = train(job, group, stop, kind)
    group.leave()
    return code
