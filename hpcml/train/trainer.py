"""A training by transformers' ``Trainer``, made to continue to the last bit.

The Trainer runs the steps. What it would keep only in memory, or would write in a way that a kill
can tear, is done here and in :mod:`hpcml.train.course`. Whatever the ranks share besides the batch
(weights, optimizer states) is the matter of a subclass.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn import functional
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import (
    DefaultFlowCallback,
    PrinterCallback,
    TrainerControl,
    TrainerState,
)

from hpcml.data.dataset import IGNORE, Dataset
from hpcml.train import finetune
from hpcml.train.checkpoint import Checkpoint
from hpcml.train.config import TrainingError, TrainingJob
from hpcml.train.course import Course, refuse_broken_weights
from hpcml.train.group import Group
from hpcml.train.loss import TokenLoss
from hpcml.train.model import add_dropout, decoder_layers, load_model, new_model
from hpcml.train.optimizer import build_optimizer
from hpcml.train.randomness import random_state, seed_rank, set_random_state
from hpcml.train.schedule import Schedule
from hpcml.train.stop import StopRequest
from hpcml.train.training_data import TrainingData, open_training_data

OPTIMIZER = "optimizer.pt"
"""In a checkpoint: the states of an optimizer that each rank has whole."""
SHARDS = "optimizer"
"""In a checkpoint: the folder of an optimizer of which each rank has a part."""

if not hasattr(Trainer, "_clip_grad_norm"):
    # Gradients would be clipped in the Trainer's own way, and nobody would notice.
    raise ImportError(f"transformers {transformers.__version__} is too old for hpcml")


def train(job: TrainingJob, group: Group, stop: StopRequest, kind: type[CellTrainer]) -> int:
    """Train one cell with one kind of trainer, from its newest checkpoint if there is one.

    Args:
        job: the cell.
        group: its ranks.
        stop: asked between steps whether to save and leave.
        kind: what differs between the layouts.

    Returns:
        0 when the training is complete, 75 when it saved because it was asked to stop.

    Raises:
        TrainingError, DataError, CheckpointError: with a message for the user.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    dataset = open_training_data(job)
    course = Course(job, dataset, TrainingData.of(job, dataset), group, stop)
    return kind(course, dataset, course.find_checkpoint()).run()


def check(job: TrainingJob) -> None:
    """Refuse what can be seen to be wrong before anything slow happens.

    Raises:
        TrainingError: values contradict each other, or this machine lacks what they need.
    """
    config = job.config
    job.check()
    if job.model is None and config.fine_tuning_method in finetune.ADDED:
        raise TrainingError(
            f"fine_tuning_method {config.fine_tuning_method} adds weights to a trained model: give "
            "the folder of one as train.model"
        )
    if config.fp16 and not torch.cuda.is_available():
        raise TrainingError("fp16 needs a GPU; bf16 works without one")


def build_model(
    job: TrainingJob,
    dataset: Dataset,
    within: AbstractContextManager[Any] | None = None,
    weights: bool = True,
) -> nn.Module:
    """The model of a cell, with the weights that learn.

    Args:
        job: the cell.
        dataset: its data set.
        within: decides where the parameters get their memory.
        weights: False neither draws nor reads any weights.

    Raises:
        TrainingError: model, tokenizer and parameters don't fit each other.
    """
    config = job.config
    with within or contextlib.nullcontext():
        if job.model is None:
            rows = config.vocab_size if "vocab_size" in job.given else dataset.vocab_size
            model = new_model(config, rows, dataset.special_tokens, weights)
        else:
            model = load_model(job.model, config.max_length, weights)
            rows = model.get_input_embeddings().num_embeddings
    if not weights:
        model.tie_weights()  # a parameter that is used twice may have become two
    if rows < dataset.vocab_size:
        raise TrainingError(
            f"the tokenizer {job.tokenizer or job.model} has {dataset.vocab_size} tokens, but the "
            f"model only {rows}: they don't belong together"
        )
    add_dropout(model, config.dropout)
    if config.gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    return finetune.prepare(model, config)


# -- the training -------------------------------------------------------------------------------


class MicroBatches:
    """The batches of one rank, from any step on. What ``get_train_dataloader`` returns.

    Args:
        course: the first batch is that of its current step; a finished training has none.
        layout: sequences of a forward pass, and forward passes of a step.
    """

    def __init__(self, course: Course, layout: tuple[int, int]) -> None:
        self._course = course
        self._size, self._passes = layout

    def __len__(self) -> int:
        return self._course.data.total_steps * self._passes

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        data, group = self._course.data, self._course.group
        end = self._course.step if self._course.over else data.total_steps
        for step in range(self._course.step, end):
            for index in range(self._passes):
                chosen = data.sampler.micro_batch(step, index, group.rank, group.size, self._size)
                inputs, labels = data.samples.batch(chosen)
                yield {
                    "input_ids": torch.from_numpy(inputs),
                    "labels": torch.from_numpy(labels),
                }


class CellTrainer(Trainer):
    """A ``Trainer`` for one cell, in one process or with a copy of the model in each.

    Args:
        course: the cell's course.
        dataset: the cell's data set.
        checkpoint: what to go on from, or None.
    """

    optimizer: Any
    lr_scheduler: Any

    def __init__(self, course: Course, dataset: Dataset, checkpoint: Checkpoint | None) -> None:
        self.course = course
        self.config = course.job.config
        self.group = course.group
        self.layout = self.config.layout(self.group.size)
        self._resume_from = checkpoint
        self._saved = None if checkpoint is None else self._read(checkpoint)
        arguments = self.arguments()
        _ = arguments.device  # asking for it chooses this rank's GPU, where the model will be
        model = self.build_model(dataset)
        self.num_layers = len(decoder_layers(model))
        super().__init__(
            model=model,
            args=arguments,
            compute_loss_func=TokenLoss(self.config),
            callbacks=[Flow(self)],
        )
        # The loss is ours; the model need not know how many tokens a step has.
        self.model_accepts_loss_kwargs = False
        self.remove_callback(DefaultFlowCallback)
        self.remove_callback(PrinterCallback)
        self.step_tokens = 0

    def run(self) -> int:
        """Train; returns the exit code."""
        self.train()
        return self.course.finish(self)

    # -- what depends on how the ranks share the model --------------------------------------------

    def arguments(self, **more: Any) -> TrainingArguments:
        """What the Trainer itself needs to know; made before the model."""
        return training_arguments(
            self.course.job, self.layout, self.course.data.total_steps, **more
        )

    def build_model(self, dataset: Dataset) -> nn.Module:
        """The model to train."""
        return build_model(self.course.job, dataset)

    def held_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights that learn, as far as this rank holds them."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    def save_model(self, folder: Path) -> None:
        """Write a model folder, or what was added to a model; all ranks take part."""
        if self.group.first:
            finetune.save_weights(self.model, self.config, folder)

    def load_model(self, folder: Path) -> None:
        """Read what :meth:`save_model` wrote, in whatever layout; all ranks take part."""
        finetune.load_weights(self.model, self.config, folder)

    def save_optimizer(self, folder: Path) -> None:
        """Write the states of the optimizer and of the loss scaler; all ranks take part."""
        if self.group.first:
            scaler = self.accelerator.scaler
            state = {
                "optimizer": self.optimizer.state_dict(),
                "scaler": None if scaler is None else scaler.state_dict(),
            }
            torch.save(state, folder / OPTIMIZER)

    def resume(self, folder: Path) -> None:
        """Read what both wrote into a checkpoint's folder; all ranks take part."""
        self.load_model(folder / "model")
        self.load_optimizer(folder)

    def load_optimizer(self, folder: Path) -> None:
        """Read what :meth:`save_optimizer` wrote; all ranks take part."""
        if (folder / SHARDS).is_dir():
            from hpcml.train.fsdp import load_shards

            load_shards(self.model, self.optimizer.optimizer, folder / SHARDS)
            return
        state = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        if state["scaler"] is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])

    def rehearse(self) -> None:
        """One forward and backward pass for nothing, before a continued training.

        DistributedDataParallel orders its buckets anew after the first pass of a process, and
        with them the order in which the gradients of more than two ranks are added. A continued
        training must add in the order in which it would have without the interruption.
        """
        if self.group.size < 3:
            return
        batch = next(iter(self.get_train_dataloader()))
        batch = {name: value.to(self.args.device) for name, value in batch.items()}
        labels = batch.pop("labels")
        with self.accelerator.autocast():
            outputs = self.model_wrapped(**batch)
        self.accelerator.backward(self.compute_loss_func(outputs, labels, labels.numel()))
        self.model_wrapped.zero_grad()

    # -- steps ----------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """The batches from the current step on; going on costs nothing."""
        return MicroBatches(self.course, self.layout)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The batches of a step, and how many labels count in it over all ranks."""
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        if self.course.data.packed:
            self.step_tokens = self.config.global_batch_size * self.config.max_length
        else:
            counted = sum(int((batch["labels"] != IGNORE).sum()) for batch in batches)
            self.step_tokens = max(int(self.group.sum(torch.tensor([counted])).item()), 1)
        return batches, self.step_tokens

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One forward and backward pass."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.course.add_loss(loss / self.group.size)
        return loss

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer of the weights that learn."""
        if self.optimizer is None:
            named = (model or self.model).named_parameters()
            self.optimizer = build_optimizer(named, self.config, self.num_layers)
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """The schedule of the learning rate."""
        if self.lr_scheduler is None:
            # accelerate's wrapper shares the groups with the optimizer inside.
            inner = getattr(self.optimizer, "optimizer", self.optimizer)
            maximize = self.course.job.mode == "max"
            self.lr_scheduler = Schedule(inner, self.config, num_training_steps, maximize)
        return self.lr_scheduler

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Clip the gradients; returns their norm before that."""
        config = self.config
        self.accelerator.unscale_gradients()
        parameters = [p for p in model.parameters() if p.grad is not None]
        if config.clip_grad_value is not None:
            nn.utils.clip_grad_value_(parameters, config.clip_grad_value)
        limit = config.max_grad_norm or math.inf
        return nn.utils.clip_grad_norm_(parameters, limit, norm_type=config.grad_norm_type)

    def floating_point_ops(self, inputs: Any) -> int:
        """Nobody asks for them, and counting the parameters in each step takes time."""
        return 0

    # -- the course -----------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Report the training metrics since the last time."""
        if "loss" in logs:  # otherwise the Trainer's summary of its own run, not of the cell
            self.course.log(logs["learning_rate"], logs["grad_norm"])

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate, and decide what follows from it."""
        objective = self.course.evaluate(self)
        # Lowers the flag, or the end of an epoch would evaluate the same step again.
        self.callback_handler.on_evaluate(self.args, self.state, self.control, {})
        if objective is not None and self.lr_scheduler is not None:
            self.lr_scheduler.observe(objective)
        self.control.should_save = self.course.due.save
        self.control.should_training_stop = self.course.due.end
        return {}

    def measure(self) -> torch.Tensor:
        """This rank's part of an evaluation.

        All ranks do as many forward passes, also where there are fewer batches left than ranks:
        ranks that share a model need each other in each of them.
        """
        self.model.eval()
        data, group = self.course.data, self.group
        total = torch.zeros(2, dtype=torch.float64)
        batches = data.evaluation_batches(self.config.max_length, self.layout[0])
        for first in range(0, len(batches), group.size):
            mine = first + group.rank
            assert data.held_out is not None
            inputs, labels = data.held_out.batch(batches[min(mine, len(batches) - 1)])
            part = self._measure_batch(torch.from_numpy(inputs), torch.from_numpy(labels))
            if mine < len(batches):
                total += part
        return total

    def _measure_batch(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The summed loss of a batch, and how many tokens count in it. Shape (2,)."""
        labels = labels.to(self.args.device)
        with torch.no_grad(), self.accelerator.autocast():
            logits = self.model(input_ids=inputs.to(self.args.device)).logits
        logits = logits[:, -labels.shape[1] :].float()
        loss = functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
        )
        return torch.stack([loss, (labels != IGNORE).sum()]).double().cpu()

    # -- checkpoints ----------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write everything that the training needs to go on as if nothing had happened."""
        refuse_broken_weights(self.held_weights(), self.course.step, self.group)
        self.course.save(self)

    def write(self, folder: Path) -> None:
        """Write this rank's part of a checkpoint."""
        self.save_model(folder / "model")
        self.save_optimizer(folder)
        if self.group.first:
            for file in self.course.tokenizer.iterdir():
                (folder / "model" / file.name).write_bytes(file.read_bytes())
            state = {
                "step": self.course.step,
                "world_size": self.group.size,
                "zero_stage": self.config.zero_stage,
                "progress": asdict(self.course.progress),
                "schedule": self.lr_scheduler.state_dict(),
            }
            torch.save(state, folder / "training.pt")
        rank = {"random": random_state(), "course": self.course.rank_state()}
        torch.save(rank, folder / f"rank-{self.group.rank}.pt")

    def load_weights(self, checkpoint: Checkpoint) -> None:
        """Take the weights of a checkpoint, and nothing else."""
        self.load_model(checkpoint.path / "model")

    def _read(self, checkpoint: Checkpoint) -> dict[str, Any]:
        state: dict[str, Any] = torch.load(
            checkpoint.path / "training.pt", map_location="cpu", weights_only=True
        )
        return state

    def _restore(self, checkpoint: Checkpoint, state: dict[str, Any]) -> None:
        self.resume(checkpoint.path)
        self.state.global_step = state["step"]
        self.lr_scheduler.load_state_dict(state["schedule"])
        ranks = [
            torch.load(checkpoint.path / f"rank-{rank}.pt", weights_only=True)
            for rank in range(state["world_size"])
        ]
        self.course.restore(checkpoint, state["progress"], [rank["course"] for rank in ranks])
        if state["world_size"] == self.group.size:
            set_random_state(ranks[self.group.rank]["random"])
        else:
            # Another layout has other random numbers; the data and the mean loss stay the same.
            seed_rank(self.config.seed + state["step"], self.group.rank)

    def begin(self) -> None:
        """Called once when the first step is about to begin: go on where the cell was left."""
        if self._resume_from is not None and self._saved is not None:
            self.rehearse()
            self._restore(self._resume_from, self._saved)
        else:
            seed_rank(self.config.seed, self.group.rank)
        self.course.begin()


class Flow(TrainerCallback):
    """Tells the Trainer what the course says."""

    def __init__(self, trainer: CellTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer.begin()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        due = self._trainer.course.step_done(self._trainer.step_tokens)
        control.should_log = due.log
        control.should_evaluate = due.evaluate
        control.should_save = due.save
        control.should_training_stop = due.end


def training_arguments(
    job: TrainingJob, layout: tuple[int, int], total_steps: int, **more: Any
) -> TrainingArguments:
    """What the Trainer itself needs to know; the rest is done here."""
    config = job.config
    values = {
        "output_dir": str(job.checkpoints),
        "max_steps": total_steps,
        "per_device_train_batch_size": layout[0],
        "gradient_accumulation_steps": layout[1],
        "learning_rate": config.learning_rate,
        "max_grad_norm": config.max_grad_norm or math.inf,
        "fp16": config.fp16,
        "bf16": config.bf16,
        "seed": config.seed,
        "use_cpu": not torch.cuda.is_available(),
        "ddp_backend": dist.get_backend() if dist.is_initialized() else None,
        "ddp_find_unused_parameters": False,
        "average_tokens_across_devices": True,
        "logging_nan_inf_filter": False,
        "logging_strategy": "no",
        "eval_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
    }
    return TrainingArguments(**{**values, **more})
