"""The engine ``deepspeed``: ZeRO, through the Trainer's own integration.

A checkpoint has the weights as a Hugging Face model folder, and in ``deepspeed/`` what DeepSpeed
itself writes: each rank its part. Another number of ranks, or another stage, reads that through
DeepSpeed's universal form, into which it is turned for the moment.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import shutil
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import nn
from transformers import TrainingArguments

from hpcml.data.dataset import Dataset
from hpcml.train import finetune
from hpcml.train.checkpoint import write_digests
from hpcml.train.config import TrainingError, TrainingJob
from hpcml.train.group import Group
from hpcml.train.initialization import initialize
from hpcml.train.model_folder import write_configuration, write_parts
from hpcml.train.stop import StopRequest
from hpcml.train.trainer import CellTrainer, build_model, check, train

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # it is read by the import below
import deepspeed
from deepspeed.checkpoint.ds_to_universal import main as to_universal
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

if not torch.cuda.is_available():
    # Otherwise the first use compiles it, for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

_STATES = "deepspeed"
"""In a checkpoint: the folder of what DeepSpeed writes."""


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
    # DeepSpeed keeps the groups of processes in its modules, so they stay for the process's life.
    return train(job, Group.join(job.config, alone=True), stop, ZeroTrainer)


class ZeroTrainer(CellTrainer):
    """A ``Trainer`` whose ranks share what the stage of ZeRO says."""

    def arguments(self, **more: Any) -> TrainingArguments:
        """What the Trainer itself needs to know.

        Raises:
            TrainingError: the checkpoint is of another layout, from which this one can't go on.
        """
        self.reshards = self._saved is not None and self._changes(self._saved)
        more["deepspeed"] = settings(self.course.job, self.layout, self.reshards)
        if not torch.cuda.is_available():
            # accelerate looks for DeepSpeed only where it finds a GPU.
            os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
            PartialState(backend="gloo")
            more["accelerator_config"] = {"use_configured_state": True}
        arguments = super().arguments(**more)
        try:
            DeepSpeedConfig(dict(more["deepspeed"]))
        except (ValueError, AssertionError, DeepSpeedConfigError) as error:
            raise TrainingError(f"train.deepspeed: {_one_line(error)}") from error
        return arguments

    def _changes(self, saved: Mapping[str, Any]) -> bool:
        """Whether the checkpoint is of another layout."""
        was = saved["world_size"], saved["zero_stage"]
        now = self.group.size, self.config.zero_stage
        if was == now or was[1] == now[1] == 0:  # without ZeRO, each rank has everything
            return False
        kinds = (0,), (1, 2), (3,)
        (can,) = [stages for stages in kinds if was[1] in stages]
        if now[1] not in can:
            raise TrainingError(
                f"the checkpoint is of zero_stage {was[1]} and can't go on with {now[1]}, only "
                f"with {' or '.join(map(str, can))}: DeepSpeed keeps the states of others otherwise"
            )
        if was[1] == 3:
            # DeepSpeed gives all weights the first group's rate and decay, and says nothing.
            raise TrainingError(
                f"the checkpoint is of zero_stage 3 and can only go on with as many processes, "
                f"{was[0]}"
            )
        if self.config.optim not in ("adam", "adamw"):
            raise TrainingError(
                f"with optim {self.config.optim} the checkpoint can only go on as it was, with "
                f"{was[0]} processes and zero_stage {was[1]}: DeepSpeed reshards adam and adamw"
            )
        return True

    @property
    def _shares_weights(self) -> bool:
        return self.config.zero_stage == 3

    def build_model(self, dataset: Dataset) -> nn.Module:
        """The model; with stage 3 each rank has its part of the weights as soon as they exist."""
        job = self.course.job
        # transformers knows from the arguments whether weights are shared, and reads them so.
        if not self._shares_weights or job.model is not None:
            return build_model(job, dataset)
        model = build_model(job, dataset, weights=False)
        for name, parameter in model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if self.group.first:
                    initialize([(name, parameter)], self.config)
        return model

    def held_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parts of the weights that this rank holds and that learn."""
        for name, parameter in super().held_weights():
            yield name, getattr(parameter, "ds_tensor", parameter).detach()

    def begin(self) -> None:
        """Called once when the first step is about to begin."""
        config = self.config
        self._norm: torch.Tensor | None = None
        if config.zero_stage == 0 and not (config.bf16 or config.fp16):
            # Here alone DeepSpeed would forget the norm.
            self.deepspeed.clip_fp32_gradients = self._clip
        super().begin()

    def _clip(self) -> None:
        self._norm = super()._clip_grad_norm(self.model)

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """The gradients' norm; DeepSpeed has clipped them before the step that is done already."""
        norm = self.deepspeed.get_global_grad_norm() if self._norm is None else self._norm
        return torch.as_tensor(norm)

    def rehearse(self) -> None:
        """DeepSpeed adds gradients in the same order from the first step on."""

    # -- checkpoints ----------------------------------------------------------------------------

    def save_model(self, folder: Path) -> None:
        """Write a model folder, each rank a shard of it, or what was added to a model."""
        if not self._shares_weights:
            super().save_model(folder)
            return
        folder.mkdir(exist_ok=True)
        if self.config.fine_tuning_method in finetune.ADDED:
            with deepspeed.zero.GatheredParameters(self._learned()):
                super().save_model(folder)
            return
        weights = dict(self.model.named_parameters())
        sizes = {name: w.ds_numel * w.element_size() for name, w in weights.items()}

        def whole(name: str, wanted: bool) -> torch.Tensor | None:
            with deepspeed.zero.GatheredParameters([weights[name]]):
                return weights[name].detach().cpu().clone() if wanted else None

        write_parts(folder, sizes, whole, self.group)
        if self.group.first:
            dtype = next(iter(weights.values())).dtype
            write_configuration(self.model, dtype, folder)

    def load_model(self, folder: Path) -> None:
        """Take the weights of a folder, whoever wrote it."""
        if not self._shares_weights:
            super().load_model(folder)
        elif self.config.fine_tuning_method in finetune.ADDED:
            with deepspeed.zero.GatheredParameters(self._learned(), modifier_rank=0):
                if self.group.first:
                    super().load_model(folder)
        else:
            stored = finetune.stored_weights(folder) if self.group.first else {}
            for name, parameter in self.model.named_parameters():
                with (
                    deepspeed.zero.GatheredParameters([parameter], modifier_rank=0),
                    torch.no_grad(),
                ):
                    if self.group.first:
                        parameter.copy_(stored[name])

    def _learned(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def save_optimizer(self, folder: Path) -> None:
        """Write this rank's part of what DeepSpeed keeps."""
        self.deepspeed.save_checkpoint(
            str(folder), tag=_STATES, save_latest=False, exclude_frozen_parameters=True
        )
        rank = self.group.rank
        written = (folder / _STATES).glob(f"*zero_pp_rank_{rank}_mp_rank_*")
        write_digests(folder / _STATES, str(rank), sorted(written))

    def resume(self, folder: Path) -> None:
        """Take the weights and the optimizer's states of a checkpoint."""
        if not self.reshards:
            self._load(folder, _STATES)
            return
        # Removed with other half-written checkpoints if a kill comes.
        universal = self.course.store.folder / f".writing-universal-{os.getpid()}"
        universal = self.group.share(universal)
        if self.group.first:
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                to_universal(_conversion(folder / _STATES, universal / _STATES))
        self.group.wait()
        self._load(universal, _STATES)
        self.group.wait()
        if self.group.first:
            shutil.rmtree(universal)

    def _load(self, folder: Path, tag: str) -> None:
        path, _ = self.deepspeed.load_checkpoint(
            str(folder), tag=tag, load_module_strict=False, load_lr_scheduler_states=False
        )
        if path is None:
            raise TrainingError(f"DeepSpeed can't load {folder / tag}")


def settings(job: TrainingJob, layout: tuple[int, int], universal: bool) -> dict[str, Any]:
    """DeepSpeed's configuration: what follows from the hyperparameters, and the user's over it.

    Args:
        job: the cell.
        layout: sequences of a forward pass, and forward passes of a step.
        universal: whether a checkpoint in the universal form is to be loaded.
    """
    config = job.config
    to_host = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    zero: dict[str, Any] = {"stage": config.zero_stage}
    if config.offload in ("optimizer", "all"):
        zero["offload_optimizer"] = to_host
    if config.offload == "all":
        zero["offload_param"] = to_host
    mine = {
        "train_micro_batch_size_per_gpu": layout[0],
        "gradient_accumulation_steps": layout[1],
        "train_batch_size": config.global_batch_size,
        "gradient_clipping": config.max_grad_norm or math.inf,
        "fp16": {"enabled": config.fp16},
        "bf16": {"enabled": config.bf16},
        "zero_optimization": zero,
        # The optimizer is ours, also on the host, so that it is the same with every engine.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": universal},
    }
    return _merged(mine, job.deepspeed)


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        if isinstance(value, Mapping):
            merged[key] = _merged(merged.get(key, {}), value)
        elif value != "auto" or key not in merged:
            merged[key] = value
    return merged


def _conversion(source: Path, target: Path) -> Namespace:
    """What DeepSpeed's program ``ds_to_universal`` takes from its command line."""
    return Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )


def _one_line(error: Exception) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
