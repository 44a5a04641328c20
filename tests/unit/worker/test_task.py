"""The worker, as the batch script starts it: real processes, a run folder made by hand."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.unit.worker.worker_run import Run

RESUMABLE = """
import os, pathlib, signal, sys, time
import hpcml
state = pathlib.Path(os.environ["HPCML_CELL_DIR"], "checkpoints", "state")
stop = []
signal.signal(signal.SIGUSR1, lambda *_: stop.append(1))
step = int(state.read_text()) if state.exists() else 0
while step < 40:
    step += 1
    hpcml.report(step=step, total_steps=40, loss=1 / step)
    time.sleep(0.05)
    if stop:
        state.write_text(str(step))
        sys.exit(75)
"""


def test_done_writes_the_result(tmp_path: Path) -> None:
    run = Run(tmp_path, ["import hpcml; hpcml.report(step=2, loss=0.5); print('out')"])
    assert run.run() == 0
    result = json.loads((run.folder.cell_dir("cell0") / "result.json").read_text())
    assert result["metrics"] == {"loss": 0.5}
    assert result["step"] == 2
    assert [event["event"] for event in run.events()] == ["started", "ended"]
    assert (run.folder.cell_dir("cell0") / "log.1.out").read_text() == "out\n"


def test_done_cells_do_not_run_again(tmp_path: Path) -> None:
    run = Run(tmp_path, ["pass"])
    assert run.run() == 0
    assert run.run() == 0
    assert len(run.events(kind="started")) == 1


def test_a_failure_has_its_cause_and_last_words(tmp_path: Path) -> None:
    run = Run(tmp_path, ["import sys; print('it broke', file=sys.stderr); sys.exit(3)"])
    assert run.run() == 1
    (ended,) = run.events(kind="ended")
    assert ended["cause"] == "application"
    assert ended["reason"] == "exit code 3: it broke"


def test_a_program_that_does_not_exist_is_said(tmp_path: Path) -> None:
    run = Run(tmp_path, ["pass"])
    cells = run.folder.path / "cells.jsonl"
    cells.write_text(cells.read_text().replace(sys.executable, "/no/such/program"))
    assert run.run() == 1
    (ended,) = run.events(kind="ended")
    assert ended["code"] == 127
    assert "/no/such/program" in ended["reason"]


@pytest.mark.parametrize("budget", [0, 2])
def test_application_errors_have_a_budget(tmp_path: Path, budget: int) -> None:
    run = Run(tmp_path, ["raise SystemExit(1)"], retry={"application": budget})
    assert run.run() == 1
    assert len(run.events(kind="started")) == 1 + budget
    assert [event["again"] for event in run.events(kind="ended")] == [True] * budget + [False]


def test_a_new_submission_has_a_new_budget(tmp_path: Path) -> None:
    run = Run(tmp_path, ["raise SystemExit(1)"], retry={"application": 1})
    assert run.run() == 1
    assert run.run(submission=run.submit()) == 1
    assert len(run.events(kind="started")) == 4


def test_a_job_that_begins_again_leaves_failed_cells_alone(tmp_path: Path) -> None:
    """One cell of a task failed, the other wants to go on: only that one does."""
    once = (
        "import os, sys, hpcml; first = os.environ['HPCML_ATTEMPT'] == '1'; "
        "hpcml.report(step=1); sys.exit(75 * first)"
    )
    run = Run(tmp_path, ["raise SystemExit(1)", once], pack=2, retry={"application": 1})
    assert run.run() == 75
    assert run.run() == 1
    assert len(run.events(0, "started")) == 2
    assert [event["cause"] for event in run.events(1, "ended")] == ["stopped", "done"]


def test_a_killed_payload_is_no_application_error(tmp_path: Path) -> None:
    run = Run(tmp_path, ["import os; os.kill(os.getpid(), 9)"], retry={"killed": 1})
    assert run.run() == 1
    assert [event["cause"] for event in run.events(kind="ended")] == ["killed", "killed"]


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_asks_for_another_run(tmp_path: Path, signum: int) -> None:
    program = RESUMABLE.replace("signal.SIGUSR1", f"signal.Signals({int(signum)})")
    run = Run(tmp_path, [program])
    worker = run.start()
    run.wait_for_step(step=3)
    worker.send_signal(signum)
    assert worker.wait(20) == 75
    (ended,) = run.events(kind="ended")
    assert ended["cause"] == "stopped"
    assert ended["step"] < 40
    assert run.run() == 0
    lines = (run.folder.cell_dir("cell0") / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == list(range(1, 41))


def test_a_signal_reaches_a_program_behind_a_shell(tmp_path: Path) -> None:
    run = Run(tmp_path, [RESUMABLE])
    cells = run.folder.path / "cells.jsonl"
    cell = json.loads(cells.read_text())
    cell["payload"]["argv"] = ["bash", "-c", '"$@"', "-", *cell["payload"]["argv"]]
    cells.write_text(json.dumps(cell) + "\n")
    worker = run.start()
    run.wait_for_step(step=3)
    worker.send_signal(signal.SIGUSR1)
    assert worker.wait(20) == 75
    assert (run.folder.cell_dir("cell0") / "checkpoints" / "state").exists()


def test_the_stop_file_is_a_second_channel(tmp_path: Path) -> None:
    run = Run(tmp_path, [RESUMABLE])
    worker = run.start()
    run.wait_for_step(step=3)
    (run.folder.cell_dir("cell0") / "stop").touch()
    assert worker.wait(20) == 75
    (event,) = run.events(kind="signal")
    assert event["signal"] == "stop file"


def test_where_a_library_takes_the_signal_the_file_is_there(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, time, hpcml\n"
        "for number in (10, 12, 15): signal.signal(number, lambda *_: 0)\n"
        "hpcml.report(step=1, x=0)\n"
        "while not os.path.exists(os.environ['HPCML_STOP_FILE']): time.sleep(0.05)\n"
        "sys.exit(75)"
    )
    run = Run(tmp_path, [program])
    worker = run.start()
    run.wait_for_step()
    worker.send_signal(signal.SIGUSR1)
    assert worker.wait(60) == 75
    (ended,) = run.events(kind="ended")
    assert (ended["code"], ended["cause"]) == (75, "stopped")
    assert not (run.folder.cell_dir("cell0") / "stop").exists()


def test_a_payload_that_ignores_the_request_is_killed_after_the_lead(tmp_path: Path) -> None:
    program = (
        "import signal,time,hpcml; signal.signal(10, lambda *_: 0)\nhpcml.report(step=1, x=0)\n"
    )
    run = Run(tmp_path, [program + "while True: time.sleep(1)"], lead=1)
    worker = run.start()
    run.wait_for_step()
    worker.send_signal(signal.SIGUSR1)
    assert worker.wait(20) == 75
    (ended,) = run.events(kind="ended")
    assert ended["code"] == -9


def test_two_stops_without_progress_end_the_cell(tmp_path: Path) -> None:
    run = Run(tmp_path, ["import time; time.sleep(60)"])
    for attempt, expected in enumerate((75, 1), 1):
        worker = run.start()
        run.wait_for_start(attempt)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(20) == expected
    assert run.events(kind="ended")[-1]["cause"] == "no_progress"


def test_a_dead_worker_takes_its_payload_along(tmp_path: Path) -> None:
    run = Run(tmp_path, [RESUMABLE])
    worker = run.start()
    run.wait_for_step(step=2)
    worker.kill()
    worker.wait()
    size = 0
    for _ in range(20):
        time.sleep(0.2)
        previous, size = size, (run.folder.cell_dir("cell0") / "metrics.jsonl").stat().st_size
        if size == previous:
            break
    else:
        raise AssertionError("the payload goes on without its worker")
    assert run.run() == 0
    assert [event["attempt"] for event in run.events(kind="started")] == [1, 2]


def test_one_cell_never_has_two_attempts_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path, [RESUMABLE])
    first = run.start()
    run.wait_for_step(step=2)
    second = run.start()
    assert first.wait(30) == 0
    assert second.wait(30) == 0
    assert len(run.events(kind="started")) == 1


def test_packed_cells_do_not_hurt_each_other(tmp_path: Path) -> None:
    programs = ["import time; time.sleep(0.5)", "raise SystemExit(7)", "print(1)", "print(2)"]
    run = Run(tmp_path, programs, pack=3)
    assert run.run(task=0) == 1
    assert [run.events(index, "ended")[0]["cause"] for index in range(3)] == [
        "done",
        "application",
        "done",
    ]
    assert not run.folder.cell_dir("cell3").exists()
    assert run.run(task=1) == 0


def test_packed_cells_share_the_gpus_out(tmp_path: Path) -> None:
    program = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    run = Run(tmp_path, [program] * 3, pack=3, resources={"gpus": 2})
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1,2,GPU-abc,4,5"
    try:
        assert run.run() == 0
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    seen = [(run.folder.cell_dir(f"cell{i}") / "log.1.out").read_text().strip() for i in range(3)]
    assert seen == ["0,1", "2,GPU-abc", "4,5"]


def test_a_submission_of_some_cells_runs_those(tmp_path: Path) -> None:
    run = Run(tmp_path, ["print(1)"] * 6)
    number = run.submit(cells=[[1, 1], [3, 5]], pack=2)
    assert run.run(task=0, submission=number) == 0
    assert sorted(path.name for path in run.folder.cells_dir.iterdir()) == ["cell1", "cell3"]
    assert run.run(task=1, submission=number) == 0
    assert len(list(run.folder.cells_dir.iterdir())) == 4


def test_a_cancelled_cell_does_not_start(tmp_path: Path) -> None:
    from hpcml.runs.cancel import cancel_cell

    run = Run(tmp_path, ["print(1)"])
    cancel_cell(run.folder, "cell0")
    assert run.run() == 1
    assert not run.events(kind="started")


def test_ranks_find_each_other(tmp_path: Path) -> None:
    program = (
        "import os; print(*(os.environ[n] for n in "
        "'RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR'.split()))"
    )
    run = Run(tmp_path, [program], resources={"processes": 2})
    assert run.run() == 0
    cell = run.folder.cell_dir("cell0")
    assert (cell / "log.1.out").read_text() == "0 0 2 2 0 127.0.0.1\n"
    assert (cell / "log.1.1.out").read_text() == "1 1 2 2 0 127.0.0.1\n"


def test_one_failing_rank_ends_the_others(tmp_path: Path) -> None:
    program = "import os,time\nif os.environ['RANK'] == '1': raise SystemExit(9)\ntime.sleep(60)"
    run = Run(tmp_path, [program], resources={"processes": 2})
    begun = time.monotonic()
    assert run.run() == 1
    assert time.monotonic() - begun < 30
    assert run.events(kind="ended")[0]["code"] == 9


def test_scratch_folders_are_private_and_removed(tmp_path: Path) -> None:
    program = "import os, pathlib; p = pathlib.Path(os.environ['TMPDIR'], 'x'); p.touch(); print(p)"
    run = Run(tmp_path, [program] * 2, pack=2)
    assert run.run() == 0
    paths = [(run.folder.cell_dir(f"cell{i}") / "log.1.out").read_text().strip() for i in range(2)]
    assert paths[0] != paths[1]
    assert not any(Path(path).parent.exists() for path in paths)


def test_a_line_that_a_crash_cut_off_hurts_nobody(tmp_path: Path) -> None:
    run = Run(tmp_path, ["import hpcml; hpcml.report(step=1, loss=1)"])
    cell = run.folder.cell_dir("cell0")
    cell.mkdir()
    (cell / "events.jsonl").write_text('{"event":"started","attempt":1,"submission":1,"ho')
    (cell / "metrics.jsonl").write_text('{"step":1,"lo')
    assert run.run() == 0
    assert json.loads((cell / "result.json").read_text())["metrics"] == {"loss": 1}


def test_the_environment_of_a_cell_arrives_unchanged(tmp_path: Path) -> None:
    run = Run(tmp_path, ["import os; print(os.environ['LETTER'])"])
    assert run.run() == 0
    assert (run.folder.cell_dir("cell0") / "log.1.out").read_text() == "ä '$(x)\n"


def test_a_cell_without_halving_has_no_rung_of_the_cell_that_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training would end where the outer one's rung does, and take that for its end."""
    monkeypatch.setenv("HPCML_RUNG", "1")
    monkeypatch.setenv("HPCML_STEPS", "5")
    run = Run(
        tmp_path, ["import os; print('HPCML_RUNG' in os.environ, 'HPCML_STEPS' in os.environ)"]
    )
    assert run.run() == 0
    assert (run.folder.cell_dir("cell0") / "log.1.out").read_text() == "False False\n"


class Nodes:
    """The workers of one task on several nodes, here all on this machine."""

    def __init__(self, run: Run, count: int) -> None:
        self.workers = []
        os.environ.update(HPCML_NODE_COUNT=str(count), HPCML_LAUNCH=str(time.time()))
        for rank in range(count):
            os.environ["HPCML_NODE_RANK"] = str(rank)
            self.workers.append(run.start())
        for name in ("HPCML_NODE_RANK", "HPCML_NODE_COUNT", "HPCML_LAUNCH"):
            del os.environ[name]

    def wait(self) -> list[int]:
        return [worker.wait(60) for worker in self.workers]


def test_ranks_of_several_nodes_are_one_cell(tmp_path: Path) -> None:
    program = "import os; print(*(os.environ[n] for n in 'RANK WORLD_SIZE MASTER_PORT'.split()))"
    run = Run(tmp_path, [program], resources={"processes": 2, "nodes": 2})
    assert Nodes(run, 2).wait() == [0, 0]
    cell = run.folder.cell_dir("cell0")
    logs = [cell / "log.1.out", *(cell / f"log.1.{rank}.out" for rank in (1, 2, 3))]
    seen = [path.read_text().split() for path in logs]
    assert [line[:2] for line in seen] == [[str(rank), "4"] for rank in range(4)]
    assert len({line[2] for line in seen}) == 1
    assert len(run.events(kind="started")) == 1


def test_a_failure_on_another_node_is_the_cells(tmp_path: Path) -> None:
    program = (
        "import os, sys, time\nif os.environ['NODE_RANK'] == '1': sys.exit('node one broke')\n"
        "time.sleep(60)"
    )
    run = Run(tmp_path, [program], resources={"nodes": 2}, retry={"application": 1})
    assert Nodes(run, 2).wait() == [1, 0]
    assert [event["reason"] for event in run.events(kind="ended")] == [
        "node 1: exit code 1: node one broke"
    ] * 2


def test_a_stop_reaches_all_nodes(tmp_path: Path) -> None:
    program = RESUMABLE.replace('"state"', '"state" + os.environ["RANK"]')
    run = Run(tmp_path, [program], resources={"nodes": 2})
    nodes = Nodes(run, 2)
    run.wait_for_step(step=3)
    nodes.workers[0].send_signal(signal.SIGUSR1)
    assert nodes.wait() == [75, 0]
    cell = run.folder.cell_dir("cell0")
    assert (cell / "checkpoints" / "state0").exists()
    assert (cell / "checkpoints" / "state1").exists()
    assert Nodes(run, 2).wait() == [0, 0]


def test_nodes_are_sent_home_from_a_cell_that_is_done(tmp_path: Path) -> None:
    run = Run(tmp_path, ["pass"], resources={"nodes": 2})
    assert Nodes(run, 2).wait() == [0, 0]
    assert Nodes(run, 2).wait() == [0, 0]
    assert len(run.events(kind="started")) == 1


def test_helpers_in_sessions_of_their_own_end_with_the_attempt(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'], "
        "start_new_session=True)"
    )
    run = Run(tmp_path, [program])
    assert run.run() == 0
    assert not marked(run.folder.cell_dir("cell0"))


def test_children_of_a_dead_attempt_end_before_the_next_begins(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, hpcml, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
        "hpcml.report(step=1, x=1)\ntime.sleep(300)"
    )
    run = Run(tmp_path, [program])
    worker = run.start()
    run.wait_for_step()
    worker.kill()
    worker.wait()
    before = marked(run.folder.cell_dir("cell0"))
    assert before
    second = run.start()
    deadline = time.monotonic() + 20
    while len(run.events(kind="started")) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not before & marked(run.folder.cell_dir("cell0"))
    second.send_signal(signal.SIGTERM)
    second.wait(20)


def marked(cell_dir: Path) -> set[int]:
    """The processes that belong to a cell, by their environment."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"HPCML_CELL_DIR={cell_dir}".encode() in (folder / "environ").read_bytes():
                found.add(int(folder.name))
        except OSError:
            continue
    return found


def test_scratch_folders_of_a_killed_attempt_are_removed(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        [
            "import os, time, hpcml; print(os.environ['TMPDIR'], flush=True)\n"
            "hpcml.report(step=1, x=1)\n"
            "time.sleep(0 if os.environ['HPCML_ATTEMPT'] == '2' else 300)"
        ],
    )
    worker = run.start()
    run.wait_for_step()
    worker.kill()
    worker.wait()
    scratch = Path((run.folder.cell_dir("cell0") / "log.1.out").read_text().strip())
    assert scratch.exists()
    assert run.run() == 0
    assert not scratch.exists()


@pytest.mark.parametrize("signum", [signal.SIGSEGV, 35])
def test_any_signal_has_a_name_and_hurts_no_neighbour(tmp_path: Path, signum: int) -> None:
    run = Run(tmp_path, [f"import os; os.kill(os.getpid(), {int(signum)})", "pass"], pack=2)
    assert run.run() == 1
    (ended,) = run.events(0, "ended")
    assert ended["reason"] == f"ended by {'SEGV' if signum == signal.SIGSEGV else 'signal 35'}"
    assert run.events(1, "ended")[0]["cause"] == "done"


def test_saved_is_said_only_of_what_was_saved(tmp_path: Path) -> None:
    program = (
        "import hpcml, time\nfor i in range(1, 99): hpcml.report(step=i, x=1); time.sleep(0.1)"
    )
    run = Run(tmp_path, [program])
    worker = run.start()
    run.wait_for_step(step=2)
    worker.send_signal(signal.SIGUSR1)
    assert worker.wait(20) == 75
    assert "without a word of having saved" in run.events(kind="ended")[0]["reason"]
