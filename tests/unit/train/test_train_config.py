from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcml.train.config import TrainingConfig, TrainingError, TrainingJob


def test_null_stands_for_the_default() -> None:
    config = TrainingConfig.from_parameters({"learning_rate": None, "seed": 3})
    assert config == TrainingConfig(seed=3)


def test_a_parameter_that_would_be_ignored_is_refused() -> None:
    with pytest.raises(TrainingError, match="no engine has a parameter device_map, top_k"):
        TrainingConfig.from_parameters({"top_k": 2, "device_map": "auto"})


@pytest.mark.parametrize(
    ("parameters", "world_size", "layout"),
    [
        ({"global_batch_size": 24}, 1, (24, 1)),
        ({"global_batch_size": 24}, 3, (8, 1)),
        ({"global_batch_size": 24, "per_device_train_batch_size": 4}, 3, (4, 2)),
        ({"global_batch_size": 24, "gradient_accumulation_steps": 6}, 2, (2, 6)),
        (
            {
                "global_batch_size": 24,
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 3,
                "data_parallel_size": 2,
            },
            2,
            (4, 3),
        ),
    ],
)
def test_the_batch_is_divided(
    parameters: dict[str, Any], world_size: int, layout: tuple[int, int]
) -> None:
    assert TrainingConfig(**parameters).layout(world_size) == layout


@pytest.mark.parametrize(
    ("parameters", "world_size"),
    [
        ({"global_batch_size": 25}, 2),
        ({"global_batch_size": 8, "per_device_train_batch_size": 3}, 1),
        ({"global_batch_size": 8, "gradient_accumulation_steps": 16}, 1),
        ({"global_batch_size": 8, "data_parallel_size": 4}, 2),
    ],
)
def test_contradicting_batches_are_refused(parameters: dict[str, Any], world_size: int) -> None:
    with pytest.raises(TrainingError, match=r"is not|processes run"):
        TrainingConfig(**parameters).layout(world_size)


def cell() -> dict[str, Any]:
    return {
        "id": "abc",
        "index": 3,
        "params": {"seed": 5},
        "payload": {
            "engine": "torch",
            "model": None,
            "data": {
                "source": None,
                "files": ["a.txt"],
                "tokenizer": "folder",
                "eval_fraction": 0.1,
                "packing": False,
            },
            "checkpoint": {"keep": 4},
            "objective": {"metric": "eval_loss", "mode": "max"},
            "parameters": {"seed": 5, "max_steps": 7},
        },
    }


def test_a_cell_is_read(tmp_path: Path) -> None:
    (tmp_path / "cell.json").write_text(json.dumps(cell()))
    job = TrainingJob.load(tmp_path, {"HPCML_DATA_ROOT": "/data", "HPCML_METRICS": "/m"})
    assert job == TrainingJob(
        cell_dir=tmp_path,
        config=TrainingConfig(seed=5, max_steps=7),
        data_root=Path("/data"),
        cell_id="abc",
        given=frozenset({"seed"}),
        files=("a.txt",),
        tokenizer=Path("folder"),
        eval_fraction=0.1,
        packing=False,
        keep=4,
        mode="max",
        metrics=Path("/m"),
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "is missing"),
        ("{", "is no cell of a training"),
        ("{}", "KeyError"),
    ],
)
def test_an_unreadable_cell_is_told(tmp_path: Path, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / "cell.json").write_text(text)
    with pytest.raises(TrainingError, match=says):
        TrainingJob.load(tmp_path, {})
