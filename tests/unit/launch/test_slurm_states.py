"""States of cells from the run folder and what Slurm said, without a Slurm."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from hpcml.launch.journal import read_journal
from hpcml.launch.slurm import states
from hpcml.launch.slurm.client import SlurmError
from hpcml.launch.slurm.journal import settled, submitted_tasks
from hpcml.launch.slurm.query import Queue
from hpcml.launch.slurm.states import RELEASES, SlurmWatcher
from hpcml.launch.watch import LocalWatcher, follow, watch
from tests.unit.runs.fakes import FakeRun, make_cells

BAR = "\x1f"


def stamp(seconds_ago: float) -> str:
    moment = datetime.fromtimestamp(time.time() - seconds_ago, timezone.utc)
    return moment.isoformat(timespec="milliseconds")


class SlurmRun:
    """A run on Slurm, and what its squeue and sacct would print."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, cells: int = 4) -> None:
        self.fake = FakeRun(root, make_cells(cells))
        self.folder = self.fake.folder
        self.folder.plan["site"] = {"slurm": {"accounting": True}}
        self.lines: list[str] | Exception = []
        self.accounts: dict[tuple[int, int | None], str] = {}
        self.questions: list[object] = []
        monkeypatch.setattr(states, "queue", self._squeue)
        monkeypatch.setattr(states, "accounting", self._sacct)

    def _squeue(self, user: str, clusters: Any = ()) -> Queue:
        self.questions.append("squeue")
        if isinstance(self.lines, Exception):
            raise self.lines
        return Queue(self.lines)

    def _sacct(self, jobs: set[int], clusters: Any = ()) -> dict[tuple[int, int | None], str]:
        self.questions.append(sorted(jobs))
        return self.accounts

    def submit(
        self, *jobs: int, cells: Any = None, pack: int = 1, ago: float = 100, **fields: Any
    ) -> int:
        """A submission, as one array for each link of a chain."""
        ranges = cells or [[0, len(self.folder) - 1]]
        record = {"created": stamp(ago), "cells": ranges, "pack": pack, "scheduler": "slurm"}
        number = self.folder.write_submission({**record, **fields})
        tasks = -(-sum(last - first + 1 for first, last in ranges) // pack)
        for link, job in enumerate(jobs):
            what = {"submission": number, "part": 0, "link": link, "offset": 0, "tasks": tasks}
            self.folder.journal("submitting", **what)
            self.folder.journal("submitted", **what, job=job, cluster=None)
        return number

    def queue(self, *entries: str) -> None:
        """Lines of squeue: ``12_[0-3] PENDING Resources``."""
        self.lines = [BAR.join([*entry.split(" ", 2), "/x/001.sh 0"]) for entry in entries]

    def start(self, index: int, job: int, task: int, ago: float = 50, attempt: int = 1) -> None:
        job_id = f"{job}_{task}"
        fields = {"submission": 1, "attempt": attempt, "host": "n1", "pid": 1, "job": job_id}
        self.fake.append(
            index,
            "events.jsonl",
            {"time": stamp(ago), "event": "started", **fields},
        )

    def end(self, index: int, cause: str, ago: float = 10, reason: str = "why") -> None:
        fields = {"attempt": 1, "code": 1, "cause": cause, "reason": reason}
        self.fake.append(index, "events.jsonl", {"time": stamp(ago), "event": "ended", **fields})

    def look(self) -> SlurmWatcher:
        watcher = SlurmWatcher(self.folder)
        watcher.ask()
        return watcher

    def states(self) -> list[tuple[str, str | None]]:
        cells = self.look().refresh().cells
        return [(cells[i].state, cells[i].reason) for i in sorted(cells)]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmRun:
    return SlurmRun(tmp_path, monkeypatch)


def test_waiting_cells_have_a_reason(run: SlurmRun) -> None:
    run.submit(12)
    run.queue("12_[2-3%1] PENDING JobArrayTaskLimit", "12_1 PENDING BeginTime", "12_0 RUNNING None")
    run.start(0, 12, 0)
    run.start(1, 12, 1)
    run.end(1, "stopped", reason="saved at step 3")
    found = run.states()
    assert found[0][0] == "running"
    assert found[1][0] == "pending"
    assert found[1][1].startswith("saved at step 3; waits for its time")
    assert (
        found[2]
        == found[3]
        == (
            "pending",
            "waits for other cells, since array.max_running are running",
        )
    )
    assert run.questions == ["squeue"]


def test_a_list_that_squeue_shortened(run: SlurmRun) -> None:
    run.submit(12)
    run.queue("12_[0-1,...] PENDING Priority")
    assert [state for state, _ in run.states()] == ["pending"] * 4


def test_cells_that_left_the_queue(run: SlurmRun) -> None:
    """One cancelled before it began, one killed, one that ended well, one unknown to sacct."""
    run.submit(12)
    run.accounts = {(12, 0): "CANCELLED", (12, 1): "OUT_OF_MEMORY", (12, 2): "COMPLETED"}
    run.start(1, 12, 1)
    run.folder.tasks.joinpath("001.12_1.err").write_text("x\nslurmstepd: oom-kill event\n")
    run.start(2, 12, 2)
    run.end(2, "done")
    assert run.states() == [
        ("lost", "its job was cancelled in Slurm"),
        ("failed", "its job ran out of memory: slurmstepd: oom-kill event"),
        ("done", None),
        ("lost", "its job has left the queue"),
    ]
    assert run.questions == ["squeue", [12]]


def test_a_job_that_was_killed_for_its_memory(run: SlurmRun) -> None:
    """Slurm says so in the job's stderr, whatever sacct says; the next job of a chain knows it."""
    run.submit(12, 13)
    run.accounts = dict.fromkeys([(13, 0), (13, 1)], "FAILED")
    said = "slurmstepd: error: StepId=12.batch exceeded memory limit (9 > 8), being killed\n"
    for index in (0, 1):
        run.start(index, 12, index)
        run.folder.tasks.joinpath(f"001.12_{index}.err").write_text(said)
    run.queue("13_1 PENDING Dependency")
    words = "out of memory: StepId=12.batch exceeded memory limit (9 > 8), being killed"
    assert run.states()[:2] == [
        ("failed", words),
        ("pending", f"{words}; waits for the job before it"),
    ]


def test_without_accounting_sacct_is_not_asked(run: SlurmRun) -> None:
    run.folder.plan["site"]["slurm"]["accounting"] = False
    run.submit(12)
    assert run.states() == [("lost", "its job has left the queue")] * 4
    assert run.questions == ["squeue"]


def test_no_answer_is_said_and_nothing_guessed(run: SlurmRun) -> None:
    run.submit(12)
    run.start(0, 12, 0)
    run.lines = SlurmError("squeue: no controller")
    watcher = run.look()
    status = watcher.refresh()
    assert status.counts() == {"running": 1, "pending": 3}
    assert "not verifiable" in str(status.cells[0].reason)
    assert "no controller" in str(watcher.trouble)
    assert watcher.going(status)
    assert "no controller" in str(watcher.remove(status, {1}))


def test_a_cell_that_began_after_the_question_is_alive(run: SlurmRun) -> None:
    run.submit(12)
    run.queue("12_[0-3] PENDING Priority")
    watcher = run.look()
    run.start(0, 12, 0, ago=-1)
    assert watcher.refresh().cells[0].state == "running"
    run.start(1, 12, 1, ago=60)  # its node was lost, and Slurm has requeued it
    assert watcher.refresh().cells[1].state == "pending"


def test_a_job_of_another_kind_is_not_looked_for(run: SlurmRun) -> None:
    """A cell that a command on another machine runs, not Slurm."""
    run.submit(12, cells=[[1, 3]])
    run.start(0, 4711, 0)
    assert run.look().refresh().cells[0].state == "running"


@pytest.mark.parametrize("state", ["PREEMPTED", "REQUEUED", "REQUEUE_HOLD", "STAGE_OUT", "NEW"])
def test_a_state_that_may_come_back_is_no_end(run: SlurmRun, state: str) -> None:
    """sacct has an end of the attempt before; the queue knows better."""
    run.submit(12, cells=[[0, 0]])
    run.queue(f"12_0 {state} None")
    run.accounts = {(12, 0): "PREEMPTED"}
    run.start(0, 12, 0)
    run.end(0, "stopped", reason="saved at step 3")
    assert run.states()[0][0] == "pending"
    assert run.questions == ["squeue"]


def test_links_of_a_chain_are_one(run: SlurmRun) -> None:
    run.submit(12, 13, 14, cells=[[0, 1]])
    run.queue("12_0 RUNNING None", "13_[0-1] PENDING Dependency", "14_[0-1] PENDING Dependency")
    run.start(0, 12, 0)
    assert run.states() == [("running", None), ("pending", "waits for the job before it")]


def test_what_a_queued_task_will_run(run: SlurmRun) -> None:
    """Cells that are done, failed or cancelled are free for another submission."""
    run.submit(12, 13)
    run.queue("12_[0-3] PENDING Priority", "13_[0-3] PENDING Dependency")
    run.start(0, 12, 0)
    run.end(0, "application")
    run.fake.append(1, "events.jsonl", {"time": stamp(5), "event": "cancelled"})
    run.start(2, 12, 2)
    run.end(2, "stopped")
    watcher = run.look()
    assert watcher.taken(watcher.refresh()) == {2, 3}
    assert watcher.in_queue() == {0, 1, 2, 3}


def test_a_failed_cell_is_not_free_while_its_job_may_retry_it(run: SlurmRun) -> None:
    run.submit(12)
    run.queue("12_[0-3] RUNNING None")
    for index, ago in ((0, 1), (1, 60)):
        run.start(index, 12, index)
        run.end(index, "application", ago=ago)
    watcher = run.look()
    assert watcher.taken(watcher.refresh()) == {0, 2, 3}


def test_a_cell_submitted_after_it_was_cancelled_waits(run: SlurmRun) -> None:
    run.submit(12)
    run.fake.append(0, "events.jsonl", {"time": stamp(50), "event": "cancelled"})
    run.fake.append(1, "events.jsonl", {"time": stamp(50), "event": "cancelled"})
    run.submit(13, cells=[[0, 0]], ago=20)
    run.queue("13_0 PENDING Priority")
    found = run.states()
    assert found[0] == ("pending", "waits for jobs of higher priority")
    assert found[1] == ("stopped", "cancelled")


@pytest.mark.parametrize(
    ("pack", "cancelled", "removed"),
    [
        (1, {0, 1, 3}, ["12_[0-1,3]", "13_[0-1,3]"]),
        (2, {0}, []),
        (2, {0, 1}, ["12_[0]", "13_[0]"]),
        (4, {0, 1, 2, 3}, ["12_[0]", "13_[0]"]),
    ],
)
def test_tasks_are_removed_when_none_of_their_cells_needs_them(
    run: SlurmRun,
    monkeypatch: pytest.MonkeyPatch,
    pack: int,
    cancelled: set[int],
    removed: list[str],
) -> None:
    run.submit(12, 13, pack=pack)
    run.queue("12_[0-3] PENDING Priority", "13_[0-3] PENDING Dependency")
    calls: list[list[str]] = []
    monkeypatch.setattr(states, "run", lambda command: calls.append(command))
    watcher = run.look()
    assert watcher.remove(watcher.refresh(), cancelled) is None
    assert calls == ([["scancel", *removed]] if removed else [])


@pytest.mark.parametrize(
    ("cancelled", "removed"),
    [({0, 2}, ["12_[0,2]"]), ({0, 1, 2, 3}, ["12_[0-3]", "13_[0-1]"])],
)
def test_places_of_a_rung_are_kept_while_a_cell_may_get_them(
    run: SlurmRun, monkeypatch: pytest.MonkeyPatch, cancelled: set[int], removed: list[str]
) -> None:
    """Whichever cell it is: who has which place is decided when the rung begins."""
    run.folder.plan["halving"] = {"cells": [4, 2], "steps": [1, 2]}
    run.submit(12, rung=1)
    run.submit(13, cells=[[0, 1]], rung=2)
    run.queue("12_[0-3] PENDING Priority", "13_[0-1] PENDING Dependency")
    calls: list[list[str]] = []
    monkeypatch.setattr(states, "run", lambda command: calls.append(command))
    watcher = run.look()
    assert watcher.remove(watcher.refresh(), cancelled) is None
    assert calls == [["scancel", *removed]]


class TestHeld:
    """Tasks that Slurm holds: what could not be started is released, a person's hold is not."""

    @pytest.fixture(autouse=True)
    def scontrol(self, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
        calls: list[list[str]] = []
        monkeypatch.setattr(states, "run", lambda command: calls.append(command))
        return calls

    def test_what_nodes_could_not_start_is_released(
        self, run: SlurmRun, scontrol: list[list[str]]
    ) -> None:
        """In one call for all arrays; neither other runs' jobs nor those that run are touched."""
        run.submit(12, 13)
        run.queue(
            "12_0 PENDING launch failed requeued held",
            "12_1 PENDING launch failed requeued held",
            "12_2 COMPLETING launch failed requeued held",
            "12_3 PENDING launch failure limit exceeded requeued held.",
            "13_0 PENDING JobHoldMaxRequeue",
            "13_1 PENDING Dependency",
            "99_0 PENDING launch failed requeued held",
        )
        watcher = run.look()
        cell = watcher.refresh().cells[0]
        assert (cell.state, cell.stuck) == ("pending", True)
        assert cell.reason == (
            "is held: its node could not start it; the sweep command given again releases it"
        )
        assert watcher.release() == ["released 12_[0-1,3], 13_[0], which nodes could not start"]
        assert scontrol == [["scontrol", "release", "12_[0-1,3]", "13_[0]"]]

    def test_what_never_starts_is_not_released_for_ever(
        self, run: SlurmRun, scontrol: list[list[str]]
    ) -> None:
        """Each task has a budget of its own; a new submission has a new one."""
        run.submit(12)
        run.queue("12_0 PENDING launch failed requeued held")
        for _ in range(RELEASES):
            assert run.look().release()
        run.queue(*(f"12_{index} PENDING launch failed requeued held" for index in (0, 1)))
        assert "released 3 times in vain" in str(run.states()[0][1])
        assert run.look().release() == ["released 12_[1], which nodes could not start"]
        assert run.look().release()
        assert len(scontrol) == RELEASES + 2
        run.submit(14)
        run.queue("14_0 PENDING launch failed requeued held")
        assert run.look().release() == ["released 14_[0], which nodes could not start"]

    @pytest.mark.parametrize(
        ("entry", "said"),
        [
            ("PENDING JobHeldUser", "is held; `scontrol release 12` lets it go"),
            ("PENDING JobHeldAdmin", "is held by an administrator, who alone can release it"),
            ("PENDING job requeued in held state", "`scontrol release 12` lets it go"),
            ("SPECIAL_EXIT job_requeued_in_held_state", "`scontrol release 12` lets it go"),
            ("SPECIAL_EXIT job requeued in special exit state", "`scontrol release 12` lets it go"),
            ("REQUEUE_HOLD JobHeldUser", "`scontrol release 12` lets it go"),
        ],
    )
    def test_what_a_person_holds_is_left_alone(
        self, run: SlurmRun, scontrol: list[list[str]], entry: str, said: str
    ) -> None:
        run.submit(12)
        run.queue(f"12_0 {entry}")
        watcher = run.look()
        cell = watcher.refresh().cells[0]
        assert cell.stuck
        assert said in str(cell.reason)
        assert watcher.release() == []
        assert scontrol == []

    def test_jobs_on_other_clusters_are_released_there(
        self, run: SlurmRun, scontrol: list[list[str]]
    ) -> None:
        number = run.submit()
        what = {"submission": number, "part": 0, "link": 0, "offset": 0, "tasks": 4}
        run.folder.journal("submitted", **what, job=12, cluster="west")
        run.queue("12_0 PENDING launch failed requeued held")
        assert run.look().release()
        assert scontrol == [["scontrol", "--clusters=west", "release", "12_[0]"]]

    def test_a_refusal_is_said(self, run: SlurmRun, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(command: list[str]) -> str:
            raise SlurmError("scontrol: Access denied")

        run.submit(12)
        run.queue("12_0 PENDING launch failed requeued held")
        monkeypatch.setattr(states, "run", refuse)
        (line,) = run.look().release()
        assert "not released" in line
        assert "Access denied" in line

    @pytest.mark.parametrize("releases", [True, False])
    def test_only_who_runs_the_cells_releases_while_following(
        self, run: SlurmRun, scontrol: list[list[str]], releases: bool
    ) -> None:
        """Once for each answer of squeue, however often the files are looked at meanwhile."""
        run.submit(12, cells=[[0, 0]])
        run.queue("12_0 PENDING launch failed requeued held")
        watcher = SlurmWatcher(run.folder)
        said: list[str] = []
        shown: list[Any] = []

        def show(status: Any) -> None:
            shown.append(status)
            if len(shown) == 2:
                run.queue()
                watcher._asked = float("-inf")

        follow(watcher, show, said.append, releases=releases)
        assert len(scontrol) == int(releases)
        assert [line for line in said if line.startswith("released 12_[0]")] == said
        assert len(said) == int(releases)


def test_slurm_is_asked_at_most_so_often(run: SlurmRun) -> None:
    run.submit(12)
    run.queue("12_[0-3] PENDING Priority")
    watcher = SlurmWatcher(run.folder)
    for _ in range(5):
        watcher.ask(30)
        watcher.refresh()
    assert run.questions == ["squeue"]


def test_a_run_is_followed_until_nothing_is_left(run: SlurmRun) -> None:
    run.submit(12)
    run.lines = SlurmError("squeue: no controller")
    watcher = SlurmWatcher(run.folder)
    said: list[str] = []

    def show(status: Any) -> None:
        run.queue()
        watcher._asked = float("-inf")

    status = follow(watcher, show, said.append)
    assert [("no controller" in line) for line in said] == [True]
    assert status.counts() == {"lost": 4}


def test_who_looks_at_a_run(tmp_path: Path, run: SlurmRun) -> None:
    local = FakeRun(tmp_path, make_cells(1), run_id="local")
    local.folder.journal("submitted", submission=1, part=0, tasks=1)
    assert isinstance(watch(local.folder), LocalWatcher)
    run.submit(12)
    assert isinstance(watch(run.folder), SlurmWatcher)


class TestSettled:
    """Calls of sbatch of which the journal does not say how they ended."""

    @pytest.fixture
    def cut_off(self, run: SlurmRun) -> Callable[[str], SlurmRun]:
        def make(last: str) -> SlurmRun:
            run.submit(11)
            number = run.submit()
            what = {"submission": number, "part": 0, "link": 0, "offset": 0, "tasks": 4}
            run.folder.journal("submitting", **what)
            if last != "submitting":
                run.folder.journal(last, **what)
            return run

        return make

    def found(self, run: SlurmRun, *jobs: int) -> list[tuple[str, int | None]]:
        script = run.folder.scripts / "002.sh"
        lines = [f"{job}_[0-3]{BAR}PENDING{BAR}None{BAR}{script} 0" for job in jobs]
        lines.append(f"99_0{BAR}RUNNING{BAR}None{BAR}{run.folder.scripts}/001.sh 0")
        entries = settled(run.folder, read_journal(run.folder), Queue(lines))
        return [(entry["event"], entry.get("job")) for entry in entries]

    @pytest.mark.parametrize("last", ["submitting", "unclear"])
    def test_its_job_is_in_the_queue(self, cut_off: Callable[[str], SlurmRun], last: str) -> None:
        run = cut_off(last)
        assert self.found(run, 12) == [("submitted", 12)]

    def test_its_job_has_left_output(self, cut_off: Callable[[str], SlurmRun]) -> None:
        run = cut_off("submitting")
        run.folder.tasks.joinpath("002.13_3.out").touch()
        run.folder.tasks.joinpath("001.14_3.out").touch()
        assert self.found(run) == [("submitted", 13)]

    def test_there_is_none(self, cut_off: Callable[[str], SlurmRun]) -> None:
        run = cut_off("submitting")
        assert self.found(run) == [("vanished", None)]

    @pytest.mark.parametrize("last", ["refused", "vanished"])
    def test_what_is_known_is_not_looked_for(
        self, cut_off: Callable[[str], SlurmRun], last: str
    ) -> None:
        assert self.found(cut_off(last), 12) == []


def test_tasks_of_packed_cells_in_several_arrays(run: SlurmRun) -> None:
    """Five cells of which the middle one is not submitted, two in a task, one task in an array."""
    record = {"created": stamp(1), "cells": [[0, 1], [3, 3]], "pack": 2}
    number = run.folder.write_submission(record)
    for part, job in enumerate((21, 22)):
        what = {"submission": number, "part": part, "link": 0, "offset": part, "tasks": 1}
        run.folder.journal("submitted", **what, job=job, cluster=None)
    found = submitted_tasks(run.folder, read_journal(run.folder))
    assert {cell: tasks[0][:2] for cell, tasks in found.items()} == {
        0: (21, 0),
        1: (21, 0),
        3: (22, 0),
    }


def test_a_failed_cell_that_was_submitted_again_is_pending(run: SlurmRun) -> None:
    """Also after a first submission whose rest is still in the queue."""
    run.submit(12, 13)
    run.start(0, 12, 0)
    run.end(0, "application", ago=10)
    run.queue("13_[0-3] PENDING Dependency")
    watcher = run.look()
    assert watcher.refresh().cells[0].state == "failed"
    assert watcher.taken(watcher.refresh()) == {1, 2, 3}
    run.submit(14, cells=[[0, 0]], ago=5)
    run.queue("14_[0] PENDING Resources", "13_[0-3] PENDING Dependency")
    watcher.ask()
    assert watcher.refresh().cells[0].state == "pending"
    assert watcher.taken(watcher.refresh()) == {0, 1, 2, 3}
    # It fails again.
    run.start(0, 14, 0, ago=4, attempt=2)
    run.end(0, "application", ago=1)
    run.queue()
    watcher.ask()
    assert watcher.refresh().cells[0].state == "failed"
