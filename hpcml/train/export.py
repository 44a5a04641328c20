"""A checkpoint as a model folder that other programs load."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from hpcml.train.checkpoint import CheckpointStore

_TOKENIZER_FILES = (
    "tokenizer",
    "special_tokens",
    "added_tokens",
    "vocab",
    "merges",
    "chat_template",
)


class ExportError(Exception):
    """The model can't be exported; the message says why and what to do."""


def export(cell_dir: Path, target: Path, which: str | int = "final", merge: bool = True) -> Path:
    """Write a model folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load.

    Args:
        cell_dir: the cell's folder.
        target: the folder to make; it may be there, but must be empty. It is complete or absent.
        which: ``final``, the one that the cell's result is of (the latest, while there is none),
            ``best``, ``latest``, or a step.
        merge: put LoRA's matrices or adapters into the model's own. False leaves them beside it,
            as an adapter folder of peft.

    Returns:
        ``target``.

    Raises:
        ExportError: the target is not empty, the cell is no training, or its method has no such
            form.
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExportError(f"{target} is not empty")
    try:
        cell = json.loads((cell_dir / "cell.json").read_text())
        payload = cell["payload"]
        method = payload["parameters"].get("fine_tuning_method") or "full"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExportError(f"{cell_dir} is no cell of a training: {error}") from error
    if method == "prompt_tuning" and merge:
        raise ExportError(
            "prompt tuning adds vectors before the text, which no model folder holds: export it "
            "without merging, as a peft adapter"
        )
    if method == "adapter" and not merge:
        raise ExportError("adapters can only be exported merged: no other program loads them alone")
    store = CheckpointStore(
        cell_dir / "checkpoints", {"cell": cell["id"], "engine": payload["engine"]}
    )
    model = store.find(which).path / "model"

    target.parent.mkdir(parents=True, exist_ok=True)
    writing = target.with_name(f".writing-{target.name}-{os.getpid()}")
    shutil.rmtree(writing, ignore_errors=True)
    try:
        trained: Any = None
        if merge and method in ("lora", "adapter"):
            trained = _merged(Path(payload["model"]), model, method)
        elif payload["engine"] == "megatron":
            trained = _gathered(model)
        if trained is not None:
            trained.save_pretrained(str(writing))
            for file in model.iterdir():
                if file.name.startswith(_TOKENIZER_FILES):
                    shutil.copy2(file, writing / file.name)
        else:
            shutil.copytree(model, writing)
        if target.exists():
            target.rmdir()
        writing.rename(target)
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    return target


def _gathered(model: Path) -> Any:
    """The model of a checkpoint that many processes wrote, each a part."""
    # Heavy, and not needed for models that one process wrote.
    from transformers.utils import logging

    from hpcml.train.model import read_model

    logging.disable_progress_bar()
    return read_model(model, "auto")


def _merged(base: Path, added: Path, method: str) -> Any:
    """The base model with what was learned beside it put into its own weights."""
    # Heavy, and not needed for models that were trained as a whole.
    import torch
    from transformers import AutoModelForCausalLM

    if not (base / "config.json").is_file():
        raise ExportError(f"the model that was tuned is no longer at {base}; it is needed to merge")
    model = AutoModelForCausalLM.from_pretrained(
        str(base), dtype=torch.float32, local_files_only=True
    )
    if method == "lora":
        from peft import PeftModel

        return PeftModel.from_pretrained(model, str(added)).merge_and_unload()

    from hpcml.train import finetune
    from hpcml.train.config import TrainingConfig

    size = json.loads((added / "adapter.json").read_text())["adapter_size"]
    config = TrainingConfig(fine_tuning_method="adapter", adapter_size=size)
    finetune.add_adapters(model, size)
    finetune.load_weights(model, config, added)
    return finetune.merge_adapters(model)
