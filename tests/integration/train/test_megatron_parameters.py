"""The engine megatron does with each parameter what the engine torch does with it.

The same training with both: a parameter that megatron ignored would give other numbers, as the
tests of the engine torch show. Here with one process; with several in the other files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hpcml.recipe.hyperparameters import HYPERPARAMETERS
from hpcml.train.config import TrainingError
from tests.integration.train import cells

pytest.importorskip("megatron.core", reason="the engine megatron is not installed")

MakeCell = Callable[..., Path]

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sgd": (
        {
            "optim": "sgd", "momentum": 0.9, "learning_rate": 0.1, "weight_decay": 0.1,
            "max_grad_norm": 0.5, "lr_scheduler_type": "step", "lr_step_size": 3, "lr_gamma": 0.5,
            "warmup_steps": 2, "global_batch_size": 6, "max_steps": 9, "logging_steps": 2,
            "save_steps": 4, "eval_steps": 3,
        },
        {},
    ),
    "adam": (
        {
            "optim": "adam", "weight_decay": 0.3, "adam_beta1": 0.8, "adam_beta2": 0.9,
            "adam_epsilon": 1e-3, "lr_scheduler_type": "polynomial", "lr_end": 1e-3,
            "lr_power": 2.0, "warmup_ratio": 0.2, "max_grad_norm": 0,
            "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4,
        },
        {},
    ),
    "documents": (
        {
            "group_by_length": True, "max_length": 24, "add_eos_token": False, "max_steps": None,
            "num_train_epochs": 1.5, "eval_strategy": "epoch", "global_batch_size": 8,
            "lr_scheduler_type": "cosine_with_restarts", "lr_num_cycles": 2.0,
            "per_device_train_batch_size": 2,
        },
        {"packing": False},
    ),
    "model": (
        {
            "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 1, "intermediate_size": 72, "hidden_act": "gelu_new",
            "tie_word_embeddings": False, "vocab_size": 330, "init_method": "he_uniform",
            "init_gain": 0.7, "seed": 5, "gradient_checkpointing": True,
            "lr_scheduler_type": "exponential", "lr_gamma": 0.9,
        },
        {},
    ),
    "plateau": (
        {
            "lr_scheduler_type": "reduce_on_plateau", "lr_patience": 0, "lr_factor": 0.5,
            "lr_threshold": 0.05, "eval_steps": 1, "load_best_model_at_end": True,
            "early_stopping_patience": 3, "early_stopping_threshold": 0.2, "max_steps": 40,
            "learning_rate": 3e-2, "init_method": "normal", "init_std": 0.1,
        },
        {},
    ),
    "cyclic": (
        {
            "lr_scheduler_type": "cyclic", "lr_cyclic_mode": "triangular2", "lr_base": 1e-3,
            "lr_step_size_up": 2, "adam_beta1": 0.7,
        },
        {},
    ),
    "one_cycle": (
        {
            "lr_scheduler_type": "one_cycle", "lr_pct_start": 0.4, "lr_div_factor": 5.0,
            "lr_final_div_factor": 20.0, "bf16": True, "fine_tuning_method": "full",
        },
        {},
    ),
}  # fmt: skip
ALONE = ("dropout", "fp16", "context_parallel_size", "ddp_backend")
WITH_SEVERAL_PROCESSES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "sequence_parallel",
    "virtual_pipeline_stages",
    "data_parallel_size",
)


@pytest.mark.parametrize("name", CASES)
def test_the_same_as_with_torch(make_cell: MakeCell, data_root: Path, name: str) -> None:
    parameters, options = CASES[name]
    expected = make_cell("torch", parameters=parameters, **options)
    assert cells.train(expected, data_root) == 0
    found = make_cell("megatron", parameters=parameters, engine="megatron", **options)
    assert cells.train(found, data_root) == 0
    theirs, mine = cells.metrics(expected), cells.metrics(found)
    # In half precision the engines round elsewhere: torch keeps the weights as they are.
    close = {"rel": 3e-2 if parameters.get("bf16") else 1e-4}
    assert mine.keys() == theirs.keys()
    for step, values in theirs.items():
        assert mine[step] == pytest.approx(values, **close), step
    for pointer in ("latest", "best", "final"):
        there = [cell / "checkpoints" / pointer for cell in (expected, found)]
        assert there[0].read_text() == there[1].read_text()
    saved = [
        [each["step"] for each in cells.events(cell, "checkpoint")] for cell in (expected, found)
    ]
    assert saved[0] == saved[1]


def test_every_parameter_has_a_test() -> None:
    tested = {name for parameters, _ in CASES.values() for name in parameters}
    tested |= {*ALONE, *WITH_SEVERAL_PROCESSES}
    assert tested == {row.name for row in HYPERPARAMETERS if "megatron" in row.engines}
    others = Path(__file__).with_name("test_megatron_layouts.py").read_text()
    for name in WITH_SEVERAL_PROCESSES:
        assert name in others


def test_gradient_checkpointing_computes_layers_twice(make_cell: MakeCell, data_root: Path) -> None:
    from megatron.core.transformer.mlp import MLP

    passes, losses = {}, {}
    for used in (True, False):
        cell = make_cell(
            f"{used}",
            parameters={"gradient_checkpointing": used, "max_steps": 2, "dropout": 0.1},
            engine="megatron",
        )
        with mock.patch.object(MLP, "forward", autospec=True, side_effect=MLP.forward) as forward:
            assert cells.train(cell, data_root) == 0
        passes[used], losses[used] = forward.call_count, cells.metrics(cell)[2]["loss"]
    assert passes[True] == passes[False] + 2 * 2
    assert losses[True] == pytest.approx(losses[False], abs=1e-6)


def test_dropout(make_cell: MakeCell, data_root: Path) -> None:
    def losses(name: str, dropout: float) -> list[float]:
        cell = make_cell(
            name, parameters={"dropout": dropout, "logging_steps": 1}, engine="megatron"
        )
        assert cells.train(cell, data_root) == 0
        return [values["loss"] for values in cells.metrics(cell).values() if "loss" in values]

    without, little, much = losses("0", 0.0), losses("1", 0.1), losses("2", 0.6)
    assert without != little
    assert little == losses("again", 0.1)
    assert much[-1] > without[-1] + 0.1


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"fp16": True}, "fp16 needs a GPU"),
        ({"context_parallel_size": 2}, "context_parallel_size needs GPUs and Transformer Engine"),
        ({"tensor_parallel_size": 3}, "3 processes share each copy of the model, and 1 are no"),
        ({"data_parallel_size": 2}, "data_parallel_size is 2, but 1 processes run"),
    ],
)
def test_what_can_not_be_is_told(
    make_cell: MakeCell, data_root: Path, parameters: dict[str, Any], says: str
) -> None:
    cell = make_cell(parameters=parameters, engine="megatron")
    with pytest.raises(TrainingError, match=says):
        cells.train(cell, data_root)


def test_the_backend_is_the_one_that_is_asked_for(make_cell: MakeCell, data_root: Path) -> None:
    from hpcml.train.config import TrainingJob
    from hpcml.train.megatron import engine

    cell = make_cell(parameters={"ddp_backend": "gloo"}, engine="megatron")
    job = TrainingJob.load(cell, cells.environment(cell, data_root))
    with (
        mock.patch.dict("os.environ", WORLD_SIZE="2"),
        mock.patch("torch.distributed.init_process_group", side_effect=InterruptedError) as init,
        pytest.raises(InterruptedError),
    ):
        engine.run(job, cells.StopAfter())
    assert init.call_args.args == ("gloo",)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """megatron-core on the CPU leaves torch as it was."""
    import torch

    before = torch.zeros, torch.Tensor.cuda, torch.cuda.current_device
    yield
    assert before == (torch.zeros, torch.Tensor.cuda, torch.cuda.current_device)
