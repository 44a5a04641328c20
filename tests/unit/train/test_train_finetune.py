from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hpcml.train import finetune
from hpcml.train.config import TrainingConfig, TrainingError
from hpcml.train.model import new_model

SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_length": 16,
    "tie_word_embeddings": False,
}
LAYER = 9  # weights of one layer


def prepared(**parameters: Any) -> Any:
    config = TrainingConfig(**SHAPE, **parameters)
    return finetune.prepare(new_model(config, 50, {}), config)


def learning(model: Any) -> list[str]:
    return [name for name, weight in model.named_parameters() if weight.requires_grad]


def layers(names: list[str]) -> set[int]:
    return {int(name.split("layers.")[1].split(".")[0]) for name in names if "layers." in name}


def test_full_trains_everything() -> None:
    assert len(learning(prepared(fine_tuning_method="full"))) == 3 * LAYER + 3


def test_freeze_keeps_the_first_layers_and_the_embeddings() -> None:
    names = learning(prepared(fine_tuning_method="freeze", num_frozen_layers=2))
    assert layers(names) == {2}
    assert not any("embed" in name for name in names)
    assert "lm_head.weight" in names
    more = learning(prepared(fine_tuning_method="freeze", num_frozen_layers=1))
    assert layers(more) == {1, 2}


def test_freeze_keeps_the_layers_of_a_list() -> None:
    names = learning(prepared(fine_tuning_method="freeze", frozen_layers=[0, 2]))
    assert layers(names) == {1}
    assert "model.embed_tokens.weight" in names


@pytest.mark.parametrize("count", [0, 1, 2])
def test_top_trains_the_last_layers_and_the_head(count: int) -> None:
    names = learning(prepared(fine_tuning_method="top", num_top_layers=count))
    assert layers(names) == set(range(3 - count, 3))
    assert {"lm_head.weight", "model.norm.weight"} <= set(names)
    assert "model.embed_tokens.weight" not in names


def test_lora_gets_its_parameters() -> None:
    model = prepared(
        fine_tuning_method="lora", r=3, lora_alpha=7.0, lora_dropout=0.25,
        target_modules=["up_proj"], bias="all", task_type="CAUSAL_LM",
    )  # fmt: skip
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (3, 7.0, 0.25)
    assert (config.bias, config.task_type.value) == ("all", "CAUSAL_LM")
    names = learning(model)
    assert len(names) == 2 * 3
    assert all("up_proj.lora_" in name for name in names)
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    assert layer.scaling["default"] == pytest.approx(7 / 3)
    assert layer.lora_dropout["default"].p == 0.25
    assert layer.lora_A["default"].weight.shape == (3, 16)
    assert len(learning(prepared(fine_tuning_method="lora"))) == 2 * 2 * 3


def test_prompt_tuning_trains_only_its_vectors() -> None:
    model = prepared(fine_tuning_method="prompt_tuning", num_virtual_tokens=5)
    assert len(learning(model)) == 1
    assert model.get_prompt(1).shape == (1, 5, 16)


def test_adapters_have_their_size_and_start_as_nothing() -> None:
    plain = prepared(fine_tuning_method="full")
    model = prepared(fine_tuning_method="adapter", adapter_size=5)
    names = learning(model)
    assert len(names) == 3 * 3
    assert all(".mlp.adapter." in name for name in names)
    assert model.model.layers[0].mlp.adapter["up"].weight.shape == (5, 16)
    ids = torch.arange(12)[None]
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_merged_adapters_compute_the_same() -> None:
    model = prepared(fine_tuning_method="adapter", adapter_size=5)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.mlp.adapter["down"].weight)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        merged = finetune.merge_adapters(model)
        after = merged(input_ids=ids).logits
    assert torch.allclose(before, after, atol=1e-6)
    assert merged.config.intermediate_size == 24 + 5
    assert not any("adapter" in name for name in merged.state_dict())


def test_what_is_added_is_the_same_after_every_restart() -> None:
    for method in finetune.ADDED:
        torch.manual_seed(1)
        first = prepared(fine_tuning_method=method).state_dict()
        torch.manual_seed(2)
        again = prepared(fine_tuning_method=method).state_dict()
        assert all(torch.equal(first[name], again[name]) for name in first), method


@pytest.mark.parametrize("method", ["full", "freeze", "lora", "adapter", "prompt_tuning"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_survive_the_disk(tmp_path: Path, method: str, tied: bool) -> None:
    config = TrainingConfig(
        **{**SHAPE, "tie_word_embeddings": tied}, fine_tuning_method=method, num_frozen_layers=1
    )
    model, other = (finetune.prepare(new_model(config, 50, {}), config) for _ in range(2))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.normal_()
    finetune.save_weights(model, config, tmp_path / "model")
    finetune.load_weights(other, config, tmp_path / "model")
    saved, loaded = model.state_dict(), other.state_dict()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"fine_tuning_method": "freeze"}, "needs num_frozen_layers or frozen_layers"),
        ({"fine_tuning_method": "freeze", "num_frozen_layers": 4}, "has 3 layers"),
        ({"fine_tuning_method": "freeze", "frozen_layers": [7]}, "none is 7"),
        ({"fine_tuning_method": "top", "num_top_layers": 4}, "has 3 layers"),
        ({"fine_tuning_method": "lora", "target_modules": ["nothing"]}, "nothing"),
        ({"fine_tuning_method": "lora", "task_type": "SEQ_CLS"}, "only CAUSAL_LM"),
        ({"fine_tuning_method": "magic"}, "no fine_tuning_method"),
    ],
)
def test_what_does_not_fit_is_told(parameters: dict[str, Any], says: str) -> None:
    with pytest.raises(TrainingError, match=says):
        prepared(**parameters)
