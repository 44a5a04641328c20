"""A training with megatron that was interrupted, killed, or went on in another layout."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcml.train.checkpoint import CheckpointError
from tests.integration.train import cells

pytest.importorskip("megatron.core", reason="the engine megatron is not installed")

MakeCell = Callable[..., Path]

TP, PP, SP, VPP = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "sequence_parallel",
    "virtual_pipeline_stages",
)
# No size of a parameter is a multiple of 128, so that there are gaps in what is gathered.
MODEL = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "hidden_size": 40,
    "intermediate_size": 44,
    "vocab_size": 321,
    "global_batch_size": 8,
    "logging_steps": 3,
    "max_steps": 30,
    "eval_steps": 10,
    "save_steps": 10,
    "weight_decay": 0.1,
}


@pytest.mark.parametrize(
    ("parameters", "options"),
    [
        pytest.param({"dropout": 0.2, "gradient_accumulation_steps": 2}, {}, id="dropout"),
        pytest.param({"optim": "sgd", "momentum": 0.9, "warmup_steps": 4}, {}, id="momentum"),
        pytest.param({"optim": "sgd", "bf16": True}, {}, id="sgd-bf16"),
        pytest.param({"optim": "adam", "weight_decay": 0.3}, {}, id="adam"),
        pytest.param(
            {"group_by_length": True, "max_length": 24}, {"packing": False}, id="documents"
        ),
        pytest.param({"bf16": True, "lr_scheduler_type": "cosine"}, {}, id="bf16"),
    ],
)
def test_continues_to_the_last_bit(
    make_cell: MakeCell, data_root: Path, parameters: dict[str, Any], options: dict[str, Any]
) -> None:
    whole = make_cell("whole", parameters=parameters, engine="megatron", **options)
    assert cells.train(whole, data_root) == 0
    # Interrupted within a window of logging_steps, at a checkpoint, and before the last step.
    parts = make_cell("parts", parameters=parameters, engine="megatron", **options)
    for steps in (3, 2, 1):
        assert cells.train(parts, data_root, stop_after=steps) == 75
    assert cells.train(parts, data_root) == 0
    assert cells.metrics(parts) == cells.metrics(whole)
    assert weights_of(parts) == weights_of(whole)


def weights_of(cell: Path) -> list[tuple[str, Any]]:
    from transformers import LlamaConfig

    from hpcml.train.megatron.weights import of_checkpoint

    folder = cell / "checkpoints" / "step-12" / "model"
    shape = LlamaConfig.from_pretrained(folder)
    return [(name, tensor.tolist()) for name, tensor in of_checkpoint(folder, shape)]


@pytest.fixture(scope="module")
def several(
    tmp_path_factory: pytest.TempPathFactory, corpus: str, data_root: Path
) -> dict[str, Path]:
    """Trainings by four processes that start once: whole, in parts, and in other layouts."""
    folder = tmp_path_factory.mktemp("several")

    def make(name: str, **parameters: Any) -> Path:
        chosen = {**MODEL, **parameters}
        return cells.write_cell(folder / name, corpus, chosen, engine="megatron")

    both = {TP: 2, PP: 2}
    made = {
        "whole": make("whole", **both, dropout=0.1),
        "parts": make("parts", **both, dropout=0.1),
        "moved": make("moved"),
        "virtual": make("virtual", tie_word_embeddings=False),
        "sgd": make("sgd", optim="sgd", momentum=0.9, learning_rate=0.1),
    }
    job = cells.Job
    jobs = [
        job(made["whole"], 4),
        job(made["parts"], 4, 7),
        job(made["parts"], 4, 6),
        job(made["parts"], 4),
        job(made["moved"], 4, 7, both),
        job(made["moved"], 4, 10),
        job(made["moved"], 4, None, {TP: 4, SP: True}),
        job(made["virtual"], 4, 7, {PP: 2, VPP: 2}),
        job(made["virtual"], 1, 10),
        job(made["virtual"], 4, None, {PP: 4}),
        job(made["sgd"], 4, 7, both),
        job(made["sgd"], 2, None, {PP: 2}),
    ]
    codes = cells.train_in_turn(folder / "ranks", data_root, jobs)
    assert codes == [[75 if job.stop_after else 0] * job.processes for job in jobs]
    for name in ("moved", "virtual", "sgd"):
        parameters = json.loads((made[name] / "cell.json").read_text())["payload"]["parameters"]
        torch = made[f"{name}-torch"] = cells.write_cell(
            folder / f"{name}-torch", corpus, parameters
        )
        assert cells.train(torch, data_root) == 0
    return made


def test_in_the_same_layout_to_the_last_bit(several: dict[str, Path]) -> None:
    assert cells.metrics(several["parts"]) == cells.metrics(several["whole"])
    assert cells.weights(several["parts"]) == cells.weights(several["whole"])


@pytest.mark.parametrize("name", ["moved", "virtual", "sgd"])
def test_in_another_layout_on_the_same_curve(several: dict[str, Path], name: str) -> None:
    expected, found = (cells.metrics(several[each]) for each in (f"{name}-torch", name))
    assert found.keys() == expected.keys()
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, rel=1e-4)


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(
    make_cell: MakeCell, data_root: Path
) -> None:
    whole = make_cell("whole", engine="megatron")
    assert cells.train(whole, data_root) == 0
    cell = make_cell("cell", engine="megatron")
    assert cells.train(cell, data_root, stop_after=11) == 75
    (shard,) = (cell / "checkpoints" / "step-11" / "megatron").glob("__0_*.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert cells.train(cell, data_root) == 0
    (damaged,) = cells.events(cell, "damaged")
    assert "damaged-step-11-1" in damaged["path"]
    assert "__0_0.distcp has another content" in damaged["reason"]
    assert cells.metrics(cell) == cells.metrics(whole)
    assert cells.weights(cell) == cells.weights(whole)


def test_a_finished_training_only_leaves_its_metrics_again(
    make_cell: MakeCell, data_root: Path
) -> None:
    cell = make_cell(engine="megatron", parameters={"load_best_model_at_end": True})
    assert cells.train(cell, data_root) == 0
    before, saved = cells.metrics(cell), len(cells.events(cell, "checkpoint"))
    (cell / "metrics.jsonl").unlink()
    assert cells.train(cell, data_root) == 0
    after = cells.metrics(cell)
    assert list(after) == [12]
    assert after[12]["eval_loss"] == before[12]["eval_loss"]
    assert len(cells.events(cell, "checkpoint")) == saved


def test_weights_that_are_no_numbers_are_never_saved(make_cell: MakeCell, data_root: Path) -> None:
    from hpcml.train.config import TrainingError

    cell = make_cell(
        engine="megatron",
        parameters={"learning_rate": 1e20, "weight_decay": 1e30, "optim": "sgd", "save_steps": 1},
    )
    with pytest.raises(TrainingError, match=r"no longer finite after step|the loss became"):
        cells.train(cell, data_root)
    assert not list((cell / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("changed", ["text", "engine"])
def test_a_checkpoint_of_something_else_is_refused(
    make_cell: MakeCell, data_root: Path, tmp_path: Path, changed: str
) -> None:
    texts = tmp_path / "texts"
    pattern = cells.write_corpus(texts)
    cell = make_cell(engine="megatron", data={"files": [pattern]})
    assert cells.train(cell, data_root, stop_after=3) == 75
    if changed == "text":
        (texts / "text000.txt").write_text("something else\n" * 50)
    else:
        content = json.loads((cell / "cell.json").read_text())
        content["payload"]["engine"] = "torch"
        (cell / "cell.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="is of another"):
        cells.train(cell, data_root)


# -- kills ----------------------------------------------------------------------------------------

LONG = {
    **MODEL, "max_steps": 400, "eval_steps": 200, "save_steps": 20, "dropout": 0.1, TP: 2,
}  # fmt: skip
SECONDS = 120.0


def wait_for(condition: Callable[[], bool], ranks: list[Any]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert all(rank.poll() is None for rank in ranks), "a rank ended before"
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.002)


def losses(cell: Path) -> int:
    path = cell / "metrics.jsonl"
    return path.read_bytes().count(b'"loss"') if path.exists() else 0


def processes_of(cell: Path) -> list[str]:
    """The processes that were started for a cell, or by those."""
    mark = f"HPCML_CELL_DIR={cell}".encode()
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            if mark in environment.read_bytes().split(b"\0"):
                found.append(environment.parent.name)
    return found


def test_kills_at_any_moment_cost_nothing_but_time(
    make_cell: MakeCell, data_root: Path, tmp_path: Path
) -> None:
    """Of one rank, of all, and while a checkpoint is being written; a signal comes in between."""
    whole, cell = (make_cell(name, parameters=LONG, engine="megatron") for name in ("a", "b"))
    chooser = random.Random(3)
    checkpoints = cell / "checkpoints"

    def start(folder: Path) -> list[Any]:
        port = cells.free_port()
        return [cells.start(folder, data_root, rank, 2, port) for rank in range(2)]

    for what in ("a rank", "while saving", "a signal", "all while saving"):
        ranks, before = start(cell), losses(cell)
        try:
            wait_for(lambda before=before: losses(cell) > before + 1, ranks)
            if "saving" in what:
                wait_for(lambda: any(checkpoints.glob(".writing-*/megatron/*")), ranks)
                time.sleep(chooser.uniform(0, 0.1))
            if what == "a signal":
                ranks[1].send_signal(signal.SIGUSR1)
                assert [rank.wait(SECONDS) for rank in ranks] == [75, 75]
            elif what != "all while saving":
                ranks[chooser.randrange(2)].kill()
                time.sleep(chooser.uniform(0, 0.2))
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        end = time.monotonic() + SECONDS
        while left := processes_of(cell):
            assert time.monotonic() < end, f"processes that write outlive the training: {left}"
            time.sleep(0.01)
    for folder in (whole, cell):
        assert [rank.wait(SECONDS) for rank in start(folder)] == [0, 0]
    assert not list(checkpoints.glob(".*"))
    assert cells.events(cell, "damaged") == []
    assert cells.metrics(cell) == cells.metrics(whole)
    assert cells.weights(cell) == cells.weights(whole)
    shutil.rmtree(tmp_path)
