"""The loss of next-token prediction."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from hpcml.data.dataset import IGNORE
from hpcml.train.config import TrainingConfig, TrainingError


class TokenLoss:
    """The mean loss of the tokens of a step, as ``Trainer(compute_loss_func=…)`` wants it.

    Args:
        config: which loss, and its parameters.
    """

    def __init__(self, config: TrainingConfig) -> None:
        if config.loss_function not in ("cross_entropy", "focal", "z_loss"):
            raise TrainingError(f"no loss is called {config.loss_function!r}")
        self._config = config

    def __call__(
        self, outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int
    ) -> torch.Tensor:
        """The part of one forward pass in the mean loss of a whole step.

        Args:
            outputs: of the model; its ``logits`` have the shape (sequences, tokens, vocabulary).
            labels: the next token of each position, or :data:`IGNORE`.
                Shape (sequences, tokens). They may be fewer than the logits' positions: learned
                vectors before the text predict nothing.
            num_items_in_batch: labels that count in the whole step, over all passes and ranks.
        """
        logits = outputs.logits[:, -labels.shape[1] :]
        return self.sum(logits.flatten(0, 1), labels.flatten()) / num_items_in_batch

    def sum(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The summed loss of positions. Shapes (positions, vocabulary) and (positions,)."""
        config = self._config
        logits = logits.float()
        if config.loss_function == "focal":
            each = functional.cross_entropy(
                logits,
                labels,
                ignore_index=IGNORE,
                reduction="none",
                label_smoothing=config.label_smoothing_factor,
            )
            return (_missed(logits, labels) ** config.focal_gamma * each).sum()
        loss = functional.cross_entropy(
            logits,
            labels,
            ignore_index=IGNORE,
            reduction="sum",
            label_smoothing=config.label_smoothing_factor,
        )
        if config.loss_function == "z_loss":
            partition = logits.logsumexp(dim=-1)[labels != IGNORE]
            loss = loss + config.z_loss_weight * (partition**2).sum()
        return loss


def _missed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The probability that each position gives to wrong tokens. Shape (positions,)."""
    surprise = functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
    return 1 - torch.exp(-surprise)
