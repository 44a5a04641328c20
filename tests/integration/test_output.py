"""Cells run to their end also where nothing can be printed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Hpcml

RECIPE = """
name: t
kind: command
sweep: {grid: {a: [1, 2, 3]}}
objective: {metric: loss}
command: {run: [sh, -c, 'sleep 0.3; echo "{\\"loss\\": 1}" >> $HPCML_METRICS']}
"""


# Who may read everything cannot see what others see.
NOT_ROOT = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []


@pytest.mark.parametrize("lost", [">/dev/full", "2>/dev/full", ">&-", ">&- 2>&-", "| head -n 1"])
def test_output_that_is_lost_stops_no_cell(hpcml: Hpcml, lost: str) -> None:
    hpcml.write("recipe.yaml", RECIPE)
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{sys.executable} -m hpcml sweep recipe.yaml {lost}"],
        cwd=hpcml.folder,
        env=hpcml.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert {cell["state"] for cell in hpcml.status()["cells"]} == {"done"}


@pytest.mark.skipif(not all(map(shutil.which, NOT_ROOT[:1])), reason="needs setpriv")
@pytest.mark.parametrize("root", ["locked/sub", "x" * 300, "file/sub"])
def test_a_place_that_cannot_be_is_one_message(hpcml: Hpcml, tmp_path: Path, root: str) -> None:
    hpcml.write("recipe.yaml", RECIPE)
    hpcml.write("file", "")
    (tmp_path / "locked").mkdir(mode=0)
    for command in (["sweep", "recipe.yaml", "--root", root], ["status", root]):
        result = subprocess.run(
            [*NOT_ROOT, sys.executable, "-m", "hpcml", *command],
            cwd=hpcml.folder,
            env=hpcml.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 2, result.stderr
        assert result.stderr.startswith("hpcml: ")
        assert "Traceback" not in result.stderr
