"""Checkpoints of the model and the optimizer: megatron-core's distributed ones.

Each process writes its part in the background, from a copy of its memory, while the training goes
on; a process of another layout reads from them just what it needs.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import queue
import signal
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil  # noqa: F401  megatron-core needs it to save, and without it waits for ever
import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    apply_factories,
)
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import (
    AsyncRequest,
    TemporalAsyncCaller,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from hpcml.train.checkpoint import CheckpointError, write_digests
from hpcml.train.config import TrainingConfig
from hpcml.train.megatron import optimizer as optimizers

_FORMAT = {
    # Independent of how the optimizer is shared, so that any layout can read it.
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


class Checkpointer:
    """Writes and reads checkpoints of what the processes hold together.

    Args:
        parts: of the model.
        optimizer: of the parts.
        config: of the optimizer.
        rank, processes: which of how many processes this is.
    """

    def __init__(
        self,
        parts: list[DistributedDataParallel],
        optimizer: ChainedOptimizer,
        config: TrainingConfig,
        rank: int,
        processes: int,
    ) -> None:
        self._parts = parts
        self._optimizer = optimizer
        self._config = config
        self._rank = rank
        self._processes = processes
        # Who writes what is found out once: it is the same each time.
        self._strategy = FullyParallelSaveStrategyWrapper(
            TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1, cached_metadata=True),
            _copies(),
            do_cache_distribution=True,
        )
        self._validated = False
        self._writing: tuple[AsyncRequest, TemporalAsyncCaller] | None = None

    # -- writing --------------------------------------------------------------------------------

    def begin(self, folder: Path) -> None:
        """Begin to write into an empty folder; all processes call it.

        What is written is the state of now. One writing at a time.
        """
        assert self._writing is None
        # Otherwise megatron-core starts a server for the answers, which a kill would leave behind.
        filesystem_async._results_queue = _Answer()
        weights = self._weights()
        state = {
            **weights,
            "optimizer": optimizers.state_to_save(self._optimizer, weights),
            "random": self._object("random", random_state()),
        }
        apply_factories(state)
        for each in nested_values(state):
            if isinstance(each, ShardedTensor) and each.data.device.type == "cpu":
                each.data = alone(each.data)
        request = dist_checkpointing.save(
            state,
            str(folder),
            sharded_strategy=self._strategy,
            validate_access_integrity=not self._validated,
            async_sharded_save=True,
        )
        self._validated = True
        if request.async_fn is not None:
            write = partial(_write, os.getpid(), request.async_fn, folder, self._rank)
            request = request._replace(async_fn=write)
        caller = TemporalAsyncCaller()
        caller.schedule_async_call(request)
        self._writing = request, caller

    @property
    def busy(self) -> bool:
        """Whether this process is still writing."""
        if self._writing is None:
            return False
        process = self._writing[1].process
        return process is not None and process.is_alive()

    def finish(self) -> None:
        """Wait until all have written, and complete the checkpoint; all processes call it.

        Raises:
            CheckpointError: one of them could not.
        """
        assert self._writing is not None
        request, caller = self._writing
        self._writing = None
        caller.close()
        try:
            for finalize in request.finalize_fns:
                finalize()
        except CheckpointException as error:
            raise _failure(error) from error

    # -- reading --------------------------------------------------------------------------------

    def load(self, folder: Path, same_layout: bool) -> None:
        """Take up a checkpoint; all processes call it.

        Args:
            folder: where it lies.
            same_layout: whether it was written by processes that share the model as these do; if
                not, the generators of random numbers are left alone.
        """
        optimizers.prepare_to_load(self._optimizer)
        weights = self._weights()
        state = {
            **weights,
            "optimizer": self._optimizer.sharded_state_dict(
                weights, is_loading=True, metadata={**_FORMAT}
            ),
        }
        if same_layout:
            state["random"] = self._object("random", None)
        loaded = self._read(state, folder)
        self._set_weights(loaded)
        with torch.no_grad():
            self._optimizer.load_state_dict(loaded["optimizer"])
        optimizers.complete_load(self._optimizer, self._config)
        if same_layout:
            set_random_state(loaded["random"])

    def load_weights(self, folder: Path) -> None:
        """Take the weights of a checkpoint, and nothing else; all processes call it."""
        self._set_weights(self._read(self._weights(), folder))

    def _read(self, state: dict[str, Any], folder: Path) -> dict[str, Any]:
        strategy = get_default_load_sharded_strategy(str(folder))
        loaded: dict[str, Any] = dist_checkpointing.load(
            state, str(folder), FullyParallelLoadStrategyWrapper(strategy, _copies())
        )
        return loaded

    def _set_weights(self, loaded: dict[str, Any]) -> None:
        for name, part in self._named_parts():
            part.module.load_state_dict(loaded[name])

    # -- what there is --------------------------------------------------------------------------

    def _named_parts(self) -> list[tuple[str, DistributedDataParallel]]:
        if len(self._parts) == 1:
            return [("model", self._parts[0])]
        return [(f"model{number}", part) for number, part in enumerate(self._parts)]

    def _weights(self) -> dict[str, Any]:
        return {
            name: part.module.sharded_state_dict(metadata={**_FORMAT})
            for name, part in self._named_parts()
        }

    def _object(self, key: str, value: Any) -> ShardedObject:
        """Something that each process has of its own."""
        return ShardedObject(key, value, (self._processes,), (self._rank,))


def random_state() -> dict[str, Any]:
    """The state of the generators, of this process alone and of those that share its layers."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Go on where :func:`random_state` was called."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that is part of no larger one.

    megatron-core copies parts before it writes them. On a CPU the process that writes has its own
    view of the memory, as it was when it was forked, so there is no need to.
    """
    tensor = tensor.detach().contiguous()
    as_numpy = tensor.view(torch.int16) if tensor.itemsize == 2 else tensor
    return torch.from_numpy(as_numpy.numpy()).view(tensor.dtype)


def _copies() -> torch.distributed.ProcessGroup:
    """Processes that hold the same part of the model."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


class _Answer:
    """What the process that writes answers to the one that began it: a queue of one entry."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115

    def put(self, value: Any) -> None:
        pickle.dump(value, self._file)
        self._file.flush()

    def get_nowait(self) -> Any:
        self._file.seek(0)
        try:
            return pickle.load(self._file)
        except EOFError:
            raise queue.Empty from None


def _write(
    training: int, write: Callable[..., None], folder: Path, rank: int, *arguments: Any
) -> None:
    """Write, in a process of its own, and leave the digests of what was written."""
    # A training that was killed is not to be written any more. megatron-core starts more processes
    # from here, and the request to die does not pass on to them.
    _die_with(training)
    os.register_at_fork(after_in_child=partial(_die_with, os.getpid()))
    write(*arguments)
    write_digests(folder, f"{rank}", sorted(folder.glob(f"__{rank}_*")))


def _die_with(parent: int) -> None:
    """Let this process end when its parent does, which it may have done already."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _failure(error: CheckpointException) -> CheckpointError:
    reasons = "; ".join(str(each[0]) for each in error.failures.values())
    if "No space left" in reasons or "quota" in reasons:
        return CheckpointError(
            "no space left for the checkpoint; those before it are untouched: free some space and "
            "run again"
        )
    return CheckpointError(f"the checkpoint could not be written: {reasons or 'see rank 0'}")
