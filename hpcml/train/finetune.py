"""Which weights learn: all, some of the model's own, or a few added ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from hpcml.train.config import TrainingConfig, TrainingError
from hpcml.train.model import decoder_layers

ADDED = ("lora", "adapter", "prompt_tuning")
"""Methods whose checkpoints hold the added weights only."""

_ADAPTER = "adapter.safetensors"


class AdaptedFeedForward(nn.Module):
    """A feed-forward layer with a narrow one beside it, which alone learns.

    It is the parallel adapter of J. He et al., "Towards a unified view of parameter-efficient
    transfer learning" (2022), shaped like the gated layer that it stands beside:
    ``down(act(gate(x)) · up(x))``. Hence it can be merged exactly, as further units of that layer,
    and the result is an ordinary model. It starts as a zero.

    Args:
        base: with ``gate_proj``, ``up_proj``, ``down_proj`` and ``act_fn``.
        size: units of the adapter.
    """

    def __init__(self, base: nn.Module, size: int) -> None:
        super().__init__()
        self.base = base
        hidden = base.gate_proj.in_features
        self.adapter = nn.ModuleDict(
            {
                "gate": nn.Linear(hidden, size, bias=False),
                "up": nn.Linear(hidden, size, bias=False),
                "down": nn.Linear(size, hidden, bias=False),
            }
        )
        nn.init.zeros_(self.adapter["down"].weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape (…, hidden size), as the layer beside it."""
        adapter = self.adapter
        activated = self.base.act_fn(adapter["gate"](hidden))
        added: torch.Tensor = adapter["down"](activated * adapter["up"](hidden))
        return self.base(hidden) + added


def prepare(model: PreTrainedModel, config: TrainingConfig) -> nn.Module:
    """Freeze what doesn't learn, and add what learns instead.

    Args:
        model: changed in place.
        config: the method and its parameters.

    Returns:
        The model to train: ``model``, or peft's wrapper around it.

    Raises:
        TrainingError: the method does not fit the model.
    """
    # What is added is random, and the same on every rank and after every restart.
    torch.manual_seed(config.seed)
    method = config.fine_tuning_method
    if method == "full":
        return model
    if method == "freeze":
        return _freeze(model, config)
    if method == "top":
        return _top(model, config)
    if method == "adapter":
        return add_adapters(model, config.adapter_size)
    if method in ("lora", "prompt_tuning"):
        return _with_peft(model, config)
    raise TrainingError(f"no fine_tuning_method is called {method!r}")


def _freeze(model: PreTrainedModel, config: TrainingConfig) -> nn.Module:
    layers = decoder_layers(model)
    if config.frozen_layers is not None:
        frozen = config.frozen_layers
    else:
        count = config.num_frozen_layers
        if count is None:
            raise TrainingError(
                "fine_tuning_method freeze needs num_frozen_layers or frozen_layers"
            )
        frozen = list(range(count))
        model.get_input_embeddings().requires_grad_(False)
    beyond = [number for number in frozen if number >= len(layers)]
    if beyond:
        raise TrainingError(f"the model has {len(layers)} layers, none is {beyond[0]}")
    for number in frozen:
        layers[number].requires_grad_(False)
    return model


def _top(model: PreTrainedModel, config: TrainingConfig) -> nn.Module:
    layers = decoder_layers(model)
    count = config.num_top_layers
    if count > len(layers):
        raise TrainingError(f"num_top_layers is {count}, but the model has {len(layers)} layers")
    model.requires_grad_(False)
    # The head may be tied to the embeddings; then they are one matrix, and it learns.
    model.get_output_embeddings().requires_grad_(True)
    for layer in layers[len(layers) - count :]:
        layer.requires_grad_(True)
    for name, parameter in model.named_parameters():
        if ".layers." not in name and "norm" in name:
            parameter.requires_grad_(True)
    return model


def _with_peft(model: PreTrainedModel, config: TrainingConfig) -> nn.Module:
    from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model

    if config.task_type != "CAUSAL_LM":
        raise TrainingError(f"task_type {config.task_type!r}: only CAUSAL_LM can be trained")
    task = TaskType(config.task_type)
    settings: Any
    if config.fine_tuning_method == "lora":
        settings = LoraConfig(
            r=config.r,
            lora_alpha=config.lora_alpha,
            target_modules=list(config.target_modules),
            lora_dropout=config.lora_dropout,
            bias=config.bias,
            task_type=task,
        )
    else:
        settings = PromptTuningConfig(task_type=task, num_virtual_tokens=config.num_virtual_tokens)
    try:
        return get_peft_model(model, settings)
    except ValueError as error:
        raise TrainingError(str(error).strip().partition("\n")[0]) from error


def add_adapters(model: PreTrainedModel, size: int) -> PreTrainedModel:
    """Put an adapter beside each feed-forward layer, and freeze everything else.

    Raises:
        TrainingError: the model's feed-forward layers are of another kind.
    """
    model.requires_grad_(False)
    for layer in decoder_layers(model):
        if not all(hasattr(layer.mlp, name) for name in ("gate_proj", "up_proj", "down_proj")):
            raise TrainingError(
                f"adapters need gated feed-forward layers, which {type(model).__name__} has not"
            )
        layer.mlp = AdaptedFeedForward(layer.mlp, size)
    return model


def merge_adapters(model: PreTrainedModel) -> PreTrainedModel:
    """The ordinary model that computes what ``model`` computes with its adapters."""
    size = 0
    for layer in decoder_layers(model):
        base, adapter = layer.mlp.base, layer.mlp.adapter
        size = adapter["gate"].out_features
        for name, dimension in (("gate", 0), ("up", 0), ("down", 1)):
            linear = getattr(base, f"{name}_proj")
            widened = torch.cat([linear.weight.data, adapter[name].weight.data], dim=dimension)
            linear.weight = nn.Parameter(widened)
            linear.out_features, linear.in_features = widened.shape
            if dimension == 0 and linear.bias is not None:
                linear.bias = nn.Parameter(functional.pad(linear.bias.data, (0, size)))
        layer.mlp = base
    model.config.intermediate_size += size
    return model


# -- weights on disk ----------------------------------------------------------------------------


def save_weights(
    model: Any, config: TrainingConfig, folder: Path, added: dict[str, torch.Tensor] | None = None
) -> None:
    """Write what a checkpoint needs of a model: all of it, or only what was added.

    Args:
        model: as :func:`prepare` returned it.
        config: the method.
        folder: with ``full``, ``freeze`` and ``top`` it becomes a model folder, with ``lora`` and
            ``prompt_tuning`` an adapter folder of peft.
        added: the weights that were added, by their names in the model, if they are not whole
            there.
    """
    folder.mkdir(exist_ok=True)
    method = config.fine_tuning_method
    if method == "adapter":
        save_file(
            _adapter_weights(model.state_dict() if added is None else added), folder / _ADAPTER
        )
        (folder / "adapter.json").write_text(json.dumps({"adapter_size": config.adapter_size}))
        return
    if method in ADDED:
        model.save_pretrained(str(folder), state_dict=added)
        (folder / "README.md").unlink(missing_ok=True)
        return
    model.save_pretrained(str(folder))
    # The Trainer turns the cache off, which is right for training only.
    settings = json.loads((folder / "config.json").read_text())
    settings["use_cache"] = True
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def stored_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights in a folder, by name; they are read when they are used."""
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights.update(load_file(file))
    return weights


def load_weights(
    model: Any,
    config: TrainingConfig,
    folder: Path,
    part: Callable[[torch.Tensor], torch.Tensor] = lambda whole: whole,
) -> None:
    """Read what :func:`save_weights` wrote into a model that was prepared in the same way.

    Args:
        model: gets the weights.
        config: the method.
        folder: with the weights.
        part: gives what the model has of a whole weight.
    """
    method = config.fine_tuning_method
    weights = {name: part(whole) for name, whole in stored_weights(folder).items()}
    if method == "adapter":
        model.load_state_dict(weights, strict=False)
    elif method in ADDED:
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(model, weights)
    else:
        missing, unexpected = model.load_state_dict(weights, strict=False)
        # A matrix that is used twice is stored once.
        tied = set(getattr(model, "all_tied_weights_keys", None) or model._tied_weights_keys or ())
        if unexpected or set(missing) - tied:
            raise TrainingError(f"{folder} holds the weights of another model")


def _adapter_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: weight.contiguous() for name, weight in weights.items() if ".mlp.adapter." in name
    }
