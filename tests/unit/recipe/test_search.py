"""What a recipe may say of a search, and what its cells are before anything is proposed."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcml.errors import UserError
from hpcml.recipe.load import load_stages
from hpcml.recipe.search import search_of
from hpcml.worker.sampler import Tried, ask
from hpcml.worker.stages import complete, searched
from tests.unit.recipe.writing import Recipes

COMMAND = """
name: c
kind: command
sweep:
  search:
    rounds: 3
    cells: 4
    params:
      x: {uniform: [0, 1]}
      model.width: {int: [1, 8]}
      kind: {choice: [a, b]}
    metric: loss
    mode: max
command: {run: [echo, "{{ params.x }}", "--w={{ params.model.width }}"]}
env: {KIND: "{{ params.kind }}"}
"""
TRAIN = """
name: t
kind: train
sweep:
  search:
    rounds: 2
    cells: 3
    params:
      lr: {loguniform: [1e-4, 1e-2]}
train: {data: {source: python-stdlib}}
"""


def command(params: Any, **more: Any) -> str:
    document = yaml.safe_load(COMMAND)
    document["sweep"]["search"] |= {"params": params, **more}
    document["command"]["run"] = ["echo"]
    return yaml.safe_dump(document)


def test_the_cells_have_a_place_for_what_is_proposed(recipes: Recipes) -> None:
    cells = recipes.cells(COMMAND)
    assert len(cells) == 12
    assert len({cell.id for cell in cells}) == 12
    assert cells[0].names == ("x", "model.width", "kind")
    line = json.loads(f"{{{cells[7].members}}}")
    own = searched({"x": 0.5, "model.width": 3, "kind": "b"})
    done = complete(line, "", own)
    assert done["params"] == {"x": 0.5, "model.width": 3, "kind": "b"}
    assert done["payload"] == {
        "argv": ["echo", "0.5", "--w=3"],
        "directory": None,
        "env": {"KIND": "b"},
    }


def test_an_id_depends_on_the_search_and_not_on_how_long_it_goes_on(recipes: Recipes) -> None:
    ids = [cell.id for cell in recipes.cells(COMMAND)]
    assert [cell.id for cell in recipes.cells(COMMAND, "sweep.search.rounds=2")] == ids[:8]
    for setting in (
        "sweep.search.seed=1",
        "sweep.search.cells=3",
        "sweep.search.sampler=random",
        "sweep.search.mode=min",
        "sweep.search.metric=error",
        "sweep.search.params.x={uniform: [0, 2]}",
    ):
        assert not set(ids) & {cell.id for cell in recipes.cells(COMMAND, setting)}, setting


def test_what_the_plan_says_of_it(recipes: Recipes) -> None:
    loaded = recipes.load(TRAIN)
    assert search_of(loaded.recipe, loaded.document) == {
        "metric": "eval_loss",
        "mode": "min",
        "sampler": "tpe",
        "seed": 0,
        "cells": [3, 3],
        "params": {"learning_rate": {"loguniform": [1e-4, 1e-2]}},
    }
    assert loaded.notes == ("lr is stored as learning_rate",)


@pytest.mark.parametrize(
    ("text", "setting", "said"),
    [
        (COMMAND, "sweep.search.metric=null", "the name of a metric that cells report"),
        (COMMAND, "objective={metric: loss}", "the objective says min"),
        (COMMAND, "sweep.search.sampler=bayes", "tpe"),
        (COMMAND, "sweep.search.sampler=cmaes", "cmaes knows numbers only"),
        (COMMAND, "sweep.search.rounds=0", "at least 1"),
        (COMMAND, "sweep.search.cells=100000", "more than 100,000 cells"),
        (COMMAND, "sweep.search.seed=-1", "at least 0"),
        (COMMAND, "sweep.search.params={}", "at least one entry"),
        (COMMAND, "sweep.search.params.x={uniform: [1, 0]}", "two numbers [a, b] with a < b"),
        (COMMAND, "sweep.search.params.x={uniform: [-1e308, 1e308]}", "two numbers"),
        (COMMAND, "sweep.search.params.x={loguniform: [0, 1]}", "0 < a < b"),
        (COMMAND, "sweep.search.params.x={int: [0, 9007199254740993]}", "at most"),
        (COMMAND, "sweep.search.params.x={normal: [0, 1]}", "there is no distribution 'normal'"),
        (COMMAND, "sweep.search.params.x={choice: [1, 1]}", "two of the values are the same"),
        (COMMAND, "sweep.grid={seed: [0, 1]}", "it can't be combined with a search"),
        (COMMAND, "sweep.exclude=[params.x > 1]", "it can't be combined with a search"),
        (COMMAND, "sweep.halving={metric: loss, steps: 9}", "it can't be combined with a search"),
        (COMMAND, "params.model=1", "model is a parameter with a value of its own"),
        (TRAIN, "sweep.search.metric=accuracy", "a training reports no 'accuracy'"),
        (TRAIN, "sweep.search.params={learning_rat: {uniform: [0.1, 1]}}", "did you mean"),
        (TRAIN, "sweep.search.params.learning_rate={uniform: [0.1, 1]}", "searched already"),
        (TRAIN, "sweep.search.params.lr={uniform: [-1, 1]}", "must be a number"),
        (TRAIN, "sweep.search.params={dropout: {uniform: [0, 2]}}", "must be a number"),
        (TRAIN, "sweep.search.params={max_steps: {uniform: [1, 9]}}", "must be a whole number"),
        (TRAIN, "sweep.search.params={optim: {choice: [adamw, adamx]}}", "did you mean 'adam'"),
        (TRAIN, "sweep.search.params={optim: {choice: [adamw, sgd]}}", "adam_beta1, adam_beta2"),
        (
            TRAIN,
            "sweep.search.params={global_batch_size: {choice: [8, 16]}}",
            "other parameters follow from it: per_device_train_batch_size",
        ),
        (
            TRAIN,
            "sweep.search.params={num_attention_heads: {choice: [3, 4]}}",
            "in the cell with num_attention_heads=3",
        ),
        (TRAIN, "sweep.search.params={hidden_size: {choice: [64, 128]}}", "intermediate_size"),
        (TRAIN, "sweep.search.params={momentum: {uniform: [0.5, 0.9]}}", "optim is adamw"),
    ],
)
def test_what_makes_no_sense_is_refused(
    recipes: Recipes, text: str, setting: str, said: str
) -> None:
    message = recipes.error(text, setting)
    assert said in message
    assert "recipe.yaml:" in message or "--set" in message


@pytest.mark.parametrize(
    "params",
    [
        {"max_steps": {"int": [10, 100]}},
        {"adam_beta2": {"uniform": [0.9, 0.999]}, "weight_decay": {"choice": [0, 0.1]}},
        {"num_hidden_layers": {"int": [1, 4]}, "max_grad_norm": {"uniform": [0.5, 2]}},
        {"lr_scheduler_type": {"choice": ["constant", "linear"]}},
    ],
)
def test_a_training_is_completed_as_with_any_of_the_values(
    recipes: Recipes, params: dict[str, Any]
) -> None:
    """What is put in later is all that is left open."""
    cell = recipes.cells(TRAIN, f"sweep.search.params={json.dumps(params)}")[0]
    values = {}
    for name, distribution in params.items():
        (argument,) = distribution.values()
        values[name] = argument[-1]
    done = complete(json.loads(f"{{{cell.members}}}"), "", searched(values))
    (fixed,) = recipes.cells(TRAIN, f"sweep={json.dumps({'points': [values]})}")
    assert done["payload"] == json.loads(f"{{{fixed.members}}}")["payload"]


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("params.x * 2", "numbers only"),
        ("params.x > 0.5", "fails"),
        ("'a' if params.kind == 'a' else 'b'", "the value is known only when the cell starts"),
        ("'a' if params.kind else 'b'", "the value is known only when the cell starts"),
        ("params.kind | upper", "the value is known only when the cell starts"),
        ("params.kind ~ 'b'", "the value is known only when the cell starts"),
        ("params", "not text"),
    ],
)
def test_nothing_is_computed_from_what_is_not_known(
    recipes: Recipes, expression: str, said: str
) -> None:
    document = yaml.safe_load(COMMAND)
    document["command"]["run"] = ["echo", f"{{{{ {expression} }}}}"]
    assert said in recipes.error(yaml.safe_dump(document))


def test_neither_a_stage_nor_an_inference_is_searched(recipes: Recipes) -> None:
    path = recipes.folder / "staged.yaml"
    stage = "\n".join(f"    {line}" for line in COMMAND.splitlines() if not line.startswith("name"))
    path.write_text(f"name: staged\nstages:\n  one:{stage}\n")
    with pytest.raises(UserError, match="a stage can't be a search"):
        load_stages(path)
    infer = "name: i\nkind: infer\ninfer: {model: m, input: {files: f.csv}, prompt: x}\nsweep:\n"
    said = recipes.error(
        f"{infer}  search: {{rounds: 1, cells: 1, params: {{n: {{int: [1, 2]}}}}}}"
    )
    assert "an inference has no metric" in said


ENDS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**54), 2**54)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["uniform", "loguniform", "int"]),
    ends=st.tuples(ENDS, ENDS),
    sampler=st.sampled_from(["tpe", "qmc", "cmaes", "random"]),
    seed=st.integers(0, 2**70),
)
def test_what_a_recipe_may_say_can_be_proposed(
    recipes: Recipes, kind: str, ends: tuple[float, float], sampler: str, seed: int
) -> None:
    low, high = sorted(ends)
    text = json.dumps(
        yaml.safe_load(command({"x": {kind: [low, high]}}, sampler=sampler, seed=seed))
    )
    try:
        loaded = recipes.load(text)
        search = search_of(loaded.recipe, loaded.document)
    except UserError:
        return
    assert search is not None
    history: list[list[Tried]] = []
    for _ in range(2):
        asked = ask(search, history)
        assert all(low <= params["x"] <= high for params in asked)
        history.append([Tried(params, float(n), False) for n, params in enumerate(asked)])


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
KINDS = st.sampled_from(["uniform", "loguniform", "int", "choice", "normal", ""])


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=KINDS,
    argument=st.lists(st.integers() | st.floats(), min_size=2, max_size=2) | ANYTHING,
    name=st.sampled_from(["x", "a.b", "", "a..b"]),
    sampler=st.sampled_from(["tpe", "qmc", "cmaes", "random"]),
)
def test_any_distribution_gives_cells_or_words(
    recipes: Recipes, kind: str, argument: Any, name: str, sampler: str
) -> None:
    text = json.dumps(yaml.safe_load(command({name: {kind: argument}}, sampler=sampler)))
    with suppress(UserError):
        assert len(recipes.cells(text)) == 12
