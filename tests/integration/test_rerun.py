"""`hpcml rerun` of cells on this machine, without the recipe that made them."""

from __future__ import annotations

import json
import sys

from tests.conftest import Hpcml

SCRIPT = """
import os, pathlib, sys
import hpcml

state = pathlib.Path(os.environ["HPCML_CHECKPOINTS"], "state")
step = int(state.read_text()) if state.exists() else 0
state.write_text(str(step + 1))
hpcml.report(step=step + 1, loss=step)
sys.exit(os.path.exists(sys.argv[1]))
"""


def flaky(hpcml: Hpcml) -> None:
    """A sweep of three cells of which the second fails while ``broken2`` is there."""
    script = hpcml.write("script.py", SCRIPT)
    (hpcml.folder / "broken2").touch()
    recipe = hpcml.write(
        "recipe.yaml",
        "name: flaky\nkind: command\nsweep: {grid: {n: [1, 2, 3]}}\nobjective: {metric: loss}\n"
        f"command: {{run: [{sys.executable}, script.py, "
        f"'{hpcml.folder}/broken{{{{ params.n }}}}']}}\n",
    )
    hpcml("sweep", recipe, code=1)
    recipe.unlink()
    script.unlink()


def test_failed_cells_run_again_without_their_recipe(hpcml: Hpcml) -> None:
    flaky(hpcml)
    assert hpcml("rerun", "flaky", "--failed", code=1).returncode == 1
    (hpcml.folder / "broken2").unlink()
    hpcml("rerun", "flaky", "--failed")
    cells = hpcml.status()["cells"]
    assert [cell["state"] for cell in cells] == ["done"] * 3
    assert [cell["attempts"] for cell in cells] == [1, 3, 1]
    assert [cell["step"] for cell in cells] == [1, 3, 1]  # it went on from what it had
    assert "has failed" in hpcml("rerun", "flaky", "--failed").stdout
    assert len(list((hpcml.run_folder() / "code").iterdir())) == 1
    # Of equal cells the first is the best; the others' states can go then.
    hpcml("clean", "flaky")
    folder = hpcml.run_folder() / "cells"
    assert len(list(folder.glob("*/checkpoints/state"))) == 3
    assert "freed" in hpcml("clean", "flaky", "--yes").stdout
    assert list(folder.glob("*/checkpoints/state")) == [
        folder / cells[0]["id"] / "checkpoints" / "state"
    ]
    assert hpcml.status()["cells"] == cells


def test_a_cell_that_is_done_begins_anew_when_that_is_said(hpcml: Hpcml) -> None:
    flaky(hpcml)
    said = hpcml("rerun", "flaky", "--cell", "0", code=2).stderr
    assert "cell 0 (n=1) is done; with --from-scratch" in said
    assert "say which cells" in hpcml("rerun", "flaky", code=2).stderr
    hpcml("rerun", "flaky", "--cell", "0", "--from-scratch", code=1)  # cell 1 is still failed
    cells = hpcml.status()["cells"]
    assert [cell["state"] for cell in cells] == ["done", "failed", "done"]
    assert [cell["attempts"] for cell in cells] == [2, 1, 1]
    assert [cell["step"] for cell in cells] == [1, 1, 1]
    folder = hpcml.run_folder() / "cells" / cells[0]["id"]
    assert (folder / "set-aside-1" / "checkpoints" / "state").read_text() == "1"
    old, new = (json.loads((folder / at / "result.json").read_text()) for at in ("set-aside-1", ""))
    assert (old["attempts"], new["attempts"]) == (1, 2)
    told = hpcml("why", "flaky", "0").stdout
    assert "begins anew; what it had is in set-aside-1" in told
