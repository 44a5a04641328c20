"""Models that megatron takes up and leaves: of Hugging Face, and checkpoints of either engine."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcml.train.config import TrainingError
from tests.integration.train import cells

pytest.importorskip("megatron.core", reason="the engine megatron is not installed")

MakeCell = Callable[..., Path]


def curve(cell: Path) -> dict[int, dict[str, float]]:
    assert cells.metrics(cell)
    return cells.metrics(cell)


def assert_same_curve(one: Path, other: Path) -> None:
    expected, found = curve(one), curve(other)
    assert found.keys() == expected.keys()
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, rel=1e-4)


def test_a_model_of_hugging_face_is_tuned_as_with_torch(
    make_cell: MakeCell, data_root: Path, base_model: Path
) -> None:
    tuned = [make_cell(engine, model=base_model, engine=engine) for engine in ("torch", "megatron")]
    for cell in tuned:
        assert cells.train(cell, data_root) == 0
    assert_same_curve(*tuned)


@pytest.fixture
def trained(make_cell: MakeCell, data_root: Path) -> Path:
    cell = make_cell("trained", parameters={"tie_word_embeddings": False}, engine="megatron")
    assert cells.train(cell, data_root) == 0
    return cell


def test_a_later_stage_goes_on_from_a_checkpoint_of_megatron(
    make_cell: MakeCell, data_root: Path, trained: Path, tmp_path: Path
) -> None:
    from hpcml.train.export import export

    # As an expression such as stages.first.best.checkpoint gives it, and as a folder.
    checkpoint = trained / "checkpoints" / "step-12"
    folder = export(trained, tmp_path / "model")
    tuned = [
        make_cell(f"{engine}-{number}", model=model, engine=engine)
        for engine in ("torch", "megatron")
        for number, model in enumerate((checkpoint, folder))
    ]
    for cell in tuned:
        # In a process of its own, as each training has it.
        assert cells.start(cell, data_root).wait() == 0
        assert_same_curve(tuned[0], cell)
    # The first evaluation there is better than one of a new model.
    assert curve(tuned[0])[5]["eval_loss"] < curve(trained)[5]["eval_loss"]


def test_another_model_is_noticed(make_cell: MakeCell, data_root: Path, trained: Path) -> None:
    from hpcml.train.checkpoint import CheckpointError

    checkpoint = trained / "checkpoints" / "step-12"
    cell = make_cell("tuned", model=checkpoint, engine="megatron")
    assert cells.train(cell, data_root, stop_after=3) == 75
    (shard,) = (checkpoint / "megatron").glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match="is of another base model"):
        cells.train(cell, data_root)


LOSS = """
import sys
import numpy as np
import torch
from pathlib import Path
from transformers import AutoModelForCausalLM
from hpcml.data.dataset import PackedSamples, TokenFile

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
samples = PackedSamples(TokenFile(Path(sys.argv[2])), 16)
inputs, labels = map(torch.from_numpy, samples.batch(np.arange(len(samples))))
with torch.no_grad():
    logits = model(input_ids=inputs).logits
print(float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())))
"""


def test_the_exported_model_is_the_one_that_was_evaluated(
    data_root: Path, trained: Path, tmp_path: Path
) -> None:
    from hpcml.train.config import TrainingJob
    from hpcml.train.export import export
    from hpcml.train.training_data import open_training_data

    folder = export(trained, tmp_path / "model")
    job = TrainingJob.load(trained, cells.environment(trained, data_root))
    held_out = open_training_data(job).folder / "eval.arrow"
    found = subprocess.run(
        [sys.executable, "-c", LOSS, str(folder), str(held_out)],
        env={**os.environ, "PYTHONPATH": str(cells.ROOT)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert float(found.stdout) == pytest.approx(curve(trained)[12]["eval_loss"], rel=1e-6)


def test_half_precision_is_exported_as_it_was_trained(
    make_cell: MakeCell, data_root: Path, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from hpcml.train.export import export

    cell = make_cell(parameters={"bf16": True, "max_steps": 2}, engine="megatron")
    assert cells.train(cell, data_root) == 0
    model = AutoModelForCausalLM.from_pretrained(export(cell, tmp_path / "model"), dtype="auto")
    assert model.dtype == torch.bfloat16


def test_a_vocabulary_that_is_too_small_is_refused(
    make_cell: MakeCell, data_root: Path, base_model: Path
) -> None:
    import json
    import shutil

    small = shutil.copytree(base_model, base_model.with_name("small"))
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    cell = make_cell(model=small, engine="megatron")
    with pytest.raises(TrainingError, match="they don't belong together"):
        cells.train(cell, data_root)


def test_nothing_is_left_of_a_training(make_cell: MakeCell, data_root: Path) -> None:
    """The model and its groups: the threads of each group never sleep for long."""
    found = []
    for name in ("first", "second"):
        assert cells.train(make_cell(name, engine="megatron"), data_root) == 0
        gc.collect()
        found.append(len(list(Path("/proc/self/task").iterdir())))
    assert found[1] < found[0] + 10
