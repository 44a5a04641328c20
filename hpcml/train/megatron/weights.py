"""Weights under the names of Hugging Face, and as megatron-core holds them. Exact, both ways.

megatron-core puts the projections of queries, keys and values into one matrix, head by head, and
those of the gate and of what it gates into another; tensor parallelism cuts matrices by rows, or
those that follow such a one by columns.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hpcml.train.config import TrainingConfig, TrainingError
from hpcml.train.initialization import first_weights
from hpcml.train.llama import Llama

Source = Callable[[str], torch.Tensor]
"""Gives a whole tensor by its name in Hugging Face's model."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# With Transformer Engine, a norm is part of the matrix after it.
_SAME = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
}
_BY_COLUMNS = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_QKV, _FC1 = "self_attention.linear_qkv.weight", "mlp.linear_fc1.weight"
_PROJECTIONS = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")
_GATED = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def assign(
    parts: Iterable[nn.Module], source: Source, shape: Llama, rank: int, tensor: int
) -> None:
    """Give the parts of the model that a process holds their weights.

    Args:
        parts: of the model, each a ``GPTModel`` or a wrapper of one.
        source: the whole tensors; each is asked for when it is needed, and not kept.
        shape: the model.
        rank, tensor: which of how many tensor-parallel processes this is.
    """
    for part in parts:
        while hasattr(part, "module"):
            part = part.module
        first = part.decoder.layers[0].layer_number - 1 if len(part.decoder.layers) else 0
        for name, parameter in part.named_parameters():
            value = _local(name, first, source, shape, rank, tensor)
            with torch.no_grad():
                parameter.copy_(value)


def _local(
    name: str, first_layer: int, source: Source, shape: Llama, rank: int, tensor: int
) -> torch.Tensor:
    """A parameter's weights in one process; layers are counted from ``first_layer``."""
    match = _LAYER.fullmatch(name)
    if match is None:
        if name == "decoder.final_layernorm.weight":
            return source(_NORM)
        if name == "output_layer.weight" and not shape.tie_word_embeddings:
            return _rows(source(_HEAD), rank, tensor)
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            return _rows(source(_EMBEDDING), rank, tensor)
        raise ValueError(f"a Llama has no {name}")
    prefix = f"model.layers.{first_layer + int(match[1])}."
    kind = match[2]
    if kind in _SAME:
        return source(prefix + _SAME[kind])
    if kind in _BY_COLUMNS:
        return source(prefix + _BY_COLUMNS[kind]).chunk(tensor, dim=1)[rank]
    if kind == _FC1:
        return torch.cat([source(prefix + half).chunk(tensor)[rank] for half in _GATED])
    if kind == _QKV:
        return join_heads([source(prefix + name) for name in _PROJECTIONS], shape).chunk(tensor)[
            rank
        ]
    raise ValueError(f"a layer of a Llama has no {kind}")


def _rows(matrix: torch.Tensor, rank: int, tensor: int) -> torch.Tensor:
    """The rows of a process, of a matrix that is filled up with rows of zeros if need be."""
    count = -(-len(matrix) // tensor)
    rows = matrix[rank * count : (rank + 1) * count]
    return nn.functional.pad(rows, (0, 0, 0, count - len(rows)))


def join_heads(projections: list[torch.Tensor], shape: Llama) -> torch.Tensor:
    """The matrix of queries, keys and values: for each key-value head its queries, key, value.

    Args:
        projections: of queries, keys and values. Shapes (heads · width, hidden), and twice
            (key-value heads · width, hidden).
        shape: the model.
    """
    groups = shape.num_key_value_heads
    each = [matrix.unflatten(0, (groups, -1)) for matrix in projections]
    return torch.cat(each, dim=1).flatten(0, 1)


def split_heads(matrix: torch.Tensor, shape: Llama) -> list[torch.Tensor]:
    """The projections of queries, keys and values: the inverse of :func:`join_heads`."""
    groups, width = shape.num_key_value_heads, shape.head_dim
    queries = shape.num_attention_heads // groups * width
    each = matrix.unflatten(0, (groups, -1)).split([queries, width, width], dim=1)
    return [part.flatten(0, 1) for part in each]


def new(shape: Llama, config: TrainingConfig) -> Source:
    """The first weights of a new model, each drawn when it is asked for."""

    def draw(name: str) -> torch.Tensor:
        size = shape.parameter_shape(name)
        if len(size) == 1:
            return torch.ones(size)
        outputs, inputs = size
        return first_weights(name, (outputs, inputs), config)

    return draw


def of_folder(folder: Path) -> tuple[Llama, Source]:
    """A model and its weights: a folder of Hugging Face's, or one in a checkpoint of this engine.

    Raises:
        TrainingError: there is none, or it is no Llama.
    """
    if not (folder / "config.json").is_file():
        raise TrainingError(f"no model at {folder}: it has no config.json")
    shape = Llama.of(folder)
    if distributed(folder) is not None:
        return shape, dict(of_checkpoint(folder, shape)).__getitem__
    places: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            places |= dict.fromkeys(file.keys(), path)
    if _EMBEDDING not in places:
        raise TrainingError(f"{folder} has no weights in files of safetensors")

    def load_one(name: str) -> torch.Tensor:
        with safe_open(places[name], "pt") as file:
            weight: torch.Tensor = file.get_tensor(name)
        return weight

    return shape, load_one


def distributed(folder: Path) -> Path | None:
    """Where the weights of a model in a checkpoint of this engine lie; None if it is none."""
    beside = folder.parent / "megatron"
    return beside if (beside / ".metadata").is_file() else None


def of_checkpoint(folder: Path, shape: Llama) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a model in a checkpoint of this engine, whole, under Hugging Face's names.

    Whatever layout wrote it, one process without a GPU reads it, one matrix of all layers at a
    time. megatron-core is not needed.

    Args:
        folder: ``model`` in the checkpoint.
        shape: the model.
    """
    place = distributed(folder)
    assert place is not None, f"{folder} is in no checkpoint of megatron"
    reader = FileSystemReader(place)
    stored = reader.read_metadata().state_dict_metadata

    def tensor(name: str) -> torch.Tensor:
        described = stored[name]
        assert isinstance(described, TensorStorageMetadata)
        state = {name: torch.empty(described.size, dtype=described.properties.dtype)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that no other process takes part
            load(state, storage_reader=reader, no_dist=True)
        return state[name]

    yield _EMBEDDING, tensor("embedding.word_embeddings.weight")[: shape.vocab_size]
    yield _NORM, tensor("decoder.final_layernorm.weight")
    if not shape.tie_word_embeddings:
        yield _HEAD, tensor("output_layer.weight")[: shape.vocab_size]
    for kind, name in (_SAME | _BY_COLUMNS).items():
        if f"decoder.layers.{kind}" in stored:
            for layer, matrix in enumerate(tensor(f"decoder.layers.{kind}")):
                yield f"model.layers.{layer}.{name}", matrix
    for layer, matrix in enumerate(tensor(f"decoder.layers.{_QKV}")):
        for name, projection in zip(_PROJECTIONS, split_heads(matrix, shape), strict=True):
            yield f"model.layers.{layer}.{name}", projection
    for layer, matrix in enumerate(tensor(f"decoder.layers.{_FC1}")):
        for name, half in zip(_GATED, matrix.chunk(2), strict=True):
            yield f"model.layers.{layer}.{name}", half
