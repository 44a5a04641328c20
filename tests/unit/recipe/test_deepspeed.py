"""A recipe's own configuration of DeepSpeed, and what it may not say."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from hpcml.recipe.deepspeed import _OTHERS
from hpcml.recipe.vocabulary import Contradiction, Setting, resolve

from .writing import Recipes

RECIPE = "name: t\nkind: train\ntrain: {engine: deepspeed, data: {source: python-stdlib}}\n"
PARAMS = {"global_batch_size": 16, "zero_stage": 3, "bf16": True, "offload": "optimizer"}


def recipe(deepspeed: Any, **params: Any) -> str:
    return yaml.safe_dump(
        {
            "name": "t",
            "kind": "train",
            "params": {**PARAMS, **params},
            "train": {
                "engine": "deepspeed",
                "data": {"source": "python-stdlib"},
                "deepspeed": deepspeed,
            },
        }
    )


def test_what_agrees_is_taken_as_it_is(recipes: Recipes) -> None:
    config = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "loss_scale_window": 100},
        "optimizer": "auto",
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "none"},
            "sub_group_size": 1000,
        },
        "no_key_of_ours": [1],
    }
    (cell,) = recipes.cells(recipe(config))
    assert cell.payload["deepspeed"] == config
    (recipes.folder / "own.json").write_text(json.dumps(config))
    (same,) = recipes.cells(recipe("own.json"))
    assert same.payload == cell.payload
    assert same.id == cell.id
    (without,) = recipes.cells(recipe(None))
    assert "deepspeed" not in without.payload
    assert without.id != cell.id


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"train_batch_size": 8}, ["train_batch_size: it is 8, but global_batch_size is 16"]),
        (
            {"train_micro_batch_size_per_gpu": 3},
            ["it is 3, but per_device_train_batch_size is 16"],
        ),
        (
            {"gradient_accumulation_steps": 4},
            ["gradient_accumulation_steps: it is 4, but gradient_accumulation_steps is 1"],
        ),
        ({"gradient_clipping": 0.5}, ["it is 0.5, but max_grad_norm is 1.0"]),
        ({"bf16": {"enabled": False}}, ["bf16.enabled: it is false, but bf16 is true"]),
        ({"fp16": {"enabled": True}}, ["fp16.enabled: it is true, but fp16 is false"]),
        ({"zero_optimization": {"stage": 2}}, ["it is 2, but zero_stage is 3"]),
        (
            {"zero_optimization": {"offload_param": {"device": "cpu"}}},
            ['offload_param.device: it is "cpu", but offload is optimizer'],
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            ['it is "nvme", but offload is optimizer', "nothing is kept on disks"],
        ),
        ({"optimizer": {"type": "AdamW"}}, ["optimizer: it can't be given, because optim"]),
        ({"scheduler": {"type": "WarmupLR"}}, ["scheduler: it can't be given"]),
        (
            {"train_batch_size": 8, "amp": {"enabled": True}},
            ["train_batch_size: it is 8", "amp: it can't be given"],
        ),
    ],
)
def test_contradictions_are_named(recipes: Recipes, config: Any, parts: list[str]) -> None:
    message = recipes.error(recipe(config))
    assert all(part in message for part in parts), message
    assert "recipe.yaml:" in message
    assert "train.deepspeed" in message
    (recipes.folder / "own.json").write_text(json.dumps(config))
    message = recipes.error(recipe("own.json"))
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("key", _OTHERS)
def test_what_is_not_deepspeeds_to_decide(key: str) -> None:
    config: Any = 1
    for part in reversed(key.split(".")):
        config = {part: config}
    with pytest.raises(Contradiction, match="can't be given"):
        resolve({}, Setting("deepspeed", deepspeed=config))


@pytest.mark.parametrize(
    ("content", "part"),
    [(None, "can't be read"), ("{", "is no JSON"), ("[1]", "holds no mapping")],
)
def test_a_file_that_is_none(recipes: Recipes, content: str | None, part: str) -> None:
    if content is not None:
        (recipes.folder / "own.json").write_text(content)
    message = recipes.error(recipe("own.json"))
    assert "own.json" in message
    assert part in message
    assert "train.deepspeed" in message


def test_another_engine_would_not_use_it(recipes: Recipes) -> None:
    text = "name: t\nkind: train\ntrain: {data: {source: python-stdlib}, deepspeed: {a: 1}}\n"
    assert "the engine is torch, so it would not be used" in recipes.error(text)


@pytest.mark.parametrize(
    ("params", "name", "part"),
    [
        ({"zero_stage": 0, "offload": "optimizer"}, "offload", "needs zero_stage 1 or 2 or 3"),
        ({"zero_stage": 2, "offload": "all"}, "offload", "needs zero_stage 3"),
    ],
)
def test_what_does_not_go_together(params: dict[str, Any], name: str, part: str) -> None:
    with pytest.raises(Contradiction) as caught:
        resolve(params, Setting("deepspeed"))
    ((found, message),) = caught.value.mistakes
    assert found == name
    assert part in message


def test_each_combination_of_a_sweep_is_checked(recipes: Recipes) -> None:
    text = RECIPE + "sweep: {grid: {zero_stage: [1, 3], offload: [optimizer, all]}}\n"
    message = recipes.error(text)
    assert "all needs zero_stage 3, and it is 1" in message
    assert "in the cell with zero_stage=1, offload=" in message


def test_the_stage_is_no_part_of_a_cells_id(recipes: Recipes) -> None:
    ids = {
        cell.id
        for params in ("{}", "{zero_stage: 3}", "{zero_stage: 3, offload: all}")
        for cell in recipes.cells(f"{RECIPE}params: {params}\n")
    }
    assert len(ids) == 1


def test_fsdp_has_no_loss_scaling() -> None:
    with pytest.raises(Contradiction, match="take bf16"):
        resolve({"fsdp": True, "fp16": True}, Setting("torch"))
    resolve({"fsdp": True, "bf16": True}, Setting("torch"))


@pytest.mark.parametrize(
    ("engine", "sharing"), [("torch", {"fsdp": True}), ("deepspeed", {"zero_stage": 3})]
)
def test_prompt_tuning_needs_whole_weights(engine: str, sharing: dict[str, Any]) -> None:
    given = {"fine_tuning_method": "prompt_tuning", **sharing}
    with pytest.raises(Contradiction, match="whole weights"):
        resolve(given, Setting(engine, has_model=True))
