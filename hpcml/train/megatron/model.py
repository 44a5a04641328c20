"""The model: megatron-core's ``GPTModel`` as a Llama, in the parts that one process holds."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import layers as tensor_layers
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch import nn
from torch.nn import functional

from hpcml.layout import Layout
from hpcml.train.config import TrainingConfig, TrainingError
from hpcml.train.llama import Llama

try:
    import transformer_engine  # noqa: F401

    TRANSFORMER_ENGINE = True
except ImportError:
    TRANSFORMER_ENGINE = False

# As transformers has them, but as the functions that megatron-core knows to fuse.
_ACTIVATIONS = {"silu": functional.silu, "gelu": functional.gelu}
# The scaling of Llama 3.1 that megatron-core computes, with a factor of the model's.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def transformer_config(shape: Llama, config: TrainingConfig, layout: Layout) -> TransformerConfig:
    """megatron-core's description of the model and of how it is trained.

    Args:
        shape: the model, as Hugging Face describes it.
        config: precision, dropout, recomputation.
        layout: how it is shared.
    """
    cuda = torch.cuda.is_available()
    dtype = torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else torch.float32
    activation = _ACTIVATIONS.get(shape.hidden_act) or _rare_activation(shape.hidden_act)
    recompute: dict[str, Any] = {}
    if config.gradient_checkpointing:
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return TransformerConfig(
        num_layers=shape.num_hidden_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=activation,
        add_bias_linear=False,
        hidden_dropout=config.dropout,
        attention_dropout=config.dropout,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        context_parallel_size=layout.context,
        sequence_parallel=layout.sequence,
        # With the batched kind, a pipeline of two stages with several parts each computes wrong
        # losses, and says nothing.
        batch_p2p_comm=layout.virtual == 1,
        overlap_p2p_comm=layout.virtual > 1,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=config.bf16,
        fp16=config.fp16,
        # The weights come from hpcml.train.megatron.weights. Without any initialization the
        # parameters would not say that they are shared, and the norm of the gradients would miss
        # most of them.
        init_method=_leave,
        output_layer_init_method=_leave,
        use_cpu_initialization=not cuda,
        bias_activation_fusion=cuda and activation in _ACTIVATIONS.values(),
        bias_dropout_fusion=cuda,
        apply_rope_fusion=cuda and TRANSFORMER_ENGINE,
        gradient_accumulation_fusion=cuda and tensor_layers._grad_accum_fusion_available,
        **recompute,
    )


def _rare_activation(name: str) -> Any:
    from transformers.activations import ACT2FN

    # The function, not the module: a layer would take that for a part of itself.
    return ACT2FN[name].forward


def build(
    shape: Llama, transformer: TransformerConfig, max_length: int, virtual: int
) -> list[nn.Module]:
    """The parts of the model that this process holds, with weights that are not yet set.

    Args:
        shape: the model.
        transformer: as :func:`transformer_config` made it.
        max_length: tokens of a sequence.
        virtual: parts of each pipeline stage.

    Raises:
        TrainingError: megatron-core has no such model.
    """
    rope = rotary(shape)
    tensor = transformer.tensor_model_parallel_size
    parts: list[nn.Module] = []
    for number in [None] if virtual == 1 else range(virtual):
        whole = number is None
        part = GPTModel(
            transformer,
            _layers(transformer, number),
            vocab_size=padded(shape.vocab_size, tensor),
            max_sequence_length=max_length,
            pre_process=parallel_state.is_pipeline_first_stage(
                ignore_virtual=whole, vp_stage=number
            ),
            post_process=parallel_state.is_pipeline_last_stage(
                ignore_virtual=whole, vp_stage=number
            ),
            share_embeddings_and_output_weights=shape.tie_word_embeddings,
            position_embedding_type="rope",
            vp_stage=number,
            **rope,
        )
        if part.post_process:
            _hide_padding(part.output_layer, shape.vocab_size, tensor)
        if torch.cuda.is_available():
            part.cuda(torch.cuda.current_device())
        if transformer.bf16 or transformer.fp16:
            part = Float16Module(transformer, part)
        parts.append(part)
    return parts


def data_parallel(
    parts: list[nn.Module],
    transformer: TransformerConfig,
    distributed_optimizer: bool,
    overlap: bool,
    bucket_size: int | None = None,
) -> list[DistributedDataParallel]:
    """The parts, with gradients that are averaged over the copies of the model.

    Args:
        parts: as :func:`build` made them.
        transformer: of the parts.
        distributed_optimizer: whether the optimizer is shared among the copies.
        overlap: communicate while computing; otherwise at the end.
        bucket_size: parameters that are communicated together, with ``overlap``; None leaves it to
            megatron-core.
    """
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and distributed_optimizer,
        use_distributed_optimizer=distributed_optimizer,
        bucket_size=bucket_size,
    )
    return [
        DistributedDataParallel(transformer, settings, part, disable_bucketing=number > 0)
        for number, part in enumerate(parts)
    ]


def padded(vocab_size: int, tensor: int) -> int:
    """Rows of the embeddings, so that ``tensor`` processes have equally many."""
    return -(-vocab_size // tensor) * tensor


def rotary(shape: Llama) -> dict[str, Any]:
    """The arguments of ``GPTModel`` for the positions.

    Raises:
        TrainingError: megatron-core can't compute them.
    """
    rope = dict(shape.rope_parameters)
    kind = rope.pop("rope_type", "default")
    arguments: dict[str, Any] = {"rotary_base": rope.pop("rope_theta", 10000.0)}
    if kind == "llama3" and {name: rope.get(name) for name in _LLAMA3} == _LLAMA3:
        return arguments | {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise TrainingError(
            f"the engine megatron knows the positions of Llama 2 and 3, not rope_type {kind} with "
            f"{rope}"
        )
    return arguments


def _layers(transformer: TransformerConfig, part: int | None) -> Any:
    """What the layers are made of: Transformer Engine's modules where it is installed."""
    if torch.cuda.is_available() and TRANSFORMER_ENGINE:
        return get_gpt_layer_with_transformer_engine_spec()
    layer = copy.deepcopy(get_gpt_layer_local_spec(normalization="RMSNorm"))
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = _Norm
    count = get_num_layers_to_build(transformer, part)
    return TransformerBlockSubmodules(
        layer_specs=[ModuleSpec(layer.module, layer.params, layer.submodules)] * count,
        layer_norm=_Norm,
    )


def _leave(weight: torch.Tensor) -> torch.Tensor:
    """The weights as they are."""
    return weight


class _Norm:
    """torch's own norm, also where sequences are shared among processes.

    megatron-core's wrapper of it refuses that, because torch's parameters don't say that their
    gradients are to be summed over these processes. Here they do.
    """

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> nn.RMSNorm:
        norm = nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)
        if torch.cuda.is_available():
            norm.cuda(torch.cuda.current_device())
        norm.weight.sequence_parallel = config.sequence_parallel
        return norm


def _hide_padding(layer: nn.Module, vocab_size: int, tensor: int) -> None:
    """Rows that only fill up the vocabulary get no probability, so they change nothing."""
    rows = padded(vocab_size, tensor) // tensor
    first = parallel_state.get_tensor_model_parallel_rank() * rows
    used = max(min(vocab_size - first, rows), 0)
    if used == rows:
        return

    def hide(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        logits, bias = outputs
        padding = torch.arange(rows, device=logits.device) >= used
        return logits.masked_fill(padding, -torch.inf), bias

    layer.register_forward_hook(hide)
