"""Every site that comes with hpcml is right, and a job can be made for it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from hpcml import resources
from hpcml.launch.submit import next_submission
from hpcml.plan import compile_plan
from hpcml.recipe.load import load_recipe
from hpcml.render import render_script
from hpcml.site.search import load_site
from tests.conftest import REPOSITORY

# Those of whoever tests lie there as well.
FILES = [
    REPOSITORY / name
    for name in subprocess.run(
        ["git", "ls-files", "site_configs/*.yaml"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_job_can_be_made_for_it(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    monkeypatch.setenv("USER", "somebody")
    monkeypatch.delenv("HPCML_RUNS", raising=False)
    if shutil.which("apptainer") is None:
        monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    found = load_site(path)
    assert found.site.name == path.stem
    assert found.site.description
    text = "name: x\nkind: command\ncommand: {run: ['true']}\nresources: {cpus: 1, time: 1h}\n"
    if found.site.container is not None:
        text += "container: {image: 'docker://python:3.12-slim'}\n"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    script = render_script(next_submission(compile_plan(load_recipe(recipe), found)))
    assert "hpcml.worker" in script


def test_the_examples_choose_the_partition_that_has_what_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    monkeypatch.setenv("USER", "somebody")
    monkeypatch.delenv("HPCML_RUNS", raising=False)
    recipe = tmp_path / "recipe.yaml"
    for site, resources_, partition in (
        ("apptainer_cluster", "{gpus: 4, cpus: 4, time: 1d}", "h100"),
        ("apptainer_cluster", "{nodes: 20, gpus: 4, time: 1d}", "a100"),
        ("apptainer_cluster", "{cpus: 100, time: 3d}", "cpu"),
        ("pyxis_cluster", "{gpus: 8, time: 6h}", "a100"),
    ):
        recipe.write_text(
            f"name: x\nkind: command\ncommand: {{run: ['true']}}\nresources: {resources_}\n"
        )
        found = load_site(resources.folder("site_configs") / f"{site}.yaml")
        plan = compile_plan(load_recipe(recipe), found)
        assert ("partition", partition) in plan.directives
