"""The commands, called in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpcml.cli import hpcml_command
from tests.unit.runs.fakes import FakeRun, make_cells

Invoke = Callable[..., Result]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for runs, known by the environment; terminals are 100 columns wide."""
    monkeypatch.setenv("HPCML_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path / "runs"


@pytest.fixture
def invoke(root: Path) -> Invoke:
    """Call ``hpcml`` with arguments; errors of any kind are raised."""

    def call(*arguments: object) -> Result:
        return CliRunner().invoke(
            hpcml_command, list(map(str, arguments)), catch_exceptions=False, standalone_mode=False
        )

    return call


@pytest.fixture
def fake(root: Path) -> FakeRun:
    """A run of five cells: two done, one failed, one that was asked to stop, one pending."""
    run = FakeRun(root, make_cells(5), objective={"metric": "loss", "mode": "min"}, kind="train")
    run.done(0, loss=2.0)
    run.done(1, loss=1.0)
    run.failed(2, "exit code 1: [bold]boom[/bold]")
    run.start(3)
    run.metrics(3, {"step": 40, "total_steps": 100, "loss": 4.21, "tokens_per_second": 12345.6})
    run.end(3, "stopped", reason="asked to stop (USR1), saved at step 40")
    return run
