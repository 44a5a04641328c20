from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcml.recipe.hyperparameters import ALIASES, BY_NAME, ELSEWHERE, HYPERPARAMETERS
from hpcml.recipe.vocabulary import (
    Contradiction,
    Setting,
    canonical_name,
    checked_value,
    interacting,
    resolve,
)

from .writing import TRAIN, Recipes

TORCH = Setting("torch")
TORCH_NAMES = [row.name for row in HYPERPARAMETERS if "torch" in row.engines]


def mistakes(params: dict[str, Any], setting: Setting = TORCH) -> dict[str, str]:
    with pytest.raises(Contradiction) as caught:
        resolve(params, setting)
    return dict(caught.value.mistakes)


def test_every_name_is_there_once() -> None:
    names = Counter([*BY_NAME, *ALIASES, *ELSEWHERE])
    assert [name for name, count in names.items() if count > 1] == []
    assert len(BY_NAME) == len(HYPERPARAMETERS)
    assert len(ALIASES) == sum(len(row.aliases) for row in HYPERPARAMETERS)


def test_every_selector_is_used_by_the_same_engines() -> None:
    for row in HYPERPARAMETERS:
        for selector, allowed in row.only_with:
            assert set(row.engines) <= set(BY_NAME[selector].engines)
            assert set(allowed) <= set(BY_NAME[selector].choices)


@pytest.mark.parametrize("row", HYPERPARAMETERS, ids=lambda row: row.name)
def test_a_default_is_allowed(row: Any) -> None:
    for default in (row.default, *row.default_by.values()):
        if default is not None:
            checked = checked_value(row, default)
            assert checked == default
            assert type(checked) is type(default)


@pytest.mark.parametrize(
    ("name", "value", "stored"),
    [
        ("learning_rate", 1, 1.0),
        ("max_steps", 1e5, 100_000),
        ("max_steps", None, None),
        ("grad_norm_type", "inf", "inf"),
        ("grad_norm_type", float("inf"), "inf"),
        ("grad_norm_type", 1, 1.0),
        ("frozen_layers", [0, 2], [0, 2]),
        ("target_modules", ["q_proj"], ["q_proj"]),
        ("eval_strategy", "no", "no"),
        ("bf16", True, True),
    ],
)
def test_values_are_stored_in_one_form(name: str, value: Any, stored: Any) -> None:
    found = checked_value(BY_NAME[name], value)
    assert found == stored
    assert type(found) is type(stored)


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("learning_rate", 0, ["a number > 0", "not 0"]),
        ("learning_rate", -1e-3, ["a number > 0"]),
        ("learning_rate", "1e-3", ["a number > 0", "it is text"]),
        ("learning_rate", True, ["a number > 0", "not true"]),
        ("learning_rate", None, ["a number > 0", "not null"]),
        ("learning_rate", 10**400, ["a number > 0"]),
        ("max_steps", 1.5, ["a whole number ≥ 1", "not 1.5"]),
        ("max_steps", 0, ["a whole number ≥ 1"]),
        ("dropout", 1, ["a number ≥ 0 and < 1"]),
        ("warmup_ratio", 1.1, ["≥ 0 and ≤ 1"]),
        ("optim", "adamm", ["one of sgd, adam, adamw", "did you mean 'adam"]),
        ("optim", 3, ["one of sgd"]),
        ("bf16", "yes", ["true or false", "'yes'"]),
        ("bf16", 1, ["true or false"]),
        ("frozen_layers", [-1], ["a list of whole numbers"]),
        ("frozen_layers", 3, ["a list of whole numbers"]),
        ("target_modules", [], ["a list of texts"]),
        ("grad_norm_type", 0, ["or inf"]),
        ("seed", 2**32, ["≤ 4294967295"]),
        ("init_gain", float("nan"), ["a number > 0"]),
    ],
)
def test_wrong_values(name: str, value: Any, parts: list[str]) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        checked_value(BY_NAME[name], value)
    for part in parts:
        assert part in str(caught.value)


def test_names() -> None:
    assert canonical_name("lr", "torch") == "learning_rate"
    assert canonical_name("clip_grad_norm", "torch") == "max_grad_norm"
    assert canonical_name("max_new_tokens", "vllm") == "max_tokens"
    for name, part in (
        ("learning_rte", "did you mean 'learning_rate'"),
        ("zzzzz", "docs/hyperparameters.md"),
        ("num_gpus", "resources.gpus"),
        ("temperature", "torch would ignore it.*vllm, sglang, transformers"),
        ("zero_stage", "engines that use it: deepspeed"),
    ):
        with pytest.raises(ValueError, match=part):
            canonical_name(name, "torch")


def test_everything_is_resolved() -> None:
    values = resolve({}, TORCH)
    assert list(values) == TORCH_NAMES
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert values["num_key_value_heads"] == values["num_attention_heads"] == 4
    assert values["intermediate_size"] == 384
    assert values["max_steps"] is None
    assert values["num_train_epochs"] == 1.0


def test_what_does_not_apply_is_off() -> None:
    values = resolve({"optim": "sgd", "max_steps": 5, "lr_scheduler_type": "cosine"}, TORCH)
    assert values["adam_beta1"] is None
    assert values["momentum"] == 0.0
    assert values["num_train_epochs"] is None
    assert values["lr_num_cycles"] == 0.5
    assert values["lr_power"] is None
    values = resolve({"lr_scheduler_type": "cosine_with_restarts", "warmup_ratio": 0.1}, TORCH)
    assert values["lr_num_cycles"] == 1.0
    assert values["warmup_steps"] is None


@pytest.mark.parametrize(
    ("params", "processes", "batch"),
    [
        ({}, 1, (8, 8, 1)),
        ({}, 4, (8, 2, 1)),
        ({"global_batch_size": 32}, 4, (32, 8, 1)),
        ({"global_batch_size": 32, "per_device_train_batch_size": 2}, 4, (32, 2, 4)),
        ({"global_batch_size": 32, "gradient_accumulation_steps": 2}, 4, (32, 4, 2)),
        ({"per_device_train_batch_size": 3}, 4, (12, 3, 1)),
        ({"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}, 4, (24, 3, 2)),
        ({"gradient_accumulation_steps": 2}, 2, (8, 2, 2)),
        (
            {
                "global_batch_size": 24,
                "per_device_train_batch_size": 3,
                "gradient_accumulation_steps": 2,
            },
            4,
            (24, 3, 2),
        ),
    ],
)
def test_batch_arithmetic(params: dict[str, Any], processes: int, batch: tuple[int, ...]) -> None:
    values = resolve(params, Setting("torch", processes))
    assert batch == (
        values["global_batch_size"],
        values["per_device_train_batch_size"],
        values["gradient_accumulation_steps"],
    )
    assert values["data_parallel_size"] == processes


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 16))
def test_any_two_of_the_batch_give_the_third(device: int, passes: int, processes: int) -> None:
    setting = Setting("torch", processes)
    batch = {
        "global_batch_size": device * passes * processes,
        "per_device_train_batch_size": device,
        "gradient_accumulation_steps": passes,
    }
    for left_out in batch:
        given_two = {name: value for name, value in batch.items() if name != left_out}
        values = resolve(given_two, setting)
        assert {name: values[name] for name in batch} == batch


def test_batches_that_can_not_be() -> None:
    found = mistakes(
        {
            "global_batch_size": 8,
            "per_device_train_batch_size": 3,
            "gradient_accumulation_steps": 2,
        },
        Setting("torch", 2),
    )
    assert "it is 8, but" in found["global_batch_size"]
    assert "= 12" in found["global_batch_size"]
    found = mistakes({"global_batch_size": 6}, Setting("torch", 4))
    assert "6 is not a multiple of 4" in found["global_batch_size"]
    found = mistakes({"global_batch_size": 4, "per_device_train_batch_size": 8})
    assert "not a multiple of 8" in found["global_batch_size"]
    found = mistakes({"data_parallel_size": 2})
    assert "1 processes" in found["data_parallel_size"]


@pytest.mark.parametrize(
    ("params", "name", "part"),
    [
        ({"momentum": 0.9}, "momentum", "optim is adamw; it needs sgd or rmsprop"),
        ({"optim": "sgd", "adam_beta1": 0.9}, "adam_beta1", "optim is sgd"),
        ({"lr_power": 2.0}, "lr_power", "lr_scheduler_type is linear; it needs polynomial"),
        ({"lr_scheduler_type": "step", "lr_num_cycles": 1.0}, "lr_num_cycles", "is step"),
        ({"lr_scheduler_type": "one_cycle", "warmup_steps": 5}, "warmup_steps", "is one_cycle"),
        ({"warmup_steps": 5, "warmup_ratio": 0.1}, "warmup_ratio", "same as warmup_steps"),
        ({"num_train_epochs": 1.0, "max_steps": 5}, "max_steps", "same as num_train_epochs"),
        ({"fp16": True, "bf16": True}, "bf16", "not in both"),
        ({"eval_strategy": "no", "early_stopping_patience": 2}, "early_stopping_patience", "no"),
        ({"eval_strategy": "no", "load_best_model_at_end": True}, "load_best_model_at_end", "no"),
        ({"eval_strategy": "epoch", "eval_steps": 5}, "eval_steps", "is epoch; it needs steps"),
        (
            {"eval_strategy": "no", "lr_scheduler_type": "reduce_on_plateau"},
            "lr_scheduler_type",
            "needs evaluations",
        ),
        ({"early_stopping_threshold": 0.1}, "early_stopping_threshold", "patience is not given"),
        ({"r": 8}, "r", "fine_tuning_method is full; it needs lora"),
        ({"fine_tuning_method": "lora", "adapter_size": 8}, "adapter_size", "needs adapter"),
        ({"fine_tuning_method": "freeze"}, "fine_tuning_method", "needs one of"),
        (
            {"fine_tuning_method": "freeze", "num_frozen_layers": 1, "frozen_layers": [1]},
            "fine_tuning_method",
            "needs one of",
        ),
        (
            {"fine_tuning_method": "freeze", "num_frozen_layers": 5},
            "num_frozen_layers",
            "only 4 layers",
        ),
        ({"fine_tuning_method": "freeze", "frozen_layers": [4]}, "frozen_layers", "only 4 layers"),
        ({"group_by_length": True}, "group_by_length", "packing"),
        ({"focal_gamma": 1.0}, "focal_gamma", "loss_function is cross_entropy"),
        ({"init_gain": 2.0}, "init_gain", "init_method is normal"),
        ({"hidden_size": 100}, "hidden_size", "multiple of 8"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "not a multiple"),
        ({"lr_scheduler_type": "cosine", "lr_end": 1.0}, "lr_end", "above learning_rate"),
    ],
)
def test_what_does_not_go_together(params: dict[str, Any], name: str, part: str) -> None:
    found = mistakes(params)
    assert list(found) == [name]
    assert part in found[name]


@pytest.mark.parametrize(
    "params",
    [
        {"momentum": 0.0},
        {"load_best_model_at_end": False, "eval_strategy": "no"},
        {"clip_grad_value": 1.0, "max_grad_norm": 1.0},
        {"warmup_steps": 0, "lr_scheduler_type": "cyclic"},
        {"max_steps": None, "num_train_epochs": 2.0},
        {"fine_tuning_method": "freeze", "frozen_layers": [0, 3]},
    ],
)
def test_what_goes_together(params: dict[str, Any]) -> None:
    resolve(params, TORCH)


def test_a_given_model_has_its_own_shape() -> None:
    setting = Setting("torch", has_model=True)
    assert "train.model" in mistakes({"hidden_size": 64}, setting)["hidden_size"]
    values = resolve({}, setting)
    assert values["hidden_size"] is None
    assert values["vocab_size"] is None
    setting = Setting("torch", has_tokenizer=True)
    assert "tokenizer" in mistakes({"vocab_size": 100}, setting)["vocab_size"]
    assert resolve({}, setting)["vocab_size"] is None


def test_group_by_length_without_packing() -> None:
    assert resolve({"group_by_length": True}, Setting("torch", packing=False))["group_by_length"]


_CHOICES = {
    "learning_rate": [1e-3, 1e-1],
    "seed": [1],
    "optim": ["sgd", "adamw"],
    "momentum": [0.5],
    "lr_scheduler_type": ["cosine", "one_cycle"],
    "lr_end": [1e-2],
    "weight_decay": [0.1],
    "num_attention_heads": [2, 3],
    "max_steps": [5],
    "fp16": [True],
    "bf16": [True],
    "gradient_accumulation_steps": [2, 3],
}


def _outcome(params: dict[str, Any]) -> Any:
    try:
        return resolve(params, TORCH)
    except Contradiction as error:
        return error.mistakes


@given(st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in _CHOICES.items()}))
def test_parameters_that_do_not_interact_stand_alone(params: dict[str, Any]) -> None:
    alone = set(params) - interacting(params)
    assert {"seed", "weight_decay"} & set(params) <= alone
    rest = {name: value for name, value in params.items() if name not in alone}
    whole, part = _outcome(params), _outcome(rest)
    if isinstance(part, dict):
        part |= {name: params[name] for name in alone}
    assert whole == part


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("params: {learning_rte: 1}\n", ["recipe.yaml:4: params.learning_rte", "'learning_rate'"]),
        ("params: {top_k: 1}\n", ["params.top_k", "vllm"]),
        (
            "params:\n  lr: 1\n  learning_rate: 2\n",
            ["recipe.yaml:6: params.learning_rate", "same parameter as params.lr", "recipe.yaml:5"],
        ),
        ("params: {lr: 0}\n", ["params.lr", "must be a number > 0"]),
        ("params: {optim: {name: sgd}}\n", ["params.optim", "must be one of"]),
        ("sweep: {grid: {lr: [1, -1]}}\n", ["sweep.grid.lr.1", "> 0"]),
        ("sweep: {zip: {lr: [1, -1]}}\n", ["sweep.zip.lr.1", "> 0"]),
        ("sweep: {points: [{seed: 0}, {lr: x}]}\n", ["sweep.points.1.lr", "> 0"]),
        ("sweep: {points: [{lr: 1, learning_rate: 1}]}\n", ["points.0.learning_rate", "same"]),
        ("sweep: {grid: {lr: [1]}, zip: {learning_rate: [2]}}\n", ["already"]),
        (
            "sweep: {random: {samples: 2, params: {lr: {uniform: [-2, -1]}}}}\n",
            ["params.lr", "> 0"],
        ),
        (
            "params: {momentum: 0.9}\nsweep:\n  grid: {optim: [sgd, adamw]}\n",
            ["recipe.yaml:4: params.momentum", 'cell with optim="adamw"', "sweep.when"],
        ),
        ("params: {batch_size: 6}\nresources: {gpus: 4}\n", ["params.batch_size", "multiple of 4"]),
    ],
)
def test_mistakes_in_a_recipe(recipes: Recipes, text: str, parts: list[str]) -> None:
    message = recipes.error(TRAIN + text)
    for part in parts:
        assert part in message
