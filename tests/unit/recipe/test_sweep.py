from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcml.recipe import Cell

from .writing import COMMAND, TRAIN, Recipes


def swept(recipes: Recipes, sweep: str, base: str = COMMAND) -> list[dict[str, Any]]:
    return [cell.swept for cell in recipes.cells(f"{base}sweep: {sweep}\n")]


def ids(recipes: Recipes, text: str, *overrides: str) -> list[str]:
    return [cell.id for cell in recipes.cells(text, *overrides)]


def test_no_sweep_is_one_cell(recipes: Recipes) -> None:
    (cell,) = recipes.cells(COMMAND + "params: {a: {b: 1}}\n")
    assert cell.index == 0
    assert cell.params == {"a.b": 1}
    assert cell.swept == {}
    assert cell.payload == {"argv": ["echo", "hello"], "directory": None, "env": {}}
    assert len(cell.id) == 12
    assert cell.id == digest(cell)


def assert_members(cells: list[Cell]) -> None:
    for cell in cells:
        told = json.loads(f"{{{cell.members}}}")
        assert told == {"params": cell.params, "payload": cell.payload}


def test_the_members_of_a_training(recipes: Recipes) -> None:
    assert_members(recipes.cells(TRAIN + "sweep: {grid: {lr: [1e-3, 1e-4], seed: [1, 2]}}\n"))


def digest(cell: Cell) -> str:
    content = {"kind": "command", "params": cell.params, "payload": cell.payload}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def test_the_id_is_of_all_that_a_command_gets(recipes: Recipes) -> None:
    """Whatever the values are, in whatever order they are written, swept in this cell or not."""
    cells = recipes.cells(
        "name: t\nkind: command\nparams: {z: é, n: {k: [1, 2.5, null], a: 1}, b: 7}\n"
        "sweep: {grid: {y.q: ['\"', 1.0], b: [1, 2], a: [1, true, null, ü]}, "
        "when: {b: params.a == 1}}\n"
        'env: {Z: "{{ params.a }}", A: "{{ cell.index }}", M: plain}\n'
        'command: {run: [echo, "{{ params.n }}{{ params.b }}"], directory: "{{ params.a }}"}\n'
    )
    assert [cell.id for cell in cells] == [digest(cell) for cell in cells]
    assert_members(cells)
    assert {cell.params["b"] for cell in cells} == {1, 2, 7}


def test_the_last_axis_of_a_grid_is_fastest(recipes: Recipes) -> None:
    assert swept(recipes, "{grid: {b: [1, 2], a: [x, y]}}") == [
        {"b": 1, "a": "x"},
        {"b": 1, "a": "y"},
        {"b": 2, "a": "x"},
        {"b": 2, "a": "y"},
    ]


def test_every_part_is_an_axis_in_the_order_of_the_file(recipes: Recipes) -> None:
    found = swept(
        recipes,
        "{points: [{p: 1}, {p: 2, q: 3}], zip: [{a: [1, 2], b: [3, 4]}], grid: {c: [5, 6]}}",
    )
    assert found[:3] == [
        {"p": 1, "a": 1, "b": 3, "c": 5},
        {"p": 1, "a": 1, "b": 3, "c": 6},
        {"p": 1, "a": 2, "b": 4, "c": 5},
    ]
    assert found[-1] == {"p": 2, "q": 3, "a": 2, "b": 4, "c": 6}
    assert len(found) == 8


def test_zip_may_be_one_mapping_or_several(recipes: Recipes) -> None:
    assert len(swept(recipes, "{zip: {a: [1, 2], b: [3, 4]}}")) == 2
    assert len(swept(recipes, "{zip: [{a: [1, 2]}, {b: [3, 4]}]}")) == 4


def test_swept_values_override_fixed_ones_and_names_nest(recipes: Recipes) -> None:
    (first, _) = recipes.cells(
        "name: t\nkind: command\nparams: {optim: {lr: 1, name: sgd}}\n"
        "sweep: {grid: {optim.lr: [0.5, 2]}}\n"
        "command: {run: ['{{ params.optim.lr }}', '{{ params.optim }}']}\n"
    )
    assert first.params == {"optim.lr": 0.5, "optim.name": "sgd"}
    assert first.payload["argv"] == ["0.5", '{"lr": 0.5, "name": "sgd"}']


def test_the_payload_of_a_command(recipes: Recipes) -> None:
    cells = recipes.cells(
        "name: t\nkind: command\nsweep: {grid: {x: [1e-4, 'a b; $(id)']}}\n"
        "env: {X: '{{ params.x }}', Y: y}\n"
        "command: {run: [p, '--x={{ params.x }}', '{{ cell.index }}'], directory: 'd/{{params.x}}'}"
    )
    assert [cell.payload for cell in cells] == [
        {
            "argv": ["p", "--x=0.0001", "0"],
            "directory": "d/0.0001",
            "env": {"X": "0.0001", "Y": "y"},
        },
        {
            "argv": ["p", "--x=a b; $(id)", "1"],
            "directory": "d/a b; $(id)",
            "env": {"X": "a b; $(id)", "Y": "y"},
        },
    ]


def test_random_samples_are_in_range_and_repeatable(recipes: Recipes) -> None:
    sweep = (
        "{random: {samples: 50, params: {a: {uniform: [0, 1]}, b: {loguniform: [1e-5, 1e-1]}, "
        "c: {int: [1, 3]}, d: {choice: [x, y]}}}}"
    )
    found = swept(recipes, sweep)
    assert len(found) == 50
    assert all(0 <= point["a"] <= 1 for point in found)
    assert all(1e-5 <= point["b"] <= 1e-1 for point in found)
    assert {point["c"] for point in found} == {1, 2, 3}
    assert {point["d"] for point in found} == {"x", "y"}
    assert 10 < sum(point["b"] < 1e-3 for point in found) < 40
    assert swept(recipes, sweep) == found
    assert swept(recipes, sweep.replace("samples: 50", "samples: 5")) == found[:5]
    assert swept(recipes, sweep.replace("samples: 50", "samples: 50, seed: 1")) != found
    assert swept(recipes, "{random: {samples: 3, params: {a: {uniform: [0, 1]}}}}") == [
        {"a": point["a"]} for point in found[:3]
    ]
    assert found[0] == {"a": 0.583015547, "b": 0.0503510442, "c": 3, "d": "y"}


def test_discrete_samples_that_repeat_are_one(recipes: Recipes) -> None:
    assert len(swept(recipes, "{random: {samples: 50, params: {c: {int: [1, 3]}}}}")) == 3


def test_exclude(recipes: Recipes) -> None:
    grid = "grid: {a: [1, 2], b: [true, false]}"
    assert swept(recipes, f"{{{grid}, exclude: [{{a: 1, b: true}}]}}") == [
        {"a": 1, "b": False},
        {"a": 2, "b": True},
        {"a": 2, "b": False},
    ]
    assert swept(recipes, f"{{{grid}, exclude: [{{a: 1.0}}, 'params.b']}}") == [
        {"a": 2, "b": False}
    ]
    assert len(swept(recipes, f"{{{grid}, exclude: [{{a: true}}, {{b: 1}}]}}")) == 4


def test_exclude_sees_fixed_parameters_and_defaults(recipes: Recipes) -> None:
    text = TRAIN + "params: {max_steps: 5}\nsweep: {grid: {seed: [0, 1]}, exclude: [%s]}\n"
    assert len(recipes.cells(text % "{max_steps: 5, seed: 1}")) == 1
    assert len(recipes.cells(text % "{max_steps: 6, seed: 1}")) == 2
    assert len(recipes.cells(text % "{optim: adamw, seed: 1}")) == 1
    assert len(recipes.cells(text % "params.optim == 'adamw' and params.seed == 1")) == 1


def test_when_drops_a_parameter_and_merges_what_is_the_same(recipes: Recipes) -> None:
    found = swept(
        recipes,
        "{grid: {optim: [adamw, sgd], momentum: [0.5, 0.9]}, "
        "when: {momentum: params.optim == 'sgd'}}",
        TRAIN,
    )
    assert found == [
        {"optim": "adamw"},
        {"optim": "sgd", "momentum": 0.5},
        {"optim": "sgd", "momentum": 0.9},
    ]


def test_when_falls_back_to_the_fixed_value(recipes: Recipes) -> None:
    cells = recipes.cells(
        COMMAND + "params: {m: 0}\nsweep: {grid: {o: [a, b], m: [1, 2]}, "
        "when: {m: params.o == 'b'}}\n"
    )
    assert [cell.params["m"] for cell in cells] == [0, 1, 2]
    assert [cell.index for cell in cells] == [0, 1, 2]


def test_conditions_may_depend_on_each_other(recipes: Recipes) -> None:
    found = swept(
        recipes,
        "{grid: {a: [0, 1], b: [0, 1], c: [0, 1]}, "
        "when: {b: params.a == 1, c: params.b is defined and params.b == 1}}",
    )
    assert found == [{"a": 0}, {"a": 1, "b": 0}, {"a": 1, "b": 1, "c": 0}, {"a": 1, "b": 1, "c": 1}]


@pytest.mark.parametrize(
    ("sweep", "parts"),
    [
        ("{zip: {a: [1], b: [1, 2, 3]}}", ["sweep.zip", "a has 1, b has 3"]),
        ("{zip: [{c: [1]}, {a: [1], b: [1, 2]}]}", ["sweep.zip.1", "a has 1, b has 2"]),
        ("{grid: {a: [1]}, points: [{a: 2}]}", ["sweep.points.0.a", "sweep.grid.a already"]),
        ("{grid: {a: [1]}, zip: {a: [2]}}", ["sweep.zip.a", "sweep.grid.a already"]),
        ("{zip: [{a: [1]}, {a: [2]}]}", ["sweep.zip.1.a", "sweep.zip.0.a already"]),
        ("{grid: {a: [1, 2, 1]}}", ["sweep.grid.a", "entries 1 and 3 are the same (a=1)"]),
        ("{grid: {a: [0.001, 1e-3]}}", ["entries 1 and 2 are the same (a=0.001)"]),
        ("{points: [{a: 1, b: 2}, {b: 2, a: 1}]}", ["entries 1 and 2 are the same (a=1, b=2)"]),
        ("{zip: {a: [1, 1], b: [2, 2]}}", ["entries 1 and 2 are the same (a=1, b=2)"]),
        ("{grid: {a: [1], a.b: [1]}}", ["sweep.grid.a.b", "can't have parts"]),
        ("{grid: {a..b: [1]}}", ["sweep.grid.a..b", "not a name"]),
        ("{grid: {a: [1]}, exclude: [{a: 1}]}", ["sweep.exclude", "nothing to run"]),
        ("{grid: {alpha: [1]}, exclude: [{alhpa: 1}]}", ["exclude.0.alhpa", "'alpha'"]),
        ("{grid: {alpha: [1]}, exclude: [params.alhpa == 1]}", ["exclude.0", "'alpha'"]),
        ("{grid: {alpha: [1]}, exclude: [alpha == 1]}", ["exclude.0", "params.alpha"]),
        ("{grid: {alpha: [1]}, exclude: [params.alpha]}", ["exclude.0", "true or false"]),
        ("{grid: {alpha: [1]}, exclude: ['params.alpha =']}", ["exclude.0", "not an expression"]),
        ("{grid: {alpha: [1]}, when: {alhpa: 'true'}}", ["when.alhpa", "'alpha'"]),
        ("{grid: {alpha: [1]}, when: {alpha: params.beta}}", ["when.alpha", "'beta'"]),
        ("{random: {samples: 0, params: {a: {int: [1, 2]}}}}", ["random.samples", "at least 1"]),
        ("{random: {samples: 1, params: {a: {unifrm: [1, 2]}}}}", ["a.unifrm", "'uniform'"]),
        ("{random: {samples: 1, params: {a: {uniform: [2, 1]}}}}", ["a.uniform", "a < b"]),
        ("{random: {samples: 1, params: {a: {loguniform: [0, 1]}}}}", ["a.loguniform", "0 < a"]),
        ("{random: {samples: 1, params: {a: {int: [0.5, 1]}}}}", ["a.int", "whole numbers"]),
        ("{random: {samples: 1, params: {a: {choice: []}}}}", ["a.choice", "list"]),
        ("{random: {samples: 1, params: {a: {}}}}", ["params.a", "exactly one"]),
        ("{random: {samples: 1000000000, params: {a: {int: [0, 9]}}}}", ["samples", "1,000,000"]),
    ],
)
def test_mistakes_in_a_sweep(recipes: Recipes, sweep: str, parts: list[str]) -> None:
    message = recipes.error(f"{COMMAND}sweep: {sweep}\n")
    assert "recipe.yaml:4: " in message
    for part in parts:
        assert part in message


def test_when_to_save_is_said_once(recipes: Recipes) -> None:
    text = TRAIN + "checkpoint: {interval: 10m}\n"
    for steps in ("params: {save_steps: 5}\n", "sweep: {grid: {save_steps: [5, 10]}}\n"):
        message = recipes.error(text + steps)
        assert "checkpoint.interval" in message
        assert "save_steps" in message


def test_mistakes_in_parameters(recipes: Recipes) -> None:
    message = recipes.error(COMMAND + "params:\n  a: {b: 1}\n  a.b: 2\n")
    assert "recipe.yaml:6: params.a.b: it is the same parameter" in message
    message = recipes.error(COMMAND + "params:\n  a: 1\n  a.b: 2\n")
    assert "recipe.yaml:6: params.a.b" in message
    text = (
        "name: t\nkind: command\nparams: {learning: 1}\ncommand:\n  run: [p, '{{ params.%s }}']\n"
    )
    message = recipes.error(text % "lerning")
    assert "recipe.yaml:5: command.run.1" in message
    assert "did you mean 'learning'" in message


def test_a_setting_that_the_sweep_overrules_is_an_error(recipes: Recipes) -> None:
    text = COMMAND + "sweep: {grid: {a: [1, 2]}}\n"
    assert "is swept" in recipes.error(text, "params.a=3")
    assert [cell.params for cell in recipes.cells(text, "sweep.grid.a=[3]")] == [{"a": 3}]


def test_cells_that_differ_only_in_what_is_a_default(recipes: Recipes) -> None:
    message = recipes.error(TRAIN + "sweep: {points: [{seed: 0}, {seed: 0, dropout: 0}]}\n")
    assert "two cells are the same: seed=0 and seed=0, dropout=0.0" in message


def test_a_sweep_that_is_too_large_fails_at_once(recipes: Recipes) -> None:
    axis = str(list(range(1000)))
    start = time.monotonic()
    message = recipes.error(f"{COMMAND}sweep: {{grid: {{a: {axis}, b: {axis}, c: {axis}}}}}\n")
    assert time.monotonic() - start < 5
    assert "1,000,000,000 cells, more than 1,000,000" in message
    assert "1,000 (a) * 1,000 (b) * 1,000 (c)" in message


def test_an_id_depends_on_what_decides_the_result(recipes: Recipes) -> None:
    text = "name: t\nkind: command\nparams: {a: 1e-3, b: {c: 2, d: 3}}\ncommand: {run: [x]}\n"
    first = ids(recipes, text)
    assert first == ids(
        recipes,
        "command: {run: [x]}\nparams: {b.d: 3, b: {c: 2}, a: 0.001}\nkind: command\nname: other\n"
        "description: d\nresources: {nodes: 3, time: 1h}\narray: {pack: 2}\nretry: {oom: 1}\n"
        "checkpoint: {keep: 5}\nenv_from: [SECRET]\n",
    )
    for change in ("params.a=2e-3", "params.e=1", "command.run=[y]", "env.A=1", "params.b.c='2'"):
        assert ids(recipes, text, change) != first


def test_an_id_does_not_depend_on_what_is_swept(recipes: Recipes) -> None:
    whole = ids(recipes, COMMAND + "sweep: {grid: {a: [1, 2], b: [x, y]}}\n")
    assert ids(recipes, COMMAND + "params: {b: y}\nsweep: {grid: {a: [1, 2]}}\n") == whole[1::2]
    assert ids(recipes, COMMAND + "params: {b: y, a: 2}\n") == whole[3:]


def test_the_id_of_a_training_does_not_depend_on_written_defaults(recipes: Recipes) -> None:
    first = ids(recipes, TRAIN)
    for same in ("params.lr=0.001", "params.optim=adamw", "params.batch_size=8", "params.seed=0"):
        assert ids(recipes, TRAIN, same) == first
    for other in ("params.lr=0.002", "params.seed=1", "train.data.packing=false", "env.A=1"):
        assert ids(recipes, TRAIN, other) != first


def test_a_training_continues_on_more_devices(recipes: Recipes) -> None:
    assert ids(recipes, TRAIN) == ids(recipes, TRAIN, "resources.gpus=4")
    text = TRAIN + "params: {batch_size: 8}\nsweep: {grid: {micro_batch_size: [1, 2, 4, 8]}}\n"
    assert len(set(ids(recipes, text))) == 4


def test_the_payload_of_a_training(recipes: Recipes) -> None:
    (cell,) = recipes.cells(
        "name: t\nkind: train\nparams: {lr: 3e-4, max_steps: 1e2, batch_size: 16}\n"
        "resources: {gpus: 2}\nenv: {A: '{{ params.lr }}'}\n"
        "train:\n  model: m/{{ params.seed }}\n"
        "  data: {files: ['*.txt', /abs/x.txt], tokenizer: tok}\n"
    )
    assert cell.params == {"learning_rate": 3e-4, "max_steps": 100, "global_batch_size": 16}
    payload = cell.payload
    parameters = payload.pop("parameters")
    assert payload == {
        "engine": "torch",
        "model": f"{recipes.folder}/m/0",
        "data": {
            "source": None,
            "files": [f"{recipes.folder}/*.txt", "/abs/x.txt"],
            "tokenizer": f"{recipes.folder}/tok",
            "eval_fraction": 0.05,
            "packing": True,
        },
        "objective": {"metric": "eval_loss", "mode": "min"},
        "env": {"A": "0.0003"},
        "checkpoint": {"interval": "auto", "keep": 2},
    }
    assert parameters["learning_rate"] == 3e-4
    assert parameters["per_device_train_batch_size"] == 8
    assert parameters["gradient_accumulation_steps"] == 1
    assert parameters["data_parallel_size"] == 2
    assert parameters["optim"] == "adamw"
    assert parameters["num_train_epochs"] is None
    json.dumps(parameters, allow_nan=False)


def test_times_reach_a_training_in_seconds(recipes: Recipes) -> None:
    (cell,) = recipes.cells(TRAIN, "checkpoint.interval=20m")
    assert cell.payload["checkpoint"] == {"interval": 1200, "keep": 2}


def test_wildcards_in_the_name_of_the_folder_are_no_wildcards(tmp_path: Path) -> None:
    folder = tmp_path / "a[1]"
    folder.mkdir()
    (cell,) = Recipes(folder).cells("name: t\nkind: train\ntrain: {data: {files: ['*.txt']}}\n")
    assert cell.payload["data"]["files"] == [f"{tmp_path}/a[[]1]/*.txt"]


names = st.lists(
    st.sampled_from(["a", "b.x", "b.y", "c-d", "é", "items"]), unique=True, min_size=1, max_size=4
)
values = st.lists(
    st.integers(-5, 5) | st.text("ab\n'\"{}$ é", max_size=4) | st.booleans() | st.none(),
    min_size=1,
    max_size=4,
    unique_by=json.dumps,
)


@st.composite
def grids(draw: st.DrawFn) -> dict[str, list[Any]]:
    return {name: draw(values) for name in draw(names)}


@settings(max_examples=50, deadline=None)
@given(grids(), st.randoms())
def test_a_grid_is_a_product_of_distinct_cells(
    shared_recipes: Recipes, grid: dict[str, list[Any]], random: Any
) -> None:
    cells = shared_recipes.cells(f"{COMMAND}sweep: {{grid: {json.dumps(grid)}}}\n")
    assert len(cells) == math.prod(len(choices) for choices in grid.values())
    assert len({cell.id for cell in cells}) == len(cells)
    assert [cell.index for cell in cells] == list(range(len(cells)))
    items = list(grid.items())
    random.shuffle(items)
    shuffled = {name: random.sample(choices, len(choices)) for name, choices in items}
    others = shared_recipes.cells(f"{COMMAND}sweep: {{grid: {json.dumps(shuffled)}}}\n")
    assert {cell.id: cell.params for cell in cells} == {cell.id: cell.params for cell in others}


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_any_value_reaches_the_program(shared_recipes: Recipes, value: str) -> None:
    quoted = "'" + value.replace("'", "''") + "'"
    (cell,) = shared_recipes.cells(
        "name: t\nkind: command\ncommand: {run: [p, '{{ params.x }}']}\nenv: {X: '{{params.x}}'}\n",
        f"params.x={quoted}" if value.isprintable() else f"params.x={value}",
    )
    assert cell.payload["argv"][1] == value
    assert cell.payload["env"]["X"] == value


def test_expansion_is_the_same_in_every_process(recipes: Recipes) -> None:
    text = (
        COMMAND + "sweep: {grid: {a: [1, x, true], b.c: [1.5, ~]}, random: {samples: 3, "
        "params: {r: {loguniform: [1e-3, 1]}}}, exclude: [{a: x}]}\n"
    )
    here = ids(recipes, text)
    code = (
        "import sys; from hpcml.recipe import expand, load_recipe\n"
        "print(*[cell.id for cell in expand(load_recipe(sys.argv[1]))])"
    )
    for seed in ("1", "2"):
        found = subprocess.run(
            [sys.executable, "-c", code, str(recipes.folder / "recipe.yaml")],
            cwd=Path(__file__).parents[3],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert found.stdout.split() == here
