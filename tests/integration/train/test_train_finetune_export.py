"""Fine-tuning leaves what it must not touch, and what is exported computes what was trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcml.train.checkpoint import CheckpointError
from hpcml.train.export import ExportError, export
from tests.integration.train import cells

MakeCell = Callable[..., Path]

METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "freeze": {"num_frozen_layers": 1},
    "top": {"num_top_layers": 1},
    "lora": {"target_modules": ["q_proj", "up_proj"], "bias": "none"},
    "adapter": {"adapter_size": 8},
    "prompt_tuning": {"num_virtual_tokens": 4},
}


@pytest.fixture
def tune(make_cell: MakeCell, data_root: Path, base_model: Path) -> Callable[[str], Path]:
    def train(method: str) -> Path:
        parameters = {"fine_tuning_method": method, "learning_rate": 0.02, **METHODS[method]}
        cell = make_cell(method, parameters=parameters, model=base_model)
        assert cells.train(cell, data_root) == 0
        return cell

    return train


def weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def model_loss(folder: Path, text: Path) -> float:
    """The exported folder's loss on the held-out text, through the public loaders only."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hpcml.data.dataset import PackedSamples, TokenFile

    assert len(AutoTokenizer.from_pretrained(folder)) == 320
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    samples = PackedSamples(TokenFile(text), 16)
    inputs, targets = map(torch.from_numpy, samples.batch(np.arange(len(samples))))
    with torch.no_grad():
        logits = model(input_ids=inputs).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()


def held_out(cell: Path, data_root: Path) -> Path:
    from hpcml.train.config import TrainingJob
    from hpcml.train.training_data import open_training_data

    job = TrainingJob.load(cell, cells.environment(cell, data_root))
    return open_training_data(job).folder / "eval.arrow"


@pytest.mark.parametrize("method", ["full", "freeze", "top", "lora", "adapter"])
def test_an_exported_model_has_the_loss_that_training_reported(
    tune: Callable[[str], Path], data_root: Path, tmp_path: Path, method: str
) -> None:
    cell = tune(method)
    folder = export(cell, tmp_path / "model", which="latest")
    reported = cells.metrics(cell)[12]["eval_loss"]
    assert model_loss(folder, held_out(cell, data_root)) == pytest.approx(reported, abs=1e-5)


@pytest.mark.parametrize(
    ("method", "frozen"),
    [
        ("freeze", ["embed_tokens", "layers.0."]),
        ("top", ["layers.0."]),
    ],
)
def test_frozen_weights_are_untouched_to_the_last_bit(
    tune: Callable[[str], Path], base_model: Path, tmp_path: Path, method: str, frozen: list[str]
) -> None:
    before = weights(base_model)
    after = weights(export(tune(method), tmp_path / "model"))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        stays = any(part in name for part in frozen)
        assert weight.equal(after[name]) == stays, name


@pytest.mark.parametrize("method", ["lora", "adapter", "prompt_tuning"])
def test_added_weights_leave_the_model_untouched(
    tune: Callable[[str], Path], base_model: Path, data_root: Path, method: str
) -> None:
    import torch

    from hpcml.train import finetune, trainer
    from hpcml.train.config import TrainingJob
    from hpcml.train.training_data import open_training_data

    cell = tune(method)
    job = TrainingJob.load(cell, cells.environment(cell, data_root))
    model = trainer.build_model(job, open_training_data(job))
    finetune.load_weights(model, job.config, cell / "checkpoints" / "step-12" / "model")
    before = weights(base_model)
    found = 0
    for name, weight in model.named_parameters():
        # Wrappers put their own words before and into the names.
        plain = name.replace(".base_layer.", ".").replace(".mlp.base.", ".mlp.")
        for original in (original for original in before if plain.endswith(original)):
            assert torch.equal(weight, before[original]), name
            found += 1
    assert found == len(before)
    assert (
        sum(
            file.stat().st_size
            for file in (cell / "checkpoints/step-12/model").glob("*.safetensors")
        )
        < 30_000
    )


def test_lora_merged_and_beside_the_model_compute_the_same(
    tune: Callable[[str], Path], base_model: Path, tmp_path: Path
) -> None:
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    cell = tune("lora")
    merged = AutoModelForCausalLM.from_pretrained(export(cell, tmp_path / "merged")).eval()
    beside = export(cell, tmp_path / "beside", merge=False)
    assert json.loads((beside / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(base_model)
    ids = torch.arange(16)[None]
    plain = AutoModelForCausalLM.from_pretrained(base_model).eval()(input_ids=ids).logits
    with_peft = AutoPeftModelForCausalLM.from_pretrained(beside).eval()(input_ids=ids).logits
    alone = merged(input_ids=ids).logits
    assert torch.allclose(alone, with_peft, atol=1e-5)
    assert not torch.allclose(alone, plain, atol=1e-3)


def test_a_prompt_is_exported_beside_the_model_only(
    tune: Callable[[str], Path], tmp_path: Path
) -> None:
    from peft import AutoPeftModelForCausalLM

    cell = tune("prompt_tuning")
    with pytest.raises(ExportError, match="without merging"):
        export(cell, tmp_path / "merged")
    model = AutoPeftModelForCausalLM.from_pretrained(export(cell, tmp_path / "p", merge=False))
    assert model.active_peft_config.num_virtual_tokens == 4


def test_what_can_not_be_exported_is_told(tune: Callable[[str], Path], tmp_path: Path) -> None:
    cell = tune("adapter")
    with pytest.raises(ExportError, match="only be exported merged"):
        export(cell, tmp_path / "a", merge=False)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ExportError, match="is not empty"):
        export(cell, tmp_path / "full")
    with pytest.raises(CheckpointError, match="no checkpoint 7"):
        export(cell, tmp_path / "b", which=7)
    (cell / "checkpoints" / "step-12" / "training.pt").write_text("torn")
    with pytest.raises(CheckpointError, match="is damaged"):
        export(cell, tmp_path / "c", which="latest")
    with pytest.raises(ExportError, match="is no cell"):
        export(tmp_path, tmp_path / "d")
    assert not (tmp_path / "c").exists()
    assert not list(tmp_path.glob(".writing-*"))


def test_a_whole_model_is_exported_without_heavy_imports(
    make_cell: MakeCell, data_root: Path, tmp_path: Path
) -> None:
    import subprocess
    import sys

    cell = make_cell()
    assert cells.train(cell, data_root) == 0
    program = (
        "import sys\nfrom pathlib import Path\nfrom hpcml.train.export import export\n"
        "export(Path(sys.argv[1]), Path(sys.argv[2]), which=10)\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    arguments = [sys.executable, "-c", program, str(cell), str(tmp_path / "out")]
    subprocess.run(arguments, check=True, cwd=cells.ROOT)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["use_cache"] is True
    assert weights(tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"given": {"hidden_size": 64}}, "hidden_size can't be set"),
        ({"data": {"tokenizer": "/nowhere"}}, "no tokenizer folder at /nowhere"),
    ],
)
def test_what_contradicts_the_model_is_told(
    make_cell: MakeCell, data_root: Path, base_model: Path, change: dict[str, Any], says: str
) -> None:
    cell = make_cell(model=base_model, **change)
    with pytest.raises(Exception, match=says):
        cells.train(cell, data_root)


def test_a_tokenizer_of_another_vocabulary_is_told(
    make_cell: MakeCell, data_root: Path, base_model: Path, tmp_path: Path
) -> None:
    larger = make_cell("larger", parameters={"vocab_size": 330, "max_steps": 1})
    assert cells.train(larger, data_root) == 0
    tokenizer = export(larger, tmp_path / "larger-model")
    cell = make_cell(model=base_model, data={"tokenizer": str(tokenizer)})
    with pytest.raises(Exception, match="tokens, but the model only 320"):
        cells.train(cell, data_root)


def test_adding_weights_to_nothing_is_refused(make_cell: MakeCell, data_root: Path) -> None:
    cell = make_cell(parameters={"fine_tuning_method": "lora"})
    with pytest.raises(Exception, match=r"give the folder of one as train\.model"):
        cells.train(cell, data_root)
