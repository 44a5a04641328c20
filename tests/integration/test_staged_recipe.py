"""Stages on this machine: one command, one run each, results handed on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.conftest import Hpcml

RECIPE = """
name: chain
stages:
  first:
    kind: command
    sweep: {{grid: {{x: [3, 1, 2]}}}}
    objective: {{metric: loss}}
    command: {{run: [{python}, first.py, "{{{{ params.x }}}}"]}}
  second:
    needs: [first]
    kind: command
    command:
      run:
        - {python}
        - second.py
        - "{{{{ stages.first.best.params.x }}}}"
        - "{{{{ stages.first.best.metrics.loss }}}}"
        - "{{{{ stages.first.run }}}}"
"""


def write(hpcml: Hpcml) -> Path:
    hpcml.write(
        "first.py",
        "import os, sys, hpcml\nx = int(sys.argv[1])\n"
        "if os.path.exists(f'{os.environ[\"HOME\"]}/break'): sys.exit('broken')\n"
        "hpcml.report(loss=(x - 1.5) ** 2 + x / 100)\n",
    )
    hpcml.write("second.py", "import json, sys; print(json.dumps(sys.argv[1:]))")
    hpcml.environment["HOME"] = str(hpcml.folder)
    return hpcml.write("recipe.yaml", RECIPE.format(python=sys.executable))


def test_a_later_stage_gets_the_results_of_an_earlier_one(hpcml: Hpcml) -> None:
    hpcml("sweep", write(hpcml))
    (out,) = hpcml.folder.glob("runs/chain.second/*/cells/*/log.1.out")
    (first,) = hpcml.folder.glob("runs/chain.first/*")
    assert json.loads(out.read_text()) == ["1", "0.26", str(first)]


def test_a_stage_waits_for_what_failed_and_goes_on_afterwards(hpcml: Hpcml) -> None:
    recipe = write(hpcml)
    (hpcml.folder / "break").touch()
    said = hpcml("sweep", recipe, code=1)
    assert "chain.second not begun" in said.stderr
    assert not (hpcml.folder / "runs" / "chain.second").exists()
    (hpcml.folder / "break").unlink()
    hpcml("sweep", recipe)
    assert hpcml.status("chain.second")["states"] == {"done": 1}


def test_a_moved_runs_root_still_has_the_results(hpcml: Hpcml) -> None:
    recipe = write(hpcml)
    hpcml("sweep", recipe)
    (second,) = hpcml.folder.glob("runs/chain.second/*/cells/*")
    (second / "result.json").unlink()
    (second / "events.jsonl").unlink()
    (hpcml.folder / "runs").rename(hpcml.folder / "moved")
    hpcml("sweep", recipe, "--root", hpcml.folder / "moved")
    (out,) = hpcml.folder.glob("moved/chain.second/*/cells/*/log.1.out")
    assert "moved/chain.first" in out.read_text().splitlines()[-1]
