from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from hpcml.recipe import Recipe, json_schema, load_recipe

from .writing import COMMAND, TRAIN, Recipes


def test_a_short_recipe_has_sensible_defaults(recipes: Recipes) -> None:
    recipe = recipes.load(COMMAND).recipe
    assert recipe.resources.world_size == 1
    assert recipe.resources.time is None
    assert recipe.array.pack == 1
    assert recipe.checkpoint.keep == 2
    assert recipe.retry.model_dump() == {"application": 0, "oom": 0, "killed": 0}
    assert recipe.code.limit == 100 * 1024**2
    assert recipe.objective is None


def test_a_training_minimizes_its_evaluation_loss(recipes: Recipes) -> None:
    objective = recipes.load(TRAIN).recipe.objective
    assert objective is not None
    assert (objective.metric, objective.mode) == ("eval_loss", "min")
    text = TRAIN + "objective: {metric: tokens_per_second, mode: max}\n"
    given = recipes.load(text).recipe.objective
    assert given is not None
    assert given.mode == "max"


@pytest.mark.parametrize(
    ("metric", "said"),
    [("eval_los", "did you mean 'eval_loss'?"), ("accuracy", "known: eval_loss, loss, ")],
)
def test_a_training_is_ranked_by_what_it_reports(recipes: Recipes, metric: str, said: str) -> None:
    message = recipes.error(TRAIN + f"objective: {{metric: {metric}}}\n")
    assert f"recipe.yaml:4: objective.metric: a training reports no '{metric}'; {said}" in message


def test_units_become_numbers(recipes: Recipes) -> None:
    text = COMMAND + "resources: {time: 4:00, memory: 1.5G, gpus: 2, nodes: 3, cpus: 1e1}\n"
    resources = recipes.load(text).recipe.resources
    assert resources.time == 240
    assert resources.memory == 3 * 1024**3 // 2
    assert resources.cpus == 10
    assert resources.world_size == 6


def test_processes_replace_one_per_gpu(recipes: Recipes) -> None:
    text = COMMAND + "resources: {gpus: 8, processes: 2}\n"
    assert recipes.load(text).recipe.resources.processes_per_node == 2


def test_arguments_and_variables_are_taken_as_written(recipes: Recipes) -> None:
    recipe = recipes.load(
        "name: t\nkind: command\ncommand: {run: [x, 1.10, 1e-4, true, no, 007, 'a b']}\n"
        "env: {A: 1.10, B: yes, C: 0x10}\n",
        "env.D=1.50",
    ).recipe
    assert recipe.command is not None
    assert recipe.command.run == ["x", "1.10", "1e-4", "true", "no", "007", "a b"]
    assert recipe.env == {"A": "1.10", "B": "yes", "C": "0x10", "D": "1.50"}


def test_the_loaded_recipe_knows_its_origin(recipes: Recipes) -> None:
    loaded = recipes.load(COMMAND, "resources.nodes=2")
    assert loaded.path == recipes.folder / "recipe.yaml"
    assert loaded.folder == recipes.folder
    assert loaded.text == COMMAND
    assert loaded.recipe.resources.nodes == 2


def test_other_names_are_reported_once(recipes: Recipes) -> None:
    loaded = recipes.load(TRAIN + "params: {lr: 1}\nsweep: {grid: {lr: [1, 2], epochs: [1]}}\n")
    assert loaded.notes == (
        "lr is stored as learning_rate",
        "epochs is stored as num_train_epochs",
    )


def test_a_model_is_never_changed_and_reads_what_it_writes(recipes: Recipes) -> None:
    recipe = recipes.load(COMMAND + "resources: {time: 90s, memory: 3M}\n").recipe
    assert Recipe.model_validate(recipe.model_dump()) == recipe
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    with pytest.raises(ValidationError):
        recipe.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("nme: x\n", ["recipe.yaml:4: nme", "did you mean 'name'"]),
        ("resources: {gpu: 1}\n", ["recipe.yaml:4: resources.gpu", "did you mean 'gpus'"]),
        ("time: 4:00\n", ["recipe.yaml:4: time", "resources.time"]),
        ("files: [a]\n", ["recipe.yaml:4: files", "train.data.files"]),
        (
            "resources:\n  time: 4x\n",
            ["recipe.yaml:5: resources.time", "'4x'", "hours:minutes:seconds"],
        ),
        ("resources: {time: 0}\n", ["resources.time", "more than 0"]),
        ("resources: {memory: 4}\n", ["recipe.yaml:4: resources.memory", "unit", "4G"]),
        ("resources: {nodes: 0}\n", ["resources.nodes", "at least 1", "not 0"]),
        ("resources: {nodes: 1.5}\n", ["resources.nodes", "whole number", "not 1.5"]),
        ("resources: {nodes: '1'}\n", ["resources.nodes", "whole number", "not '1'"]),
        ("resources: {nodes: true}\n", ["resources.nodes", "whole number", "not true"]),
        ("resources: [1]\n", ["resources", "must be a mapping, not a list"]),
        ("checkpoint: {interval: often}\n", ["checkpoint.interval", "auto", "1h30m"]),
        ("checkpoint: {interval: 0}\n", ["checkpoint.interval", "more than 0"]),
        ("retry: {oom: -1}\n", ["retry.oom", "at least 0"]),
        ("description: 3\n", ["description", "must be text, not 3"]),
        ("objective: {metric: a b}\n", ["objective.metric", "spaces"]),
        ("objective: {metric: a, mode: minimum}\n", ["objective.mode", "min or max", "'minimum'"]),
        ("env: {RANK: 1}\n", ["env.RANK", "set by hpcml"]),
        ("env: {HPCML_X: 1}\n", ["env.HPCML_X", "set by hpcml"]),
        ("env: {A-B: 1}\n", ["env.A-B", "not the name of an environment variable"]),
        ("env: {A: ~}\n", ["env.A", "must be text, not null"]),
        ("env: {A: [1]}\n", ["env.A", "must be text, not a list"]),
        ("env_from: [MASTER_PORT]\n", ["env_from.0", "set by hpcml"]),
        ("env_from: [A, A]\n", ["env_from.1", "twice"]),
        ("env: {A: 1}\nenv_from: [A]\n", ["recipe.yaml:5: env_from.0", "one of them"]),
        ("params: {a: .nan}\n", ["recipe.yaml:4: params.a", "finite"]),
        ("params: {a: [{b: .inf}]}\n", ["params.a.0.b", "finite"]),
        ("sweep: {grid: {a: []}}\n", ["sweep.grid.a", "at least one entry"]),
        ("sweep: {grid: {a: 1}}\n", ["sweep.grid.a", "must be a list"]),
        ("sweep: {grdi: {a: [1]}}\n", ["sweep.grdi", "did you mean 'grid'"]),
        ("sweep: {exclude: [3]}\n", ["sweep.exclude.0", "expression"]),
        ("train: {data: {source: python-stdlib}}\n", ["recipe.yaml:4: train", "kind is command"]),
    ],
)
def test_a_mistake_names_file_line_key_and_what_is_allowed(
    recipes: Recipes, text: str, parts: list[str]
) -> None:
    message = recipes.error(COMMAND + text)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("kind: command\n", ["recipe.yaml:1: name: this key is missing", "command: this key"]),
        ("name: t\nkind: comand\n", ["recipe.yaml:2: kind", "did you mean 'command'"]),
        ("name: -t\nkind: train\n", ["recipe.yaml:1: name: '-t'", "letter or a digit"]),
        ("name: a/b\nkind: train\n", ["'a/b' is not a name"]),
        ("name: 'a\n\n  b'\nkind: train\n", ["is not a name"]),
        (f"name: {'a' * 65}\nkind: train\n", ["at most 64"]),
        ("name: 5\nkind: train\n", ["name: must be text, not 5"]),
        ("name: t\nkind: command\n", ["command: this key is missing; kind command needs it"]),
        ("name: t\nkind: train\n", ["train: this key is missing; kind train needs it"]),
        ("name: t\nkind: train\ntrain: {data: {}}\n", ["train.data", "exactly one"]),
        (
            "name: t\nkind: train\ntrain: {data: {source: python-stdlib, files: [a]}}\n",
            ["train.data", "exactly one"],
        ),
        (
            "name: t\nkind: train\ntrain:\n  engine: jax\n  data: {source: python, packing: no}\n",
            ["recipe.yaml:4: train.engine", "must be torch", "source", "packing", "true or false"],
        ),
        (
            "name: t\nkind: train\ntrain: {data: {files: [a], eval_fraction: 1}}\n",
            ["train.data.eval_fraction", "less than 1"],
        ),
        ("name: t\nkind: command\ncommand: {run: []}\n", ["command.run", "at least one entry"]),
        ("name: t\nkind: command\ncommand: {run: ['']}\n", ["command.run.0", "empty"]),
        ("name: t\nkind: command\ncommand: {run: echo}\n", ["command.run", "must be a list"]),
        ("name: t\nkind: command\ncommand: {run: [a, ~]}\n", ["command.run.1", "not null"]),
    ],
)
def test_mistakes_in_what_every_recipe_needs(recipes: Recipes, text: str, parts: list[str]) -> None:
    message = recipes.error(text)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "key"),
    [("checkpoint: {interval: often}\n", "checkpoint.interval"), ("", "train.deepspeed")],
)
def test_a_value_of_several_types_is_named_by_its_key_alone(
    recipes: Recipes, text: str, key: str
) -> None:
    message = recipes.error(TRAIN + text, *([] if text else ["train.deepspeed=3"]))
    for line in message.splitlines():
        assert f" {key}: " in line


def test_all_mistakes_are_listed_at_once(recipes: Recipes) -> None:
    message = recipes.error(COMMAND + "array: {pack: 0}\nretry: {oom: x}\nfoo: 1\n")
    assert [line.split(": ")[1] for line in message.splitlines()] == [
        "array.pack", "retry.oom", "foo",
    ]  # fmt: skip


def test_a_setting_that_is_wrong_is_named(recipes: Recipes) -> None:
    message = recipes.error(COMMAND, "resources.tiem=10m")
    assert message.startswith("--set resources.tiem: resources.tiem: there is no key 'tiem'")
    assert "did you mean 'time'" in message
    message = recipes.error(COMMAND, "resources.time=10x")
    assert message.startswith("--set resources.time: resources.time: '10x'")


def test_every_key_is_described() -> None:
    schema = json_schema()
    shared = ("resources", "slurm", "container", "array", "checkpoint", "retry", "code")
    for title, definition in schema["$defs"].items():
        for name, field in definition["properties"].items():
            if title == "StagedRecipe" and name in (*shared, "env", "env_from"):
                continue  # described where they belong
            reference = field.get("$ref", "").rpartition("/")[2]
            assert field.get("description") or schema["$defs"][reference]["description"], name


def test_importing_is_light() -> None:
    code = (
        "import sys, hpcml.recipe; "
        "print(*sys.modules.keys() & {'torch', 'pyarrow', 'submitit', 'numpy', 'transformers'})"
    )
    path = Path(__file__).parents[3]
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=path, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == ""


@pytest.mark.parametrize(
    "key",
    [
        "resources.nodes",
        "resources.cpus",
        "resources.gpus",
        "resources.processes",
        "array.pack",
        "array.max_running",
        "checkpoint.keep",
        "retry.oom",
    ],
)
def test_a_count_that_must_be_a_slip(recipes: Recipes, key: str) -> None:
    assert "must be at most 10,000,000, not 9999" in recipes.error(COMMAND, f"{key}={'9' * 20}")


def test_a_linked_recipe_is_where_its_file_is(recipes: Recipes, tmp_path: Path) -> None:
    recipes.load(COMMAND)
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link.yaml"
    link.symlink_to("../recipe.yaml")
    loaded = load_recipe(link)
    assert loaded.folder == recipes.folder
    assert loaded.path == link
