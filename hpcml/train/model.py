"""The model: a new Llama with weights drawn by our own methods, or one from a folder."""

from __future__ import annotations

from collections.abc import Mapping
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
from hpcml.train.initialization import initialize
from hpcml.train.llama import Llama


def new_model(
    config: TrainingConfig,
    vocab_size: int,
    special_tokens: Mapping[str, int | None],
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
    shape = LlamaConfig.from_dict(dict(Llama.new(config, vocab_size, special_tokens).document))
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    if weights:
        initialize(model.named_parameters(), config)
    return model


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
    state = dict(weights.of_checkpoint(folder, Llama.of(folder)))
    if dtype == "auto":
        dtype = next(iter(state.values())).dtype
    return LlamaForCausalLM.from_pretrained(None, config=shape, state_dict=state, dtype=dtype)


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
