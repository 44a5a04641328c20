"""The course of a training: when it logs, evaluates, saves and ends, and what it reports.

It is the same for every engine. An engine runs the steps, and asks here after each of them.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from hpcml.data.dataset import Dataset
from hpcml.train.checkpoint import Checkpoint, CheckpointStore, Writing
from hpcml.train.config import TrainingError, TrainingJob
from hpcml.train.group import Group
from hpcml.train.interval import CheckpointClock
from hpcml.train.stop import StopRequest
from hpcml.train.training_data import TrainingData
from hpcml.worker import events
from hpcml.worker.codes import AGAIN
from hpcml.worker.metrics import append_line


class Engine(Protocol):
    """What the course needs of what trains."""

    def measure(self) -> torch.Tensor:
        """This rank's part of an evaluation: the summed loss in nats, and how many tokens count.

        Shape (2,), float64, on the CPU. All ranks together have each held-out token once.
        """

    def load_weights(self, checkpoint: Checkpoint) -> None:
        """Take the weights of a checkpoint, and nothing else."""

    def write(self, folder: Path) -> None:
        """Write this rank's part of a checkpoint."""


class BackgroundEngine(Engine, Protocol):
    """What writes checkpoints while the training goes on: ``write`` only begins to."""

    @property
    def writing(self) -> bool:
        """Whether this rank is still writing its part."""

    def complete(self) -> None:
        """Wait until all ranks have written, and make their parts complete; all call it."""


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


@dataclass
class Due:
    """What follows a step."""

    log: bool = False
    evaluate: bool = False
    save: bool = False
    end: bool = False


class Course:
    """The course of one cell's training.

    Args:
        job: the cell.
        dataset: the cell's data set.
        data: its sequences.
        group: the ranks.
        stop: asked after each step.

    Attributes:
        step: finished steps.
        tokenizer: folder of the data set's tokenizer.
        stopped: the training ends because it was asked to, and goes on another time.
    """

    def __init__(
        self,
        job: TrainingJob,
        dataset: Dataset,
        data: TrainingData,
        group: Group,
        stop: StopRequest,
    ) -> None:
        self.job = job
        self.config = job.config
        self.data = data
        self.group = group
        self.stop = stop
        self.step = 0
        self.stopped = False
        self.progress = Progress()
        self.due = Due()
        self.store = CheckpointStore(
            job.checkpoints, belongs_to(job, dataset), job.events, job.keep
        )
        self.tokenizer = dataset.tokenizer
        self._unigram_entropy = dataset.unigram_entropy
        self._loss = torch.zeros((), dtype=torch.float64)
        self._loss_steps = 0
        self._tokens = 0
        self._clock = time.perf_counter()
        self._saves: CheckpointClock | None = None
        self._warned = False
        self._saving: tuple[Writing, bool, float] | None = None

    # -- the beginning --------------------------------------------------------------------------

    def find_checkpoint(self) -> Checkpoint | None:
        """The checkpoint to go on from, the same on all ranks."""
        found: Checkpoint | None = self.group.share(
            self.store.load_latest() if self.group.first else None
        )
        return found

    def begin(self) -> None:
        """To be called when the first step is about to begin, with everything restored."""
        # From here on there is something to lose, on all ranks alike.
        self.group.wait()
        self.stop.hold()
        self._clock = time.perf_counter()
        if self.config.save_steps is None:
            self._saves = CheckpointClock(
                self.job.interval, self.job.mtbf, self._last_save(), time.monotonic()
            )

    def _last_save(self) -> float | None:
        """How long saving took the last time, in seconds."""
        for event in reversed(events.read(str(self.job.events))):
            if event.get("event") == "checkpoint":
                return float(event["seconds"])
        return None

    @property
    def over(self) -> bool:
        """Whether no step is left, for good or in this rung of a halving."""
        return self.progress.finished or self.step >= self._until

    @property
    def _until(self) -> int:
        total = self.data.total_steps
        return min(self.job.until or total, total)

    # -- after each step ------------------------------------------------------------------------

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add to the loss that is logged next.

        Args:
            loss: this rank's part of a step's mean loss per token: the parts of all ranks, and of
                all calls of a step, add up to it. A scalar.
        """
        if self._loss.device != loss.device:
            self._loss = self._loss.to(loss.device)
        self._loss += loss

    def step_done(self, tokens: int) -> Due:
        """Say what follows a step.

        Args:
            tokens: labels that counted in it, over all ranks.
        """
        config = self.config
        self.step += 1
        self._loss_steps += 1
        self._tokens += tokens
        last = self.step >= self.data.total_steps
        # What a rung is judged by is measured at its last step.
        pause = self.step >= self._until
        self.due = Due(
            log=self.step % config.logging_steps == 0 or last,
            evaluate=self.data.held_out is not None and (self._evaluates() or pause),
            save=pause,
        )
        # The first rank's clock counts for all.
        by_clock = (
            self._saves is not None and self.group.first and self._saves.due(time.monotonic())
        )
        asked, clock = self.group.any(self.stop.requested, by_clock)
        self.due.save |= clock
        if config.save_steps is not None:
            self.due.save |= self.step % config.save_steps == 0
        if last:
            self.progress.finished = self.due.end = True
        elif asked:
            self.stopped = self.due.save = self.due.end = True
        elif pause:
            self.due.end = True
        return self.due

    def _evaluates(self) -> bool:
        config = self.config
        if config.eval_strategy == "epoch":
            size, batch = len(self.data.samples), config.global_batch_size
            return self.step * batch // size > (self.step - 1) * batch // size
        return config.eval_strategy == "steps" and self.step % config.eval_steps == 0

    def log(self, learning_rate: float, grad_norm: float) -> None:
        """Report the training metrics since the last time."""
        loss = self._mean_loss()
        seconds = time.perf_counter() - self._clock
        self.report(
            {
                "loss": loss,
                "learning_rate": learning_rate,
                "grad_norm": grad_norm,
                "epoch": self.step * self.config.global_batch_size / len(self.data.samples),
                "tokens_per_second": self._tokens / max(seconds, 1e-9),
            }
        )
        self._loss.zero_()
        self._loss_steps = self._tokens = 0
        self._clock = time.perf_counter()

    def _mean_loss(self) -> float:
        """The mean loss per token since the last log, over all ranks.

        Raises:
            TrainingError: it is not a finite number.
        """
        loss: float = self.group.sum(self._loss.clone()).item() / max(self._loss_steps, 1)
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss became {loss} in the steps up to {self.step}; try a lower "
                "learning_rate, a warmup, or a smaller max_grad_norm"
            )
        return loss

    def report(self, metrics: dict[str, float]) -> None:
        """Write a line of metrics of the current step."""
        if not self.group.first:
            return
        total = self.data.total_steps
        if self.job.metrics is not None:
            append_line(self.job.metrics, {"step": self.step, "total_steps": total, **metrics})
        values = "  ".join(f"{name} {value:.6g}" for name, value in metrics.items())
        print(f"step {self.step}/{total}  {values}", flush=True)

    # -- evaluation -----------------------------------------------------------------------------

    def evaluate(self, engine: Engine) -> float | None:
        """Evaluate, and decide what follows from it.

        Returns:
            The objective, if it is what evaluations measure.
        """
        paused = time.perf_counter()
        metrics = self.measure(engine)
        self.progress.evaluated_step = self.step
        self.report(metrics)
        objective = metrics.get(self.job.metric)
        if objective is not None:
            self._observe(objective)
        self._clock += time.perf_counter() - paused
        return objective

    def measure(self, engine: Engine) -> dict[str, float]:
        """``eval_loss``: nats per token of the held-out text, plain cross entropy.

        It is comparable between cells with other losses, smoothing and batch sizes.
        """
        if self.data.held_out is None:
            return {}
        loss, tokens = self.group.sum(engine.measure()).tolist()
        return {"eval_loss": loss / tokens} if tokens else {}

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
            self.due.save |= config.load_best_model_at_end
        patience = config.early_stopping_patience
        if patience is not None and progress.without_gain >= patience:
            progress.finished = True
            self.due.end = self.due.save = True

    # -- checkpoints ----------------------------------------------------------------------------

    def save(self, engine: Engine) -> None:
        """Write and publish a checkpoint; all ranks take part.

        Raises:
            TrainingError: the loss is not a finite number, so the weights are broken.
            CheckpointError: the disk is full.
        """
        paused = time.perf_counter()
        self._mean_loss()
        best = self.names_best()
        if self.group.first:
            with self.store.saving(self.step, best) as folder:
                self.group.share(folder)
                engine.write(folder)
                self.group.wait()
        else:
            folder = self.group.share(None)
            with self.store.explained(self.step):
                engine.write(folder)
            self.group.wait()
        # Nobody leaves before it is published.
        self.group.wait()
        seconds = time.perf_counter() - paused
        self._clock += seconds
        self._note_saving(seconds, seconds)

    def _note_saving(self, paused: float, seconds: float) -> None:
        """Take note of how long a checkpoint held up the training, and of how long it took."""
        if not self.group.first:
            return
        if self._saves is not None and (line := self._saves.saved(paused, time.monotonic())):
            print(line, flush=True)
        lead = self.job.lead
        if lead is not None and seconds > lead and not self._warned:
            self._warned = True
            events.append(str(self.job.events), "short_lead", saving=seconds, lead=lead)
            print(
                f"saving took {seconds:.0f} s, but the signal to save comes only {lead:.0f} s "
                "before a job's end: what is done after the last checkpoint can be lost. Raise "
                "signal.lead of the site",
                flush=True,
            )

    def begin_save(self, engine: BackgroundEngine) -> None:
        """Begin a checkpoint that is written while the training goes on; all ranks take part.

        Raises:
            TrainingError: the loss is not a finite number, so the weights are broken.
            CheckpointError: the disk is full.
        """
        paused = time.perf_counter()
        self.complete_save(engine, wait=True)
        self._mean_loss()
        best = self.names_best()
        writing = self.store.begin(self.step) if self.group.first else None
        writing = self.group.share(writing)
        engine.write(writing.folder)
        seconds = time.perf_counter() - paused
        self._saving = writing, best, seconds
        self._clock += seconds

    def complete_save(self, engine: BackgroundEngine, wait: bool) -> None:
        """Publish the checkpoint that was begun, if there is one and all ranks have written.

        Args:
            engine: which writes.
            wait: until they have.

        Raises:
            CheckpointError: a rank could not write. What was there before is untouched.
        """
        if self._saving is None or (not wait and self.group.any(engine.writing)[0]):
            return
        writing, best, paused = self._saving
        self._saving = None
        begun = time.perf_counter()
        try:
            engine.complete()
            if self.group.first:
                self.store.publish(writing, best)
        finally:
            if self.group.first:
                self.store.abandon(writing)
        if wait:
            self.store.settle()
            # Nobody leaves before it is published.
            self.group.wait()
        seconds = time.perf_counter() - begun
        self._clock += seconds
        self._note_saving(paused + seconds, time.monotonic() - writing.started)

    def names_best(self) -> bool:
        """Whether the checkpoint that is about to be saved is the best one so far; noted."""
        progress = self.progress
        best = (
            progress.evaluated is not None
            and progress.evaluated_step == self.step
            and self._gain(progress.evaluated, over=progress.best_saved) > 0
        )
        if best:
            progress.best_saved, progress.best_saved_step = progress.evaluated, self.step
        return best

    def rank_state(self) -> dict[str, Any]:
        """What this rank keeps in a checkpoint: the logged loss is a mean over steps, of which
        some may lie before it.
        """
        return {"loss": self._loss.item(), "loss_steps": self._loss_steps}

    def restore(
        self, checkpoint: Checkpoint, progress: dict[str, Any], ranks: list[dict[str, Any]]
    ) -> None:
        """Go on where a checkpoint was written.

        Args:
            checkpoint: the checkpoint.
            progress: the fields of :class:`Progress`.
            ranks: what :meth:`rank_state` was on each rank; none for a training that is finished.
        """
        self.step = checkpoint.step
        self.progress = Progress(**progress)
        if self.group.first and self.progress.best_saved_step == checkpoint.step:
            # A kill may have come between the checkpoint and its pointer.
            self.store.mark("best", checkpoint.step)
        if not ranks:
            return
        self._loss_steps = ranks[0]["loss_steps"]
        if len(ranks) == self.group.size:
            loss = ranks[self.group.rank]["loss"]
        else:  # another layout: the sum over the ranks stays the same
            loss = sum(rank["loss"] for rank in ranks) / self.group.size
        self._loss.fill_(loss)

    # -- the end --------------------------------------------------------------------------------

    def finish(self, engine: Engine) -> int:
        """Leave the final metrics, of the best model if that is asked for.

        Returns:
            The exit code: 0 when the training is complete, 75 when it was asked to stop.
        """
        if self.stopped:
            return AGAIN
        if not self.progress.finished:  # it goes on in the next rung, if it is among the best
            return 0
        final: dict[str, float] = {"unigram_entropy": self._unigram_entropy}
        step = self.step
        best = self.group.share(self.store.best())
        if self.config.load_best_model_at_end and best is not None:
            engine.load_weights(best)
            final["best_step"] = step = best.step
            final |= self.measure(engine)
        elif self.data.held_out is not None and self.progress.evaluated_step != self.step:
            final |= self.measure(engine)
        if self.group.first:
            self.store.mark("final", step)
        self.report(final)
        return 0


def belongs_to(job: TrainingJob, dataset: Dataset) -> dict[str, str]:
    """What a checkpoint is of: training goes on only with the same cell, data and base model."""
    owner = {
        "cell": job.cell_id,
        "engine": job.engine,
        "data set or tokenizer": dataset.folder.name,
    }
    if job.model is not None:
        owner["base model"] = model_digest(job.model)
    return owner


def model_digest(folder: Path) -> str:
    """A digest by which a model folder is known again, without reading all of a large one.

    It covers the configuration, and of each weights file its name, size, and both ends, where a
    file of safetensors has its table of tensors and the last of them. The weights of a model in a
    checkpoint of the engine megatron lie beside it.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    files = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    for path in sorted(files or (folder.parent / "megatron").glob("*.distcp")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, size - (1 << 20)))
            digest.update(file.read(1 << 20))
    return digest.hexdigest()[:16]


def refuse_broken_weights(
    held: Iterable[tuple[str, torch.Tensor]], step: int, group: Group
) -> None:
    """A checkpoint of weights that are not numbers would break every later attempt.

    Args:
        held: the weights that learn, by name, or the parts of them that this rank holds.
        step: finished steps.
        group: the ranks; all of them call this.

    Raises:
        TrainingError: on all ranks, if one holds a weight that is not finite.
    """
    broken = next((name for name, weight in held if not weight.isfinite().all()), None)
    if group.any(broken is not None)[0]:
        raise TrainingError(
            f"{broken or 'a weight of another process'} is no longer finite after step {step}; "
            "try a lower learning_rate, a warmup, or a smaller max_grad_norm"
        )
