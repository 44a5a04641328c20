"""What is said of the rungs of a halving that Slurm takes, and of those that it refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Invoke

COMMANDS = {
    "sbatch": "[ ! -e first ] || { echo QOSMaxSubmitJobPerUserLimit >&2; exit 1; }\n"
    "touch first; echo 7",
    "squeue": "",
}


def test_the_jobs_of_the_rungs_before_a_refused_one_are_named(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in COMMANDS.items():
        (programs / name).write_text(f"#!/bin/sh\ncd {tmp_path}\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    (tmp_path / "here.yaml").write_text("name: here\nscheduler: slurm\n")
    (tmp_path / "r.yaml").write_text(
        "name: t\nkind: command\nsweep: {grid: {a: [1, 2, 3, 4]}, "
        "halving: {metric: loss, factor: 2, rungs: 2, steps: 8}}\ncommand: {run: ['true']}\n"
    )
    done = invoke("sweep", tmp_path / "r.yaml", "--site", tmp_path / "here.yaml")
    assert done.return_value == 1
    assert done.stdout == "submitted as 7\n"
    assert "QOSMaxSubmitJobPerUserLimit" in done.stderr
