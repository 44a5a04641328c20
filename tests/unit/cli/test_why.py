"""`hpcml why`: the life of a cell in words and as data."""

from __future__ import annotations

import json
import os
import socket
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import Invoke
from tests.unit.launch.test_slurm_states import SlurmRun, stamp
from tests.unit.runs.fakes import FakeRun, make_cells

SETTINGS = {"resources": {"time": 600}, "retry": {"application": 1, "oom": 2, "killed": 0}}


def submitted(run: FakeRun, **fields: Any) -> int:
    record = {"created": stamp(100), "pack": 1, "code": "code/0123456789", "settings": SETTINGS}
    cells = [[0, len(run.cells) - 1]]
    number = run.folder.write_submission({"cells": cells, "scheduler": "local", **record, **fields})
    run.folder.journal("submitted", submission=number, part=0, tasks=len(run.cells))
    return number


def test_attempts_budgets_and_checkpoints(root: Path, invoke: Invoke) -> None:
    run = FakeRun(root, make_cells(2))
    number = submitted(run)
    run.start(0, 0, host="n1", submission=number, job="12_0")
    for step in (10, 20):
        folder = run.dir(0) / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"x" * 2048)
        files = {"weights": {"size": 2048 if step == 20 else 4096}}
        (folder / "manifest.json").write_text(json.dumps({"step": step, "files": files}))
        run.event(0, "checkpoint", step, step=step, path=str(folder))
    (run.dir(0) / "checkpoints" / "latest").write_text("step-20\n")
    run.event(0, "signal", 25, attempt=1, signal="USR1")
    run.end(0, "stopped", 30, "asked to stop (USR1), saved at step 20")
    for attempt in (2, 3):
        run.start(0, attempt * 100, attempt, host="n2", submission=number)
        run.end(0, "oom", attempt * 100 + 65, "out of memory", attempt)
    run.start(0, 400, 4, host="n3", submission=number)
    aside = "checkpoints/damaged-step-20-1"
    run.event(0, "damaged", 401, path=str(run.dir(0) / aside), reason="weights is missing")
    run.end(0, "application", 410, "exit code 3: [bold]\x1b[31mboom", 4)
    out = invoke("why", "toy", "0").output
    assert "\x1b" not in out
    for words in (
        "failed: exit code 3: [bold]\\x1b[31mboom",
        "submission 1 on this machine, 00:10:00 per attempt",
        "attempt 1 began on n1, job 12_0\n",
        "attempt 1: asked to stop (USR1)",
        "attempt 1 ended after 30s at step 20: stopped, asked to stop (USR1), saved at step 20; "
        "that uses no budget",
        "attempt 2 began on n2, from the checkpoint of step 20",
        "attempt 2 ended after 1m 05s: oom, out of memory; retry.oom is 2, of which 1 left",
        "attempt 3 ended after 1m 05s: oom, out of memory; retry.oom is 2, of which 0 left",
        "attempt 4 began on n3, from the checkpoint of step 10",
        "attempt 4: damaged-step-20-1 was set aside: weights is missing",
        "retry.application is 1, of which 0 left",
        "step-10  2.0 KiB, NOT whole\n",
        "step-20  2.0 KiB, all files are there (latest)",
        "learning_rate  0.001",
    ):
        assert words in out, (words, out)
    told = [line[23:].split(":")[0] for line in out.splitlines() if line.startswith("  20")]
    assert [line.split()[1] for line in told] == list("11112233444")  # in the order of time
    assert told[0].startswith("submission 1")
    document = json.loads(invoke("why", "toy", "0", "--json").output)
    assert [a["cause"] for a in document["attempts"]] == ["stopped", "oom", "oom", "application"]
    assert [a["resumed_from"] for a in document["attempts"]] == [None, 20, 20, 10]
    assert [c["whole"] for c in document["checkpoints"]] == [False, True]
    assert document["submissions"][0]["limit"] == 600
    never = invoke("why", "toy", "1").output
    assert "pending\n" in never
    assert " began on " not in never


def test_a_run_that_was_never_submitted(fake: FakeRun, invoke: Invoke) -> None:
    out = invoke("why", "toy", "4").output
    assert "never submitted: give the sweep command again" in out
    assert "no copy of the code" in out


def test_an_attempt_that_goes_on_is_last(fake: FakeRun, invoke: Invoke) -> None:
    fake.append(3, "events.jsonl", {"time": stamp(60), "event": "cancelled"})
    began = {"event": "started", "attempt": 2, "host": socket.gethostname(), "pid": os.getpid()}
    fake.append(3, "events.jsonl", {"time": stamp(5), **began})
    with fake.alive(3):
        out = invoke("why", "toy", "3").output
    times = [line[2:21] for line in out.splitlines() if "attempt 2" in line or "person" in line]
    assert [datetime.fromisoformat(time) for time in times] == sorted(
        map(datetime.fromisoformat, times)
    )
    assert "attempt 2 goes on at step 40" in out
    assert len(times) == 3
    assert "attempt 2 ended without a word at step 40" in invoke("why", "toy", "3").output


def test_why_it_waits_in_the_queue(
    root: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SlurmRun(root, monkeypatch)
    monkeypatch.setattr("hpcml.runs.find.find_run", lambda *_: run.folder)
    run.submit(12, 13, code="code/0123456789", settings=SETTINGS)
    (run.folder.scripts / "001.sh").write_text("#SBATCH --partition='gpu,long'\n")
    run.queue("12_[0-3] PENDING JobHeldUser", "13_[0-3] PENDING Dependency")
    out = invoke("why", "toy", "2").output
    assert "pending: is held; `scontrol release 12` lets it go\n" in out
    assert "submission 1 to Slurm, job 12_2, 13_2, partition gpu,long, 00:10:00 per attempt" in out
    assert json.loads(invoke("why", "toy", "2", "--json").output)["stuck"] is True


def test_where_a_halving_dropped_it(root: Path, invoke: Invoke) -> None:
    run = FakeRun(root, make_cells(4))
    halving = {"metric": "loss", "mode": "min", "cells": [4, 1], "steps": [10, 20]}
    run.folder.plan["halving"] = halving
    run.folder.plan_file.write_text(json.dumps(run.folder.plan))
    for index in range(4):
        run.start(index, rung=1)
        run.end(index, "rung")
        (run.dir(index) / "rungs").mkdir()
        result = {"metrics": {"loss": [3.0, 1.0, 2.0, None][index]}}
        (run.dir(index) / "rungs" / "1.json").write_text(json.dumps(result))
    (run.folder.path / "rungs").mkdir()
    (run.folder.path / "rungs" / "2.json").write_text(json.dumps({"cells": [1]}))
    out = invoke("why", "toy", "2").output
    assert "dropped: dropped at rung 1" in out
    dropped = "rung 1 (step 10): loss 2.000, place 2 of 4; dropped against cell 1 (1.000)"
    assert dropped in out
    kept = invoke("why", "toy", "1").output
    assert "loss 1.000, place 1 of 4; went on" in kept
    assert "rung 2 (step 20): no value of loss" in kept
    assert "rung 1 (step 10): no value of loss; dropped" in invoke("why", "toy", "3").output
