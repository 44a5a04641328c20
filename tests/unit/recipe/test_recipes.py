"""The recipes that come along, and the program of one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcml.plan.plan import resources_of
from hpcml.plan.slurm import choose_partition
from hpcml.plan.training.estimate import estimates, hardware_of
from hpcml.recipe import expand, load_recipe
from hpcml.site.search import load_site

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("name", "count"),
    [("lr_sweep.yaml", 8), ("command_sweep.yaml", 8), ("halving.yaml", 27), ("search.yaml", 24)],
)
def test_the_recipes_are_right(name: str, count: int) -> None:
    cells = expand(load_recipe(ROOT / "recipes" / name))
    assert len(cells) == count


def test_the_recipe_for_a_cluster_fits_its_example() -> None:
    """The 7 B model has the parameters of its name, and fits the GPUs of the site that it names."""
    loaded = load_recipe(ROOT / "recipes" / "pretrain_7b.yaml")
    site = load_site(ROOT / "site_configs" / "apptainer_cluster.yaml").site
    resources = resources_of(loaded)
    partition = choose_partition(loaded, resources, site)
    (estimate,) = estimates(
        loaded, expand(loaded), hardware_of(site, partition, resources, lead=300)
    )
    assert estimate.training.parameters == 7_241_732_096
    assert estimate.mistakes == []
    assert estimate.fits


def test_the_recipe_of_shared_models_is_right() -> None:
    for layout in ("parallel.pp=1", "parallel.tp=1", "parallel.vpp=2", "resources.processes=8"):
        more = ["parallel.sequence_parallel=false"] if layout == "parallel.tp=1" else []
        (cell,) = expand(load_recipe(ROOT / "recipes" / "megatron_3d.yaml", [layout, *more]))
        assert cell.payload["engine"] == "megatron"


def descend(cell: Path) -> tuple[int, dict[int, float]]:
    """Run command_sweep.py as a cell; return its exit code and the loss by step."""
    cell.mkdir(exist_ok=True)
    found = subprocess.run(
        [sys.executable, "command_sweep.py", "--learning-rate=1e-3", "--steps=2000"],
        cwd=ROOT / "recipes",
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HPCML_CELL_DIR": str(cell),
            "HPCML_METRICS": str(cell / "metrics.jsonl"),
            "HPCML_STOP_FILE": str(cell / "stop"),
        },
        check=False,
    )
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (cell / "metrics.jsonl").read_text().splitlines()
    ]
    return found.returncode, {line["step"]: line["loss"] for line in lines}


def test_a_descent_that_is_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = descend(tmp_path / "whole")
    assert whole[0] == 0
    assert max(whole[1]) == 2000

    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "stop").touch()
    for stops in (1, 2, 3):
        code, losses = descend(parts)
        assert code == 75
        assert max(losses) == 100 * stops
    (parts / "stop").unlink()
    assert descend(parts) == whole
