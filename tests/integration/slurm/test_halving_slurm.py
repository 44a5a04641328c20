"""Successive halving on a real Slurm: a chain of arrays, and nobody who watches."""

from __future__ import annotations

import sys
from typing import Any

from tests.conftest import wait_until
from tests.integration.slurm.conftest import LoginNode

PROGRAM = (
    "import os, hpcml; at = os.environ['HPCML_CHECKPOINTS'] + '/step'; "
    "begun = int(open(at).read()) if os.path.exists(at) else 0; "
    "end = int(os.environ['HPCML_STEPS']); "
    "n = int(os.environ['N']); assert n != 7; "
    "hpcml.report(step=end, loss=n / end, begun=begun); open(at, 'w').write(str(end))"
)


def test_later_rungs_choose_their_cells_when_they_begin(login: LoginNode) -> None:
    sweep: dict[str, Any] = {
        "grid": {"n": list(range(9))},
        "halving": {"metric": "loss", "mode": "max", "steps": 9},
    }
    recipe = login.recipe(
        "halved", [sys.executable, "-c", PROGRAM], [], sweep=sweep, env={"N": "{{ params.n }}"}
    )
    login("sweep", recipe)
    states = {"failed": 1, "dropped": 7, "done": 1}
    # What is queued goes on by itself: the command given again adds nothing.
    again = login("sweep", recipe, "--wait", code=1)
    assert ": 0 cells to step" in again.stderr, again.stderr
    wait_until(lambda: login.status("halved")["states"] == states, 60, "the last rung")
    cells = login.status("halved")["cells"]
    (best,) = [cell for cell in cells if cell["state"] == "done"]
    assert best["params"] == {"n": 8}
    assert best["metrics"]["begun"] == 3
    second = [cell["index"] for cell in cells if cell["reason"] == "dropped at rung 2"]
    assert second == [5, 6]
    assert len(login.journal()) == 3
