"""A search on a real Slurm: rounds follow one another, and nobody watches."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.conftest import wait_until
from tests.integration.slurm.conftest import SITE, LoginNode

PROGRAM = (
    "import os, sys, hpcml; x = float(sys.argv[1]); n = int(os.environ['HPCML_CELL_INDEX']); "
    "assert n != 1 or os.path.exists(os.environ['MENDED']); hpcml.report(loss=(x - 1) ** 2)"
)
SEARCH = {"metric": "loss", "params": {"x": {"uniform": [-9, 9]}}}


def search(login: LoginNode, name: str, mended: Path, **keys: Any) -> Path:
    return login.recipe(
        name,
        [sys.executable, "-c", PROGRAM, "{{ params.x }}"],
        [],
        sweep={"search": {**SEARCH, **keys}},
        env={"MENDED": str(mended)},
    )


def test_rounds_propose_their_cells_when_they_begin(login: LoginNode, tmp_path: Path) -> None:
    mended = login.folder / "mended"
    recipe = search(login, "sought", mended, rounds=3, cells=3)
    said = login("sweep", recipe)
    assert "round 3 of 3: 3 cells, when the one before is over" in said.stderr
    run = login.run_folder()
    # What the first round tries is known at once, and of the others nothing.
    assert [path.name for path in (run / "rounds").iterdir()] == ["1.json"]
    # What is queued goes on by itself: the command given again adds nothing.
    again = login("sweep", recipe, "--wait", code=1)
    assert "0 left to run" in again.stderr, again.stderr
    wait_until(lambda: login.status("sought")["states"] == {"failed": 1, "done": 8}, 60, "the end")
    assert len(login.journal()) == 3
    first, second, third = (
        json.loads((run / "rounds" / f"{number}.json").read_text()) for number in (1, 2, 3)
    )
    losses = [[(cell["x"] - 1) ** 2 for cell in found["cells"]] for found in (first, second)]
    losses[0][1] = None
    assert second["from"] == losses[:1]
    assert third["from"] == losses
    cells = login.status("sought")["cells"]
    tried = [params for found in (first, second, third) for params in found["cells"]]
    assert [cell["params"] for cell in cells] == tried
    # The one that failed gets another try, with the same parameters.
    mended.touch()
    login("sweep", recipe, "--wait")
    assert login.status("sought")["states"] == {"done": 9}
    assert [cell["params"] for cell in login.status("sought")["cells"]] == tried


def test_a_round_whose_jobs_were_lost_is_waited_for(login: LoginNode) -> None:
    """What is cancelled behind hpcml's back is no end; the later round says so and goes."""
    recipe = search(login, "waits", login.folder, rounds=2, cells=2)
    login("sweep", recipe, "--set", "slurm.sbatch={hold: true}")
    first, second = login.jobs()
    login.cluster.run("scancel", first)
    login.cluster.run("scontrol", "release", second)

    def reasons() -> set[str]:
        return {str(cell["reason"]) for cell in login.status("waits")["cells"][2:]}

    wait_until(lambda: not login.queue(), 60, "the end of the jobs")
    assert any("round 1 is not over: 2 of 2 cells are unfinished" in said for said in reasons())
    login("sweep", recipe, "--wait")
    assert login.status("waits")["states"] == {"done": 4}


IN_IMAGE = (
    "import importlib.util, sys, hpcml; assert importlib.util.find_spec('optuna') is None; "
    "hpcml.report(loss=float(sys.argv[1]) ** 2)"
)


def test_an_image_needs_no_optuna(login: LoginNode, apptainer: Path) -> None:
    site = {**SITE, "container": {"runtime": "apptainer"}}
    login.write("site_configs/cluster.yaml", yaml.safe_dump(site))
    recipe = login.recipe(
        "inside",
        ["python3", "-c", IN_IMAGE, "{{ params.x }}"],
        [],
        sweep={"search": {**SEARCH, "rounds": 2, "cells": 2}},
        container={"image": str(apptainer)},
    )
    login("sweep", recipe, "--wait")
    assert login.status("inside")["states"] == {"done": 4}
