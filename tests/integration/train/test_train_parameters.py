"""Each hyperparameter does what it says: a test that fails if its value were ignored.

What can be seen on an optimizer, a schedule, a model or a loss alone is tested there
(``tests/unit/train``); here, on whole trainings. A test checks that none is forgotten.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hpcml.train.config import TrainingConfig, TrainingError
from tests.integration.train import cells

MakeCell = Callable[..., Path]

ELSEWHERE = {
    "test_train_optimizer.py": (
        "optim", "momentum", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay",
        "layerwise_lr_decay", "learning_rate",
    ),
    "test_train_schedule.py": (
        "lr_scheduler_type", "warmup_steps", "warmup_ratio", "lr_step_size", "lr_gamma", "lr_end",
        "lr_power", "lr_num_cycles", "lr_cyclic_mode", "lr_base", "lr_step_size_up",
        "lr_pct_start", "lr_div_factor", "lr_final_div_factor", "lr_patience", "lr_factor",
        "lr_threshold",
    ),
    "test_train_loss.py": (
        "loss_function", "focal_gamma", "z_loss_weight", "label_smoothing_factor",
    ),
    "test_train_model.py": (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "intermediate_size", "hidden_act", "tie_word_embeddings", "init_method", "init_std",
        "init_gain", "dropout", "seed",
    ),
    "test_train_finetune.py": (
        "fine_tuning_method", "num_frozen_layers", "frozen_layers", "num_top_layers", "r",
        "lora_alpha", "target_modules", "lora_dropout", "bias", "task_type", "adapter_size",
        "num_virtual_tokens",
    ),
    "test_train_sharded.py": ("fsdp", "zero_stage", "offload"),
    "test_train_config.py": (
        "per_device_train_batch_size", "gradient_accumulation_steps", "data_parallel_size",
    ),
    "test_megatron_parameters.py": (
        "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size",
        "sequence_parallel", "virtual_pipeline_stages",
    ),
}  # fmt: skip


@pytest.fixture
def run(make_cell: MakeCell, data_root: Path) -> Callable[..., Path]:
    """Train a cell with some parameters; returns its folder."""
    return runner(make_cell, data_root)


def runner(make_cell: MakeCell, data_root: Path, **fixed: Any) -> Callable[..., Path]:
    """Train cells one after the other; ``fixed`` is the same for all."""
    numbers = itertools.count()

    def train(options: dict[str, Any] | None = None, **parameters: Any) -> Path:
        cell = make_cell(f"cell{next(numbers)}", parameters=parameters, **fixed, **(options or {}))
        assert cells.train(cell, data_root) == 0
        return cell

    return train


Run = Callable[..., Path]
TESTS: dict[str, Callable[[Run], None]] = {}


def shows(*names: str) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    def register(test: Callable[[Run], None]) -> Callable[[Run], None]:
        TESTS.update(dict.fromkeys(names, test))
        return test

    return register


def steps_with(cell: Path, metric: str) -> list[int]:
    return [step for step, values in cells.metrics(cell).items() if metric in values]


def saved(cell: Path) -> list[int]:
    return [event["step"] for event in cells.events(cell, "checkpoint")]


def losses(cell: Path) -> list[float]:
    return [values["loss"] for values in cells.metrics(cell).values() if "loss" in values]


@shows("max_steps")
def max_steps(run: Run) -> None:
    assert max(cells.metrics(run(max_steps=7))) == 7


@shows("num_train_epochs", "global_batch_size")
def epochs_and_batch(run: Run) -> None:
    def length(**parameters: Any) -> dict[str, float]:
        cell = run(max_steps=None, logging_steps=1000, eval_steps=1000, **parameters)
        return list(cells.metrics(cell).values())[-1]

    half = length(num_train_epochs=0.5, global_batch_size=32)
    whole = length(num_train_epochs=1.0, global_batch_size=64)
    assert half["epoch"] == pytest.approx(0.5, rel=0.1)
    assert whole["epoch"] == pytest.approx(1.0, rel=0.1)
    assert half["total_steps"] == pytest.approx(whole["total_steps"], abs=1)


@shows("logging_steps")
def logging_steps(run: Run) -> None:
    assert steps_with(run(logging_steps=5), "loss") == [5, 10, 12]


@shows("save_steps")
def save_steps(run: Run) -> None:
    assert saved(run(save_steps=8)) == [8, 12]


@shows("eval_steps")
def eval_steps(run: Run) -> None:
    assert steps_with(run(eval_steps=3), "eval_loss") == [3, 6, 9, 12]


@shows("eval_strategy")
def eval_strategy(run: Run) -> None:
    assert steps_with(run(eval_strategy="no"), "eval_loss") == [12]
    cell = run(eval_strategy="epoch", global_batch_size=100, max_steps=11)
    assert 3 <= len(steps_with(cell, "eval_loss")) < 11
    assert set(steps_with(cell, "eval_loss")) == ends_of_epochs(cell, 11) | {11}


def ends_of_epochs(cell: Path, steps: int) -> set[int]:
    per_step = cells.metrics(cell)[steps]["epoch"] / steps
    return {
        step for step in range(1, steps + 1) if step * per_step // 1 > (step - 1) * per_step // 1
    }


@shows("early_stopping_patience")
def early_stopping_patience(run: Run) -> None:
    # At this rate nothing changes, so the second evaluation shows no gain worth the name.
    cell = run(
        learning_rate=1e-12, eval_steps=2, early_stopping_patience=2, early_stopping_threshold=0.1
    )
    assert max(cells.metrics(cell)) == 6


@shows("early_stopping_threshold")
def early_stopping_threshold(run: Run) -> None:
    eager = run(eval_steps=2, early_stopping_patience=1, early_stopping_threshold=10.0)
    assert max(cells.metrics(eager)) == 4
    patient = run(eval_steps=2, early_stopping_patience=1, early_stopping_threshold=0.0)
    assert max(cells.metrics(patient)) == 12


@shows("load_best_model_at_end")
def load_best_model_at_end(run: Run) -> None:
    # A rate that grows far too high: the best model is an early one.
    rising = {
        "lr_scheduler_type": "cyclic", "lr_step_size_up": 30, "learning_rate": 2.0, "max_steps": 30,
        "eval_steps": 1, "save_steps": 30, "logging_steps": 30,
    }  # fmt: skip
    cell = run(load_best_model_at_end=True, **rising)
    evaluated = [json.loads(line) for line in (cell / "metrics.jsonl").read_text().splitlines()]
    best = min(line["eval_loss"] for line in evaluated if "eval_loss" in line)
    assert evaluated[-1]["eval_loss"] == best < evaluated[-2]["eval_loss"]
    assert (cell / "checkpoints" / "best").read_text().strip() == (
        f"step-{evaluated[-1]['best_step']}"
    )
    last = cells.metrics(run(load_best_model_at_end=False, **rising))[30]
    assert last["eval_loss"] > best


@shows("max_grad_norm")
def max_grad_norm(run: Run) -> None:
    assert losses(run(optim="sgd", max_grad_norm=1e-6)) != losses(run(optim="sgd", max_grad_norm=0))
    frozen = run(optim="sgd", max_grad_norm=1e-12, learning_rate=1e-2)
    unclipped = run(optim="sgd", max_grad_norm=0, learning_rate=1e-2)
    assert losses(frozen)[0] == pytest.approx(losses(frozen)[-1], abs=0.05)
    assert losses(unclipped)[-1] < losses(unclipped)[0]


@shows("grad_norm_type")
def grad_norm_type(run: Run) -> None:
    first = {"max_steps": 1, "logging_steps": 1}
    two = cells.metrics(run(grad_norm_type=2.0, **first))[1]["grad_norm"]
    largest = cells.metrics(run(grad_norm_type=float("inf"), **first))[1]["grad_norm"]
    assert largest < two / 2


@shows("clip_grad_value")
def clip_grad_value(run: Run) -> None:
    cell = run(clip_grad_value=1e-5, grad_norm_type=float("inf"), max_steps=1, logging_steps=1)
    assert cells.metrics(cell)[1]["grad_norm"] == pytest.approx(1e-5)


@shows("bf16")
def bf16(run: Run) -> None:
    halves, singles = losses(run(bf16=True)), losses(run(bf16=False))
    assert halves != singles
    assert halves == pytest.approx(singles, abs=0.05)


@shows("fp16")
def fp16(run: Run) -> None:
    import torch

    if torch.cuda.is_available():
        assert losses(run(fp16=True)) != losses(run(fp16=False))
    else:
        with pytest.raises(TrainingError, match="fp16 needs a GPU"):
            run(fp16=True)


@shows("gradient_checkpointing")
def gradient_checkpointing(run: Run) -> None:
    from unittest import mock

    from transformers.models.llama.modeling_llama import LlamaMLP

    passes, found = {}, {}
    for used in (True, False):
        with mock.patch.object(
            LlamaMLP, "forward", autospec=True, side_effect=LlamaMLP.forward
        ) as mlp:
            cell = run(gradient_checkpointing=used, dropout=0.1, max_steps=2, logging_steps=1)
        passes[used], found[used] = mlp.call_count, losses(cell)
    # Two layers, twice in two steps, are computed a second time in the backward pass.
    assert passes[True] == passes[False] + 2 * 2
    assert found[True] == pytest.approx(found[False], abs=1e-6)


@shows("vocab_size")
def vocab_size(run: Run) -> None:
    from transformers import AutoTokenizer

    cell = run(vocab_size=300, max_steps=1)
    folder = cell / "checkpoints" / "step-1" / "model"
    assert len(AutoTokenizer.from_pretrained(folder)) == 300
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 300


@shows("max_length")
def max_length(run: Run) -> None:
    short = cells.metrics(run(max_length=16, max_steps=4))[4]["epoch"]
    long = cells.metrics(run(max_length=32, max_steps=4))[4]["epoch"]
    assert long == pytest.approx(2 * short, rel=0.01)


@shows("add_eos_token")
def add_eos_token(run: Run) -> None:
    def entropy(value: bool) -> float:
        return cells.metrics(run(add_eos_token=value, max_steps=1))[1]["unigram_entropy"]

    assert entropy(True) > entropy(False)


@shows("group_by_length")
def group_by_length(run: Run) -> None:
    # Documents of other lengths come together in a batch.
    grouped = run({"packing": False}, max_length=256, max_steps=4, group_by_length=True)
    mixed = run({"packing": False}, max_length=256, max_steps=4)
    assert losses(grouped) != losses(mixed)
    with pytest.raises(TrainingError, match="packing false"):
        run(group_by_length=True, max_steps=3)


@shows("ddp_backend")
def ddp_backend(run: Run) -> None:
    import os
    from unittest import mock

    from hpcml.train.group import Group

    # Asking for a backend is what join does with it; two processes are tested elsewhere.
    with (
        mock.patch.dict(os.environ, WORLD_SIZE="2"),
        mock.patch("torch.distributed.init_process_group") as init,
        mock.patch("torch.distributed.get_rank", return_value=0),
        mock.patch("torch.distributed.get_world_size", return_value=2),
        mock.patch("torch.distributed.new_group"),
    ):
        Group.join(TrainingConfig(ddp_backend="nccl"))
        Group.join(TrainingConfig(ddp_backend="gloo"))
    assert [call.args[0] for call in init.call_args_list] == ["nccl", "gloo"]


@pytest.mark.parametrize(
    "name", ["bf16", "early_stopping_patience", "fp16", "gradient_checkpointing", "max_grad_norm"]
)
def test_parameter_with_deepspeed(make_cell: MakeCell, data_root: Path, name: str) -> None:
    """What DeepSpeed does in its own way; the rest is in test_train_sharded.py."""
    pytest.importorskip("deepspeed", reason="the engine deepspeed is not installed")
    TESTS[name](runner(make_cell, data_root, engine="deepspeed"))


@pytest.mark.parametrize("name", sorted(set(TESTS)))
def test_parameter(run: Run, name: str) -> None:
    TESTS[name](run)


def test_every_parameter_has_a_test() -> None:
    tested = [*TESTS, *(name for names in ELSEWHERE.values() for name in names)]
    assert len(tested) == len(set(tested))
    assert set(tested) == {field.name for field in fields(TrainingConfig)}
    here, unit = Path(__file__).parent, Path(__file__).parents[2] / "unit" / "train"
    for file, names in ELSEWHERE.items():
        text = (here / file if (here / file).is_file() else unit / file).read_text()
        for name in names:
            assert name in text, f"{file} does not test {name}"
