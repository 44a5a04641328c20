"""`hpcml rerun`: which cells it takes, and that a kill loses nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpcml.errors import UserError
from hpcml.launch import submit
from hpcml.launch.slurm import states
from hpcml.launch.slurm.query import Queue
from hpcml.plan import Submission, compile_plan
from hpcml.recipe.load import load_recipe
from hpcml.runs.anew import begin_anew
from hpcml.runs.folder import RunFolder
from hpcml.runs.status import collect
from hpcml.site.search import load_site
from tests.unit.cli.conftest import Invoke
from tests.unit.runs.fakes import FakeRun

BAR = "\x1f"


class Killed(BaseException):
    """The command ends here."""


@pytest.fixture
def on_slurm(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run of four cells: 0 and 1 failed, 2 waits in job 12, 3 is in no queue."""
    (tmp_path / "recipe.yaml").write_text(
        "name: toy\nkind: command\nsweep: {grid: {n: [1, 2, 3, 4]}}\ncommand: {run: [x]}\n"
    )
    (tmp_path / "site.yaml").write_text("name: x\nscheduler: slurm\n")
    plan = compile_plan(load_recipe(tmp_path / "recipe.yaml"), load_site(tmp_path / "site.yaml"))
    run = submit.create_run(plan)
    submission = submit.next_submission(plan)
    (run.path / submission.code).mkdir(parents=True)
    record = {"created": "2026-01-01T00:00:00.000+00:00", **submission.record()}
    run.write_submission(record)
    what = {"submission": 1, "part": 0, "link": 0, "offset": 0, "tasks": 4}
    run.journal("submitted", **what, job=12, cluster=None)
    for index in (0, 1):
        folder = run.cell_dir(plan.cells[index].id)
        folder.mkdir()
        time = "2026-01-01T00:00:01.000+00:00"
        began = {"time": time, "event": "started", "attempt": 1, "host": "n1", "job": "12_0"}
        ended = {"time": time, "event": "ended", "attempt": 1, "cause": "oom", "code": 71}
        lines = [json.dumps({**event, "submission": 1}) for event in (began, ended)]
        (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    queue = Queue([BAR.join(["12_2", "PENDING", "Priority", "/x/001.sh 0"])])
    monkeypatch.setattr(states, "queue", lambda *_: queue)
    monkeypatch.setattr(states, "accounting", lambda *_: {})
    monkeypatch.setattr(submit, "queue", lambda *_: queue)
    return run


def test_the_failed_ones_are_submitted_and_no_others(
    on_slurm: RunFolder, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Submission] = []

    def take(submission: Submission, *_: Any) -> list[str]:
        given.append(submission)
        return ["13"]

    monkeypatch.setattr(submit, "submit_to_cluster", take)
    out = invoke("rerun", "toy", "--failed").output
    assert "2 of 4 cells again on site x" in out
    assert "submitted as 13" in out
    invoke("rerun", "toy", "--cell", "3")
    assert [submission.indices for submission in given] == [(0, 1), (3,)]
    assert {submission.code for submission in given} == on_slurm.codes()
    assert {submission.plan.site.name for submission in given} == {"x"}


def test_what_is_queued_is_refused(on_slurm: RunFolder, invoke: Invoke) -> None:
    with pytest.raises(UserError, match=r"cell 2 \(n=3\) is queued; wait .* hpcml cancel toy.* 2"):
        invoke("rerun", "toy", "--failed", "--cell", "2", "--from-scratch")
    assert on_slurm.next_submission() == 2
    assert not list(on_slurm.path.glob("cells/*/set-aside-*"))


def test_without_its_code_nothing_is_set_aside(on_slurm: RunFolder, invoke: Invoke) -> None:
    next((on_slurm.path / "code").iterdir()).rmdir()
    with pytest.raises(UserError, match="has no copy of its code"):
        invoke("rerun", "toy", "--failed", "--from-scratch")
    assert not list(on_slurm.path.glob("cells/*/set-aside-*"))


def test_a_halving_is_refused(fake: FakeRun, invoke: Invoke) -> None:
    fake.folder.plan_file.write_text(json.dumps({**fake.folder.plan, "halving": {"steps": [1]}}))
    with pytest.raises(UserError, match="give hpcml sweep with its recipe again"):
        invoke("rerun", "toy", "--failed")


class TestAnew:
    @pytest.fixture
    def whole(self, fake: FakeRun) -> Path:
        fake.checkpoint(0, 10)
        (fake.dir(0) / "result.json").write_text('{"metrics": {"loss": 2.0}, "step": 10}')
        return fake.dir(0)

    @pytest.mark.parametrize("renames", range(4))
    def test_a_kill_loses_nothing(
        self, fake: FakeRun, whole: Path, monkeypatch: pytest.MonkeyPatch, renames: int
    ) -> None:
        rename, left = os.rename, [renames]

        def until(*paths: Any) -> None:
            if not left[0]:
                raise Killed
            left[0] -= 1
            rename(*paths)

        def have() -> set[str]:
            found = [*whole.glob("*"), *whole.glob("set-aside-*/*")]
            return {path.name for path in found if not path.name.startswith("set-aside")}

        before = have()
        with monkeypatch.context() as patch:
            patch.setattr("hpcml.runs.anew.os.rename", until)
            if renames < 3:
                with pytest.raises(Killed):
                    begin_anew(fake.folder, "c00000")
            else:
                begin_anew(fake.folder, "c00000")
        assert have() == before
        # It counts as done exactly as long as it has its result.
        done = collect(fake.folder).cells[0].state == "done"
        assert done == (whole / "result.json").exists() == (renames == 0)
        begin_anew(fake.folder, "c00000")
        assert have() == before
        assert not any((whole / name).exists() for name in ("checkpoints", "metrics.jsonl"))
        cell = collect(fake.folder).cells[0]
        assert (cell.state, cell.step, cell.metrics) == ("pending", None, {})

    def test_not_while_it_runs(self, fake: FakeRun, whole: Path) -> None:
        with fake.alive(0), pytest.raises(UserError, match="is running"):
            begin_anew(fake.folder, "c00000")
        assert (whole / "result.json").exists()

    def test_a_later_stage_keeps_it(self, root: Path, fake: FakeRun) -> None:
        from hpcml.runs.find import builders_on

        later = FakeRun(root, fake.cells, name="toy-later")
        assert builders_on(fake.folder) == []
        plan = {**later.folder.plan, "needs": ["toy/abc123"]}
        later.folder.plan_file.write_text(json.dumps(plan))
        assert [run.name for run in builders_on(fake.folder)] == ["toy-later"]
