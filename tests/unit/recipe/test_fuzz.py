"""Whatever is in a file, a person gets a message and never a traceback."""

from __future__ import annotations

import contextlib
import copy
import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcml.errors import UserError
from hpcml.recipe import expand, load_recipe

from .writing import Recipes

COMMAND: dict[str, Any] = {
    "name": "t",
    "kind": "command",
    "params": {"a": 1, "b": {"c": "x"}},
    "sweep": {
        "grid": {"d": [1, 2], "b.c": [1, None]},
        "zip": [{"e": [1, 2], "f": [True, "y"]}],
        "random": {"samples": 2, "seed": 1, "params": {"g": {"uniform": [0, 1]}}},
        "points": [{"h": 1}, {"h": 2, "i": [1]}],
        "exclude": [{"d": 1, "e": 2}, "params.d == 2 and params.f == 'y'"],
        "when": {"e": "params.d == 1"},
    },
    "objective": {"metric": "loss", "mode": "max"},
    "resources": {"nodes": 1, "gpus": 0, "cpus": 2, "memory": "4G", "time": "1h"},
    "env": {"X": "{{ params.a }}"},
    "env_from": ["TOKEN"],
    "command": {"run": ["echo", "{{ params.a }}", "{{ params.d + 1 }}"], "directory": "x"},
}
TRAIN: dict[str, Any] = {
    "name": "t",
    "kind": "train",
    "params": {"lr": 0.1, "optim": "sgd", "momentum": 0.5, "frozen_layers": None},
    "sweep": {
        "grid": {"seed": [0, 1], "batch_size": [8, 16]},
        "when": {"batch_size": "params.seed == 0"},
    },
    "resources": {"gpus": 2},
    "checkpoint": {"keep": 1},
    "train": {
        "engine": "torch",
        "model": "m{{ params.seed }}",
        "data": {"files": ["*.txt"], "tokenizer": "t", "eval_fraction": 0.1, "packing": False},
    },
}

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6)
    | st.sampled_from(["{{ params.a", "{{ a }}", "1h", "4G", "a.b", "torch", "lora", "inf", ".."]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.sampled_from(["a", "lr", "seed"]), inner)
    ),
    max_leaves=5,
)


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(tree, dict):
        for key, value in tree.items():
            found += places(value, (*path, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            found += places(value, (*path, index))
    return found


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_wrong_values_are_user_errors(shared_recipes: Recipes, data: st.DataObject) -> None:
    base = data.draw(st.sampled_from([COMMAND, TRAIN]))
    tree = copy.deepcopy(base)
    for _ in range(data.draw(st.integers(1, 2))):
        *parents, last = data.draw(st.sampled_from(places(tree)))
        branch = tree
        for part in parents:
            branch = branch[part]
        if data.draw(st.booleans()):
            branch[last] = data.draw(json_values)
        elif isinstance(branch, dict):
            branch[data.draw(st.text(max_size=4))] = branch.pop(last)
        if not tree:
            return
    with contextlib.suppress(UserError):
        for cell in shared_recipes.cells(json.dumps(tree)):
            json.dumps([cell.params, cell.payload], allow_nan=False)


def test_the_recipes_that_are_varied_are_right(recipes: Recipes) -> None:
    assert len(recipes.cells(json.dumps(COMMAND))) > 10
    assert len(recipes.cells(json.dumps(TRAIN))) == 3


@settings(max_examples=150, deadline=None)
@given(
    st.binary(max_size=40)
    | st.text(":-[]{}&*!|>'\"%@`#,? \n\tab1.~<=\\", max_size=40).map(str.encode)
)
def test_any_bytes_are_read_or_refused(shared_recipes: Recipes, content: bytes) -> None:
    path = shared_recipes.folder / "bytes.yaml"
    path.write_bytes(content)
    with contextlib.suppress(UserError):
        expand(load_recipe(path))


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=20) | st.tuples(st.text(max_size=8), st.text(max_size=8)).map("=".join))
def test_any_setting_is_applied_or_refused(shared_recipes: Recipes, setting: str) -> None:
    with contextlib.suppress(UserError):
        shared_recipes.cells(json.dumps(COMMAND), setting, f"params.a={setting}")
