"""The ranks of a training, and how they agree on small things."""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist

from hpcml.train.config import TrainingConfig


class Group:
    """The ranks of a training, and how they agree on small things.

    They do so over gloo, on the CPU, so that no question waits for a GPU's queue.

    Attributes:
        rank, size: this rank, and how many there are.
        side: the group of processes that talks over gloo, or None for a single one.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.side: dist.ProcessGroup | None = None
        if size > 1:
            # Rank 0 may write a large checkpoint while the others wait.
            self.side = dist.new_group(backend="gloo", timeout=datetime.timedelta(hours=4))

    @classmethod
    def join(cls, config: TrainingConfig, alone: bool = False) -> Group:
        """Meet the other ranks, as the environment describes them.

        Args:
            config: the backend.
            alone: whether a single process has to be a group as well.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        cuda = torch.cuda.is_available()
        backend = config.ddp_backend or ("nccl" if cuda else "gloo")
        if size == 1 and alone:
            os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
            if not dist.is_initialized():
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            return cls(0, 1)
        if size == 1 and not cuda:
            # Otherwise accelerate would look for ranks.
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
                os.environ.pop(name, None)
            return cls(0, 1)
        if cuda and torch.cuda.device_count() == 1:
            # The scheduler shows each rank its own GPU only, and its number there is 0.
            os.environ["LOCAL_RANK"] = "0"
        if not dist.is_initialized():
            dist.init_process_group(backend)
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def first(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether any rank says so."""
        if self.side is None:
            return flags
        answer = torch.tensor([int(flag) for flag in flags])
        dist.all_reduce(answer, dist.ReduceOp.MAX, group=self.side)
        return tuple(bool(value) for value in answer.tolist())

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks. Any shape; on the CPU."""
        values = values.cpu()
        if self.side is not None:
            dist.all_reduce(values, group=self.side)
        return values

    def share(self, value: Any) -> Any:
        """What rank 0 says."""
        if self.side is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.side)
        return box[0]

    def wait(self) -> None:
        """Wait until all are here."""
        if self.side is not None:
            dist.barrier(group=self.side)

    def leave(self) -> None:
        """Part from the other ranks."""
        if dist.is_initialized():
            dist.destroy_process_group()
