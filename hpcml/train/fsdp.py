"""FSDP2: weights, gradients and optimizer states are shared by the ranks, layer by layer.

A checkpoint has the weights as a Hugging Face model folder, of which each rank writes a shard,
and the optimizer's states as a distributed checkpoint of torch. Neither depends on the number of
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import init_empty_weights
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hpcml.data.dataset import Dataset
from hpcml.train import finetune
from hpcml.train.checkpoint import write_digests
from hpcml.train.model import decoder_layers
from hpcml.train.model_folder import write_configuration, write_parts
from hpcml.train.trainer import OPTIMIZER, SHARDS, CellTrainer, build_model

# With names for keys and no lists, so that parts of any layout fit together.
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class ShardedTrainer(CellTrainer):
    """A ``Trainer`` whose ranks share one model."""

    def build_model(self, dataset: Dataset) -> nn.Module:
        """The model, of which this rank holds a part.

        Only the first rank ever has all of the weights, in the host's memory; the others get
        theirs layer by layer.
        """
        without_memory = None if self.group.first else init_empty_weights(include_buffers=False)
        model = build_model(self.course.job, dataset, without_memory, self.group.first)
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        self.mesh = init_device_mesh(device.type, (self.group.size,))
        policy = MixedPrecisionPolicy()
        if self.config.bf16:
            # The ranks exchange half as many bytes, but add in single precision.
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*decoder_layers(model), model):
            _receive(part, device)
            fully_shard(part, mesh=self.mesh, mp_policy=policy)
        return model

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """Leave the model as it is; accelerate would wrap DistributedDataParallel around it."""
        if not getattr(model, "_is_accelerate_prepared", False):
            self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
            model._is_accelerate_prepared = True
        return model

    def held_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parts of the weights that this rank holds and that learn."""
        for name, parameter in super().held_weights():
            yield name, parameter.detach().to_local()

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Clip the gradients; returns their norm before that, over all ranks."""
        norm = super()._clip_grad_norm(model)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def measure(self) -> torch.Tensor:
        """This rank's part of an evaluation."""
        measured = super().measure()
        # Without a backward pass the root would keep its weights whole.
        self.model.reshard()
        return measured

    # -- checkpoints ----------------------------------------------------------------------------

    def save_model(self, folder: Path) -> None:
        """Write a model folder, each rank a shard of it, or what was added to a model."""
        folder.mkdir(exist_ok=True)
        if self.config.fine_tuning_method in finetune.ADDED:
            added = {
                name: parameter.detach().full_tensor()
                for name, parameter in self.model.named_parameters()
                if parameter.requires_grad
            }
            if self.group.first:
                finetune.save_weights(self.model, self.config, folder, added)
        else:
            weights = {name: weight.detach() for name, weight in self.model.named_parameters()}
            sizes = {name: weight.numel() * 4 for name, weight in weights.items()}
            write_parts(folder, sizes, lambda name, mine: weights[name].full_tensor(), self.group)
            if self.group.first:
                write_configuration(self.model, torch.float32, folder)

    def load_model(self, folder: Path) -> None:
        """Take this rank's part of the weights in a folder, whoever wrote it."""
        finetune.load_weights(self.model, self.config, folder, self._part)

    def save_optimizer(self, folder: Path) -> None:
        """Write this rank's part of the optimizer's states."""
        state = get_optimizer_state_dict(self.model, self.optimizer.optimizer, options=_FLAT)
        try:
            dcp.save(state, checkpoint_id=folder / SHARDS, process_group=self.group.side)
        except CheckpointException as error:  # no Exception, and of many lines
            causes = [str(cause) for cause, _ in error.failures.values()]
            raise RuntimeError("; ".join(causes)) from None
        rank = self.group.rank
        written = (folder / SHARDS).glob(f"__{rank}_*")
        write_digests(folder / SHARDS, str(rank), sorted(written))

    def load_optimizer(self, folder: Path) -> None:
        """Take this rank's part of the optimizer's states, whoever wrote them."""
        if (folder / SHARDS).is_dir():
            load_shards(self.model, self.optimizer.optimizer, folder / SHARDS)
            return
        whole = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True, mmap=True)
        state = whole["optimizer"]
        for values in state["state"].values():
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and value.ndim:
                    values[key] = self._part(value)
        self.optimizer.load_state_dict(state)

    def rehearse(self) -> None:
        """FSDP2 adds gradients in the same order from the first step on."""

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        """The rows of a whole tensor that this rank holds."""
        device = self.mesh.device_type
        return distribute_tensor(whole.to(device), self.mesh, [Shard(0)], src_data_rank=None)


def load_shards(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Read the optimizer's states from a distributed checkpoint, whatever layout wrote it.

    Args:
        model: sharded, or not.
        optimizer: of the model's parameters.
        folder: of the distributed checkpoint.
    """
    state = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    set_optimizer_state_dict(model, optimizer, optim_state_dict=state, options=_FLAT)


def _receive(part: nn.Module, device: torch.device) -> None:
    """Give the weights of a part of the model, which the first rank has, to all ranks."""
    for parameter in part.parameters():
        if isinstance(parameter, DTensor):
            continue
        if parameter.is_meta:
            weight = torch.empty_like(parameter, device=device)
        else:
            weight = parameter.detach().to(device)
        dist.broadcast(weight, src=0)
        # In place: a matrix that is used twice stays one.
        torch.utils.swap_tensors(parameter, nn.Parameter(weight, parameter.requires_grad))
