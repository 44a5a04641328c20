"""The rendered scripts, byte for byte. After a wanted change: HPCML_UPDATE_GOLDEN=1 pytest …"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcml.errors import UserError
from hpcml.launch.submit import next_submission
from hpcml.plan import Submission, compile_plan
from hpcml.recipe.load import load_recipe
from hpcml.render import render_job, render_script
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


ROOTS = {"slurm-pyxis": "/srv/runs", "volcano-nasty": '/srv/it\'s "$(HOME)" `x` ö/runs'}


def submission(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Submission:
    recipe = folder / "recipe.yaml"
    own = GOLDEN / f"{case}.recipe.yaml"
    recipe.write_text(own.read_text() if own.exists() else RECIPE)
    monkeypatch.setenv("TOKEN", "a secret")
    monkeypatch.setenv("HPCML_RUNS", ROOTS.get(case, "/srv/the runs"))
    # The names of jobs depend on who submits them.
    monkeypatch.setattr("os.getuid", lambda: 1000)
    return next_submission(compile_plan(load_recipe(recipe), load_site(GOLDEN / f"{case}.yaml")))


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
        render_script(next_submission(plan))
