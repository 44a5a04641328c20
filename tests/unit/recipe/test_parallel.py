"""How processes share a training: ``parallel``, what the engine megatron accepts, and ids."""

from __future__ import annotations

import pytest

from hpcml.recipe.hyperparameters import HYPERPARAMETERS

from .writing import COMMAND, Recipes

MEGATRON = (
    "name: t\nkind: train\nresources: {processes: 8}\n"
    "train: {engine: megatron, data: {source: python-stdlib}}\n"
)


def ids(recipes: Recipes, text: str, *overrides: str) -> list[str]:
    return [cell.id for cell in recipes.cells(text, *overrides)]


def test_parallel_is_another_place_for_the_same_parameters(recipes: Recipes) -> None:
    (cell,) = recipes.cells(
        MEGATRON + "parallel: {tp: 2, pp: 2, sequence_parallel: true, vpp: 2, dp: 2}\n"
    )
    assert cell.params == {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "sequence_parallel": True,
        "virtual_pipeline_stages": 2,
        "data_parallel_size": 2,
    }
    assert cell.payload["engine"] == "megatron"
    parameters = cell.payload["parameters"]
    assert parameters["tensor_parallel_size"] == 2
    assert parameters["gradient_accumulation_steps"] == 2
    assert parameters["per_device_train_batch_size"] == 2
    (other,) = recipes.cells(MEGATRON, "params.tp=2", "params.sp=true")
    assert other.params == {"tensor_parallel_size": 2, "sequence_parallel": True}


def test_a_parameter_has_one_place(recipes: Recipes) -> None:
    error = recipes.error(MEGATRON + "parallel: {tp: 2}\nparams: {tensor_parallel_size: 2}\n")
    assert "recipe.yaml:5" in error
    assert "params.tensor_parallel_size" in error
    assert "recipe.yaml:6" in error
    assert "give one of them" in error
    error = recipes.error(MEGATRON + "parallel: {tp: 2}\nsweep: {grid: {tp: [1, 2]}}\n")
    assert "parallel.tp: it is also swept, as sweep.grid.tp (recipe.yaml:6)" in error


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (MEGATRON + "parallel: {lr: 1}\n", "learning_rate does not say what processes share"),
        (MEGATRON + "parallel: {tpp: 1}\n", "no such hyperparameter"),
        (MEGATRON + "parallel: {tp: 0}\n", "must be a whole number ≥ 1"),
        (COMMAND + "parallel: {tp: 2}\n", "the kind is command"),
        (MEGATRON + "params: {optim: rmsprop}\n", "one of sgd, adam, adamw with the engine"),
        (MEGATRON + "params: {fine_tuning_method: lora}\n", "one of full with the engine megatron"),
        (MEGATRON + "params: {grad_norm_type: 1}\n", "megatron would ignore it"),
        (MEGATRON + "params: {label_smoothing_factor: 0.1}\n", "megatron would ignore it"),
        (MEGATRON + "params: {r: 4}\n", "megatron would ignore it"),
        (MEGATRON + "params: {zero_stage: 1}\n", "megatron would ignore it"),
    ],
)
def test_what_is_refused(recipes: Recipes, text: str, part: str) -> None:
    assert part in recipes.error(text)


@pytest.mark.parametrize(
    ("parallel", "name", "nearest"),
    [
        ("{tp: 3}", "parallel.tp: 3 processes share each copy", "tensor_parallel_size 4"),
        ("{tp: 8}", "parallel.tp: 8 processes can't share", "tensor_parallel_size 4"),
        ("{pp: 8}", "parallel.pp: 8 stages can't share 4 layers", "pipeline_parallel_size 4"),
        ("{pp: 2, vpp: 3}", "parallel.vpp: 2 stages of 3 parts", "virtual_pipeline_stages 2"),
        ("{dp: 4}", "it is 4, but resources gives 8 processes", ""),
        ("{cp: 2, tp: 8}", "parallel.tp: 16 processes share", "context_parallel_size 2"),
    ],
)
def test_layouts_that_do_not_fit_are_refused_with_the_nearest_that_does(
    recipes: Recipes, parallel: str, name: str, nearest: str
) -> None:
    error = recipes.error(MEGATRON + f"parallel: {parallel}\n")
    assert name in error
    assert nearest in error


def test_a_batch_that_can_not_be_divided_is_refused(recipes: Recipes) -> None:
    error = recipes.error(MEGATRON + "params: {batch_size: 6}\n")
    assert "6 is not a multiple of 8" in error
    assert "the nearest layout that works" in error


def test_the_layout_does_not_make_another_cell(recipes: Recipes) -> None:
    first = ids(recipes, MEGATRON)
    for same in (
        ("params.tp=4",),
        ("parallel.pp=2", "parallel.vpp=2"),
        ("params.tp=2", "params.sequence_parallel=true", "resources.nodes=2"),
        ("params.ddp_backend=gloo",),
        ("resources.processes=1",),
    ):
        assert ids(recipes, MEGATRON, *same) == first
    assert ids(recipes, MEGATRON, "params.micro_batch_size=1") != first
    assert len(set(ids(recipes, MEGATRON, "sweep.grid.tp=[1, 2]"))) == 2


def test_the_layout_goes_with_a_submission(recipes: Recipes) -> None:
    (cell,) = recipes.cells(MEGATRON, "params.tp=2")
    assert cell.layout == {
        "data_parallel_size": None,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": None,
        "context_parallel_size": None,
        "sequence_parallel": None,
        "virtual_pipeline_stages": None,
        "ddp_backend": None,
        "per_device_train_batch_size": None,
        "gradient_accumulation_steps": None,
    }
    cells = recipes.cells(MEGATRON, "sweep.grid.tp=[1, 2]", "params.micro_batch_size=1")
    assert "tensor_parallel_size" not in cells[0].layout
    assert "per_device_train_batch_size" not in cells[0].layout
    assert recipes.cells(COMMAND)[0].layout == {}


def test_every_restriction_is_of_an_engine_that_uses_the_parameter() -> None:
    for row in HYPERPARAMETERS:
        for engine, choices in row.engine_choices.items():
            assert engine in row.engines
            assert set(choices) < set(row.choices)
            assert row.default in choices
