"""Which weights of a model learn, for each method of fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hpcml.plan.training.model import Model, Tensor, UnknownModel


class Part(NamedTuple):
    """Some tensors that a model has one or several times.

    Attributes:
        kind: embedding, layer, added (beside a layer, or before the text), head.
        tensors: what is in it.
        copies: how often, such as the number of layers.
        learns: whether they get gradients.
    """

    kind: str
    tensors: tuple[Tensor, ...]
    copies: int = 1
    learns: bool = True


def parts_of(model: Model, parameters: Mapping[str, Any]) -> tuple[Part, ...]:
    """The parts of a model that is trained with ``fine_tuning_method``, and which of them learn.

    Raises:
        UnknownModel: the method needs something that the model has not.
    """
    method = parameters.get("fine_tuning_method") or "full"
    layers = model.layers
    if method == "full":
        return _parts(model, frozen=0)
    if method == "freeze":
        count = parameters.get("num_frozen_layers")
        frozen = count if count is not None else len(set(parameters["frozen_layers"]))
        return _parts(model, frozen=min(frozen, layers), embedding=count is None)
    if method == "top":
        frozen = max(0, layers - parameters["num_top_layers"])
        # A head that is tied is the embedding.
        return _parts(model, frozen=frozen, embedding=model.tied)
    base = _parts(model, frozen=layers, embedding=False, head=False)
    if method == "lora":
        return (*base, Part("added", _lora(model, parameters), layers))
    if method == "adapter":
        return (*base, Part("added", _adapter(model, parameters["adapter_size"]), layers))
    tokens = Tensor("prompt", (parameters["num_virtual_tokens"], model.hidden))
    return (*base, Part("added", (tokens,)))


def _parts(
    model: Model, frozen: int, embedding: bool = True, head: bool = True
) -> tuple[Part, ...]:
    parts = (
        Part("embedding", model.embedding, 1, embedding),
        Part("layer", model.layer, frozen, False),
        Part("layer", model.layer, model.layers - frozen, True),
        Part("head", model.head, 1, head),
    )
    return tuple(part for part in parts if part.copies)


def _lora(model: Model, parameters: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Two matrices beside each target (Hu et al., "LoRA", 2021)."""
    rank = parameters["r"]
    matrices = {tensor.name: tensor for tensor in model.layer if len(tensor.shape) == 2}
    tensors = []
    for name in parameters["target_modules"]:
        if name not in matrices:
            raise UnknownModel(
                f"target_modules: what LoRA adds to {name!r} can't be counted, only to "
                f"{', '.join(matrices)}"
            )
        outputs, inputs = matrices[name].shape
        tensors.append(Tensor(f"{name}.lora_A", (rank, inputs)))
        tensors.append(Tensor(f"{name}.lora_B", (outputs, rank)))
    return tuple(tensors)


def _adapter(model: Model, size: int) -> tuple[Tensor, ...]:
    return (
        Tensor("gate", (size, model.hidden)),
        Tensor("up", (size, model.hidden)),
        Tensor("down", (model.hidden, size)),
    )
