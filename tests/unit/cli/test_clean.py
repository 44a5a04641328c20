"""`hpcml clean`: what goes, what stays, and that a kill does no harm."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hpcml.runs import waste
from tests.unit.cli.conftest import Invoke
from tests.unit.launch.test_slurm_states import SlurmRun
from tests.unit.runs.fakes import FakeRun, make_cells


def finish(run: FakeRun, index: int, loss: float) -> None:
    """A cell that is done, with three checkpoints, of which the last is final."""
    run.done(index, loss=loss)
    result = {"metrics": {"loss": loss}, "step": 10}
    (run.dir(index) / "result.json").write_text(json.dumps(result))
    for step in (5, 8, 10):
        (run.checkpoint(index, step) / "weights").write_bytes(b"x" * 1024)
    (run.dir(index) / "checkpoints" / "final").write_text("step-10\n")
    (run.dir(index) / "checkpoints" / "best").write_text("step-8\n")


@pytest.fixture
def over(root: Path) -> FakeRun:
    """Four cells: 2 is the best, then 0, then 1; 3 failed."""
    run = FakeRun(root, make_cells(4), objective={"metric": "loss", "mode": "min"}, kind="train")
    for index, loss in enumerate((2.0, 3.0, 1.0)):
        finish(run, index, loss)
    run.failed(3)
    run.checkpoint(3, 5)
    (run.dir(3) / "checkpoints" / ".writing-6-77").mkdir()
    (run.dir(2) / "checkpoints" / "damaged-step-7-1").mkdir()
    aside = run.dir(3) / "set-aside-1"
    (aside / "checkpoints").mkdir(parents=True)
    (aside / "metrics.jsonl").touch()
    for digest in ("aaaaaaaaaa", "bbbbbbbbbb"):
        (run.folder.code / digest).mkdir(parents=True)
    run.folder.write_submission({"code": "code/bbbbbbbbbb", "created": "2026", "cells": [[0, 3]]})
    return run


def files(run: FakeRun) -> set[str]:
    found = {str(path.relative_to(run.folder.path)) for path in run.folder.path.rglob("*")}
    return found - {"driver"}


GOES = {
    "cells/c00000/checkpoints",
    "cells/c00001/checkpoints",
    "cells/c00002/checkpoints/step-5",
    "cells/c00002/checkpoints/damaged-step-7-1",
    "cells/c00003/checkpoints/.writing-6-77",
    "cells/c00003/set-aside-1/checkpoints",
    "code/aaaaaaaaaa",
}


def within(names: set[str], folders: set[str]) -> set[str]:
    return {name for name in names if any(f"{name}/".startswith(f"{top}/") for top in folders)}


def test_first_a_preview_then_it_goes(over: FakeRun, invoke: Invoke) -> None:
    before = files(over)
    said = invoke("clean", "toy").output
    assert files(over) == before
    assert "6.0 KiB  checkpoints of cells that are not the best (2 folders)" in said
    assert "Nothing was removed; --yes removes it" in said
    assert "freed 7.0 KiB" in invoke("clean", "toy", "--yes").output
    assert before - files(over) == within(before, GOES)
    assert "nothing to remove" in invoke("clean", "toy", "--yes").output


def test_more_of_the_best_can_stay(over: FakeRun, invoke: Invoke) -> None:
    before = files(over)
    invoke("clean", "toy", "--yes", "--keep", "2")
    kept = GOES - {"cells/c00000/checkpoints"} | {"cells/c00000/checkpoints/step-5"}
    assert before - files(over) == within(before, kept)


def test_while_a_cell_is_unfinished_nobody_has_lost(over: FakeRun, invoke: Invoke) -> None:
    over.start(3, attempt=2)
    over.end(3, "stopped", attempt=2)
    before = files(over)
    invoke("clean", "toy", "--yes")
    inner = {"cells/c00000/checkpoints/step-5", "cells/c00001/checkpoints/step-5"}
    lost = GOES - {"cells/c00000/checkpoints", "cells/c00001/checkpoints"} | inner
    assert before - files(over) == within(before, lost)


def test_what_runs_stays(over: FakeRun, invoke: Invoke) -> None:
    over.start(3, attempt=2)
    before = files(over)
    with over.alive(3):
        said = invoke("clean", "--yes")
    assert "stays as it is: something of it is running" in said.stderr
    assert files(over) == before


def test_what_is_queued_or_unknown_stays(
    root: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SlurmRun(root, monkeypatch)
    monkeypatch.setattr("hpcml.runs.find.find_run", lambda *_, **__: run.folder)
    run.submit(12, code="code/0123456789")
    (run.folder.code / "old").mkdir(parents=True)
    run.queue("12_3 PENDING Priority")
    assert "running or queued" in invoke("clean", "toy", "--yes").stderr
    from hpcml.launch.slurm.client import SlurmError

    run.lines = SlurmError("squeue: no answer")
    assert "squeue: no answer" in invoke("clean", "toy", "--yes").stderr
    assert (run.folder.code / "old").exists()
    run.lines = []
    invoke("clean", "toy", "--yes")
    assert not (run.folder.code / "old").exists()


def test_what_another_run_uses_stays(root: Path, over: FakeRun, invoke: Invoke) -> None:
    path = str(over.dir(1) / "checkpoints" / "step-5")
    later = FakeRun(root, make_cells(2, model=[path, path]), name="later")
    before = files(over)
    invoke("clean", "toy", "--yes")
    assert before - files(over) == within(before, GOES - {"cells/c00001/checkpoints"})
    shutil.rmtree(later.folder.path)
    stage = FakeRun(root, make_cells(1), name="stage")
    stage.folder.plan_file.write_text(json.dumps({**stage.folder.plan, "needs": ["toy/abc123"]}))
    (stage.dir(0) / "cell.json").write_text(json.dumps({"params": {"model": path}}))
    assert "nothing to remove" in invoke("clean", "toy", "--yes").output


def test_a_stage_that_takes_the_whole_run_keeps_it(
    root: Path, over: FakeRun, invoke: Invoke
) -> None:
    token = "\0toy/abc123\0run\0"
    FakeRun(root, make_cells(2, folder=[token, token]), name="later")
    before = files(over)
    invoke("clean", "toy", "--yes")
    assert before - files(over) == {"code/aaaaaaaaaa"}


@pytest.mark.parametrize("steps", range(2))
def test_a_kill_in_between_is_made_good(
    over: FakeRun, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    class Killed(BaseException):
        pass

    def killed(path: Any) -> None:
        for file in path.rglob("weights") if steps else ():
            file.unlink()
        raise Killed

    before = files(over)
    with monkeypatch.context() as patch:
        patch.setattr(waste.shutil, "rmtree", killed)
        with pytest.raises(Killed):
            invoke("clean", "toy", "--yes")
    # Half a folder of checkpoints has no name by which anybody would take it.
    assert not (over.dir(0) / "checkpoints").exists()
    invoke("clean", "toy", "--yes")
    assert before - files(over) == within(before, GOES)
    assert files(over) <= before


def test_tokenized_data_goes_when_all_is_done(root: Path, over: FakeRun, invoke: Invoke) -> None:
    (root / ".data").mkdir()
    (root / ".data" / "tokens").write_bytes(b"x" * 2048)
    assert "tokenized data" not in invoke("clean").output  # a cell failed, and may need it
    finish(over, 3, 4.0)
    over.start(3, attempt=2)
    over.end(3, "done", attempt=2)
    assert "2.0 KiB  tokenized data" in invoke("clean").output
    invoke("clean", "toy", "--yes")
    assert (root / ".data").exists()
    invoke("clean", "--yes")
    assert not (root / ".data").exists()
