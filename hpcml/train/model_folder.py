"""A model folder that many ranks write at once, each a part of the weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hpcml.train.checkpoint import write_digests
from hpcml.train.group import Group

_INDEX = "model.safetensors.index.json"


def write_parts(
    folder: Path,
    sizes: Mapping[str, int],
    whole: Callable[[str, bool], torch.Tensor | None],
    group: Group,
) -> None:
    """Write weights as the shards of a Hugging Face model folder, one shard per rank.

    Shards of equal size are written at the same time, so that neither one disk nor the memory of
    one process has to hold what all ranks together hold. The result says nothing of how many
    ranks there were: any number of them, and any other program, can read it.

    Args:
        folder: it exists on all ranks.
        sizes: bytes of each weight, in the model's order, the same on all ranks.
        whole: gives a weight, complete, if this rank writes it; all call it in the same order.
        group: the ranks.
    """
    total = max(sum(sizes.values()), 1)
    shards: dict[int, list[str]] = {}
    before = 0
    for name, size in sizes.items():
        shards.setdefault(before * group.size // total, []).append(name)
        before += size
    mine: dict[str, torch.Tensor] = {}
    for shard, names in shards.items():
        for name in names:
            weight = whole(name, shard == group.rank)
            if shard == group.rank:
                assert weight is not None
                mine[name] = weight.detach().cpu().contiguous()
    files = {
        shard: f"model-{number:05}-of-{len(shards):05}.safetensors"
        for number, shard in enumerate(shards, 1)
    }
    if mine:
        path = folder / files[group.rank]
        save_file(mine, path, metadata={"format": "pt"})
        write_digests(folder, str(group.rank), [path])
    if group.first:
        places = {name: files[shard] for shard, names in shards.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_configuration(model: Any, dtype: torch.dtype, folder: Path) -> None:
    """Write what a model folder has besides its weights.

    Args:
        model: of transformers.
        dtype: of the weights beside it.
        folder: it exists.
    """
    settings = model.config.to_dict()
    # FSDP2 gives a sharded module a class of its own.
    settings["architectures"] = [type(model).__name__.removeprefix("FSDP")]
    settings["dtype"] = str(dtype).removeprefix("torch.")
    # The Trainer turns the cache off, which is right for training only.
    settings["use_cache"] = True
    (folder / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(str(folder))
