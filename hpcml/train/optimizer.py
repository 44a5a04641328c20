"""The optimizer: torch's own, with one parameter group per learning rate and weight decay."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hpcml.train.config import TrainingConfig, TrainingError

_LAYER = re.compile(r"\blayers\.(\d+)\.")


def build_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]], config: TrainingConfig, num_layers: int
) -> torch.optim.Optimizer:
    """The optimizer of the parameters that learn.

    Weights decay, biases and norms (whatever has one dimension) don't. With
    ``layerwise_lr_decay`` each layer's learning rate is that factor times the one of the layer
    above; the head and the last norm are above all layers, the embeddings below.

    Args:
        parameters: names and parameters of the model; those without gradients are left out.
        config: the hyperparameters.
        num_layers: layers of the model.

    Raises:
        TrainingError: nothing learns.
    """
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        depth_below_head = num_layers - _depth(name, num_layers)
        rate = config.learning_rate * config.layerwise_lr_decay**depth_below_head
        # Of a parameter that DeepSpeed shares, the shape is empty.
        shape = getattr(parameter, "ds_shape", parameter.shape)
        decay = config.weight_decay if len(shape) >= 2 else 0.0
        group = groups.setdefault((rate, decay), {"params": [], "lr": rate, "weight_decay": decay})
        group["params"].append(parameter)
    if not groups:
        raise TrainingError(
            f"no weights learn with fine_tuning_method {config.fine_tuning_method}: everything is "
            "frozen"
        )
    return _make(list(groups.values()), config)


def _make(groups: list[dict[str, Any]], config: TrainingConfig) -> torch.optim.Optimizer:
    rate = config.learning_rate
    adam: dict[str, Any] = {
        "lr": rate,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_epsilon,
        # One kernel for all parameters; there is one for CPUs and one for CUDA.
        "fused": groups[0]["params"][0].device.type in ("cpu", "cuda"),
    }
    if config.optim == "adamw":
        return torch.optim.AdamW(groups, **adam)
    if config.optim == "adam":
        return torch.optim.Adam(groups, **adam)
    if config.optim == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=config.momentum)
    if config.optim == "rmsprop":
        return torch.optim.RMSprop(groups, lr=rate, momentum=config.momentum)
    if config.optim == "adagrad":
        return torch.optim.Adagrad(groups, lr=rate)
    raise TrainingError(f"no optimizer is called {config.optim!r}")


def _depth(name: str, num_layers: int) -> int:
    """Where a parameter lies: -1 before the layers, then their numbers, ``num_layers`` after."""
    match = _LAYER.search(name)
    if match:
        return int(match[1])
    return -1 if "embed" in name else num_layers
