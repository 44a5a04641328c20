from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hpcml.train.config import TrainingConfig, TrainingError
from hpcml.train.model import new_model
from hpcml.train.optimizer import build_optimizer


def tiny() -> nn.Module:
    config = TrainingConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, tie_word_embeddings=False
    )
    return new_model(config, 11, {})


def build(model: nn.Module | None = None, **parameters: Any) -> torch.optim.Optimizer:
    config = TrainingConfig(**parameters)
    return build_optimizer((model or tiny()).named_parameters(), config, 2)


@pytest.mark.parametrize(
    ("optim", "kind"),
    [
        ("sgd", torch.optim.SGD),
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
        ("rmsprop", torch.optim.RMSprop),
        ("adagrad", torch.optim.Adagrad),
    ],
)
def test_optim_is_the_optimizer(optim: str, kind: type) -> None:
    assert type(build(optim=optim)) is kind


@pytest.mark.parametrize(
    ("parameters", "read", "value"),
    [
        ({"learning_rate": 0.5}, lambda group: group["lr"], 0.5),
        ({"optim": "sgd", "momentum": 0.7}, lambda group: group["momentum"], 0.7),
        ({"optim": "rmsprop", "momentum": 0.7}, lambda group: group["momentum"], 0.7),
        ({"adam_beta1": 0.8}, lambda group: group["betas"][0], 0.8),
        ({"adam_beta2": 0.8}, lambda group: group["betas"][1], 0.8),
        ({"optim": "adam", "adam_epsilon": 1e-3}, lambda group: group["eps"], 1e-3),
    ],
)
def test_the_optimizer_gets_its_parameters(
    parameters: dict[str, Any], read: Callable[[dict[str, Any]], float], value: float
) -> None:
    assert {read(group) for group in build(**parameters).param_groups} == {value}


@pytest.mark.parametrize("optim", ["sgd", "adam", "adamw", "rmsprop", "adagrad"])
def test_weight_decay_is_for_matrices_only(optim: str) -> None:
    for group in build(optim=optim, weight_decay=0.3).param_groups:
        matrices = {parameter.ndim >= 2 for parameter in group["params"]}
        assert len(matrices) == 1
        assert group["weight_decay"] == (0.3 if matrices.pop() else 0.0)


def test_each_layer_learns_slower_than_the_one_above() -> None:
    model = tiny()
    rates = {
        id(parameter): group["lr"]
        for group in build(model, learning_rate=1.0, layerwise_lr_decay=0.5).param_groups
        for parameter in group["params"]
    }
    expected = {"lm_head": 1.0, "model.norm": 1.0, "layers.1.": 0.5, "layers.0.": 0.25}
    for name, parameter in model.named_parameters():
        rate = next((rate for part, rate in expected.items() if part in name), 0.125)
        assert rates[id(parameter)] == rate, name


def test_only_what_learns_is_optimized() -> None:
    model = tiny()
    model.requires_grad_(False)
    with pytest.raises(TrainingError, match="no weights learn"):
        build(model)
    model.get_output_embeddings().requires_grad_(True)
    (group,) = build(model).param_groups
    assert len(group["params"]) == 1


def test_an_unknown_one_is_refused() -> None:
    with pytest.raises(TrainingError, match="no optimizer"):
        build(optim="lion")
