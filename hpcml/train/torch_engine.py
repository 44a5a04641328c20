"""The engine ``torch``: transformers' ``Trainer``, made to continue to the last bit.

The Trainer runs the steps. What it would keep only in memory, or would write in a way that a kill
can tear, is done here: the order of the data, evaluation, metrics, and checkpoints.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
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

from hpcml.data.corpus import find_corpus
from hpcml.data.dataset import (
    IGNORE,
    Dataset,
    DatasetSettings,
    DocumentSamples,
    PackedSamples,
    Samples,
    open_dataset,
)
from hpcml.data.sampler import Sampler
from hpcml.train import finetune
from hpcml.train.checkpoint import Checkpoint, CheckpointStore
from hpcml.train.config import TrainingError, TrainingJob
from hpcml.train.group import Group
from hpcml.train.loss import TokenLoss
from hpcml.train.model import add_dropout, decoder_layers, load_model, new_model
from hpcml.train.optimizer import build_optimizer
from hpcml.train.randomness import random_state, seed_rank, set_random_state
from hpcml.train.schedule import Schedule
from hpcml.train.stop import AGAIN, StopRequest
from hpcml.worker.metrics import append_line

# An evaluation reads at most this many tokens of the held-out split, whatever the batch size, so
# that cells with different batch sizes are compared on the same text.
EVALUATION_TOKENS = 1 << 16

if not hasattr(Trainer, "_clip_grad_norm"):
    # Gradients would be clipped in the Trainer's own way, and nobody would notice.
    raise ImportError(f"transformers {transformers.__version__} is too old for hpcml")

_DESCRIBES_NEW_MODEL = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "hidden_act", "tie_word_embeddings", "init_method", "init_std",
    "init_gain",
)  # fmt: skip


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
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    check(job)
    group = Group.join(job.config)
    dataset = open_training_data(job)
    model = build_model(job, dataset)
    trainer = CellTrainer(job, model, dataset, group, stop)
    code = trainer.run()
    group.leave()
    return code


def check(job: TrainingJob) -> None:
    """Refuse what can be seen to be wrong before anything slow happens.

    Raises:
        TrainingError: values contradict each other, or this machine lacks what they need.
    """
    config = job.config
    if job.model is not None:
        ignored = sorted(job.given.intersection(_DESCRIBES_NEW_MODEL))
        if ignored:
            raise TrainingError(f"{', '.join(ignored)} can't be set: {job.model} decides")
    elif config.fine_tuning_method in finetune.ADDED:
        raise TrainingError(
            f"fine_tuning_method {config.fine_tuning_method} adds weights to a trained model: give "
            "the folder of one as train.model"
        )
    if config.group_by_length and job.packing:
        raise TrainingError("group_by_length needs data.packing false: packed sequences are equal")
    if config.fp16 and config.bf16:
        raise TrainingError("fp16 and bf16 exclude each other")
    if config.fp16 and not torch.cuda.is_available():
        raise TrainingError("fp16 needs a GPU; bf16 works without one")
    if job.metric != "eval_loss" or not job.eval_fraction:
        needs = [
            name
            for name, used in (
                ("load_best_model_at_end", config.load_best_model_at_end),
                ("early_stopping_patience", config.early_stopping_patience is not None),
                ("reduce_on_plateau", config.lr_scheduler_type == "reduce_on_plateau"),
            )
            if used
        ]
        if needs:
            raise TrainingError(
                f"{needs[0]} needs the objective eval_loss and a held-out part of the data"
            )


# -- what is trained, and on what ---------------------------------------------------------------


def open_training_data(job: TrainingJob) -> Dataset:
    """The cell's tokenized corpus.

    Raises:
        DataError, TrainingError: it can't be made, or does not fit the model.
    """
    tokenizer = job.tokenizer or job.model
    if job.tokenizer is None and job.model is not None:
        if not (job.model / "config.json").is_file():
            raise TrainingError(f"no model at {job.model}: it has no config.json")
        if not any(job.model.glob("tokenizer*")):
            raise TrainingError(f"{job.model} has no tokenizer: give its folder as data.tokenizer")
    settings = DatasetSettings(
        tokenizer=tokenizer,
        vocab_size=job.config.vocab_size,
        add_eos_token=job.config.add_eos_token,
        eval_fraction=job.eval_fraction,
    )
    return open_dataset(job.data_root, find_corpus(job.source, job.files), settings)


def belongs_to(job: TrainingJob, dataset: Dataset) -> dict[str, str]:
    """What a checkpoint is of: training goes on only with the same cell, data and base model."""
    owner = {"cell": job.cell_id, "engine": "torch", "data set or tokenizer": dataset.folder.name}
    if job.model is not None:
        owner["base model"] = model_digest(job.model)
    return owner


def model_digest(folder: Path) -> str:
    """A digest by which a model folder is known again, without reading all of a large one.

    It covers the configuration, and of each weights file its name, size, and both ends, where a
    file of safetensors has its table of tensors and the last of them.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, size - (1 << 20)))
            digest.update(file.read(1 << 20))
    return digest.hexdigest()[:16]


def build_model(job: TrainingJob, dataset: Dataset) -> nn.Module:
    """The model of a cell, with the weights that learn.

    Raises:
        TrainingError: model, tokenizer and parameters don't fit each other.
    """
    config = job.config
    if job.model is None:
        rows = config.vocab_size if "vocab_size" in job.given else dataset.vocab_size
        model = new_model(config, rows, special_tokens(dataset.tokenizer))
    else:
        model = load_model(job.model, config.max_length)
        rows = model.get_input_embeddings().num_embeddings
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


def special_tokens(folder: Path) -> dict[str, int | None]:
    """``bos_token_id``, ``eos_token_id`` and ``pad_token_id`` of a tokenizer's folder."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(tokenizer, name) for name in names}


def make_samples(job: TrainingJob, dataset: Dataset, split: str, padding: int) -> Samples:
    """The training sequences of one split."""
    length = job.config.max_length
    if job.packing:
        return PackedSamples(dataset.split(split), length)
    return DocumentSamples(dataset.split(split), length, padding)


# -- the training -------------------------------------------------------------------------------


@dataclass
class Progress:
    """What a training knows of itself besides weights and optimizer. It is in each checkpoint.

    Attributes:
        best: the best value of the objective.
        without_gain: evaluations since the objective improved enough.
        evaluated, evaluated_step: the last value of the objective, and its step.
        best_saved, best_saved_step: the best value of which there is a checkpoint, and its step.
        finished: nothing is left to train.
    """

    best: float | None = None
    without_gain: int = 0
    evaluated: float | None = None
    evaluated_step: int | None = None
    best_saved: float | None = None
    best_saved_step: int | None = None
    finished: bool = False


class MicroBatches:
    """The batches of one rank, from any step on. What ``get_train_dataloader`` returns.

    Args:
        samples, sampler: the data and its order.
        layout: sequences of a forward pass, and forward passes of a step.
        group: which rank takes which part.
        trainer: the first batch is the one after its ``state.global_step``.
        total_steps: length of the training.
    """

    def __init__(
        self,
        samples: Samples,
        sampler: Sampler,
        layout: tuple[int, int],
        group: Group,
        trainer: CellTrainer,
        total_steps: int,
    ) -> None:
        self._samples = samples
        self._sampler = sampler
        self._size, self._passes = layout
        self._group = group
        self._trainer = trainer
        self._total = total_steps

    def __len__(self) -> int:
        return self._total * self._passes

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for step in range(self._trainer.state.global_step, self._total):
            for index in range(self._passes):
                chosen = self._sampler.micro_batch(
                    step, index, self._group.rank, self._group.size, self._size
                )
                inputs, labels = self._samples.batch(chosen)
                yield {
                    "input_ids": torch.from_numpy(inputs),
                    "labels": torch.from_numpy(labels),
                }


class CellTrainer(Trainer):
    """A ``Trainer`` for one cell.

    Args:
        job: the cell.
        model: as :func:`build_model` made it.
        dataset: the cell's data.
        group: the ranks.
        stop: asked after each step.

    Raises:
        TrainingError: there is less data than one sequence, in either split.
    """

    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self, job: TrainingJob, model: nn.Module, dataset: Dataset, group: Group, stop: StopRequest
    ) -> None:
        config = job.config
        self.job = job
        self.config = config
        self.dataset = dataset
        self.group = group
        self.stop = stop
        self.progress = Progress()
        self.stopped = False
        self._resume_from: Checkpoint | None = None
        self.layout = config.layout(group.size)
        self.num_layers = len(decoder_layers(model))

        padding = special_tokens(dataset.tokenizer)["pad_token_id"] or 0
        self.samples = make_samples(job, dataset, "train", padding)
        self.held_out = make_samples(job, dataset, "eval", padding) if job.eval_fraction else None
        if not len(self.samples):
            raise TrainingError(
                f"the corpus has {dataset.split('train').tokens} tokens to train on, fewer than "
                f"one sequence of max_length {config.max_length}"
            )
        if self.held_out is not None and not len(self.held_out):
            raise TrainingError(
                f"the held-out part has {dataset.split('eval').tokens} tokens, fewer than one "
                f"sequence of max_length {config.max_length}: raise data.eval_fraction, or set it "
                "to 0 to hold nothing out"
            )
        self.sampler = Sampler(
            len(self.samples),
            config.seed,
            config.global_batch_size,
            self.samples.lengths
            if config.group_by_length and isinstance(self.samples, DocumentSamples)
            else None,
        )
        self.total_steps = config.max_steps or math.ceil(
            config.num_train_epochs * len(self.samples) / config.global_batch_size
        )
        self.store = CheckpointStore(
            job.checkpoints, belongs_to(job, dataset), job.events, job.keep
        )
        super().__init__(
            model=model,
            args=training_arguments(job, self.layout, self.total_steps),
            compute_loss_func=TokenLoss(config),
            callbacks=[Course(self)],
        )
        # The loss is ours; the model need not know how many tokens a step has.
        self.model_accepts_loss_kwargs = False
        self.remove_callback(DefaultFlowCallback)
        self.remove_callback(PrinterCallback)
        self._window = torch.zeros((), dtype=torch.float64)
        self._window_steps = 0
        self._window_tokens = 0
        self._clock = time.perf_counter()

    def run(self) -> int:
        """Train; returns the exit code."""
        checkpoint = self._find_checkpoint()
        if checkpoint is not None and self._read_progress(checkpoint).finished:
            self._restore(checkpoint, weights_only=True)
        else:
            self._resume_from = checkpoint
            self.train()
        if self.stopped:
            return AGAIN
        self._finish()
        return 0

    def _finish(self) -> None:
        """Leave the final metrics, of the best model if that is asked for."""
        final: dict[str, float] = {"unigram_entropy": self.dataset.unigram_entropy}
        step = self.state.global_step
        best = self.group.share(self.store.best())
        if self.config.load_best_model_at_end and best is not None:
            finetune.load_weights(self.model, self.config, best.path / "model")
            final["best_step"] = step = best.step
            final |= self._measure()
        elif self.held_out is not None and self.progress.evaluated_step != self.state.global_step:
            final |= self._measure()
        if self.group.first:
            self.store.mark("final", step)
        self._report(final, self.state.global_step)

    # -- steps ----------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """The batches from the current step on; going on costs nothing."""
        return MicroBatches(
            self.samples, self.sampler, self.layout, self.group, self, self.total_steps
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The batches of a step, and how many labels count in it over all ranks."""
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        if isinstance(self.samples, PackedSamples):
            items = self.config.global_batch_size * self.config.max_length
        else:
            counted = sum(int((batch["labels"] != IGNORE).sum()) for batch in batches)
            items = max(int(self.group.sum(torch.tensor([counted])).item()), 1)
        self._window_tokens += items
        return batches, items

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One forward and backward pass; its loss is added to the one that is logged next."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self._window += loss
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
            maximize = self.job.mode == "max"
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

    # -- metrics --------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Report the training metrics since the last time."""
        if "loss" not in logs:
            return  # the Trainer's summary of its own run, which is not the one of the cell
        loss = self._window_loss()
        seconds = time.perf_counter() - self._clock
        metrics = {
            "loss": loss,
            "learning_rate": logs["learning_rate"],
            "grad_norm": logs["grad_norm"],
            "epoch": self.state.global_step * self.config.global_batch_size / len(self.samples),
            "tokens_per_second": self._window_tokens / max(seconds, 1e-9),
        }
        self._window.zero_()
        self._window_steps = self._window_tokens = 0
        self._clock = time.perf_counter()
        self._report(metrics, self.state.global_step)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate, and decide what follows from it."""
        paused = time.perf_counter()
        metrics = self._measure()
        self.progress.evaluated_step = self.state.global_step
        self._report(metrics, self.state.global_step)
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        if self.job.metric in metrics:
            self._observe(metrics[self.job.metric])
        self._clock += time.perf_counter() - paused
        return metrics

    def _gain(self, value: float, over: float | None) -> float:
        """How much better a value of the objective is; anything is better than none."""
        if over is None:
            return math.inf
        return value - over if self.job.mode == "max" else over - value

    def _observe(self, value: float) -> None:
        progress, config = self.progress, self.config
        progress.evaluated = value
        gain = self._gain(value, over=progress.best)
        progress.without_gain = (
            0 if gain > config.early_stopping_threshold else progress.without_gain + 1
        )
        if gain > 0:
            progress.best = value
            # Otherwise the best of the checkpoints that are saved anyway is the best.
            self.control.should_save |= config.load_best_model_at_end
        if self.lr_scheduler is not None:
            self.lr_scheduler.observe(value)
        patience = config.early_stopping_patience
        if patience is not None and progress.without_gain >= patience:
            progress.finished = True
            self.control.should_training_stop = self.control.should_save = True

    def _measure(self) -> dict[str, float]:
        """``eval_loss``: nats per token of the held-out text, plain cross entropy.

        It is comparable between cells with other losses, smoothing and batch sizes.
        """
        if self.held_out is None:
            return {}
        self.model.eval()
        size = self.layout[0]
        count = max(EVALUATION_TOKENS // self.config.max_length, 1)
        count = min(count, len(self.held_out))
        total = torch.zeros(2, dtype=torch.float64)
        for number, start in enumerate(range(0, count, size)):
            if number % self.group.size == self.group.rank:
                chosen = np.arange(start, min(start + size, count))
                inputs, labels = self.held_out.batch(chosen)
                total += self._measure_batch(torch.from_numpy(inputs), torch.from_numpy(labels))
        loss, tokens = self.group.sum(total).tolist()
        return {"eval_loss": loss / tokens} if tokens else {}

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

    def _window_loss(self) -> float:
        """The mean loss per token since the last log, over all ranks.

        Raises:
            TrainingError: it is not a finite number.
        """
        mean: float = self.group.sum(self._window.clone()).item() / self.group.size
        loss = mean / max(self._window_steps, 1)
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss became {loss} in the steps up to {self.state.global_step}; try a lower "
                "learning_rate, a warmup, or a smaller max_grad_norm"
            )
        return loss

    def _report(self, metrics: dict[str, float], step: int) -> None:
        if not self.group.first:
            return
        if self.job.metrics is not None:
            append_line(
                self.job.metrics, {"step": step, "total_steps": self.total_steps, **metrics}
            )
        values = "  ".join(f"{name} {value:.6g}" for name, value in metrics.items())
        print(f"step {step}/{self.total_steps}  {values}", flush=True)

    # -- checkpoints ----------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write everything that the training needs to go on as if nothing had happened."""
        paused = time.perf_counter()
        step, progress = self.state.global_step, self.progress
        self._refuse_broken_weights()
        best = (
            progress.evaluated is not None
            and progress.evaluated_step == step
            and self._gain(progress.evaluated, over=progress.best_saved) > 0
        )
        if best:
            progress.best_saved, progress.best_saved_step = progress.evaluated, step
        if self.group.first:
            with self.store.saving(step, best) as folder:
                self.group.share(folder)
                self._write(folder)
                self._write_rank(folder)
                self.group.wait()
        else:
            self._write_rank(self.group.share(None))
            self.group.wait()
        # Nobody leaves before it is published.
        self.group.wait()
        self._clock += time.perf_counter() - paused

    def _refuse_broken_weights(self) -> None:
        """A checkpoint of weights that are not numbers would break every later attempt."""
        self._window_loss()
        for name, weight in self.model.named_parameters():
            if weight.requires_grad and not weight.isfinite().all():
                raise TrainingError(
                    f"{name} is no longer finite after step {self.state.global_step}; try a lower "
                    "learning_rate, a warmup, or a smaller max_grad_norm"
                )

    def _write(self, folder: Path) -> None:
        finetune.save_weights(self.model, self.config, folder / "model")
        for file in self.dataset.tokenizer.iterdir():
            (folder / "model" / file.name).write_bytes(file.read_bytes())
        scaler = self.accelerator.scaler
        state = {
            "step": self.state.global_step,
            "world_size": self.group.size,
            "progress": asdict(self.progress),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.lr_scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
        }
        torch.save(state, folder / "training.pt")

    def _write_rank(self, folder: Path) -> None:
        state = {
            "random": random_state(),
            # The logged loss is a mean over steps, of which some may lie before this checkpoint.
            "window": self._window.item(),
            "window_steps": self._window_steps,
        }
        torch.save(state, folder / f"rank-{self.group.rank}.pt")

    def _find_checkpoint(self) -> Checkpoint | None:
        found: Checkpoint | None = self.group.share(
            self.store.load_latest() if self.group.first else None
        )
        return found

    def _read_progress(self, checkpoint: Checkpoint) -> Progress:
        state = torch.load(checkpoint.path / "training.pt", map_location="cpu", weights_only=True)
        return Progress(**state["progress"])

    def _restore(self, checkpoint: Checkpoint, weights_only: bool = False) -> None:
        """Take up a checkpoint.

        Args:
            checkpoint: verified.
            weights_only: for a training that is finished, which has no optimizer any more.
        """
        finetune.load_weights(self.model, self.config, checkpoint.path / "model")
        state = torch.load(checkpoint.path / "training.pt", map_location="cpu", weights_only=True)
        self.state.global_step = state["step"]
        self.progress = Progress(**state["progress"])
        if self.group.first and self.progress.best_saved_step == checkpoint.step:
            # A kill may have come between the checkpoint and its pointer.
            self.store.mark("best", checkpoint.step)
        if weights_only:
            return
        self.optimizer.load_state_dict(state["optimizer"])
        self.lr_scheduler.load_state_dict(state["schedule"])
        if state["scaler"] is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        ranks = [
            torch.load(checkpoint.path / f"rank-{rank}.pt", weights_only=True)
            for rank in range(state["world_size"])
        ]
        self._window_steps = ranks[0]["window_steps"]
        if state["world_size"] == self.group.size:
            self._window.fill_(ranks[self.group.rank]["window"])
            set_random_state(ranks[self.group.rank]["random"])
        else:
            # Another layout has other random numbers; the data and the mean loss stay the same.
            self._window.fill_(sum(rank["window"] for rank in ranks) / len(ranks))
            seed_rank(self.config.seed + state["step"], self.group.rank)

    def begin(self) -> None:
        """Called once when the first step is about to begin: go on where the cell was left."""
        self._window = self._window.to(self.args.device)
        if self._resume_from is not None:
            if self.group.size > 2:
                self._rehearse()
            self._restore(self._resume_from)
        else:
            seed_rank(self.config.seed, self.group.rank)
        # From here on there is something to lose, on all ranks alike.
        self.group.wait()
        self.stop.hold()
        self._clock = time.perf_counter()

    def _rehearse(self) -> None:
        """One forward and backward pass for nothing.

        DistributedDataParallel orders its buckets anew after the first pass of a process, and
        with them the order in which the gradients of more than two ranks are added. A continued
        training must add in the order in which it would have without the interruption.
        """
        batch = next(iter(self.get_train_dataloader()))
        batch = {name: value.to(self.args.device) for name, value in batch.items()}
        labels = batch.pop("labels")
        with self.accelerator.autocast():
            outputs = self.model_wrapped(**batch)
        self.accelerator.backward(self.compute_loss_func(outputs, labels, labels.numel()))
        self.model_wrapped.zero_grad()


class Course(TrainerCallback):
    """Says when to log, evaluate, save and stop."""

    def __init__(self, trainer: CellTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer.begin()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer, step = self._trainer, state.global_step
        config = trainer.config
        trainer._window_steps += 1
        last = step >= trainer.total_steps
        control.should_log = step % config.logging_steps == 0 or last
        control.should_evaluate = trainer.held_out is not None and (self._evaluates(step) or last)
        control.should_save = step % config.save_steps == 0 or last
        if last:
            trainer.progress.finished = control.should_training_stop = True
        elif trainer.group.any(trainer.stop.requested):
            trainer.stopped = control.should_save = control.should_training_stop = True

    def _evaluates(self, step: int) -> bool:
        trainer = self._trainer
        config = trainer.config
        if config.eval_strategy == "epoch":
            size, batch = len(trainer.samples), config.global_batch_size
            return step * batch // size > (step - 1) * batch // size
        return config.eval_strategy == "steps" and step % config.eval_steps == 0


def training_arguments(
    job: TrainingJob, layout: tuple[int, int], total_steps: int
) -> TrainingArguments:
    """What the Trainer itself needs to know; the rest is done here."""
    config = job.config
    cuda = torch.cuda.is_available()
    return TrainingArguments(
        output_dir=str(job.checkpoints),
        max_steps=total_steps,
        per_device_train_batch_size=layout[0],
        gradient_accumulation_steps=layout[1],
        learning_rate=config.learning_rate,
        max_grad_norm=config.max_grad_norm or math.inf,
        fp16=config.fp16,
        bf16=config.bf16,
        seed=config.seed,
        use_cpu=not cuda,
        ddp_backend=dist.get_backend() if dist.is_initialized() else None,
        ddp_find_unused_parameters=False,
        average_tokens_across_devices=True,
        logging_nan_inf_filter=False,
        logging_strategy="no",
        eval_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )
