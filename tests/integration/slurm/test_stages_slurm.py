"""Stages on a real Slurm: one begins when the one before is complete, whatever Slurm remembers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.fixtures import SlurmCluster
from tests.conftest import wait_until
from tests.integration.slurm.conftest import LoginNode


def write(login: LoginNode, first: list[str], **keys: Any) -> Path:
    """Two stages; the second one leaves a file ``began``."""
    touch = ["touch", str(login.folder / "began")]
    recipe = {
        "name": "study",
        "resources": {"time": "1m"},
        "stages": {
            "first": {
                "kind": "command",
                "sweep": {"grid": {"n": [0, 1]}},
                "command": {"run": first},
                **keys,
            },
            "second": {"needs": ["first"], "kind": "command", "command": {"run": touch}},
        },
    }
    return login.write("study.yaml", yaml.safe_dump(recipe, sort_keys=False))


def states(login: LoginNode, stage: str) -> list[str]:
    return [cell["state"] for cell in login.status(f"study.{stage}")["cells"]]


def reason(login: LoginNode, stage: str) -> str:
    (cell,) = login.status(f"study.{stage}")["cells"]
    return str(cell["reason"])


def test_a_stage_that_can_never_begin_is_said(login: LoginNode) -> None:
    recipe = write(login, ["false"])
    login("sweep", recipe, "--wait", code=1)
    assert states(login, "first") == ["failed"] * 2
    wait_until(lambda: states(login, "second") == ["failed"], 60)
    assert "the stage before is not complete: 2 of 2 cells" in reason(login, "second")
    assert not (login.folder / "began").exists()


def test_what_the_stage_before_left_counts_and_not_how_its_job_ended(login: LoginNode) -> None:
    """All cells are done, and the job ends as one that failed."""
    site = login.folder / "site_configs" / "cluster.yaml"
    login.write(
        "own.sh.j2",
        '{% extends "slurm/job.sh.j2" %}\n{% block finish %}\nexit 9\n{% endblock %}\n',
    )
    site.write_text(site.read_text() + f"template: {login.folder}/own.sh.j2\n")
    login("sweep", write(login, ["sleep", "5"]), "--wait")
    assert (login.folder / "began").exists()
    (journal,) = login.folder.glob("runs/study.first/*/submissions.jsonl")
    job = json.loads(journal.read_text().splitlines()[-1])["job"]
    login.cluster.wait_accounted(str(job), ["FAILED"] * 2)


def test_a_cell_that_failed_first_and_was_done_later(login: LoginNode) -> None:
    """A first command's job has failed, and part of it is still in the queue."""
    program = (
        "import os, sys, time; n = sys.argv[1]; first = os.environ['HPCML_ATTEMPT'] == '1'\n"
        "if n == '0' and first: sys.exit('not yet')\n"
        f"while not os.path.exists({str(login.folder / 'go')!r}): time.sleep(0.2)"
    )
    recipe = write(login, [sys.executable, "-c", program, "{{ params.n }}"])
    login("sweep", recipe)
    wait_until(lambda: "failed" in states(login, "first"), 60)
    again = login.start("sweep", recipe, "--wait")
    wait_until(lambda: states(login, "first") == ["running"] * 2, 60)
    (login.folder / "go").touch()
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, out + err
    assert (login.folder / "began").exists()


@pytest.fixture
def forgetful(slurm_cluster: SlurmCluster) -> Iterator[None]:
    """The controller forgets jobs as soon as they have ended."""
    path = Path("/etc/slurm/slurm.conf")
    before = path.read_text()
    path.write_text(before + "MinJobAge=2\n")
    slurm_cluster.run("scontrol", "reconfigure")
    yield
    path.write_text(before)
    slurm_cluster.run("scontrol", "reconfigure")


@pytest.mark.slurm_alone
@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("program", ["true", "false"])
def test_the_job_before_is_forgotten(login: LoginNode, program: str) -> None:
    """It ends, and is forgotten, before the next one is submitted.

    Slurm takes what it has forgotten for a success.
    """
    jobs = login.folder / "jobs"
    login.wrap(
        "sbatch",
        f'case "$*" in *--dependency=*:*)\n'
        f"  while scontrol show job $(head -1 {jobs}); do sleep 0.5; done > /dev/null 2>&1;;\n"
        f'esac\n"$REAL" "$@" | tee -a {jobs}\n',
    )
    done = program == "true"
    login("sweep", write(login, [program]), "--wait", code=0 if done else 1)
    assert len(jobs.read_text().split()) == 2
    wait_until(lambda: states(login, "second") == ["done" if done else "failed"], 60)
    assert (login.folder / "began").exists() == done
    if not done:
        assert "is not complete" in reason(login, "second")
        return
    # Given again much later, there is nothing to wait for.
    (second,) = login.folder.glob("runs/study.second/*/cells/*")
    (second / "result.json").unlink()
    login.unwrap()
    log = login.folder / "calls"
    login.wrap("sbatch", f'echo "$@" >> {log}\n"$REAL" "$@"\n')
    (second / "events.jsonl").unlink()
    login("sweep", login.folder / "study.yaml", "--wait")
    (call,) = log.read_text().splitlines()
    assert "--dependency" not in call
    assert states(login, "second") == ["done"]
