from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the engine torch is not installed")

import torch
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM

from hpcml.train.config import TrainingConfig, TrainingError
from hpcml.train.llama import Llama

SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_length": 16,
}
SHAPES: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": 2, "intermediate_size": 50, "tie_word_embeddings": False},
    {"num_key_value_heads": 1, "hidden_act": "relu", "init_std": 0.5, "num_hidden_layers": 3},
]


@pytest.fixture(params=SHAPES, ids=range(len(SHAPES)))
def llama(request: pytest.FixtureRequest) -> Llama:
    config = TrainingConfig(**{**SHAPE, **request.param})
    return Llama.new(config, 100, {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None})


def test_transformers_understands_it_so(llama: Llama, tmp_path: Path) -> None:
    """Nothing of it is left to the defaults of whoever reads it."""
    llama.write(tmp_path)
    read = LlamaConfig.from_pretrained(str(tmp_path))
    said = {name: getattr(read, name) for name in llama.document}
    assert said == dict(llama.document)


def test_its_parameters_have_the_shapes_of_the_model(llama: Llama) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_dict(dict(llama.document)))
    for name, parameter in model.named_parameters():
        assert llama.parameter_shape(name) == tuple(parameter.shape), name


def test_what_was_written_is_read_again(llama: Llama, tmp_path: Path) -> None:
    llama.write(tmp_path)
    again = Llama.of(tmp_path)
    assert {**vars(again), "document": None} == {**vars(llama), "document": None}
    (tmp_path / "copy").mkdir()
    again.write(tmp_path / "copy")
    assert vars(Llama.of(tmp_path / "copy")) == vars(again)


def test_a_folder_may_leave_out_what_is_usual(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "rope_theta": 5e5}'
    )
    found = Llama.of(tmp_path)
    assert (found.head_dim, found.num_key_value_heads, found.vocab_size) == (16, 4, 32000)
    assert found.rope_parameters["rope_theta"] == 5e5


@pytest.mark.parametrize("other", [GPT2Config(), LlamaConfig(mlp_bias=True)])
def test_another_model_is_refused(other: Any, tmp_path: Path) -> None:
    other.save_pretrained(tmp_path)
    with pytest.raises(TrainingError, match=f"Llamas without biases; .* is a {other.model_type}"):
        Llama.of(tmp_path)


@pytest.mark.parametrize(
    ("heads", "key_value_heads"), [(5, None), (4, 3), (16, None)], ids=["size", "groups", "odd"]
)
def test_a_shape_that_contradicts_itself_is_refused(
    heads: int, key_value_heads: int | None
) -> None:
    config = TrainingConfig(
        **{**SHAPE, "num_attention_heads": heads, "num_key_value_heads": key_value_heads}
    )
    with pytest.raises(TrainingError, match="must be an even multiple"):
        Llama.new(config, 100, {})


def test_the_engine_megatron_begins_without_transformers() -> None:
    pytest.importorskip("megatron.core", reason="the engine megatron is not installed")
    check = "import sys, hpcml.train.megatron.engine; print('transformers' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False"]
