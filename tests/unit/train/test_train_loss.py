from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcml.data.dataset import IGNORE
from hpcml.train.config import TrainingConfig, TrainingError
from hpcml.train.loss import TokenLoss

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(2, 5, 7, generator=GENERATOR, dtype=torch.float64).float()
LABELS = torch.tensor([[1, 2, 3, IGNORE, IGNORE], [0, 6, 5, 4, 3]])
COUNTED = 8


def loss(logits: torch.Tensor = LOGITS, **parameters: Any) -> float:
    function = TokenLoss(TrainingConfig(**parameters))
    return function(SimpleNamespace(logits=logits), LABELS, COUNTED).item()


def by_hand(**parameters: Any) -> float:
    """The same from the definitions, one position at a time."""
    config = TrainingConfig(**parameters)
    total = 0.0
    for logits, label in zip(LOGITS.flatten(0, 1).double(), LABELS.flatten().tolist(), strict=True):
        if label == IGNORE:
            continue
        logs = logits.log_softmax(0)
        smoothing = config.label_smoothing_factor
        each = -(1 - smoothing) * logs[label] - smoothing * logs.mean()
        if config.loss_function == "focal":
            each = (1 - logs[label].exp()) ** config.focal_gamma * each
        if config.loss_function == "z_loss":
            each = each + config.z_loss_weight * logits.logsumexp(0) ** 2
        total += each.item()
    return total / COUNTED


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"label_smoothing_factor": 0.2},
        {"loss_function": "focal"},
        {"loss_function": "focal", "focal_gamma": 0.5},
        {"loss_function": "focal", "label_smoothing_factor": 0.1},
        {"loss_function": "z_loss"},
        {"loss_function": "z_loss", "z_loss_weight": 0.3},
    ],
)
def test_the_loss_is_what_its_definition_says(parameters: dict[str, Any]) -> None:
    assert loss(**parameters) == pytest.approx(by_hand(**parameters), rel=1e-5)


def test_each_parameter_changes_it() -> None:
    values = [
        loss(),
        loss(label_smoothing_factor=0.2),
        loss(loss_function="focal"),
        loss(loss_function="focal", focal_gamma=0.5),
        loss(loss_function="z_loss"),
        loss(loss_function="z_loss", z_loss_weight=0.3),
    ]
    assert len(set(values)) == len(values)


def test_vectors_before_the_text_predict_nothing() -> None:
    longer = torch.cat([torch.randn(2, 3, 7), LOGITS], dim=1)
    assert loss(longer) == loss(LOGITS)


def test_an_unknown_one_is_refused() -> None:
    with pytest.raises(TrainingError, match="no loss"):
        TokenLoss(TrainingConfig(loss_function="hinge"))
