"""The kinds of training among the cells of a recipe: models and layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpcml.plan.training.layout import Layout, Training, layout_of, optimizer_values
from hpcml.plan.training.learning import parts_of
from hpcml.plan.training.model import UnknownModel, model_of, new_model, tokenizer_size
from hpcml.recipe.cell import Cell
from hpcml.recipe.load import LoadedRecipe
from hpcml.recipe.stages import is_token

#: The parameters that decide what a training needs.
_MATTER = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
    "max_length",
    "max_steps",
    "save_steps",
    "global_batch_size",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "bf16",
    "fp16",
    "optim",
    "momentum",
    "dropout",
    "fine_tuning_method",
    "num_frozen_layers",
    "frozen_layers",
    "num_top_layers",
    "r",
    "target_modules",
    "adapter_size",
    "num_virtual_tokens",
    "data_parallel_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "sequence_parallel",
    "virtual_pipeline_stages",
    "gradient_checkpointing",
    "zero_stage",
    "offload",
    "fsdp",
)


class Kind(NamedTuple):
    """Cells whose model and layout are the same.

    Attributes:
        cells: their numbers.
        tells: the swept parameters that tell them from the recipe's other kinds.
        training, layout: what is trained, and how the recipe spreads it.
    """

    cells: tuple[int, ...]
    tells: Mapping[str, Any]
    training: Training
    layout: Layout


def kinds(
    loaded: LoadedRecipe, cells: Sequence[Cell], world: int, heavy: bool = True
) -> list[Kind]:
    """Each model and layout among the cells of a training recipe.

    Args:
        loaded: the recipe.
        cells: its cells.
        world: processes of each.
        heavy: whether a tokenizer may be read, which takes a while.

    Raises:
        UnknownModel: what is trained isn't known yet, or can't be counted.
    """
    found = []
    for numbers, payload, tells in _distinct(loaded, cells):
        parameters = payload["parameters"]
        for name in _MATTER:
            if is_token(parameters.get(name)):
                raise UnknownModel(f"{name} is known only when a cell starts")
        layout = layout_of(payload["engine"], parameters, world)
        found.append(Kind(numbers, tells, _training(payload, heavy), layout))
    return found


def _distinct(
    loaded: LoadedRecipe, cells: Sequence[Cell]
) -> Iterator[tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]]:
    """Cells of one kind: their numbers, the payload of the first, the parameters that tell them."""
    assert loaded.recipe.train is not None
    # Any parameter may be in the path of the model; payloads are not made for all cells otherwise.
    paths = "{{" in (loaded.recipe.train.model or "")
    names = [name for name in cells[0].names if paths or name in _MATTER]
    if not names:
        yield tuple(range(len(cells))), cells[0].payload, {}
        return
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        swept = cell.swept
        key = repr([swept.get(name) for name in names if name in _MATTER])
        groups.setdefault(f"{cell.payload['model']} {key}" if paths else key, []).append(cell)
    for group in groups.values():
        swept = group[0].swept
        tells = {
            name: swept[name]
            for name in names
            if name in swept
            and (name in _MATTER or all(cell.swept.get(name) == swept[name] for cell in group))
        }
        yield tuple(cell.index for cell in group), group[0].payload, tells


def _training(payload: Mapping[str, Any], heavy: bool) -> Training:
    parameters = payload["parameters"]
    folder, tokenizer = payload["model"], payload["data"]["tokenizer"]
    if is_token(folder):
        raise UnknownModel("train.model is what an earlier stage makes")
    if folder is not None:
        model = model_of(Path(folder))
    elif tokenizer is not None:
        if not heavy or is_token(tokenizer):
            raise UnknownModel("the size of the tokenizer is not known")
        model = new_model({**parameters, "vocab_size": tokenizer_size(Path(tokenizer))})
    else:
        model = new_model(parameters)
    interval = payload["checkpoint"]["interval"]
    return Training(
        model=model,
        parts=parts_of(model, parameters),
        length=parameters["max_length"],
        global_batch=parameters["global_batch_size"],
        steps=parameters.get("max_steps"),
        half=bool(parameters.get("bf16") or parameters.get("fp16")),
        optimizer_values=optimizer_values(parameters),
        dropout=bool(parameters.get("dropout")),
        save_steps=parameters.get("save_steps"),
        save_interval=None if interval == "auto" else interval,
    )
