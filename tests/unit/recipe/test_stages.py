"""Recipes of several stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcml.errors import UserError
from hpcml.plan import compile_stages
from hpcml.recipe.load import load_stages
from hpcml.site.search import find_site

RECIPE = """
name: three
resources: {cpus: 2, time: 10m}
stages:
  last:
    needs: [middle]
    kind: command
    resources: {cpus: 1}
    command: {run: [echo, "{{ stages.middle.run }}", "x{{ stages.first.best.params.lr }}"]}
  first:
    kind: command
    sweep: {grid: {lr: [1, 2]}}
    objective: {metric: loss}
    command: {run: [echo, "{{ params.lr }}"]}
  middle:
    needs: [first]
    kind: train
    params: {learning_rate: "{{ stages.first.best.params.lr }}", seed: 3}
    train: {data: {source: python-stdlib}, model: "{{ stages.first.best.checkpoint }}"}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def error_of(path: Path, old: str, new: str) -> str:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(UserError) as error:
        compile_stages(load_stages(path), find_site("local"), path.parent)
    return str(error.value)


def test_stages_come_after_what_they_need(recipe: Path) -> None:
    stages = load_stages(recipe)
    assert [(stage.stage, stage.needs) for stage in stages] == [
        ("first", ()),
        ("middle", ("first",)),
        ("last", ("middle",)),
    ]
    assert [stage.recipe.name for stage in stages] == ["three.first", "three.middle", "three.last"]


def test_what_is_beside_the_stages_holds_for_those_without_it(recipe: Path) -> None:
    cpus = {stage.stage: stage.recipe.resources.cpus for stage in load_stages(recipe)}
    assert cpus == {"first": 2, "middle": 2, "last": 1}


def test_results_are_tokens_until_they_are_known(recipe: Path) -> None:
    first, middle, last = compile_stages(load_stages(recipe), find_site("local"), recipe.parent)
    run = f"three.first/{first.run_id}"
    (cell,) = middle.cells
    assert cell.payload["parameters"]["learning_rate"] == f"\0{run}\0best.params.lr\0"
    assert cell.payload["model"] == f"\0{run}\0best.checkpoint\0"
    (cell,) = last.cells
    assert cell.payload["argv"] == [
        "echo",
        f"\0three.middle/{middle.run_id}\0run\0",
        f"x\0{run}\0best.params.lr\0",
    ]


def test_another_first_stage_is_another_run_of_all(recipe: Path) -> None:
    before = compile_stages(load_stages(recipe), find_site("local"), recipe.parent)
    changed = load_stages(recipe, ["stages.first.sweep.grid.lr=[1,2,3]"])
    after = compile_stages(changed, find_site("local"), recipe.parent)
    assert all(old.run_id != new.run_id for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("needs: [first]", "needs: [frist]", "recipe.yaml:16: stages.middle.needs.0: there is no"),
        ("needs: [first]", "needs: [last]", "need each other in a circle"),
        ("needs: [first]", "needs: first", "must be a list"),
        ("needs: [first]", "needs: []", "this stage needs no stage 'first'"),
        ("stages.middle.run", "stages.middle.best", "is no value; go on with one of"),
        ("stages.middle.run", "stages.middle.worst", "no part 'worst'"),
        ("objective: {metric: loss}", "", "the stage has several cells, and needs an objective"),
        ("stages.middle.run", "stages.middle.best.params", "is no value; go on with one of"),
        ("stages.middle.run", "stages.middle.best.metrics", "the name of one of the metrics"),
        ('best.params.lr }}", s', 'best.params.lrr }}", s', "no part 'lrr'; did you mean 'lr'?"),
        ("stages.middle.run", "stages.middle.best.params.lr", "known: learning_rate, seed"),
        ("stages.middle.run", "stages.middle.best.params.seed.x", "no part 'x'"),
        (
            "stages.middle.run",
            "'a' if stages.middle.best.params.seed == 3 else 'b'",
            "the value is known only when the cell starts",
        ),
        (
            "stages.middle.run",
            "'a' if stages.middle.best.params.seed else 'b'",
            "the value is known only when the cell starts",
        ),
        (
            "stages.middle.run",
            "stages.middle.best.params.seed in [3]",
            "the value is known only when the cell starts",
        ),
        ("seed: 3", "global_batch_size: '{{ stages.first.best.params.lr }}'", "depend on it"),
        ("seed: 3", "seed: 'x{{ stages.first.best.params.lr }}'", "alone, and no more"),
        ("kind: train", "kind: trian", "recipe.yaml:17: kind"),
        ("name: three\n", "", "name: this key is missing"),
        ("name: three\n", "name: three\nkind: train\n", "there is no key 'kind'"),
    ],
)
def test_mistakes_are_named(recipe: Path, old: str, new: str, said: str) -> None:
    assert said in error_of(recipe, old, new)


def test_needs_outside_of_stages(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("name: x\nkind: command\nneeds: [a]\ncommand: {run: [echo]}\n")
    with pytest.raises(UserError, match=r"recipe\.yaml:3: needs: only a stage"):
        load_stages(path)
