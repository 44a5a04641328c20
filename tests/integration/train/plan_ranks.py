"""What the engines allocate, measured by each rank: torchrun starts this with a folder for answers.

Each rank writes, for each way of training, the bytes of weights, gradients and optimizer states.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpcml.train.config import TrainingConfig
from hpcml.train.model import new_model
from hpcml.train.optimizer import build_optimizer

SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "vocab_size": 501,
    "max_length": 32,
    "weight_decay": 0.1,
    "tie_word_embeddings": False,
}
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)
SPECIAL: dict[str, int | None] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of memory behind some tensors; views of the same memory count once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def states_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The optimizer's tensors, but for the counts of steps, which have one element."""
    return [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name != "step"
    ]


def tokens() -> torch.Tensor:
    return torch.randint(0, SHAPE["vocab_size"], (1, SHAPE["max_length"]))  # type: ignore[call-overload,no-any-return]


def fsdp() -> dict[str, int]:
    from torch.distributed.fsdp import fully_shard

    config = TrainingConfig.from_parameters(SHAPE)
    model = new_model(config, config.vocab_size, SPECIAL)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = build_optimizer(model.named_parameters(), config, config.num_hidden_layers)
    model(input_ids=tokens()).logits.sum().backward()
    optimizer.step()
    local = [parameter.to_local() for parameter in model.parameters()]
    moments = [each.to_local() for each in states_of(optimizer)]
    gradients = [parameter.grad.to_local() for parameter in model.parameters()]
    return {
        # A rank's rows, which lie in a buffer of the size of rank 0's.
        "weights": bytes_of(local),
        "rows": sum(each.nbytes for each in local),
        "gradients": sum(each.nbytes for each in gradients),
        "optimizer": sum(each.nbytes for each in moments),
    }


def deepspeed(stage: int, half: bool) -> dict[str, int]:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # needs a compiler
    config = TrainingConfig.from_parameters(SHAPE)
    model = new_model(config, config.vocab_size, SPECIAL)
    inner = build_optimizer(model.named_parameters(), config, config.num_hidden_layers)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": half},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 10**9,
    }
    for name in ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"):
        settings["zero_optimization"][name] = 1000
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=inner, config=settings)
    for _ in range(3):  # a step, and the half of another
        engine.backward(engine(input_ids=tokens()).logits.float().sum())
        engine.step()
    parameters = list(model.parameters())
    base = getattr(optimizer, "optimizer", optimizer)
    held: list[torch.Tensor] = [*states_of(base)]
    if stage == 3:
        weights = bytes_of(parameter.ds_tensor for parameter in parameters)
        held += optimizer.fp32_partitioned_groups_flat
        gradients = bytes_of([optimizer.grad_partitions_flat_buffer])
    else:
        weights = bytes_of(parameters)
        gradients = bytes_of(p.grad for p in parameters if p.grad is not None)
        if stage:
            held += optimizer.single_partition_of_fp32_groups
        elif half:
            held += [p for group in optimizer.fp32_groups for p in group]
        if stage == 2:
            # A tensor that lies across two ranks may be there whole; what counts is this rank's.
            engine.backward(engine(input_ids=tokens()).logits.float().sum())
            groups = optimizer.averaged_gradients.values()
            gradients = sum(each.nbytes for group in groups for each in _listed(group))
    engine.destroy()
    return {"weights": weights, "gradients": gradients, "optimizer": bytes_of(held)}


def _listed(group: Any) -> list[torch.Tensor]:
    return [group] if isinstance(group, torch.Tensor) else list(group)


def measure_data_parallel(_: Path) -> dict[str, dict[str, int]]:
    dist.init_process_group("gloo")
    found = {"fsdp": fsdp()}
    for stage in range(4):
        for half in (False, True):
            found[f"zero {stage} {'bf16' if half else 'fp32'}"] = deepspeed(stage, half)
    dist.barrier()
    return found


#: How four processes share a model: sizes of tensor and pipeline parallelism, virtual stages.
SHARES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 4, 1), (1, 2, 2)]
#: Whether in 16 bits, and whether the head is the embedding.
RESTS = [(False, False), (False, True), (True, False), (True, True)]
#: Everything that is measured.
MEGATRON = [(*shares, *rest) for shares in SHARES for rest in RESTS]


def megatron(
    tensor: int, pipeline: int, virtual: int, half: bool, tied: bool, optim: str = "adamw"
) -> dict[str, int]:
    from megatron.core import parallel_state, tensor_parallel
    from transformers import LlamaConfig

    from hpcml.layout import Layout
    from hpcml.train.megatron import model as models
    from hpcml.train.megatron.optimizer import build_optimizer, is_distributed

    config = TrainingConfig.from_parameters({**SHAPE, "bf16": half, "optim": optim})
    shape = LlamaConfig(**{name: SHAPE[name] for name in SIZES}, tie_word_embeddings=tied)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    data = dist.get_world_size() // (tensor * pipeline)
    layout = Layout(tensor, pipeline, data=data, virtual=virtual)
    transformer = models.transformer_config(shape, config, layout)
    parts = models.build(shape, transformer, config.max_length, virtual)
    wrapped = models.data_parallel(parts, transformer, is_distributed(config), overlap=False)
    for part in wrapped:
        for parameter in part.parameters():
            parameter.data.fill_(0.5)
    optimizer = build_optimizer(wrapped, config)
    optimizer.step()  # with gradients of zero, so that there are states
    buffers = [buffer for part in wrapped for buffer in part.buffers]
    held: list[torch.Tensor] = []
    for inner in optimizer.chained_optimizers:
        held += states_of(inner.optimizer)
        if half:
            held += [p for group in inner.optimizer.param_groups for p in group["params"]]
    return {
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "weights": bytes_of(p for part in wrapped for p in part.parameters()),
        "parameters": sum(p.numel() for part in wrapped for p in part.parameters()),
        "gradients": bytes_of(buffer.grad_data for buffer in buffers),
        "optimizer": sum(each.nbytes for each in held),
    }


def kept_by_megatron(layers: int, recompute: bool) -> int:
    """Bytes that autograd keeps after a forward pass of a sequence, besides the weights."""
    from megatron.core import tensor_parallel
    from transformers import LlamaConfig

    from hpcml.layout import Layout
    from hpcml.train.megatron import model as models

    sizes = {**SHAPE, "num_hidden_layers": layers}
    config = TrainingConfig.from_parameters({**sizes, "gradient_checkpointing": recompute})
    shape = LlamaConfig(**{name: sizes[name] for name in SIZES})
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    transformer = models.transformer_config(shape, config, Layout())
    (model,) = models.build(shape, transformer, config.max_length, 1)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    for parameter in model.parameters():
        parameter.data.fill_(0.1)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept.append(tensor)
        return tensor

    inputs = tokens()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(inputs, torch.arange(config.max_length).expand(1, -1), None, labels=inputs)
    return bytes_of(kept)


@contextmanager
def groups(file: Path, tensor: int, pipeline: int, virtual: int) -> Iterator[None]:
    """The groups of the processes, which meet in a new file.

    Each group has threads that never sleep for long, so none may be left.
    """
    from megatron.core import parallel_state

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def measure_megatron(folder: Path) -> dict[str, dict[str, int]]:
    from hpcml.train.megatron.cpu import on_cpu

    found = {}
    with on_cpu():
        for number, shares in enumerate(SHARES):
            with groups(folder / f"meeting{number}", *shares):
                for rest in RESTS:
                    found[str((*shares, *rest))] = megatron(*shares, *rest)
                if shares == (2, 1, 1):
                    found["sgd"] = megatron(*shares, half=True, tied=True, optim="sgd")
                if shares == (1, 1, 1):
                    for recompute in (False, True):
                        few, many = (kept_by_megatron(layers, recompute) for layers in (2, 4))
                        found[f"activations {recompute}"] = {"layer": (many - few) // 2}
    return found


def main(what: str, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = {"data": measure_data_parallel, "megatron": measure_megatron}[what](folder)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
