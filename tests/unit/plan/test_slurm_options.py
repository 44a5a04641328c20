"""Options of sbatch from a recipe and a site: which one stays, and who is told."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from hpcml.errors import UserError
from hpcml.plan import Plan, compile_plan
from hpcml.recipe.load import load_recipe
from hpcml.recipe.slurm import EXCLUSIVE
from hpcml.site.search import load_site

PARTITIONS = [
    {"name": "small", "cpus": 4, "memory": "8G", "max_time": "1h"},
    {"name": "gpu", "cpus": 64, "memory": "256G", "gpus": 8, "gpu_type": "h100", "max_nodes": 2},
]


def plan(
    folder: Path,
    recipe: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    partitions: list[dict[str, Any]] | None = None,
) -> Plan:
    site = {
        "name": "cluster",
        "scheduler": "slurm",
        "partitions": partitions or [],
        "slurm": {"options": options or {}},
    }
    (folder / "site.yaml").write_text(json.dumps(site))
    document = {"name": "x", "kind": "command", "command": {"run": ["true"]}, **(recipe or {})}
    (folder / "recipe.yaml").write_text(json.dumps(document))
    return compile_plan(
        load_recipe(folder / "recipe.yaml"), load_site(folder / "site.yaml"), folder
    )


def options(plan: Plan) -> dict[str, str | None]:
    return dict(plan.directives)


def test_the_recipe_wins_over_the_site(tmp_path: Path) -> None:
    found = plan(tmp_path, {"slurm": {"qos": "mine"}}, {"qos": "site", "account": "a"})
    assert options(found)["qos"] == "mine"
    assert options(found)["account"] == "a"


def test_of_two_that_exclude_each_other_the_recipes_stays_and_the_other_is_named(
    tmp_path: Path,
) -> None:
    found = plan(tmp_path, {"resources": {"memory": "3G"}}, {"memory_per_cpu": "1G"})
    assert options(found)["mem"] == "3072M"
    assert "mem-per-cpu" not in options(found)
    (note,) = found.notes
    assert "mem of the recipe wins over mem-per-cpu of site cluster" in note


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [(first, other) for group in EXCLUSIVE for first, other in permutations(group, 2)],
)
def test_of_each_group_only_one_stays(tmp_path: Path, mine: str, theirs: str) -> None:
    recipe = {"resources": {"memory": "3G"}} if mine == "mem" else {"slurm": given(mine)}
    if theirs == "mem":
        with pytest.raises(UserError, match=r"mem is set by hpcml; use resources\.memory"):
            plan(tmp_path, recipe, given(theirs))
        return
    found = plan(tmp_path, recipe, given(theirs))
    assert mine in options(found)
    assert theirs not in options(found)
    assert found.notes == (f"{mine} of the recipe wins over {theirs} of site cluster",)


def given(name: str) -> dict[str, Any]:
    """An option, by its key where it has one."""
    keys = {"mem-per-cpu": "memory_per_cpu", "exclusive": "exclusive", "nodelist": "nodelist"}
    value = (
        "1G" if name.startswith("mem") else True if name in ("exclusive", "oversubscribe") else "1"
    )
    return {keys[name]: value} if name in keys else {"sbatch": {name: value}}


@pytest.mark.parametrize("place", ["recipe", "site"])
def test_two_that_exclude_each_other_from_one_place_are_refused(tmp_path: Path, place: str) -> None:
    both = {"exclusive": True, "sbatch": {"oversubscribe": True}}
    with pytest.raises(UserError, match="only one of exclusive and oversubscribe"):
        plan(
            tmp_path, {"slurm": both} if place == "recipe" else {}, both if place == "site" else {}
        )
    recipe = {"resources": {"memory": "3G"}, "slurm": {"memory_per_cpu": "1G"}}
    with pytest.raises(UserError, match="only one of mem and mem-per-cpu"):
        plan(tmp_path, recipe)


@pytest.mark.parametrize("place", ["recipe", "site"])
def test_whole_nodes_have_all_of_their_memory(tmp_path: Path, place: str) -> None:
    recipe: dict[str, Any] = {"resources": {"memory": "3G"}}
    if place == "recipe":
        recipe["slurm"] = {"exclusive": True}
    found = plan(tmp_path, recipe, {"exclusive": True} if place == "site" else {})
    assert options(found)["mem"] == "0"
    whose = "the recipe" if place == "recipe" else "site cluster"
    assert found.notes[0].startswith(f"exclusive of {whose} wins over resources.memory: ")


@pytest.mark.parametrize("value", [False, None])
def test_a_recipe_takes_an_option_of_the_site_away(tmp_path: Path, value: object) -> None:
    recipe = {"resources": {"memory": "3G"}, "slurm": {"exclusive": value, "qos": None}}
    found = plan(tmp_path, recipe, {"exclusive": True, "qos": "long"})
    assert options(found)["mem"] == "3072M"
    assert not {"exclusive", "qos"} & options(found).keys()
    found = plan(
        tmp_path, {"slurm": {"sbatch": {"contiguous": False}}}, {"sbatch": {"contiguous": True}}
    )
    assert "contiguous" not in options(found)


def test_an_option_in_two_ways_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"mem-per-cpu is given twice, as memory_per_cpu and in"):
        plan(tmp_path, {"slurm": {"memory_per_cpu": "1G", "sbatch": {"mem-per-cpu": "2G"}}})


@pytest.mark.parametrize("name", ["array", "output", "gres", "time", "wrap", "requeue", "wait"])
def test_what_hpcml_sets_itself_is_refused_with_the_key_to_use(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is set by hpcml; use "):
        plan(tmp_path, {"slurm": {"sbatch": {name: "x"}}})


@pytest.mark.parametrize("value", ["a\nb", "", "a\u2028b"])
def test_a_value_with_a_line_break_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(UserError, match="one line of text"):
        plan(tmp_path, {"slurm": {"sbatch": {"wckey": value}}})


def test_the_first_partition_that_has_everything(tmp_path: Path) -> None:
    chosen = [
        options(plan(tmp_path, {"resources": resources}, partitions=PARTITIONS))["partition"]
        for resources in ({"cpus": 4}, {"cpus": 5}, {"gpus": 1}, {"time": "2h"}, {"memory": "9G"})
    ]
    assert chosen == ["small", "gpu", "gpu", "gpu", "gpu"]


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        ({"gpus": 9}, "gpu: asks for 9 GPUs a node, it has 8"),
        ({"cpus": 65}, "small: asks for 65 cores a node, it has 4"),
        ({"nodes": 3, "gpus": 1}, "gpu: asks for 3 nodes, it allows 2"),
        ({"memory": "300G"}, "gpu: asks for 300G a node, it has 256G"),
    ],
)
def test_what_no_partition_has_is_refused_with_what_each_lacks(
    tmp_path: Path, resources: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match="no partition of site cluster") as error:
        plan(tmp_path, {"resources": resources}, partitions=PARTITIONS)
    assert said in str(error.value)


def test_a_partition_that_is_named_must_have_it(tmp_path: Path) -> None:
    recipe = {"slurm": {"partition": "small"}, "resources": {"gpus": 1}}
    with pytest.raises(UserError, match="small: asks for 1 GPUs a node, it has none"):
        plan(tmp_path, recipe, partitions=PARTITIONS)


def test_a_partition_that_is_not_there_is_named_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"slurm\.partition: no partition of site cluster") as error:
        plan(tmp_path, {"slurm": {"partition": "gpuu"}}, partitions=PARTITIONS)
    assert "gpuu: there is no such partition (there are " in str(error.value)


def test_a_short_job_has_time_to_work_before_its_signal(tmp_path: Path) -> None:
    """Slurm sends it up to half a minute early: with 30 s it would come as the job begins."""
    assert options(plan(tmp_path, {"resources": {"time": "1m"}}))["signal"] == "B:USR1@15"
    assert options(plan(tmp_path, {"resources": {"time": "2m"}}))["signal"] == "B:USR1@45"
    assert options(plan(tmp_path, {"resources": {"time": "1h"}}))["signal"] == "B:USR1@60"
