"""A training that was interrupted equals one that was not, to the last bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcml.train.checkpoint import CheckpointError
from hpcml.train.config import TrainingError, TrainingJob
from tests.integration.train import cells

MakeCell = Callable[..., Path]

PLATEAU = {
    "lr_scheduler_type": "reduce_on_plateau",
    "lr_patience": 0,
    "lr_factor": 0.5,
    "lr_threshold": 0.05,
    "eval_steps": 2,
    "load_best_model_at_end": True,
}


@pytest.mark.parametrize(
    ("parameters", "options"),
    [
        pytest.param({"dropout": 0.2, "gradient_accumulation_steps": 2}, {}, id="dropout"),
        pytest.param({"optim": "sgd", "momentum": 0.9, "warmup_steps": 4}, {}, id="momentum"),
        pytest.param(
            {"group_by_length": True, "max_length": 128}, {"packing": False}, id="documents"
        ),
        pytest.param(PLATEAU, {}, id="plateau"),
        pytest.param({"bf16": True, "lr_scheduler_type": "cosine"}, {}, id="bf16"),
        pytest.param(
            {"early_stopping_patience": 2, "early_stopping_threshold": 0.2, "eval_steps": 2},
            {},
            id="early-stopping",
        ),
    ],
)
def test_continues_to_the_last_bit(
    make_cell: MakeCell, data_root: Path, parameters: dict[str, Any], options: dict[str, Any]
) -> None:
    whole = make_cell("whole", parameters=parameters, **options)
    assert cells.train(whole, data_root) == 0
    # Interrupted within a window of logging_steps, at a checkpoint, and before the last step.
    parts = make_cell("parts", parameters=parameters, **options)
    for steps in (3, 2, 1):
        assert cells.train(parts, data_root, stop_after=steps) == 75
    assert cells.train(parts, data_root) == 0
    assert cells.metrics(parts) == cells.metrics(whole)
    assert cells.weights(parts) == cells.weights(whole)


@pytest.mark.parametrize("method", ["lora", "adapter", "prompt_tuning", "freeze"])
def test_fine_tuning_continues_to_the_last_bit(
    make_cell: MakeCell, data_root: Path, base_model: Path, method: str
) -> None:
    parameters = {"fine_tuning_method": method, "lora_dropout": 0.1, "dropout": 0.1}
    if method == "freeze":
        parameters["num_frozen_layers"] = 1
    whole = make_cell("whole", parameters=parameters, model=base_model)
    assert cells.train(whole, data_root) == 0
    parts = make_cell("parts", parameters=parameters, model=base_model)
    assert cells.train(parts, data_root, stop_after=6) == 75
    assert cells.train(parts, data_root) == 0
    assert cells.metrics(parts) == cells.metrics(whole)
    assert cells.weights(parts) == cells.weights(whole)


def test_the_clock_says_when_to_save(
    make_cell: MakeCell, data_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    often = make_cell("often", parameters={"save_steps": None}, interval=1e-9, keep=20)
    assert cells.train(often, data_root) == 0
    assert [event["step"] for event in cells.events(often, "checkpoint")] == list(range(1, 13))
    rare = make_cell("rare", parameters={"save_steps": None}, interval=3600)
    assert cells.train(rare, data_root) == 0
    assert [event["step"] for event in cells.events(rare, "checkpoint")] == [12]
    assert "checkpoints every" not in capsys.readouterr().out


def test_the_log_says_how_the_interval_was_found(
    make_cell: MakeCell, data_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = make_cell("auto", parameters={"save_steps": None})
    environment = {"HPCML_NODE_MTBF": "7200", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    assert TrainingJob.load(cell, environment).mtbf == 3600
    assert cells.train(cell, data_root, more={"HPCML_NODE_MTBF": "3600"}) == 0
    assert "this job fails every 1 h" in capsys.readouterr().out


def test_a_lead_that_is_too_short_is_told(make_cell: MakeCell, data_root: Path) -> None:
    cell = make_cell()
    assert cells.train(cell, data_root, more={"HPCML_SIGNAL_LEAD": "0.0001"}) == 0
    (event,) = cells.events(cell, "short_lead")
    assert event["saving"] > event["lead"] == 0.0001


def test_a_finished_training_only_leaves_its_metrics_again(
    make_cell: MakeCell, data_root: Path
) -> None:
    cell = make_cell()
    assert cells.train(cell, data_root) == 0
    before, written = cells.metrics(cell), cells.weights(cell)
    (cell / "metrics.jsonl").unlink()
    assert cells.train(cell, data_root) == 0
    after = cells.metrics(cell)
    assert list(after) == [12]
    assert after[12]["unigram_entropy"] == before[12]["unigram_entropy"]
    assert cells.weights(cell) == written
    assert len(cells.events(cell, "checkpoint")) == 3


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(
    make_cell: MakeCell, data_root: Path
) -> None:
    whole = make_cell("whole")
    assert cells.train(whole, data_root) == 0
    cell = make_cell("cell")
    assert cells.train(cell, data_root, stop_after=11) == 75
    (cell / "checkpoints" / "step-11" / "training.pt").write_bytes(b"torn")
    assert cells.train(cell, data_root) == 0
    (damaged,) = cells.events(cell, "damaged")
    assert "damaged-step-11-1" in damaged["path"]
    assert "training.pt" in damaged["reason"]
    assert cells.metrics(cell) == cells.metrics(whole)
    assert cells.weights(cell) == cells.weights(whole)


def test_without_any_checkpoint_it_starts_anew(make_cell: MakeCell, data_root: Path) -> None:
    cell = make_cell()
    assert cells.train(cell, data_root) == 0
    before = cells.metrics(cell)
    shutil.rmtree(cell / "checkpoints")
    assert cells.train(cell, data_root) == 0
    assert cells.metrics(cell) == before


def test_the_loss_falls(make_cell: MakeCell, data_root: Path) -> None:
    cell = make_cell(parameters={"max_steps": 100, "eval_steps": 100})
    assert cells.train(cell, data_root) == 0
    final = cells.metrics(cell)[100]
    assert final["eval_loss"] < 0.7 * final["unigram_entropy"]
    assert final["total_steps"] == 100


def test_the_best_of_the_saved_checkpoints_is_named(make_cell: MakeCell, data_root: Path) -> None:
    # The loss falls and then explodes; the best evaluation, between two checkpoints, is not saved.
    parameters = {
        "lr_scheduler_type": "cyclic", "lr_step_size_up": 60, "learning_rate": 3.0, "max_steps": 60,
        "eval_steps": 1, "save_steps": 10,
    }  # fmt: skip
    cell = make_cell(parameters=parameters, keep=1)
    for _ in range(3):
        assert cells.train(cell, data_root, stop_after=19) == 75
    assert cells.train(cell, data_root) == 0
    values = {step: line["eval_loss"] for step, line in cells.metrics(cell).items()}
    saved = {event["step"] for event in cells.events(cell, "checkpoint")}
    best = min(saved, key=lambda step: values[step])
    assert best < 60
    assert (cell / "checkpoints" / "best").read_text() == f"step-{best}\n"
    # The result is of the last one, and so is what results and exports take.
    assert (cell / "checkpoints" / "final").read_text() == "step-60\n"
    assert sorted(path.name for path in (cell / "checkpoints").glob("step-*")) == sorted(
        {f"step-{best}", "step-60"}
    )


def test_a_held_out_part_without_a_sequence_is_told(make_cell: MakeCell, data_root: Path) -> None:
    cell = make_cell(parameters={"max_length": 5000}, data={"eval_fraction": 0.03})
    with pytest.raises(TrainingError, match=r"the held-out part has \d+ tokens"):
        cells.train(cell, data_root)


def test_weights_that_are_no_numbers_are_never_saved(make_cell: MakeCell, data_root: Path) -> None:
    # The first update breaks the weights, after a loss that was fine.
    cell = make_cell(
        parameters={"learning_rate": 1e20, "weight_decay": 1e30, "optim": "sgd", "save_steps": 1}
    )
    with pytest.raises(TrainingError, match=r"no longer finite after step|the loss became"):
        cells.train(cell, data_root)
    assert not list((cell / "checkpoints").glob("step-*"))


def test_the_result_and_the_final_checkpoint_are_of_the_same_step(
    make_cell: MakeCell, data_root: Path
) -> None:
    parameters = {"load_best_model_at_end": True, "learning_rate": 0.5, "eval_steps": 3}
    cell = make_cell(parameters=parameters)
    assert cells.train(cell, data_root) == 0
    final = cells.metrics(cell)[12]
    assert (cell / "checkpoints" / "final").read_text() == f"step-{final['best_step']}\n"


@pytest.mark.parametrize("changed", ["text", "base model"])
def test_a_checkpoint_of_other_data_or_another_model_is_refused(
    make_cell: MakeCell, data_root: Path, base_model: Path, tmp_path: Path, changed: str
) -> None:
    texts = tmp_path / "texts"
    pattern = cells.write_corpus(texts)
    model = shutil.copytree(base_model, tmp_path / "model")
    cell = make_cell(
        "cell",
        parameters={"fine_tuning_method": "freeze", "num_frozen_layers": 1},
        model=model,
        data={"files": [pattern]},
    )
    assert cells.train(cell, data_root, stop_after=3) == 75
    if changed == "text":
        (texts / "text000.txt").write_text("something else\n" * 50)
    else:
        weights = model / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-3] ^= 1
        weights.write_bytes(content)
    with pytest.raises(CheckpointError, match="is of another"):
        cells.train(cell, data_root)
