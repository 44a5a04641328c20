"""What a cell is trained on: sequences in an order that depends on nothing but the seed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hpcml.data.corpus import find_corpus
from hpcml.data.dataset import (
    Dataset,
    DatasetSettings,
    DocumentSamples,
    PackedSamples,
    Samples,
    open_dataset,
)
from hpcml.data.sampler import Indices, Sampler
from hpcml.train.config import TrainingError, TrainingJob

# An evaluation reads at most this many tokens of the held-out split, whatever the batch size, so
# that cells with different batch sizes are compared on the same text.
EVALUATION_TOKENS = 1 << 16


@dataclass(frozen=True)
class TrainingData:
    """The sequences of a cell, the same for every engine.

    Attributes:
        samples: what is trained on.
        held_out: what is evaluated on, or None.
        sampler: which samples belong to which step.
        total_steps: length of the training.
    """

    samples: Samples
    held_out: Samples | None
    sampler: Sampler
    total_steps: int

    @classmethod
    def of(cls, job: TrainingJob, dataset: Dataset) -> TrainingData:
        """The sequences that a cell takes from its data set.

        Raises:
            TrainingError: there is less than one sequence, in either split.
        """
        config = job.config
        padding = dataset.special_tokens["pad_token_id"] or 0
        samples = _samples(job, dataset, "train", padding)
        held_out = _samples(job, dataset, "eval", padding) if job.eval_fraction else None
        if not len(samples):
            raise TrainingError(
                f"the corpus has {dataset.split('train').tokens} tokens to train on, fewer than "
                f"one sequence of max_length {config.max_length}"
            )
        if held_out is not None and not len(held_out):
            raise TrainingError(
                f"the held-out part has {dataset.split('eval').tokens} tokens, fewer than one "
                f"sequence of max_length {config.max_length}: raise data.eval_fraction, or set it "
                "to 0 to hold nothing out"
            )
        sampler = Sampler(
            len(samples),
            config.seed,
            config.global_batch_size,
            samples.lengths
            if config.group_by_length and isinstance(samples, DocumentSamples)
            else None,
        )
        total_steps = config.max_steps or math.ceil(
            config.num_train_epochs * len(samples) / config.global_batch_size
        )
        return cls(samples, held_out, sampler, total_steps)

    @property
    def packed(self) -> bool:
        """Whether every token of every sequence counts in the loss."""
        return isinstance(self.samples, PackedSamples)

    def evaluation_batches(self, max_length: int, size: int) -> list[Indices]:
        """The held-out samples that an evaluation reads, in batches of ``size`` or fewer."""
        if self.held_out is None:
            return []
        count = min(max(EVALUATION_TOKENS // max_length, 1), len(self.held_out))
        return [np.arange(start, min(start + size, count)) for start in range(0, count, size)]


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


def _samples(job: TrainingJob, dataset: Dataset, split: str, padding: int) -> Samples:
    length = job.config.max_length
    if job.packing:
        return PackedSamples(dataset.split(split), length)
    return DocumentSamples(dataset.split(split), length, padding)
