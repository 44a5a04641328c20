"""What `hpcml plan` says of memory is what the engines allocate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcml.plan.training.backfill import checkpoint_bytes
from hpcml.plan.training.layout import Layout, Training, optimizer_values
from hpcml.plan.training.learning import parts_of
from hpcml.plan.training.memory import Memory, memory
from hpcml.plan.training.model import model_of
from hpcml.plan.training.model import new_model as planned_model
from hpcml.train import finetune
from hpcml.train.config import TrainingConfig
from hpcml.train.loss import TokenLoss
from hpcml.train.model import new_model
from hpcml.train.optimizer import build_optimizer
from tests.integration.train import cells, plan_ranks
from tests.integration.train.plan_ranks import SHAPE, SPECIAL, bytes_of, states_of

ANSWER = dict[str, dict[str, int]]


def planned(parameters: dict[str, Any], layout: Layout, stage: int = 0) -> Memory:
    model = planned_model(parameters)
    training = Training(
        model=model,
        parts=parts_of(model, parameters),
        length=parameters["max_length"],
        global_batch=4,
        half=parameters.get("bf16", False),
        optimizer_values=optimizer_values(parameters),
    )
    return memory(training, layout, stage, on_gpu=False)


def ranks(what: str, number: int, folder: Path) -> list[ANSWER]:
    """What each of some processes measured."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, *command, plan_ranks.__file__, what, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(number)]


@pytest.fixture(scope="module")
def data_parallel(tmp_path_factory: pytest.TempPathFactory) -> list[ANSWER]:
    pytest.importorskip("deepspeed", reason="the engine deepspeed is not installed")
    return ranks("data", 2, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> list[ANSWER]:
    pytest.importorskip("megatron.core", reason="the engine megatron is not installed")
    return ranks("megatron", 4, tmp_path_factory.mktemp("megatron"))


METHODS: list[dict[str, Any]] = [
    {},
    {"optim": "sgd"},
    {"optim": "sgd", "momentum": 0.9},
    {"optim": "rmsprop"},
    {"optim": "rmsprop", "momentum": 0.5},
    {"optim": "adagrad"},
    {"tie_word_embeddings": True},
    {"fine_tuning_method": "freeze", "num_frozen_layers": 2},
    {"fine_tuning_method": "freeze", "frozen_layers": [0, 3], "tie_word_embeddings": True},
    {"fine_tuning_method": "top", "num_top_layers": 1},
    {"fine_tuning_method": "top", "num_top_layers": 1, "tie_word_embeddings": True},
    {"fine_tuning_method": "lora", "r": 4, "target_modules": ["q_proj", "down_proj"]},
    {"fine_tuning_method": "adapter", "adapter_size": 8},
    {"fine_tuning_method": "prompt_tuning", "num_virtual_tokens": 5},
]


@pytest.mark.parametrize("changes", METHODS, ids=str)
def test_torch(changes: dict[str, Any]) -> None:
    """Weights, gradients and optimizer states of one process, to the byte."""
    config = TrainingConfig.from_parameters({**SHAPE, **changes})
    model = finetune.prepare(new_model(config, config.vocab_size, SPECIAL), config)
    optimizer = build_optimizer(model.named_parameters(), config, config.num_hidden_layers)
    model(input_ids=plan_ranks.tokens()).logits.sum().backward()
    optimizer.step()
    defaults = {"num_frozen_layers": None, "frozen_layers": None}
    needed = planned({**defaults, **SHAPE, **changes}, Layout("torch"))
    parameters = list(model.parameters())
    assert bytes_of(parameters) == needed.weights
    assert bytes_of(p.grad for p in parameters if p.grad is not None) == needed.gradients
    assert bytes_of(states_of(optimizer)) == needed.optimizer


def test_fsdp(data_parallel: list[ANSWER]) -> None:
    """Rank 0 has what is planned; all of them together the model."""
    found = [rank["fsdp"] for rank in data_parallel]
    needed = planned(SHAPE, Layout("torch", data=2, fsdp=True))
    for rank in found:
        assert rank["weights"] == needed.weights
    assert found[0]["gradients"] == needed.gradients
    assert found[0]["optimizer"] == needed.optimizer
    whole = planned(SHAPE, Layout("torch"))
    assert sum(rank["rows"] for rank in found) == whole.weights
    assert sum(rank["optimizer"] for rank in found) == whole.optimizer


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_zero(data_parallel: list[ANSWER], stage: int, half: bool) -> None:
    needed = planned({**SHAPE, "bf16": half}, Layout("deepspeed", data=2, zero_stage=stage))
    expected = {
        "weights": needed.weights,
        "gradients": needed.gradients,
        "optimizer": needed.optimizer,
    }
    for rank in data_parallel:
        assert rank[f"zero {stage} {'bf16' if half else 'fp32'}"] == expected


@pytest.mark.parametrize("shares", plan_ranks.MEGATRON, ids=str)
def test_megatron(pipelines: list[ANSWER], shares: tuple[int, int, int, bool, bool]) -> None:
    """Weights and gradients of each rank to the byte. The optimizer's states are divided without
    regard to what is padding, so that a rank may have less than its part, and together they have
    what all weights need.
    """
    tensor, pipeline, virtual, half, tied = shares
    data = 4 // (tensor * pipeline)
    layout = Layout("megatron", data=data, tensor=tensor, pipeline=pipeline, virtual=virtual)
    parameters = {**SHAPE, "bf16": half, "tie_word_embeddings": tied}
    values = 12 if half else 8
    for stage in range(pipeline):
        needed = planned(parameters, layout, stage)
        found = [rank[str(shares)] for rank in pipelines if rank[str(shares)]["stage"] == stage]
        assert len(found) == data * tensor
        for rank in found:
            assert rank["weights"] == needed.weights
            assert rank["gradients"] == needed.gradients
            assert rank["optimizer"] <= needed.optimizer
        padding = needed.gradients // 4 - found[0]["parameters"]
        assert max(rank["optimizer"] for rank in found) >= needed.optimizer - values * padding
        together = sum(rank["optimizer"] for rank in found)
        assert together == values * found[0]["parameters"] * tensor


def test_megatron_with_sgd(pipelines: list[ANSWER]) -> None:
    """Its state is not divided, and nothing is padded."""
    parameters = {**SHAPE, "bf16": True, "tie_word_embeddings": True, "optim": "sgd"}
    needed = planned(parameters, Layout("megatron", data=2, tensor=2))
    for rank in pipelines:
        assert rank["sgd"]["weights"] == needed.weights
        assert rank["sgd"]["gradients"] == needed.gradients
        assert rank["sgd"]["optimizer"] == needed.optimizer


@pytest.mark.parametrize("engine", ["torch", "megatron"])
def test_checkpoints(engine: str, tmp_path: Path, corpus: str, data_root: Path) -> None:
    """Their size within a hundredth: the rest is the tokenizer, and tables of what is where."""
    pytest.importorskip("megatron.core" if engine == "megatron" else engine)
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 768}
    parameters = {**cells.TINY, **sizes, "num_key_value_heads": 2, "max_steps": 1, "bf16": True}
    cell = cells.write_cell(tmp_path / "cell", corpus, parameters, engine=engine)
    if engine == "torch":
        assert cells.train(cell, data_root) == 0
    else:
        assert cells.train_in_turn(tmp_path / "ranks", data_root, [cells.Job(cell, 1)]) == [[0]]
    model = planned_model({**parameters, "tie_word_embeddings": True})
    training = Training(model, parts_of(model, {}), 16, 4, half=True)
    files = (cell / "checkpoints" / "step-1").rglob("*")
    size = sum(path.stat().st_size for path in files if path.is_file())
    assert size == pytest.approx(checkpoint_bytes(training, Layout(engine)), rel=0.01)


# -- activations ----------------------------------------------------------------------------------


def kept_bytes(parameters: dict[str, Any]) -> int:
    """Bytes that autograd keeps after a forward pass, besides the weights."""
    config = TrainingConfig.from_parameters(parameters)
    model = new_model(config, config.vocab_size, SPECIAL)
    model.config.use_cache = False
    model = finetune.prepare(model, config).train()
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept.append(tensor)
        return tensor

    size, length = config.per_device_train_batch_size or 1, config.max_length
    inputs = torch.randint(0, config.vocab_size, (size, length))
    autocast = torch.autocast("cpu", torch.bfloat16) if config.bf16 else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with autocast:
            outputs = model(input_ids=inputs)
        TokenLoss(config)(outputs, inputs, inputs.numel())
    return bytes_of(kept)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_activations(recompute: bool, bf16: bool, kv_heads: int) -> None:
    """Within 2 %: what isn't counted is rotary tables, labels and the last norm's statistics.

    The plan's loss has the log-softmax, which is kept, and as much again, which isn't yet.
    """
    parameters = {
        **SHAPE,
        "num_key_value_heads": kv_heads,
        "bf16": bf16,
        "gradient_checkpointing": recompute,
        "per_device_train_batch_size": 2,
        "max_length": 256,
    }
    layout = Layout("torch", micro_batch=2, recompute="full" if recompute else "none")
    needed = planned(parameters, layout)
    loss = needed.loss // 2
    # With recomputation, of autocast's copies only the head's stays; the others come and go.
    copies = 2 * 501 * 64 * bf16 if recompute else needed.buffers
    measured = kept_bytes(parameters)
    assert measured == pytest.approx(needed.activations + loss + copies, rel=0.02)


def test_activations_of_megatron(pipelines: list[ANSWER]) -> None:
    """Of a layer, to the byte, but for what only the modules without fused kernels keep: they are
    what there is on CPUs. These are the normalized forms, the gate and the other branch once more,
    keys and values repeated for the queries, attention's mask and the rotary table.
    """
    model = planned_model(SHAPE)
    length = SHAPE["max_length"]

    def layer(recompute: str) -> int:
        kept = [
            memory(
                Training(replace(model, layers=layers), (), length, 1, flash=False),
                Layout("megatron", recompute=recompute),  # type: ignore[arg-type]
            ).activations
            for layers in (2, 4)
        ]
        return (kept[1] - kept[0]) // 2

    repeated = 2 * (model.heads - model.kv_heads) * model.head_dim
    unfused = 4 * length * (2 * model.hidden + 2 * model.intermediate + repeated)
    statistics = length * 2 * 4
    mask, table = length * length, 4 * 4 * length * model.head_dim
    for rank in pipelines:
        assert rank["activations True"]["layer"] == layer("full")
        measured = rank["activations False"]["layer"]
        assert measured == layer("none") + unfused + statistics + mask + table


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("changes", [m for m in METHODS if "fine_tuning_method" in m], ids=str)
def test_activations_of_fine_tuning(changes: dict[str, Any], bf16: bool) -> None:
    """Within 5 %: frozen weights keep less, and layers below what learns nothing."""
    parameters = {
        "num_frozen_layers": None,
        "frozen_layers": None,
        **SHAPE,
        **changes,
        "bf16": bf16,
        "per_device_train_batch_size": 2,
        "max_length": 256,
    }
    needed = planned(parameters, Layout("torch", micro_batch=2))
    expected = needed.activations + needed.loss // 2 + needed.buffers
    assert kept_bytes(parameters) == pytest.approx(expected, rel=0.05)


def test_a_model_on_disk_is_counted_as_it_is(tmp_path: Path) -> None:
    """The families whose ``config.json`` is understood, with and without what they may have."""
    from transformers import (
        AutoModelForCausalLM,
        LlamaConfig,
        MistralConfig,
        PretrainedConfig,
        Qwen2Config,
        Qwen3Config,
    )

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 100,
    }
    kinds: list[Callable[..., PretrainedConfig]] = [
        LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config,
    ]  # fmt: skip
    variants: list[dict[str, Any]] = [{}, {"tie_word_embeddings": True}, {"head_dim": 16}]
    for kind in kinds:
        more = [{"attention_bias": True, "mlp_bias": True}] if kind is LlamaConfig else []
        for changes in [*variants, *more]:
            config = kind(**{**sizes, **changes})
            model = AutoModelForCausalLM.from_config(config)
            config.save_pretrained(tmp_path)
            counted = model_of(tmp_path)
            actual = sum(each.numel() for each in model.parameters())
            assert counted.parameters == actual, (kind, changes)
            assert counted.layers * len(counted.layer) + len(counted.embedding) + len(
                counted.head
            ) == len(list(model.parameters()))
