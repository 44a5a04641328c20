"""The shape of a language model, and the tensors that it is made of."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple


class UnknownModel(ValueError):
    """The shape of a model can't be known; the message says why."""


class Tensor(NamedTuple):
    """A parameter of a model.

    Attributes:
        name: the last part of its name in Hugging Face's Llama.
        shape: its lengths.
        split: the dimension that tensor parallelism divides; None where each rank has all of it.
    """

    name: str
    shape: tuple[int, ...]
    split: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def share(self, ranks: int) -> int:
        """Elements that one of ``ranks`` tensor-parallel ranks has; a vocabulary is padded."""
        if self.split is None:
            return self.numel
        length = self.shape[self.split]
        return self.numel // length * -(-length // ranks)


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer: Llama, unless the last attributes say otherwise.

    Attributes:
        layers, hidden, heads, kv_heads, intermediate, vocab: its sizes; ``vocab`` is the number of
            rows of the embeddings.
        head_dim: width of one head.
        tied: whether the head is the embedding matrix.
        gated: whether the feed-forward layers have a third matrix (SwiGLU).
        biased: the matrices of a layer that have a bias.
        layer_norm: whether norms have a bias too (LayerNorm instead of RMSNorm).
        qk_norm: whether queries and keys have a norm each.
        positions: rows of a matrix of learned positions; 0 for rotary ones.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    head_dim: int
    tied: bool = True
    gated: bool = True
    biased: frozenset[str] = frozenset()
    layer_norm: bool = False
    qk_norm: bool = False
    positions: int = 0

    @cached_property
    def embedding(self) -> tuple[Tensor, ...]:
        """What lies before the layers."""
        tensors = [Tensor("embed_tokens", (self.vocab, self.hidden), 0)]
        if self.positions:
            tensors.append(Tensor("embed_positions", (self.positions, self.hidden)))
        return tuple(tensors)

    @cached_property
    def layer(self) -> tuple[Tensor, ...]:
        """One layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        tensors = [
            *self._norm("input_layernorm", self.hidden),
            *self._linear("q_proj", queries, self.hidden, 0),
            *self._linear("k_proj", keys, self.hidden, 0),
            *self._linear("v_proj", keys, self.hidden, 0),
            *self._linear("o_proj", self.hidden, queries, 1),
        ]
        if self.qk_norm:
            tensors += [*self._norm("q_norm", self.head_dim), *self._norm("k_norm", self.head_dim)]
        tensors += self._norm("post_attention_layernorm", self.hidden)
        if self.gated:
            tensors += self._linear("gate_proj", self.intermediate, self.hidden, 0)
        tensors += self._linear("up_proj", self.intermediate, self.hidden, 0)
        tensors += self._linear("down_proj", self.hidden, self.intermediate, 1)
        return tuple(tensors)

    @cached_property
    def head(self) -> tuple[Tensor, ...]:
        """What comes after the layers; a tied matrix belongs to the embedding."""
        head = () if self.tied else (Tensor("lm_head", (self.vocab, self.hidden), 0),)
        return (*self._norm("norm", self.hidden), *head)

    def _norm(self, name: str, width: int) -> list[Tensor]:
        tensors = [Tensor(name, (width,))]
        if self.layer_norm:
            tensors.append(Tensor(f"{name}.bias", (width,)))
        return tensors

    def _linear(self, name: str, outputs: int, inputs: int, split: int) -> list[Tensor]:
        tensors = [Tensor(name, (outputs, inputs), split)]
        if name in self.biased:
            # A matrix that is divided by its inputs has its bias on every rank.
            tensors.append(Tensor(f"{name}.bias", (outputs,), 0 if split == 0 else None))
        return tensors

    @property
    def parameters(self) -> int:
        """All parameters."""
        return numel(self.embedding) + self.layers * numel(self.layer) + numel(self.head)

    def counts(self) -> dict[str, int]:
        """Numbers of parameters: total, embedding, head, layer (one of them), non_embedding.

        ``head`` is the head's own matrix, 0 where it is tied. ``non_embedding`` leaves out the
        embedding, the positions and the head (Kaplan et al., "Scaling laws for neural language
        models", 2020).
        """
        embedding = numel(self.embedding)
        head = 0 if self.tied else self.vocab * self.hidden
        return {
            "total": self.parameters,
            "embedding": embedding,
            "head": head,
            "layer": numel(self.layer),
            "non_embedding": self.parameters - embedding - head,
        }


def numel(tensors: tuple[Tensor, ...]) -> int:
    """Elements of some tensors together."""
    return sum(tensor.numel for tensor in tensors)


def new_model(parameters: Mapping[str, Any]) -> Model:
    """The model that a training makes from resolved hyperparameters.

    Raises:
        UnknownModel: one of the sizes isn't decided yet.
    """

    def size(name: str) -> int:
        value = parameters.get(name)
        if not isinstance(value, int):
            raise UnknownModel(f"{name} is not known before the training begins")
        return value

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    return Model(
        layers=size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=size("num_key_value_heads"),
        intermediate=size("intermediate_size"),
        vocab=size("vocab_size"),
        head_dim=hidden // heads,
        tied=bool(parameters["tie_word_embeddings"]),
    )


def tokenizer_size(folder: Path) -> int:
    """Tokens of a tokenizer, by its ``tokenizer.json``.

    Raises:
        UnknownModel: it can't be read.
    """
    path = folder / "tokenizer.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        # A mapping of texts to numbers, or (Unigram) a list of texts with scores.
        last = max(vocabulary.values()) if isinstance(vocabulary, dict) else len(vocabulary) - 1
        ids = [last, *(token["id"] for token in content.get("added_tokens", []))]
        return 1 + max(map(int, ids))
    except OSError as error:
        raise UnknownModel(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnknownModel(f"{path} is no tokenizer that can be counted: {error!r}") from None


_QKV = frozenset({"q_proj", "k_proj", "v_proj"})
_MLP = frozenset({"gate_proj", "up_proj", "down_proj"})
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def model_of(folder: Path) -> Model:
    """The model of a Hugging Face folder, by its ``config.json``.

    Raises:
        UnknownModel: there is none, or it is of a family that isn't counted here.
    """
    path = folder / "config.json"
    if not path.is_file():
        path = folder / "model" / "config.json"  # a checkpoint has the model in a folder
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        family = config["model_type"]
        if family not in _FAMILIES:
            raise UnknownModel(
                f"{path}: models of type {family!r} can't be counted, only {', '.join(_FAMILIES)}"
            )
        biased: frozenset[str] = _QKV if family == "qwen2" else frozenset()
        if family != "qwen2" and config.get("attention_bias"):
            biased |= _QKV | {"o_proj"}
        if config.get("mlp_bias"):
            biased |= _MLP
        heads = config["num_attention_heads"]
        return Model(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            tied=bool(config.get("tie_word_embeddings")),
            biased=biased,
            qk_norm=family == "qwen3",
        )
    except OSError as error:
        raise UnknownModel(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, UnknownModel):
            raise
        what = f"has no {error}" if isinstance(error, KeyError) else str(error)
        raise UnknownModel(f"{path}: {what}") from None
