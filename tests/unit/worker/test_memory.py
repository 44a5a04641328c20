"""Cells that had too little memory: found out in each way that there is, and counted as such."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hpcml.worker import memory
from tests.unit.worker.worker_run import Run

HOG = "x = bytearray(400 << 20); print(len(x))"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        # As Slurm 22.05 writes them: without control groups, and with them; then 20.11 and 23.11.
        (
            "slurmstepd-n1: error: StepId=5.batch exceeded memory limit (33 > 10), being killed",
            "StepId=5.batch exceeded memory limit (33 > 10), being killed",
        ),
        ("slurmstepd: error: Exceeded job memory limit", "Exceeded job memory limit"),
        (
            "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=5.batch. Some of your "
            "processes may have been killed by the cgroup out-of-memory handler.",
            "Detected 1 oom-kill event(s) in StepId=5.batch. Some",
        ),
        (
            "slurmstepd: error: Detected 1 oom-kill event(s) in step 5.batch cgroup. Some of",
            "Detected 1 oom-kill event(s) in step 5.batch cgroup.",
        ),
        (
            "slurmstepd: error: Detected 2 oom_kill events in StepId=5.0. Some of the step tasks",
            "Detected 2 oom_kill events in StepId=5.0.",
        ),
        ("slurmstepd: error: *** JOB 5 ON n1 CANCELLED AT 2026-11-30T21:47:12 ***", None),
        ("my program: error: exceeded memory limit", None),
    ],
)
def test_what_slurm_says(tmp_path: Path, line: str, said: str | None) -> None:
    path = tmp_path / "001.5_0.err"
    path.write_text(f"before\n{line}\nafter\n")
    found = memory.slurm_said(str(path))
    assert found is None if said is None else str(found).startswith(said)
    # What was there before the attempt began is not about it.
    assert memory.slurm_said(str(path), path.stat().st_size) is None
    assert memory.slurm_said(str(tmp_path / "none")) is None


@pytest.fixture
def control_group() -> Iterator[Path]:
    """A control group of the kernel with 100 MB."""
    first = Path("/sys/fs/cgroup/memory")
    parent, limit = (
        (first, "memory.limit_in_bytes")
        if first.is_dir()
        else (Path("/sys/fs/cgroup"), "memory.max")
    )
    group = parent / f"hpcml-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(100 << 20))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"no right to limit memory: {error}")
    yield group
    deadline = time.monotonic() + 20
    while (group / "cgroup.procs").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    group.rmdir()


class TestTheKernel:
    """Kills within a control group, as it does where Slurm makes one for each job."""

    def run(self, run: Run, group: Path) -> int:
        worker = run.start(enter=group)
        _, errors = worker.communicate(timeout=60)
        assert "Traceback" not in errors, errors
        return worker.returncode

    @pytest.mark.parametrize("shell", [False, True])
    def test_kills_the_program(self, tmp_path: Path, control_group: Path, shell: bool) -> None:
        """Or the program that a shell runs, which then says 137."""
        run = Run(tmp_path, [HOG], retry={"oom": 1, "killed": 0}, shell=shell)
        assert self.run(run, control_group) == 1
        ends = run.events(kind="ended")
        assert [end["cause"] for end in ends] == ["oom", "oom"]
        assert ends[0]["code"] == (137 if shell else -9)
        assert "out of memory: the kernel killed it" in ends[0]["reason"]

    @pytest.mark.parametrize(("pack", "cause"), [(1, "oom"), (2, "application")])
    def test_kills_a_helper_of_the_program(
        self, tmp_path: Path, control_group: Path, pack: int, cause: str
    ) -> None:
        """The program then fails by itself. With another cell in the group nobody knows whose."""
        helper = f"subprocess.call([sys.executable, '-c', {HOG!r}])"
        program = f"import subprocess, sys; sys.exit({helper} and 3)"
        run = Run(tmp_path, [program, "pass"][:pack], pack=pack, scheduler="slurm")
        assert self.run(run, control_group) == 1
        (end,) = run.events(kind="ended")
        assert end["cause"] == cause

    def test_is_not_blamed_for_another_sigkill(self, tmp_path: Path, control_group: Path) -> None:
        run = Run(tmp_path, ["import os; os.kill(os.getpid(), 9)"])
        assert self.run(run, control_group) == 1
        assert run.events(kind="ended")[0]["cause"] == "killed"


@pytest.mark.parametrize("budget", [0, 2])
def test_a_program_can_say_so_itself(tmp_path: Path, budget: int) -> None:
    run = Run(
        tmp_path,
        ["import sys; print('CUDA out of memory', file=sys.stderr); sys.exit(71)"],
        retry={"oom": budget, "application": 9},
    )
    assert run.run() == 1
    ends = run.events(kind="ended")
    assert [end["again"] for end in ends] == [True] * budget + [False]
    assert {(end["cause"], end["reason"]) for end in ends} == {
        ("oom", "out of memory: CUDA out of memory")
    }


def test_of_several_ranks_the_one_without_memory_counts(tmp_path: Path) -> None:
    """The others fail because it is gone, and may be seen to end before it."""
    program = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1': time.sleep(1); sys.exit(71)\n"
        "sys.exit('lost connection to rank 1')"
    )
    run = Run(tmp_path, [program], resources={"processes": 2})
    assert run.run() == 1
    (end,) = run.events(kind="ended")
    assert (end["code"], end["cause"]) == (71, "oom")


class TestTheWholeJob:
    """Slurm killed the batch script and the worker, too: whoever comes next knows why."""

    SAID = "slurmstepd: error: StepId=9.batch exceeded memory limit (33 > 10), being killed\n"

    def lost(self, tmp_path: Path, said: str, **settings: object) -> Run:
        """A run whose only cell was lost in job 9; its stderr says ``said``."""
        run = Run(tmp_path, ["pass"], **settings)
        cell = run.folder.cell_dir("cell0")
        cell.mkdir()
        before = "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=9.batch.\n"
        (run.folder.tasks / "001.9_0.err").write_text(before + said)
        (cell / "events.jsonl").write_text(
            '{"time":"2026-01-01T00:00:00.000+00:00","event":"started","attempt":1,"submission":1,'
            f'"job":"9_0","host":"n1","pid":1,"stderr":{len(before)}}}\n'
        )
        return run

    @pytest.mark.parametrize(("budget", "code"), [(0, 1), (1, 0)])
    def test_the_next_job_of_a_chain_counts_it(
        self, tmp_path: Path, budget: int, code: int
    ) -> None:
        run = self.lost(tmp_path, self.SAID, retry={"oom": budget})
        assert run.run() == code
        end = run.events(kind="ended")[0]
        assert (end["attempt"], end["cause"], end["again"]) == (1, "oom", budget == 1)
        assert "StepId=9.batch exceeded memory limit (33 > 10)" in end["reason"]
        assert len(run.events(kind="started")) == 1 + budget

    def test_another_submission_has_a_budget_of_its_own(self, tmp_path: Path) -> None:
        run = self.lost(tmp_path, self.SAID)
        assert run.run(submission=run.submit()) == 0
        assert [end["cause"] for end in run.events(kind="ended")] == ["oom", "done"]

    def test_what_was_said_before_the_attempt_is_not_about_it(self, tmp_path: Path) -> None:
        run = self.lost(tmp_path, "slurmstepd: error: *** JOB 9 ON n1 CANCELLED ***\n")
        assert run.run() == 0
        assert [end["cause"] for end in run.events(kind="ended")] == ["done"]
