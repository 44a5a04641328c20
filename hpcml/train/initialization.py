"""The first weights of a new model, the same whatever the engine and the layout."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import nn

from hpcml.train.config import TrainingConfig, TrainingError


def initialize(named: Iterable[tuple[str, nn.Parameter]], config: TrainingConfig) -> None:
    """Give parameters of a new model their first weights.

    Biases become 0, norms stay as they are.
    """
    with torch.no_grad():
        for name, parameter in named:
            if parameter.ndim == 2:
                parameter.copy_(first_weights(name, tuple(parameter.shape), config))
            elif name.endswith(".bias"):
                parameter.zero_()


def first_weights(name: str, shape: tuple[int, int], config: TrainingConfig) -> torch.Tensor:
    """The first weights of one matrix, in single precision, on the CPU.

    They depend on the configuration and on the matrix' name only, so that a rank that holds a part
    of a model can draw just that part, and all layouts begin with the same model. He's methods
    keep the variance through a ReLU, Xavier's the one between inputs and outputs; ``init_gain``
    multiplies either.

    Args:
        name: of the parameter in the Hugging Face model, such as ``lm_head.weight``.
        shape: outputs and inputs.
        config: ``init_method`` with its numbers, and the seed.
    """
    digest = hashlib.blake2b(f"{config.seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    weight, gain = torch.empty(shape), config.init_gain
    if config.init_method == "normal":
        nn.init.normal_(weight, std=config.init_std, generator=generator)
    elif config.init_method == "xavier_uniform":
        nn.init.xavier_uniform_(weight, gain=gain, generator=generator)
    elif config.init_method == "xavier_normal":
        nn.init.xavier_normal_(weight, gain=gain, generator=generator)
    elif config.init_method == "he_uniform":
        nn.init.kaiming_uniform_(weight, nonlinearity="relu", generator=generator)
        weight.mul_(gain)
    elif config.init_method == "he_normal":
        nn.init.kaiming_normal_(weight, nonlinearity="relu", generator=generator)
        weight.mul_(gain)
    else:
        raise TrainingError(f"no init_method is called {config.init_method!r}")
    return weight
