"""The optimizer: megatron-core's, which means what the one of the engine torch means."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    USING_PYTORCH_OPTIMIZER,
    ChainedOptimizer,
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer_config import ParamPredicate

from hpcml.train.config import TrainingConfig


def is_distributed(config: TrainingConfig) -> bool:
    """Whether the copies of the model share the optimizer's state; that of SGD, they can't."""
    return config.optim != "sgd"


def build_optimizer(
    parts: list[DistributedDataParallel], config: TrainingConfig
) -> ChainedOptimizer:
    """The optimizer of the parts of the model, whose weights are set.

    Weights decay, norms (whatever has one dimension) don't. It is megatron-core's distributed one
    also with a single copy of the model, because the state of no other kind could be read by it.
    """
    settings = OptimizerConfig(
        optimizer="sgd" if config.optim == "sgd" else "adam",
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_epsilon,
        sgd_momentum=config.momentum,
        # Of torch's two, megatron-core shares only AdamW, which can be told to be Adam.
        decoupled_weight_decay=config.optim != "adam" or USING_PYTORCH_OPTIMIZER,
        clip_grad=config.max_grad_norm,
        use_distributed_optimizer=is_distributed(config),
        overlap_param_gather=parts[0].ddp_config.overlap_param_gather,
        bf16=config.bf16,
        fp16=config.fp16,
        params_dtype=parts[0].config.params_dtype,
        # As torch's GradScaler has them.
        initial_loss_scale=2.0**16,
        loss_scale_window=2000,
        hysteresis=1,
    )
    every: dict[str, Any] = {}
    if USING_PYTORCH_OPTIMIZER and config.optim != "sgd":
        # One kernel for all parameters; there is one for CPUs and one for CUDA.
        every = {"fused": True}
    optimizer = get_megatron_optimizer(
        settings,
        parts,
        {
            _parameters("matrices", lambda parameter: parameter.ndim >= 2): {**every},
            _parameters("others", lambda parameter: parameter.ndim < 2): {**every, "wd_mult": 0.0},
        },
    )
    for group in optimizer.param_groups:
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    for inner in optimizer.chained_optimizers:
        if not is_distributed(config):
            inner.init_state_fn = _momentum_of_zero
        elif USING_PYTORCH_OPTIMIZER:
            _keep_step(inner)
    _couple(optimizer, config)
    return optimizer


def _couple(optimizer: ChainedOptimizer, config: TrainingConfig) -> None:
    """Let torch's AdamW, which forgets it when it loads something, be Adam if that is asked for."""
    for inner in _of_torch(optimizer):
        for group in inner.param_groups:
            group["decoupled_weight_decay"] = config.optim != "adam"


def _parameters(name: str, matches: Callable[[torch.nn.Parameter], bool]) -> ParamKey:
    return ParamKey(predicate=ParamPredicate(name=name, fn=matches))


def _momentum_of_zero(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> None:
    """Give SGD the state that it has after a step, for a checkpoint to be read into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if group["momentum"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


# -- state --------------------------------------------------------------------------------------
#
# With torch's AdamW (neither Transformer Engine nor apex is there), megatron-core misses three
# things about its state: that there is none before the first step, that a parameter's count of
# steps is a tensor like the others, and that each parameter has one of its own.


def prepare_to_load(optimizer: ChainedOptimizer) -> None:
    """Give the optimizer a state for a checkpoint to be read into."""
    for inner in _of_torch(optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    inner.state[parameter] = {
                        "step": torch.zeros((), device=parameter.device),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


def complete_load(optimizer: ChainedOptimizer, config: TrainingConfig) -> None:
    """Give each parameter a count of steps of its own: all would count the steps of all."""
    for inner in _of_torch(optimizer):
        for state in inner.state.values():
            state["step"] = state["step"].clone()
    _couple(optimizer, config)


def _of_torch(optimizer: ChainedOptimizer) -> Iterator[torch.optim.Optimizer]:
    if USING_PYTORCH_OPTIMIZER:
        for inner in optimizer.chained_optimizers:
            if isinstance(inner, DistributedOptimizer) and inner.optimizer is not None:
                yield inner.optimizer


def _keep_step(optimizer: DistributedOptimizer) -> None:
    """Leave the count of steps alone when a parameter's state is set; the groups bring it."""
    set_state = optimizer._set_main_param_and_optimizer_states

    def with_step(parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, place = optimizer.model_param_group_index_map[parameter]
        shard = optimizer.optimizer.param_groups[group]["params"][place]
        set_state(parameter, {**tensors, "step": optimizer.optimizer.state[shard]["step"]})

    optimizer._set_main_param_and_optimizer_states = with_step


def state_to_save(optimizer: ChainedOptimizer, weights: dict[str, Any]) -> dict[str, Any]:
    """The optimizer's state for a checkpoint: of each parameter what this process has, in place.

    megatron-core would gather the state of all copies of the model first, which takes time and
    memory, and would mistake parameters for each other: it gathers without the gaps that fill up
    buffers, but then looks for each parameter as if they were there. (A tied embedding has a buffer
    of its own, so it takes no large model to have such gaps.) What is read is the same.

    Args:
        optimizer: of the parts of the model.
        weights: the parts' ``sharded_state_dict``, which says where each parameter belongs.
    """
    (inner,) = optimizer.chained_optimizers
    if not isinstance(inner, DistributedOptimizer):
        state: dict[str, Any] = inner.sharded_state_dict(weights)
        return state
    described = {
        id(each.data): each
        for each in nested_values(extract_sharded_tensors_and_factories(weights)[0])
    }
    pieces: list[ShardedTensor] = []
    for buffer in inner.gbuf_ranges:
        for bucket in itertools.chain.from_iterable(buffer.values()):
            for parameter, places in bucket["param_map"].items():
                whole = described[id(parameter)]
                state = inner._get_main_param_and_optimizer_states(parameter)
                for name in ("param", "exp_avg", "exp_avg_sq"):
                    key = f"optimizer.state.{name}.{whole.key}"
                    pieces += cut(whole, state[name], places["param"].start, key)
    return {
        **inner.state_dict(),
        "param_state": dict(enumerate(pieces)),
        "param_state_sharding_type": "fully_reshardable",
    }


def cut(
    whole: ShardedTensor | ShardedTensorFactory, values: torch.Tensor, start: int, key: str
) -> Iterator[ShardedTensor]:
    """A stretch of a parameter, as the rectangles of the matrix that it consists of.

    Args:
        whole: where the parameter belongs.
        values: of the stretch. Shape (elements,).
        start: its first element in the flat parameter.
        key: of the whole in the checkpoint.
    """
    parts = whole.build() if isinstance(whole, ShardedTensorFactory) else [whole]
    for part in parts:  # one after the other, by rows
        size, width = math.prod(part.local_shape), math.prod(part.local_shape[1:])
        place, end = max(start, 0), min(start + len(values), size)
        while place < end:
            row, column = divmod(place, width)
            if column or end - place < width:
                rows, columns = 1, min(width - column, end - place)
            else:
                rows, columns = (end - place) // width, width
            shape = (rows, columns) if len(part.local_shape) == 2 else (rows,)
            corner = (row, column)[: len(shape)]
            data = values[place - start : place - start + rows * columns]
            before = part.prepend_axis_num
            yield ShardedTensor(
                key,
                data.view((1,) * before + shape),
                data.dtype,
                (1,) * before + shape,
                part.global_shape,
                (
                    *part.global_offset[:before],
                    *map(operator.add, part.global_offset[before:], corner),
                ),
                None,
                replica_id=(*part.replica_id[:2], 0),
                allow_shape_mismatch=part.allow_shape_mismatch,
            )
            place += rows * columns
        start -= size
