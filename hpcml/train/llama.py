"""What a Llama is, in Hugging Face's terms.

Importing transformers takes most of a second: only what needs it does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hpcml.train.config import TrainingConfig, TrainingError


@dataclass(frozen=True)
class Llama:
    """The shape of a model, each field under the name that it has in ``config.json``.

    Attributes:
        document: all of ``config.json``.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    max_position_embeddings: int
    tie_word_embeddings: bool
    rms_norm_eps: float
    rope_parameters: Mapping[str, Any]
    document: Mapping[str, Any]

    @classmethod
    def new(
        cls, config: TrainingConfig, vocab_size: int, special_tokens: Mapping[str, int | None]
    ) -> Llama:
        """A model that the hyperparameters describe.

        Args:
            config: its shape.
            vocab_size: rows of the embeddings.
            special_tokens: ``bos_token_id``, ``eos_token_id`` and ``pad_token_id``.

        Raises:
            TrainingError: the shape contradicts itself.
        """
        heads = config.num_attention_heads
        key_value_heads = config.num_key_value_heads or heads
        width, rest = divmod(config.hidden_size, heads)
        if rest or heads % key_value_heads or width % 2:
            raise TrainingError(
                f"hidden_size {config.hidden_size} must be an even multiple of num_attention_heads "
                f"{heads}, and that a multiple of num_key_value_heads {key_value_heads}"
            )
        shape: dict[str, Any] = {
            "vocab_size": vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size or -(-config.hidden_size * 8 // 192) * 64,
            "num_hidden_layers": config.num_hidden_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": key_value_heads,
            "head_dim": width,
            "hidden_act": config.hidden_act,
            "max_position_embeddings": config.max_length,
            "tie_word_embeddings": config.tie_word_embeddings,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        }
        document = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "mlp_bias": False,
            "initializer_range": config.init_std,
            **shape,
            **special_tokens,
        }
        return cls(**shape, document=document)

    @classmethod
    def of(cls, folder: Path) -> Llama:
        """The model of a folder; its ``config.json`` may leave out what has a usual value.

        Raises:
            TrainingError: it is no Llama, or one with biases.
        """
        from transformers import AutoConfig, LlamaConfig

        found = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        if not isinstance(found, LlamaConfig) or found.attention_bias or found.mlp_bias:
            raise TrainingError(
                f"the engine megatron trains Llamas without biases; {folder} is a "
                f"{found.model_type}"
            )
        names = {field.name for field in fields(cls)} - {"document"}
        return cls(
            **{name: getattr(found, name) for name in names},
            document=json.loads(found.to_json_string()),
        )

    def write(self, folder: Path) -> None:
        """Write ``config.json``."""
        text = json.dumps(self.document, indent=2, sort_keys=True) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")

    def parameter_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter by its name in Hugging Face's model.

        Matrices have outputs first, as ``torch.nn.Linear`` has them.
        """
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        kind = name.split(".")[-2]
        matrices = {
            "embed_tokens": (self.vocab_size, self.hidden_size),
            "lm_head": (self.vocab_size, self.hidden_size),
            "q_proj": (queries, self.hidden_size),
            "k_proj": (keys, self.hidden_size),
            "v_proj": (keys, self.hidden_size),
            "o_proj": (self.hidden_size, queries),
            "gate_proj": (self.intermediate_size, self.hidden_size),
            "up_proj": (self.intermediate_size, self.hidden_size),
            "down_proj": (self.hidden_size, self.intermediate_size),
        }
        return matrices.get(kind, (self.hidden_size,))
