"""The engine megatron trains as the engine torch does, however the model is shared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.train import cells

pytest.importorskip("megatron.core", reason="the engine megatron is not installed")

# 321 tokens are no multiple of two, and the sizes of the parameters none of 128: whatever is
# divided has something left over.
MODEL = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 40,
    "intermediate_size": 44,
    "vocab_size": 321,
}
COURSE = {
    "global_batch_size": 8,
    "max_steps": 30,
    "logging_steps": 1,
    "eval_steps": 10,
    "save_steps": 30,
    "weight_decay": 0.1,
    "warmup_steps": 5,
    "adam_beta2": 0.95,
}
TP, PP, SP, VPP = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "sequence_parallel",
    "virtual_pipeline_stages",
)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {TP: 2}),
    "pp2": (2, {PP: 2}),
    "dp2": (2, {"data_parallel_size": 2}),
    "pp2-vpp2": (2, {PP: 2, VPP: 2}),
    "pp4-passes8": (4, {PP: 4, "per_device_train_batch_size": 1}),
    "tp2-pp2": (4, {TP: 2, PP: 2}),
    "tp2-sp-pp2-dp2": (8, {TP: 2, PP: 2, SP: True}),
}
UNTIED: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2-sp-dp2": (4, {TP: 2, SP: True}),
    "tp2-pp2-vpp2-dp2": (8, {TP: 2, PP: 2, VPP: 2}),
    "pp4-dp2": (8, {PP: 4}),
}


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, corpus: str, data_root: Path
) -> dict[str, Path]:
    """Every layout trained, by eight processes that start once; and the same with torch."""
    folder = tmp_path_factory.mktemp("layouts")
    made: dict[str, Path] = {}
    jobs = []
    for tied, layouts in ((True, LAYOUTS), (False, UNTIED)):
        kind = "tied" if tied else "untied"
        parameters = {**MODEL, **COURSE, "tie_word_embeddings": tied}
        made[f"{kind}-torch"] = cells.write_cell(folder / f"{kind}-torch", corpus, parameters)
        assert cells.train(made[f"{kind}-torch"], data_root) == 0
        for name, (processes, layout) in layouts.items():
            cell = cells.write_cell(
                folder / f"{kind}-{name}", corpus, {**parameters, **layout}, engine="megatron"
            )
            made[f"{kind}-{name}"] = cell
            jobs.append(cells.Job(cell, processes))
    codes = cells.train_in_turn(folder / "ranks", data_root, jobs)
    assert not any(map(any, codes))
    return made


EACH = [*(("tied", name) for name in LAYOUTS), *(("untied", name) for name in UNTIED)]


@pytest.mark.parametrize(("kind", "layout"), EACH)
def test_every_layout_trains_like_torch(trained: dict[str, Path], kind: str, layout: str) -> None:
    expected = cells.metrics(trained[f"{kind}-torch"])
    found = cells.metrics(trained[f"{kind}-{layout}"])
    assert found.keys() == expected.keys()
    for step, values in expected.items():
        for name, value in values.items():
            # The losses within 1e-4, as the norm of the gradients; all else to the last bit.
            about = name in ("loss", "eval_loss", "grad_norm")
            assert found[step][name] == (pytest.approx(value, rel=1e-4) if about else value)


@pytest.mark.parametrize(("kind", "layout"), EACH)
def test_every_layout_exports_the_same_model(
    trained: dict[str, Path], tmp_path: Path, kind: str, layout: str
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hpcml.train.export import export

    folder = export(trained[f"{kind}-{layout}"], tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = trained[f"{kind}-torch"] / "checkpoints" / "step-30" / "model"
    other = AutoModelForCausalLM.from_pretrained(expected)
    assert AutoTokenizer.from_pretrained(folder)("the cat") == AutoTokenizer.from_pretrained(
        expected
    )("the cat")
    theirs = other.state_dict()
    assert model.state_dict().keys() == theirs.keys()
    for name, weight in model.state_dict().items():
        assert torch.allclose(weight, theirs[name], atol=2e-4), name
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] == (
        kind == "tied"
    )
