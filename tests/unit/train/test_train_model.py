from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpcml.train.config import TrainingConfig, TrainingError
from hpcml.train.initialization import first_weights
from hpcml.train.model import add_dropout, decoder_layers, load_model, new_model

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_length": 16,
}


def model(**parameters: Any) -> Any:
    return new_model(TrainingConfig(**{**SHAPE, **parameters}), 100, {})


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("hidden_size", 64, "hidden_size"),
        ("num_hidden_layers", 3, "num_hidden_layers"),
        ("num_attention_heads", 8, "num_attention_heads"),
        ("num_key_value_heads", 2, "num_key_value_heads"),
        ("intermediate_size", 50, "intermediate_size"),
        ("hidden_act", "gelu", "hidden_act"),
        ("tie_word_embeddings", False, "tie_word_embeddings"),
        ("max_length", 20, "max_position_embeddings"),
    ],
)
def test_the_shape_is_the_configured_one(name: str, value: Any, field: str) -> None:
    assert getattr(model().config, field) != value
    assert getattr(model(**{name: value}).config, field) == value


def test_the_shape_is_that_of_the_weights() -> None:
    made = model(num_key_value_heads=2, hidden_act="relu", tie_word_embeddings=False)
    layer = decoder_layers(made)[0]
    assert len(decoder_layers(made)) == 2
    assert layer.self_attn.k_proj.weight.shape == (16, 32)
    assert layer.mlp.up_proj.weight.shape == (48, 32)
    assert isinstance(layer.mlp.act_fn, nn.ReLU)
    assert made.lm_head.weight is not made.model.embed_tokens.weight


def test_what_is_not_given_is_derived() -> None:
    config = model(intermediate_size=None, hidden_size=128).config
    assert config.num_key_value_heads == config.num_attention_heads == 4
    assert config.intermediate_size == 384


@pytest.mark.parametrize(
    "parameters",
    [{"num_attention_heads": 3}, {"num_key_value_heads": 3}, {"num_attention_heads": 32}],
)
def test_shapes_that_contradict_themselves_are_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(TrainingError, match="multiple of"):
        model(**parameters)


def matrix(**parameters: Any) -> torch.Tensor:
    made = model(hidden_size=256, intermediate_size=512, **parameters)
    return decoder_layers(made)[1].mlp.up_proj.weight.detach()


FAN_IN, FAN_OUT = 256, 512
XAVIER = math.sqrt(2 / (FAN_IN + FAN_OUT))
HE = math.sqrt(2 / FAN_IN)


@pytest.mark.parametrize(
    ("parameters", "std", "uniform"),
    [
        ({}, 0.02, False),
        ({"init_std": 0.1}, 0.1, False),
        ({"init_method": "xavier_uniform"}, XAVIER, True),
        ({"init_method": "xavier_normal"}, XAVIER, False),
        ({"init_method": "xavier_normal", "init_gain": 3.0}, 3 * XAVIER, False),
        ({"init_method": "he_uniform"}, HE, True),
        ({"init_method": "he_normal"}, HE, False),
        ({"init_method": "he_uniform", "init_gain": 0.5}, HE / 2, True),
    ],
)
def test_the_first_weights_have_the_distribution_of_the_method(
    parameters: dict[str, Any], std: float, uniform: bool
) -> None:
    weights = matrix(**parameters)
    assert weights.std().item() == pytest.approx(std, rel=0.02)
    assert abs(weights.mean().item()) < 0.02 * std
    # The largest of many is near √3 standard deviations if uniform, far beyond if normal.
    assert (weights.abs().max().item() < 1.75 * std) == uniform


def test_norms_start_at_one() -> None:
    assert set(model(init_method="he_normal").model.norm.weight.tolist()) == {1.0}


def test_the_seed_decides_the_weights() -> None:
    torch.manual_seed(1)
    first = model(seed=3).state_dict()
    torch.manual_seed(2)
    again, other = model(seed=3).state_dict(), model(seed=4).state_dict()
    name = "model.layers.1.mlp.up_proj.weight"
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], first[name.replace("layers.1", "layers.0")])


def test_a_part_of_the_model_can_be_drawn_alone() -> None:
    config = TrainingConfig(seed=3)
    name = "model.layers.1.mlp.up_proj.weight"
    whole = model(seed=3).state_dict()[name]
    assert torch.equal(first_weights(name, tuple(whole.shape), config), whole)


def outputs(made: Any) -> list[torch.Tensor]:
    ids = torch.arange(10)[None]
    with torch.no_grad():
        return [made(input_ids=ids).logits for _ in range(2)]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_dropout_is_there_in_training_only(dropout: float) -> None:
    made = model(dropout=dropout)
    names = list(made.state_dict())
    add_dropout(made, dropout)
    assert list(made.state_dict()) == names
    assert torch.equal(*outputs(made.eval()))
    assert torch.equal(*outputs(made.train())) == (dropout == 0)


@pytest.mark.parametrize("place", ["embed_tokens", "self_attn", "mlp"])
def test_dropout_is_in_each_block(place: str) -> None:
    made = model()
    add_dropout(made, 0.5)
    made.train()
    seen = []
    module = made.model.embed_tokens if place == "embed_tokens" else None
    module = module or getattr(decoder_layers(made)[0], place)
    module.register_forward_hook(lambda _m, _i, out: seen.append(out))
    outputs(made)
    output = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    assert 0.4 < (output == 0).float().mean().item() < 0.6


def test_a_model_of_a_folder_is_loaded(tmp_path: Path) -> None:
    made = model()
    made.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, 16)
    assert torch.equal(loaded.lm_head.weight, made.lm_head.weight)
    assert loaded.dtype == torch.float32
    with pytest.raises(TrainingError, match="above the model's 16 positions"):
        load_model(tmp_path, 17)


def test_a_missing_or_broken_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"no model at .*nowhere"):
        load_model(tmp_path / "nowhere", 16)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(TrainingError, match="no usable model"):
        load_model(tmp_path, 16)
