"""What may take more than the budget is submitted only if somebody says so."""

from __future__ import annotations

import os
import pty
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcml.launch.submit import next_submissions
from hpcml.plan import Submission, compile_plan
from hpcml.plan.cost import over_budget
from hpcml.recipe import load_recipe
from hpcml.site.search import find_site
from tests.conftest import REPOSITORY, Hpcml

RECIPE = (
    "name: t\nkind: command\nsweep: {grid: {a: [1, 2], b: [x, y]}}\n"
    "command: {run: ['true']}\nresources: {time: 1h}\n"
)
Submitting = Callable[..., list[Submission]]


@pytest.fixture
def submitting(tmp_path: Path) -> Submitting:
    def submissions(recipe: str, site: str = "scheduler: local") -> list[Submission]:
        (tmp_path / "s.yaml").write_text(f"name: s\n{site}\n")
        own = {line.partition(":")[0] for line in recipe.splitlines()}
        base = [line for line in RECIPE.splitlines() if line.partition(":")[0] not in own]
        (tmp_path / "r.yaml").write_text("\n".join([*base, recipe, ""]))
        found = find_site(str(tmp_path / "s.yaml"))
        return next_submissions(compile_plan(load_recipe(tmp_path / "r.yaml"), found, tmp_path))

    return submissions


@pytest.mark.parametrize(
    ("recipe", "site", "said"),
    [
        ("", "scheduler: local", []),
        ("budget: {core_hours: 4}", "scheduler: local", []),
        ("budget: {gpu_hours: 1}", "scheduler: local", []),
        ("budget: {core_hours: 3.9}", "scheduler: local",
         ["t may take 4 core hours; budget of t allows 3.9 core hours"]),
        ("", "scheduler: local\nbudget: {core_hours: 3}",
         ["t may take 4 core hours; site s allows 3 core hours"]),
    ],
)  # fmt: skip
def test_what_is_over(submitting: Submitting, recipe: str, site: str, said: list[str]) -> None:
    assert list(over_budget(submitting(recipe, site)[:1])) == said


GPUS = "sweep: {points: [{a: 1}]}\nresources: {time: 10h, gpus: 8, nodes: 2}"


@pytest.mark.parametrize(("hours", "over"), [(480, False), (479, True)])
def test_gpus_and_the_jobs_of_a_chain_count(submitting: Submitting, hours: int, over: bool) -> None:
    slurm = "scheduler: slurm\nslurm: {coming_back: chain, links: 3}"
    (only,) = submitting(f"{GPUS}\nbudget: {{gpu_hours: {hours}, core_hours: 1}}", slurm)
    said = [f"t may take 480 GPU hours; budget of t allows {hours} GPU hours"]
    assert list(over_budget([only])) == (said if over else [])


def test_stages_share_what_the_site_allows(submitting: Submitting) -> None:
    site = "scheduler: local\nbudget: {core_hours: 7}"
    (one,) = submitting("", site)
    assert list(over_budget([one])) == []
    assert list(over_budget([one, one])) == [
        "t, t may take 8 core hours; site s allows 7 core hours"
    ]


def test_without_a_time_limit_there_is_no_most(submitting: Submitting) -> None:
    (only,) = submitting("resources: {cpus: 1}\nbudget: {core_hours: 100}")
    (said,) = over_budget([only])
    assert said == (
        "t: budget of t allows 100 core hours, and without resources.time nothing limits what it "
        "takes"
    )


@pytest.fixture
def over(hpcml: Hpcml) -> Hpcml:
    hpcml.write("r.yaml", f"{RECIPE}budget: {{core_hours: 1}}\n")
    return hpcml


def test_nobody_can_answer(over: Hpcml) -> None:
    said = over("sweep", "r.yaml", code=2).stderr
    assert "t may take 4 core hours; budget of t allows 1 core hour" in said
    assert "--yes" in said
    assert not (over.folder / "runs").exists()
    said = over("sweep", "r.yaml", "--dry-run").stderr
    assert "budget of t allows 1 core hour; --yes submits it all the same" in said
    over("sweep", "r.yaml", "--yes")
    # What is done takes nothing any more.
    assert "budget" not in over("sweep", "r.yaml").stderr


@pytest.mark.parametrize(("answer", "code"), [("n", 2), ("y", 0)])
def test_somebody_is_asked(over: Hpcml, answer: str, code: int) -> None:
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(over.folder)
        command = [sys.executable, "-m", "hpcml", "sweep", "r.yaml"]
        os.execve(sys.executable, command, {**over.environment, "PYTHONPATH": str(REPOSITORY)})
    said = b""
    while b"all the same?" not in said:
        said += os.read(terminal, 1024)
    os.write(terminal, answer.encode() + b"\n")
    try:
        while block := os.read(terminal, 1024):
            said += block
    except OSError:
        pass  # it has ended
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == code, said.decode()
    assert (over.folder / "runs").exists() == (code == 0)
