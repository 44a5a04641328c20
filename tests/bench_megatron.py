"""A process of megatron's benchmark: hpcml's training, or a bare loop over megatron-core.

``python bench_megatron.py mine|bare|save DATA TENSOR BEGUN`` prints JSON: seconds of a step, and
from BEGUN (a time of the epoch) to the end of the first step; for ``mine`` the part of a step that
reading the data takes; for ``save`` the seconds of a checkpoint, and of one in the background.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SEQUENCES, LENGTH, STEPS, WARM = 8, 128, 40, 10
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 2000,
}
DEVICE = contextlib.ExitStack()  # left when the process ends
LARGE = {**SHAPE, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}


def timed(step: Callable[[], Any], begun: float) -> dict[str, float]:
    step()
    started = time.time() - begun
    for _ in range(WARM):
        step()
    clock = time.perf_counter()
    for _ in range(STEPS):
        step()
    return {"step": (time.perf_counter() - clock) / STEPS, "started": started}


def training(data: Path, tensor: int, shape: dict[str, int]) -> Any:
    from hpcml.train.config import TrainingConfig, TrainingJob
    from hpcml.train.course import Course
    from hpcml.train.megatron import engine

    config = TrainingConfig(
        **shape,
        max_length=LENGTH,
        global_batch_size=SEQUENCES,
        max_steps=10**6,
        tensor_parallel_size=tensor,
        save_steps=10**6,
    )
    folder = engine.Group.join(config)
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    DEVICE.enter_context(engine._device())
    job = TrainingJob(Path(tempfile.mkdtemp()), config, data, source="python-stdlib")
    dataset = engine.open_training_data(job)
    sequences = engine.TrainingData.of(job, dataset)
    course = Course(job, dataset, sequences, folder, engine.StopRequest(None))
    made = engine.Training(course, dataset)
    course.begin()
    return made


def mine(data: Path, tensor: int, begun: float) -> dict[str, float]:
    made = training(data, tensor, SHAPE)
    found = timed(lambda: made.course.step_done(made.step()), begun)
    clock = time.perf_counter()
    for _ in range(STEPS):
        made.read_batches()
    found["reading"] = (time.perf_counter() - clock) / STEPS
    return found


def save(data: Path, tensor: int, begun: float) -> dict[str, float]:
    made = training(data, tensor, LARGE)
    whole, held = [], []
    for _ in range(5):
        for times, background in ((whole, False), (held, True)):
            made.course.step_done(made.step())
            clock = time.perf_counter()
            made.course.begin_save(made)
            if not background:
                made.course.complete_save(made, wait=True)
            paused = time.perf_counter() - clock
            while made.writing:
                made.course.step_done(made.step())
            clock = time.perf_counter()
            made.course.complete_save(made, wait=False)
            times.append(paused + time.perf_counter() - clock)
    return {"whole": statistics.median(whole[1:]), "held": statistics.median(held[1:])}


def bare(data: Path, tensor: int, begun: float) -> dict[str, float]:
    import numpy as np
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig

    from hpcml.data.dataset import PackedSamples, TokenFile
    from hpcml.train.megatron.cpu import on_cpu

    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    else:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    DEVICE.enter_context(on_cpu())
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=SHAPE["num_hidden_layers"],
        hidden_size=SHAPE["hidden_size"],
        ffn_hidden_size=SHAPE["intermediate_size"],
        num_attention_heads=SHAPE["num_attention_heads"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tensor,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=SHAPE["vocab_size"],
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True
    )
    model = DistributedDataParallel(config, settings, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0, use_distributed_optimizer=True),
        [model],
    )
    for group in optimizer.param_groups:
        group["fused"] = True
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    file = next(data.glob("*/train.arrow"))
    samples = PackedSamples(TokenFile(file), LENGTH)
    chooser = np.random.default_rng(0)

    def forward(batches: Any, part: Any) -> Any:
        inputs, labels = next(batches)
        output = part(inputs, torch.arange(LENGTH).expand(SEQUENCES, -1), None, labels=labels)
        return output, lambda each: (each.mean(), each.detach().mean())

    run = get_forward_backward_func()

    def step() -> None:
        chosen = samples.batch(chooser.integers(0, len(samples), SEQUENCES))
        batch = tuple(torch.from_numpy(array.copy()) for array in chosen)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        run(
            forward_step_func=forward,
            data_iterator=iter([batch]),
            model=model,
            num_microbatches=1,
            seq_length=LENGTH,
            micro_batch_size=SEQUENCES,
            forward_only=False,
        )
        optimizer.step()

    return timed(step, begun)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    what = {"mine": mine, "bare": bare, "save": save}[sys.argv[1]]
    print(json.dumps(what(Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))), flush=True)
    os._exit(0)
