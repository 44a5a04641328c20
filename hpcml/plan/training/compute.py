"""Floating-point operations of a training, and how long they take."""

from __future__ import annotations

from dataclasses import dataclass

from hpcml.plan.training.layout import Layout, Recompute, Training


@dataclass(frozen=True)
class Speed:
    """What a GPU is assumed to do.

    Attributes:
        tflops: its dense peak, in 10^12 operations per second.
        mfu: the part of it that is reached while it computes.
    """

    tflops: float
    mfu: float


def step_flops(training: Training, recompute: Recompute = "none") -> float:
    """Floating-point operations of one step, of all GPUs together.

    A multiplication and an addition are two. The forward pass multiplies each token with each
    matrix, and attention's scores are counted in full, without the half that a causal mask spares;
    the backward pass takes twice as many, or once where weights don't learn; ``recompute`` repeats
    the forward pass of what is computed again. For GPT this is 72 B s l h² (1 + s/(6h) +
    V/(12 l h)), and 96 B s l h² (1 + s/(6h) + V/(16 l h)) with full recomputation: Narayanan et al.
    2021, section 5.1 and appendix.
    """
    model = training.model
    tokens = training.global_batch * training.length
    layer = 2 * sum(tensor.numel for tensor in model.layer if len(tensor.shape) == 2)
    attention = 4 * training.length * model.heads * model.head_dim
    head = 2 * model.hidden * model.vocab
    forward = model.layers * (layer + attention) + head
    # Gradients of activations cost as much as the forward pass, those of weights only where they
    # are learned.
    learned = sum(
        2 * part.copies * tensor.numel
        for part in training.parts
        if part.learns and part.kind in ("layer", "added")
        for tensor in part.tensors
        if len(tensor.shape) == 2
    )
    head_learns = any(
        part.learns and part.kind == ("embedding" if model.tied else "head")
        for part in training.parts
    )
    learned += model.layers * attention + (head if head_learns else 0)
    again = {"none": 0, "selective": model.layers * attention, "full": forward - head}[recompute]
    if recompute == "selective" and training.flash:
        again = 0  # its backward pass always computes the scores again
    return float(tokens * (2 * forward + learned + again))


def step_seconds(training: Training, layout: Layout, speed: Speed) -> float:
    """How long a step takes, in seconds.

    Computing (with what is computed again) at ``speed``, and the bubble of the pipeline on top of
    it. What communication does not hide is in the assumed MFU; it is not told apart by layout.
    """
    operations = step_flops(training, layout.recompute)
    computing = operations / (layout.world * speed.tflops * 1e12 * speed.mfu)
    return computing * (1 + layout.bubble)
