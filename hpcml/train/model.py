"""The model: a new Llama with weights drawn by our own methods, or one from a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from hpcml.train.config import TrainingConfig, TrainingError


def new_model(
    config: TrainingConfig,
    vocab_size: int,
    special_tokens: dict[str, int | None],
    weights: bool = True,
) -> PreTrainedModel:
    """A Llama with random weights, which depend on the configuration only.

    Args:
        config: its shape, initialization and seed.
        vocab_size: rows of the embeddings.
        special_tokens: ``bos_token_id``, ``eos_token_id`` and ``pad_token_id``.
        weights: False draws none.

    Raises:
        TrainingError: the shape contradicts itself.
    """
    shape = new_shape(config, vocab_size, special_tokens)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    if weights:
        initialize(model.named_parameters(), config)
    return model


def new_shape(
    config: TrainingConfig, vocab_size: int, special_tokens: dict[str, int | None]
) -> LlamaConfig:
    """What :func:`new_model` makes, without any weights.

    Raises:
        TrainingError: the shape contradicts itself.
    """
    heads = config.num_attention_heads
    key_value_heads = config.num_key_value_heads or heads
    if config.hidden_size % heads or heads % key_value_heads or config.hidden_size // heads % 2:
        raise TrainingError(
            f"hidden_size {config.hidden_size} must be an even multiple of num_attention_heads "
            f"{heads}, and that a multiple of num_key_value_heads {key_value_heads}"
        )
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size or -(-config.hidden_size * 8 // 192) * 64,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        hidden_act=config.hidden_act,
        max_position_embeddings=config.max_length,
        tie_word_embeddings=config.tie_word_embeddings,
        initializer_range=config.init_std,
        **special_tokens,
    )


def load_model(folder: Path, max_length: int, weights: bool = True) -> PreTrainedModel:
    """The model of a folder, in single precision.

    Args:
        folder: as ``save_pretrained`` leaves it.
        max_length: tokens of a training sequence.
        weights: False reads none.

    Raises:
        TrainingError: there is none, or it has fewer positions than ``max_length``.
    """
    if not (folder / "config.json").is_file():
        raise TrainingError(f"no model at {folder}: it has no config.json")
    try:
        if weights:
            model = read_model(folder)
        else:
            shape = AutoConfig.from_pretrained(str(folder), local_files_only=True)
            model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().partition("\n")[0]
        raise TrainingError(f"{folder} holds no usable model: {first}") from error
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and positions < max_length:
        raise TrainingError(f"max_length {max_length} is above the model's {positions} positions")
    return model


def read_model(folder: Path, dtype: torch.dtype | str = torch.float32) -> PreTrainedModel:
    """The model of a folder, also of one in a checkpoint of the engine megatron.

    Args:
        folder: as ``save_pretrained``, or a checkpoint, leaves it.
        dtype: of the weights; ``auto`` leaves them as they are.
    """
    from hpcml.train.megatron import weights  # it needs this module

    if weights.distributed(folder) is None:
        return AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, local_files_only=True)
    shape = LlamaConfig.from_pretrained(str(folder), local_files_only=True)
    state = dict(weights.of_checkpoint(folder, shape))
    if dtype == "auto":
        dtype = next(iter(state.values())).dtype
    return LlamaForCausalLM.from_pretrained(None, config=shape, state_dict=state, dtype=dtype)


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


def add_dropout(model: PreTrainedModel, probability: float) -> None:
    """Drop activations during training: attention weights, and what each block adds.

    The blocks are the embeddings, each attention and each feed-forward layer (as in "Attention is
    all you need", 5.4). Hooks leave the names of the weights as they are.
    """
    if not probability:
        return

    def drop(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (functional.dropout(output[0], probability, module.training), *output[1:])
        return functional.dropout(output, probability, module.training)

    model.get_input_embeddings().register_forward_hook(drop)
    for layer in decoder_layers(model):
        layer.self_attn.register_forward_hook(drop)
        layer.mlp.register_forward_hook(drop)
        # Read in each forward pass; setting it only in the config would come too late.
        layer.self_attn.attention_dropout = probability


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The layers of a model, the first one next to the embeddings.

    Raises:
        TrainingError: the model has another architecture.
    """
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "layers" and isinstance(module, nn.ModuleList):
            return module
    raise TrainingError(f"{type(model).__name__} has no list of layers that hpcml knows")
