"""The rendered scripts, byte for byte. After a wanted change: HPCML_UPDATE_GOLDEN=1 pytest …"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpcml.errors import UserError
from hpcml.launch.submit import create_run, next_submissions
from hpcml.plan import Submission, compile_plan
from hpcml.plan.stored import stored_plan
from hpcml.recipe.load import load_recipe
from hpcml.render import render_job, render_script
from hpcml.render.by_hand import by_hand
from hpcml.site.search import load_site

GOLDEN = Path(__file__).parents[2] / "golden"
# A case is a site; it may have a recipe of its own, <case>.recipe.yaml.
CASES = sorted(path.stem for path in GOLDEN.glob("*.yaml") if not path.stem.endswith(".recipe"))

RECIPE = """
name: golden
kind: command
sweep: {grid: {n: [1, 2, 3]}}
resources: {cpus: 2, time: 10m}
command: {run: [echo, "$(never) '{{ params.n }}'"]}
"""


ROOTS = {
    "slurm-pyxis": "/srv/runs",
    "slurm-search": "/srv/runs",
    "volcano-nasty": '/srv/it\'s "$(HOME)" `x` ö/runs',
}


def submission(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Submission:
    recipe = folder / "recipe.yaml"
    own = GOLDEN / f"{case}.recipe.yaml"
    recipe.write_text(own.read_text() if own.exists() else RECIPE)
    monkeypatch.setenv("TOKEN", "a secret")
    monkeypatch.setenv("HPCML_RUNS", ROOTS.get(case, "/srv/the runs"))
    # The names of jobs depend on who submits them.
    monkeypatch.setattr("os.getuid", lambda: 1000)
    plan = compile_plan(load_recipe(recipe), load_site(GOLDEN / f"{case}.yaml"))
    return next_submissions(plan)[0]


def without_digests(text: str) -> str:
    assert "a secret" not in text
    text = re.sub(r"/code/[0-9a-f]{10}", "/code/0123456789", text)
    text = re.sub(r"/(golden|1.Un_Lucky-)/[0-9a-f]{8}", r"/\1/01234567", text)
    text = re.sub(r"-[0-9a-f]{8}-[0-9a-f]{6}-1-", "-01234567-012345-1-", text)
    return re.sub(r'"hpcml-run": "[0-9a-f]{16}"', '"hpcml-run": "0123456789012345"', text)


def script(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return without_digests(render_script(submission(case, folder, monkeypatch)))


def compare(text: str, golden: Path) -> None:
    if os.environ.get("HPCML_UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("case", CASES)
def test_script(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(script(case, tmp_path, monkeypatch), GOLDEN / f"{case}.sh")


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("volcano")])
def test_jobs(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = submission(case, tmp_path, monkeypatch)
    text = "---\n".join(render_job(chosen, job) for job in chosen.jobs)
    compare(without_digests(text), GOLDEN / f"{case}.jobs.yml")


@pytest.mark.parametrize("case", CASES)
def test_bash_and_shellcheck_accept_it(case: str) -> None:
    golden = GOLDEN / f"{case}.sh"
    subprocess.run(["bash", "-n", golden], check=True)
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or "shellcheck"
    # SC2016: that nothing expands within the quotes is what they are for.
    command = [shellcheck, "--exclude=SC2016", golden]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("case", CASES)
def test_the_plan_of_a_run_folder_is_the_one_that_made_it(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = submission(case, tmp_path, monkeypatch)
    chosen = replace(chosen, plan=replace(chosen.plan, root=tmp_path / "the runs"))
    run = create_run(chosen.plan)
    stored = stored_plan(run.path)
    assert stored.document() == chosen.plan.document() == run.plan
    again = replace(chosen, plan=stored)
    assert render_script(again) == render_script(chosen)
    for job in chosen.jobs if chosen.plan.pod else ():
        assert render_job(again, job) == render_job(chosen, job)
    for mine, other in zip(stored.cells, chosen.plan.cells, strict=True):
        assert (mine.index, mine.id, mine.swept) == (other.index, other.id, other.swept)
        assert (mine.params, mine.payload) == (other.params, other.payload)
        assert json.loads(f"{{{mine.members}}}") == json.loads(f"{{{other.members}}}")
    lines = by_hand(stored, run.cell(0), chosen.code)
    assert "a secret" not in "\n".join(lines)
    subprocess.run(["bash", "-n"], input="\n".join(lines), text=True, check=True)


def test_a_plan_of_an_older_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(submission("local", tmp_path, monkeypatch).plan, root=tmp_path)
    run = create_run(plan)
    del run.plan["directives"]
    run.plan_file.write_text(json.dumps(run.plan))
    with pytest.raises(UserError, match=r"plan.json: it lacks .*'directives'.* given again"):
        stored_plan(run.path)


def test_rendering_twice_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = script("local", tmp_path, monkeypatch)
    assert script("local", tmp_path, monkeypatch) == first


@pytest.mark.parametrize(("block", "part"), [("task", "SLURM_ARRAY_TASK_ID"), ("start", "worker")])
def test_a_template_whose_array_nothing_reads_is_refused(
    tmp_path: Path, block: str, part: str
) -> None:
    template = f'{{% extends "slurm/job.sh.j2" %}}{{% block {block} %}}true{{% endblock %}}'
    (tmp_path / "own.sh.j2").write_text(template)
    (tmp_path / "site.yaml").write_text("name: x\nscheduler: slurm\ntemplate: own.sh.j2\n")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    plan = compile_plan(load_recipe(tmp_path / "recipe.yaml"), load_site(tmp_path / "site.yaml"))
    with pytest.raises(UserError, match=rf"own\.sh\.j2: the script has no .*{part}.*'{block}'"):
        render_script(next_submissions(plan)[0])
