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
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._side: dist.ProcessGroup | None = None
        if size > 1:
            # Rank 0 may write a large checkpoint while the others wait.
            self._side = dist.new_group(backend="gloo", timeout=datetime.timedelta(hours=4))

    @classmethod
    def join(cls, config: TrainingConfig) -> Group:
        """Meet the other ranks, as the environment describes them."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        cuda = torch.cuda.is_available()
        if size == 1 and not cuda:
            # Otherwise accelerate would look for ranks.
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
                os.environ.pop(name, None)
            return cls(0, 1)
        if cuda and torch.cuda.device_count() == 1:
            # The scheduler shows each rank its own GPU only, and its number there is 0.
            os.environ["LOCAL_RANK"] = "0"
        if not dist.is_initialized():
            dist.init_process_group(config.ddp_backend or ("nccl" if cuda else "gloo"))
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def first(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether any rank says so."""
        if self._side is None:
            return flags
        answer = torch.tensor([int(flag) for flag in flags])
        dist.all_reduce(answer, dist.ReduceOp.MAX, group=self._side)
        return tuple(bool(value) for value in answer.tolist())

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks. Any shape; on the CPU."""
        values = values.cpu()
        if self._side is not None:
            dist.all_reduce(values, group=self._side)
        return values

    def share(self, value: Any) -> Any:
        """What rank 0 says."""
        if self._side is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._side)
        return box[0]

    def wait(self) -> None:
        """Wait until all are here."""
        if self._side is not None:
            dist.barrier(group=self._side)

    def leave(self) -> None:
        """Part from the other ranks."""
        if dist.is_initialized():
            dist.destroy_process_group()
