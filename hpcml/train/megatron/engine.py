"""The engine ``megatron``: a model that many processes share, in up to five ways at once.

It trains exactly like the engine ``torch``: the same sequences, first weights, learning rates and
evaluations, whatever the layout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import logging
import os
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

with warnings.catch_warnings():
    # That Transformer Engine and apex are not there is no news on a machine without a GPU.
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_batch_on_this_cp_rank

    from hpcml.train.megatron import layout as layouts
    from hpcml.train.megatron import model as models
    from hpcml.train.megatron import weights
    from hpcml.train.megatron.checkpoint import Checkpointer
    from hpcml.train.megatron.optimizer import build_optimizer, is_distributed

from hpcml.data.dataset import IGNORE, Dataset
from hpcml.data.sampler import Indices
from hpcml.train.checkpoint import Checkpoint
from hpcml.train.config import TrainingError, TrainingJob
from hpcml.train.course import Course, refuse_broken_weights
from hpcml.train.group import Group
from hpcml.train.llama import Llama
from hpcml.train.schedule import Schedule
from hpcml.train.stop import StopRequest
from hpcml.train.training_data import TrainingData, open_training_data

Batch = dict[str, torch.Tensor]


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
    logging.getLogger("megatron").setLevel(logging.ERROR)
    # What megatron-core says of itself and of torch, no user can do anything about.
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed\.")
    check(job)
    group = Group.join(job.config)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with _device():
            dataset = open_training_data(job)
            course = Course(job, dataset, TrainingData.of(job, dataset), group, stop)
            return Training(course, dataset).run()
    finally:
        parallel_state.destroy_model_parallel()
        group.leave()


def check(job: TrainingJob) -> None:
    """Refuse what can be seen to be wrong before anything slow happens.

    Raises:
        TrainingError: values contradict each other, or this machine lacks what they need.
    """
    job.check()
    config = job.config
    if config.fp16 and not torch.cuda.is_available():
        raise TrainingError("fp16 needs a GPU; bf16 works without one")
    if config.context_parallel_size > 1 and not (
        torch.cuda.is_available() and models.TRANSFORMER_ENGINE
    ):
        raise TrainingError(
            "context_parallel_size needs GPUs and Transformer Engine (pip install "
            "transformer-engine[pytorch]); without them set it to 1"
        )


def _device() -> contextlib.AbstractContextManager[None]:
    """The device that megatron-core takes for granted."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        return contextlib.nullcontext()
    from hpcml.train.megatron.cpu import on_cpu

    return on_cpu()


class Training:
    """The training of one cell, on one of its ranks.

    Args:
        course: the cell's course.
        dataset: the cell's data set.
    """

    def __init__(self, course: Course, dataset: Dataset) -> None:
        self.course = course
        self.config = config = course.config
        self.group = course.group
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

        # What the model is, and how the processes share it.
        self.shape, source = model_to_train(course.job, dataset)
        self.layout, self.size, self.passes = layouts.choose(config, self.shape, self.group.size)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self.layout.tensor,
            pipeline_model_parallel_size=self.layout.pipeline,
            virtual_pipeline_model_parallel_size=(
                self.layout.virtual if self.layout.virtual > 1 else None
            ),
            context_parallel_size=self.layout.context,
        )
        self.seed(config.seed)

        # This process's parts of the model, with their weights.
        transformer = models.transformer_config(self.shape, config, self.layout)
        parts = models.build(self.shape, transformer, config.max_length, self.layout.virtual)
        rank = parallel_state.get_tensor_model_parallel_rank()
        weights.assign(parts, source, self.shape, rank, self.layout.tensor)

        # Gradients, optimizer, learning rate.
        self.parts = models.data_parallel(
            parts, transformer, is_distributed(config), overlap=self.device.type == "cuda"
        )
        self.optimizer = build_optimizer(self.parts, config)
        transformer.grad_scale_func = self.optimizer.scale_loss
        transformer.finalize_model_grads_func = finalize_model_grads
        if self.parts[0].ddp_config.overlap_grad_reduce:
            no_sync = [part.no_sync for part in self.parts]
            transformer.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        maximize = course.job.mode == "max"
        self.schedule = Schedule(
            self.optimizer,
            config,
            course.data.total_steps,
            maximize,
        )
        self.learning_rate = self.grad_norm = 0.0  # of the last step

        # The pipeline, and checkpoints.
        self.pass_through = get_forward_backward_func()
        self.speaks = parallel_state.get_tensor_model_parallel_rank() == 0
        self.copy = parallel_state.get_data_parallel_rank()
        self.checkpointer = Checkpointer(
            self.parts, self.optimizer, config, self.group.rank, self.group.size
        )

    def seed(self, seed: int) -> None:
        """Seed the generators: processes that share layers have some random numbers in common."""
        stage = parallel_state.get_pipeline_model_parallel_rank()
        copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        digest = hashlib.blake2b(f"{seed}:{stage}:{copy}".encode(), digest_size=4).digest()
        number = int.from_bytes(digest, "little") >> 1
        torch.manual_seed(number)
        tensor_parallel.model_parallel_cuda_manual_seed(number)

    # -- the course -----------------------------------------------------------------------------

    def run(self) -> int:
        """Train; returns the exit code."""
        try:
            checkpoint = self.course.find_checkpoint()
            if checkpoint is not None:
                self.restore(checkpoint)
            if not self.course.over:
                self.train()
            return self.course.finish(self)
        finally:
            # Each part holds its hooks, and autograd holds each part for them, where Python cannot
            # see it. What stays for ever is left empty, so that the groups' threads end.
            for part in self.parts:
                vars(part).clear()
            gc.unfreeze()

    def train(self) -> None:
        """Step after step, and what follows from each."""
        course = self.course
        # What is here stays; looking for garbage in it before each checkpoint takes longer than
        # the checkpoint.
        gc.collect()
        gc.freeze()
        course.begin()
        while not course.due.end:
            due = course.step_done(self.step())
            if due.log:
                course.log(self.learning_rate, self.grad_norm)
            if due.evaluate:
                objective = course.evaluate(self)
                if objective is not None:
                    self.schedule.observe(objective)
            course.complete_save(self, wait=False)
            if due.save:
                held = (named for part in self.parts for named in part.named_parameters())
                refuse_broken_weights(held, course.step, self.group)
                course.begin_save(self)
        course.complete_save(self, wait=True)

    def step(self) -> int:
        """One update of the weights; returns how many labels counted in it, over all ranks."""
        batches, labels = self.read_batches()
        for part in self.parts:
            part.train()
            part.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self.through_pipeline(batches, labels, forward_only=False)
        self.learning_rate = self.schedule.get_last_lr()[0]
        updated, grad_norm, _ = self.optimizer.step()
        if updated:
            self.grad_norm = float(grad_norm)
            self.schedule.step()
        if losses and self.speaks:
            self.course.add_loss(torch.stack(losses).sum() / labels)
        return labels

    # -- passes through the pipeline ------------------------------------------------------------

    def read_batches(self) -> tuple[list[Batch], int]:
        """The batches of this copy of the model, and how many labels count in those of all."""
        data, config = self.course.data, self.config
        batches, counted = [], 0
        for number in range(self.passes):
            chosen = data.sampler.micro_batch(
                self.course.step, number, self.copy, self.layout.data, self.size
            )
            batch, labels = self.read(data.samples.batch(chosen))
            batches.append(batch)
            counted += labels
        if data.packed:
            return batches, config.global_batch_size * config.max_length
        # Each copy is held by several ranks.
        total = self.group.sum(torch.tensor([counted])).item() // self.layout.model
        return batches, max(int(total), 1)

    def read(self, samples: tuple[Indices, Indices]) -> tuple[Batch, int]:
        """Sequences as a batch of the one shape that the pipeline takes; how many labels count."""
        length = self.config.max_length
        inputs, labels = (torch.from_numpy(array) for array in samples)
        counted = int((labels != IGNORE).sum()) if not self.course.data.packed else labels.numel()
        fill = (0, length - inputs.shape[1], 0, self.size - inputs.shape[0])
        batch = {
            "tokens": torch.nn.functional.pad(inputs, fill),
            "labels": torch.nn.functional.pad(labels, fill, value=IGNORE),
            "position_ids": torch.arange(length).expand(self.size, -1),
        }
        if self.layout.context > 1:
            batch = get_batch_on_this_cp_rank(batch)
        return {
            name: value.contiguous().to(self.device, non_blocking=True)
            for name, value in batch.items()
        }, counted

    def through_pipeline(
        self, batches: list[Batch], labels: int, forward_only: bool
    ) -> list[torch.Tensor]:
        """Send batches through the pipeline.

        Args:
            batches: each of ``size`` sequences.
            labels: how many count in an update, over all ranks.
            forward_only: compute no gradients.

        Returns:
            In the last stage the summed loss of each batch, elsewhere nothing.
        """
        # megatron-core divides by the number of batches, and the gradients by that of copies.
        scale = len(batches) * self.layout.data / labels
        single = len(self.parts) == 1
        losses: list[torch.Tensor] = self.pass_through(
            forward_step_func=partial(self.forward, scale),
            data_iterator=iter(batches) if single else [iter(batches) for _ in self.parts],
            model=self.parts[0] if single else self.parts,
            num_microbatches=len(batches),
            seq_length=self.config.max_length,
            micro_batch_size=self.size,
            forward_only=forward_only,
        )
        return losses

    def forward(self, scale: float, batches: Iterator[Batch], part: Any) -> tuple[Any, Any]:
        """A batch through one part of the model, and how its loss is computed after the last."""
        batch = next(batches)
        labels = batch["labels"]
        output = part(batch["tokens"], batch["position_ids"], None, labels=labels.clamp(min=0))

        def loss(each: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            total = torch.where(labels == IGNORE, 0.0, each.float()).sum()
            # Two tensors: megatron-core changes the first one in place.
            return total * scale, total.detach()

        return output, loss

    # -- what the course asks for ---------------------------------------------------------------

    def measure(self) -> torch.Tensor:
        """This rank's part of an evaluation."""
        data, total = self.course.data, torch.zeros(2, dtype=torch.float64)
        assert data.held_out is not None
        chosen = data.evaluation_batches(self.config.max_length, self.size)
        batches, counted = [], 0
        for indices in chosen[self.copy :: self.layout.data]:
            batch, labels = self.read(data.held_out.batch(indices))
            batches.append(batch)
            counted += labels
        # Parts of stages take turns, so the pipeline must be full; padding counts for nothing.
        stages = self.layout.pipeline if self.layout.virtual > 1 else 1
        while len(batches) % stages or not batches:
            nothing = {name: torch.zeros_like(value) for name, value in self.padding().items()}
            batches.append({**nothing, "labels": nothing["labels"] + IGNORE})
        for part in self.parts:
            part.eval()
        with torch.no_grad():
            losses = self.through_pipeline(batches, 1, forward_only=True)
        if losses and self.speaks:
            total[0] = torch.stack(losses).double().sum().cpu()
            first = parallel_state.get_context_parallel_rank() == 0
            total[1] = counted if first else 0
        return total

    def padding(self) -> Batch:
        """A batch of no sequences."""
        nothing = torch.zeros((0, 1), dtype=torch.long).numpy()
        return self.read((nothing, nothing))[0]

    # -- checkpoints ----------------------------------------------------------------------------

    def write(self, folder: Path) -> None:
        """Begin to write this rank's part of a checkpoint."""
        mine = self.course.rank_state()
        losses = torch.zeros(self.group.size, dtype=torch.float64)
        losses[self.group.rank] = mine["loss"]
        losses = self.group.sum(losses)
        if self.group.first:
            (folder / "megatron").mkdir()
            (folder / "model").mkdir()
            for file in self.course.tokenizer.iterdir():
                (folder / "model" / file.name).write_bytes(file.read_bytes())
            self.shape.write(folder / "model")
            state = {
                "layout": dataclasses.asdict(self.layout),
                "progress": dataclasses.asdict(self.course.progress),
                "schedule": self.schedule.state_dict(),
                "course": [{**mine, "loss": loss} for loss in losses.tolist()],
            }
            torch.save(state, folder / "training.pt")
        self.group.wait()
        self.checkpointer.begin(folder / "megatron")

    @property
    def writing(self) -> bool:
        """Whether this rank is still writing its part."""
        return self.checkpointer.busy

    def complete(self) -> None:
        """Wait until all ranks have written, and complete the checkpoint."""
        self.checkpointer.finish()

    def load_weights(self, checkpoint: Checkpoint) -> None:
        """Take the weights of a checkpoint, and nothing else."""
        self.checkpointer.load_weights(checkpoint.path / "megatron")

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on where a checkpoint was written, in this layout or another one."""
        state = torch.load(checkpoint.path / "training.pt", weights_only=True)
        self.course.restore(checkpoint, state["progress"], state["course"])
        if self.course.progress.finished:
            self.load_weights(checkpoint)
            return
        same = state["layout"] == dataclasses.asdict(self.layout)
        if not same:
            # Another layout has other random numbers; the data and the mean loss stay the same.
            self.seed(self.config.seed + checkpoint.step)
        self.checkpointer.load(checkpoint.path / "megatron", same)
        self.schedule.load_state_dict(state["schedule"])


# -- the model ----------------------------------------------------------------------------------


def model_to_train(job: TrainingJob, dataset: Dataset) -> tuple[Llama, weights.Source]:
    """What the model of a cell is, and where its weights come from.

    Raises:
        TrainingError: model, tokenizer and parameters don't fit each other, or the model is no
            Llama.
    """
    config = job.config
    if job.model is None:
        rows = config.vocab_size if "vocab_size" in job.given else dataset.vocab_size
        shape = Llama.new(config, rows, dataset.special_tokens)
        source = weights.new(shape, config)
    else:
        shape, source = weights.of_folder(job.model)
        models.rotary(shape)
        if shape.max_position_embeddings < config.max_length:
            raise TrainingError(
                f"max_length {config.max_length} is above the model's "
                f"{shape.max_position_embeddings} positions"
            )
    if shape.vocab_size < dataset.vocab_size:
        raise TrainingError(
            f"the tokenizer {job.tokenizer or job.model} has {dataset.vocab_size} tokens, but the "
            f"model only {shape.vocab_size}: they don't belong together"
        )
    return shape, source
