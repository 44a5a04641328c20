"""A recipe's own configuration of DeepSpeed, beside its hyperparameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HYPERPARAMETERS = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
    "zero_optimization.stage": "zero_stage",
}
"""What a hyperparameter says already; it may be written again, if it is the same."""

_OTHERS = {
    "optimizer": "optim, learning_rate and others say which, the same with every engine",
    "scheduler": "lr_scheduler_type and others say which, the same with every engine",
    "amp": "bf16 or fp16 is the precision",
    "torch_autocast": "bf16 or fp16 is the precision",
    "elasticity": "a training goes on with another number of processes by itself",
    "sequence_parallel_size": "the engine megatron shares sequences",
    "tensor_parallel": "the engine megatron shares layers",
    "pipeline": "the engine megatron has a pipeline",
    "data_efficiency": "hpcml decides the order of the data",
    "curriculum_learning": "hpcml decides the order of the data",
    "checkpoint.load_universal": "hpcml sees by itself when a checkpoint has to be resharded",
    "checkpoint.use_node_local_storage": "checkpoints are on the shared filesystem",
    "zero_allow_untested_optimizer": "hpcml sets it",
    "zero_force_ds_cpu_optimizer": "hpcml sets it",
}
"""What is not DeepSpeed's to decide, and what decides instead."""

_OFFLOADED = {"offload_optimizer": ("optimizer", "all"), "offload_param": ("all",)}


def read(text: str, folder: Path) -> dict[str, Any]:
    """The configuration in a JSON file.

    Args:
        text: the path, relative to the folder.
        folder: of the recipe.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
    path = folder / text
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no mapping")
    return config


def contradictions(config: Mapping[str, Any], values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What of a configuration hyperparameters decide, and decide otherwise.

    Args:
        config: of DeepSpeed; the value ``auto`` leaves a key to the hyperparameters.
        values: all hyperparameters.

    Returns:
        ``(key, message)`` for each; the key with dots, as it is in a recipe.
    """
    mistakes = []
    for key, instead in _OTHERS.items():
        if _value(config, key) not in (None, "auto"):
            mistakes.append((key, f"it can't be given, because {instead}"))
    for key, name in _HYPERPARAMETERS.items():
        value = _value(config, key)
        if value not in (None, "auto") and value != values[name]:
            mistakes.append(
                (
                    key,
                    f"it is {json.dumps(value)}, but {name} is {json.dumps(values[name])}; leave "
                    f"it out, or give {name} the same value",
                )
            )
    for part, kinds in _OFFLOADED.items():
        key = f"zero_optimization.{part}.device"
        value, offloaded = _value(config, key), values["offload"] in kinds
        if value not in (None, "auto", "cpu" if offloaded else "none"):
            mistakes.append(
                (
                    key,
                    f"it is {json.dumps(value)}, but offload is {values['offload']}: that says "
                    "what is on the host (cpu); nothing is kept on disks",
                )
            )
    return [(f"train.deepspeed.{key}", f"{key}: {message}") for key, message in mistakes]


def _value(config: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(config, Mapping):
            return None
        config = config.get(part)
    return config
