"""States, derived from what the cells left."""

from __future__ import annotations

import fcntl
import json
import math
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcml.runs import liveness, status
from hpcml.runs.cancel import cancel_cell
from hpcml.runs.folder import RunFolder
from hpcml.runs.status import CellState, Watcher, collect, with_pending
from tests.unit.runs.fakes import START, FakeRun, make_cells


@pytest.fixture
def fake(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path, make_cells(4))


def only(fake: FakeRun) -> CellState:
    """Cell 0 as a fresh look at the folder shows it."""
    return collect(RunFolder.open(fake.folder.path)).cells[0]


def test_a_new_run_is_pending(fake: FakeRun) -> None:
    found = collect(fake.folder)
    assert found.counts() == {"pending": 4}
    assert found.cells == {}
    states = list(with_pending(fake.folder, found))
    assert [(cell.index, cell.state) for cell in states] == [(i, "pending") for i in range(4)]
    assert states[2].params == fake.cells[2]["params"]


def test_a_folder_without_events_is_pending(fake: FakeRun) -> None:
    fake.dir(0)
    (fake.folder.cells_dir / "not-a-cell").mkdir()
    assert collect(fake.folder).counts() == {"pending": 4}


@pytest.mark.parametrize(
    ("cause", "state"),
    [
        ("done", "done"),
        ("stopped", "stopped"),
        ("application", "failed"),
        ("oom", "failed"),
        ("killed", "failed"),
        ("no_progress", "failed"),
        ("lost", "lost"),
        ("a cause of a later version", "failed"),
    ],
)
def test_the_cause_decides(fake: FakeRun, cause: str, state: str) -> None:
    fake.start(0)
    fake.end(0, cause, reason="because")
    assert only(fake).state == state
    assert only(fake).reason == (None if state == "done" else "because")


@pytest.mark.parametrize(
    ("chosen", "cancelled", "seen"),
    [
        (None, False, ("pending", "rung 1 is done, waits for rung 2")),
        ([1, 0], False, ("pending", "rung 1 is done, waits for rung 2")),
        ([1, 2], False, ("dropped", "dropped at rung 1")),
        (None, True, ("stopped", "cancelled")),
        ([1, 0], True, ("stopped", "cancelled")),
        ([1, 2], True, ("dropped", "dropped at rung 1")),
    ],
)
def test_a_cell_that_is_through_with_its_rung(
    fake: FakeRun, chosen: list[int] | None, cancelled: bool, seen: tuple[str, str]
) -> None:
    fake.folder.plan["halving"] = {"cells": [4, 2], "steps": [1, 2]}
    fake.start(0, rung=1)
    fake.end(0, "rung")
    if cancelled:
        fake.event(0, "cancelled", 30)
    if chosen is not None:
        (fake.folder.path / "rungs").mkdir()
        (fake.folder.path / "rungs" / "2.json").write_text(json.dumps({"cells": chosen}))
    cell = collect(fake.folder).cells[0]
    assert (cell.state, cell.reason) == seen


def test_a_cell_carries_what_its_files_say(fake: FakeRun) -> None:
    fake.start(0, 5)
    fake.metrics(
        0, {"step": 1, "total_steps": 9, "loss": 3.0}, {"step": 2, "tokens_per_second": 7.5}
    )
    fake.checkpoint(0, 2)
    fake.end(0, "stopped", 25)
    cell = only(fake)
    assert cell.id == "c00000"
    assert cell.params == fake.cells[0]["params"]
    assert cell.metrics == {"loss": 3.0}
    assert (cell.step, cell.total_steps, cell.tokens_per_second) == (2, 9, 7.5)
    assert (cell.attempts, cell.checkpoint_step) == (1, 2)
    assert (cell.started, cell.ended) == (START + 5, START + 25)


def test_a_step_that_is_no_number_is_no_error(fake: FakeRun) -> None:
    fake.start(0)
    fake.metrics(0, {"step": math.nan, "total_steps": math.inf, "loss": math.nan})
    fake.end(0, "stopped")
    cell = only(fake)
    assert (cell.step, cell.total_steps) == (None, None)
    assert math.isnan(cell.metrics["loss"])


def test_a_living_attempt_is_running(fake: FakeRun) -> None:
    fake.start(0)
    with fake.alive(0):
        assert only(fake).state == "running"
    assert only(fake).state == "lost"


def test_the_lock_outweighs_the_process_id(fake: FakeRun) -> None:
    # What the worker started may outlive it, and holds its lock.
    fake.start(0, pid=2**22 + 1)
    with fake.alive(0):
        assert only(fake).state == "running"
    # A process id may be another program's by now.
    fake.start(1, pid=os.getpid())
    assert collect(fake.folder).cells[1].state == "lost"


def test_a_child_of_a_dead_worker_still_runs(fake: FakeRun) -> None:
    fake.start(0)
    with (fake.dir(0) / "events.jsonl").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        child = subprocess.Popen(["sleep", "60"], pass_fds=[lock.fileno()])
    try:
        assert only(fake).state == "running"
    finally:
        child.kill()
        child.wait()
    assert only(fake).state == "lost"


def test_looking_does_not_keep_the_lock(fake: FakeRun) -> None:
    fake.start(0)
    watcher = Watcher(fake.folder)
    watcher.refresh()
    with (fake.dir(0) / "events.jsonl").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_without_locks_the_process_decides(fake: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(liveness.fcntl, "flock", no_locks)
    fake.start(0, pid=os.getpid())
    assert only(fake).state == "running"
    fake.start(0, attempt=2, pid=2**22 + 1)
    assert only(fake).state == "lost"
    fake.start(0, attempt=3, pid="unknown")
    assert only(fake).state == "running"


def test_another_machine_is_asked_about(fake: FakeRun) -> None:
    fake.start(0, host="node17", job="12_3")
    cell = only(fake)
    assert cell.state == "running"
    assert cell.reason == "on node17, not verifiable from here"
    asked = []

    def answer(alive: bool | None) -> Callable[[object], bool | None]:
        return lambda started: (asked.append(started), alive)[1]

    assert collect(fake.folder, answer(True)).cells[0].reason is None
    assert collect(fake.folder, answer(False)).cells[0].state == "lost"
    assert collect(fake.folder, answer(None)).cells[0].state == "running"
    assert asked[0]["job"] == "12_3"


def test_a_result_without_a_last_word_is_done(fake: FakeRun) -> None:
    fake.start(0)
    fake.metrics(0, {"loss": 1.0})
    (fake.dir(0) / "result.json").write_text(json.dumps({"metrics": {"loss": 1.0}, "step": None}))
    assert only(fake).state == "done"
    assert only(fake).metrics == {"loss": 1.0}


def test_the_metrics_of_a_done_cell_come_from_its_result(fake: FakeRun) -> None:
    fake.done(0, loss=1.0)
    result = {"metrics": {"loss": 0.5, "total_steps": 10, "note": "text"}, "step": 10}
    (fake.dir(0) / "result.json").write_text(json.dumps(result))
    assert only(fake).metrics == {"loss": 0.5}
    assert (only(fake).step, only(fake).total_steps) == (10, 10)
    for damaged in ("", "{", "[]", "{}", '{"metrics": 3, "step": 1}', '{"metrics": {}}'):
        (fake.dir(0) / "result.json").write_text(damaged)
        assert only(fake).metrics == {"loss": 1.0}


def test_an_attempt_that_ends_between_two_looks_is_not_lost(
    fake: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.start(0)

    def ends_now(*_: object) -> bool:
        fake.end(0, "done")
        return False

    monkeypatch.setattr(status, "is_alive", ends_now)
    assert only(fake).state == "done"


def test_a_request_to_stop_shows(fake: FakeRun) -> None:
    fake.start(0)
    fake.event(0, "signal", attempt=1, signal="USR1")
    with fake.alive(0):
        assert only(fake).reason == "asked to stop (USR1)"


def test_a_lead_that_is_too_short_shows(fake: FakeRun) -> None:
    fake.start(0)
    fake.event(0, "short_lead", saving=95.3, lead=60)
    with fake.alive(0):
        reason = only(fake).reason
    assert reason is not None
    assert "95 s" in reason
    assert "60 s" in reason


def test_attempts_follow_each_other(fake: FakeRun) -> None:
    fake.start(0, 0)
    fake.checkpoint(0, 50)
    fake.end(0, "stopped", 10)
    fake.start(0, 20, attempt=2)
    fake.end(0, "application", 30, attempt=2)
    fake.start(0, 40, attempt=3)
    with fake.alive(0):
        cell = only(fake)
    assert (cell.state, cell.attempts, cell.ended) == ("running", 3, None)
    assert cell.started == START


class TestCancelled:
    def test_a_pending_cell(self, fake: FakeRun) -> None:
        cancel_cell(fake.folder, "c00000")
        cell = only(fake)
        assert (cell.state, cell.reason, cell.cancelled) == ("stopped", "cancelled", True)
        # An attempt that begins in this moment sees it.
        assert (fake.dir(0) / "stop").exists()

    def test_a_running_cell(self, fake: FakeRun) -> None:
        fake.start(0)
        with fake.alive(0):
            cancel_cell(fake.folder, "c00000")
            assert only(fake).state == "running"
            assert "about to stop" in (only(fake).reason or "")
        assert (fake.dir(0) / "stop").exists()
        fake.end(0, "stopped", reason="asked to stop (stop file), saved at step 3")
        assert (only(fake).state, only(fake).reason) == ("stopped", "cancelled")

    def test_a_cell_that_was_done_first(self, fake: FakeRun) -> None:
        fake.start(0)
        cancel_cell(fake.folder, "c00000")
        fake.end(0, "done")
        assert only(fake).state == "done"

    def test_a_cell_that_a_new_command_started_again(self, fake: FakeRun) -> None:
        cancel_cell(fake.folder, "c00000")
        fake.start(0)
        fake.end(0, "stopped", reason="saved")
        assert (only(fake).cancelled, only(fake).reason) == (False, "saved")


class TestTimeLeft:
    @pytest.fixture(autouse=True)
    def _beginning_at_zero(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(time, "time", lambda: START + 100)

    def report(self, fake: FakeRun, index: int, step: int, at: float) -> None:
        fake.metrics(index, {"step": step, "total_steps": 200})
        os.utime(fake.dir(index) / "metrics.jsonl", (START + at, START + at))

    def test_of_a_cell_comes_from_its_speed(self, fake: FakeRun) -> None:
        fake.start(0)
        self.report(fake, 0, 100, at=90)
        with fake.alive(0):
            # 0.9 s per step, 100 steps, and 10 s have passed since.
            assert only(fake).eta_seconds == pytest.approx(80)

    def test_counts_only_the_steps_of_this_attempt(self, fake: FakeRun) -> None:
        fake.start(0, -1000)
        fake.checkpoint(0, 100)
        fake.end(0, "stopped", -500)
        fake.start(0, 0, attempt=2)
        with fake.alive(0):
            self.report(fake, 0, 100, at=-500)
            assert only(fake).eta_seconds is None
            self.report(fake, 0, 150, at=100)
            assert only(fake).eta_seconds == pytest.approx(100)

    def test_of_the_run_counts_the_waiting_cells(self, fake: FakeRun) -> None:
        fake.start(0)
        self.report(fake, 0, 100, at=100)
        with fake.alive(0):
            # 100 s for this one, and 200 s for each of the three others.
            assert collect(fake.folder).eta_seconds == pytest.approx(700)
            fake.done(1, seconds=50)
            assert collect(fake.folder).eta_seconds == pytest.approx(200)

    def test_of_the_run_is_unknown_without_steps(self, fake: FakeRun) -> None:
        assert collect(fake.folder).eta_seconds is None
        fake.start(0)
        with fake.alive(0):
            assert collect(fake.folder).eta_seconds is None
            for index in (1, 2, 3):
                fake.failed(index)
            assert collect(fake.folder).eta_seconds is None


def test_a_watcher_reads_only_what_is_new(fake: FakeRun) -> None:
    watcher = Watcher(fake.folder)
    assert watcher.refresh().counts() == {"pending": 4}
    fake.start(2)
    with fake.alive(2):
        fake.metrics(2, {"step": 1, "loss": 2.0, "accuracy": 0.5})
        assert watcher.refresh().cells[2].metrics == {"loss": 2.0, "accuracy": 0.5}
        fake.metrics(2, {"step": 2, "loss": 1.0})
        # What was read stays known, even when it can no longer be read.
        content = (fake.dir(2) / "metrics.jsonl").read_bytes()
        cut = content.index(b"\n")
        (fake.dir(2) / "metrics.jsonl").write_bytes(b" " * cut + content[cut:])
        assert watcher.refresh().cells[2].metrics == {"loss": 1.0, "accuracy": 0.5}
    fake.end(2, "done")
    assert watcher.refresh().counts() == {"pending": 3, "done": 1}


def test_a_watcher_of_one_cell_reads_no_other(fake: FakeRun) -> None:
    fake.done(0)
    fake.done(1)
    assert list(Watcher(fake.folder, only="c00001").refresh().cells) == [1]
    assert Watcher(fake.folder, only="c00003").refresh().cells == {}


def test_between_an_attempt_and_its_retry_a_cell_has_not_failed(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path, make_cells(1))
    fake.start(0)
    fake.event(0, "ended", attempt=1, code=1, cause="application", reason="boom", again=True)
    state = collect(fake.folder).cells[0]
    assert state.state == "pending"
    assert state.reason == "tries again after: boom"


def test_the_docs_explain_each_state() -> None:
    page = (Path(__file__).parents[3] / "docs" / "slurm.md").read_text(encoding="utf-8")
    assert {state for state in status.STATES if f"\n| `{state}` | " not in page} == set()
